"""Gradients that stay where backward made them: what that saves, and that nobody can tell."""

import json
from dataclasses import replace

import pytest
import torch
from planned_runs import (
    WEIGHT_BYTES,
    adamw,
    gpt,
    loss_of,
    made_on,
    review_no_plan,
    same,
    values,
)
from sampled import sampled
from staying_runs import (
    STEPS,
    begun,
    held_bytes,
    held_gradients,
    many,
    plainly_trained,
    train,
)
from torch import nn

import zcompile
from zcompile.frontend.backend import zinf
from zcompile.frontend.offload import session_behind
from zcompile.ir.printer import schedule_text
from zcompile.ir.types import ALIGNMENT, Phase
from zcompile.ir.units import MiB, show_size
from zcompile.machine.model import Compute, Link, Machine
from zcompile.memory.step_footprint import held_in_steps
from zcompile.planner import step_plan
from zcompile.planner.step_plan import stay_and_scratch


@pytest.fixture(autouse=True)
def one_plan(monkeypatch):
    """Each run keeps the plan that it made first."""
    review_no_plan(monkeypatch)


@pytest.mark.parametrize("share", sampled([8, 1, 0.5], 1))
def test_a_step_moves_no_gradient_and_takes_what_was_predicted(share):
    budget = held_bytes() + int(share * WEIGHT_BYTES)
    model, compiled, optimizer = begun(budget, 4)
    zcompile.stats(model, reset=True)
    train(compiled, optimizer, 4, STEPS)
    stats = zcompile.stats(model)
    assert stats["peak"] == {**stats["peak"], **stats["predicted"]["peak"]}
    assert stats["planned_peak"]["activations"] >= stats["peak"]["activations"]
    assert stats["peak"]["together"] <= budget
    assert stats["bytes"]["d2h"] == 3 * stats["predicted"]["bytes"]["d2h"]
    plan = session_behind(model).controller.plan
    assert len(plan.placement.stay) > len(list(model.parameters())) // 2
    assert held_gradients(model) == 0, "they are gone with zero_grad"
    assert same(model, plainly_trained())


@pytest.mark.slow
def test_without_them_the_same_step_moves_more(monkeypatch):
    def moved():
        model, compiled, optimizer = begun(held_bytes() + WEIGHT_BYTES, 4)
        zcompile.stats(model, reset=True)
        train(compiled, optimizer, 4, STEPS)
        return sum(zcompile.stats(model)["bytes"].values())

    less = moved()
    monkeypatch.setattr(step_plan, "staying", lambda step, *nbytes: frozenset())
    assert less < moved()


def test_a_gradient_that_stays_is_read_changed_and_clipped_as_any():
    def loop(model, forward, optimizer):
        for number in range(STEPS):
            loss_of(forward, many(10 * number)).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            first = next(model.parameters()).grad
            with torch.no_grad():
                first.mul_(2)
                first.add_(1e-3)
            sums.append(float(norm) + float(first.sum()))
            optimizer.step()
            optimizer.zero_grad()

    sums: list[float] = []
    plain = gpt()
    loop(plain, plain, adamw(plain))
    want, sums = sums, []
    model, compiled = begun(held_bytes() + WEIGHT_BYTES, 0)[:2]
    loop(model, compiled, adamw(model))
    assert session_behind(model).controller.plan.placement.stay
    assert sums == want
    assert same(model, values(plain))


@pytest.mark.slow
def test_where_gradients_live_on_none_is_planned_to_stay():
    def loop(model, forward, optimizer):
        for number in range(STEPS):
            loss = loss_of(forward, many(10 * number))
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()

    plain = gpt()
    loop(plain, plain, adamw(plain))
    model, compiled, optimizer = begun(held_bytes() + WEIGHT_BYTES, 0)
    loop(model, compiled, optimizer)
    plan = session_behind(model).controller.plan
    assert plan is not None
    assert not plan.placement.stay
    assert same(model, values(plain))


@pytest.mark.slow
def test_the_step_scratch_has_what_those_that_stay_leave_of_the_room():
    """One that stays is on its way for a while as well, and counts once."""
    model, *_ = begun(held_bytes() + WEIGHT_BYTES, 4)
    planner = session_behind(model).controller
    base, machine = planner._base, planner.costs().machine
    stay, scratch = stay_and_scratch(base, machine, 1 << 20, held_bytes(), 1 << 20)
    assert stay == planner.plan.placement.stay
    taken = held_in_steps([call.with_staying(stay) for call in base.calls])
    assert taken == held_in_steps(base.calls) >= sum(base.facts[key].nbytes for key in stay)
    assert held_bytes() - taken - ALIGNMENT < scratch.nbytes <= held_bytes() - taken


def test_a_report_tells_their_bytes():
    tokens = many(0)[:, :-1]
    links = {name: Link(name, 2e8) for name in ("h2d", "d2h")}
    tiers = {"device": held_bytes() + WEIGHT_BYTES, "host": 64 * MiB}
    machine = Machine("small", tiers, links, Compute({"float32": 1e11}, 1e10))
    report = zcompile.plan(gpt(), tokens, machine=machine)
    assert 0 < report.staying_bytes <= WEIGHT_BYTES
    line = f"{show_size(report.staying_bytes)} of gradients stay in what activations leave"
    assert line in str(report)
    assert json.loads(report.to_json())["staying_bytes"] == report.staying_bytes
    assert "gradients stay" not in str(replace(report, staying_bytes=0))


def test_a_listing_says_which_stay():
    model, *_ = begun(held_bytes() + WEIGHT_BYTES, 4)
    plan = session_behind(model).controller.plan
    listed = [
        line.split()[1:4]
        for call in plan.step.calls
        if call.phase is Phase.BACKWARD
        for line in schedule_text(call.schedule).splitlines()[1:]
    ]
    named = {name for stream, kind, name in listed if (stream, kind) == ("compute", "stay")}
    sent = {name for stream, kind, name in listed if (stream, kind) == ("out", "reduce")}
    stay = {plan.step.facts[key].name.removesuffix(".grad") for key in plan.placement.stay}
    assert named == stay != set()
    assert named | sent == {name for name, _ in model.named_parameters()}


@pytest.mark.gpu
def test_on_a_gpu_too_the_bits_are_those_of_eager():
    with made_on("cuda"):
        plain = gpt().cuda()
        train(plain, adamw(plain), 0, STEPS)
        torch._dynamo.reset()
        model = zcompile.offload(
            gpt().cpu(), device="cuda", device_memory="64MiB", host_memory="64MiB"
        )
        train(torch.compile(model, backend=zinf), adamw(model), 0, STEPS)
        assert session_behind(model).controller.plan.placement.stay
        assert all(
            torch.equal(mine.cpu(), theirs.cpu())
            for mine, theirs in zip(values(model), values(plain), strict=True)
        )
