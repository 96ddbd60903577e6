"""The order of passes, what each needs, and that a plan depends on nothing but graph and budget."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from joint import captured, least_budget
from sampled import sampled
from small_models import SMALL_MODELS, UNALIKE

from zcompile.config import Config
from zcompile.errors import BudgetExceeded, GraphInvalid, PassOrder
from zcompile.ir import printer
from zcompile.passes.base import Fact, Pass
from zcompile.passes.gather_params import GatherParams
from zcompile.passes.narrow_params import NarrowParams
from zcompile.passes.pipeline import pipeline, run
from zcompile.passes.plan_activations import solve
from zcompile.passes.plan_activations.decision import NOMINAL_BUDGET
from zcompile.passes.plan_activations.problem import KEEP
from zcompile.passes.split_budget import SplitBudget

PASSES = pipeline(Config(device="cpu"))


def test_each_pass_finds_what_it_needs_and_gives_something():
    facts = {Fact.PHASES_ASSIGNED}
    for pass_ in PASSES:
        assert pass_.needs <= facts
        assert pass_.gives - facts, "a pass that gives nothing new has no reason to run"
        facts |= pass_.gives
    assert facts == set(Fact)


def test_every_pass_shows_the_graph_before_and_after():
    for pass_ in PASSES:
        assert "->" in type(pass_).__doc__
        assert pass_.name == pass_.name.lower().replace("_", "-")


def test_a_pass_before_its_time_is_refused_with_the_order():
    joint = captured("mlp").copy()
    with pytest.raises(PassOrder) as caught:
        run(joint.gm, joint.plan, (GatherParams(), SplitBudget()))
    assert str(caught.value) == (
        "split-budget needs regions cut, which no earlier pass gives "
        "(order: gather-params > split-budget)"
    )


def test_a_wish_becomes_a_field_of_a_pass():
    passes = pipeline(Config(device="cpu", param_dtype=torch.bfloat16))
    assert [p.dtype for p in passes if isinstance(p, NarrowParams)] == [torch.bfloat16]


class Watched:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str]] = []

    def before(self, graph, plan) -> None:
        self.rows.append((0, "captured"))

    def after(self, step, name, graph, plan) -> None:
        self.rows.append((step, name))


def test_the_watcher_is_told_of_every_pass_in_order():
    joint, watch = captured("mlp").copy(), Watched()
    run(joint.gm, joint.plan, PASSES, watch=watch)
    assert watch.rows == [(0, "captured"), *((i, p.name) for i, p in enumerate(PASSES, start=1))]


class Forgets(Pass):
    """Loses the handles."""

    name, needs, gives = "forgets", frozenset(), frozenset()

    def rewrite(self, graph, plan):
        return replace(plan, params={})


def test_a_pass_that_breaks_a_rule_is_named():
    joint = captured("mlp").copy()
    with pytest.raises(GraphInvalid, match=r"after forgets, .* names no known parameter"):
        run(joint.gm, joint.plan, (Forgets(),))


@pytest.mark.parametrize("name", sampled(SMALL_MODELS, *UNALIKE))
def test_the_same_graph_gives_the_same_plan(name):
    one, other = (captured(name).through(*PASSES) for _ in range(2))
    assert one.plan == other.plan
    assert printer.text(one.graph) == printer.text(other.graph)


@pytest.mark.parametrize(
    "name", sampled(["transformer block", "module called twice", "dropout"], "dropout")
)
def test_every_budget_from_the_least_on_is_kept(name):
    joint = captured(name)
    least = least_budget(joint)
    with pytest.raises(BudgetExceeded):
        joint.copy(budget_bytes=511).through(*PASSES)
    for budget in range(least, 2 * least, max(512, least // 12 // 512 * 512)):
        plan = joint.copy(budget_bytes=budget).through(*PASSES).plan
        assert plan.budget_bytes + plan.beside.nbytes == budget
        assert 0 < plan.least_bytes <= plan.budget_bytes


def test_what_a_trial_of_a_cut_graph_chose_is_not_searched_for_again(monkeypatch):
    searched, split = [], solve.split

    def counted(*asked):
        searched.append(asked)
        return split(*asked)

    monkeypatch.setattr(solve, "split", counted)
    passes = pipeline(Config(device="cpu"), lambda: NOMINAL_BUDGET)
    joint = captured("transformer block")
    plan = joint.copy(budget_bytes=least_budget(joint) * 4 // 5).through(*passes).plan
    assert plan.cuts
    assert any(row.action != KEEP for row in plan.activations)
    assert searched
    assert all(one != other for one, other in combinations(searched, 2))
