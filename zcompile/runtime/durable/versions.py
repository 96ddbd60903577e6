"""The versions of one durable entry: the committed one, and the one that is being made.

before the first commit     written in place
committed, unchanged        one extent, never written again
committed, changed          the fresh ranges lie in another extent, the rest where it was
next commit                 the rest is copied over; when the index is switched, the old extent
                            is free
"""

from dataclasses import dataclass, field

from zcompile.runtime.durable.checksums import Pieces
from zcompile.runtime.tiers.extents import Written
from zcompile.runtime.tiers.tiers import Extent


@dataclass
class Versions:
    """Where the bytes of an entry lie. Guarded by the lock of its tier.

    committed  the extent that the last index names; None before there was one
    working    the extent that is written; None while nothing was written since
    fresh      which ranges of the entry lie in `working`
    pieces     checksums of the entry as it is now, wherever its bytes lie
    step       at which it was last committed with other bytes than before
    """

    committed: Extent | None = None
    working: Extent | None = None
    fresh: Written = field(default_factory=Written)
    pieces: Pieces = field(default_factory=Pieces)
    step: int = 0

    @property
    def current(self) -> Extent:
        """Where all of it lies; only between `complete` and the next write."""
        extent = self.working or self.committed
        assert extent is not None, "an entry that lies nowhere"
        return extent

    def where(self, begin: int, end: int) -> list[tuple[int, int, Extent]]:
        """[begin, end) cut into (begin, end, the extent that holds it now)."""
        if self.working is None or self.committed is None:
            return [(begin, end, self.current)]
        return [(low, high, self.working if fresh else self.committed)
                for low, high, fresh in self.fresh.pieces(begin, end)]  # fmt: skip
