"""An entry at home: where its bytes rest, which of them hold a value, and what is under way.

Operations on one entry take effect in the order of their submission. Two that touch the same
bytes, one of them writing, follow each other; all others run side by side.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from zcompile.runtime.tiers.extents import Written
from zcompile.runtime.tiers.tiers import Extent, TierIO
from zcompile.runtime.transfer.ticket import Promise


class Touching(Protocol):
    """What reads or writes bytes [begin, end) of an entry."""

    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def writes(self) -> bool: ...


class Operation(Touching, Protocol):
    """One fetch, put or add."""

    @property
    def home(self) -> Promise: ...


class Span(NamedTuple):
    """A use of the bytes that is no transfer."""

    begin: int
    end: int
    writes: bool


class Place:
    """Where an entry rests. Guarded by the lock of the `Mover`."""

    def __init__(self, nbytes: int, tier: TierIO, extent: Extent) -> None:
        self.nbytes = nbytes
        self.tier = tier
        self.extent = extent
        self.written = Written()
        self.error: BaseException | None = None
        self.freed = False
        self.under_way: list[Operation] = []

    @property
    def name(self) -> str:
        """Of the entry, for people; said once, where its bytes rest."""
        return self.extent.name

    @name.setter
    def name(self, name: str) -> None:
        self.extent = replace(self.extent, name=name)

    def blocks(self, begin: int, end: int) -> tuple[int, int]:
        """The whole blocks of the tier that hold [begin, end): what a transfer really touches."""
        unit = self.tier.granule
        return begin // unit * unit, -(-end // unit) * unit

    def blockers(self, new: Touching) -> Sequence[Operation]:
        """The operations that must be over before `new` may start, newest first."""
        low, high = self.blocks(new.begin, new.end)
        found = []
        for old in reversed(self.under_way):
            begin, end = self.blocks(old.begin, old.end)
            if begin < high and low < end and (old.writes or new.writes):
                found.append(old)
                if old.writes and begin <= low and high <= end:
                    break  # what is older on these bytes comes before `old`
        return found
