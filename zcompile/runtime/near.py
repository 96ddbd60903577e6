"""Entries that rest on the device: compute itself moves their bytes, in its own order.

No transfer, no link, no thread: what was submitted before is over when compute gets there, and what
comes after is behind it. The tickets say "compute has come this far".
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from zcompile.runtime.pages import copy_bytes
from zcompile.runtime.store import Entry, Store
from zcompile.runtime.ticket import Ready, Ticket
from zcompile.runtime.tiers import Extent
from zcompile.schedule import Borrow, Schedule
from zcompile.specs import Layout

MOST_KNOWN = 4096
"""Schedules whose borrowed tensors are kept; the oldest are those of plans that were given up."""


def is_near(entry: Entry) -> bool:
    return entry.place.tier.on_device


def fetch(
    store: Store, entry: Entry, target: Tensor, begin: int, after: Sequence[Ticket]
) -> Ticket:
    """As `Store.fetch`, from the device to itself."""
    for ticket in after:
        ticket.join_compute()
    _copy(target, store.borrow(entry, begin, target.numel(), False))
    return store.device.mark()


def put(store: Store, entry: Entry, source: Tensor, begin: int, after: Sequence[Ticket]) -> Ticket:
    """As `Store.put`, to the device; `source` may lie on the host."""
    for ticket in after:
        ticket.join_compute()
    if source.numel() == entry.nbytes:
        entry.deferred = ()
        entry.unset = False
    _copy(store.borrow(entry, begin, source.numel(), True, overwrites=True), source)
    return store.device.mark()


def lend(store: Store, entry: Entry, begin: int, layout: Layout, writes: bool) -> Tensor:
    """As `Store.borrow`, a tensor of `layout` to read and write, and not to hand to others: of what
    rests on the device it may be the same object each time. For who has called `store.enter`."""
    place, end = entry.place, begin + layout.end_bytes
    ready = place.tier.on_device and not entry.unset and not entry.deferred
    if ready and store._mover.is_still(place, begin, end):
        entry.version += int(writes)
        return store.arena.view(place.extent.offset + begin, layout)
    return layout.view(store.borrow(entry, begin, layout.end_bytes, writes))


def look_up(store: Store, schedule: Schedule, entries: Sequence[Entry]) -> "Lent":
    """What a call may borrow, of all its entries in one go. As long as they rest where they did,
    the next call of a schedule borrows the same tensors. For who has called `store.enter`.

    raises  what an earlier transfer of one of them failed with
    """
    still = store._mover.all_still(entry.place for entry in entries)
    extents = [
        e.place.extent if yes and is_near(e) and not (e.unset or e.deferred) else None
        for e, yes in zip(entries, still, strict=True)
    ]
    borrowed = store.arena.borrowed
    known = borrowed.get(schedule.serial)
    if known is None or known[0] != extents:
        if known is None and len(borrowed) >= MOST_KNOWN:
            del borrowed[next(iter(borrowed))]
        known = borrowed[schedule.serial] = extents, {}
    return Lent(store, entries, extents, known[1])


@dataclass(frozen=True)
class Lent:
    """What one call borrows.

    extents  of each entry that rests on the device with a value, and that nothing moves; else None
    views    id of an instruction, which lives as long as its schedule -> what it borrowed last
    """

    store: Store
    entries: Sequence[Entry]
    extents: Sequence[Extent | None]
    views: dict[int, Tensor]

    def lend(self, borrow: Borrow) -> Tensor:
        """A tensor, as `lend` gives it."""
        entry, extent = self.entries[borrow.entry], self.extents[borrow.entry]
        if extent is None or entry.place.extent is not extent:
            return lend(self.store, entry, borrow.begin, borrow.layout, borrow.writes)
        known = id(borrow)
        view = self.views.get(known)
        if view is None:
            view = self.store.arena.view(extent.offset + borrow.begin, borrow.layout)
            self.views[known] = view
        entry.version += borrow.writes
        return view


def add(store: Store, entry: Entry, source: Tensor, begin: int, after: Sequence[Ticket]) -> Ticket:
    """As `Store.add`: `Tensor.add_` on the device."""
    for ticket in after:
        ticket.join_compute()
    memory = store.borrow(entry, begin, source.nbytes, True)
    memory.view(source.dtype).add_(source.to(memory.device))
    return store.device.mark()


def read(store: Store, entry: Entry, target: Tensor, begin: int) -> Ticket:
    """As `Store.read`: blocks until compute has come this far."""
    _copy(target, store.borrow(entry, begin, target.numel(), False))
    return Ready()


def _copy(target: Tensor, source: Tensor) -> None:
    """uint8 [n], contiguous, both. Between host memories by one thread: while the threads of links
    are busy, a team of OpenMP's takes milliseconds to come together, for what lasts some tens of
    microseconds."""
    if target.is_cpu and source.is_cpu:
        copy_bytes(target, source, source.numel())
    else:
        target.copy_(source)


def copy_dense(target: Tensor, source: Tensor) -> None:
    """Alike in dtype, size and strides, without gaps; in the order of compute. By one thread
    between host memories, as `_copy`."""
    if target.is_cpu and source.is_cpu:
        copy_bytes(target, source, source.nbytes)
    else:
        target.copy_(source)


__all__ = ["add", "copy_dense", "fetch", "is_near", "lend", "look_up", "put", "read"]
