"""What the tiers of the device have in common: compute itself moves the bytes that rest there."""

from collections.abc import Sequence

from zcompile.ir.types import ALIGNMENT
from zcompile.runtime.tiers.tiers import Buffer, Extent, Stretch
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

    def stretches(self, extent: Extent, begin: int, end: int) -> Sequence[Stretch]:
        return ()
