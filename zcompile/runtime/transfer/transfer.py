"""A transfer moves a range of bytes of one entry between its home tier and memory.

    fetch   disk -> buffer of the ring -> memory        host -> memory        blank: zeros -> memory
    put     memory -> buffer of the ring -> disk        memory -> host
    add     memory -> half a buffer; disk -> the other half; their sum -> disk
            memory -> half a buffer; home on the host += that half

A transfer is cut into parts, each of which lands by itself; three countdowns tell how far all of
them are. A transfer holds nothing until all that it follows is complete, or enqueued on the device
and complete without anybody else; so what is in flight always ends. Chunks pass the staging ring
each on its own: while one is copied to the device the next is read. Where system calls can reach
the memory and it lies on granules of the tier, disk and memory exchange bytes without the ring, but
for writes to a slow disk that the ring has room for, which free their memory sooner that way. The
sum of an add is formed on the host.
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
from zcompile.runtime.tiers.extents import WrittenRanges
from zcompile.runtime.transfer.staging import Staging
from zcompile.runtime.transfer.ticket import Callback, Countdown, Promise, Ticket, Workers


@dataclass(frozen=True)
class TransferContext:
    """The device, the staging ring and the thread for sums that transfers use."""

    device: Device
    staging: Staging
    adder: Workers


class InFlight(ABC):
    """Bytes [begin, end) of an entry in flight to or from memory: a fetch, a put or an add that was
    submitted, as those see it who come after it. A `Ticket`."""

    place: Place
    begin: int
    end: int
    writes = False
    direction: Direction = "h2d"
    on_host = False
    """Whether it is no transfer, but work of the host on the bytes where they rest."""

    @property
    def name(self) -> str:
        return self.place.name

    @abstractmethod
    def done(self) -> bool:
        """As `Ticket.done`: whether all is done, as far as the host has heard."""

    def wait(self) -> None:
        self.end_heard().wait()

    @abstractmethod
    def join_compute(self) -> None:
        """As `Ticket.join_compute`."""

    @abstractmethod
    def release(self) -> None:
        """Give the memory that is copied from back to compute, which waits for the copies if they
        are not over; the host only until they are enqueued."""

    @abstractmethod
    def memory_done(self) -> bool:
        """Whether the host has heard that the memory is not touched any more."""

    @abstractmethod
    def end_heard(self) -> Promise:
        """A promise that is kept once all is done. Not free: who asks may have a thread wait."""

    @abstractmethod
    def memory_heard(self) -> Promise:
        """A promise that is kept once the memory is not touched any more. Not free, either."""

    @abstractmethod
    def await_end(self) -> None:
        """Have somebody hear of the end, who else might do that only when there is occasion."""

    @abstractmethod
    def when_enqueued(self, callback: Callback) -> None:
        """Call `callback` once all copies are enqueued on the device, or it has failed."""

    @abstractmethod
    def when_released(self, callback: Callback) -> None:
        """Call `callback` once nothing of this holds the memory any more: that is free, or compute
        waits until it is. To be asked for before the transfer is submitted."""

    @abstractmethod
    def copies_mark(self) -> Ticket | None:
        """A mark that is complete once the copies to or from the memory are over, all of which are
        enqueued; None, if only `memory_heard` tells."""

    @abstractmethod
    def home_mark(self) -> Ticket | None:
        """A mark that is complete once the transfer is, all copies of which are enqueued; None, if
        only `end_heard` tells, since there is more to it."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """End at once: for a transfer that has not started, and for a store that is closing."""


class Transfer(InFlight):
    """One that promises keep track of: cut into parts, each of which lands by itself.

    memory  uint8 [end - begin], contiguous
    owner   the tensor that the caller gave, over the same bytes; kept alive until the copies to or
            from them are over, or compute waits for them: what is given to others then is used
            after them. Copies know only `memory`, so that a worker which is slow to drop a copy
            does not hold a range of the arena.
    marks   points of compute that those copies must come after
    in_arena  `memory` lies in the arena, so that the bytes after it, up to a multiple of its
              ALIGNMENT, are free to use
    before  which bytes of the entry held a value when the transfer was submitted

    Three promises: `queued`, all copies are enqueued on the device; `memory_free`, `memory` is not
    touched any more; `home`, all is done. Where a mark of the device stands for the end of the
    copies, who comes after them need not wait for the latter two (`copies_mark`, `home_mark`).
    """

    lane = "read"
    buffers_per_chunk = 1
    """The buffer of a chunk has this many times its bytes."""
    only_copies = True
    """Whether nothing but the device moves bytes to and from a tier in memory."""
    heeds_marks = True
    """Whether it is the device that makes the copies, and has them come after marks."""

    def __init__(
        self,
        place: Place,
        begin: int,
        memory: Tensor,
        owner: Tensor,
        marks: Sequence[Ticket],
        context: TransferContext,
        in_arena: bool = False,
    ) -> None:
        assert memory.dtype == torch.uint8, "transfers move bytes"
        assert memory.is_contiguous(), "transfers move bytes that lie in one piece"
        self.place = place
        self.begin = begin
        self.end = begin + memory.numel()
        self.marks = marks
        self.queued, self.memory_free, self.home = Countdown(), Countdown(), Countdown()
        self._memory: Tensor | None = memory
        self._owner: Tensor | None = owner
        self.context = context
        self.in_arena = in_arena
        self._event: object = None
        self._follows: list[Ticket] = []
        self._released: Promise | None = None
        self.before = WrittenRanges()
        self.memory_free.then(self._drop_memory)

    def done(self) -> bool:
        return self.home.done()

    def memory_done(self) -> bool:
        return self.memory_free.done()

    def end_heard(self) -> Promise:
        return self.home

    def memory_heard(self) -> Promise:
        return self.memory_free

    def await_end(self) -> None:
        """Those who move its bytes hear of it anyway."""

    def when_enqueued(self, callback: Callback) -> None:
        self.queued.then(callback)

    def join_compute(self) -> None:
        self.queued.wait()
        if self.memory_free.done():
            self.memory_free.wait()
        else:
            self.context.device.join(self._event)
            if not self.writes:
                self._owner = None  # whatever the caller does next comes after the copies

    def when_released(self, callback: Callback) -> None:
        self._released = Promise()
        self._released.then(callback)

    def release(self) -> None:
        self.queued.wait()
        if self.copies_mark() is None:
            self.memory_free.wait()
        else:
            self.context.device.join(self._event)
            self._drop_memory(None)

    def copies_mark(self) -> Ticket | None:
        return None if self.memory_free.error else self.context.device.mark_of(self._event)

    def home_mark(self) -> Ticket | None:
        return self.copies_mark() if self.only_copies and self.place.tier.in_memory else None

    def follow(self, mark: Ticket) -> None:
        """Let the copies come after `mark` too. Called before the start, by any thread."""
        self._follows.append(mark)

    def prepare(self) -> None:
        """Note which bytes of the entry hold a value now; called in the order of submission."""
        self.before = self.place.written.copy()
        if self.writes:
            self.place.written.add(self.begin, self.end)

    def start(self, error: BaseException | None) -> None:
        """Begin: all that this transfer follows is complete, or enqueued and a mark of its own
        (`follow`), or `error` says what failed there."""
        if error is not None:
            self.fail(error)
            return
        if self._follows:
            self.marks = (*self.marks, *self._follows)
        self._issue()
        for promise in (self.queued, self.memory_free, self.home):
            promise.drop()

    def fail(self, error: BaseException) -> None:
        for promise in (self.queued, self.memory_free, self.home):
            promise.finish(error)

    def enqueued(self, event: object) -> None:
        """As `CopyListener.enqueued`."""
        self._event = event
        self.queued.drop()

    def landed(self, error: BaseException | None) -> None:
        """As `CopyListener.landed`: a copy between the device and the home tier on the host is
        over."""
        self.copied(error)
        self.home.drop(error)

    def buffer_bytes(self, begin: int, end: int) -> int:
        low, high = self.place.blocks(begin, end)
        return -(-(high - low) // BLOCK_BYTES) * BLOCK_BYTES * self.buffers_per_chunk

    def begin_chunk(self, begin: int, end: int, buffer: Buffer) -> None:
        if self.home.error is not None:
            self.chunk_failed(buffer, self.home.error)
        else:
            self._chunk(begin, end, buffer)

    @abstractmethod
    def _issue(self) -> None:
        """Cut the transfer into parts and start them; what it follows is complete once `marks`
        are."""

    @abstractmethod
    def _chunk(self, begin: int, end: int, buffer: Buffer) -> None:
        """Move bytes [begin, end) of the entry through a buffer of the ring."""

    def copied(self, error: BaseException | None) -> None:
        """One copy to or from `memory` is over, or failed."""
        if error is not None:
            self.queued.finish(error)
        self.memory_free.drop(error)

    def chunk_failed(self, buffer: Buffer, error: BaseException) -> None:
        """A chunk ends before its copy to or from `memory` began."""
        self.context.staging.give(buffer)
        self.landed(error)

    def hold(self, parts: int) -> None:
        """Wait for so many more parts."""
        for promise in (self.queued, self.memory_free, self.home):
            promise.hold(parts)

    def by_chunks(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Send ranges of the entry through the ring, cut at blocks of the tier."""
        unit = self.place.tier.granule
        size = self.context.staging.chunk_bytes // self.buffers_per_chunk
        chunks: deque[tuple[int, int]] = deque()
        for begin, end in ranges:
            while begin < end:
                stop = min(begin // unit * unit + size, end)
                chunks.append((begin, stop))
                begin = stop
        self.hold(len(chunks))
        self.context.staging.request(self.lane, self, chunks)

    def direct_buffer(self, begin: int, end: int) -> Buffer | None:
        """The memory of bytes [begin, end) of the entry, if the tier can move them without the
        ring, or None.

        That takes whole granules at an address that is a multiple of them; the last may reach into
        padding. Marks of the device hold no system call up: where there are some, the device, or
        the host once it has waited for them, copies through the ring.
        """
        if self.marks:
            return None
        memory, granule = self.part(begin, end), self.place.tier.granule
        if not (memory.is_cpu and self.context.device.can_bypass_staging(self.direction)):
            return None
        if begin % granule or memory.data_ptr() % granule:
            return None
        nbytes = -(-(end - begin) // granule) * granule
        padding = end == self.end and self.in_arena and granule <= ALIGNMENT
        if nbytes > end - begin and not padding:
            return None
        return Buffer.at(memory, nbytes)

    def part(self, begin: int, end: int) -> Tensor:
        """Bytes [begin, end) of the entry, in `memory`."""
        assert self._memory is not None, "memory is touched after it was dropped"
        return self._memory[begin - self.begin : end - self.begin]

    def _drop_memory(self, error: BaseException | None) -> None:
        self._memory = self._owner = None
        self.marks = ()
        self._follows = []
        if self._released is not None:
            self._released.finish()


@dataclass(frozen=True)
class SourceRead:
    """A ticket that is complete once nothing reads the source of a put any more."""

    transfer: InFlight

    def done(self) -> bool:
        return self.transfer.memory_done()

    def wait(self) -> None:
        self.transfer.memory_heard().wait()

    def join_compute(self) -> None:
        self.transfer.release()


def source_released(ticket: Ticket) -> Ticket:
    """A ticket that is complete once nothing reads the source of a put any more, home by then or
    not. When compute has joined it, the memory is compute's again, if nobody else holds it."""
    return SourceRead(ticket) if isinstance(ticket, InFlight) else ticket


# --- Home to memory ---


class Fetch(Transfer):
    """Moves bytes from the home tier to device memory."""

    def _issue(self) -> None:
        staged = []
        for begin, end, held in self.before.pieces(self.begin, self.end):
            if not held:
                self.hold(1)
                self.clear(self.part(begin, end))
            elif self.place.tier.in_memory:
                for at, memory in self.place.tier.pieces(self.place.extent, begin, end):
                    self.hold(1)
                    self.copy(self.part(at, at + memory.numel()), memory, self)
            elif (buffer := self.direct_buffer(begin, end)) is not None:
                self.hold(1)
                self.place.tier.read(self.place.extent, begin, buffer).then(
                    partial(self._bypass_done, end - begin)
                )
            else:
                staged.append((begin, end))
        self.by_chunks(staged)

    def _bypass_done(self, nbytes: int, error: BaseException | None) -> None:
        if error is None:
            self.count_bypass(nbytes)
            self.enqueued(None)
        self.landed(error)

    def count_bypass(self, nbytes: int) -> None:
        self.context.device.count_bypass(self.direction, nbytes)

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
        self.context.device.copy("h2d", target, source, self.marks, listener)

    def clear(self, target: Tensor) -> None:
        self.context.device.clear(target, self.marks, self)


class ReadBack(Fetch):
    """Moves bytes from the home tier to ordinary host memory, whatever the device."""

    only_copies = heeds_marks = False  # the host makes them

    def copy(self, target: Tensor, source: Tensor, listener: CopyListener) -> None:
        with CopyReport(listener):
            copy_bytes(target, source, target.numel())

    def clear(self, target: Tensor) -> None:
        with CopyReport(self):
            clear_bytes(target, target.numel())

    def count_bypass(self, nbytes: int) -> None:
        """The device had no part in it."""


@dataclass(frozen=True)
class _FetchedChunk:
    """Listens to the copy of one chunk to the device, and gives its buffer back."""

    fetch: Fetch
    buffer: Buffer

    @property
    def name(self) -> str:
        return self.fetch.name

    def enqueued(self, event: object) -> None:
        self.fetch.enqueued(event)

    def landed(self, error: BaseException | None) -> None:
        self.fetch.context.staging.give(self.buffer)
        self.fetch.landed(error)


# --- Memory to home ---


class Put(Transfer):
    """Moves bytes from memory to the home tier."""

    lane = "write"
    direction: Direction = "d2h"
    writes = True

    def _issue(self) -> None:
        if not self.place.tier.in_memory:
            self._to_disk()
            return
        for at, memory in self.place.tier.pieces(self.place.extent, self.begin, self.end):
            self.hold(1)
            self.context.device.copy(
                "d2h", memory, self.part(at, at + memory.numel()), self.marks, self
            )

    def _to_disk(self) -> None:
        nbytes = self.end - self.begin
        behind = self.in_arena and nbytes <= self.context.staging.behind_bytes
        buffer = None if behind else self.direct_buffer(self.begin, self.end)
        # What is rounded up must lie in the padding of the extent, not on bytes of the entry.
        if buffer is None or self.begin + buffer.nbytes > max(self.end, self._padded_end()):
            self.by_chunks([(self.begin, self.end)])
            return
        self.hold(1)
        self.place.tier.write(self.place.extent, self.begin, buffer).then(self._bypass_done)

    def _padded_end(self) -> int:
        return self.place.extent.nbytes if self.end == self.place.nbytes else self.end

    def _bypass_done(self, error: BaseException | None) -> None:
        if error is None:
            self.context.device.count_bypass(self.direction, self.end - self.begin)
            self.enqueued(None)
        self.landed(error)

    def _chunk(self, begin: int, end: int, buffer: Buffer) -> None:
        low, high = self.place.blocks(begin, end)
        step = partial(self._copy_chunk, begin, end, buffer)
        # A block that is written in part keeps the rest of what it holds.
        if self.before.touches(low, begin) or self.before.touches(
            end, min(high, self.place.nbytes)
        ):
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
        listener = _CopiedChunk(self, partial(self.write, low, high, buffer))
        self.context.device.copy("d2h", target, self.part(begin, end), self.marks, listener)

    def write(self, low: int, high: int, buffer: Buffer, error: BaseException | None) -> None:
        if error is not None:
            self.written(buffer, error)
        else:
            self.place.tier.write(self.place.extent, low, buffer.part(0, high - low)).then(
                partial(self.written, buffer)
            )

    def written(self, buffer: Buffer, error: BaseException | None) -> None:
        self.context.staging.give(buffer)
        self.home.drop(error)


@dataclass(frozen=True)
class _CopiedChunk:
    """Listens to the copy of one chunk into a buffer of the ring, and goes on with `then`."""

    transfer: Put
    then: Callback

    @property
    def name(self) -> str:
        return self.transfer.name

    def enqueued(self, event: object) -> None:
        self.transfer.enqueued(event)

    def landed(self, error: BaseException | None) -> None:
        self.transfer.copied(error)
        self.then(error)


SERIAL_ELEMENTS = 32 * 1024 - 64
"""Torch adds fewer than 32768 elements in the calling thread; more would start OpenMP threads in
every worker. A multiple of 64 keeps the parts aligned. The sum is the same to the bit."""


class Add(Put):
    """Adds memory to the home tier, in elements of `dtype`; the sum is formed on the host."""

    buffers_per_chunk = 2  # half a buffer for what comes, half for what was there
    only_copies = False  # the host sums up

    def __init__(
        self,
        place: Place,
        begin: int,
        memory: Tensor,
        owner: Tensor,
        marks: Sequence[Ticket],
        context: TransferContext,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(place, begin, memory, owner, marks, context)
        self._dtype = dtype

    def _issue(self) -> None:
        self.by_chunks([(self.begin, self.end)])

    def _chunk(self, begin: int, end: int, buffer: Buffer) -> None:
        half = buffer.nbytes // 2
        both = Countdown()
        both.then(partial(self._sum_later, begin, end, buffer))
        low, high = self.place.blocks(begin, end)
        if not self.place.tier.in_memory and self.before.touches(low, high):
            both.hold()
            self.place.tier.read(self.place.extent, low, buffer.part(0, high - low)).then(both.drop)
        self.context.device.copy(
            "d2h",
            buffer.memory[half : half + end - begin],
            self.part(begin, end),
            self.marks,
            _CopiedChunk(self, both.drop),
        )

    def _sum_later(self, begin: int, end: int, buffer: Buffer, error: BaseException | None) -> None:
        self.context.adder.submit(partial(self._sum, begin, end, buffer, error))

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
        """old += new, where `old` is the entry from `begin` on; blank bytes count as zero."""
        for low, high, held in self.before.pieces(begin, begin + old.numel()):
            if not held:
                clear_bytes(old[low - begin :], high - low)
        total, more = old.view(self._dtype), new.view(self._dtype)
        for at in range(0, total.numel(), SERIAL_ELEMENTS):
            total[at : at + SERIAL_ELEMENTS].add_(more[at : at + SERIAL_ELEMENTS])
