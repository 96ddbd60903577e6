"""A backward in which nothing moves is counted once, and from then on walks its computing alone."""

import pytest
import torch
from sampled import sampled
from torch import nn

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.ir.types import Phase
from zcompile.runtime import executor
from zcompile.runtime.gradients.on_device import DeviceGradients

STEPS = 24


def layers(count=6):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(count)))


def batch(number, rows):
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(number))


def trained(monkeypatch, rows, forbidden=False):
    """A model after some steps with plain values beside, and how often its backward walked so.

    rows       few: gradients have reserved addresses; many: they stay where they are made
    forbidden  no call is counted, so that each walks instruction by instruction
    """
    torch._dynamo.reset()
    walked = []
    at_rest = executor._Call._run_at_rest

    def noted(call, rows, counted):
        walked.append(call.schedule.phase)
        return at_rest(call, rows, counted)

    monkeypatch.setattr(executor._Call, "_run_at_rest", noted)
    plain, model = layers(), layers()
    zcompile.offload(model, device="cpu", device_memory="64MiB", host_memory="64MiB")
    run = torch.compile(model, backend="zinf")
    ours = torch.optim.AdamW(model.parameters(), fused=True)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    session, live = session_behind(model), []
    for number in range(STEPS):
        if forbidden:
            session.executor.counted.clear()
        if number == STEPS - 4:
            zcompile.stats(model, reset=True)
        for forward in (run, plain):
            forward(batch(number, rows)).square().mean().backward()
        live.append(session.live_memory.nbytes)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        live.append(session.live_memory.nbytes)
    return model, plain, walked, live


@pytest.mark.parametrize("rows", sampled([2, 512], 2))
def test_nobody_can_tell_how_a_backward_walked(monkeypatch, rows):
    model, plain, walked, live = trained(monkeypatch, rows)
    _, _, never, counted = trained(monkeypatch, rows, forbidden=True)
    assert set(walked) == {Phase.BACKWARD}
    assert not never
    assert live == counted
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(torch.tensor(ours.tolist()), theirs)


@pytest.mark.parametrize("rows", [2, 512])
def test_the_peaks_are_those_that_were_predicted(monkeypatch, rows):
    model, _, walked, _ = trained(monkeypatch, rows)
    assert walked
    stats = zcompile.stats(model)
    assert stats["peak"] == {**stats["peak"], **stats["predicted"]["peak"]}


def test_a_gradient_that_comes_in_another_layout_leaves_by_itself(monkeypatch):
    received, turned = DeviceGradients.receive, []

    def elsewhere(self, leaf, grad):
        """Has no room for the gradient of one bias, once all were counted."""
        if turned and leaf.key == turned[0]:
            self._may_stay.pop(leaf.key, None)
            if (expected := self._expected.pop(leaf.key, None)) is not None:
                expected.place.tier.release(expected.place.extent)
            return None
        return received(self, leaf, grad)

    monkeypatch.setattr(DeviceGradients, "receive", elsewhere)
    model, plain, walked, _ = trained(monkeypatch, 512)
    assert walked
    turned.append(model[2].bias.entry.key)
    run, before = torch.compile(model, backend="zinf"), len(walked)
    for forward in (run, plain):
        forward(batch(STEPS, 512)).square().mean().backward()
    assert len(walked) > before
    before = len(walked)
    for forward in (run, plain):
        (model if forward is run else plain).zero_grad()
        forward(batch(STEPS, 512)).square().mean().backward()
    assert len(walked) == before, "the next is counted anew"
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(torch.tensor(ours.grad.tolist()), theirs.grad)
