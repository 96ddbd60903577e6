"""The transfer queue decides which transfer follows which, and knows what is in flight and what
failed.

A transfer starts in the thread that submits it, when nothing stands before it; else in a thread of
the queue, which keeps long queues on one entry from nesting their calls.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial

from torch import Tensor

from zcompile.runtime.changes import CHANGES
from zcompile.runtime.device.pages import clear_bytes
from zcompile.runtime.tiers.base import Place, Span, TierIO
from zcompile.runtime.transfer.host_work import HostLane, HostWork
from zcompile.runtime.transfer.one_copy import CopyEnds, OneCopy
from zcompile.runtime.transfer.ticket import Countdown, Promise, Ready, Reporting, Ticket, Workers
from zcompile.runtime.transfer.transfer import InFlight, SourceRead, Transfer


@cache
def heard_by_the_host(kind: type) -> bool:
    """Whether tickets of a class are such that the host may have to hear of them before what comes
    after them is enqueued; asked once, since InFlight is an abstract class."""
    return issubclass(kind, InFlight | Promise)


class TransferQueue:
    """All transfers of one store; thread-safe."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        """The first error that a transfer failed with."""
        self.closed: BaseException | None = None
        self._starter = Workers("zinf-start", 1, self.abandon)
        self._in_flight: dict[InFlight, None] = {}
        """The oldest first."""
        self._lock = threading.RLock()
        self.ends = CopyEnds(self._lock, self._finished)

    def submit(self, transfer: Transfer, after: Sequence[Ticket]) -> None:
        """Start `transfer` once its entry and the transfers in `after` let it.

        A put in `after` counts as complete when its memory is free, not when its bytes are home.
        raises  what an earlier transfer on the entry failed with
        """
        gate = Countdown()  # finished once all that comes before has
        place = transfer.place
        with self._lock:
            self.check(place)
            _check_use(transfer)
            blockers = place.blockers(transfer)
            transfer.prepare()
            place.in_flight.append(transfer)
            self._in_flight[transfer] = None
        transfer.home.then(partial(self._finished, transfer))
        # Others on these bytes must be home first; those in `after` must have freed their memory.
        # Where the device's own streams can see to that, it is enough that they are enqueued.
        for blocker in blockers:
            assert isinstance(blocker, InFlight), "transfers are in flight on entries"
            self._follow(transfer, gate, blocker, blocker.home_mark, blocker.end_heard)
        for ticket in after:
            if isinstance(ticket, InFlight):
                self._follow(transfer, gate, ticket, ticket.copies_mark, ticket.memory_heard)
            elif isinstance(ticket, Promise):  # of ranks
                gate.hold()
                ticket.then(gate.drop)
            else:
                assert not isinstance(ticket, SourceRead), "who follows a put is given the put"
        gate.drop()
        if gate.done():
            transfer.start(gate.error)
        else:
            gate.then(partial(self._start_later, transfer))

    def submit_to_host(self, work: HostWork, lane: HostLane) -> None:
        """Let `lane` do `work` once all that was submitted before on the bytes that it uses is
        over; whatever is submitted on them later waits for it.

        raises  what an earlier transfer on one of the entries failed with
        """
        gate = Countdown()
        with self._lock:
            for use in work.uses:
                self.check(use.place)
                _check_use(use)
            blockers = {b: None for use in work.uses for b in use.place.blockers(use)}
            for use in work.uses:
                use.prepare()
                use.place.in_flight.append(use)
                self._in_flight[use] = None
        for use in work.uses:
            use.end_heard().then(partial(self._finished, use))
        for blocker in blockers:
            gate.hold()
            blocker.end_heard().then(gate.drop)
        gate.drop()
        gate.then(partial(lane.begin, work))

    def copy_on_stream(self, copy: OneCopy, after: Sequence[Ticket]) -> bool:
        """Enqueue `copy` now, if events of the device say all that it has to come after; interrupts
        are deferred.

        Else nothing has happened, and it is to be submitted in parts.
        after   as in `submit`
        raises  what an earlier transfer on the entry failed with
        """
        place, marks, others = copy.place, list[Ticket](), list[OneCopy]()
        for ticket in after:
            if type(ticket) is OneCopy:
                others.append(ticket)
            elif heard_by_the_host(type(ticket)):
                return False
            elif type(ticket) is not Ready:
                marks.append(ticket)
        self.ends.look_now_and_then()  # now: what that meets is to be raised before there is a copy
        with self._lock:
            self.check(place)
            _check_use(copy)
            home = copy.home_pieces()
            if home is None:
                return False
            for blocker in place.blockers(copy):
                if type(blocker) is not OneCopy:
                    return False
                others.append(blocker)
            error: BaseException | None = None
            for other in others:
                if other.error is not None:
                    error = other.error
                    break
            try:
                if error is None:
                    copy.enqueue(home, marks, others)
            except RuntimeError as failed:
                error = failed
            if error is None:
                place.in_flight.append(copy)
                self._in_flight[copy] = None
                self.ends.enqueued(copy)
        if error is not None:
            copy.fail(error)
        return True

    def _follow(
        self,
        transfer: Transfer,
        gate: Countdown,
        before: InFlight,
        mark: Callable[[], Ticket | None],
        over: Callable[[], Promise],
    ) -> None:
        """Let `transfer` come after `before`: after a mark of the device, or when it is `over`.

        What went wrong before is its error too. Where it need not wait for that to begin, it is
        home only when it knows.
        """

        def enqueued(error: BaseException | None) -> None:
            found = mark() if error is None and transfer.heeds_marks else None
            if found is not None:
                transfer.follow(found)
                transfer.home.hold()
                over().then(transfer.home.drop)
                gate.drop()
            else:
                over().then(gate.drop)

        gate.hold()
        before.when_enqueued(enqueued)

    def check(self, place: Place) -> None:
        """raises  what an earlier transfer on the entry failed with, or that the store was
        closed"""
        error = self.closed or place.error
        if error is not None:
            raise error

    def wait_to_touch(
        self, place: Place, begin: int, memory: Tensor, writes: bool, overwrites: bool = False
    ) -> None:
        """Wait until compute may touch an entry in place: its bytes from `begin` on, which rest in
        `memory`.

        No transfer moves them then, and blank bytes are zeros.
        overwrites  all of them are written before they are read, so that blank bytes may stay as
                    they are
        raises      what an earlier transfer on the entry failed with
        """
        end = begin + memory.numel()
        with self._lock:
            self.check(place)
            blockers = place.blockers(Span(begin, end, writes))
        for blocker in blockers:
            blocker.end_heard().wait()
        with self._lock:
            for low, high, held in place.written.pieces(begin, end) if not overwrites else ():
                if not held and memory.is_cpu:
                    clear_bytes(memory[low - begin :], high - low)
                elif not held:
                    memory[low - begin : high - begin].zero_()
            if writes:
                place.written.add(begin, end)

    def are_ready(self, places: Iterable[Place]) -> list[bool]:
        """For each place, whether nothing is in flight on the entry, and all of it holds a value.

        raises  as `check`
        """
        with self._lock:
            found, closed = [], self.closed is not None
            for place in places:
                if closed or place.error is not None:
                    self.check(place)
                found.append(not place.in_flight and place.written.holds(0, place.nbytes))
            return found

    def mark_blank(self, place: Place) -> None:
        """From here on in the order of submission, the entry holds nothing."""
        with self._lock:
            self.check(place)
            place.written.clear()
        if place.tier.on_device:  # elsewhere nobody is lent its bytes from step to step
            CHANGES.note()

    def free(self, place: Place) -> None:
        """Give the extent back once nothing is in flight on it."""
        with self._lock:
            place.free()
            idle = not place.in_flight
        if idle:
            place.tier.release(place.extent)

    def wait_for_dead(self, tier: TierIO) -> bool:
        """Wait until the extents of `tier` are back that dead entries had; False, if all are.

        For all of them: who took the first holes while others are to come would cut them up.
        """
        with self._lock:
            in_flight = list(self._in_flight)
        found = [t for t in in_flight if t.place.freed and t.place.tier is tier]
        if found:
            self.ends.look()  # for what is over by now, no thread has to wait
        for transfer in found:
            transfer.end_heard().wait_finished()
        return bool(found)

    def wait_for_memory(self) -> None:
        """Wait until no transfer that is in flight now touches its memory any more."""
        with self._lock:
            in_flight = list(self._in_flight)
        for transfer in in_flight:
            transfer.memory_heard().wait_finished()

    def is_idle(self) -> bool:
        """Whether nothing is in flight, as of now; waits for no transfer."""
        if self._in_flight:
            self.ends.look()
        return not self._in_flight

    def drain(self) -> None:
        """Wait for all transfers; raises the first error of any."""
        while (left := self._oldest()) is not None:
            left.end_heard().wait_finished()
        error = self.error or self.closed
        if error is not None:
            raise error

    def _oldest(self) -> InFlight | None:
        with self._lock:
            return next(iter(self._in_flight), None)

    def close(self, error: BaseException) -> None:
        """Start nothing any more; later submissions raise `error`."""
        with self._lock:
            self.closed = self.closed or error
        CHANGES.note()
        self._starter.stop()

    def abandon(self, error: BaseException) -> None:
        """Fail all that is in flight; the threads that moved it have stopped, or it will never
        move.

        raises  the first error that this met, once it has gone on with the others
        """
        with self._lock:
            self.closed = self.closed or error
            left = list(self._in_flight)
        CHANGES.note()
        raised: list[BaseException] = []
        ends: list[Callable[[], None]] = [partial(transfer.fail, error) for transfer in left]
        for end in (*ends, self.ends.tell):
            with Reporting(raised.append):
                end()
        if raised:
            raise raised[0]

    def _start_later(self, transfer: Transfer, error: BaseException | None) -> None:
        self._starter.submit(partial(transfer.start, error))

    def _finished(self, transfer: InFlight, error: BaseException | None) -> None:
        """A transfer has ended: note its error, and free the extent if its entry is dead."""
        place = transfer.place
        with self._lock:
            if started := transfer in place.in_flight:
                place.in_flight.remove(transfer)
            if error is not None:
                place.error = place.error or error
                if self.closed is None:
                    self.error = self.error or error
                CHANGES.note()
            free = started and place.freed and not place.in_flight
            if not free:
                self._in_flight.pop(transfer, None)
        if free:
            try:
                place.tier.release(place.extent)
            finally:
                with self._lock:  # now: who waits for extents waits for what is in flight
                    self._in_flight.pop(transfer, None)


def _check_use(moved: InFlight) -> None:
    place = moved.place
    assert not place.freed, f"{place.name!r} is used after its last use"
    assert 0 <= moved.begin <= moved.end <= place.nbytes, "outside the entry"


def compute_marks(after: Sequence[Ticket]) -> tuple[Ticket, ...]:
    """The tickets that are points of compute, for the device to wait for. Promises of ranks are
    kept before a transfer that comes after them begins."""
    return tuple(t for t in after if not isinstance(t, InFlight | Promise | Ready))


class Backlog:
    """Bounds the bytes of put sources outside the arena that are in flight.

    hear      called before a wait: what leaves is to be heard of
    waited_s  seconds that `enter` has waited, in all
    """

    def __init__(self, most_bytes: int, hear: Callable[[], None] = lambda: None) -> None:
        self.waited_s = 0.0
        self.most_bytes = most_bytes
        self._hear = hear
        self._now = 0
        self._lock = threading.Lock()
        self._less = Promise()
        """Finished when fewer bytes are inside than now."""
        self._waiting = 0

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for room: who has entered since is to be heard of."""
        return self._waiting > 0

    def enter(self, nbytes: int) -> None:
        """Wait until `nbytes` more fit; a source larger than the bound waits until it is alone."""
        since = 0.0
        try:
            while True:
                with self._lock:
                    if not self._now or self._now + nbytes <= self.most_bytes:
                        self._now += nbytes
                        return
                    less = self._less = self._less if not self._less.done() else Promise()
                    if not since:
                        since = time.perf_counter()
                        self._waiting += 1
                self._hear()
                less.wait_finished()
        finally:
            if since:
                with self._lock:
                    self._waiting -= 1
                    self.waited_s += time.perf_counter() - since

    def leave(self, nbytes: int, error: BaseException | None = None) -> None:
        """`nbytes` are no longer in flight; `error` is ignored."""
        with self._lock:
            self._now -= nbytes
            less = self._less
        less.finish()
