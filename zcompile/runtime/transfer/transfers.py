"""Fetch and put: how bytes travel between an entry's home and memory.

    fetch   disk -> buffer of the ring -> memory        host -> memory        blank: zeros -> memory
    put     memory -> buffer of the ring -> disk        memory -> host

Where system calls can reach the memory and it lies on granules of the tier, disk and memory
exchange bytes without the ring. Otherwise bytes pass it in chunks, each on its own: while one is
copied to the device the next is read.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from zcompile.runtime.device.base import Arriving, Direction, Landing
from zcompile.runtime.device.pages import clear_bytes, copy_bytes
from zcompile.runtime.tiers.tiers import Buffer
from zcompile.runtime.transfer.ticket import Callback
from zcompile.runtime.transfer.transfer import Transfer


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
                    partial(self._went_straight, end - begin))  # fmt: skip
            else:
                staged.append((begin, end))
        self.by_chunks(staged)

    def _went_straight(self, nbytes: int, error: BaseException | None) -> None:
        if error is None:
            self.note_straight(nbytes)
            self.enqueued(None)
        self.landed(error)

    def note_straight(self, nbytes: int) -> None:
        self.means.device.went_straight(self.direction, nbytes)

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

    def note_straight(self, nbytes: int) -> None:
        """The device had no part in it."""


@dataclass(frozen=True)
class _FetchedChunk:
    """The landing of one chunk on the device."""

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
            self.means.device.copy("d2h", memory, self.part(at, at + memory.numel()),
                                    self.marks, self)  # fmt: skip

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
            self.means.device.went_straight(self.direction, self.end - self.begin)
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
        self.means.staging.give(buffer)
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
