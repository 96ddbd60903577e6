"""The device tier: entries rest in the arena, at addresses that a placement has planned.

A *berth* is a range of the arena that one entry will have. It counts as used from its planning on,
whether or not its entry exists: a gradient comes anew in every step and finds its berth free.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from zcompile.errors import TierFull
from zcompile.packing import ALIGNMENT, aligned
from zcompile.runtime.arena import Arena
from zcompile.runtime.ticket import Promise
from zcompile.runtime.tiers import Buffer, Extent, Stretch


class DeviceTier:
    """Berths of one arena. Bytes are moved by compute itself, so nothing here moves any."""

    name = "device"
    alignment = ALIGNMENT
    granule = 1
    in_memory = True
    on_device = True

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._berths: dict[int, Extent] = {}
        self._taken: set[int] = set()

    @property
    def planned_bytes(self) -> int:
        """Of all berths."""
        return sum(extent.nbytes for extent in self._berths.values())

    def plan(self, key: int, name: str, address: int, nbytes: int) -> None:
        """The entry `key` will have [address, address + nbytes) of the arena.

        raises  BudgetExceeded, if something lies there
        """
        size = aligned(nbytes)
        self._arena.hold(address, size, name)
        self._berths[key] = Extent(0, address, size, name)

    def clear(self) -> None:
        """Give back the berths that no entry is in."""
        for key, extent in list(self._berths.items()):
            if extent.offset not in self._taken:
                self._arena.let_go(self._berths.pop(key).offset)

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

    def reserve(self, nbytes: int, name: str) -> Extent:
        """There is room for what was planned only. raises TierFull"""
        raise TierFull(name, nbytes, [self.usage()])

    def release(self, extent: Extent) -> None:
        self._taken.discard(extent.offset)

    def pieces(self, extent: Extent, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        yield begin, self._arena.slot(extent.offset + begin, end - begin)

    def read(self, extent: Extent, begin: int, into: Buffer) -> Promise:
        raise AssertionError("what rests on the device is borrowed")

    def write(self, extent: Extent, begin: int, source: Buffer) -> Promise:
        raise AssertionError("what rests on the device is borrowed")

    def stretches(self, extent: Extent, begin: int, end: int) -> Sequence[Stretch]:
        return ()

    def usage(self) -> tuple[str, int, int]:
        return self.name, self.planned_bytes, self._arena.budget_bytes

    def close(self) -> None:
        self._berths.clear()
        self._taken.clear()
