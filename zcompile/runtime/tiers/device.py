"""The device tiers keep entries in the device's own memory, where compute itself moves their bytes.

`DeviceTier` keeps entries in the arena, at addresses that a placement has reserved. A *reserved
address* is a range of the arena that one entry will have. It counts as used from its planning on,
whether or not its entry exists: a gradient comes anew in every step and finds its address free.
Temporaries of a step may rest in *spare* room, between the streaming buffer and the reserved
addresses.

`HeldTier` keeps gradients that stay in the memory that compute made them in, outside the arena.
Nothing is reserved for them: their memory is free once they die.
"""

from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor

from zcompile.errors import TierFull
from zcompile.ir.types import ALIGNMENT, HELD, EntryRef, Layout, aligned, flat_layout
from zcompile.runtime.device.arena import Arena
from zcompile.runtime.tiers.base import Buffer, Extent, FileRange
from zcompile.runtime.transfer.ticket import Promise


class OnDeviceTier:
    """A tier whose entries compute uses where they rest: nothing reads or writes them for
    compute."""

    alignment = ALIGNMENT
    granule = 1
    in_memory = True
    on_device = True

    def read(self, extent: Extent, begin: int, into: Buffer) -> Promise:
        raise AssertionError("entries on the device are moved by compute itself")

    def write(self, extent: Extent, begin: int, source: Buffer) -> Promise:
        raise AssertionError("entries on the device are moved by compute itself")

    def file_ranges(self, extent: Extent, begin: int, end: int) -> Sequence[FileRange]:
        return ()


class DeviceTier(OnDeviceTier):
    """Entries at reserved addresses of one arena.

    window_bytes  of the arena, from its bottom, that stay free for streaming
    """

    name = "device"
    in_arena = True

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._reserved: dict[EntryRef, Extent] = {}
        self.planned_bytes = 0
        """Bytes of all reserved addresses."""
        self._occupied: set[int] = set()
        self._spare: set[int] = set()
        self.window_bytes = arena.budget_bytes
        self._floor = arena.budget_bytes

    @property
    def streamed_bytes(self) -> int:
        """Bytes of the arena, from its bottom, for what streams through: nothing else lies
        there."""
        return min(self.window_bytes, self._floor)

    def plan(self, ref: EntryRef, name: str, nbytes: int) -> bool:
        """Reserve an address for an entry, above the streaming buffer; False if there is no room
        for it.

        An entry that has one, large enough and above the buffer, keeps it.
        """
        size = aligned(nbytes)
        old = self._reserved.get(ref)
        if old is not None and old.nbytes >= size and old.offset >= self.window_bytes:
            return True
        if old is not None:
            return False  # an entry occupies it, else it were cleared
        begin = self._arena.reserve(size, self.window_bytes, name)
        if begin is None:
            return False
        self._reserved[ref] = Extent(0, begin, size, name)
        self.planned_bytes += size
        self._floor = min(self._floor, begin)
        return True

    def open_window(self, nbytes: int) -> None:
        """Leave so much of the arena free for streaming from here on."""
        self.window_bytes = nbytes

    def resized(self) -> None:
        """The arena has another size; nothing rests here."""
        self.window_bytes = self._floor = self._arena.budget_bytes

    def clear(self) -> None:
        """Give back the reserved addresses that no entry occupies."""
        for ref, extent in list(self._reserved.items()):
            if extent.offset not in self._occupied:
                self._arena.unreserve(self._reserved.pop(ref).offset)
                self.planned_bytes -= extent.nbytes
        left = (extent.offset for extent in self._reserved.values())
        self._floor = min(left, default=self._arena.budget_bytes)

    def has_reserved(self, ref: EntryRef, nbytes: int) -> bool:
        """Whether an entry has a reserved address of its size that nothing occupies."""
        extent = self._reserved.get(ref)
        return (
            extent is not None and nbytes <= extent.nbytes and extent.offset not in self._occupied
        )

    def reserved_memory(self, ref: EntryRef, nbytes: int) -> Tensor | None:
        """The memory at the address that `has_reserved` tells of: uint8 [nbytes]; else None."""
        if not self.has_reserved(ref, nbytes):
            return None
        return self._arena.slot(self._reserved[ref].offset, nbytes)

    def take_reserved(self, ref: EntryRef) -> Extent:
        """Occupy the address reserved for an entry."""
        extent = self._reserved[ref]
        assert extent.offset not in self._occupied, (
            f"two entries at the reserved address of {extent.name!r}"
        )
        self._occupied.add(extent.offset)
        return extent

    def is_reserved_for(self, ref: EntryRef, extent: Extent) -> bool:
        """Whether `extent` is the address reserved for an entry."""
        own = self._reserved.get(ref)
        return own is not None and own.offset == extent.offset

    def spare(self, nbytes: int, name: str) -> Extent | None:
        """Room between streaming buffer and reserved addresses for a temporary of a step, if there
        is any."""
        if not self._reserved:
            return None
        size = aligned(nbytes)
        begin = self._arena.reserve(size, self.window_bytes, name)
        if begin is None:
            return None
        self._spare.add(begin)
        return Extent(0, begin, size, name)

    def reserve(self, nbytes: int, name: str) -> Extent:
        """There is room only for what was planned. raises TierFull"""
        raise TierFull(name, nbytes, [self.usage()])

    def release(self, extent: Extent) -> None:
        if extent.offset in self._spare:
            self._spare.discard(extent.offset)
            self._arena.unreserve(extent.offset)
        self._occupied.discard(extent.offset)

    def view(self, extent: Extent, begin: int, layout: Layout) -> Tensor:
        """A tensor over the bytes from `begin` on: the same object each time."""
        return self._arena.view(extent.offset + begin, layout)

    def pieces(self, extent: Extent, begin: int, end: int) -> Sequence[tuple[int, Tensor]]:
        return ((begin, self._arena.slot(extent.offset + begin, end - begin)),)

    def usage(self) -> tuple[str, int, int]:
        return self.name, self.planned_bytes, self._arena.budget_bytes

    def close(self) -> None:
        self._reserved.clear()
        self.planned_bytes = 0
        self._occupied.clear()
        self._spare.clear()


class HeldTier(OnDeviceTier):
    """Entries in memory that compute made, outside the arena."""

    name = HELD
    in_arena = False

    def __init__(self) -> None:
        self._values: dict[int, tuple[Tensor, Layout]] = {}
        """What rests here: [numel], in the dtype that it was made in, and how it lies."""
        self._numbers = count()

    def take(self, value: Tensor, name: str) -> Extent:
        """Let `value` stay: 1-D, contiguous, and a storage of its own."""
        number = next(self._numbers)
        self._values[number] = value, flat_layout(value.numel(), value.dtype)
        return Extent(number, 0, value.nbytes, name)

    def view(self, extent: Extent, begin: int, layout: Layout) -> Tensor:
        """A tensor over the bytes from `begin` on; if that is all of them as they were made, the
        same object each time."""
        value, own = self._values[extent.file]
        if not begin and (layout is own or layout == own):
            return value
        return layout.view(value.view(torch.uint8)[begin : begin + layout.end_bytes])

    def pieces(self, extent: Extent, begin: int, end: int) -> Sequence[tuple[int, Tensor]]:
        return ((begin, self._values[extent.file][0].view(torch.uint8)[begin:end]),)

    def reserve(self, nbytes: int, name: str) -> Extent:
        """Entries here were made here. raises  TierFull"""
        raise TierFull(name, nbytes, [self.usage()])

    def release(self, extent: Extent) -> None:
        del self._values[extent.file]

    def usage(self) -> tuple[str, int, int]:
        used = sum(value.nbytes for value, _ in self._values.values())
        return self.name, used, used

    def close(self) -> None:
        self._values.clear()
