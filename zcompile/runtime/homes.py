"""Where a new entry will rest: on the host while there is room, else on disk.

Where there is a disk, room on the host is kept for gradients: a gradient that rests there is
neither written to disk nor read back, and it comes anew in every step.
"""

from collections.abc import Sequence

from zcompile.errors import TierFull
from zcompile.runtime.meter import Gauge, Meter
from zcompile.runtime.place import Place
from zcompile.runtime.tiers import Extent, TierIO
from zcompile.specs import Kind
from zcompile.units import KiB

SMALL_BYTES = 64 * KiB
"""Entries up to this rest on the host even in room that is kept for gradients: a request to a disk
costs as much as the bytes of one that is much larger."""


class Homes:
    """The tiers of a store, host first. Called by one thread at a time."""

    def __init__(self, tiers: Sequence[TierIO], meter: Meter) -> None:
        self._tiers = tiers
        self._meter = meter
        self._kept_bytes = self._gradient_bytes = 0

    def keep_for_gradients(self, nbytes: int) -> None:
        """So many bytes more of the host are for gradients, as far as there is a disk instead."""
        self._kept_bytes += nbytes

    def reserve(self, name: str, kind: Kind, nbytes: int) -> Place:
        """raises  TierFull"""
        for tier in self._order(kind, nbytes):
            try:
                extent = tier.reserve(nbytes, name)
            except TierFull:
                continue
            self._account(tier, kind, extent, 1)
            return Place(nbytes, tier, extent)
        raise TierFull(name, nbytes, [tier.usage() for tier in self._tiers])

    def left(self, place: Place, kind: Kind) -> None:
        """The entry that `reserve` gave `place` to is dead."""
        self._account(place.tier, kind, place.extent, -1)

    def _order(self, kind: Kind, nbytes: int) -> Sequence[TierIO]:
        """The tiers in the order in which an entry is offered to them."""
        host, *others = self._tiers
        _, used, capacity = host.usage()
        kept = max(0, self._kept_bytes - self._gradient_bytes)
        if kind is Kind.GRAD or nbytes <= SMALL_BYTES or used + nbytes + kept <= capacity:
            return self._tiers
        return (*others, host)

    def _account(self, tier: TierIO, kind: Kind, extent: Extent, sign: int) -> None:
        on_host = tier.name == "host"
        planned: Gauge = self._meter.planned_host if on_host else self._meter.planned_disk
        planned.change(sign * extent.nbytes)
        if on_host and kind is Kind.GRAD:
            self._gradient_bytes += sign * extent.nbytes
