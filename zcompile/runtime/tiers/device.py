"""The device tier: entries rest in the arena, at addresses that a placement has planned.

A *berth* is a range of the arena that one entry will have. It counts as used from its planning on,
whether or not its entry exists: a gradient comes anew in every step and finds its berth free.
What a step makes for itself may rest in room that is *spare*, between the window and the berths.

What the tiers of the device have in common: compute itself moves the bytes that rest there.

Gradients that stay in the memory that compute made them in, beside the arena.

Nothing is reserved for them: they lie where they were made, and their memory is free once they die.
"""

from collections.abc import Iterator, Sequence
from itertools import count

import torch
from torch import Tensor

from zcompile.errors import TierFull
from zcompile.ir.types import ALIGNMENT, HELD, Layout, aligned
from zcompile.runtime.device.arena import Arena
from zcompile.runtime.tiers.base import Buffer, Extent, FileRange
from zcompile.runtime.transfer.ticket import Promise


class NearTier:
    """Entries that are borrowed where they lie: nothing reads or writes them for compute."""

    alignment = ALIGNMENT
    granule = 1
    in_memory = True
    on_device = True

    def read(self, extent: Extent, begin: int, into: Buffer) -> Promise:
        raise AssertionError("what rests on the device is borrowed")

    def write(self, extent: Extent, begin: int, source: Buffer) -> Promise:
        raise AssertionError("what rests on the device is borrowed")

    def file_ranges(self, extent: Extent, begin: int, end: int) -> Sequence[FileRange]:
        return ()


class DeviceTier(NearTier):
    """Berths of one arena. Bytes are moved by compute itself, so nothing here moves any.

    window_bytes  of the arena, from its bottom, that stay free of berths and spare room
    """

    name = "device"

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._berths: dict[int, Extent] = {}
        self._taken: set[int] = set()
        self._spare: set[int] = set()
        self.window_bytes = arena.budget_bytes
        self._floor = arena.budget_bytes

    @property
    def planned_bytes(self) -> int:
        """Of all berths."""
        return sum(extent.nbytes for extent in self._berths.values())

    @property
    def streamed_bytes(self) -> int:
        """Of the arena, from its bottom, for what streams through: nothing else lies there."""
        return min(self.window_bytes, self._floor)

    def plan(self, key: int, name: str, nbytes: int) -> bool:
        """The entry `key` will have a berth, above the window; False if there is no room for it.

        One that has a berth large enough above the window keeps it.
        """
        size = aligned(nbytes)
        old = self._berths.get(key)
        if old is not None and old.nbytes >= size and old.offset >= self.window_bytes:
            return True
        if old is not None:
            return False  # somebody is in it, else it were cleared
        begin = self._arena.reserve(size, self.window_bytes, name)
        if begin is None:
            return False
        self._berths[key] = Extent(0, begin, size, name)
        self._floor = min(self._floor, begin)
        return True

    def resized(self) -> None:
        """The arena has another size; nothing rests here."""
        self.window_bytes = self._floor = self._arena.budget_bytes

    def clear(self) -> None:
        """Give back the berths that no entry is in."""
        for key, extent in list(self._berths.items()):
            if extent.offset not in self._taken:
                self._arena.unreserve(self._berths.pop(key).offset)
        left = (extent.offset for extent in self._berths.values())
        self._floor = min(left, default=self._arena.budget_bytes)

    def has_berth(self, key: int, nbytes: int) -> bool:
        """Whether entry `key` has a berth of its size that nothing is in."""
        extent = self._berths.get(key)
        return extent is not None and nbytes <= extent.nbytes and extent.offset not in self._taken

    def berth(self, key: int) -> Extent:
        """Take the berth planned for `key`."""
        extent = self._berths[key]
        assert extent.offset not in self._taken, f"two entries in the berth of {extent.name!r}"
        self._taken.add(extent.offset)
        return extent

    def is_berth(self, key: int, extent: Extent) -> bool:
        """Whether `extent` is the berth of `key`."""
        own = self._berths.get(key)
        return own is not None and own.offset == extent.offset

    def spare(self, nbytes: int, name: str) -> Extent | None:
        """Room between window and berths for what a step makes for itself, if there is any."""
        if not self._berths:
            return None
        size = aligned(nbytes)
        begin = self._arena.reserve(size, self.window_bytes, name)
        if begin is None:
            return None
        self._spare.add(begin)
        return Extent(0, begin, size, name)

    def reserve(self, nbytes: int, name: str) -> Extent:
        """There is room for what was planned only. raises TierFull"""
        raise TierFull(name, nbytes, [self.usage()])

    def release(self, extent: Extent) -> None:
        if extent.offset in self._spare:
            self._spare.discard(extent.offset)
            self._arena.unreserve(extent.offset)
        self._taken.discard(extent.offset)

    def view(self, extent: Extent, begin: int, layout: Layout) -> Tensor:
        """A tensor over the bytes from `begin` on: the same object each time."""
        return self._arena.view(extent.offset + begin, layout)

    def pieces(self, extent: Extent, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        yield begin, self._arena.slot(extent.offset + begin, end - begin)

    def usage(self) -> tuple[str, int, int]:
        return self.name, self.planned_bytes, self._arena.budget_bytes

    def close(self) -> None:
        self._berths.clear()
        self._taken.clear()
        self._spare.clear()


class HeldTier(NearTier):
    """Tensors of the device, by the entries that they are. Compute alone moves their bytes."""

    name = HELD

    def __init__(self) -> None:
        self._bytes: dict[int, Tensor] = {}
        self._numbers = count()

    def take(self, value: Tensor, name: str) -> Extent:
        """Here `value` stays: 1-D, contiguous, and a storage of its own."""
        number = next(self._numbers)
        self._bytes[number] = value.view(torch.uint8)
        return Extent(number, 0, value.nbytes, name)

    def view(self, extent: Extent, begin: int, layout: Layout) -> Tensor:
        """A tensor over the bytes from `begin` on."""
        return layout.view(self._bytes[extent.file][begin : begin + layout.end_bytes])

    def pieces(self, extent: Extent, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        yield begin, self._bytes[extent.file][begin:end]

    def reserve(self, nbytes: int, name: str) -> Extent:
        """What is here was made here. raises  TierFull"""
        raise TierFull(name, nbytes, [self.usage()])

    def release(self, extent: Extent) -> None:
        del self._bytes[extent.file]

    def usage(self) -> tuple[str, int, int]:
        used = sum(value.numel() for value in self._bytes.values())
        return self.name, used, used

    def close(self) -> None:
        self._bytes.clear()
