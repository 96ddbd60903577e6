"""Where everything rests on the device with room to spare, graphs get so much of it that every
gradient stays where it is made: then none ends a region."""

import pytest
import torch
from planned_runs import review_no_plan
from torch import nn

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.ir.schedule import Run
from zcompile.ir.types import HELD, Phase
from zcompile.ir.units import Bytes, MiB

LAYERS, WIDTH, STEPS = 12, 32, 6
WEIGHT_BYTES = LAYERS * WIDTH * WIDTH * 4
ROOMY = Bytes(16 * MiB)


@pytest.fixture(autouse=True)
def one_plan(monkeypatch):
    """Each run keeps the plan that it made first."""
    review_no_plan(monkeypatch)


class Pooled(nn.Module):
    """Values of all rows are made first, and so needed until backward ends."""

    def forward(self, x):
        return x.tanh().sin().tanh().sin().mean(0, keepdim=True)


def layers():
    torch.manual_seed(0)
    made = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return nn.Sequential(made[0], Pooled(), *made[1:])


def trained(device, batches=1, rows=lambda number: 2, steps=STEPS):
    """A model after some steps, with the weights that plain torch makes; and by step, on which
    tiers its gradients were.

    rows  number of a step -> rows of its batches
    """
    torch._dynamo.reset()
    model, plain, tiers = layers(), layers(), []
    zcompile.offload(model, device="cpu", device_memory=device, host_memory="64MiB")
    calls = torch.compile(model, backend="zinf"), plain
    optimizers = [torch.optim.AdamW(m.parameters(), fused=True) for m in (model, plain)]
    for number in range(steps):
        for batch in range(batches):
            made = torch.Generator().manual_seed(batches * number + batch)
            given = torch.randn(rows(number), WIDTH, generator=made)
            for call in calls:
                call(given).square().mean().backward()
        tiers.append({p.grad.entry.home for p in model.parameters()})
        for of, optimizer in zip((model, plain), optimizers, strict=True):
            nn.utils.clip_grad_norm_(of.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if number == steps - 2:
            zcompile.stats(model, reset=True)
    assert all(
        torch.equal(p.on_host(), q)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )
    return model, tiers


def plan_of(model):
    return session_behind(model).controller.plan


def regions_of_backward(model):
    """Regions of each backward of the plan, and how many gradients stay in it."""
    calls = [c.schedule for c in plan_of(model).step.calls if c.phase is Phase.BACKWARD]
    return [(sum(isinstance(x, Run) for x in s.instructions), len(s.staying)) for s in calls]


def test_a_backward_is_one_region_and_takes_what_was_told():
    model, tiers = trained(ROOMY)
    assert tiers[-1] == {HELD}
    assert regions_of_backward(model) == [(1, LAYERS)]
    assert plan_of(model).rests_on_device
    session, stats = session_behind(model), zcompile.stats(model)
    assert session.split.held_bytes + session.arena.budget_bytes == ROOMY
    assert stats["peak"] == {**stats["peak"], **stats["predicted"]["peak"]}
    assert stats["peak"]["activations"] <= session.split.held_bytes
    # As much as with an address for each: weights, two states of each, gradients, and some values.
    assert 4 * WEIGHT_BYTES <= stats["peak"]["together"] < 4 * WEIGHT_BYTES + 16 * WIDTH * LAYERS


def test_where_the_rest_of_the_device_is_needed_gradients_keep_their_addresses():
    """Weights, states and gradients fill the device but for what graphs hold in any case."""
    model, tiers = trained(Bytes(4 * WEIGHT_BYTES + 8 * WIDTH * LAYERS))
    assert plan_of(model).rests_on_device
    assert "device" in tiers[-1]
    assert plan_of(model).resident_bytes > 3 * WEIGHT_BYTES, "gradients among them"
    ((regions, stay),) = regions_of_backward(model)
    assert stay < LAYERS
    assert LAYERS - stay <= regions <= LAYERS + 1, "those that have one end a region"
    stats = zcompile.stats(model)
    assert stats["peak"] == {**stats["peak"], **stats["predicted"]["peak"]}
    assert stats["peak"]["together"] <= 4 * WEIGHT_BYTES + 8 * WIDTH * LAYERS


def test_gradients_that_are_added_to_keep_their_addresses():
    model, tiers = trained(ROOMY, batches=2)
    assert plan_of(model).rests_on_device
    assert tiers[-1] == {"device"}


def test_more_is_set_aside_once_larger_batches_need_what_gradients_stay_in():
    """Values of the batches alone have room, and not beside the gradients of the later layers."""
    model, tiers = trained(ROOMY, rows=lambda number: 2 if number < 5 else 64, steps=10)
    assert tiers[4] == tiers[-1] == {HELD}
    assert tiers[6] == {"host"}, "compiled for these sizes, and no gradient has another home"
    assert plan_of(model).rests_on_device
    assert regions_of_backward(model) == [(1, LAYERS)]


def test_a_dry_run_divides_the_device_so_too():
    model, _ = trained(ROOMY)
    report = zcompile.plan(
        layers(), torch.ones(2, WIDTH), device="cpu", device_memory=ROOMY, host_memory="64MiB"
    )
    assert report.staying_bytes == plan_of(model).staying_bytes == WEIGHT_BYTES
