"""A transfer that the device makes alone, on one of its streams: what most of a step's are.

An entry that rests in host memory, whole, is copied by the device alone, behind events of whatever
uses the same bytes; where it crosses blocks of host memory, piece by piece. Nothing of that is for
the host to do: the copy is enqueued where it is asked for, and its event is all that is left of it.
`CopyEnds` knows those of which the host has not heard that they are over. Who enqueues others looks
now and then which events have passed (`look`); a thread waits for events only where somebody asks
to hear of an end (`hear`).

    a fetch, a put        one copy                          through promises
    enqueued              by who asks                       by who asks, or a thread of the queue
    others follow it      by its event                      by its event, or a promise
    its end is heard      when others are enqueued,         by a thread, for each copy
                          or by a thread if asked for

A copy *ends* under the lock of the queue, once, and after all that it follows; then, outside of the
lock, its memory is let go of and its extent, and who waits is told; at last it is *over*. Memory
may run code of the user when it dies, so none dies under the lock. What has ended and is not yet
told is known to all (`CopyEnds`), not to one thread: whatever is raised in between, whoever comes
next tells it. Asking for an end changes nothing but who looks: it may be done twice, or be
interrupted half-way.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import RLock

from torch import Tensor

from zcompile.runtime.device.base import CopyStreams, Direction
from zcompile.runtime.tiers.base import Place
from zcompile.runtime.transfer.interrupts import cleanup, uninterrupted
from zcompile.runtime.transfer.ticket import Callback, Promise, Reporting, Ticket
from zcompile.runtime.transfer.transfer import InFlight

MOST_UNSEEN = 8
"""Copies that are enqueued until somebody looks which are over. What one holds beside the arena
goes back when compute joins it, or is waited for by a thread: looking later holds nothing up."""


class OneCopy(InFlight):
    """Bytes [begin, end) of an entry in host memory, copied at once to or from `memory`.

    memory, owner  as of a `Transfer`
    writes         it is a put; else a fetch
    streams, ends  that it is enqueued on; who hears of its end
    mark           complete once the copy is over; None, if it could not be enqueued
    ended          whether the host knows that it is over
    error          what it, or what it follows, failed with
    over           whether all that depends on it has been told, too
    follows        the copies that it comes after and whose errors are its own, until it has ended
    awaited        whether a thread goes on until it has ended
    """

    def __init__(
        self,
        place: Place,
        begin: int,
        memory: Tensor,
        owner: Tensor,
        streams: CopyStreams,
        writes: bool,
        ends: "CopyEnds",
    ) -> None:
        self.place, self.begin, self.end = place, begin, begin + memory.numel()
        self.writes, self.direction = writes, "d2h" if writes else "h2d"
        self._memory: Tensor | None = memory
        self._owner: Tensor | None = owner
        self.streams, self._ends = streams, ends
        self.mark: Ticket | None = None
        self.ended = self.over = self.awaited = False
        self.error: BaseException | None = None
        self.follows: Sequence[OneCopy] = ()
        self._heard: Promise | None = None
        self._released: Callback | None = None

    def home_pieces(self) -> Sequence[tuple[int, Tensor]] | None:
        """The bytes where they rest, as (first byte of the entry, memory); None, if they are not
        all there."""
        place = self.place
        if not self.writes and not place.written.holds(self.begin, self.end):
            return None
        return place.tier.pieces(place.extent, self.begin, self.end)

    def _copies(self, home: Sequence[tuple[int, Tensor]]) -> Sequence[tuple[Tensor, Tensor]]:
        """(target, source) of each piece."""
        memory = self._memory
        assert memory is not None, "it is started once"
        if len(home) == 1:
            return [(home[0][1], memory) if self.writes else (memory, home[0][1])]
        parts = [memory[at - self.begin :][: piece.numel()] for at, piece in home]
        pieces = [piece for _, piece in home]
        pairs = (pieces, parts) if self.writes else (parts, pieces)
        return list(zip(*pairs, strict=True))

    def enqueue(
        self,
        home: Sequence[tuple[int, Tensor]],
        marks: Sequence[Ticket],
        follows: "Sequence[OneCopy]",
    ) -> None:
        """Start, behind marks of compute and other copies. raises RuntimeError"""
        copies = self._copies(home)
        if follows:
            marks = [*marks, *(other.mark for other in follows if other.mark is not None)]
            self.follows = [other for other in follows if not other.ended]
        self.mark = self.streams.enqueue(self.direction, copies, marks, self.place.name)
        if self.writes and not self.place.written.holds(self.begin, self.end):
            self.place.written.add(self.begin, self.end)

    def end_with(self, error: BaseException | None) -> bool:
        """Note the end, once; whether this is it. Under the lock of the queue, and after the ends
        of all that it follows."""
        if self.ended:
            return False
        self.error = error
        for other in self.follows:
            if other.error is not None:
                self.error = other.error
                break
        self.ended, self.follows = True, ()
        return True

    def tell(self, finished: "Callable[[OneCopy, BaseException | None], None]") -> None:
        """Let go of the memory and tell those who wait, `finished` first; it has ended. Under no
        lock. What raises may be done once more."""
        self._drop_memory()
        finished(self, self.error)
        with self._ends.lock:
            self.over = True
            heard = self._heard
        if heard is not None:
            heard.finish(self.error)

    def not_told(self, error: BaseException) -> None:
        """Telling met a defect. Who waits hears of that; who asks from now on has it told anew."""
        with self._ends.lock:
            self.awaited = False
            heard, self._heard = self._heard, None
        if heard is not None:
            heard.finish(error)

    # --- Those who need it ---

    def done(self) -> bool:
        return self.over

    memory_done = done

    @uninterrupted
    def end_heard(self) -> Promise:
        with self._ends.lock:
            heard = self._heard = self._heard or Promise()
            over = self.over
        if over:
            heard.finish(self.error)
        else:
            self._ends.hear(self)
        return heard

    memory_heard = end_heard

    def await_end(self) -> None:
        self._ends.hear(self)

    def when_enqueued(self, callback: Callback) -> None:
        callback(self.error)

    def join_compute(self) -> None:
        self._join()
        if not self.writes:
            self._drop_memory()  # whatever the caller does next comes after the copy

    @uninterrupted
    def release(self) -> None:
        self._join()
        self._drop_memory()

    def _join(self) -> None:
        if self.error is not None:
            raise self.error
        assert self.mark is not None, "it is enqueued, or failed"
        self.mark.join_compute()

    def copies_mark(self) -> Ticket | None:
        return None if self.error else self.mark

    home_mark = copies_mark

    def when_released(self, callback: Callback) -> None:
        self._released = callback

    def fail(self, error: BaseException) -> None:
        self._ends.fail(self, error)

    def _drop_memory(self) -> None:
        if self._memory is None:  # it was dropped when compute joined it
            return
        with self._ends.lock:
            kept: object = (self._memory, self._owner)
            self._memory = self._owner = None
            callback, self._released = self._released, None
        del kept  # which may run code of the user
        if callback is not None:
            callback(None)


class CopyEnds:
    """Hears of the ends of the copies of one store, and has them told.

    lock      of the queue: whatever changes when a copy ends changes under it
    finished  told of each that has ended, under no lock
    """

    def __init__(
        self, lock: RLock, finished: Callable[[OneCopy, BaseException | None], None]
    ) -> None:
        self.lock = lock
        self._finished = finished
        self._on_streams: dict[Direction, deque[OneCopy]] = {"h2d": deque(), "d2h": deque()}
        """Those that have not ended, in the order of their stream; some at the front may have."""
        self._untold: deque[OneCopy] = deque()
        """Those that have ended, and that nobody has begun to tell, or not to the end."""
        self._unseen = 0
        """How many were enqueued since somebody has looked."""

    def enqueued(self, copy: OneCopy) -> None:
        """Know a copy, the newest on its stream. Under the lock."""
        self._on_streams[copy.direction].append(copy)
        self._unseen += 1

    def look_now_and_then(self) -> None:
        """As `look_within`, for who is about to enqueue another copy: once for some of them."""
        if self._unseen >= MOST_UNSEEN:
            self.look_within()

    @uninterrupted
    def look(self) -> None:
        """See which copies are over, and have them told."""
        self.look_within()

    @cleanup  # of torch's code, too: an interrupt would be taken for what the copies met
    def look_within(self) -> None:
        """As `look`, of who defers interrupts already."""
        with self.lock:
            self._unseen = 0
            self._take_ended()
        if self._untold:
            self._tell_all()

    def hear(self, copy: OneCopy) -> None:
        """Have a thread go on until a copy has ended, and tell it if nobody has."""
        with self.lock:
            if copy.over or copy.awaited:
                return
            copy.streams.wait_in_thread(copy.direction, partial(self._hear, copy))
            copy.awaited = True  # now: who is interrupted before asks once more

    def hear_of_all(self) -> None:
        """Look, and have threads go on until all have ended."""
        self.look()
        with self.lock:
            last = [on_stream[-1] for on_stream in self._on_streams.values() if on_stream]
        for copy in last:
            self.hear(copy)

    @uninterrupted
    @cleanup
    def fail(self, copy: OneCopy, error: BaseException) -> None:
        """End a copy with an error, if it has not ended."""
        with self.lock:
            self._end(copy, error)
        self._tell_all()

    @uninterrupted
    @cleanup
    def tell(self) -> None:
        """Have all told that have ended. Under no lock.

        raises  the first error that this met, once it has gone on with the others
        """
        self._tell_all()

    def _tell_all(self) -> None:
        """As `tell`, of who defers interrupts already."""
        raised: list[BaseException] = []
        left = len(self._untold)
        while left > 0:
            with Reporting(raised.append):
                while left > 0:
                    with self.lock:
                        left = min(left, len(self._untold)) - 1  # others may have told some
                        if left < 0:
                            break
                        copy = self._untold.popleft()
                    self._tell(copy)
        if raised:
            raise raised[0]

    def _tell(self, copy: OneCopy) -> None:
        try:
            copy.tell(self._finished)
        except BaseException as failed:
            with self.lock:
                self._untold.append(copy)
            copy.not_told(failed)
            raise

    def _end(self, copy: OneCopy, error: BaseException | None) -> None:
        """Note an end, to be told. Under the lock."""
        if copy.end_with(error):
            self._untold.append(copy)

    def _hear(self, copy: OneCopy) -> None:
        """Wait for one copy after the other, the oldest first, until this one has ended. In a
        thread."""
        while True:
            with self.lock:
                self._take_ended()
                first = None if copy.ended else self._first_before(copy)
            self.tell()
            if first is None:
                return
            assert first.mark is not None, "it is enqueued"
            error: BaseException | None = None
            try:
                first.mark.wait()
            except RuntimeError as failed:
                error = failed
            with self.lock:
                self._end(first, error)
            self.tell()

    def _first_before(self, copy: OneCopy) -> OneCopy:
        """The oldest copy that has to end before this one does, or this one. Under the lock; none
        at the front has ended."""
        first = self._on_streams[copy.direction][0]
        while (other := next((o for o in first.follows if not o.ended), None)) is not None:
            first = self._on_streams[other.direction][0]  # an older one, so that this comes to rest
        return first

    def _take_ended(self) -> None:
        """Take out the copies whose events have passed, the oldest first; they end here. Under the
        lock."""
        before = -1
        while before < len(self._untold):  # what one follows may be on the other stream
            before = len(self._untold)
            for on_stream in self._on_streams.values():
                while on_stream and ((first := on_stream[0]).ended or self._has_ended(first)):
                    if on_stream and on_stream[0] is first:
                        on_stream.popleft()

    def _has_ended(self, first: OneCopy) -> bool:
        """Whether the oldest copy on a stream ends now."""
        for other in first.follows:
            if not other.ended:
                return False
        assert first.mark is not None, "it is enqueued"
        error: BaseException | None = None
        try:
            if not first.mark.done():
                return False
        except RuntimeError as failed:
            error = failed
        self._end(first, error)
        return True
