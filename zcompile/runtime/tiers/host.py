"""The host tier keeps entries in host memory that copies to and from the device are fast with.

It has one address space in blocks that are made (and, on CUDA, pinned) when first reserved. An
extent is one range of addresses; where it crosses a block, a copy has two pieces.
"""

import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from zcompile.errors import TierFull
from zcompile.ir.torch_compat import without_modes
from zcompile.ir.units import MiB
from zcompile.runtime.device.pages import copy_bytes
from zcompile.runtime.meter import Gauge
from zcompile.runtime.tiers.base import Buffer, Extent, FileRange
from zcompile.runtime.tiers.extents import RangeAllocator
from zcompile.runtime.transfer.ticket import Promise

BLOCK_BYTES = 256 * MiB
"""The size of a block, which is pinned at once. Pinning costs time per call and per page; much
smaller blocks pay the call, much larger ones pin memory that no entry needs yet."""
MOST_PIECES = 1 << 14
"""Ranges of which is kept where they lie; a step transfers fewer."""


class HostTier:
    """A bounded pool of host memory.

    make_block  host memory of the size asked: `Device.host_block`
    in_use      told the bytes reserved
    whole       one block for all, for memory that is not pinned and costs nothing until it is
                touched; then every extent lies in one piece
    """

    name = "host"
    alignment = 64  # of every dtype and of a cache line
    granule = 1
    in_memory = True
    on_device = False

    def __init__(
        self,
        budget_bytes: int,
        make_block: Callable[[int], Tensor],
        in_use: Gauge,
        whole: bool = False,
    ) -> None:
        self._block_bytes = max(budget_bytes, 1) if whole else BLOCK_BYTES
        self._extents = RangeAllocator(self.alignment, budget_bytes)
        self._make_block = make_block
        self._in_use = in_use
        self._lock = threading.Lock()
        self._blocks: dict[int, Tensor] = {}
        self._pieces: dict[tuple[int, int, int], Sequence[tuple[int, Tensor]]] = {}
        """Of transfers, which come again in each step: blocks stay where they are."""

    def reserve(self, nbytes: int, name: str) -> Extent:
        with self._lock:
            offset = self._extents.take(nbytes)
            if offset is None:
                raise TierFull(name, nbytes, [self.usage()])
            size = self._extents.aligned(nbytes)
            self._make_blocks(offset, offset + size)
        self._in_use.change(size)
        return Extent(0, offset, size, name)

    def _make_blocks(self, begin: int, end: int) -> None:
        unit = self._block_bytes
        for block in range(begin // unit, -(-end // unit)):
            if block not in self._blocks:
                left = self._extents.capacity - block * unit
                with without_modes():  # of the user: it outlives this call
                    self._blocks[block] = self._make_block(min(unit, left))

    def release(self, extent: Extent) -> None:
        with self._lock:
            self._extents.give(extent.offset, extent.nbytes)
        self._in_use.change(-extent.nbytes)

    def pieces(self, extent: Extent, begin: int, end: int) -> Sequence[tuple[int, Tensor]]:
        """Bytes [begin, end) of an extent as (where the piece begins, memory), one per block
        touched."""
        asked = extent.offset, begin, end
        found = self._pieces.get(asked)
        if found is None:
            if len(self._pieces) >= MOST_PIECES:
                self._pieces.clear()
            with torch.inference_mode(False), without_modes():  # they outlive this call
                found = self._pieces[asked] = tuple(self._cut(extent.offset, begin, end))
        return found

    def _cut(self, offset: int, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        while begin < end:
            block, inside = divmod(offset + begin, self._block_bytes)
            n = min(end - begin, self._block_bytes - inside)
            yield begin, self._blocks[block][inside : inside + n]
            begin += n

    def compact(self, extents: Sequence[Extent]) -> list[Extent] | None:
        """As `Compacting.compact`."""
        with self._lock:
            used = sum(extent.nbytes for extent in extents)
            if used != self._extents.used_bytes:
                return None
            self._make_blocks(0, used)
            made, end = list(extents), 0
            for at in sorted(range(len(made)), key=lambda at: made[at].offset):
                old = made[at]
                made[at] = Extent(old.file, end, old.nbytes, old.name)
                self._shift(old.offset, end, old.nbytes)
                end += old.nbytes
            self._extents = RangeAllocator(self.alignment, self._extents.capacity)
            taken = self._extents.take_at(0, end)
            assert taken, "nothing lies there yet"
            return made

    def _shift(self, begin: int, to: int, nbytes: int) -> None:
        """Move bytes from `begin` to a lower address, the lowest first, so that none is overwritten
        before it moved."""
        unit = self._block_bytes
        while nbytes and begin != to:
            n = min(nbytes, unit - begin % unit, unit - to % unit)
            source, target = self._blocks[begin // unit], self._blocks[to // unit]
            copy_bytes(target[to % unit :], source[begin % unit :], n)
            begin, to, nbytes = begin + n, to + n, nbytes - n

    def read(self, extent: Extent, begin: int, into: Buffer) -> Promise:
        for at, memory in self.pieces(extent, begin, begin + into.nbytes):
            copy_bytes(into.memory[at - begin :], memory, memory.numel())
        return _finished_promise()

    def write(self, extent: Extent, begin: int, source: Buffer) -> Promise:
        for at, memory in self.pieces(extent, begin, begin + source.nbytes):
            copy_bytes(memory, source.memory[at - begin :], memory.numel())
        return _finished_promise()

    def file_ranges(self, extent: Extent, begin: int, end: int) -> Sequence[FileRange]:
        return ()

    def usage(self) -> tuple[str, int, int]:
        return self.name, self._extents.used_bytes, self._extents.capacity

    def close(self) -> None:
        self._blocks.clear()
        self._pieces.clear()


def _finished_promise() -> Promise:
    promise = Promise()
    promise.finish()
    return promise
