"""A transfer that is one copy on a stream of the device: what most of a step's transfers are.

An entry that rests in host memory, whole and in one piece, is copied by the device alone, behind
events of whatever uses the same bytes. Nothing of that is for the host to do: the copy is enqueued
where it is asked for, and its event is all that is left of it. A thread waits for the event only
when somebody asks to hear of the end (`home`); else the queue looks, when the next copy of that
direction is enqueued, which events have passed (`TransferQueue.copy_on_stream`).

    a fetch, a put        one copy                          through promises
    enqueued              by who asks                       by who asks, or a thread of the queue
    others follow it      by its event                      by its event, or a promise
    its end is heard      when others are enqueued,         by a thread, for each copy
                          or by a thread if asked for
"""

import threading
from collections.abc import Sequence

from torch import Tensor

from zcompile.runtime.tiers.base import Place
from zcompile.runtime.transfer.ticket import Callback, Countdown, Promise, Ticket
from zcompile.runtime.transfer.transfer import Fetch, Put, Transfer, TransferContext

_ASKING = threading.Lock()
"""Guards who is told of the end of a copy: those who ask for it, or who finds it over."""

_ENQUEUED = Promise()
_ENQUEUED.finish()


class OneCopy(Transfer):
    """Bytes [begin, end) of an entry in host memory, copied at once to or from `memory`.

    memory, owner  as of a `Transfer`
    writes         it is a put; else a fetch
    mark           complete once the copy is over; None until it is enqueued
    over           whether the host has heard of its end; error: what it, or what it follows, failed
                   with
    follows        the copies that it comes after and whose errors are its own, until it is over
    finished       told of the end
    """

    def __init__(
        self,
        place: Place,
        begin: int,
        memory: Tensor,
        owner: Tensor,
        context: TransferContext,
        writes: bool,
        padded: bool,
    ) -> None:
        self.place, self.begin, self.end = place, begin, begin + memory.numel()
        self.writes, self.direction = writes, "d2h" if writes else "h2d"
        self._memory, self._owner = memory, owner
        self.context, self.padded = context, padded
        self.mark: Ticket | None = None
        self.over = False
        self.error: BaseException | None = None
        self.follows: Sequence[OneCopy] = ()
        self._asked: Countdown | None = None
        self._finished: Callback | None = None
        self._when_released: Callback | None = None

    def in_parts(self, marks: Sequence[Ticket]) -> Transfer:
        """The same transfer by promises, for bytes that are not one copy, or not to be enqueued
        now."""
        memory, owner = self._memory, self._owner
        assert memory is not None, "it was not started"
        assert owner is not None, "it was not started"
        kind = Put if self.writes else Fetch
        made = kind(self.place, self.begin, memory, owner, marks, self.context, self.padded)
        if self._when_released is not None:
            made.when_released(self._when_released)
        return made

    def home_piece(self) -> Tensor | None:
        """The bytes where they rest; None, if they are not all there, or in several pieces."""
        place = self.place
        if not self.writes and not place.written.holds(self.begin, self.end):
            return None
        found = [memory for _, memory in place.tier.pieces(place.extent, self.begin, self.end)]
        return found[0] if len(found) == 1 else None

    def enqueue(
        self,
        home: Tensor,
        marks: Sequence[Ticket],
        follows: "Sequence[OneCopy]",
        finished: Callback,
    ) -> None:
        """Start, behind marks of compute and other copies. raises RuntimeError"""
        memory, streams = self._memory, self.context.device.streams
        assert memory is not None, "it is started once"
        assert streams is not None, "copies are enqueued on streams"
        target, source = (home, memory) if self.writes else (memory, home)
        after = [*marks, *(other.mark for other in follows if other.mark is not None)]
        self._finished = finished
        self.mark = streams.enqueue(self.direction, target, source, after, self.name)
        if self.writes:
            self.place.written.add(self.begin, self.end)
        self.follows = [other for other in follows if not other.over or other.error is not None]

    # --- Its end ---

    @property
    def is_awaited(self) -> bool:
        """Whether a thread waits for its event."""
        return self._asked is not None

    def note_end(self, error: BaseException | None) -> bool:
        """Note the end, unless a thread does that since somebody asked to hear of it; whether it is
        noted now."""
        with _ASKING:
            if self._asked is not None or self.over:
                return False
            self._note(error)
        self._tell(self.error)
        return True

    def _note(self, error: BaseException | None) -> None:
        self.error = next((f.error for f in self.follows if f.error is not None), error)
        self.over, self.follows = True, ()

    def _tell(self, error: BaseException | None) -> None:
        self._drop_memory(error)
        finished, self._finished = self._finished, None  # which has this
        if finished is not None:
            finished(error)

    def _heard(self, error: BaseException | None) -> None:
        with _ASKING:
            self.error, self.over, self.follows = error, True, ()
        self._tell(error)

    def await_end(self) -> None:
        self._end_heard()

    @property
    def home(self) -> Promise:  # type: ignore[override]  # made when it is asked for
        return self._end_heard()

    def _end_heard(self) -> Promise:
        """A promise that is kept when the copy is over: from now on a thread waits for it."""
        with _ASKING:
            asked, waits = self._asked, not self.over
            if asked is not None:
                return asked
            asked = self._asked = Countdown()
        if not waits:
            asked.finish(self.error)
            return asked
        asked.then(self._heard)
        for other in self.follows:
            asked.hold()
            other.home.then(asked.drop)
        assert self.mark is not None, "asked for once it is enqueued"
        streams = self.context.device.streams
        assert streams is not None, "it is enqueued on one"
        streams.hear_of(self.direction, self.mark, self)
        return asked

    @property
    def memory_free(self) -> Promise:  # type: ignore[override]  # the same
        return self.home

    @property
    def queued(self) -> Promise:  # type: ignore[override]  # it is
        return _ENQUEUED if self.mark is not None else self.home

    def landed(self, error: BaseException | None) -> None:
        asked = self._asked
        assert asked is not None, "somebody asked for it"
        self._drop_memory(error)
        asked.drop(error)

    def fail(self, error: BaseException) -> None:
        if not self.note_end(error):
            self.home.finish(error)

    # --- Those who need it ---

    def done(self) -> bool:
        return self.over

    def join_compute(self) -> None:
        self._join()
        if not self.writes:
            self._owner = None  # whatever the caller does next comes after the copy

    def release(self) -> None:
        self._join()
        self._drop_memory(None)

    def _join(self) -> None:
        if self.error is not None:
            raise self.error
        assert self.mark is not None, "it is enqueued, or failed"
        self.mark.join_compute()

    def copies_mark(self) -> Ticket | None:
        return None if self.error else self.mark

    home_mark = copies_mark

    def when_released(self, callback: Callback) -> None:
        self._when_released = callback

    def _drop_memory(self, error: BaseException | None) -> None:
        with _ASKING:
            self._memory = self._owner = None
            callback, self._when_released = self._when_released, None
        if callback is not None:
            callback(None)

    def _issue(self) -> None:
        raise AssertionError("it is started by `enqueue`")

    def _chunk(self, begin: int, end: int, buffer: object) -> None:
        raise AssertionError("it has no chunks")
