"""`Tiers` decides where a new entry will rest: on the host while there is room, else on disk.

Where there is a disk, room on the host is kept for gradients: a gradient that rests there is
neither written to disk nor read back, and it comes anew in every step. Once a whole step has been
planned, a gradient goes where that plan wants it.
"""

from collections.abc import Callable, Mapping, Sequence

from zcompile.errors import TierFull
from zcompile.ir.types import SMALL_BYTES, EntryKind, EntryRef
from zcompile.ir.units import show_size
from zcompile.runtime.meter import Gauge, Meter
from zcompile.runtime.tiers.base import Compacting, Extent, Place, TierIO
from zcompile.runtime.tiers.device import DeviceTier, HeldTier
from zcompile.runtime.transfer.ticket import Promise

STATES = 2
"""Of a weight, that an optimizer is taken to keep where none was seen yet."""


class Tiers:
    """The tiers of a store, host first. Called by one thread at a time.

    wait_for_dead  waits until the extents of a tier are back that entries had which are dead, but
                   on which transfers are in flight; returns whether there were any
    """

    def __init__(
        self,
        tiers: Sequence[TierIO],
        device: DeviceTier,
        meter: Meter,
        wait_for_dead: Callable[[TierIO], bool],
    ) -> None:
        self._tiers = tiers
        self._wait_for_dead = wait_for_dead
        self.device, self.held = device, HeldTier()
        self._meter = meter
        self._wanted: Mapping[EntryRef, str] = {}
        self._weight_bytes = self._kept_bytes = self._gradient_bytes = 0
        self._host_bytes = 0
        self._grows = False
        self.result_bytes = 0
        """Of results of list ops, which the plan lets rest on the device in an optimizer's step."""

    def foresee(self, weights: int, trained: int, more_to_come: bool = False) -> None:
        """Count so many bytes of parameters more, of which so many get gradients: for those room is
        kept on the host, as far as there is a disk for the rest."""
        self._weight_bytes += weights
        self._kept_bytes += trained
        self._grows = more_to_come

    def want(self, homes: Mapping[EntryRef, str]) -> None:
        """Let gradients, and copies of parameters, in low precision or of the shares of all ranks,
        rest on these tiers from here on, as far as there is room."""
        self._wanted = {r: home for r, home in homes.items() if r.is_gradient or r.is_copy}

    def reserve(
        self,
        name: str,
        kind: EntryKind,
        nbytes: int,
        ref: EntryRef | None = None,
        tier: str | None = None,
    ) -> Place:
        """`ref`: which gradient or copy it is, if it is one; `tier`: where it would best rest.

        raises  TierFull
        """
        if ref is not None and self.device.has_reserved(ref, nbytes):
            return Place(nbytes, self.device, self.device.take_reserved(ref))
        if kind is EntryKind.RESULT and (spare := self.device.spare(nbytes, name)) is not None:
            return Place(nbytes, self.device, spare)
        wanted = tier if ref is None else self._wanted.get(ref)
        for home in sorted(self._order(kind, nbytes), key=lambda home: home.name != wanted):
            try:
                extent = self._take(home, nbytes, name)
            except TierFull:
                continue
            self._account(home, kind, extent, 1)
            return Place(nbytes, home, extent)
        raise TierFull(
            name, nbytes, [tier.usage() for tier in self._tiers], whole=self._whole_model()
        )

    def _whole_model(self) -> str:
        """What the model needs of these tiers, and what there is, in a sentence; "" before it is
        known."""
        weights, trained = self._weight_bytes, self._kept_bytes
        if not weights:
            return ""
        what = "what was made of the model so far" if self._grows else "the whole model"
        there = sum(capacity for _, _, capacity in (tier.usage() for tier in self._tiers))
        return (
            f"{what} needs {show_size(weights + (1 + STATES) * trained)} there, of "
            f"{show_size(there)}: weights {show_size(weights)}, gradients {show_size(trained)}, "
            f"states {show_size(STATES * trained)} (of an optimizer that keeps {STATES} of each "
            f"weight, as AdamW does); the {show_size(self.device.usage()[2])} of the device take "
            "none of it before a step is planned"
        )

    def expect_results(self, nbytes: int) -> None:
        """Let so many bytes of results of list ops rest on the device while an optimizer goes on,
        from here on."""
        self.result_bytes = nbytes

    def plan_device(self, nbytes: int) -> None:
        """Note that a schedule will take so much of the arena at once, beside what rests there."""
        self._meter.plan_device(nbytes + self.device.planned_bytes)

    def plan_together(self, nbytes: int) -> None:
        """Note how much of the arena and of values outside it is used at once, beside what rests
        there."""
        self._meter.planned_together.at_least(nbytes + self.device.planned_bytes)

    def capacities(self) -> dict[str, int]:
        """Bytes of each tier but the device."""
        return {tier.name: tier.usage()[2] for tier in self._tiers}

    def free(self) -> dict[str, int]:
        """Free bytes of each tier but the device."""
        rows = (tier.usage() for tier in self._tiers)
        return {name: capacity - used for name, used, capacity in rows}

    def left(self, place: Place, kind: EntryKind) -> None:
        """The entry that has `place` is dead.

        It makes room at once for what is decided; what the host has still to compute with it holds
        its bytes until then, and they are counted so.
        """
        if not place.tier.on_device:  # where the host computes nothing, and nothing is counted here
            self._account(place.tier, kind, place.extent, -1, place.host_uses_over())

    def move(self, place: Place, ref: EntryRef, kind: EntryKind, home: str) -> TierIO | None:
        """Let `place`, of the entry `ref`, be on the tier `home` from here on, blank.

        Returns its old tier, or None if `home` has no room. The old extent is for the caller to
        release.
        """
        old, before = place.tier, place.extent
        tiers = {tier.name: tier for tier in self._tiers}
        if home == "device":
            if not self.device.has_reserved(ref, place.nbytes):
                return None
            place.rest(self.device, self.device.take_reserved(ref))
        else:
            try:
                extent = self._take(tiers[home], place.nbytes, place.name)
            except (KeyError, TierFull):
                return None
            place.rest(tiers[home], extent)
            self._account(place.tier, kind, extent, 1)
        self._account(old, kind, before, -1)
        return old

    def compact(self, places: Sequence[Place]) -> bool:
        """Move what rests on the host together, so that what is free there is one hole.

        places   all entries', and nothing is in flight
        returns  False, if the host has others' too
        """
        host = self._tiers[0]
        mine = [place for place in places if place.tier is host]
        made = host.compact([p.extent for p in mine]) if isinstance(host, Compacting) else None
        if made is None:
            return False
        for place, extent in zip(mine, made, strict=True):
            place.rest(host, extent)
        return True

    def _take(self, tier: TierIO, nbytes: int, name: str) -> Extent:
        """An extent of a tier, as `TierIO.reserve`: dead entries on which transfers are in flight
        take no room from it, it is waited for.

        raises  TierFull, if there is no room without them either
        """
        while True:
            try:
                return tier.reserve(nbytes, name)
            except TierFull:
                if not self._wait_for_dead(tier):
                    raise

    def _order(self, kind: EntryKind, nbytes: int) -> Sequence[TierIO]:
        """The tiers in the order in which an entry is offered to them."""
        host, *others = self._tiers
        capacity = host.usage()[2]
        kept = max(0, self._kept_bytes - self._gradient_bytes)
        # What is dead does not count: how long it is in flight yet is luck.
        needed = self._host_bytes + nbytes + kept
        if kind is EntryKind.GRAD or nbytes <= SMALL_BYTES or needed <= capacity:
            return self._tiers
        return (*others, host)

    def _account(
        self,
        tier: TierIO,
        kind: EntryKind,
        extent: Extent,
        sign: int,
        since: Promise | None = None,
    ) -> None:
        """Count an extent that was reserved (sign 1) or released (-1).

        since  its bytes count as used until then; None: it is so now
        """
        if tier.on_device:
            return
        on_host = tier.name == "host"
        planned: Gauge = self._meter.planned_host if on_host else self._meter.planned_disk
        if since is None:
            planned.change(sign * extent.nbytes)
        else:
            since.then(lambda _: planned.change(sign * extent.nbytes))
        self._host_bytes += sign * extent.nbytes * on_host
        if on_host and kind is EntryKind.GRAD:
            self._gradient_bytes += sign * extent.nbytes
