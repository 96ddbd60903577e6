"""Gradients that stay, where another plan comes into force while a loop has not dropped them."""

from dataclasses import replace

import pytest
import torch
from planned_runs import LITTLE_HOST, WEIGHT_BYTES, adamw, gpt, loss_of, same, values
from sampled import sampled
from staying_runs import begun, held_bytes, many, train

import zcompile
from zcompile.frontend import replan

DROPPED, IN_ALL = 4, 8
"""Steps that set gradients to None, and all: the review behind the sixth falls among the others."""


@pytest.fixture
def plans(monkeypatch) -> list[int]:
    """How many steps were seen when each plan came into force. From plan to plan the machine seems
    three times as slow, and a plan that was made anew is always taken."""
    costs_of, apply, applied = replan.costs_of, replan.StepController.apply, []

    def slower(session):
        found = costs_of(session)
        regions = {name: s * 3.0 ** len(applied) for name, s in found.regions.items()}
        return replace(found, regions=regions)

    def noted(controller, plan):
        applied.append(controller._seen)
        apply(controller, plan)

    monkeypatch.setattr(replan, "costs_of", slower)
    monkeypatch.setattr(replan, "replan_pays", lambda *_: True)
    monkeypatch.setattr(replan.StepController, "apply", noted)
    return applied


@pytest.mark.parametrize("where", sampled(["host", "disk"], "disk"))
def test_gradients_that_nobody_drops_are_summed_under_another_plan(plans, tmp_path, where):
    def loop(forward, optimizer) -> None:
        train(forward, optimizer, 0, DROPPED)
        for number in range(DROPPED, IN_ALL):
            loss_of(forward, many(10 * number)).backward()
            optimizer.step()

    plain = gpt()
    loop(plain, adamw(plain))
    budget = held_bytes() + WEIGHT_BYTES // 2
    plans.clear()
    room = {"disk": tmp_path, "host_memory": LITTLE_HOST} if where == "disk" else {}
    model, compiled, optimizer = begun(budget, 0, **room)
    loop(compiled, optimizer)
    assert max(plans) > DROPPED
    assert zcompile.stats(model)["peak"]["together"] <= budget
    assert same(model, values(plain))
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(p.grad.on_host(), q.grad) for p, q in pairs)
