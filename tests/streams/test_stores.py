"""What a store does at once, one thing after the other, over simulated streams: uses that no
step of training has."""

import contextlib
import gc
import signal
import weakref

import pytest
import torch
from streams.clocks import knowing
from streams.cuda import Event, Stream
from streams.knowledge import simulated
from streams.mutants import OF_STORES, Edit
from torch import nn

import zcompile
from zcompile.config import Config
from zcompile.errors import Unsupported
from zcompile.ir.types import EntryKind
from zcompile.ir.units import MiB
from zcompile.runtime import open as opening
from zcompile.runtime.device import cuda
from zcompile.runtime.device.cuda import CudaDevice, Mark
from zcompile.runtime.store.placement import Tiers
from zcompile.runtime.store.store import Store
from zcompile.runtime.tiers import host
from zcompile.runtime.transfer.one_copy import MOST_UNSEEN, OneCopy
from zcompile.runtime.transfer.queue import Backlog

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


def test_the_allocator_is_set_before_a_device_has_memory(monkeypatch):
    seen = []
    monkeypatch.setattr(cuda, "use_expandable_segments", lambda: seen.append("set"))
    with simulated() as simulation:
        simulation.cuda.current_device = lambda: seen.append("CUDA") or 0
        config = Config(device="cpu", device_memory="4MiB", host_memory="4MiB")
        made = Store(config)
        made.close()
    assert seen[:1] == ["set"]


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


def memory_that_compute_had(store):
    """Memory of the device's own that torch hands out again while compute is not done with it."""
    before = torch.ones(SIZE, dtype=torch.uint8)
    with store.simulation.computing("compute"):
        store.simulation.launch([], [before])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *how, **named: before)
        (memory,) = CudaDevice.allocate_each(store.device, [SIZE])
    assert memory is before
    return memory


def copy_to_memory_that_compute_had(store):
    memory, host = memory_that_compute_had(store), store.device.host_block(SIZE)
    store.device.enqueue("h2d", [(memory, host)], [], "w")


def copy_for_ranks_to_memory_that_compute_had(store):
    copier, host = store.device.copier("lane"), store.device.host_block(SIZE)
    copier.enqueue(memory_that_compute_had(store), host)


def copy_for_ranks_on_a_new_stream(store):
    memory, host = memory_that_compute_had(store), store.device.host_block(SIZE)
    store.device.copier("lane").enqueue(memory, host)


def fetched_for_ranks(store):
    """A fetch of what a lane of ranks sends, a later one on the same stream, and the lane's part:
    of whatever else this thread knows, its own does not."""
    entry, host = create(store, "w"), store.device.host_block(SIZE)
    copier = store.device.copier("lane")
    put(store, entry)
    share = store.arena.slot(SIZE, SIZE)
    first, later = store.fetch(entry, share), store.fetch(entry, store.arena.slot(0, SIZE))
    assert (type(first), type(later)) == (OneCopy, OneCopy)

    def send():
        with knowing():
            first.wait()
            copier.enqueue(host, share)

    return first, later, send


def send_what_came_before_what_another_waits_for(store):
    first, later, send = fetched_for_ranks(store)
    with knowing():
        later.wait()
    assert first.over
    send()


def send_what_another_tells_has_come(store, asked_before=False):
    first, _, send = fetched_for_ranks(store)
    ends = store._mover.ends
    if asked_before:
        first.end_heard()
    with knowing(), ends.lock:
        for copy in (*first.follows, first):
            copy.mark.wait()
            ends._end(copy, None)
    assert not first.over
    with knowing():
        ends.tell()
    assert first.over
    send()


def send_what_was_asked_for_before_another_tells(store):
    send_what_another_tells_has_come(store, asked_before=True)


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
    "send what came before what another waits for": send_what_came_before_what_another_waits_for,
    "send what another tells has come": send_what_another_tells_has_come,
    "send what was asked for before another tells": send_what_was_asked_for_before_another_tells,
    "die at once": die_at_once,
    "copy to memory that compute had": copy_to_memory_that_compute_had,
    "copy for ranks to memory that compute had": copy_for_ranks_to_memory_that_compute_had,
    "copy for ranks on a new stream": copy_for_ranks_on_a_new_stream,
}


def pairs_of(store, use):
    use(store)
    store.drain()
    return store.simulation.memory.pairs


@pytest.mark.parametrize("over_at_once", [False, True])
@pytest.mark.parametrize("use", USES)
def test_accesses_are_ordered(store, use, over_at_once, monkeypatch):
    monkeypatch.setattr(Event, "answers", over_at_once)
    assert not pairs_of(store, USES[use])


@pytest.mark.parametrize("mutant", OF_STORES)
def test_without_one_of_its_orders_a_store_is_found_out(store, mutant):
    use, edits = OF_STORES[mutant]
    with contextlib.ExitStack() as broken:
        for edit in edits:
            broken.enter_context(edit.made())
        assert pairs_of(store, USES[use])


@pytest.mark.parametrize(
    "asks", [lambda device: CudaDevice.allocate_each(device, [SIZE]), lambda d: d.copier("lane")]
)
def test_memory_and_streams_come_behind_the_stream_of_compute_alone(store, asks):
    store.device.mark()
    with store.simulation.cuda.stream(Stream(name="another")), pytest.raises(Unsupported):
        asks(store.device)


def test_what_is_in_flight_on_dead_entries_takes_no_room(store):
    _, home = die_at_once(store)
    assert home == "host"
    del _
    store.drain()
    with Edit(Tiers, "_take", "not self._wait_for_dead(tier)", "True").made():
        _, home = die_at_once(store)
        assert home == "disk"


def test_what_is_over_on_dead_entries_is_waited_for_by_no_thread(store, monkeypatch):
    asked, ask = [], type(store.device).wait_in_thread

    def wait_in_thread(device, direction, job):
        asked.append(direction)
        ask(device, direction, job)

    monkeypatch.setattr(type(store.device), "wait_in_thread", wait_in_thread)
    entry = create(store, "old")
    handle = store.handle(entry)
    put(store, entry)
    del entry, handle
    assert not store.is_idle()
    monkeypatch.setattr(Event, "answers", True)
    assert create(store, "new").home == "host"
    assert not asked


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


def test_the_stream_of_compute_is_the_one_that_a_model_was_offloaded_under():
    budgets = {"device": "cpu", "device_memory": "4MiB", "host_memory": "16MiB"}
    with simulated() as simulation:
        own = Stream(name="own")
        with simulation.cuda.stream(own):
            model = zcompile.offload(nn.Linear(256, 256), **budgets)
        x = torch.ones(1, 256)
        with pytest.raises(Unsupported, match="under the same"):
            model(x)
        with simulation.cuda.stream(own):
            assert model(x).shape == (1, 256)
        zcompile.close(model)


def test_an_error_of_a_copy_reaches_what_came_after_it_on_the_device(store, monkeypatch):
    bad, other = create(store, "bad"), create(store, "other", "disk")
    store.put(other, torch.ones(SIZE, dtype=torch.uint8)).wait()
    slot = store.arena.slot(0, SIZE)
    left = store.put(bad, slot, after=[store.device.mark()])
    wait = Mark.wait

    def wait_badly(mark):
        if mark is left.mark:
            raise RuntimeError("the link broke")
        wait(mark)

    monkeypatch.setattr(Mark, "wait", wait_badly)
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


def put_from_compute(store, entry, nbytes=SIZE):
    """From memory that compute made, which is bounded while it is in flight."""
    made = torch.ones(nbytes, dtype=torch.uint8)
    return store.put(entry, made, after=[store.device.mark()])


def test_of_the_end_of_a_copy_the_host_hears_when_others_are_enqueued(store, monkeypatch):
    entry = create(store, "w")
    first = put(store, entry)
    assert (first.done(), store.is_idle()) == (False, False)
    monkeypatch.setattr(Event, "answers", True)
    others = [put(store, entry) for _ in range(MOST_UNSEEN + 1)]
    assert first.over
    assert not others[-1].over
    assert store.is_idle()
    assert others[-1].over
    assert not store.simulation.held._jobs, "no thread waits"
    assert store.meter.bytes()["d2h"] == (2 + MOST_UNSEEN) * SIZE


def test_the_host_looks_for_ends_once_for_some_copies(store, monkeypatch):
    looks, look = [], store._mover.ends._take_ended
    monkeypatch.setattr(store._mover.ends, "_take_ended", lambda: looks.append(1) or look())
    monkeypatch.setattr(Event, "answers", True)
    entry, rounds = create(store, "w"), 3
    for _ in range(rounds * MOST_UNSEEN + 1):
        put(store, entry)
    assert len(looks) == rounds


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


def test_what_waits_for_room_in_the_backlog_hears_of_copies(store, monkeypatch):
    monkeypatch.setattr(store, "will_join", lambda: True)
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
    monkeypatch.setattr(Event, "answers", True)
    entry = create(store, "w")
    for _ in range(MOST_UNSEEN):
        put(store, entry)
    before = len(made)
    for _ in range(5 * MOST_UNSEEN):
        put(store, entry)
        store.fetch(entry, store.arena.slot(SIZE, SIZE)).join_compute()
    assert len(made) <= before + 2


# --- How ends are heard of ---


def test_a_long_chain_of_copies_ends(store):
    # Chunks of one step stream through one slot: a fetch, and a put of what was computed.
    slot, last = store.arena.slot(0, 64), []
    entry = store.create("chunk", EntryKind.STATE, 64, tier="host")
    store.put(entry, slot, after=[store.device.mark()])
    for _ in range(1000):
        store.fetch(entry, slot, after=[store.device.mark(), *last]).join_compute()
        last = [store.put(entry, slot, after=[store.device.mark()])]
    last[0].wait()
    store.drain()
    assert store.is_idle()


def test_of_the_same_chain_the_host_hears_when_it_looks(store, monkeypatch):
    slot, entry = store.arena.slot(0, 64), store.create("w", EntryKind.STATE, 64, tier="host")
    tickets = [store.put(entry, slot, after=[store.device.mark()])]
    for _ in range(100):
        after = [store.device.mark(), tickets[-1]]
        tickets.append(store.fetch(entry, slot, after=after))
        tickets.append(store.put(entry, slot, after=[store.device.mark(), tickets[-1]]))
    assert not any(ticket.over for ticket in tickets)
    monkeypatch.setattr(Event, "answers", True)
    assert store.is_idle()
    assert all(ticket.over for ticket in tickets)


def test_a_thread_waits_for_copies_the_oldest_first_of_both_directions(store, monkeypatch):
    puts, entry, slot = two_puts(store), create(store, "u"), store.arena.slot(64, 64)
    puts.append(store.put(entry, slot, after=[store.device.mark()]))
    back = store.fetch(entry, slot)
    later = store.fetch(entry, store.arena.slot(128, 64))
    wait, waited = Mark.wait, []

    def noting(mark):
        waited.append(mark)
        wait(mark)

    monkeypatch.setattr(Mark, "wait", noting)
    back.wait()
    assert waited == [copy.mark for copy in (*puts, back)]
    assert not later.ended, "nobody asked"


def test_who_is_interrupted_while_asking_may_ask_again(store, monkeypatch):
    left = put(store, create(store, "w"))
    ask = type(store.device).wait_in_thread

    def struck(*given):
        monkeypatch.setattr(type(store.device), "wait_in_thread", ask)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(store.device), "wait_in_thread", struck)
    with pytest.raises(KeyboardInterrupt):
        store.drain()
    assert not left.awaited, "else nobody would wait for it any more"
    store.drain()
    assert store.is_idle()


def two_puts(store):
    """Of which the first ends first."""
    names = ("w", "v")
    entries = [store.create(name, EntryKind.GRAD, 64, tier="host") for name in names]
    return [store.put(e, store.arena.slot(0, 64), after=[store.device.mark()]) for e in entries]


def tell_badly_once(store, monkeypatch):
    ends = store._mover.ends
    finished = ends._finished

    def badly(*given):
        monkeypatch.setattr(ends, "_finished", finished)
        raise AssertionError("a defect")

    monkeypatch.setattr(ends, "_finished", badly)


def test_two_interrupts_while_the_host_looks_wait_until_copies_are_told(store, monkeypatch):
    copies, asked = two_puts(store), []

    def query(event):
        asked.append(event)
        if len(asked) == 2:  # one of the copies has ended
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return True

    monkeypatch.setattr(Event, "query", query)
    with pytest.raises(KeyboardInterrupt):
        store.is_idle()
    assert all(copy.over for copy in copies)
    store.drain()


def test_what_the_host_meets_while_it_looks_keeps_no_ended_copy_untold(store, monkeypatch):
    copies = two_puts(store)
    done = Mark.done

    def done_badly(mark):
        if mark is copies[1].mark:
            raise AssertionError("a defect")
        return done(mark)

    monkeypatch.setattr(Event, "answers", True)
    with monkeypatch.context() as patch:
        patch.setattr(Mark, "done", done_badly)
        with pytest.raises(AssertionError, match="a defect"):
            store.is_idle()
    assert copies[0].ended
    assert store.is_idle()
    assert all(copy.over for copy in copies)


def test_others_are_told_though_telling_one_copy_fails_and_that_one_later(store, monkeypatch):
    copies = two_puts(store)
    asked = copies[0].end_heard()
    monkeypatch.setattr(Event, "answers", True)
    tell_badly_once(store, monkeypatch)
    with pytest.raises(AssertionError, match="a defect"):
        store.is_idle()
    assert [copy.over for copy in copies] == [False, True]
    assert isinstance(asked.error, AssertionError), "who waits is not left waiting"
    store.drain()
    assert copies[0].over
    assert copies[0].end_heard().error is None


def test_who_abandons_a_store_has_all_told_that_ended(store, monkeypatch):
    copies = two_puts(store)
    monkeypatch.setattr(Event, "answers", True)
    tell_badly_once(store, monkeypatch)
    with pytest.raises(AssertionError, match="a defect"):
        store.is_idle()
    store._mover.abandon(RuntimeError("closed"))
    assert all(copy.over for copy in copies)
    assert not store._mover._in_flight


def test_who_abandons_a_store_goes_on_though_one_end_fails(store, monkeypatch):
    copies = two_puts(store)
    tell_badly_once(store, monkeypatch)
    with pytest.raises(AssertionError, match="a defect"):
        store._mover.abandon(RuntimeError("closed"))
    assert all(copy.over for copy in copies), "the first one was told by who ended the second"


def test_what_the_host_meets_before_a_copy_takes_no_room_twice(store, monkeypatch):
    monkeypatch.setattr(store, "will_join", lambda: True)
    entry = create(store, "w")
    before = [put_from_compute(store, entry, 64) for _ in range(MOST_UNSEEN)]

    def query(event):
        raise AssertionError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(Event, "query", query)
        with pytest.raises(AssertionError, match="a defect"):
            put_from_compute(store, entry, 64)
    assert store._backlog._now == MOST_UNSEEN * 64, "those before"
    assert list(store._mover._in_flight) == before, "what was refused is nowhere"
    store.drain()
    assert store._backlog._now == 0


def beside_the_arena():
    """Memory as a step's scratch is, and whether it is alive."""
    memory = torch.ones(SIZE, dtype=torch.uint8)
    return memory, weakref.ref(memory.untyped_storage())


def test_compute_that_joins_a_fetch_has_its_memory(store):
    entry = create(store, "w")
    put(store, entry)
    memory, alive = beside_the_arena()
    ticket = store.fetch(entry, memory, after=[store.device.mark()])
    del memory
    assert alive() is not None
    ticket.join_compute()
    assert alive() is None


def test_who_hears_that_memory_is_read_no_more_may_give_it_back(store, monkeypatch):
    monkeypatch.setattr(store, "will_join", lambda: True)
    memory, alive = beside_the_arena()
    left = store.put(create(store, "w"), memory, after=[store.device.mark()])
    del memory
    left.memory_heard().wait_finished()
    assert alive() is None


def test_memory_of_a_put_that_nobody_joins_goes_back_when_it_is_read(store, monkeypatch):
    kept, entry = [], create(store, "w")
    for joins in (True, False):
        monkeypatch.setattr(store, "will_join", lambda joins=joins: joins)
        memory, alive = beside_the_arena()
        left = store.put(entry, memory, after=[store.device.mark()])
        kept.append((left, alive))
        del memory
        assert left.awaited is not joins
    assert not put(store, entry).awaited, "it lies in a slot, which goes back when it is joined"


def test_a_range_of_the_arena_is_free_once_its_copy_is_over(store, monkeypatch):
    monkeypatch.setattr(store, "will_join", lambda: True)
    whole = store.arena.budget_bytes
    left = store.put(create(store, "w"), store.arena.take(whole, "a value")[:SIZE])
    gc.collect()
    assert store.arena.reserve(SIZE, 0, "another") is None
    monkeypatch.setattr(Event, "answers", True)
    assert store.arena.reserve(SIZE, 0, "another") is not None
    assert left.over


def test_who_waits_for_room_hears_of_what_entered_before_and_came_later(store, monkeypatch):
    # Another thread has entered, and is about to enqueue its copy, when this one looks and waits.
    monkeypatch.setattr(store, "will_join", lambda: True)
    assert not put_from_compute(store, create(store, "w")).awaited
    store.drain()
    store._backlog._waiting = 1
    assert put_from_compute(store, store.create("v", EntryKind.GRAD, 64, tier="host"), 64).awaited


def test_who_waits_for_room_says_so_before_it_looks():
    seen = []

    def hear():
        seen.append(backlog.is_awaited)
        backlog.leave(10)

    backlog = Backlog(10, hear)
    backlog.enter(10)
    backlog.enter(10)
    assert seen == [True]
    assert not backlog.is_awaited


ENDS = {
    "released": lambda store, ticket: ticket.release(),
    "joined": lambda store, ticket: ticket.join_compute(),
    "waited for": lambda store, ticket: ticket.wait(),
    "looked": lambda store, ticket: store.is_idle(),
    "failed": lambda store, ticket: ticket.fail(RuntimeError("closed")),
}


@pytest.mark.parametrize("way", ENDS)
def test_no_memory_dies_under_a_lock(store, way, monkeypatch):
    monkeypatch.setattr(store, "will_join", lambda: True)
    entry = create(store, "w")
    if fetches := way == "joined":
        put(store, entry)
    memory, alive = beside_the_arena()
    move = store.fetch if fetches else store.put
    ticket, held = move(entry, memory, after=[store.device.mark()]), []
    weakref.finalize(alive(), lambda: held.append(store._mover._lock._is_owned()))
    del memory
    monkeypatch.setattr(Event, "answers", way == "looked")
    ENDS[way](store, ticket)
    assert held == [False]


def test_a_copy_is_over_once_all_have_been_told(store, monkeypatch):
    monkeypatch.setattr(store, "will_join", lambda: True)
    entry, seen = create(store, "w"), []
    finished = type(store._mover)._finished

    def look(*given):
        # The backlog has its room again, and nobody is told yet that it is over.
        seen.append((store._backlog._now, left.ended, left.over, left.end_heard()._finished))
        finished(*given)

    store._mover.ends._finished = lambda *given: look(store._mover, *given)
    left = put_from_compute(store, entry)
    left.wait()
    assert seen == [(0, True, False, False)]
    assert left.over
    assert left.end_heard()._finished


def test_what_comes_after_a_copy_that_has_failed_fails(store, monkeypatch):
    bad, other = create(store, "bad"), store.create("other", EntryKind.GRAD, 64, tier="host")
    slot = store.arena.slot(0, 64)
    store.put(other, slot, after=[store.device.mark()])
    failed = put(store, bad)
    failed.fail(RuntimeError("the link broke"))
    later = store.fetch(other, slot, after=[failed])
    with pytest.raises(RuntimeError, match="the link broke"):
        later.join_compute()


def test_a_copy_ends_after_what_it_follows_though_its_own_event_says_nothing(store, monkeypatch):
    bad = create(store, "bad")
    left = put(store, bad)
    back = store.fetch(bad, store.arena.slot(SIZE, SIZE))
    done = Mark.done

    def done_badly(mark):
        if mark is left.mark:
            raise RuntimeError("the link broke")
        return done(mark)

    monkeypatch.setattr(Event, "answers", True)
    monkeypatch.setattr(Mark, "done", done_badly)
    store.is_idle()
    with pytest.raises(RuntimeError, match="the link broke"):
        back.join_compute()


def test_an_entry_that_crosses_blocks_of_the_host_is_copied_by_the_device_alone(monkeypatch):
    """Half of it lies in one block, and half in the next."""
    monkeypatch.setattr(host, "BLOCK_BYTES", 3 * MiB)
    monkeypatch.setattr(opening, "HostTier", lambda *given, whole: host.HostTier(*given))
    with simulated() as simulation:
        store = Store(Config(device="cpu", device_memory="4MiB", host_memory="8MiB"))
        store.simulation = simulation
        create(store, "before")
        entry = create(store, "w")
        assert len(entry.place.tier.pieces(entry.place.extent, 0, SIZE)) == 2
        source = store.arena.slot(0, SIZE)
        source.copy_(torch.arange(SIZE, dtype=torch.int64).to(torch.uint8))
        written = store.put(entry, source, after=[store.device.mark()])
        read = store.fetch(entry, store.arena.slot(SIZE, SIZE))
        assert (type(written), type(read)) == (OneCopy, OneCopy)
        read.join_compute()
        assert torch.equal(store.arena.slot(SIZE, SIZE), source)
        assert not simulation.memory.pairs
        store.close()
