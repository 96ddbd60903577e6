"""What `zinf plan` changes in its process, and puts back."""

import gc
from argparse import Namespace

import pytest

from zcompile.cli.plan import COLLECT_AFTER, plan


@pytest.mark.parametrize("model", ["torch.nn:Identity", "torch.nn:missing"])
def test_the_garbage_collector_is_as_it_was_after_a_plan_and_after_an_error(zinf, model):
    before = gc.get_threshold()
    zinf("plan", model, "--machine", "desktop-24gb", "--shape", "4")
    assert gc.get_threshold() == before


def test_it_collects_rarely_meanwhile(monkeypatch):
    seen = []
    monkeypatch.setattr("zcompile.cli.plan.scale_answer", lambda _: seen.append(gc.get_threshold()))
    plan(Namespace(paper="table-3", model=None, plot=None, sweep=None))
    assert [first for first, *_ in seen] == [COLLECT_AFTER]
