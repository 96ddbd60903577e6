"""The lower bound of what calls hold: no budget that works is below it, and it is not nothing."""

from dataclasses import replace

import pytest
import torch
from joint import captured, catch
from sampled import sampled
from small_models import UNALIKE
from torch import nn

import zcompile
from zcompile.errors import BudgetExceeded
from zcompile.passes.choose_tiles import ChooseTiles, _CutSearch
from zcompile.passes.pipeline import pipeline

BLOCK = "transformer block"


def refusal(joint, budget):
    """What the pipeline says to a budget; None if everything fits."""
    try:
        joint.copy(budget_bytes=budget).through(*pipeline(zcompile.Config(device="cpu")))
    except BudgetExceeded as error:
        return error
    return None


@pytest.mark.parametrize("name", sampled([BLOCK, *UNALIKE], *UNALIKE[:2]))
def test_no_budget_that_works_is_refused_at_once(name, monkeypatch):
    joint = captured(name)
    bound = refusal(joint, 1)
    assert bound.where == "what no plan can split"
    assert "a lower bound, found at once" in str(bound)
    assert bound.needed_bytes > 0
    assert refusal(joint, bound.needed_bytes - 1).where == bound.where
    with monkeypatch.context() as patched:
        patched.setattr(ChooseTiles, "_refuse_hopeless", lambda *_: None)
        works = refusal(joint, 1).needed_bytes
    assert bound.needed_bytes <= works
    assert refusal(joint, works) is None


def test_what_one_op_reads_and_makes_is_there_at_once():
    """x is the caller's; the hidden values enter and leave an op that no slice runs over."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(8, 64, bias=False)

        def forward(self, x):
            return torch.cumsum(self.up(x), 0)

    error = refusal(catch(Net(), torch.randn(16, 8)), 1)
    assert sorted(error.alive) == [("a row of up.weight", 32), ("cumsum", 4096), ("mm (up)", 4096)]


def test_nothing_is_tried_below_it(monkeypatch):
    monkeypatch.setattr("zcompile.passes.trial.Trial.on_copy", lambda *_: pytest.fail("a trial"))
    assert refusal(captured("transformer block"), 1) is not None


@pytest.mark.parametrize(
    "name", sampled([BLOCK, *UNALIKE], "tied embeddings", "view in two places")
)
@pytest.mark.slow
def test_no_cuts_that_fit_are_passed_over(name, monkeypatch):
    """Where the lower bound says so, all cuts are tried out all the same, and refused."""
    joint, passed_over = captured(name), []
    search_of = _CutSearch.search

    def watched(self, most=None):
        search = search_of(self, most)

        def hopeless(cuts, budget):
            if search.hopeless(cuts, budget):
                passed_over.append(cuts)
                assert self.refused(cuts, budget) is not None, (cuts, budget)
            return False

        return replace(search, hopeless=hopeless)

    monkeypatch.setattr(_CutSearch, "search", watched)
    works = refusal(joint, 1).needed_bytes
    for budget in (works, 2 * works, 4 * works):
        refusal(joint, budget)
    if name in ("transformer block", "gpt"):
        assert passed_over
