"""Fetch and put: how bytes travel between an entry's home and memory.

    fetch   disk -> buffer of the ring -> memory        host -> memory        blank: zeros -> memory
    put     memory -> buffer of the ring -> disk        memory -> host

Bytes pass the disk in chunks, each on its own: while one is copied to the device the next is read.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from zcompile.runtime.device import Arriving, Landing
from zcompile.runtime.pages import clear_bytes, copy_bytes
from zcompile.runtime.ticket import Callback
from zcompile.runtime.tier_host import HostTier
from zcompile.runtime.tiers import Buffer
from zcompile.runtime.transfer import Transfer


class Fetch(Transfer):
    """From home to device memory."""

    def _issue(self) -> None:
        on_disk = []
        for begin, end, held in self.was.pieces(self.begin, self.end):
            if not held:
                self.hold(1)
                self.clear(self.part(begin, end))
            elif isinstance(self.place.tier, HostTier):
                for at, memory in self.place.tier.pieces(self.place.extent, begin, end):
                    self.hold(1)
                    self.copy(self.part(at, at + memory.numel()), memory, self)
            else:
                on_disk.append((begin, end))
        self.by_chunks(on_disk)

    def _chunk(self, begin: int, end: int, buffer: Buffer) -> None:
        low, high = self.place.blocks(begin, end)
        self.place.tier.read(self.place.extent, low, buffer.part(0, high - low)).then(
            partial(self._chunk_read, begin, end, buffer))  # fmt: skip

    def _chunk_read(self, begin: int, end: int, buffer: Buffer,
                    error: BaseException | None) -> None:  # fmt: skip
        if error is not None:
            self.chunk_failed(buffer, error)
            return
        skip = begin - self.place.blocks(begin, end)[0]
        self.copy(self.part(begin, end), buffer.memory[skip : skip + end - begin],
                   _FetchedChunk(self, buffer))  # fmt: skip

    def copy(self, target: Tensor, source: Tensor, landing: Landing) -> None:
        self.means.device.copy("h2d", target, source, self.marks, landing)

    def clear(self, target: Tensor) -> None:
        self.means.device.clear(target, self.marks, self)


class ReadBack(Fetch):
    """From home to ordinary host memory, whatever the device."""

    def copy(self, target: Tensor, source: Tensor, landing: Landing) -> None:
        with Arriving(landing):
            copy_bytes(target, source, target.numel())

    def clear(self, target: Tensor) -> None:
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
        self.fetch.means.staging.give(self.fetch.lane, self.buffer)
        self.fetch.landed(error)


class Put(Transfer):
    """From memory to home."""

    lane = "write"
    writes = True

    def _issue(self) -> None:
        if not isinstance(self.place.tier, HostTier):
            self.by_chunks([(self.begin, self.end)])
            return
        for at, memory in self.place.tier.pieces(self.place.extent, self.begin, self.end):
            self.hold(1)
            self.means.device.copy("d2h", memory, self.part(at, at + memory.numel()),
                                    self.marks, self)  # fmt: skip

    def _chunk(self, begin: int, end: int, buffer: Buffer) -> None:
        low, high = self.place.blocks(begin, end)
        step = partial(self._copy_chunk, begin, end, buffer)
        # A block that is written in part keeps the rest of what it holds.
        if self.was.touches(low, begin) or self.was.touches(end, min(high, self.place.nbytes)):
            self.place.tier.read(self.place.extent, low, buffer.part(0, high - low)).then(step)
        else:
            step(None)

    def _copy_chunk(self, begin: int, end: int, buffer: Buffer,
                    error: BaseException | None) -> None:  # fmt: skip
        if error is not None:
            self.chunk_failed(buffer, error)
            return
        low, high = self.place.blocks(begin, end)
        target = buffer.memory[begin - low : end - low]
        landing = LeftChunk(self, partial(self.write, low, high, buffer))
        self.means.device.copy("d2h", target, self.part(begin, end), self.marks, landing)

    def write(self, low: int, high: int, buffer: Buffer, error: BaseException | None) -> None:
        if error is not None:
            self.written(buffer, error)
        else:
            self.place.tier.write(self.place.extent, low, buffer.part(0, high - low)).then(
                partial(self.written, buffer))  # fmt: skip

    def written(self, buffer: Buffer, error: BaseException | None) -> None:
        self.means.staging.give(self.lane, buffer)
        self.home.drop(error)


@dataclass(frozen=True)
class LeftChunk:
    """The landing of one chunk in a buffer of the ring; then it goes on."""

    transfer: Put
    then: Callback

    def enqueued(self, event: object) -> None:
        self.transfer.enqueued(event)

    def landed(self, error: BaseException | None) -> None:
        self.transfer.copied(error)
        self.then(error)
