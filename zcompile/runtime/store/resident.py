"""Entries that rest on the device are moved by compute itself, in its own order.

No transfer, no link, no thread: what was submitted before is over when compute gets there, and what
comes after is behind it. The tickets say "compute has come this far".

Low-precision copies of parameters are entries of their own, made by the same cast. A schedule that
fetches a copy finds it up to date: a copy notes the version of the entry it was cast from, and is
cast again before a call if that has been written since. An optimizer's step that writes the entry
writes the copy as well, so in a training loop no copy is ever made again.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol, cast

from torch import Tensor

from zcompile.ir.schedule import Borrow, Cast, CopyRead, Fetch, Schedule
from zcompile.ir.types import Layout
from zcompile.runtime.changes import CHANGES
from zcompile.runtime.device.pages import copy_bytes
from zcompile.runtime.store.sources import check_sources
from zcompile.runtime.store.store import NEVER, Entry, Store, all_written, call_key, others_than
from zcompile.runtime.tiers.base import Extent
from zcompile.runtime.transfer.ticket import Ready, Ticket


class OnDevice(Protocol):
    """A tier whose entries compute reads and writes where they rest.

    in_arena  in memory that stays there, whatever becomes of the entry
    """

    in_arena: bool

    def view(self, extent: Extent, begin: int, layout: Layout) -> Tensor:
        """A tensor over the bytes of an entry from `begin` on, not to be handed to others."""


# --- Views in place ---

_IN_THE_WAY = attrgetter("_unset", "_deferred", "_sources", "_waits", "_narrow", "_unexchanged")
NOTHING = False, (), (), None, None, False
"""What `_IN_THE_WAY` tells of an entry whose bytes may be used as they are."""

MOST_KEPT = 1024
"""The most calls of which is kept what they were lent; a step has a few."""


@dataclass(frozen=True)
class KeptViews:
    """What a call was lent, for the next call of the same schedule with the same entries that
    outlive steps; true as long as `CHANGES` has the same mark.

    entries  of the call; None in the place of those that do not last, or are not lent
    extents  where those rest
    views    of the borrows that open the schedule; None where entries are None
    looked   which of those are None
    writes   the entries that the others write, once for each borrow
    """

    mark: object
    entries: Sequence[Entry | None]
    extents: Sequence[Extent | None]
    views: Sequence[Tensor | None]
    looked: Sequence[int]
    writes: Sequence[Entry]


def resident_views(
    store: Store, entries: Sequence[Entry], of: int | None = None
) -> "ResidentViews":
    """The entries of one call that compute may use where they rest. The caller has called
    `store.enter`.

    of      serial of the schedule that is called; None: nothing is kept for its next call
    raises  what an earlier transfer of one of them failed with
    """
    mark, kept = CHANGES.mark, None if of is None else store.arena.lent.get(call_key(of, entries))
    if kept is None or kept.mark is not mark:
        return ResidentViews(store, entries, _extents_of(store, entries), mark)
    others = others_than(kept.entries, entries)
    if others is None:
        return ResidentViews(store, entries, _extents_of(store, entries), mark)
    extents = [*kept.extents]
    for at, extent in zip(others, _extents_of(store, [entries[n] for n in others]), strict=True):
        extents[at] = extent
    return ResidentViews(store, entries, extents, mark, kept)


def _extents_of(store: Store, entries: Sequence[Entry]) -> list[Extent | None]:
    """Where each entry rests on the device with a value, and nothing moves it; else None.

    raises  as `resident_views`
    """
    places = [entry._place for entry in entries]
    ready, waits = store._mover.are_ready(places), map(_IN_THE_WAY, entries)
    return [
        place.extent if is_ready and place.tier.on_device and found == NOTHING else None
        for place, is_ready, found in zip(places, ready, waits, strict=True)
    ]


@dataclass(frozen=True)
class ResidentViews:
    """Gives one call tensors over entries where they rest.

    extents  of each entry that rests on the device with a value, and that nothing moves; else None
    mark     of `CHANGES`, before that was looked at
    kept     what the last call was lent, if that is what this one is lent
    """

    store: Store
    entries: Sequence[Entry]
    extents: Sequence[Extent | None]
    mark: object = field(default_factory=object)
    kept: KeptViews | None = None

    def view(self, borrow: Borrow) -> Tensor:
        """A tensor to read and write, and not to hand to others, as `Store.view_in_place`.

        Of what rests in the arena it is the same object each time.
        """
        entry, extent, begin = self.entries[borrow.entry], self.extents[borrow.entry], borrow.begin
        if extent is None or entry.place.extent is not extent:
            nbytes = borrow.layout.end_bytes
            return borrow.layout.view(self.store.view_in_place(entry, begin, nbytes, borrow.writes))
        if borrow.writes:
            entry.written()
        return cast(OnDevice, entry.place.tier).view(extent, begin, borrow.layout)

    def views(self, borrows: Sequence[Borrow], of: int) -> list[Tensor]:
        """`view` of each: of a planned step one after the other are hundreds.

        What rests in the arena where it did is viewed as before: an entry that was moved has
        another extent.

        of  serial of the schedule that borrows them, which gives the views to each of its calls
        """
        if self.kept is not None and len(self.kept.views) == len(borrows):
            return self._as_before(self.kept, borrows, of)
        found = self._viewed(borrows, of)
        if borrows:
            self._keep(borrows, found, of)
        return found

    def _as_before(self, kept: KeptViews, borrows: Sequence[Borrow], of: int) -> list[Tensor]:
        """The views that the last call was lent, and of what does not last, those of where that
        rests."""
        found: list[Any] = [*kept.views]
        entries, extents = self.entries, self.extents
        last = self.store.arena.views_of(of, len(borrows))
        others, again = list[int](), list[Entry]()
        for at in kept.looked:
            borrow, known = borrows[at], last[at]
            extent = extents[borrow.entry]
            if known is None or known[0] is not borrow or known[1] is not extent:
                others.append(at)
                continue
            found[at] = known[2]
            if borrow.writes:
                again.append(entries[borrow.entry])
        self._look(others, borrows, of, found)
        if CHANGES.mark is not kept.mark:  # a view had something else settled, or moved
            anew = {*others}
            return [found[at] if at in anew else self.view(x) for at, x in enumerate(borrows)]
        all_written(kept.writes)
        all_written(again)
        return found

    def _keep(self, borrows: Sequence[Borrow], views: Sequence[Tensor], of: int) -> None:
        """Keep what this call is lent of entries that last, in the arena, for the next one."""
        entries = [
            entry if extent is not None and entry.kind.lasting and _in_arena(entry) else None
            for entry, extent in zip(self.entries, self.extents, strict=True)
        ]
        lasting = [entries[borrow.entry] for borrow in borrows]
        if not any(lasting):
            return
        lent = self.store.arena.lent
        if len(lent) >= MOST_KEPT:
            lent.clear()
        lent[call_key(of, self.entries)] = KeptViews(
            self.mark,
            entries,
            [None if e is None else x for e, x in zip(entries, self.extents, strict=True)],
            [None if e is None else view for e, view in zip(lasting, views, strict=True)],
            [at for at, entry in enumerate(lasting) if entry is None],
            [
                e
                for e, borrow in zip(lasting, borrows, strict=True)
                if e is not None and borrow.writes
            ],
        )

    def _viewed(self, borrows: Sequence[Borrow], of: int) -> list[Tensor]:
        """`view` of each, of which those in the arena are as before where they rest as before."""
        found: list[Any] = [None] * len(borrows)
        self._look(range(len(borrows)), borrows, of, found)
        return found

    def _look(
        self, where: Iterable[int], borrows: Sequence[Borrow], of: int, found: list[Any]
    ) -> None:
        """Put the views of some borrows into `found`."""
        entries, extents = self.entries, self.extents
        kept = self.store.arena.views_of(of, len(borrows))
        for at in where:
            borrow = borrows[at]
            entry = entries[borrow.entry]
            extent, place = extents[borrow.entry], entry.place
            if extent is None or place.extent is not extent:
                found[at] = self.view(borrow)
                continue
            if borrow.writes:
                entry.written()
            last = kept[at]
            if last is not None and last[0] is borrow and last[1] is extent:
                found[at] = last[2]
                continue
            tier = cast(OnDevice, place.tier)
            view = found[at] = tier.view(extent, borrow.begin, borrow.layout)
            if tier.in_arena:
                kept[at] = borrow, extent, view


def _in_arena(entry: Entry) -> bool:
    """Whether an entry on the device rests in memory that stays there, whatever becomes of it."""
    return cast(OnDevice, entry.place.tier).in_arena


# --- Copies on the device ---


def fetch(
    store: Store, entry: Entry, target: Tensor, begin: int, after: Sequence[Ticket], ahead: bool
) -> Ticket:
    """As `Store.fetch`, from the device to itself."""
    for ticket in after:
        ticket.join_compute()
    copy_dense(target, store.view_in_place(entry, begin, target.numel(), False, ahead=ahead))
    return store.device.mark()


def put(store: Store, entry: Entry, source: Tensor, begin: int, after: Sequence[Ticket]) -> Ticket:
    """As `Store.put`, to the device; `source` may lie on the host."""
    entry.settle()
    for ticket in after:
        ticket.join_compute()
    if source.numel() == entry.nbytes:
        entry.overwritten()
    copy_dense(store.view_in_place(entry, begin, source.numel(), True, overwrites=True), source)
    return store.device.mark()


def add(store: Store, entry: Entry, source: Tensor, begin: int, after: Sequence[Ticket]) -> Ticket:
    """As `Store.add`: `Tensor.add_` on the device."""
    for ticket in after:
        ticket.join_compute()
    memory = store.view_in_place(entry, begin, source.nbytes, True)
    memory.view(source.dtype).add_(source.to(memory.device))
    return store.device.mark()


def read(store: Store, entry: Entry, target: Tensor, begin: int) -> Ticket:
    """As `Store.read`: blocks until compute has come this far."""
    copy_dense(target, store.view_in_place(entry, begin, target.numel(), False))
    return Ready()


def copy_dense(target: Tensor, source: Tensor) -> None:
    """Copy between tensors alike in dtype, size and strides, without gaps; in the order of compute.

    Between host memories by one thread: while the threads of links are busy, a team of OpenMP's
    takes milliseconds to come together, for what lasts some tens of microseconds.
    """
    if target.is_cpu and source.is_cpu:
        copy_bytes(target, source, source.nbytes)
    else:
        target.copy_(source)


# --- Low-precision copies ---

MakeCopy = Callable[[Entry, Cast], None]
"""Makes `entry.copies[cast.copy_dtype]`, or makes it again."""


def source_of(fetch: Fetch, entries: Sequence[Entry]) -> Entry:
    """The entry whose bytes a fetch brings."""
    entry = entries[fetch.entry]
    return entry if fetch.cast is None else entry.copies[fetch.cast.copy_dtype][0]


def is_fresh(entry: Entry, cast: Cast) -> bool:
    """Whether the copy for `cast` was cast from the entry as it is now."""
    found = entry.copies.get(cast.copy_dtype)
    return found is not None and found[1] == entry.version


def refresh_copies(schedule: Schedule, entries: Sequence[Entry], make: MakeCopy) -> None:
    """Make the copies that `schedule` will fetch, as far as they are missing or out of date.

    raises  ParameterChanged, if what an entry took its values from was written since: who uses a
            copy uses the entry
    """
    for copy in schedule.copies:
        entries[copy.entry].settle()  # a late update of it would be of no call that reads copies
    cast = ((c.entry, c.cast) for c in schedule.copies if not c.whole)
    for index, wanted in (*schedule.casts, *cast):
        entry = entries[index]
        check_sources(entry)
        if not is_fresh(entry, wanted):
            make(entry, wanted)


def copies_of(schedule: Schedule, entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """The copies that a call names beside `entries`, those of its handles."""
    return tuple([_copy(entries[c.entry], c) for c in schedule.copies])


def _copy(entry: Entry, read: CopyRead) -> Entry:
    if not read.whole:
        return entry.copies[read.cast.copy_dtype][0]
    assert entry.whole is not None, "a call that reads it was asked for"
    assert entry.whole.dtype is read.cast.copy_dtype, "it was asked for in this dtype"
    return entry.whole.entry


def wholes_begin(schedule: Schedule, entries: Sequence[Entry]) -> list[tuple[Entry, int]]:
    """Note that a call is about to make entries of the shares of all ranks: until it has, they have
    no value.

    Returns whose they are, each with its version now: that of the shares which are gathered.
    """
    making = [entries[copy.entry] for copy in schedule.copies if copy.made]
    for entry in making:
        entry.whole_made(NEVER)
    return [(entry, entry.version) for entry in making]


def wholes_made(making: Sequence[tuple[Entry, int]]) -> None:
    """Note that a call has made them. What was written meanwhile is out of date at once."""
    for entry, version in making:
        if entry.whole is not None:
            entry.whole_made(version)
