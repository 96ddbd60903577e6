"""Compute reaches bytes where they rest: after what moves them, with zeros where all is blank."""

import pytest
import torch

from zcompile.errors import ValueUnset
from zcompile.ir.schedule import Borrow, EntryIndex, Register
from zcompile.ir.types import EntryKind, EntryRef, Layout
from zcompile.ir.units import KiB, MiB
from zcompile.runtime.store import resident
from zcompile.runtime.store.store import Deferred
from zcompile.runtime.transfer.ticket import Ready


def test_a_lent_entry_is_seen_after_what_was_put(open_store):
    store = open_store(host_memory="64MiB", throttle={})
    entry = store.create("w", EntryKind.PARAM, 16 * MiB)
    store.put(entry, torch.full((entry.nbytes,), 7, dtype=torch.uint8))
    assert (store.view_in_place(entry, 0, entry.nbytes, writes=False) == 7).all()


def test_what_compute_writes_there_is_fetched(open_store):
    store = open_store(host_memory="4MiB")
    entry = store.create("w", EntryKind.PARAM, 1 * KiB)
    version = entry.version
    store.view_in_place(entry, 512, 512, writes=True).fill_(3)
    assert entry.version > version
    assert store.read_all(entry).tolist() == [0] * 512 + [3] * 512


def test_a_blank_entry_is_lent_as_zeros(open_store):
    store = open_store(host_memory="1MiB")
    used = store.create("old", EntryKind.PARAM, 256 * KiB)
    store.put(used, torch.full((used.nbytes,), 9, dtype=torch.uint8)).wait()
    store.handle(used)  # whose death ends the entry
    entry = store.create("new", EntryKind.STATE, 256 * KiB)
    assert not store.view_in_place(entry, 0, entry.nbytes, writes=False).any()


def test_only_what_compute_can_reach_is_lendable(open_store):
    resident = open_store(host_memory="1MiB")
    assert resident.can_view_in_place(resident.create("w", EntryKind.PARAM, 1 * KiB))
    far = open_store(host_memory="256KiB", disk=True)
    assert not far.can_view_in_place(far.create("w", EntryKind.PARAM, 1 * KiB))
    slow = open_store(host_memory="1MiB", throttle={"d2h": "1GB/s"})
    assert not slow.can_view_in_place(slow.create("w", EntryKind.PARAM, 1 * KiB))


def test_an_entry_without_a_value_is_not_lent(open_store):
    store = open_store(host_memory="1MiB")
    entry = store.create("w", EntryKind.PARAM, 1 * KiB, unset=True)
    with pytest.raises(ValueUnset, match="'w'"):
        store.view_in_place(entry, 0, 1 * KiB, writes=True)


def test_what_a_call_borrows_is_the_same_tensor_until_it_rests_elsewhere(open_store):
    store = open_store()
    store.homes.device.window_bytes = 1 * MiB
    layout = Layout((64,), (1,), 0, torch.float32)
    borrow = Borrow(EntryIndex(0), 0, layout, Register(0), True)
    entry = near_entry(store, 3.0)
    first = resident.resident_views(store, [entry]).view(borrow)
    version = entry.version
    assert resident.resident_views(store, [entry]).view(borrow) is first
    assert entry.version == version + 1
    other = near_entry(store, 5.0)
    assert resident.resident_views(store, [other]).view(borrow).tolist() == [5.0] * 64
    assert first.tolist() == [3.0] * 64


def test_what_has_moved_since_a_call_began_is_borrowed_where_it_is(open_store):
    store = open_store()
    store.homes.device.window_bytes = 1 * MiB
    borrow = Borrow(EntryIndex(0), 0, Layout((64,), (1,), 0, torch.float32), Register(0), False)
    entry, other = near_entry(store, 3.0), near_entry(store, 5.0)
    lent = resident.resident_views(store, [entry])
    assert lent.view(borrow).tolist() == [3.0] * 64
    entry.place = other.place
    assert lent.view(borrow).tolist() == [5.0] * 64


def test_what_rests_on_the_device_is_touched_after_what_it_follows(open_store):
    store = open_store()
    store.homes.device.window_bytes = 1 * MiB
    entry, memory, joined = near_entry(store, 3.0), torch.zeros(64), []

    class Behind(Ready):
        """`memory` has its value when somebody has waited for this."""

        def join_compute(self):
            joined.append(memory.fill_(5.0))

    resident.put(store, entry, memory.view(torch.uint8), 0, [Behind()])
    assert store.read_all(entry).view(torch.float32).tolist() == [5.0] * 64
    memory.zero_()
    resident.add(store, entry, memory, 0, [Behind()])
    assert store.read_all(entry).view(torch.float32).tolist() == [10.0] * 64
    resident.fetch(store, entry, memory.view(torch.uint8), 0, [Behind()], False)
    assert memory.tolist() == [10.0] * 64
    assert len(joined) == 3


def test_a_change_that_was_put_off_is_made_before_an_entry_is_lent(open_store):
    def make(entry):
        (change,), entry.deferred = entry.deferred, ()
        memory = store.view_in_place(entry, 0, entry.nbytes, writes=True)
        change.apply(layout.view(memory), change.operand)

    store = open_store(apply_deferred=make)
    store.homes.device.window_bytes = 1 * MiB
    entry, layout = near_entry(store, 3.0), Layout((64,), (1,), 0, torch.float32)
    store.deferrals.defer(entry, Deferred(torch.Tensor.mul_, 2.0, False, layout))
    lent = resident.resident_views(store, [entry])
    assert lent.view(Borrow(EntryIndex(0), 0, layout, Register(0), False)).tolist() == [6.0] * 64


def near_entry(store, value):
    """An entry of 64 floats with a berth of its own on the device."""
    count = len(store._entries)
    assert store.homes.device.plan(EntryRef(1000 + count).gradient, "w", 256)
    entry = store.create("w.grad", EntryKind.GRAD, 256, of=1000 + count)
    resident.put(store, entry, torch.full((64,), value).view(torch.uint8), 0, ())
    return entry
