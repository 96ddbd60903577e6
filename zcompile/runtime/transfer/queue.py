"""The order of transfers: what follows what, how much is under way, what went wrong first.

A transfer starts in the thread that submits it, when nothing stands before it, else in a thread
of the mover, which keeps long queues on one entry from nesting.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial

from torch import Tensor

from zcompile.runtime.device.pages import clear_bytes
from zcompile.runtime.tiers.base import Place, Span
from zcompile.runtime.transfer.ticket import Countdown, Promise, Ready, Ticket, Workers
from zcompile.runtime.transfer.transfer import Transfer


def marks_of(after: Sequence[Ticket]) -> tuple[Ticket, ...]:
    """The tickets that are points of compute, for the device to wait for."""
    return tuple(t for t in after if not isinstance(t, Transfer | Ready))


class TransferQueue:
    """All transfers of one store; thread-safe."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        """The first that a transfer failed with."""
        self.closed: BaseException | None = None
        self._starter = Workers("zinf-start", 1, self.abandon)
        self._under_way: set[Transfer] = set()
        self._lock = threading.RLock()

    def submit(self, transfer: Transfer, after: Sequence[Ticket]) -> None:
        """Start `transfer` once its entry and the transfers in `after` let it.

        A put in `after` counts as complete when its memory is free, not when its bytes are home.
        raises  what an earlier transfer on the entry failed with
        """
        gate = Countdown()
        place = transfer.place
        with self._lock:
            self.check(place)
            assert not place.freed, f"{place.name!r} is used after its last use"
            blockers = place.blockers(transfer)
            transfer.prepare()
            place.under_way.append(transfer)
            self._under_way.add(transfer)
        transfer.home.then(partial(self._finished, transfer))
        for blocker in blockers:
            gate.hold()
            blocker.home.then(gate.drop)
        for ticket in after:
            if isinstance(ticket, Transfer):
                gate.hold()
                ticket.over.then(gate.drop)
        gate.drop()
        if gate.done():
            transfer.start(gate.error)
        else:
            gate.then(partial(self._start_later, transfer))

    def check(self, place: Place) -> None:
        error = self.closed or place.error
        if error is not None:
            raise error

    def borrow(
        self, place: Place, begin: int, memory: Tensor, writes: bool, overwrites: bool = False
    ) -> None:
        """Wait until nothing moves the entry's bytes from `begin` on, which rest in `memory`, and
        make zeros of what is blank there; then compute may touch it.

        overwrites  all of it is written before it is read, so that blank bytes may stay as they are
        raises  what an earlier transfer on the entry failed with
        """
        end = begin + memory.numel()
        with self._lock:
            self.check(place)
            blockers = place.blockers(Span(begin, end, writes))
        for blocker in blockers:
            blocker.home.wait()
        with self._lock:
            for low, high, held in place.written.pieces(begin, end) if not overwrites else ():
                if not held and memory.is_cpu:
                    clear_bytes(memory[low - begin :], high - low)
                elif not held:
                    memory[low - begin : high - begin].zero_()
            if writes:
                place.written.add(begin, end)

    def still(self, places: Iterable[Place]) -> list[bool]:
        """Of each, whether nothing is under way on the entry, and all of it holds a value.

        raises  as `check`
        """
        with self._lock:
            found = []
            for place in places:
                self.check(place)
                found.append(not place.under_way and place.written.holds(0, place.nbytes))
            return found

    def blank(self, place: Place) -> None:
        """From here on in the order of submission, the entry holds nothing."""
        with self._lock:
            self.check(place)
            place.written.clear()

    def free(self, place: Place) -> None:
        """Give the extent back once nothing is under way on it."""
        with self._lock:
            place.freed = True
            idle = not place.under_way
        if idle:
            place.tier.release(place.extent)

    def memories_free(self) -> None:
        """Wait until no transfer under way now touches its memory any more."""
        with self._lock:
            under_way = list(self._under_way)
        for transfer in under_way:
            transfer.over.settle()

    def is_idle(self) -> bool:
        """Whether nothing is under way; as of now, takes no lock."""
        return not self._under_way

    def drain(self) -> None:
        """All is done; raises the first error of any transfer."""
        while (left := self._oldest()) is not None:
            left.home.settle()
        error = self.error or self.closed
        if error is not None:
            raise error

    def _oldest(self) -> Transfer | None:
        with self._lock:
            return next(iter(self._under_way), None)

    def close(self, error: BaseException) -> None:
        """Start nothing any more; `error` is what later submissions raise."""
        with self._lock:
            self.closed = self.closed or error
        self._starter.stop()

    def abandon(self, error: BaseException) -> None:
        """Fail all that is left; the threads that moved it have stopped, or it will never move."""
        with self._lock:
            self.closed = self.closed or error
            left = list(self._under_way)
        for transfer in left:
            transfer.fail(error)

    def _start_later(self, transfer: Transfer, error: BaseException | None) -> None:
        self._starter.submit(partial(transfer.start, error))

    def _finished(self, transfer: Transfer, error: BaseException | None) -> None:
        place = transfer.place
        with self._lock:
            self._under_way.discard(transfer)
            place.under_way.remove(transfer)
            if error is not None:
                place.error = place.error or error
                if self.closed is None:
                    self.error = self.error or error
            free = place.freed and not place.under_way
        if free:
            place.tier.release(place.extent)


class Backlog:
    """Bytes of put sources that live outside the arena: a bounded sum.

    waited_s  how long `enter` has waited, in all
    """

    def __init__(self, most_bytes: int) -> None:
        self.waited_s = 0.0
        self.most_bytes = most_bytes
        self._now = 0
        self._lock = threading.Lock()
        self._less = Promise()
        """Kept when there is less of them than now."""

    def enter(self, nbytes: int) -> None:
        """Wait until `nbytes` more fit; one that is larger than all waits until it is alone."""
        since = 0.0
        while True:
            with self._lock:
                if not self._now or self._now + nbytes <= self.most_bytes:
                    self._now += nbytes
                    self.waited_s += time.perf_counter() - since if since else 0.0
                    return
                less = self._less = self._less if not self._less.done() else Promise()
            since = since or time.perf_counter()
            less.settle()

    def leave(self, nbytes: int, error: BaseException | None = None) -> None:
        """They are not needed any more; `error` is why, and no matter here."""
        with self._lock:
            self._now -= nbytes
            less = self._less
        less.finish()
