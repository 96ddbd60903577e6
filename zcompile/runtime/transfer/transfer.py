"""A transfer: some bytes of one entry on their way, whatever the way.

It is cut into parts, each of which lands by itself; three countdowns tell how far all of them are.
A transfer holds nothing until all that it follows is complete, so what is under way always ends.

Fetch and put: how bytes travel between an entry's home and memory.

    fetch   disk -> buffer of the ring -> memory        host -> memory        blank: zeros -> memory
    put     memory -> buffer of the ring -> disk        memory -> host

Where system calls can reach the memory and it lies on granules of the tier, disk and memory
exchange bytes without the ring. Otherwise bytes pass it in chunks, each on its own: while one is
copied to the device the next is read.

Add: an entry becomes itself plus what comes; the sum is formed on the host.

memory -> half a buffer; disk -> the other half; their sum -> disk
memory -> half a buffer; home on the host += that half
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zcompile.ir.types import ALIGNMENT
from zcompile.runtime.device.base import CopyListener, CopyReport, Device, Direction
from zcompile.runtime.device.pages import clear_bytes, copy_bytes
from zcompile.runtime.io.trial import BLOCK_BYTES
from zcompile.runtime.tiers.base import Buffer, Place
from zcompile.runtime.tiers.extents import Written
from zcompile.runtime.transfer.staging import Staging
from zcompile.runtime.transfer.ticket import Callback, Countdown, Ticket, Workers


@dataclass(frozen=True)
class TransferContext:
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

    def __init__(
        self,
        place: Place,
        begin: int,
        memory: Tensor,
        owner: Tensor,
        marks: Sequence[Ticket],
        means: TransferContext,
        padded: bool = False,
    ) -> None:
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
        if not (memory.is_cpu and self.means.device.can_bypass_staging(self.direction)):
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


class Fetch(Transfer):
    """From home to device memory."""

    def _issue(self) -> None:
        staged = []
        for begin, end, held in self.was.pieces(self.begin, self.end):
            if not held:
                self.hold(1)
                self.clear(self.part(begin, end))
            elif self.place.tier.in_memory:
                for at, memory in self.place.tier.pieces(self.place.extent, begin, end):
                    self.hold(1)
                    self.copy(self.part(at, at + memory.numel()), memory, self)
            elif (buffer := self.straight(begin, end)) is not None:
                self.hold(1)
                self.place.tier.read(self.place.extent, begin, buffer).then(
                    partial(self._went_straight, end - begin)
                )
            else:
                staged.append((begin, end))
        self.by_chunks(staged)

    def _went_straight(self, nbytes: int, error: BaseException | None) -> None:
        if error is None:
            self.note_straight(nbytes)
            self.enqueued(None)
        self.landed(error)

    def note_straight(self, nbytes: int) -> None:
        self.means.device.count_bypass(self.direction, nbytes)

    def _chunk(self, begin: int, end: int, buffer: Buffer) -> None:
        low, high = self.place.blocks(begin, end)
        self.place.tier.read(self.place.extent, low, buffer.part(0, high - low)).then(
            partial(self._chunk_read, begin, end, buffer)
        )

    def _chunk_read(
        self, begin: int, end: int, buffer: Buffer, error: BaseException | None
    ) -> None:
        if error is not None:
            self.chunk_failed(buffer, error)
            return
        skip = begin - self.place.blocks(begin, end)[0]
        self.copy(
            self.part(begin, end),
            buffer.memory[skip : skip + end - begin],
            _FetchedChunk(self, buffer),
        )

    def copy(self, target: Tensor, source: Tensor, listener: CopyListener) -> None:
        self.means.device.copy("h2d", target, source, self.marks, listener)

    def clear(self, target: Tensor) -> None:
        self.means.device.clear(target, self.marks, self)


class ReadBack(Fetch):
    """From home to ordinary host memory, whatever the device."""

    def copy(self, target: Tensor, source: Tensor, listener: CopyListener) -> None:
        with CopyReport(listener):
            copy_bytes(target, source, target.numel())

    def clear(self, target: Tensor) -> None:
        with CopyReport(self):
            clear_bytes(target, target.numel())

    def note_straight(self, nbytes: int) -> None:
        """The device had no part in it."""


@dataclass(frozen=True)
class _FetchedChunk:
    """The listener of one chunk on the device."""

    fetch: Fetch
    buffer: Buffer

    def enqueued(self, event: object) -> None:
        self.fetch.enqueued(event)

    def landed(self, error: BaseException | None) -> None:
        self.fetch.means.staging.give(self.buffer)
        self.fetch.landed(error)


class Put(Transfer):
    """From memory to home."""

    lane = "write"
    direction: Direction = "d2h"
    writes = True

    def _issue(self) -> None:
        if not self.place.tier.in_memory:
            self._to_disk()
            return
        for at, memory in self.place.tier.pieces(self.place.extent, self.begin, self.end):
            self.hold(1)
            self.means.device.copy(
                "d2h", memory, self.part(at, at + memory.numel()), self.marks, self
            )

    def _to_disk(self) -> None:
        buffer = self.straight(self.begin, self.end)
        # What is rounded up must lie in the padding of the extent, not on bytes of the entry.
        if buffer is None or self.begin + buffer.nbytes > max(self.end, self._padded_end()):
            self.by_chunks([(self.begin, self.end)])
            return
        self.hold(1)
        self.place.tier.write(self.place.extent, self.begin, buffer).then(self._went_straight)

    def _padded_end(self) -> int:
        return self.place.extent.nbytes if self.end == self.place.nbytes else self.end

    def _went_straight(self, error: BaseException | None) -> None:
        if error is None:
            self.means.device.count_bypass(self.direction, self.end - self.begin)
            self.enqueued(None)
        self.landed(error)

    def _chunk(self, begin: int, end: int, buffer: Buffer) -> None:
        low, high = self.place.blocks(begin, end)
        step = partial(self._copy_chunk, begin, end, buffer)
        # A block that is written in part keeps the rest of what it holds.
        if self.was.touches(low, begin) or self.was.touches(end, min(high, self.place.nbytes)):
            self.place.tier.read(self.place.extent, low, buffer.part(0, high - low)).then(step)
        else:
            step(None)

    def _copy_chunk(
        self, begin: int, end: int, buffer: Buffer, error: BaseException | None
    ) -> None:
        if error is not None:
            self.chunk_failed(buffer, error)
            return
        low, high = self.place.blocks(begin, end)
        target = buffer.memory[begin - low : end - low]
        listener = LeftChunk(self, partial(self.write, low, high, buffer))
        self.means.device.copy("d2h", target, self.part(begin, end), self.marks, listener)

    def write(self, low: int, high: int, buffer: Buffer, error: BaseException | None) -> None:
        if error is not None:
            self.written(buffer, error)
        else:
            self.place.tier.write(self.place.extent, low, buffer.part(0, high - low)).then(
                partial(self.written, buffer)
            )

    def written(self, buffer: Buffer, error: BaseException | None) -> None:
        self.means.staging.give(buffer)
        self.home.drop(error)


@dataclass(frozen=True)
class LeftChunk:
    """The listener of one chunk in a buffer of the ring; then it goes on."""

    transfer: Put
    then: Callback

    def enqueued(self, event: object) -> None:
        self.transfer.enqueued(event)

    def landed(self, error: BaseException | None) -> None:
        self.transfer.copied(error)
        self.then(error)


SERIAL_ELEMENTS = 32 * 1024 - 64
"""Torch adds fewer than 32768 elements in the calling thread; more would start OpenMP threads in
every worker. A multiple of 64 keeps the parts aligned. The sum is the same to the bit."""


class Add(Put):
    """Home += memory, in elements of `dtype`; the sum is formed on the host."""

    cut_in = 2  # half a buffer for what comes, half for what was there

    def __init__(
        self,
        place: Place,
        begin: int,
        memory: Tensor,
        owner: Tensor,
        marks: Sequence[Ticket],
        means: TransferContext,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(place, begin, memory, owner, marks, means)
        self._dtype = dtype

    def _issue(self) -> None:
        self.by_chunks([(self.begin, self.end)])

    def _chunk(self, begin: int, end: int, buffer: Buffer) -> None:
        half = buffer.nbytes // 2
        both = Countdown()
        both.then(partial(self._sum_later, begin, end, buffer))
        low, high = self.place.blocks(begin, end)
        if not self.place.tier.in_memory and self.was.touches(low, high):
            both.hold()
            self.place.tier.read(self.place.extent, low, buffer.part(0, high - low)).then(both.drop)
        self.means.device.copy(
            "d2h",
            buffer.memory[half : half + end - begin],
            self.part(begin, end),
            self.marks,
            LeftChunk(self, both.drop),
        )

    def _sum_later(self, begin: int, end: int, buffer: Buffer, error: BaseException | None) -> None:
        self.means.adder.submit(partial(self._sum, begin, end, buffer, error))

    def _sum(self, begin: int, end: int, buffer: Buffer, error: BaseException | None) -> None:
        if error is not None:
            self.written(buffer, error)
            return
        new = buffer.memory[buffer.nbytes // 2 :]
        tier, extent = self.place.tier, self.place.extent
        if tier.in_memory:
            for at, memory in tier.pieces(extent, begin, end):
                self._add(memory, new[at - begin : at - begin + memory.numel()], at)
            self.written(buffer, None)
        else:
            low, high = self.place.blocks(begin, end)
            self._add(buffer.memory[begin - low : end - low], new[: end - begin], begin)
            self.write(low, high, buffer, None)

    def _add(self, old: Tensor, new: Tensor, begin: int) -> None:
        """old += new, where `old` is the entry from `begin` on; what was blank counts as zero."""
        for low, high, held in self.was.pieces(begin, begin + old.numel()):
            if not held:
                clear_bytes(old[low - begin :], high - low)
        total, more = old.view(self._dtype), new.view(self._dtype)
        for at in range(0, total.numel(), SERIAL_ELEMENTS):
            total[at : at + SERIAL_ELEMENTS].add_(more[at : at + SERIAL_ELEMENTS])
