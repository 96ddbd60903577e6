"""Disk and memory exchange bytes without a copy between, where both lie on granules; writes to a
slow disk do where the ring has no room for them."""

import mmap

import pytest
import torch
from planned_runs import LITTLE_HOST, PLANNED, WEIGHT_BYTES, begun, held_bytes

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.frontend.session_plan import costs_of
from zcompile.ir.types import ALIGNMENT, EntryKind
from zcompile.ir.units import Bytes, KiB, MiB
from zcompile.machine import staging
from zcompile.machine.model import Compute, Link, Machine
from zcompile.machine.staging import lane_bytes

SMALL = Bytes(256 * KiB)
"""The least host budget: all of it is staging, so entries rest on disk."""
RING = 4 * MiB


@pytest.fixture
def staged(monkeypatch):
    """(store) -> the list of ranges that pass its ring from here on."""

    def watch(store):
        ranges = []
        ring = store._context.staging
        request = ring.request

        def noted(lane, transfer, chunks):
            ranges.extend(chunks)
            request(lane, transfer, chunks)

        monkeypatch.setattr(ring, "request", noted)
        return ranges

    return watch


def numbers(nbytes):
    return torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 70_001, 192 * KiB, 192 * KiB + 1, 300_001])
def test_a_slot_goes_to_disk_by_the_ring_if_that_has_room_and_comes_back_without(
    open_store, staged, nbytes
):
    store = open_store(host_memory=SMALL, disk=True)
    ranges, through = staged(store), nbytes <= lane_bytes(SMALL)
    entry = store.create("w", EntryKind.PARAM, nbytes)
    if nbytes % (granule := entry.place.tier.granule) and granule > ALIGNMENT:
        pytest.skip(f"this disk moves whole blocks of {granule} bytes")
    source = store.arena.slot(0, nbytes)
    source.copy_(numbers(nbytes))
    store.put(entry, source).wait()
    assert bool(ranges) is through
    ranges.clear()
    target = store.arena.slot(512 * KiB, nbytes)
    store.fetch(entry, target).join_compute()
    assert torch.equal(target, numbers(nbytes))
    assert ranges == []
    assert store.meter.bytes()["h2d"] == store.meter.bytes()["d2h"] == nbytes


def test_what_is_not_written_behind_goes_to_disk_without_the_ring(open_store, staged):
    store = open_store(host_memory=SMALL, disk=True)
    store._context.staging.write_behind(8191)
    ranges = staged(store)
    for nbytes, passed in ((4096, [(0, 4096)]), (8192, [])):
        ranges.clear()
        store.put(store.create("w", EntryKind.PARAM, nbytes), store.arena.slot(0, nbytes)).wait()
        assert ranges == passed


def disk(bytes_per_s):
    rates = {"h2d": 8e9, "d2h": 8e9, "disk_read": 4e9, "disk_write": bytes_per_s}
    links = {name: Link(name, rate) for name, rate in rates.items()}
    return Machine("given", {}, links, Compute({"float32": 1e11}, 2e10))


@pytest.mark.parametrize(
    ("bytes_per_s", "behind_bytes"), [(1.3e9, lane_bytes(RING)), (1.4e9, 0), (16e9, 0)]
)
def test_slots_are_written_behind_by_a_disk_that_is_far_slower_than_a_copy(
    bytes_per_s, behind_bytes
):
    assert staging.behind_bytes(RING, disk(bytes_per_s).links) == behind_bytes


@pytest.mark.parametrize("quick", [False, True])
def test_a_plan_has_slots_written_as_it_was_simulated(tmp_path, quick):
    machine = disk(8e9 if quick else 1e9)
    fields = {"host_memory": LITTLE_HOST, "disk": tmp_path / "disk", "machine": machine}
    model, _, _ = begun(PLANNED, device_memory=Bytes(WEIGHT_BYTES + held_bytes()), **fields)
    session = session_behind(model)
    ring = session._context.staging
    assert session.controller.plan is not None
    assert ring.behind_bytes == (0 if quick else lane_bytes(ring.nbytes))
    assert costs_of(session).ways.behind_bytes == session.ways().behind_bytes == ring.behind_bytes
    zcompile.close(model)


def test_memory_outside_the_arena_goes_to_disk_without_the_ring(open_store, staged):
    """Nobody waits for it as for a slot."""
    store = open_store(host_memory=SMALL, disk=True)
    ranges, nbytes = staged(store), lane_bytes(SMALL)
    entry = store.create("w", EntryKind.PARAM, nbytes)
    source = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)  # on whole blocks
    source.copy_(numbers(nbytes))
    store.put(entry, source).wait()
    assert ranges == []
    assert torch.equal(store.read_all(entry), numbers(nbytes))


def test_what_lies_behind_a_slot_is_not_touched(open_store, staged):
    store = open_store(host_memory=SMALL, disk=True)
    granule = 512
    behind = store.arena.slot(granule * 16, granule)
    entry = store.create("w", EntryKind.PARAM, granule * 15 + 1)
    store.put(entry, numbers(entry.nbytes)).wait()
    behind.fill_(7)
    store.fetch(entry, store.arena.slot(0, entry.nbytes)).join_compute()
    assert (behind == 7).all()


def test_a_part_that_ends_inside_the_entry_leaves_the_rest_as_it_was(open_store):
    store = open_store(host_memory=SMALL, disk=True)
    entry = store.create("w", EntryKind.PARAM, 3 * 4096)
    store.put(entry, numbers(entry.nbytes)).wait()
    part = store.arena.slot(0, 4096 + 100)
    part.fill_(9)
    store.put(entry, part, begin=4096).wait()
    expected = numbers(entry.nbytes)
    expected[4096 : 2 * 4096 + 100] = 9
    assert torch.equal(store.read_all(entry), expected)


def test_memory_that_lies_off_granules_takes_the_ring(open_store, staged):
    store = open_store(host_memory=SMALL, disk=True)
    ranges = staged(store)
    entry = store.create("w", EntryKind.PARAM, 256 * KiB)
    store.put(entry, store.arena.slot(0, 512 * KiB)[100 : 100 + entry.nbytes]).wait()
    assert ranges


def test_a_throttled_link_is_not_passed_by(open_store, staged):
    store = open_store(host_memory=SMALL, disk=True, throttle={"h2d": "1GB/s"})
    ranges = staged(store)
    entry = store.create("w", EntryKind.PARAM, 8192)
    store.put(entry, store.arena.slot(0, 8192)).wait()
    ranges.clear()
    store.fetch(entry, store.arena.slot(0, 8192)).join_compute()
    assert ranges == [(0, 8192)]
