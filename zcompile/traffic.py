"""Transfers over links in simulated time: first come, first served, none before what it follows.

A transfer is cut into pieces, and each piece passes its links one after the other, so that while
one is copied the next is read. A link carries one piece at a time; two that share a lane take
turns, reads first. What a transfer that is not over keeps of the staging ring, others lack. Compute
is a journey that takes its time and no link.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

from zcompile.machine import Link
from zcompile.units import KiB

RING_BLOCK = 4 * KiB
"""Buffers of the staging ring are multiples of it, as `runtime/staging.py` hands them out."""
MOST_PIECES = 4
"""Of one transfer. The pipeline of two links costs one piece of the faster one more than its slower
link alone: with 4 pieces at most a quarter of that, which the transfers behind it hide."""


def lane_bytes(ring_bytes: int) -> int:
    """Of the staging ring, what reads hold at most, and what writes do."""
    return ring_bytes - ring_bytes // 4


class Journey:
    """One transfer: `nbytes` over the links of `route`.

    over_after  how many links until its memory on the device is free, or filled
    begin_s     when its first piece set out; None before
    queued_s    when the last piece set out on the link to, or from, the device
    over_s      when its memory was free or filled
    home_s      when all of it was done
    disk_nbytes what a disk moves for it: whole granules
    unseen      a link that it passes in no time
    seconds     what it takes, if it is compute; it follows other compute by being told so
    adds        it is added to what rests there: on the host, half of each buffer for either
    """

    __slots__ = ("_after_home", "_after_over", "_blockers", "_home_left", "_over_left", "adds",
                 "begin_s", "disk_nbytes", "home_s", "nbytes", "over_after", "over_s", "queued_s",
                 "route", "seconds", "unseen")  # fmt: skip

    def __init__(self, nbytes: int, route: Sequence[Link] = (), over_after: int = 0,
                 seconds: float = 0.0) -> None:  # fmt: skip
        self.seconds = seconds
        self.adds = False
        self.nbytes = self.disk_nbytes = nbytes
        self.unseen: str | None = None
        self.route = route
        self.over_after = over_after
        self.begin_s: float | None = None
        self.queued_s: float | None = None
        self.over_s: float | None = None
        self.home_s: float | None = None
        self._blockers = 1
        self._over_left = self._home_left = 0
        self._after_over: list[Journey] = []
        self._after_home: list[Journey] = []

    @property
    def staged(self) -> bool:
        """Whether its pieces lie in the staging ring."""
        return self.adds or len(self.route) > 1

    @property
    def cut_in(self) -> int:
        """Times its bytes that they take of the ring."""
        return 2 if self.adds else 1

    @property
    def arrives(self) -> bool:
        """Whether it goes to the device; else from there."""
        return self.over_after == len(self.route) and not self.adds


class _Piece:
    """`pool`: that holds `ring_bytes` for it; None, if it is not staged."""

    __slots__ = ("at", "journey", "last", "nbytes", "pool", "ring_bytes")

    def __init__(self, journey: Journey, nbytes: int, last: bool, pool: "_Pool | None",
                 ring_bytes: int) -> None:  # fmt: skip
        self.journey = journey
        self.nbytes = nbytes
        self.last = last
        self.pool, self.ring_bytes = pool, ring_bytes
        self.at = 0


class _Lane:
    """What one piece at a time may use; `queues` by urgency."""

    __slots__ = ("busy", "queues")

    def __init__(self) -> None:
        self.busy = False
        self.queues: tuple[deque[_Piece], deque[_Piece]] = (deque(), deque())


class _Pool:
    """What pieces of one direction hold of the staging ring; who waits is served in order."""

    __slots__ = ("held", "waiting")

    def __init__(self) -> None:
        self.held = 0
        self.waiting: deque[_Piece] = deque()


class Traffic:
    """All transfers; `now` never goes back.

    chunk_bytes  of the staging ring
    ring_bytes   of all its chunks. Reads, or writes, hold three quarters at most, and reads are
                 served first: in a ring of four chunks writes get one
    """

    def __init__(self, links: Mapping[str, Link], chunk_bytes: int, ring_bytes: int) -> None:
        self.now = 0.0
        self._chunk_bytes = chunk_bytes
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = 0
        self._lanes: dict[str, _Lane] = {}
        for name, link in links.items():
            shared = self._lanes.get(link.shares) if link.shares else None
            self._lanes[name] = shared or _Lane()
        self._ring_bytes, self._lane_bytes = ring_bytes, lane_bytes(ring_bytes)
        self._reads, self._writes = _Pool(), _Pool()

    def start(self, journey: Journey, at_s: float, after: Iterable[Journey] = (),
              after_home: Iterable[Journey] = ()) -> None:  # fmt: skip
        """Set out at `at_s` at the earliest, once the memory of `after` is free, or filled, and
        `after_home` is all done."""
        for other in after:
            if other.over_s is None:
                other._after_over.append(journey)
                journey._blockers += 1
        for other in after_home:
            if other.home_s is None:
                other._after_home.append(journey)
                journey._blockers += 1
        self._at(max(at_s, self.now), self._unblock, journey)

    def advance(self, to_s: float) -> None:
        """Let everything happen until then."""
        events = self._events
        while events and events[0][0] <= to_s:
            self.now, _, act, what = heappop(events)
            act(what)
        self.now = max(self.now, to_s)

    def finish(self) -> float:
        """Let everything happen; the time it is then."""
        while self._events:
            self.advance(self._events[0][0])
        return self.now

    def until(self, journey: Journey, moment: str) -> float:
        """Let things happen until `journey` has that one of its times; which it is."""
        events = self._events
        while (time_s := getattr(journey, moment)) is None:
            assert events, "what is waited for was never started"
            self.now, _, act, what = heappop(events)
            act(what)
        return float(time_s)

    def _at(self, time_s: float, act: Callable[[Any], None], what: object) -> None:
        self._count += 1
        heappush(self._events, (time_s, self._count, act, what))

    def _unblock(self, journey: Journey) -> None:
        journey._blockers -= 1
        if not journey._blockers:
            self._set_out(journey)

    def _set_out(self, journey: Journey) -> None:
        if not journey.route or not journey.nbytes:
            journey.begin_s = journey.queued_s = self.now
            if journey.seconds:
                self._at(self.now + journey.seconds, self._end, journey)
            else:
                self._end(journey)
            return
        sizes = self._cut(journey)
        journey._over_left = journey._home_left = len(sizes)
        if not journey.staged:
            self._queue(_Piece(journey, sizes[0], True, None, 0))
            return
        pool = self._reads if journey.arrives else self._writes
        for number, nbytes in enumerate(sizes, 1):
            ring_bytes = self._buffer(nbytes) * journey.cut_in
            pool.waiting.append(_Piece(journey, nbytes, number == len(sizes), pool, ring_bytes))
        self._admit()

    def _cut(self, journey: Journey) -> list[int]:
        if not journey.staged:
            return [journey.nbytes]
        chunk = self._chunk_bytes // journey.cut_in
        chunks = -(-journey.nbytes // chunk)
        size = -(-chunks // MOST_PIECES) * chunk
        size = max(chunk, min(size, self._lane_bytes // 4 // journey.cut_in))
        whole, rest = divmod(journey.nbytes, size)
        return [size] * whole + [rest] * bool(rest)

    def _buffer(self, nbytes: int) -> int:
        """What so many bytes take of the ring: whole blocks."""
        block = min(RING_BLOCK, self._chunk_bytes)
        return -(-nbytes // block) * block

    def _admit(self) -> None:
        """Give what is free of the ring to who waits for it."""
        for pool, other in ((self._reads, self._writes), (self._writes, self._reads)):
            while pool.waiting:
                wanted = pool.waiting[0].ring_bytes
                held = pool.held + wanted
                if held > max(self._lane_bytes, wanted) or (
                    held + other.held > max(self._ring_bytes, wanted)
                ):
                    break
                piece = pool.waiting.popleft()
                pool.held = held
                self._queue(piece)

    def _queue(self, piece: _Piece) -> None:
        name = piece.journey.route[piece.at].name
        lane = self._lanes[name]
        lane.queues[name == "disk_write"].append(piece)
        if not lane.busy:
            self._carry(lane)

    def _carry(self, lane: _Lane) -> None:
        """The lane is free: the next piece sets out, if there is one."""
        lane.busy = False
        queue = lane.queues[0] or lane.queues[1]
        if not queue:
            return
        piece, lane.busy = queue.popleft(), True
        journey = piece.journey
        link = journey.route[piece.at]
        if journey.begin_s is None:
            journey.begin_s = self.now
        if piece.last and piece.at + 1 == journey.over_after:
            journey.queued_s = self.now
        self._at(self.now + piece.nbytes / link.bytes_per_s, self._passed, (lane, piece))

    def _passed(self, row: tuple[_Lane, _Piece]) -> None:
        lane, piece = row
        self._carry(lane)
        if latency_s := piece.journey.route[piece.at].latency_s:
            self._at(self.now + latency_s, self._arrive, piece)
        else:
            self._arrive(piece)

    def _arrive(self, piece: _Piece) -> None:
        journey = piece.journey
        piece.at += 1
        if piece.at == journey.over_after:
            journey._over_left -= 1
            if not journey._over_left:
                self._over(journey)
        if piece.at < len(journey.route):
            self._queue(piece)
            return
        if (pool := piece.pool) is not None:
            pool.held -= piece.ring_bytes
            if self._reads.waiting or self._writes.waiting:
                self._admit()
        journey._home_left -= 1
        if not journey._home_left:
            self._home(journey)

    def _end(self, journey: Journey) -> None:
        self._over(journey)
        self._home(journey)

    def _over(self, journey: Journey) -> None:
        journey.over_s = self.now
        self._release(journey._after_over)

    def _home(self, journey: Journey) -> None:
        journey.home_s = self.now
        self._release(journey._after_home)

    def _release(self, waiting: list[Journey]) -> None:
        for journey in waiting:
            self._unblock(journey)
        waiting.clear()
