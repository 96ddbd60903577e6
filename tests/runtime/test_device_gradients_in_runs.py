"""Gradients that rest on the device: booked once per call, and still eager's."""

import gc
import weakref

import pytest
import torch
from planned_runs import adamw, begun, expected, ids, offloaded, same, train
from torch import nn

import zcompile
from zcompile.errors import Unsupported
from zcompile.frontend.offload import session_behind
from zcompile.ir.types import EntryKind
from zcompile.ir.units import MiB
from zcompile.planner import step_plan
from zcompile.runtime.gradients import on_device
from zcompile.runtime.gradients.gradients import Gradients
from zcompile.runtime.gradients.on_device import DeviceGradients

ROOM = {"device_memory": "16MiB"}
"""All states and gradients rest on the device."""


@pytest.fixture(autouse=True)
def none_stays(monkeypatch):
    """Each has a berth, if it rests on the device; those that stay have tests of their own."""
    monkeypatch.setattr(step_plan, "staying", lambda *how: frozenset())


@pytest.fixture
def came_one_by_one(monkeypatch):
    """Names of what `Gradients.receive` took."""
    names, receive = [], Gradients.receive

    def noted(self, entry, grad, after=None):
        names.append(entry.name)
        receive(self, entry, grad, after)

    monkeypatch.setattr(Gradients, "receive", noted)
    return names


def backward(model, compiled, number=7):
    tokens = ids(number)
    logits = compiled(tokens[:, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()


def test_a_gradient_that_somebody_holds_keeps_its_value():
    """Its address, and its entry, are its own as long as it lives: those of later steps lie
    elsewhere."""
    model, compiled, optimizer = begun(4, **ROOM)
    backward(model, compiled)
    held = [param.grad for param in model.parameters()]
    assert {grad.entry.home for grad in held} == {"device"}
    known = [grad.on_host() for grad in held]
    for number in (8, 9):
        optimizer.zero_grad()
        assert all(param.grad is None for param in model.parameters())
        backward(model, compiled, number)
        assert all(
            torch.equal(grad.on_host(), as_it_was)
            for grad, as_it_was in zip(held, known, strict=True)
        )
        now = [param.grad for param in model.parameters()]
        assert not {grad.entry.key for grad in held} & {grad.entry.key for grad in now}
        assert any(not torch.equal(a.on_host(), b) for a, b in zip(now, known, strict=True))


@pytest.mark.slow
def test_with_a_berth_for_each_none_comes_by_itself(came_one_by_one):
    model, compiled, optimizer = begun(4, **ROOM)
    came_one_by_one.clear()
    train(model, compiled, optimizer, 4, 5)
    assert came_one_by_one == []
    assert same(model, expected())


@pytest.mark.slow
def test_products_are_made_in_their_berths_and_only_the_rest_is_copied(monkeypatch):
    model, compiled, optimizer = begun(4, **ROOM)
    copied, copy = [], on_device.copy_dense

    def noted(target, source):
        copied.append(tuple(target.shape))
        copy(target, source)

    monkeypatch.setattr(on_device, "copy_dense", noted)
    train(model, compiled, optimizer, 4, 5)
    whole = tuple(model.embed.weight.shape)  # the sum of two
    small = [tuple(p.shape) for p in model.parameters() if p.dim() == 1]
    assert sorted(copied) == sorted([whole, *small])
    assert same(model, expected())


@pytest.mark.slow  # tests/frontend/test_replan.py, of all entries
def test_what_is_made_in_its_berth_counts_as_it_is_predicted():
    model, compiled, optimizer = begun(4, **ROOM)
    zcompile.stats(model, reset=True)
    train(model, compiled, optimizer, 4, 5)
    stats = zcompile.stats(model)
    assert stats["peak"]["device"] == stats["predicted"]["peak"]["device"]
    assert session_behind(model).live_memory.nbytes == 0


def test_the_second_batch_of_a_step_is_added_to_what_is_there(came_one_by_one):
    model, compiled, optimizer = begun(4, batches=2, **ROOM)
    came_one_by_one.clear()
    train(model, compiled, optimizer, 4, 5, batches=2)
    assert len(came_one_by_one) == len(list(model.parameters()))
    assert same(model, expected(batches=2))


def test_a_hook_on_one_parameter_lets_all_come_as_they_are_made(came_one_by_one):
    model, compiled, optimizer = begun(3, **ROOM)
    late, early = model.blocks[0].down.bias, model.norm.weight
    seen = []
    late.register_hook(lambda grad: seen.append(early.grad is not None))
    came_one_by_one.clear()
    train(model, compiled, optimizer, 3, 5)
    assert seen == [True, True]
    assert len(came_one_by_one) == 2 * len(list(model.parameters()))
    assert same(model, expected())


@pytest.mark.slow
def test_who_waits_for_a_gradient_is_told_when_it_is_there():
    model, compiled, optimizer = begun(4, **ROOM)
    told = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: told.append(p.grad.cpu().norm() > 0))
    train(model, compiled, optimizer, 4, 5)
    assert len(told) == len(list(model.parameters()))
    assert all(told)


def test_after_a_call_that_broke_off_no_gradient_came_and_the_next_is_eagers(monkeypatch):
    model, compiled, optimizer = begun(4, **ROOM)
    receive, left = DeviceGradients.receive, [3]

    def breaks(self, entry, grad):
        left[0] -= 1
        if left[0] == 0:
            raise ZeroDivisionError(entry.name)
        return receive(self, entry, grad)

    with monkeypatch.context() as patch:
        patch.setattr(DeviceGradients, "receive", breaks)
        with pytest.raises(ZeroDivisionError):
            backward(model, compiled)
    session = session_behind(model)
    assert [p.grad for p in model.parameters()] == [None] * len(list(model.parameters()))
    assert [e.name for e in session.entries() if e.kind is EntryKind.GRAD] == []
    train(model, compiled, optimizer, 4, 5)
    assert same(model, expected())


@pytest.mark.slow
def test_a_gradient_is_measured_for_clipping_where_it_rests():
    model, compiled = offloaded(**ROOM)
    train(model, compiled, adamw(model), clip=True)
    backward(model, compiled)
    measured = [e.norms for e in session_behind(model).entries() if e.kind is EntryKind.GRAD]
    assert len(measured) == len(list(model.parameters()))
    assert all(measured)


@pytest.mark.slow
def test_memory_that_calls_borrowed_dies_with_the_arena():
    model, _, _ = begun(4, **ROOM)
    session = session_behind(model)
    assert session.arena._views
    memory = weakref.ref(session.arena._memory.untyped_storage())
    session.split.hold(session.split.held_bytes + 2 * MiB)
    gc.collect()
    assert memory() is None


def test_torch_autograd_grad_is_refused_and_leaves_no_gradient():
    model, compiled, _ = begun(4, **ROOM)
    tokens = ids(7)
    logits = compiled(tokens[:, :-1])
    with pytest.raises(Unsupported, match=r"torch\.autograd\.grad"):
        torch.autograd.grad(logits.sum(), list(model.parameters()))
    assert all(p.grad is None for p in model.parameters())


class Turning(nn.Module):
    """A complex weight, used as its conjugate: its gradient comes as a lazy one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x):
        return (x @ self.weight.conj()).abs().sum()


def test_a_lazy_conjugate_comes_home_as_the_numbers_that_it_stands_for():
    torch._dynamo.reset()
    plain, model = Turning(), zcompile.offload(Turning(), device="cpu", **ROOM)
    compiled = torch.compile(model, backend="zinf")
    x = torch.randn(4, 8, dtype=torch.complex64)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, plain))
    for _ in range(5):
        for run, optimizer in ((compiled, ours), (plain, theirs)):
            run(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(model.weight.on_host(), plain.weight)
