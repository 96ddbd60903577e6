"""How host threads of the runtime come to know that something is over: what really says so.

    promises    who keeps one tells it what he knows; who waits for it learns that, and so does a
                callback, which knows nothing of the thread that happens to run it
    queues      a job knows what its submitter knew
    copies      who notes that one has ended tells whoever tells others, and whoever asks later
    entries     a transfer knows those on its entry that it follows, over by now or waited for
    memory      who is given bytes of the ring, or of the host tier, knows those who gave them back
    lanes       of ranks: a thread carries out one collective after the other, and knows the last

A lock by itself tells nothing, and a promise that happens to be kept is not kept for who has not
waited for it (`done`): what holds then holds at any speed of threads, links and compute.
"""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from streams.clocks import LOCK, Clock, common, joined, knowing, known, knows, learn, scope, told
from streams.cuda import Event, SimulatedCuda, Simulation, host_wait

from zcompile.ir.torch_compat import without_modes
from zcompile.runtime import executor, open
from zcompile.runtime.device import cuda
from zcompile.runtime.device.pages import clear_bytes, copy_bytes
from zcompile.runtime.gradients import exchanged
from zcompile.runtime.ranks import fabric, transport
from zcompile.runtime.ranks.transport import Channel, PinnedMessages
from zcompile.runtime.store import resident, store
from zcompile.runtime.tiers import host
from zcompile.runtime.tiers.base import Extent, Place
from zcompile.runtime.tiers.disk import DiskTier
from zcompile.runtime.tiers.host import HostTier
from zcompile.runtime.transfer import queue, transfer
from zcompile.runtime.transfer.one_copy import CopyEnds, OneCopy
from zcompile.runtime.transfer.queue import Backlog, TransferQueue
from zcompile.runtime.transfer.staging import Staging
from zcompile.runtime.transfer.ticket import Countdown, Promise, Workers
from zcompile.runtime.transfer.transfer import Add, InFlight, Transfer


@contextlib.contextmanager
def simulated() -> Iterator[Simulation]:
    """Inside, models that are offloaded to the CPU rest on a simulated card."""
    # Nobody knows anything of the streams of another card.
    with pytest.MonkeyPatch.context() as patch, knowing():
        made = Simulation()
        patch.setattr(cuda, "_CUDA", made.cuda)
        device = type("Device", (SimulatedCuda,), {"simulation": made})
        patch.setattr(open, "CpuDevice", device)
        keep = _promises(patch, made)
        _queues(patch)
        _ends_of_copies(patch, keep)
        _entries(patch)
        _ring(patch, made)
        _disk(patch, made)
        _on_the_host(patch, made)
        _compute(patch, made)
        _ranks(patch, made)
        yield made


# --- Promises ---


def _promises(patch: pytest.MonkeyPatch, simulation: Simulation) -> Callable[[Promise], None]:
    """Returns what tells a promise, kept by now or not, what the thread that calls knows."""
    tells: defaultdict[int, Clock] = defaultdict(dict)
    """By the id of a promise: what those know who kept it."""

    def keep(promise: Promise) -> None:
        with LOCK:
            learn(tells[id(promise)], scope().known)

    make, wait, then, finish = (
        Promise.__init__,
        Promise.wait_finished,
        Promise.then,
        Promise.finish,
    )
    drop = Countdown.drop

    @functools.wraps(make)
    def __init__(self):
        tells[id(self)] = {}
        make(self)

    @functools.wraps(wait)
    def wait_finished(self):
        if not self.done():  # else it waits for nobody
            host_wait("promise: ")
        then(self, simulation.held.tell)
        simulation.held.work_until(lambda: self._finished)
        wait(self)
        told(tells[id(self)])

    def done(self):
        with LOCK:
            return self._finished and knows(scope().known, tells[id(self)])

    @functools.wraps(then)
    def then_knowing(self, callback):
        asked = known()

        def call(error):
            with knowing(asked, tells[id(self)]):
                callback(error)

        then(self, call)

    @functools.wraps(finish)
    def finish_telling(self, error=None):
        if not self._finished:
            keep(self)
        finish(self, error)

    @functools.wraps(drop)
    def drop_telling(self, error=None):
        keep(self)
        drop(self, error)

    patch.setattr(Promise, "__init__", __init__)
    patch.setattr(Promise, "wait_finished", wait_finished)
    patch.setattr(Promise, "done", done)
    patch.setattr(Promise, "then", then_knowing)
    patch.setattr(Promise, "finish", finish_telling)
    patch.setattr(Countdown, "drop", drop_telling)

    enter = Backlog.enter

    @functools.wraps(enter)
    def enter_and_forget(self, nbytes):
        # Whether it waits is luck, and it bounds bytes alone.
        with knowing(), pytest.MonkeyPatch.context() as within:
            within.setattr(Promise, "done", lambda promise: promise._finished)
            enter(self, nbytes)

    patch.setattr(Backlog, "enter", enter_and_forget)
    synchronize = Event.synchronize

    def waits(self):
        if not knows(scope().known, self.known):
            host_wait("event: ")
        synchronize(self)

    patch.setattr(Event, "synchronize", waits)
    return keep


# --- Queues ---


def _queues(patch: pytest.MonkeyPatch) -> None:
    submit = Workers.submit

    @functools.wraps(submit)
    def submit_knowing(self, job):
        asked = known()

        def run():
            with knowing(asked):
                job()

        submit(self, run)

    patch.setattr(Workers, "submit", submit_knowing)


# --- Copies that the device makes alone ---


def _ends_of_copies(patch: pytest.MonkeyPatch, keep: Callable[[Promise], None]) -> None:
    """One thread may wait for the event of a copy, on behalf of a later one, another tell that it
    has ended, and a third ask afterwards. Each does its part under the lock of the queue, behind
    the one before: so all of them know of the copy what the first does, and of other things
    nothing, since who that is, is luck."""
    ends: dict[int, Clock] = {}
    """By the id of a copy that has ended: what the thread knew of its event that noted that."""
    end_with, tell, end_heard = OneCopy.end_with, OneCopy.tell, OneCopy.end_heard

    @functools.wraps(end_with)
    def end_noting(self, error):
        is_the_end = end_with(self, error)
        if is_the_end:
            event = {} if self.mark is None else self.mark.event.known
            ends[id(self)] = common(event, known())
            if self._heard is not None:
                with knowing(ends[id(self)]):
                    keep(self._heard)
        return is_the_end

    @functools.wraps(tell)
    def tell_knowing(self, finished):
        with knowing(ends[id(self)]):
            tell(self, finished)

    @functools.wraps(end_heard)
    def end_heard_knowing(self):
        with self._ends.lock:
            heard = self._heard = self._heard or Promise()
            if self.ended:
                with knowing(ends[id(self)]):
                    keep(heard)
        with knowing():
            return end_heard(self)

    patch.setattr(OneCopy, "end_with", end_noting)
    patch.setattr(OneCopy, "tell", tell_knowing)
    patch.setattr(OneCopy, "end_heard", end_heard_knowing)
    patch.setattr(OneCopy, "memory_heard", end_heard_knowing)


# --- Entries ---


class _Over:
    """A transfer that is over, and what is known then."""

    def __init__(self, of: InFlight, clock: Clock) -> None:
        self.begin, self.end, self.writes = of.begin, of.end, of.writes
        self.clock = clock


def _entries(patch: pytest.MonkeyPatch) -> None:
    over: dict[int, tuple[Any, list[_Over]]] = {}
    """Id of a place -> the place, and the transfers on it that are over."""
    given_back: dict[tuple[int, int], list[tuple[int, int, Clock]]] = defaultdict(list)
    """Id of a tier and file -> ranges, and what those knew who gave them back."""
    extents: dict[tuple[int, int, int], Clock] = {}
    asked: dict[int, Clock] = {}
    """Id of a transfer -> what it was told of those on its entry that are over."""
    homes: Clock = {}
    sources: Clock = {}

    def rows(place):
        return over.setdefault(id(place), (place, []))[1]

    def of_extent(place):
        return extents.get((id(place.tier), place.extent.file, place.extent.offset), {})

    def followed(access, place):
        """What is known of the transfers on an entry that an access of it comes after."""
        low, high = place.blocks(access.begin, access.end)
        clocks = [of_extent(place)]
        for old in rows(place):
            begin, end = place.blocks(old.begin, old.end)
            if begin < high and low < end and (old.writes or access.writes):
                clocks.append(old.clock)
        return joined(*clocks)

    submit, ended, free = TransferQueue.submit, TransferQueue._finished, TransferQueue.free
    start, blockers, ready = Transfer.start, Place.blockers, TransferQueue.are_ready
    enqueue, look = OneCopy.enqueue, CopyEnds.look
    drain, wait_for_memory = TransferQueue.drain, TransferQueue.wait_for_memory

    @functools.wraps(submit)
    def submit_noting(self, moved, after):
        moved.memory_free.then(lambda error: _learn(sources))
        submit(self, moved, after)

    def _learn(into):
        with LOCK:
            learn(into, scope().known)

    @functools.wraps(blockers)
    def blockers_and_others(self, new):
        # Who asks for those under way is told of those that are over, by the list they left.
        with LOCK:
            clock = followed(new, self)
            if isinstance(new, InFlight):
                asked[id(new)] = clock
            else:
                told(clock)
        return blockers(self, new)

    @functools.wraps(start)
    def start_knowing(self, error):
        with knowing(scope().known, asked.pop(id(self), {})):
            start(self, error)

    @functools.wraps(enqueue)
    def enqueue_knowing(self, *given):
        with knowing(scope().known, asked.pop(id(self), {})):
            enqueue(self, *given)

    @functools.wraps(look)
    def look_and_forget(self):
        # What is over when somebody looks is luck: who looks may not count on it.
        with knowing(known()):
            look(self)

    def done(self):
        return self.over and knows(scope().known, self.mark.event.known)

    @functools.wraps(ended)
    def finished(self, moved, error):
        with LOCK:
            place, known_rows = moved.place, rows(moved.place)
            if moved.writes:  # which came after all that it covers
                known_rows[:] = [
                    r for r in known_rows if not (moved.begin <= r.begin and r.end <= moved.end)
                ]
            known_rows.append(_Over(moved, known()))
            learn(homes, scope().known)
            if isinstance(moved, OneCopy):
                learn(sources, scope().known)
            everything = [row.clock for row in known_rows]
        with knowing(*everything, of_extent(place)):
            ended(self, moved, error)

    @functools.wraps(free)
    def free_knowing(self, place):
        with LOCK:
            clocks = [row.clock for row in rows(place)]
        with knowing(scope().known, *clocks, of_extent(place)):
            free(self, place)

    @functools.wraps(ready)
    def are_ready(self, places):
        places = list(places)
        found = ready(self, places)
        with LOCK:
            for place, yes in zip(places, found, strict=True):
                if yes:
                    told(joined(of_extent(place), *(row.clock for row in rows(place))))
        return found

    @functools.wraps(drain)
    def drain_all(self):
        drain(self)
        told(homes)

    @functools.wraps(wait_for_memory)
    def wait_for_all_memory(self):
        wait_for_memory(self)
        told(sources)

    patch.setattr(TransferQueue, "submit", submit_noting)
    patch.setattr(TransferQueue, "_finished", finished)
    patch.setattr(TransferQueue, "free", free_knowing)
    patch.setattr(Place, "blockers", blockers_and_others)
    patch.setattr(TransferQueue, "are_ready", are_ready)
    patch.setattr(TransferQueue, "drain", drain_all)
    patch.setattr(TransferQueue, "wait_for_memory", wait_for_all_memory)
    patch.setattr(Transfer, "start", start_knowing)
    patch.setattr(OneCopy, "enqueue", enqueue_knowing)
    patch.setattr(OneCopy, "done", done)
    patch.setattr(OneCopy, "memory_done", done)
    patch.setattr(CopyEnds, "look", look_and_forget)

    def lends(tier):
        reserve, release = tier.reserve, tier.release

        @functools.wraps(reserve)
        def reserve_knowing(self, nbytes, name):
            made = reserve(self, nbytes, name)
            begin, end = made.offset, made.offset + made.nbytes
            with LOCK:
                held = given_back[id(self), made.file]
                mine = [clock for b, e, clock in held if b < end and begin < e]
                extents[id(self), made.file, made.offset] = joined(*mine)
            return made

        @functools.wraps(release)
        def release_telling(self, extent):
            begin, end = extent.offset, extent.offset + extent.nbytes
            with LOCK:
                held = given_back[id(self), extent.file]
                held[:] = [r for r in held if not (begin <= r[0] and r[1] <= end)]
                held.append((begin, end, known()))
            release(self, extent)

        patch.setattr(tier, "reserve", reserve_knowing)
        patch.setattr(tier, "release", release_telling)

    lends(HostTier)
    lends(DiskTier)


# --- The ring and the disk ---


def _ring(patch: pytest.MonkeyPatch, simulation: Simulation) -> None:
    asked: dict[int, Clock] = {}
    given: list[tuple[int, int, Clock]] = []
    request, give, begin_chunk = Staging.request, Staging.give, Transfer.begin_chunk

    def span(buffer):
        begin = buffer.memory.data_ptr()
        return begin, begin + buffer.nbytes

    @functools.wraps(request)
    def request_telling(self, lane, staged, chunks):
        with LOCK:
            asked[id(staged)] = joined(asked.get(id(staged), {}), scope().known)
        request(self, lane, staged, chunks)

    @functools.wraps(give)
    def give_telling(self, buffer):
        begin, end = span(buffer)
        with LOCK:
            given[:] = [r for r in given if not (begin <= r[0] and r[1] <= end)]
            given.append((begin, end, known()))
        give(self, buffer)

    @functools.wraps(begin_chunk)
    def begin_knowing(self, begin, end, buffer):
        low, high = span(buffer)
        with LOCK:
            mine = [clock for b, e, clock in given if b < high and low < e]
        with knowing(asked[id(self)], *mine):
            begin_chunk(self, begin, end, buffer)

    patch.setattr(Staging, "request", request_telling)
    patch.setattr(Staging, "give", give_telling)
    patch.setattr(Transfer, "begin_chunk", begin_knowing)


def file_address(extent: Extent, begin: int) -> int:
    """Where byte `begin` of an extent of the disk lies: no memory is there."""
    return (1 << 62) + (extent.file << 48) + extent.offset + begin


def _disk(patch: pytest.MonkeyPatch, simulation: Simulation) -> None:
    """A call of the system touches a buffer some time between its submission and its promise."""

    def moving(start, reads):
        @functools.wraps(start)
        def move(self, extent, begin, buffer):
            memory = torch.frombuffer(buffer.view, dtype=torch.uint8)
            inside, at = simulation.pinned_spans([memory]), file_address(extent, begin)
            beyond = [(at, at + buffer.nbytes)]
            ranges = (inside, beyond) if reads else (beyond, inside)
            with knowing(known()) as call:
                simulation.on_host(f"disk {extent.name}", *ranges)
            told_so = Promise()

            def finish(error):
                with knowing(known(), call.known):
                    told_so.finish(error)

            start(self, extent, begin, buffer).then(finish)
            return told_so

        return move

    patch.setattr(DiskTier, "read", moving(DiskTier.read, reads=False))
    patch.setattr(DiskTier, "write", moving(DiskTier.write, reads=True))


# --- The host and compute ---


def _on_the_host(patch: pytest.MonkeyPatch, simulation: Simulation) -> None:
    """Copies and sums that host threads make themselves."""

    def copy(target, source, nbytes):
        pinned = simulation.pinned_spans
        simulation.on_host("host copy", pinned([source[:nbytes]]), pinned([target[:nbytes]]))
        copy_bytes(target, source, nbytes)

    def clear(target, nbytes):
        simulation.on_host("host clear", [], simulation.pinned_spans([target[:nbytes]]))
        clear_bytes(target, nbytes)

    for module in (transfer, host, cuda):
        patch.setattr(module, "copy_bytes", copy)
    patch.setattr(transfer, "clear_bytes", clear)
    add = Add._add

    @functools.wraps(add)
    def add_seen(self, old, new, begin):
        pinned = simulation.pinned_spans
        simulation.on_host(f"sum {self.name}", pinned([new[: old.numel()]]), pinned([old]))
        add(self, old, new, begin)

    patch.setattr(Add, "_add", add_seen)


def _compute(patch: pytest.MonkeyPatch, simulation: Simulation) -> None:
    """What compute does: ops, and what the runtime does in its place on the emulated device."""

    def copy(target, source, nbytes):
        simulation.launch([source], [target], " copy")
        copy_bytes(target, source, nbytes)

    def clear(target, nbytes):
        simulation.launch([], [target[:nbytes]], " clear")
        clear_bytes(target, nbytes)

    patch.setattr(resident, "copy_bytes", copy)
    patch.setattr(queue, "clear_bytes", clear)
    run, read = executor.Executor.run, resident.read

    @functools.wraps(run)
    def run_watched(self, schedule, *args, **kwargs):
        with simulation.computing(schedule.name), simulation.watching():
            return run(self, schedule, *args, **kwargs)

    def read_blocking(*given):
        found = read(*given)
        simulation.compute.synchronize()
        return found

    patch.setattr(executor.Executor, "run", run_watched)
    patch.setattr(resident, "read", read_blocking)
    compute = executor.compute

    def compute_named(run, values, targets=()):
        with simulation.computing(run.region.text[:40]):
            compute(run, values, targets)

    patch.setattr(executor, "compute", compute_named)


# --- Ranks ---


def _ranks(patch: pytest.MonkeyPatch, simulation: Simulation) -> None:
    """What lanes do: gloo reads and writes memory of the host from when a message is handed over
    until it has been waited for."""
    carry, bring = PinnedMessages.carry, PinnedMessages.bring
    send, receive, wait = Channel.send, Channel.receive, Channel.wait
    host_rows, add_up = transport.host_rows, fabric.add_up
    lanes: dict[int, Clock] = defaultdict(dict)
    """By the id of what carries messages: what its thread knows."""
    carried: dict[int, tuple[Any, list[tuple[int, int]], bool]] = {}
    """By the id of what is waited for: that, the bytes, and whether they are written."""

    def as_its_thread(function):
        @functools.wraps(function)
        def act(self, *given):
            told(lanes[id(self)])
            function(self, *given)
            lanes[id(self)] = known()

        return act

    def handing_over(function, writes):
        @functools.wraps(function)
        def hand_over(self, peer, tensor):
            ranges = simulation.pinned_spans([tensor])
            work = function(self, peer, tensor)
            carried[id(work)] = work, ranges, writes
            simulation.on_host("message", *(([], ranges) if writes else (ranges, [])))
            return work

        return hand_over

    @functools.wraps(wait)
    def wait_and_touch(self, peer, work):
        wait(self, peer, work)
        _, ranges, writes = carried.pop(id(work))
        simulation.on_host("message", *(([], ranges) if writes else (ranges, [])))

    def copy(target, source, nbytes):
        pinned = simulation.pinned_spans
        simulation.on_host("lane", pinned([source[:nbytes]]), pinned([target[:nbytes]]))
        copy_bytes(target, source, nbytes)

    @functools.wraps(bring)
    def bring_seen(self, target, source):
        simulation.on_host("lane", simulation.pinned_spans([source]), [])
        bring(self, target, source)

    def add_seen(total, more):
        pinned = simulation.pinned_spans
        simulation.on_host("lane", pinned([more, total]), pinned([total]))
        add_up(total, more)

    def rows(*shape):
        with without_modes():  # the host makes it
            return simulation.lies_on_host(host_rows(*shape))

    patch.setattr(transport, "copy_bytes", copy)
    patch.setattr(fabric, "add_up", add_seen)
    patch.setattr(PinnedMessages, "carry", as_its_thread(carry))
    patch.setattr(PinnedMessages, "bring", as_its_thread(bring_seen))
    patch.setattr(Channel, "send", handing_over(send, writes=False))
    patch.setattr(Channel, "receive", handing_over(receive, writes=True))
    patch.setattr(Channel, "wait", wait_and_touch)
    for module in (fabric, exchanged, store):
        patch.setattr(module, "host_rows", rows)
