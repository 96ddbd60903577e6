"""The store of one model knows which entry rests where, and every way the bytes of an entry can
travel.

An entry is a parameter, a gradient or an optimizer state: raw bytes with a name. The store places
an entry on the host while there is room, else on disk, and moves it to and from the device on
request.

Cheap changes of an entry may be deferred until the next reader (`Deferrals`). Clipping multiplies
every gradient by one number; at once this would read and write all of them, while the optimizer's
step multiplies each chunk as it passes. Whoever else reads the entry finds the change applied,
since the store applies it first.
"""

import os
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, is_
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from zcompile.config import Config
from zcompile.errors import TierFull, Unsupported, ValueUnset
from zcompile.ir import handles
from zcompile.ir.handles import Leaf
from zcompile.ir.partition import Owners, Partition, partition_of
from zcompile.ir.schedule import Cast
from zcompile.ir.ties import Dead, Tie
from zcompile.ir.types import EntryKind, EntryRef, EntryRole, Layout
from zcompile.runtime.changes import CHANGES
from zcompile.runtime.closing import Closing, wait_for_dead_stores
from zcompile.runtime.device.arena import Arena
from zcompile.runtime.device.pages import check_memory
from zcompile.runtime.meter import Meter
from zcompile.runtime.open import (
    Opening,
    Resources,
    close_resources,
    closed_error,
    forked_error,
    open_resources,
    settled,
)
from zcompile.runtime.ranks.fabric import Fabric
from zcompile.runtime.ranks.transport import host_rows
from zcompile.runtime.store.placement import Tiers
from zcompile.runtime.store.sources import Source, before_write, check_sources
from zcompile.runtime.tiers.base import FileRange, Place
from zcompile.runtime.tiers.device import DeviceTier
from zcompile.runtime.transfer.host_work import HostUse, HostWork
from zcompile.runtime.transfer.interrupts import deferred_interrupts, uninterrupted
from zcompile.runtime.transfer.one_copy import OneCopy
from zcompile.runtime.transfer.queue import Backlog, compute_marks
from zcompile.runtime.transfer.ticket import Behind, Ticket
from zcompile.runtime.transfer.transfer import Add, Fetch, InFlight, Put, ReadBack, Transfer

# --- Deferred changes ---


@dataclass(frozen=True)
class Deferred:
    """A change that waits for the next reader: `func(values, operand)`, elementwise and in place.

    lists    `func` takes a list of tensors
    operand  one number, or a tensor of one
    layout   of the tensor whose change was asked for, which covers its entry
    """

    func: Callable[..., object]
    operand: Any
    lists: bool
    layout: Layout

    def apply(self, values: Tensor, operand: Any) -> None:
        """Apply the change to some elements.

        values   a range of the entry's elements
        operand  `self.operand`, as it reached the step
        """
        self.func([values] if self.lists else values, operand)

    def apply_to_each(self, values: Sequence[Tensor], operands: Sequence[Any]) -> None:
        """As `apply`, to ranges of many entries of which the same change waits: by one call, if it
        takes lists and the operand of all is one."""
        if self.lists and all(operand is operands[0] for operand in operands):
            self.func(values, operands[0])
            return
        for value, operand in zip(values, operands, strict=True):
            self.apply(value, operand)


class Changing(Protocol):
    """What deferred changes need of an entry."""

    key: int
    deferred: tuple[Deferred, ...]
    version: int

    def settle(self) -> None:
        """Its bytes are about to be used."""

    def settle_updates(self) -> None:
        """What waits of it is to be computed."""


E = TypeVar("E", bound=Changing)


class Deferrals(Generic[E]):
    """The entries with deferred changes, and who applies them.

    apply_now  applies what is deferred of an entry, and clears it
    """

    def __init__(self, apply_now: Callable[[E], None]) -> None:
        self._apply_now = apply_now
        self._waiting: dict[int, E] = {}

    @property
    def any_wait(self) -> bool:
        """Whether changes of any entry wait."""
        return bool(self._waiting)

    def defer(self, entry: E, change: Deferred) -> None:
        """Note a change, to be applied before the entry is read, or by whoever reads it."""
        entry.settle_updates()  # a change is made of what is widened on its way
        entry.deferred = (*entry.deferred, change)
        entry.version += 1
        self._waiting[entry.key] = entry

    def apply(self, entry: E) -> None:
        """Apply what is deferred of the entry."""
        if entry.deferred:
            entry.settle()
            self._apply_now(entry)

    def apply_each(self, entries: Iterable[E]) -> None:
        """Apply what is deferred of these entries."""
        for entry in entries:
            self.apply(entry)

    def drop(self, entry: E) -> None:
        """The entry is dead."""
        self._waiting.pop(entry.key, None)

    def apply_all(self, lives: Callable[[E], bool]) -> None:
        """Apply what is deferred of any entry that `lives`."""
        while self._waiting:
            _, entry = self._waiting.popitem()
            if lives(entry):
                self.apply(entry)


# --- Entries ---


class Waits(Protocol):
    """Something that is to be done before the bytes of an entry are used."""

    def settle(self) -> None:
        """Do it. raises  what it fails with"""


NEVER = -1
"""The version of no entry: that of a copy which has no value yet."""


class Whole(NamedTuple):
    """The shares of all ranks of a parameter, kept on this one.

    dtype    of its elements: the one that calls gather the parameter in which it is kept for
    version  of the parameter, that it was gathered at; `NEVER`: it has no value
    """

    entry: "Entry"
    dtype: torch.dtype
    version: int


def _told(name: str) -> Any:
    """An attribute of entries, kept as `_name`: `CHANGES` is told where it changes of one that
    outlives steps."""
    kept = f"_{name}"

    def change(self: "Entry", value: object) -> None:
        before, lasts = getattr(self, kept), self.kind.lasting
        setattr(self, kept, value)
        if before is not value and (lasts or self.kind.lasting):
            CHANGES.note()

    return property(attrgetter(kept), change)


class Entry:
    """Bytes that the store keeps. Reads give zeros until something is written.

    key      the number by which the store knows it, and which its handle carries; no two entries
             have the same, and a gradient has a new one in every step
    ref      names it in records and plans of a step: as its key does, or, of a gradient, as the
             gradient of its parameter
    born     the kind it was created as; `kind` may change when an optimizer keeps it
    version  grows at each submission of a write
    home     name of the tier it rests on: "device", "held", "host" or "disk"
    partition  of which elements of its tensor this rank holds a share of `nbytes`; the tensor has
             `whole_bytes`. None: of all
    unset    has no value, not even zeros: reading raises until all of it was written
    owner    the parameter that its handle belongs to, if it is one's: gradients that come by this
             handle are that parameter's
    shown    its layout in what that parameter shows; None once the .data of that is something else
    deferred changes that are still to be applied to the bytes; whoever reads finds them applied
    waits    what is to be settled before the bytes are used, since a late update, or an op of a
             step that waits for others, reads or writes them; None: nothing
    sources  what it took its values from, if that can still be written by others
    copies   in other dtypes: dtype -> (their entry, the version of this one they were cast from)
    whole    of a share: (an entry of the shares of all ranks, the version of this one that it was
             gathered at); None: there is none
    norms    what was measured of it: how -> (version, layout, result)
    tiles    and of its tiles: offset -> (elements, how -> result)
    narrow   its bytes rest in the narrower `copy_dtype`, in which each value is what it is; None:
             they are `nbytes`. Who uses it without saying so finds it widened (`settle`)
    crosses_wide  of a parameter: its last gradient, made in a narrower dtype, crossed between ranks
             in its own, since a hook of some rank sees it
    unexchanged  of a gradient: it is what this rank has summed within `no_sync`, and nobody may use
             its bytes before the ranks have exchanged them, but the runtime (`used_by_runtime`)
    """

    kind: EntryKind = _told("kind")
    nbytes: int = _told("nbytes")
    place: Place = _told("place")
    unset: bool = _told("unset")
    deferred: tuple[Deferred, ...] = _told("deferred")
    waits: Waits | None = _told("waits")
    sources: tuple[Source, ...] = _told("sources")
    narrow: Cast | None = _told("narrow")
    crosses_wide: bool = _told("crosses_wide")
    unexchanged: bool = _told("unexchanged")

    def __init__(
        self,
        store: "Store",
        kind: EntryKind,
        place: Place,
        unset: bool,
        ref: EntryRef | None,
        partition: Partition | None = None,
    ) -> None:
        self.key = handles.new_key()
        self._kind = self.born = kind
        self._nbytes = place.nbytes
        self.partition = partition
        self.store = store
        self._place = place
        self._unset = unset
        self.ref = EntryRef(self.key) if ref is None else ref
        self.version = 0
        self.owner: weakref.ref[Tensor] | None = None
        self.shown: object = None
        self._deferred: tuple[Deferred, ...] = ()
        self._waits: Waits | None = None
        self._sources: tuple[Source, ...] = ()
        self.copies: dict[torch.dtype, tuple[Entry, int]] = {}
        self.whole: Whole | None = None
        self.norms: dict[Hashable, tuple[int, Layout | None, Any]] = {}
        self.tiles: dict[int, tuple[int, dict[Any, Any]]] = {}
        self._narrow: Cast | None = None
        self._crosses_wide = False
        self._unexchanged = False
        self.tie: Tie | None = None
        """Tells that the storage of the handle has died."""

    @property
    def name(self) -> str:
        return self._place.extent.name

    @property
    def home(self) -> str:
        return self.place.tier.name

    @property
    def whole_bytes(self) -> int:
        """Bytes of the tensor, of which all ranks may hold shares."""
        part = self.partition
        return self.nbytes if part is None else self.nbytes // part.count * part.numel

    @property
    def of(self) -> int | None:
        """Key of the parameter that it is the gradient of."""
        return self.ref.number if self.ref.is_gradient else None

    @property
    def on_device(self) -> bool:
        """Whether it rests in the device's own memory, where compute itself moves its bytes."""
        return self.place.tier.on_device

    def wait_for(self, waits: Waits | None) -> None:
        """Let its bytes be used only once this is settled; None: at once."""
        self.waits = waits

    def settle(self) -> None:
        """Its bytes are about to be used: what waits and has to do with them is computed first, and
        they are of the dtype that they are used in.

        raises  Unsupported, if they are a sum that the ranks have not exchanged
        """
        self.settle_updates()
        if self.narrow is not None:
            self.store.widen(self)

    def settle_updates(self) -> None:
        """As `settle`, for who reads the bytes as they rest, narrow or not."""
        if self.unexchanged:
            raise unexchanged_error(self.name)
        if self.waits is not None:
            self.waits.settle()

    def note_crossing(self, wide: bool) -> None:
        """Note that a gradient of this parameter, made in a narrower dtype, crosses between ranks:
        in its own, if a hook of any rank is to see it."""
        self.crosses_wide = wide

    def is_of_this_rank(self) -> None:
        """It is a sum that the ranks have not exchanged."""
        self.unexchanged = True

    def rest_narrow(self, cast: Cast) -> None:
        """Its bytes, of a new entry, are to be those of a narrower dtype."""
        self.narrow = cast
        self.nbytes *= cast.dtype.itemsize // cast.copy_dtype.itemsize

    def keep_copy(self, dtype: torch.dtype, copy: "Entry") -> None:
        """Let `copy` be its copy in another dtype, of no value until `copy_made`."""
        self.copies[dtype] = copy, NEVER
        CHANGES.note()

    def blank_copy(self, dtype: torch.dtype) -> "Entry":
        """Its copy in another dtype, of no value until `copy_made`: what is overwritten need not be
        read. On the device it is not: nothing changes there of what is kept between steps."""
        copy, _ = self.copies[dtype]
        self.copies[dtype] = copy, NEVER
        if not copy.on_device:
            self.store.zero(copy)
        return copy

    def copy_made(self, dtype: torch.dtype, version: int) -> None:
        """Its copy in another dtype is cast from the value that it had at `version`."""
        copy, _ = self.copies[dtype]
        self.copies[dtype] = copy, version

    def keep_whole(self, whole: "Entry", dtype: torch.dtype) -> None:
        """Let `whole` be an entry of the shares of all ranks in `dtype`, of no value until
        `whole_made`."""
        self.whole = Whole(whole, dtype, NEVER)

    def whole_made(self, version: int) -> None:
        """The entry of the shares of all ranks has the value that they had at `version`; `NEVER`:
        it is about to be made."""
        assert self.whole is not None, "it is kept"
        self.whole = self.whole._replace(version=version)

    @property
    def has_whole(self) -> bool:
        """Whether an entry of the shares of all ranks is there, and as they are now."""
        self.settle()
        return self.whole is not None and self.whole.version == self.version

    def rename(self, name: str) -> None:
        self.place.rename(name)

    def written(self) -> None:
        """Its bytes change: by a write that was submitted, or by compute in place."""
        self.version += 1

    def overwritten(self) -> None:
        """All of its bytes are written: it has a value, and nothing of the old one is to come."""
        self.deferred = ()
        self.unset = False

    def defer_only(self, changes: tuple[Deferred, ...]) -> None:
        """Let `changes` be all that is still to be applied to the bytes."""
        self.deferred = changes

    def kept_value(self, version: int) -> None:
        """It has moved, and has the value that it had at `version`."""
        self.version = version

    def become_state(self, name: str) -> None:
        """It is the state of an optimizer from here on, called `name`."""
        self.kind = EntryKind.STATE
        if self.name != name:
            self.rename(name)

    def become_parameter(self) -> None:
        """It is what a parameter shows, from here on, and nobody's gradient."""
        self.ref = EntryRef(self.key)  # before others are told that it has changed
        self.kind = EntryKind.PARAM
        CHANGES.note()  # of what was a parameter before, only the ref has changed

    @uninterrupted
    def gather(
        self, size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype
    ) -> Tensor:
        """The full value in the arena, gathered now. raises BudgetExceeded, ValueUnset"""
        store = self.store
        store.settle()  # which may take the room that this takes
        self.settle()
        store.deferrals.apply(self)  # which takes room in the arena too
        if self.partition is not None:
            return Layout(tuple(size), tuple(stride), offset, dtype).view(store.whole(self))
        memory = store.arena.take(self.nbytes, self.name)
        store.fetch(self, memory, after=(store.device.mark(),)).join_compute()
        store.meter.count("gathers")
        return Layout(tuple(size), tuple(stride), offset, dtype).view(memory)

    def reduce_grad(self, grad: Tensor, offset: int | None = None) -> None:
        self.store.take_gradient(self, grad, offset)


def unexchanged_error(name: str) -> Unsupported:
    """The error where somebody would use a gradient that is this rank's alone."""
    return Unsupported(
        f"{name!r} is what this rank has summed within zcompile.no_sync, and the ranks have not "
        "exchanged it yet",
        "call the last backward before an optimizer's step, clipping or reading outside of "
        "zcompile.no_sync, on all ranks; zero_grad(), which sets gradients to None, drops the sums",
    )


@contextmanager
def used_by_runtime(entry: Entry) -> Iterator[None]:
    """Within, the bytes of a sum that the ranks have not exchanged may be used: to add to it, to
    exchange it, or to move it to another tier."""
    unexchanged, entry.unexchanged = entry.unexchanged, False
    try:
        yield
    finally:
        entry.unexchanged = unexchanged


@contextmanager
def as_they_rest(entries: Iterable[Entry]) -> Iterator[None]:
    """Within, entries are what their bytes are: of those that rest narrow, narrow ones."""
    narrow = [(entry, entry.narrow, entry.nbytes) for entry in entries if entry.narrow is not None]
    for entry, _, _ in narrow:
        entry.narrow, entry.nbytes = None, entry.place.nbytes
    try:
        yield
    finally:
        for entry, cast, nbytes in narrow:
            entry.narrow, entry.nbytes = cast, nbytes


def all_written(entries: Iterable[Entry]) -> None:
    """As `Entry.written` of each: an optimizer's step writes hundreds in place."""
    for entry in entries:
        entry.version += 1


def call_key(serial: int, entries: Sequence[Entry]) -> object:
    """What something is kept by for the next such call of a schedule: one may serve many layers,
    of which each has entries that outlive steps. Others are new in every step."""
    return serial, next((entry.ref for entry in entries if entry._kind.lasting), None)


def others_than(kept: Sequence[Entry | None], entries: Sequence[Entry]) -> list[int] | None:
    """Places of `entries` where `kept` has none; None, if it has another somewhere, or fewer."""
    if len(kept) != len(entries):
        return None
    if all(map(is_, kept, entries)):
        return []
    found = [at for at, (a, b) in enumerate(zip(kept, entries, strict=True)) if a is not b]
    return None if any(kept[at] is not None for at in found) else found


def _copies(entry: Entry) -> list[int]:
    """The keys of all that is kept as a copy of an entry."""
    whole = () if entry.whole is None else (entry.whole.entry.key,)
    return [*(copy.key for copy, _ in entry.copies.values()), *whole]


def _widened(raw: Tensor, cast: Cast) -> Tensor:
    """The bytes of an entry in its own dtype, of those in a narrower one; both uint8."""
    return raw.view(cast.copy_dtype).to(cast.dtype).view(torch.uint8)


# --- The store ---


def _close_all(resources: Resources, fabric: Fabric | None) -> None:
    """Close what a store ran on, and leave the other ranks."""
    if fabric is not None:
        fabric.close(closed_error(""))
    close_resources(resources)


def _nobody_computes(entry: Entry) -> None:
    raise AssertionError(f"a change of {entry.name!r} was deferred where nobody can make it")


class Store:
    """Opens what `config` asks for, and moves entries.

    apply_deferred  applies what is deferred of an entry, and clears it
    reaches_host    compute may touch what rests on the host
    raises  ConfigInvalid, DeviceTooSmall, DiskOwned, DiskUnusable
    """

    def __init__(
        self,
        config: Config,
        opening: Opening = open_resources,
        apply_deferred: Callable[[Entry], None] = _nobody_computes,
        fabric: Fabric | None = None,
    ) -> None:
        self.key = handles.new_key()
        self.config = config = settled(config)
        self.meter = Meter()
        wait_for_dead_stores()
        with deferred_interrupts():
            resources = opening(config, self.meter)
            adder = resources.context.adder
            shut = partial(_close_all, resources, fabric)
            self._close = Closing(self, adder.submit_from_c, shut)
        self.device = resources.context.device
        self.device_budget = resources.device_budget
        self.host_budget = resources.host_budget
        self.arena = Arena(
            self.device,
            self.device_budget,
            self.meter.device,
            resources.mover.wait_for_memory,
            self.reclaim,
            resources.mover.ends.look,
        )
        self.fabric = fabric
        owned = fabric is not None and config.partition == "owner"
        self.owners = Owners(fabric.mesh.shards) if fabric is not None and owned else None
        """Choose who holds a tensor; None: each rank holds a slice."""
        self._context = resources.context
        self._mover = resources.mover
        self._host_lane = resources.host_lane
        self.durable = resources.durable
        self.system = resources.system
        self.homes = Tiers(
            resources.tiers, DeviceTier(self.arena), self.meter, self._mover.wait_for_dead
        )
        self._backlog = Backlog(resources.backlog_bytes, self._mover.ends.hear_of_all)
        self._entries: dict[int, Entry] = {}
        self._dead = Dead()
        self.lasting_died = 0
        """Entries that outlive steps and have died, in all."""
        self.deferrals = Deferrals(apply_deferred)
        self._pid = resources.pid
        self.reaches_host = resources.context.device.reaches_host
        if fabric is not None:
            fabric.carry_for(self.device)

    def take_gradient(self, leaf: Leaf, grad: Tensor, offset: int | None) -> None:
        """Take a gradient of `leaf`, or a tile of it from `offset` on. raises Unsupported"""
        raise Unsupported(f"a gradient of {leaf.name!r} arrived", "give it to a Session")

    def reclaim(self, needed_bytes: int) -> bool:
        """Make room in the arena; whether there is more of it now."""
        return False

    def settle(self) -> None:
        """Compute the late updates that wait, if any."""

    @uninterrupted
    def create(
        self,
        name: str,
        kind: EntryKind,
        nbytes: int,
        *,
        unset: bool = False,
        of: int | None = None,
        copy_of: int | None = None,
        tier: str | None = None,
        at: Place | None = None,
        partition: Partition | None = None,
    ) -> Entry:
        """Create a new, blank entry, `at` its place, or where `Tiers` sends it. raises TierFull

        `of`: key of the parameter that it is the gradient of, or of its own handle (`Share`).
        `copy_of`: key of the parameter of which it is a copy, in low precision or of the shares of
        all ranks.
        `partition`: `nbytes` are those of this rank's share.
        Nobody but the store owns it yet: ask for its `handle` before interrupts are delivered.
        """
        self.enter(name)
        ref = None if of is None else EntryRef(of, EntryRole.GRADIENT)
        if copy_of is not None:
            ref = EntryRef(copy_of, EntryRole.COPY)
        place = at or self.homes.reserve(name, kind, nbytes, ref, tier)
        entry = Entry(self, kind, place, unset, ref, partition)
        self._entries[entry.key] = entry
        handles.bind(entry)
        return entry

    @uninterrupted
    def create_at(
        self, kind: EntryKind, places: Sequence[Place], refs: Sequence[EntryRef]
    ) -> list[Entry]:
        """As `create` for each of `places`, called by `refs`: a backward creates hundreds."""
        self.enter(places[0].name if places else "")
        made = [
            Entry(self, kind, place, False, ref) for place, ref in zip(places, refs, strict=True)
        ]
        for entry in made:
            self._entries[entry.key] = entry
            handles.bind(entry)
        return made

    def create_for(
        self,
        name: str,
        kind: EntryKind,
        layout: Layout,
        *,
        unset: bool = False,
        like: Any = None,
    ) -> Entry:
        """Create a new, blank entry for a tensor of `layout`: for the share of it that is of this
        rank, where several hold one. raises TierFull

        like  a tiered tensor: one with as many elements is divided as it is, whatever its dtype
        """
        part = None
        if self.fabric is not None:
            if like is not None and like.covers and like.numel() == layout.numel and layout.dense:
                part = like.entry.partition
            else:
                owner = None
                if self.owners is not None:
                    param = kind is EntryKind.PARAM
                    owner = self.owners.next if param else partial(self._owner_named, name)
                mesh, shard = self.fabric.mesh, self.fabric.shard
                part = partition_of(layout, shard, mesh.shards, owner)
        nbytes = layout.nbytes if part is None else part.count * layout.dtype.itemsize
        return self.create(name, kind, nbytes, unset=unset, partition=part)

    def _owner_named(self, name: str, nbytes: int) -> int:
        """The rank that holds all of what is no parameter, and not divided as one is."""
        assert self.owners is not None, "ranks own tensors"
        return self.owners.named(name)

    @uninterrupted
    def widen(self, entry: Entry) -> None:
        """Let an entry that rests in a narrower dtype rest in its own: somebody uses its bytes.

        raises  TierFull, and what a transfer raises; then it rests as it did
        """
        cast, old, version, deferred = entry.narrow, entry.place, entry.version, entry.deferred
        assert cast is not None, "it rests narrow"
        with as_they_rest([entry]):
            entry.defer_only(())
            try:
                raw = self.read_here(entry)
            finally:
                entry.defer_only(deferred)
        try:
            place = self.homes.reserve(entry.name, entry.born, entry.nbytes, entry.ref)
        except TierFull:
            return self._widen_in_its_room(entry, cast, raw)
        entry.place, entry.narrow = place, None
        try:
            self.put(entry, _widened(raw, cast)).wait()
        except BaseException:
            entry.place, failed, entry.narrow = old, entry.place, cast
            self.homes.left(failed, entry.born)
            self._mover.free(failed)
            raise
        finally:
            entry.defer_only(deferred)
            entry.kept_value(version)
        self.homes.left(old, entry.born)
        self._mover.free(old)

    def _widen_in_its_room(self, entry: Entry, cast: Cast, raw: Tensor) -> None:
        """The same where there is room for the wide bytes only once the narrow ones, `raw`, have
        given theirs."""
        version, deferred = entry.version, entry.deferred

        def give_up_place() -> None:
            self.homes.left(entry.place, entry.born)
            self._mover.free(entry.place)

        def rest(nbytes: int, value: Tensor) -> None:
            entry.place = self.homes.reserve(entry.name, entry.born, nbytes, entry.ref)
            self.put(entry, value).wait()

        given_up = entry.place
        give_up_place()
        entry.defer_only(())
        entry.narrow = None
        try:
            rest(entry.nbytes, _widened(raw, cast))
        except BaseException:
            if entry.place is not given_up:  # there was room, and the transfer failed
                give_up_place()
            entry.narrow = cast
            with as_they_rest([entry]):
                rest(raw.numel(), raw)
            raise
        finally:
            entry.defer_only(deferred)
            entry.kept_value(version)

    def drop_copies(self, entry: Entry) -> None:
        """Keep no copies of an entry any more, in other dtypes or of the shares of all ranks;
        nothing of them is in flight."""
        self._dead.extend(_copies(entry))
        entry.copies.clear()
        entry.whole = None
        CHANGES.note()

    def handle(self, entry: Entry) -> Tensor:
        """The handle of a new entry, which is freed when the last use of its handle has died."""
        memory, entry.tie = handles.memory_of(entry.key, self._dead)
        return handles.handle_over(memory)

    def holds(self, entry: Entry) -> bool:
        """Whether the entry is alive: False once the last use of its handle has died."""
        self.enter(entry.name)
        return entry.key in self._entries

    @uninterrupted
    def fetch(
        self,
        entry: Entry,
        target: Tensor,
        *,
        begin: int = 0,
        after: Sequence[Ticket] = (),
        ahead: bool = False,
    ) -> Ticket:
        """Start moving bytes of `entry`, from `begin` on, into `target`; returns at once.

        target  uint8 [n], contiguous, on the compute device; must not be touched before the ticket
        after   the copies into `target` come after these
        ahead   for a use that comes later, if at all: who makes it looks at the sources then
        raises  ValueUnset, and what an earlier transfer of this entry failed with
        """
        self.enter(entry.name)
        if not target.numel():
            return Behind(after)  # a tile of which this rank holds nothing
        self._prepare_read(entry, ahead)
        window, in_arena = self.arena.window_and_holds(target)
        place, context = entry.place, self._context
        streams = context.device.streams
        if streams is not None and place.tier.in_memory:
            copy = OneCopy(place, begin, window, target, streams, False, self._mover.ends)
            if self._mover.copy_on_stream(copy, after):
                return copy
        marks = compute_marks(after)
        return self._submit(Fetch(place, begin, window, target, marks, context, in_arena), after)

    def can_view_in_place(self, entry: Entry) -> bool:
        """Whether compute reaches the bytes of `entry` where they rest, in one piece.

        That is on the device, or on the host of the emulated one, unless throttled links must show.
        """
        place, tier = entry.place, entry.place.tier
        if tier.on_device or not (tier.in_memory and self.reaches_host):
            return tier.on_device
        return len(place.tier.pieces(place.extent, 0, place.nbytes)) == 1

    @uninterrupted
    def use_on_host(self, entry: Entry, begin: int, nbytes: int, writes: bool) -> HostUse:
        """What work of the host is to do with bytes of an entry that rests there: to be submitted
        before anything else is asked of the entry.

        raises  ValueUnset, and what an earlier transfer of this entry failed with
        """
        self.enter(entry.name)
        self._prepare_read(entry)
        if writes:
            before_write(entry)
        self._mover.check(entry.place)
        entry.version += int(writes)
        return HostUse(entry.place, begin, nbytes, writes)

    @uninterrupted
    def submit_to_host(self, work: HostWork) -> None:
        """Let the host do `work` when what was submitted before on the bytes that it uses is over;
        what comes later on them waits for it. Returns at once.

        raises  what an earlier transfer of one of the entries failed with
        """
        self._mover.submit_to_host(work, self._host_lane)

    @uninterrupted
    def view_in_place(
        self,
        entry: Entry,
        begin: int,
        nbytes: int,
        writes: bool,
        overwrites: bool = False,
        ahead: bool = False,
    ) -> Tensor:
        """Bytes of an entry where they rest: uint8 [nbytes]; waits for transfers on them.

        Compute may touch them until the caller uses the entry. `overwrites`: all, before it reads.
        `ahead`: as in `fetch`. The entry is one of those that `can_view_in_place` names.
        raises  ValueUnset, and what an earlier transfer of this entry failed with
        """
        self.enter(entry.name)
        self._prepare_read(entry, ahead)
        if writes:
            before_write(entry)
        ((_, memory),) = entry.place.tier.pieces(entry.place.extent, begin, begin + nbytes)
        self._mover.wait_to_touch(entry.place, begin, memory, writes, overwrites)
        entry.version += int(writes)
        return memory

    @uninterrupted
    def put(
        self, entry: Entry, source: Tensor, *, begin: int = 0, after: Sequence[Ticket] = ()
    ) -> Ticket:
        """Start moving `source` to the bytes of `entry` from `begin` on.

        Returns at once, unless sources outside the arena pile up: their memory is bounded
        (`Resources.backlog_bytes`), so then it waits for earlier ones to leave.

        source  uint8 [n], contiguous, on the compute device or in host memory; kept alive, and
                must not be changed before the ticket's `join_compute`
        after   complete before `source` is read; on CUDA, `device.mark()` of what computed it
        """
        self.enter(entry.name)
        check_memory(source)
        entry.settle()
        if entry.deferred:
            if source.numel() == entry.nbytes:
                entry.deferred = ()
            self.deferrals.apply(entry)
        window, in_arena = self.arena.window_and_holds(source)
        place, context = entry.place, self._context
        streams, copy = context.device.streams, None
        if streams is not None and place.tier.in_memory and not streams.is_on_host(source):
            copy = OneCopy(place, begin, window, source, streams, True, self._mover.ends)

        def put() -> Transfer:
            return Put(place, begin, window, source, compute_marks(after), context, in_arena)

        ticket = self._submit_write(entry, copy, put, source, in_arena, after)
        if ticket is copy and not self.will_join() and self.arena.is_apart(source):
            ticket.await_end()  # its memory goes back when that is heard of
        return ticket

    def will_join(self) -> bool:
        """Whether who puts something now has compute join it, and so gives its memory back."""
        return False

    @uninterrupted
    def add(
        self, entry: Entry, source: Tensor, *, begin: int = 0, after: Sequence[Ticket] = ()
    ) -> Ticket:
        """As `Tensor.add_`: start adding `source` (1-D; else as in `put`) from byte `begin` on."""
        self.enter(entry.name)
        check_memory(source)
        self._prepare_read(entry)
        raw = source.view(torch.uint8)
        add = partial(
            Add,
            entry.place,
            begin,
            self.arena.window(raw),
            raw,
            compute_marks(after),
            self._context,
            source.dtype,
        )
        return self._submit_write(entry, None, add, raw, self.arena.holds(raw), after)

    @uninterrupted
    def zero(self, entry: Entry) -> None:
        """Make an entry blank again, which moves nothing."""
        self.enter(entry.name)
        entry.settle()
        before_write(entry)
        self._mover.mark_blank(entry.place)
        entry.overwritten()
        entry.written()

    @uninterrupted
    def read(self, entry: Entry, target: Tensor, *, begin: int = 0) -> Ticket:
        """Start moving bytes of `entry`, from `begin` on, into ordinary host memory.

        target  uint8 [n], contiguous, on the host
        raises  ValueUnset, and what an earlier transfer of this entry failed with
        """
        self.enter(entry.name)
        check_memory(target)
        self._prepare_read(entry)
        return self._submit(ReadBack(entry.place, begin, target, target, (), self._context), ())

    def read_to_host(self, entry: Entry) -> tuple[Tensor, Ticket]:
        """All bytes of `entry` in memory of the host that lasts until nobody has it: uint8
        [entry.nbytes], there once the ticket is complete. raises as `read`"""
        row = host_rows(1, entry.nbytes, torch.uint8)[0]
        return row, self.read(entry, row)

    def readers(self, target: Tensor) -> Sequence[Ticket]:
        """Transfers of earlier calls that still read the bytes of `target`; a session knows."""
        return ()

    def read_all(self, entry: Entry) -> Tensor:
        """The bytes of the whole tensor in ordinary host memory: uint8 [entry.whole_bytes]; blocks.

        raises  ValueUnset
        """
        if entry.partition is not None:
            return self.whole(entry)
        return self.read_here(entry)

    def whole(self, entry: Entry) -> Tensor:
        """As `read_all`, of an entry that all ranks hold shares of: each of them calls it, unless
        rank 0 reads alone.

        raises  RanksDiffer, RankFailed
        """
        assert self.fabric is not None, "there are shares"
        if self.fabric.lone_reads is not None:
            return self.fabric.lone_reads.whole(entry)
        part = entry.partition
        assert part is not None, "there are shares"
        itemsize = entry.nbytes // part.count
        return self.fabric.gathered(entry.name, part, itemsize, partial(self.read, entry))

    def put_whole(self, entry: Entry, source: Tensor, after: Sequence[Ticket] = ()) -> Ticket:
        """As `put` of all bytes: of the whole tensor, of which this rank keeps its share.

        source  uint8 [entry.whole_bytes], the same on all ranks
        """
        part = entry.partition
        if part is None:
            return self.put(entry, source, after=after)
        width = entry.nbytes // part.count
        # Rows of bytes are cut as elements are, by compute where they lie on the device.
        share = part.cut(source.view(-1, width)).view(-1)
        return self.put(entry, share, after=[*after, *self.computed(share)])

    def computed(self, *values: Tensor) -> Sequence[Ticket]:
        """What a transfer that reads values has to come after if compute has just made them: a
        mark, or nothing where they lie in memory of the host."""
        streams = self.device.streams
        if streams is None or all(map(streams.is_on_host, values)):
            return ()
        return (self.device.mark(),)

    def read_here(self, entry: Entry) -> Tensor:
        """The bytes that rest on this rank: uint8 [entry.nbytes], in ordinary host memory; blocks.

        raises  ValueUnset
        """
        with torch.inference_mode(False):  # another thread writes to it
            memory = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu")
        self.read(entry, memory).wait()
        return memory

    @uninterrupted
    def file_ranges(self, entry: Entry, begin: int, end: int) -> Sequence[FileRange]:
        """Where in files bytes [begin, end) of `entry` lie, end to end; true until the next write.

        None of them, if some lie in no file, hold nothing yet, or are in flight.
        """
        self.enter(entry.name)
        self._prepare_read(entry)
        place = entry.place
        if place.in_flight or not place.written.covers(begin, end):
            return ()
        return place.tier.file_ranges(place.extent, begin, end)

    def drain(self) -> None:
        """Wait for all transfers; raises the first error that any had."""
        self.enter("")
        self._mover.drain()

    def is_idle(self) -> bool:
        """Whether no transfer is in flight, as of now; waits for none."""
        return self._mover.is_idle()

    def close(self) -> None:
        """Stop transfers, remove the files and free memory of the device; leave the other ranks.

        Collectives that are on their way end before. Idempotent.
        """
        with deferred_interrupts():
            if self.fabric is not None and self._close.alive and os.getpid() == self._pid:
                self.fabric.finish()
            self._close()
            self.arena.close()

    def enter(self, name: str) -> None:
        """Check at the door of every verb: the store is this process's, and open. Frees dead
        entries.

        name  of what is asked for, in the error; "" for all of the model
        """
        if os.getpid() != self._pid:
            raise forked_error(name, self._pid)
        if not self._close.alive:
            raise closed_error(name)
        if self._dead:
            self._free_dead()

    @uninterrupted
    def _free_dead(self) -> None:
        """Free the entries whose handles have died."""
        while self._dead:
            try:
                gone = self._dead.popleft()
            except IndexError:  # another thread was here
                break
            key = gone if isinstance(gone, int) else gone.mark
            if (entry := self._entries.pop(key, None)) is not None:
                if entry.deferred:
                    self.deferrals.drop(entry)
                self.lasting_died += entry.kind.lasting
                self.homes.left(entry.place, entry.born)
                self._mover.free(entry.place)
                if entry.copies or entry.whole is not None:
                    self._dead.extend(_copies(entry))
        self.arena.take_back()

    def _prepare_read(self, entry: Entry, ahead: bool = False) -> None:
        """Before a read: check that the entry has a value, and apply what is deferred.

        Where ranks cannot go on, nothing is read, of what is whole on each of them neither: one may
        have other values than another. raises  ValueUnset; what the ranks have failed with
        """
        if self.fabric is not None:
            self.fabric.check()
        if entry.unset:
            raise ValueUnset(entry.name)
        if not ahead:
            entry.settle()
            if entry.sources:
                check_sources(entry)
        self.deferrals.apply(entry)

    def _submit(self, transfer: Transfer, after: Sequence[Ticket]) -> Transfer:
        self._mover.submit(transfer, after)
        return transfer

    def _submit_write(
        self,
        entry: Entry,
        copy: OneCopy | None,
        make: Callable[[], Transfer],
        source: Tensor,
        in_arena: bool,
        after: Sequence[Ticket],
    ) -> InFlight:
        """Submit a copy, or what `make` makes if the device cannot make that alone."""
        before_write(entry)
        nbytes, leave = 0 if in_arena else source.numel(), None
        if nbytes:
            leave = partial(self._backlog.leave, nbytes)
            self._backlog.enter(nbytes)
        transfer: InFlight
        try:
            if copy is not None and leave is not None:
                copy.when_released(leave)
            if copy is not None and self._mover.copy_on_stream(copy, after):
                transfer = copy
            else:
                transfer = made = make()
                if leave is not None:
                    made.when_released(leave)
                self._submit(made, after)
        except BaseException:  # what never started takes no room
            # An ended copy leaves, or has left, by itself.
            if leave is not None and (copy is None or not copy.ended):
                leave()
            raise
        if nbytes and self._backlog.is_awaited:  # who waits could not yet have this heard of
            transfer.await_end()
        entry.version += 1
        if entry.unset and entry.place.written.covers(0, entry.nbytes):
            entry.unset = False
        return transfer
