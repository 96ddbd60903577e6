"""Fetch, put and add: how bytes travel between an entry's home and memory.

    fetch   disk -> buffer of the ring -> memory        host -> memory        blank: zeros -> memory
    put     memory -> buffer -> disk                    memory -> host
    add     memory -> buffer, disk -> buffer; sum -> disk         memory -> buffer; host += buffer

Bytes pass the disk in chunks, each on its own: while one is copied to the device the next is read.
A transfer holds nothing until all that it follows is complete, so what is under way always ends.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zcompile.runtime.device import Arriving, Device, Landing
from zcompile.runtime.extents import Written
from zcompile.runtime.pages import clear_bytes, copy_bytes
from zcompile.runtime.place import Place
from zcompile.runtime.staging import Staging
from zcompile.runtime.ticket import Callback, Countdown, Ticket
from zcompile.runtime.tier_host import HostTier
from zcompile.runtime.tiers import Buffer
from zcompile.runtime.workers import Workers

SERIAL_ELEMENTS = 16 * 1024
"""Torch adds fewer than 32768 elements in the calling thread; more would start OpenMP threads in
every worker. The sum is the same to the bit."""


@dataclass(frozen=True)
class Means:
    """What transfers travel with."""

    device: Device
    staging: Staging
    adder: Workers


class Transfer:
    """Bytes [begin, end) of an entry on their way to or from `memory`. A `Ticket`.

    memory  uint8 [end - begin], contiguous; kept alive until the copies to or from it are over
    marks   points of compute that those copies must come after

    Three promises: `queued`, all copies are enqueued on the device; `over`, `memory` is not
    touched any more; `home`, all is done.
    """

    lane = "read"
    writes = False
    cut_in = 1
    """Chunks per buffer of the ring."""

    def __init__(self, place: Place, begin: int, memory: Tensor, marks: Sequence[Ticket],
                 means: Means) -> None:  # fmt: skip
        self.place = place
        self.begin = begin
        self.end = begin + memory.numel()
        self.marks = marks
        self.queued, self.over, self.home = Countdown(), Countdown(), Countdown()
        self._memory: Tensor | None = memory
        self._means = means
        self._event: object = None
        self._was = Written()
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
            self._means.device.join(self._event)

    def prepare(self) -> None:
        """Note what the entry holds as of now; called in the order of submission."""
        self._was = self.place.written.copy()
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
        self._copied(error)
        self.home.drop(error)

    def begin_chunk(self, begin: int, end: int, buffer: Buffer) -> None:
        if self.home.error is not None:
            self._chunk_failed(buffer, self.home.error)
        else:
            self._chunk(begin, end, buffer)

    def _issue(self) -> None:
        raise NotImplementedError

    def _chunk(self, begin: int, end: int, buffer: Buffer) -> None:
        raise NotImplementedError

    def _copied(self, error: BaseException | None) -> None:
        if error is not None:
            self.queued.finish(error)
        self.over.drop(error)

    def _chunk_failed(self, buffer: Buffer, error: BaseException) -> None:
        """A chunk ends before its copy to or from `memory` began."""
        self._means.staging.give(self.lane, buffer)
        self.landed(error)

    def _hold(self, parts: int) -> None:
        for promise in (self.queued, self.over, self.home):
            promise.hold(parts)

    def _by_chunks(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Send ranges of the entry through the ring, cut at blocks of the tier."""
        unit = self.place.tier.alignment
        size = self._means.staging.chunk_bytes // self.cut_in
        chunks: deque[tuple[int, int]] = deque()
        for begin, end in ranges:
            while begin < end:
                stop = min(begin // unit * unit + size, end)
                chunks.append((begin, stop))
                begin = stop
        self._hold(len(chunks))
        self._means.staging.request(self.lane, self, chunks)

    def _part(self, begin: int, end: int) -> Tensor:
        """Bytes [begin, end) of the entry, in `memory`."""
        assert self._memory is not None, "memory is touched after it was let go"
        return self._memory[begin - self.begin : end - self.begin]

    def _let_go(self, error: BaseException | None) -> None:
        self._memory = None
        self.marks = ()


class Fetch(Transfer):
    """From home to device memory."""

    def _issue(self) -> None:
        on_disk = []
        for begin, end, held in self._was.pieces(self.begin, self.end):
            if not held:
                self._hold(1)
                self._clear(self._part(begin, end))
            elif isinstance(self.place.tier, HostTier):
                for at, memory in self.place.tier.pieces(self.place.extent, begin, end):
                    self._hold(1)
                    self._copy(self._part(at, at + memory.numel()), memory, self)
            else:
                on_disk.append((begin, end))
        self._by_chunks(on_disk)

    def _chunk(self, begin: int, end: int, buffer: Buffer) -> None:
        low, high = self.place.blocks(begin, end)
        self.place.tier.read(self.place.extent, low, buffer.part(0, high - low)).then(
            partial(self._chunk_read, begin, end, buffer))  # fmt: skip

    def _chunk_read(self, begin: int, end: int, buffer: Buffer,
                    error: BaseException | None) -> None:  # fmt: skip
        if error is not None:
            self._chunk_failed(buffer, error)
            return
        skip = begin - self.place.blocks(begin, end)[0]
        self._copy(self._part(begin, end), buffer.memory[skip : skip + end - begin],
                   _FetchedChunk(self, buffer))  # fmt: skip

    def _copy(self, target: Tensor, source: Tensor, landing: Landing) -> None:
        self._means.device.copy("h2d", target, source, self.marks, landing)

    def _clear(self, target: Tensor) -> None:
        self._means.device.clear(target, self.marks, self)


class ReadBack(Fetch):
    """From home to ordinary host memory, whatever the device."""

    def _copy(self, target: Tensor, source: Tensor, landing: Landing) -> None:
        with Arriving(landing):
            copy_bytes(target, source, target.numel())

    def _clear(self, target: Tensor) -> None:
        with Arriving(self):
            clear_bytes(target, target.numel())


@dataclass(frozen=True)
class _FetchedChunk:
    """The landing of one chunk on the device."""

    fetch: Fetch
    buffer: Buffer

    def enqueued(self, event: object) -> None:
        self.fetch.enqueued(event)

    def landed(self, error: BaseException | None) -> None:
        self.fetch._means.staging.give(self.fetch.lane, self.buffer)
        self.fetch.landed(error)


class Put(Transfer):
    """From memory to home."""

    lane = "write"
    writes = True

    def _issue(self) -> None:
        if not isinstance(self.place.tier, HostTier):
            self._by_chunks([(self.begin, self.end)])
            return
        for at, memory in self.place.tier.pieces(self.place.extent, self.begin, self.end):
            self._hold(1)
            self._means.device.copy("d2h", memory, self._part(at, at + memory.numel()),
                                    self.marks, self)  # fmt: skip

    def _chunk(self, begin: int, end: int, buffer: Buffer) -> None:
        low, high = self.place.blocks(begin, end)
        step = partial(self._copy_chunk, begin, end, buffer)
        # A block that is written in part keeps the rest of what it holds.
        if self._was.touches(low, begin) or self._was.touches(end, min(high, self.place.nbytes)):
            self.place.tier.read(self.place.extent, low, buffer.part(0, high - low)).then(step)
        else:
            step(None)

    def _copy_chunk(self, begin: int, end: int, buffer: Buffer,
                    error: BaseException | None) -> None:  # fmt: skip
        if error is not None:
            self._chunk_failed(buffer, error)
            return
        low, high = self.place.blocks(begin, end)
        target = buffer.memory[begin - low : end - low]
        landing = _LeftChunk(self, partial(self._write, low, high, buffer))
        self._means.device.copy("d2h", target, self._part(begin, end), self.marks, landing)

    def _write(self, low: int, high: int, buffer: Buffer, error: BaseException | None) -> None:
        if error is not None:
            self._written(buffer, error)
        else:
            self.place.tier.write(self.place.extent, low, buffer.part(0, high - low)).then(
                partial(self._written, buffer))  # fmt: skip

    def _written(self, buffer: Buffer, error: BaseException | None) -> None:
        self._means.staging.give(self.lane, buffer)
        self.home.drop(error)


@dataclass(frozen=True)
class _LeftChunk:
    """The landing of one chunk in a buffer of the ring; then it goes on."""

    transfer: Put
    then: Callback

    def enqueued(self, event: object) -> None:
        self.transfer.enqueued(event)

    def landed(self, error: BaseException | None) -> None:
        self.transfer._copied(error)
        self.then(error)


class Add(Put):
    """Home += memory, in elements of `dtype`; the sum is formed on the host."""

    cut_in = 2  # half a buffer for what comes, half for what was there

    def __init__(self, place: Place, begin: int, memory: Tensor, marks: Sequence[Ticket],
                 means: Means, dtype: torch.dtype) -> None:  # fmt: skip
        super().__init__(place, begin, memory, marks, means)
        self._dtype = dtype

    def _issue(self) -> None:
        self._by_chunks([(self.begin, self.end)])

    def _chunk(self, begin: int, end: int, buffer: Buffer) -> None:
        half = buffer.nbytes // 2
        both = Countdown()
        both.then(partial(self._sum_later, begin, end, buffer))
        low, high = self.place.blocks(begin, end)
        if not isinstance(self.place.tier, HostTier) and self._was.touches(low, high):
            both.hold()
            self.place.tier.read(self.place.extent, low, buffer.part(0, high - low)).then(both.drop)
        self._means.device.copy("d2h", buffer.memory[half : half + end - begin],
                                self._part(begin, end), self.marks,
                                _LeftChunk(self, both.drop))  # fmt: skip

    def _sum_later(self, begin: int, end: int, buffer: Buffer,
                   error: BaseException | None) -> None:  # fmt: skip
        self._means.adder.submit(partial(self._sum, begin, end, buffer, error))

    def _sum(self, begin: int, end: int, buffer: Buffer, error: BaseException | None) -> None:
        if error is not None:
            self._written(buffer, error)
            return
        new = buffer.memory[buffer.nbytes // 2 :]
        tier, extent = self.place.tier, self.place.extent
        if isinstance(tier, HostTier):
            for at, memory in tier.pieces(extent, begin, end):
                self._add(memory, new[at - begin : at - begin + memory.numel()], at)
            self._written(buffer, None)
        else:
            low, high = self.place.blocks(begin, end)
            self._add(buffer.memory[begin - low : end - low], new[: end - begin], begin)
            self._write(low, high, buffer, None)

    def _add(self, old: Tensor, new: Tensor, begin: int) -> None:
        """old += new, where `old` is the entry from `begin` on; what was blank counts as zero."""
        for low, high, held in self._was.pieces(begin, begin + old.numel()):
            if not held:
                clear_bytes(old[low - begin :], high - low)
        total, more = old.view(self._dtype), new.view(self._dtype)
        for at in range(0, total.numel(), SERIAL_ELEMENTS):
            total[at : at + SERIAL_ELEMENTS].add_(more[at : at + SERIAL_ELEMENTS])
