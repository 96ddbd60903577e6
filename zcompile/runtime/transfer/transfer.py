"""A transfer: some bytes of one entry on their way, whatever the way.

It is cut into parts, each of which lands by itself; three countdowns tell how far all of them are.
A transfer holds nothing until all that it follows is complete, so what is under way always ends.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zcompile.ir.types import ALIGNMENT
from zcompile.runtime.device.base import Device, Direction
from zcompile.runtime.io.disk_trial import BLOCK_BYTES
from zcompile.runtime.tiers.extents import Written
from zcompile.runtime.tiers.place import Place
from zcompile.runtime.tiers.tiers import Buffer
from zcompile.runtime.transfer.staging import Staging
from zcompile.runtime.transfer.ticket import Countdown, Ticket
from zcompile.runtime.transfer.workers import Workers


@dataclass(frozen=True)
class Means:
    """What transfers travel with."""

    device: Device
    staging: Staging
    adder: Workers


class Transfer(ABC):
    """Bytes [begin, end) of an entry on their way to or from `memory`. A `Ticket`.

    memory  uint8 [end - begin], contiguous
    owner   the tensor that the caller gave, over the same bytes; kept alive until the copies to or
            from them are over. Copies know only `memory`, so that a worker which is slow to let
            go of one does not hold a range of the arena.
    marks   points of compute that those copies must come after
    padded  the bytes after `memory`, up to a multiple of the arena's ALIGNMENT, are free to use

    Three promises: `queued`, all copies are enqueued on the device; `over`, `memory` is not
    touched any more; `home`, all is done.
    """

    lane = "read"
    direction: Direction = "h2d"
    writes = False
    cut_in = 1
    """Times the bytes of a chunk that its buffer holds."""

    def __init__(self, place: Place, begin: int, memory: Tensor, owner: Tensor,
                 marks: Sequence[Ticket], means: Means,
                 padded: bool = False) -> None:  # fmt: skip
        assert memory.dtype == torch.uint8, "transfers move bytes"
        assert memory.is_contiguous(), "transfers move bytes that lie in one piece"
        self.place = place
        self.begin = begin
        self.end = begin + memory.numel()
        self.marks = marks
        self.queued, self.over, self.home = Countdown(), Countdown(), Countdown()
        self._memory: Tensor | None = memory
        self._owner: Tensor | None = owner
        self.means = means
        self.padded = padded
        self._event: object = None
        self.was = Written()
        self.over.then(self._let_go)

    def done(self) -> bool:
        return self.home.done()

    def wait(self) -> None:
        self.home.wait()

    def join_compute(self) -> None:
        self.queued.wait()
        if self.over.done():
            self.over.wait()
        else:
            self.means.device.join(self._event)
            if not self.writes:
                self._owner = None  # whatever the caller does next comes after the copies

    def prepare(self) -> None:
        """Note what the entry holds as of now; called in the order of submission."""
        self.was = self.place.written.copy()
        if self.writes:
            self.place.written.add(self.begin, self.end)

    def start(self, error: BaseException | None) -> None:
        """All that this follows is complete, or `error` says what failed there."""
        if error is not None:
            self.fail(error)
            return
        self._issue()
        for promise in (self.queued, self.over, self.home):
            promise.drop()

    def fail(self, error: BaseException) -> None:
        """End at once: for what has not started, and for a store that is closing."""
        for promise in (self.queued, self.over, self.home):
            promise.finish(error)

    def enqueued(self, event: object) -> None:
        self._event = event
        self.queued.drop()

    def landed(self, error: BaseException | None) -> None:
        """One copy between the device and the entry's home on the host is over."""
        self.copied(error)
        self.home.drop(error)

    def room(self, begin: int, end: int) -> int:
        low, high = self.place.blocks(begin, end)
        return -(-(high - low) // BLOCK_BYTES) * BLOCK_BYTES * self.cut_in

    def begin_chunk(self, begin: int, end: int, buffer: Buffer) -> None:
        if self.home.error is not None:
            self.chunk_failed(buffer, self.home.error)
        else:
            self._chunk(begin, end, buffer)

    @abstractmethod
    def _issue(self) -> None:
        """Cut into parts and start them; all that this follows is complete."""

    @abstractmethod
    def _chunk(self, begin: int, end: int, buffer: Buffer) -> None:
        """Move bytes [begin, end) of the entry by way of a buffer of the ring."""

    def copied(self, error: BaseException | None) -> None:
        if error is not None:
            self.queued.finish(error)
        self.over.drop(error)

    def chunk_failed(self, buffer: Buffer, error: BaseException) -> None:
        """A chunk ends before its copy to or from `memory` began."""
        self.means.staging.give(buffer)
        self.landed(error)

    def hold(self, parts: int) -> None:
        for promise in (self.queued, self.over, self.home):
            promise.hold(parts)

    def by_chunks(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Send ranges of the entry through the ring, cut at blocks of the tier."""
        unit = self.place.tier.granule
        size = self.means.staging.chunk_bytes // self.cut_in
        chunks: deque[tuple[int, int]] = deque()
        for begin, end in ranges:
            while begin < end:
                stop = min(begin // unit * unit + size, end)
                chunks.append((begin, stop))
                begin = stop
        self.hold(len(chunks))
        self.means.staging.request(self.lane, self, chunks)

    def straight(self, begin: int, end: int) -> Buffer | None:
        """The memory of bytes [begin, end) of the entry, if the tier can move them as they lie.

        Whole granules at an address that is a multiple of them; the last may reach into padding.
        """
        memory, granule = self.part(begin, end), self.place.tier.granule
        if not (memory.is_cpu and self.means.device.straight(self.direction)):
            return None
        if begin % granule or memory.data_ptr() % granule:
            return None
        nbytes = -(-(end - begin) // granule) * granule
        padding = end == self.end and self.padded and granule <= ALIGNMENT
        if nbytes > end - begin and not padding:
            return None
        return Buffer.at(memory, nbytes)

    def part(self, begin: int, end: int) -> Tensor:
        """Bytes [begin, end) of the entry, in `memory`."""
        assert self._memory is not None, "memory is touched after it was let go"
        return self._memory[begin - self.begin : end - self.begin]

    def _let_go(self, error: BaseException | None) -> None:
        self._memory = self._owner = None
        self.marks = ()


def read_out(ticket: Ticket) -> Ticket:
    """Complete once nothing reads what leaves, be it home by then or on its way to a disk."""
    return ticket.over if isinstance(ticket, Transfer) else ticket
