"""Simulates transfers over links: first come, first served, none before what it follows.

A transfer is cut into pieces, and each piece passes its links one after the other, so that while
one is copied the next is read. A link carries one piece at a time; two that share a lane take
turns, reads first. Bytes of the staging ring that a transfer in flight takes are not there for
others. Compute is a transfer that takes its time and no link; other work that is given in seconds
goes over a `TaskLane`, which does one piece of work at a time.

Without torch, as `zinf plan transformer:...` is; `paths.py` says what instructions move over which
links.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from zcompile.ir.units import KiB
from zcompile.machine.model import Link
from zcompile.machine.staging import lane_bytes


@dataclass(frozen=True)
class TaskLane:
    """Carries work that is given in seconds, one piece at a time: a CPU, for example."""

    name: str
    bytes_per_s: float = 1.0
    latency_s: float = 0.0
    shares: str | None = None


@dataclass(slots=True, eq=False)
class SimTransfer:
    """One transfer: `nbytes` over the links of `route`.

    over_after   number of links until its memory on the device is free, or filled
    seconds      its duration, if it is compute; None: it has bytes
    urgency      of what waits for a lane of tasks, the least comes first
    adds         it is added to the bytes at home: on the host, half of each buffer for either
    disk_nbytes  bytes that a disk moves for it: whole blocks; of a collective, those that come to
                 this rank, where `nbytes` are those that take the time
    unseen       a link that it passes in no time
    by_events    the device's own streams order it: it is enqueued once the host has heard of what
                 `hears_of` names, and waits there for all else that it follows
    hears_of     (a transfer, the name of a moment of it)
    begin_s      when its first piece set out; None before
    queued_s     when the last piece was given to the link to, or from, the device
    over_s       when its memory was free or filled
    home_s       when all of it was done
    blockers     number of events before it may set out
    over_left    pieces whose memory on the device is not yet free or filled
    home_left    pieces that are not yet done
    after_over   transfers that wait for `over_s`; after_home, after_queued: for `home_s`,
                 `queued_s`
    """

    nbytes: int
    route: Sequence[Link | TaskLane] = ()
    over_after: int = 0
    seconds: float | None = None
    urgency: int = 0
    adds: bool = False
    disk_nbytes: int = 0
    unseen: str | None = None
    by_events: bool = False
    hears_of: "Sequence[tuple[SimTransfer, str]]" = ()
    begin_s: float | None = None
    queued_s: float | None = None
    over_s: float | None = None
    home_s: float | None = None
    blockers: int = 1
    over_left: int = 0
    home_left: int = 0
    after_queued: "list[SimTransfer]" = field(default_factory=list)
    after_over: "list[SimTransfer]" = field(default_factory=list)
    after_home: "list[SimTransfer]" = field(default_factory=list)

    def order_by_events(self, hears_of: "Sequence[tuple[SimTransfer, str]]") -> None:
        """Let it be enqueued once the host has heard of these."""
        self.by_events, self.hears_of = True, hears_of

    @property
    def staged(self) -> bool:
        """Whether its pieces lie in the staging ring."""
        return self.adds or len(self.route) > 1

    @property
    def cut_in(self) -> int:
        """Bytes of the ring that it takes per byte."""
        return 2 if self.adds else 1

    @property
    def arrives(self) -> bool:
        """Whether it goes to the device; else from there."""
        return self.over_after == len(self.route) and not self.adds


CORES, HOST = "cores", "host"
"""Lanes of compute: of regions, where they take the host's cores; of what the host computes
beside them. The latter gives way where both are one."""
LAST = ("disk_write", HOST)
"""Links, and lanes, that come last where several take turns."""

RING_BLOCK = 4 * KiB
"""Block size of the staging ring, as `runtime/transfer/staging.py` hands out buffers."""
MOST_PIECES = 4
"""Most pieces of one transfer. The pipeline of two links costs one piece of the faster one more
than its slower link alone: with 4 pieces at most a quarter of that, which the transfers behind it
hide."""


@dataclass(slots=True, eq=False)
class _Piece:
    """A piece of a transfer.

    queues  of the links that it passes
    nbytes  or seconds, on a lane
    pool    that holds `ring_bytes` for it; None, if not staged
    at      number of links that it has passed
    """

    transfer: SimTransfer
    queues: "_Queues"
    nbytes: float
    last: bool
    pool: "_Pool | None" = None
    ring_bytes: int = 0
    at: int = 0


def _urgency(piece: _Piece) -> int:
    return piece.transfer.urgency


@dataclass(slots=True, eq=False)
class _Turns:
    """A resource that one piece at a time may use, and the pieces that wait for it, by urgency."""

    busy: bool = False
    first: deque[_Piece] = field(default_factory=deque)
    then: deque[_Piece] = field(default_factory=deque)


_Queues = tuple[tuple[_Turns, deque[_Piece], float, float], ...]
"""The links of a route: (turns, their queue for this link, bytes per second, latency) of each."""


@dataclass(slots=True, eq=False)
class _Pool:
    """Bytes of the staging ring that pieces of one direction hold; waiting pieces are served in
    order."""

    held: int = 0
    waiting: deque[_Piece] = field(default_factory=deque)


class LinkSimulator:
    """Simulates all transfers; `now` never goes back.

    chunk_bytes  of the staging ring
    ring_bytes   of all its chunks. Reads, or writes, hold three quarters at most, and reads are
                 served first: in a ring of four chunks writes get one
    """

    def __init__(
        self, links: Mapping[str, Link | TaskLane], chunk_bytes: int = 1, ring_bytes: int = 1
    ) -> None:
        self.now = 0.0
        self._chunk_bytes = chunk_bytes
        self._events: list[tuple[float, int, Callable[[LinkSimulator, Any], None], Any]] = []
        self._count = 0
        self._turns: dict[str, _Turns] = {}
        for name, link in links.items():
            shared = self._turns.get(link.shares) if link.shares else None
            self._turns[name] = shared or _Turns()
        self._queues: dict[int, tuple[Sequence[Link | TaskLane], _Queues]] = {}
        self._ring_bytes, self._lane_bytes = ring_bytes, lane_bytes(ring_bytes)
        self._reads, self._writes = _Pool(), _Pool()

    def start(
        self,
        transfer: SimTransfer,
        at_s: float,
        after: Iterable[SimTransfer] = (),
        after_home: Iterable[SimTransfer] = (),
        after_queued: Iterable[SimTransfer] = (),
    ) -> None:
        """Start a transfer at `at_s` at the earliest, after other transfers.

        after         whose memory on the device must be free, or filled
        after_home    that must be all done
        after_queued  copies that the device makes before this one: its stream is in order
        """
        for other in after:
            if other.over_s is None:
                other.after_over.append(transfer)
                transfer.blockers += 1
        for other in after_home:
            if other.home_s is None:
                other.after_home.append(transfer)
                transfer.blockers += 1
        for other in after_queued:
            if other.queued_s is None:
                other.after_queued.append(transfer)
                transfer.blockers += 1
        if at_s <= self.now:
            self._unblock(transfer)
        else:
            self._at(at_s, LinkSimulator._unblock, transfer)

    def compute(self, task: SimTransfer, seconds: float) -> float:
        """Let everything happen while a task of compute goes on, from now on; returns its end."""
        task.begin_s = self.now
        self.advance(self.now + seconds)
        task.queued_s = task.over_s = task.home_s = self.now
        return self.now

    def advance(self, to_s: float) -> None:
        """Let everything happen until `to_s`."""
        events = self._events
        while events and events[0][0] <= to_s:
            self.now, _, act, what = heappop(events)
            act(self, what)
        self.now = max(self.now, to_s)

    def finish(self) -> float:
        """Let everything happen; returns the time of the last event."""
        while self._events:
            self.advance(self._events[0][0])
        return self.now

    def until(self, transfer: SimTransfer, moment: str) -> float:
        """Let events happen until `transfer` has the time `moment`, which is returned."""
        events = self._events
        while (time_s := getattr(transfer, moment)) is None:
            assert events, "what is waited for was never started"
            self.now, _, act, what = heappop(events)
            act(self, what)
        return float(time_s)

    def _at(self, time_s: float, act: "Callable[[LinkSimulator, Any], None]", what: object) -> None:
        self._count = count = self._count + 1
        heappush(self._events, (time_s, count, act, what))

    def _unblock(self, transfer: SimTransfer) -> None:
        transfer.blockers -= 1
        if not transfer.blockers:
            self._set_out(transfer)

    def _set_out(self, transfer: SimTransfer) -> None:
        seconds = transfer.seconds
        if not transfer.route or (seconds is None and not transfer.nbytes):
            transfer.begin_s = transfer.queued_s = self.now
            self._release(transfer.after_queued)
            if seconds:
                self._at(self.now + seconds, LinkSimulator._end, transfer)
            else:
                self._end(transfer)
            return
        queues = self._queues_of(transfer.route)
        if not transfer.staged:
            transfer.over_left = transfer.home_left = 1
            amount = transfer.nbytes if seconds is None else seconds
            self._queue(_Piece(transfer, queues, amount, True))
            if transfer.after_queued:
                self._release(transfer.after_queued)
            return
        pool = self._reads if transfer.arrives else self._writes
        size, cut_in = self._size(transfer), transfer.cut_in
        whole, rest = divmod(transfer.nbytes, size)
        transfer.over_left = transfer.home_left = whole + bool(rest)
        ring_bytes, last = self._buffer(size) * cut_in, 0 if rest else whole
        for number in range(1, whole + 1):
            piece = _Piece(transfer, queues, size, number == last, pool, ring_bytes)
            pool.waiting.append(piece)
        if rest:
            ring_bytes = self._buffer(rest) * cut_in
            pool.waiting.append(_Piece(transfer, queues, rest, True, pool, ring_bytes))
        self._admit()

    def _queues_of(self, route: Sequence[Link | TaskLane]) -> _Queues:
        found = self._queues.get(id(route))
        if found is None:
            made = []
            for link in route:
                turns = self._turns[link.name]
                queue = turns.then if link.name in LAST else turns.first
                made.append((turns, queue, link.bytes_per_s, link.latency_s))
            # The route is kept, so that no other can have its id.
            found = self._queues[id(route)] = route, tuple(made)
        return found[1]

    def _size(self, transfer: SimTransfer) -> int:
        """Bytes of the pieces of a transfer, but for the last."""
        chunk = self._chunk_bytes // transfer.cut_in
        chunks = -(-transfer.nbytes // chunk)
        size = -(-chunks // MOST_PIECES) * chunk
        return max(chunk, min(size, self._lane_bytes // 4 // transfer.cut_in))

    def _buffer(self, nbytes: int) -> int:
        """Bytes of the ring for so many bytes: whole blocks."""
        block = min(RING_BLOCK, self._chunk_bytes)
        return -(-nbytes // block) * block

    def _admit(self) -> None:
        """Give free bytes of the ring to waiting pieces; one at a time may take more than there
        are."""
        reads, writes = self._reads, self._writes
        for pool, other in ((reads, writes), (writes, reads)):
            waiting = pool.waiting
            while waiting:
                held = pool.held + waiting[0].ring_bytes
                if held > self._lane_bytes and pool.held:
                    break
                if held + other.held > self._ring_bytes and (pool.held or other.held):
                    break
                pool.held = held
                self._queue(waiting.popleft())

    def _queue(self, piece: _Piece) -> None:
        turns, queue, _, _ = piece.queues[piece.at]
        if piece.last and piece.at + 1 == piece.transfer.over_after:
            piece.transfer.queued_s = self.now
        if turns.busy and piece.transfer.seconds is not None:
            insort(queue, piece, key=_urgency)
        elif turns.busy:
            queue.append(piece)
        else:
            turns.busy = True
            self._carry(piece)

    def _carry(self, piece: _Piece) -> None:
        """Start a piece on its lane, which is free."""
        transfer, at, now = piece.transfer, piece.at, self.now
        if transfer.begin_s is None:
            transfer.begin_s = now
        self._count = count = self._count + 1
        over_s = now + piece.nbytes / piece.queues[at][2]
        heappush(self._events, (over_s, count, LinkSimulator._passed, piece))

    def _passed(self, piece: _Piece) -> None:
        """Free the lane of a piece for the next one."""
        turns, _, _, latency_s = piece.queues[piece.at]
        if queue := turns.first or turns.then:
            self._carry(queue.popleft())
        else:
            turns.busy = False
        if latency_s:
            self._count = count = self._count + 1
            heappush(self._events, (self.now + latency_s, count, LinkSimulator._arrive, piece))
        else:
            self._arrive(piece)

    def _arrive(self, piece: _Piece) -> None:
        transfer = piece.transfer
        piece.at = at = piece.at + 1
        if at == transfer.over_after:
            transfer.over_left -= 1
            if not transfer.over_left:
                self._over(transfer)
        if at < len(piece.queues):
            self._queue(piece)
            return
        if (pool := piece.pool) is not None:
            pool.held -= piece.ring_bytes
            if self._reads.waiting or self._writes.waiting:
                self._admit()
        transfer.home_left -= 1
        if not transfer.home_left:
            self._home(transfer)

    def _end(self, transfer: SimTransfer) -> None:
        self._over(transfer)
        self._home(transfer)

    def _over(self, transfer: SimTransfer) -> None:
        transfer.over_s = self.now
        self._release(transfer.after_over)

    def _home(self, transfer: SimTransfer) -> None:
        transfer.home_s = self.now
        self._release(transfer.after_home)

    def _release(self, waiting: list[SimTransfer]) -> None:
        for transfer in waiting:
            self._unblock(transfer)
        waiting.clear()


@dataclass(frozen=True)
class Carried:
    """A piece of a transfer on a link: its bytes, and the seconds at which the link carried it."""

    transfer: SimTransfer
    link: str
    nbytes: int
    begin_s: float
    end_s: float


class RecordingLinkSimulator(LinkSimulator):
    """A `LinkSimulator` that remembers what each link carried that carries bytes."""

    def __init__(
        self, links: Mapping[str, Link | TaskLane], chunk_bytes: int = 1, ring_bytes: int = 1
    ) -> None:
        super().__init__(links, chunk_bytes, ring_bytes)
        self.carried: list[Carried] = []

    def _carry(self, piece: _Piece) -> None:
        link, nbytes, begin_s = piece.transfer.route[piece.at].name, piece.nbytes, self.now
        super()._carry(piece)
        if piece.transfer.seconds is not None:
            return
        end_s = begin_s + nbytes / piece.queues[piece.at][2]
        self.carried.append(Carried(piece.transfer, link, int(nbytes), begin_s, end_s))
