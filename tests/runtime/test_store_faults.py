"""What goes wrong in a transfer is told by everyone who could know, and never swallowed."""

import os

import pytest
import torch

from zcompile.errors import IOFault, ParameterChanged
from zcompile.ir.types import EntryKind
from zcompile.ir.units import Bytes, KiB, MiB
from zcompile.runtime.store import resident

SMALL = Bytes(256 * KiB)


@pytest.fixture
def store(faults, open_store):
    return open_store(host_memory=SMALL, disk=True)


def ones(nbytes):
    return torch.ones(nbytes, dtype=torch.uint8)


def test_a_failed_write_is_raised_by_its_ticket_later_operations_and_drain(store, faults):
    entry, other = (store.create(name, EntryKind.PARAM, 1 * MiB) for name in ("w", "other"))
    store.put(other, ones(1 * MiB)).wait()
    faults.fail("write")
    ticket = store.put(entry, ones(1 * MiB))
    with pytest.raises(IOFault, match="write of 'w' failed"):
        ticket.wait()
    faults.none()
    for later in (
        lambda: store.fetch(entry, ones(10)),
        lambda: store.put(entry, ones(10)),
        lambda: store.add(entry, ones(10)),
        lambda: store.zero(entry),
        lambda: store.read_all(entry),
        lambda: resident.resident_views(store, [entry]),
        store.drain,
    ):
        with pytest.raises(IOFault, match="write of 'w' failed"):
            later()
    assert store.read_all(other).eq(1).all()
    assert store.meter.host.now == 0


def test_a_fault_names_an_entry_as_it_is_called_now(store, faults):
    entry = store.create("w.state", EntryKind.STATE, 1 * MiB)
    entry.rename("w.exp_avg")
    faults.fail("write")
    ticket = store.put(entry, ones(1 * MiB))
    with pytest.raises(IOFault, match=r"write of 'w\.exp_avg' failed"):
        ticket.wait()


def test_a_failed_read_is_raised_where_compute_joins(store, faults):
    entry = store.create("w", EntryKind.PARAM, 1 * MiB)
    store.put(entry, ones(1 * MiB)).wait()
    faults.fail("read")
    ticket = store.fetch(entry, store.arena.slot(0, 1 * MiB))
    with pytest.raises(IOFault, match="read of 'w' failed"):
        ticket.join_compute()
    with pytest.raises(IOFault, match="read of 'w' failed"):
        store.drain()


def test_a_copy_that_fails_on_the_device_is_raised_where_compute_joins(open_store, monkeypatch):
    store = open_store(host_memory="16MiB")
    entry, landings = store.create("w", EntryKind.PARAM, 1 * MiB), []
    store.put(entry, ones(1 * MiB)).wait()

    def copy(direction, target, source, after, landing):
        landing.enqueued(None)
        landings.append(landing)

    monkeypatch.setattr(store.device, "copy", copy)
    ticket = store.fetch(entry, store.arena.slot(0, 1 * MiB))
    ticket.queued.wait()
    for landing in landings:
        landing.landed(OSError("the device is gone"))
    for wait in (ticket.join_compute, ticket.wait, store.drain):
        with pytest.raises(OSError, match="the device is gone"):
            wait()


def test_what_queues_behind_a_failure_fails_with_it(store, faults):
    entry = store.create("w", EntryKind.PARAM, 1 * MiB)
    faults.fail("write")
    faults.gate.clear()
    store.put(entry, store.arena.slot(0, 1 * MiB))
    queued = [store.fetch(entry, store.arena.slot(1 * MiB, 4096)) for _ in range(1200)]
    queued.append(store.add(entry, store.arena.slot(0, 1 * MiB)))
    faults.gate.set()
    for ticket in queued:
        with pytest.raises(IOFault):
            ticket.wait()


def test_a_failed_partial_write_or_sum_gives_its_buffer_back(store, faults):
    names = ("part", "sum")
    part, whole = (store.create(name, EntryKind.STATE, 100_000) for name in names)
    store.put(part, ones(100_000)).wait()
    store.put(whole, ones(100_000)).wait()
    faults.fail("read")
    tickets = [store.put(part, ones(10), begin=5), store.add(whole, ones(100_000))]
    for ticket, name in zip(tickets, names, strict=True):
        with pytest.raises(IOFault, match=f"read of '{name}' failed"):
            ticket.wait()
    assert store.meter.host.now == 0


def test_chunks_that_come_back_in_reverse_leave_each_other_alone(store, faults):
    entry = store.create("w", EntryKind.PARAM, 1 * MiB)
    value = torch.randint(1, 256, (1 * MiB,), dtype=torch.uint8)
    store.put(entry, value).wait()
    target = store.arena.slot(64, 1 * MiB + 64)  # off the granules of the disk
    faults.reverse = True
    for begin, end in ((0, 1 * MiB), (100_000, 900_001)):
        target.zero_()
        faults.gate.clear()
        ticket = store.fetch(entry, target[begin:end], begin=begin)
        faults.gate.set()
        ticket.wait()
        assert torch.equal(target[begin:end], value[begin:end])
        assert not target[:begin].any()
        assert not target[end:].any()


def test_a_short_write_and_read_are_finished(store, faults):
    faults.cut(8192)
    entry = store.create("w", EntryKind.PARAM, 300_000)
    values = torch.randint(0, 256, (300_000,), dtype=torch.uint8)
    store.put(entry, values)
    assert torch.equal(store.read_all(entry), values)


def test_a_defect_in_a_worker_ends_every_wait(store, monkeypatch):
    entry = store.create("w", EntryKind.PARAM, 1 * MiB)

    def defect(*args):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("zcompile.runtime.transfer.transfer.Add._add", defect)
    ticket = store.add(entry, ones(1 * MiB))
    with pytest.raises(ZeroDivisionError):
        ticket.wait()
    with pytest.raises(ZeroDivisionError):
        store.drain()


def test_after_a_defect_in_a_worker_nothing_is_begun_that_might_never_end(store, monkeypatch):
    entry, other = (store.create(name, EntryKind.PARAM, 1 * MiB) for name in ("w", "v"))
    store.put(other, ones(1 * MiB)).wait()

    def defect(*args):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("zcompile.runtime.transfer.transfer.Add._add", defect)
    with pytest.raises(ZeroDivisionError):
        store.add(entry, ones(1 * MiB)).wait()
    for use in (
        lambda: store.read_all(other),
        lambda: store.put(other, ones(1 * MiB)),
        lambda: store.zero(other),
    ):
        with pytest.raises(ZeroDivisionError, match="a defect"):
            use()


def test_a_closed_store_says_so(store):
    entry = store.create("w", EntryKind.PARAM, 1 * MiB)
    store.close()
    store.close()
    for use in (
        lambda: store.read_all(entry),
        lambda: store.create("v", EntryKind.PARAM, 1),
        lambda: entry.gather((1,), (1,), 0, torch.uint8),
        store.drain,
    ):
        with pytest.raises(ParameterChanged, match="its store was closed; build the model anew"):
            use()


def test_closing_ends_what_is_under_way(open_store):
    store = open_store(host_memory=SMALL, disk=True, throttle={"disk_write": "100kB/s"})
    entry = store.create("w", EntryKind.PARAM, 1 * MiB)
    put = store.put(entry, store.arena.slot(0, 1 * MiB))
    fetch = store.fetch(entry, store.arena.slot(1 * MiB, 1 * MiB))
    store.close()
    assert put.done()  # its one write was under way, and has ended
    with pytest.raises(ParameterChanged, match="its store was closed"):
        fetch.wait()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_and_leaves_the_files_alone(store):
    entry = store.create("w", EntryKind.PARAM, 100)
    store.put(entry, ones(100)).wait()
    heard, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = "nothing"
        try:
            store.read_all(entry)
        except ParameterChanged as error:
            text = str(error)
        store.close()
        os.write(told, text.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    text = os.read(heard, 4096).decode()
    os.close(heard)
    os.close(told)
    assert f"'w' rests in process {os.getpid()}" in text
    assert store.read_all(entry).eq(1).all()
