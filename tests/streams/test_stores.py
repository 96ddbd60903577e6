"""What a store does at once, one thing after the other, over simulated streams: uses that no
step of training has."""

import contextlib

import pytest
import torch
from streams.cuda import Event, Stream
from streams.knowledge import simulated
from streams.mutants import OF_STORES, Edit

from zcompile.config import Config
from zcompile.errors import Unsupported
from zcompile.ir.types import EntryKind
from zcompile.ir.units import MiB
from zcompile.runtime.store.placement import Tiers
from zcompile.runtime.store.store import Store

SIZE = 2 * MiB
"""Of an entry: the host has room for one."""


@pytest.fixture
def store(tmp_path):
    with simulated() as simulation:
        made = Store(
            Config(device="cpu", device_memory="4MiB", host_memory="4MiB", disk=str(tmp_path))
        )
        made.simulation = simulation
        yield made
        made.close()


def create(store, name, tier="host"):
    return store.create(name, EntryKind.GRAD, SIZE, tier=tier)


def put(store, entry):
    """From the arena, where nothing bounds what is in flight."""
    slot = store.arena.slot(0, SIZE)
    slot.fill_(1)
    return store.put(entry, slot, after=[store.device.mark()])


def put_from_host(store, entry):
    source = store.device.host_block(SIZE)
    source.fill_(7)
    return store.put(entry, source)


def read_at_once(store):
    entry = create(store, "w")
    put(store, entry)
    assert store.read_here(entry).eq(1).all()


def fetch_from_disk_at_once(store):
    entry = create(store, "w", "disk")
    assert entry.home == "disk"
    put(store, entry)
    slot = store.arena.slot(SIZE, SIZE)
    store.fetch(entry, slot).join_compute()


def fetch_a_sum_at_once(store):
    entry = create(store, "w")
    put(store, entry)
    store.add(entry, store.arena.slot(0, SIZE).view(torch.float32), after=[store.device.mark()])
    store.fetch(entry, store.arena.slot(SIZE, SIZE), after=[store.device.mark()]).join_compute()


def fetch_what_is_there_in_part_at_once(store):
    entry = create(store, "w")
    half = store.arena.slot(0, SIZE // 2)
    half.fill_(1)
    store.put(entry, half, after=[store.device.mark()])
    store.fetch(entry, store.arena.slot(SIZE, SIZE), after=[store.device.mark()]).join_compute()


def put_from_host_at_once(store):
    entry = create(store, "w")
    put(store, entry)
    put_from_host(store, entry)
    assert store.read_here(entry).eq(7).all()


def die_at_once(store):
    entry = create(store, "old")
    assert entry.home == "host"
    handle = store.handle(entry)
    put(store, entry)
    del entry, handle
    made = create(store, "new")
    put_from_host(store, made)
    assert store.read_here(made).eq(7).all()
    handle = store.handle(made)
    return handle, made.home


USES = {
    "read at once": read_at_once,
    "fetch from disk at once": fetch_from_disk_at_once,
    "fetch a sum at once": fetch_a_sum_at_once,
    "fetch what is there in part at once": fetch_what_is_there_in_part_at_once,
    "put from the host at once": put_from_host_at_once,
    "die at once": die_at_once,
}


def pairs_of(store, use):
    use(store)
    store.drain()
    return store.simulation.memory.pairs


@pytest.mark.parametrize("use", USES)
def test_accesses_are_ordered(store, use):
    assert not pairs_of(store, USES[use])


@pytest.mark.parametrize("mutant", OF_STORES)
def test_without_one_of_its_orders_a_store_is_found_out(store, mutant):
    use, edits = OF_STORES[mutant]
    with contextlib.ExitStack() as broken:
        for edit in edits:
            broken.enter_context(edit.made())
        assert pairs_of(store, USES[use])


def test_what_is_in_flight_on_dead_entries_takes_no_room(store):
    _, home = die_at_once(store)
    assert home == "host"
    del _
    store.drain()
    with Edit(Tiers, "_take", "not self._wait_for_dead(tier)", "True").made():
        _, home = die_at_once(store)
        assert home == "disk"


def test_compute_is_on_one_stream(store):
    entry = create(store, "w")
    put(store, entry)
    fetch = store.fetch(entry, store.arena.slot(SIZE, SIZE))
    mark = store.device.mark()
    with store.simulation.cuda.stream(Stream(name="another")):
        for ask in (mark.join_compute, fetch.join_compute, store.device.mark, store.device.stamp):
            with pytest.raises(Unsupported, match="under the same"):
                ask()
    fetch.join_compute()


def test_an_error_of_a_copy_reaches_what_came_after_it_on_the_device(store, monkeypatch):
    bad, other = create(store, "bad"), create(store, "other", "disk")
    store.put(other, torch.ones(SIZE, dtype=torch.uint8)).wait()
    reap = type(store.device)._reap

    def reap_badly(self, direction, event, listener, nbytes):
        if listener.name == "bad" and direction == "d2h":
            listener.landed(RuntimeError("the link broke"))
        else:
            reap(self, direction, event, listener, nbytes)

    monkeypatch.setattr(type(store.device), "_reap", reap_badly)
    slot = store.arena.slot(0, SIZE)
    left = store.put(bad, slot, after=[store.device.mark()])
    on_entry = store.fetch(bad, store.arena.slot(SIZE, SIZE))
    on_memory = store.fetch(other, slot, after=[left])
    Event.waits.clear()
    on_entry.join_compute()  # which comes after an event, and asks for no more
    assert not Event.waits
    for ticket in (left, on_entry, on_memory):
        with pytest.raises(RuntimeError, match="the link broke"):
            ticket.wait()
    with pytest.raises(RuntimeError, match="the link broke"):
        store.drain()


def put_from_compute(store, entry):
    """From memory that compute made, which is bounded while it is in flight."""
    made = torch.ones(SIZE, dtype=torch.uint8)
    return store.put(entry, made, after=[store.device.mark()])


def test_of_the_end_of_a_copy_the_host_hears_when_others_are_enqueued(store, monkeypatch):
    entry = create(store, "w")
    first = put(store, entry)
    assert (first.done(), store.is_idle()) == (False, False)
    monkeypatch.setattr(Event, "query", lambda event: True)
    second = put(store, entry)
    assert first.over
    assert second.over
    assert store.is_idle()
    assert not store.simulation.held._jobs, "no thread waits"
    assert store.meter.bytes()["d2h"] == 2 * SIZE


def test_who_asks_for_the_end_of_a_copy_has_a_thread_wait_for_it(store):
    left = put(store, create(store, "w"))
    assert not store.simulation.held._jobs
    left.wait()
    assert left.over
    assert store.is_idle()


def test_an_error_that_an_event_tells_of_is_of_all_that_came_after(store, monkeypatch):
    bad, other = create(store, "bad"), create(store, "other", "disk")
    left = put(store, bad)
    back = store.fetch(bad, store.arena.slot(SIZE, SIZE))

    def query(event):
        raise RuntimeError("the card is gone")

    monkeypatch.setattr(Event, "query", query)
    store.is_idle()
    for ticket in (left, back):
        with pytest.raises(RuntimeError, match="the card is gone"):
            ticket.wait()
        with pytest.raises(RuntimeError, match="the card is gone"):
            ticket.join_compute()
    with pytest.raises(RuntimeError, match="the card is gone"):
        put(store, bad)
    assert other.home == "disk"


def test_a_copy_that_cannot_be_enqueued_fails_alone(store, monkeypatch):
    entry = create(store, "w")
    wait_event = Stream.wait_event

    def refuse(stream, event):
        raise RuntimeError("no such stream")

    monkeypatch.setattr(Stream, "wait_event", refuse)
    failed = put(store, entry)
    monkeypatch.setattr(Stream, "wait_event", wait_event)
    with pytest.raises(RuntimeError, match="no such stream"):
        failed.wait()
    with pytest.raises(RuntimeError, match="no such stream"):
        failed.join_compute()
    with pytest.raises(RuntimeError, match="no such stream"):
        store.fetch(entry, store.arena.slot(SIZE, SIZE))


def test_what_waits_for_room_in_the_backlog_hears_of_copies(store):
    store._backlog.most_bytes = SIZE
    entry = create(store, "w")
    for _ in range(3):
        put_from_compute(store, entry)
    assert store._backlog._now == SIZE
    store.drain()
    assert store._backlog._now == 0


def test_events_are_used_again(store, monkeypatch):
    made = []
    make = Event.__init__

    def counted(self, *given, **named):
        made.append(self)
        make(self, *given, **named)

    monkeypatch.setattr(Event, "__init__", counted)
    monkeypatch.setattr(Event, "query", lambda event: True)
    entry = create(store, "w")
    for _ in range(3):
        put(store, entry)
    before = len(made)
    for _ in range(20):
        put(store, entry)
        store.fetch(entry, store.arena.slot(SIZE, SIZE)).join_compute()
    assert len(made) <= before + 2
