"""What comes for a parameter whose gradient rests on the device, one gradient at a time."""

from types import SimpleNamespace

import pytest
import torch

from zcompile.ir.types import EntryKind
from zcompile.ir.units import MiB
from zcompile.runtime.gradients.on_device import DeviceGradients

SHAPE = (4, 6)


@pytest.fixture(params=[False, True], ids=["berth", "stays"])
def call(request, open_store):
    """A call that will make one gradient, which has a berth or stays where it is made."""
    store, came = open_store(), []
    store.homes.device.window_bytes = 1 * MiB
    param = torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.complex64))
    param._name_in_store = lambda: "w"
    entry = store.create("w", EntryKind.PARAM, param.nbytes)
    assert store.homes.device.plan(entry.ref.gradient, "w.grad", param.nbytes)
    norms = SimpleNamespace(wanted=False, note_each=lambda entries, grads: None)
    near = DeviceGradients(
        store,
        lambda entry, layout: entry,
        norms,
        lambda leaves: [param] * len(leaves),
        lambda entry, param, grad: came.append(grad),
    )
    staying = frozenset({0} if request.param else ())
    near.begin(SimpleNamespace(lone_gradients=(0,), staying=staying, narrow_gradients={}), [entry])
    return SimpleNamespace(near=near, entry=entry, came=came, store=store)


def has_berth(call):
    """Whether nobody occupies the address that is reserved for the gradient."""
    return call.store.homes.device.has_reserved(call.entry.ref.gradient, call.entry.nbytes)


def values():
    return torch.randn(SHAPE, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))


def test_what_lies_as_its_parameter_is_the_gradient(call):
    call.near.receive(call.entry, values())
    call.near.end()
    (made,) = call.came
    assert torch.equal(call.store.read_all(made), values().flatten().view(torch.uint8))


@pytest.mark.parametrize(
    "other",
    [
        lambda grad: grad.conj(),
        lambda grad: torch._neg_view(grad),
        lambda grad: grad.conj().resolve_conj().t().contiguous().t(),
        lambda grad: grad.to(torch.complex128),
    ],
    ids=["conjugated", "negated", "across", "wider"],
)
def test_what_lies_otherwise_goes_another_way(call, other):
    """Its bytes are not those of the gradient: it is for `Gradients.receive`."""
    assert call.near.receive(call.entry, other(values())) is None
    assert has_berth(call)
    call.near.end()
    assert call.came == []


def test_part_of_what_somebody_else_holds_does_not_stay(call):
    """What stays is accounted for by its storage, which would stay with it."""
    wide = torch.zeros(2, *SHAPE, dtype=torch.complex64)
    stays = call.near._may_stay != {}
    taken = call.near.receive(call.entry, wide[1])
    assert (taken is None) == stays


@pytest.mark.parametrize("ends", [DeviceGradients.end, DeviceGradients.abandon])
def test_a_gradient_that_does_not_come_leaves_its_berth(call, ends):
    ends(call.near)
    assert has_berth(call)
    assert not call.came


def test_a_gradient_of_a_call_that_broke_off_leaves_its_berth(call):
    call.near.receive(call.entry, values())
    call.near.abandon()
    assert has_berth(call)
    assert not call.came


def test_gradients_that_cannot_become_entries_leave_their_berths(call, monkeypatch):
    def fails(*_):
        raise MemoryError

    call.near.receive(call.entry, values())
    monkeypatch.setattr(call.store, "create_at", fails)
    with pytest.raises(MemoryError):
        call.near.end()
    assert has_berth(call)
    assert call.store.homes.held.usage() == ("held", 0, 0)


def test_a_gradient_occupies_its_berth_until_it_dies(call):
    berth = not call.near._may_stay
    call.near.receive(call.entry, values())
    call.near.end()
    assert has_berth(call) is not berth
    call.store.handle(call.came.pop())  # which nobody keeps, and with which it dies
    call.store.enter("")
    assert has_berth(call)
