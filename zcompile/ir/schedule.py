"""Defines instructions, schedules and region programs: the border of compile time and run time.

A schedule is a flat list. Compute instructions (`Wait`, `Run`, `Free`, `Borrow`, `Left`) act in
order on the compute stream; transfers (`Fetch`, `Reduce`, `Store`, `Offload`) are started in order
on the stream of their link and run beside it. What a transfer must wait for is named by tickets, so
that safety can be read off the list alone. Each instruction says in its `effects` what it does
(`ir/effects.py`).

A region program stands between a graph and its schedule. A graph says what is computed from what; a
schedule, at which instruction each byte moves. A region program of one phase says which regions
compute, in order, which values each of them reads from the arena, and what leaves the device
between them. Where a value rests, when its fetch starts and where it lies are decided on it, by
passes (`passes/arrange.py`): once when the graph is compiled, when every value is fetched, and
again for each placement that a plan of the whole step gives.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, takewhile
from typing import Any, NamedTuple

import torch

from zcompile.ir import ops
from zcompile.ir.effects import COPY, FABRIC, GRADIENT, IN, NEW, OUT, Effects, HomeAccess
from zcompile.ir.effects import EntryIndex as EntryIndex
from zcompile.ir.effects import Instruction as Instruction
from zcompile.ir.effects import Piece as Piece
from zcompile.ir.effects import Register as Register
from zcompile.ir.effects import Slot as Slot
from zcompile.ir.effects import Ticket as Ticket
from zcompile.ir.joined_levels import SentGradient, joined_levels
from zcompile.ir.partition import SharedRange, in_bucket
from zcompile.ir.types import NOTHING_HELD, Layout, LiveBytes, MemoryProfile, Phase, Region, Work


@dataclass(frozen=True)
class Cast:
    """Dtype of an entry's elements, and dtype of a low-precision copy of it."""

    dtype: torch.dtype
    copy_dtype: torch.dtype


class CopyRead(NamedTuple):
    """A copy among the entries of a call: in another dtype, or of the shares of all ranks.

    entry   the parameter that it is a copy of
    cast    the same dtype twice, if it is of all shares
    nbytes  of the copy
    numel   elements that have values: all but the padding of a share
    whole   it is of the shares of all ranks
    made    it is out of date, and the call makes it of what it gathers
    """

    entry: EntryIndex
    cast: Cast
    nbytes: int
    numel: int
    whole: bool = False
    made: bool = False


@dataclass(frozen=True)
class Fetch:
    """Start moving bytes [begin, begin + nbytes) of an entry into a slot of the arena.

    The slot is taken from here on.

    after    the transfer starts once these are complete
    lasting  the entry outlives the step, so the fetch can be foreseen in the next one
    cast     bring the copy in another dtype that the store keeps beside the entry
    offset   first byte of the slot that is written: of a share, which a `Gather` will make whole
    tile     of what ranks hold shares of, the range that will be gathered; None: all of it
    """

    entry: EntryIndex
    begin: int
    nbytes: int
    slot: Slot
    ticket: Ticket
    after: tuple[Ticket, ...] = ()
    name: str = ""
    lasting: bool = True
    cast: Cast | None = None
    offset: int = 0
    tile: SharedRange | None = None

    @cached_property
    def effects(self) -> Effects:
        home = HomeAccess(
            self.entry, self.begin, self.begin + self.nbytes, True, lasting=self.lasting
        )
        if self.cast is not None:
            home = home._replace(role=COPY, copy_dtype=self.cast.copy_dtype)
        return Effects(
            "fetch",
            self.name,
            IN,
            self.nbytes,
            takes=self.slot,
            writes_slot=self.slot,
            home=home,
            after=self.after,
            ticket=self.ticket,
            slot_begin=self.offset,
            tile=self.tile,
        )


@dataclass(frozen=True)
class Agree:
    """Start comparing with all ranks what this call is: which collectives, over which entries.

    The first collective of each kind comes after it, so that no byte moves between ranks that do
    not do the same.
    """

    ticket: Ticket
    name: str = ""

    @cached_property
    def effects(self) -> Effects:
        return Effects("agree", self.name, FABRIC, ticket=self.ticket)


@dataclass(frozen=True)
class Gather:
    """Start bringing the shares of all ranks together in a slot, where this rank's lies in its
    place.

    entry   whose shares they are
    nbytes  of all shares, padding included; of a tile
    tile    of which each rank brings what its share has, if anything; None: all of it is gathered
    """

    entry: EntryIndex
    nbytes: int
    slot: Slot
    ticket: Ticket
    after: tuple[Ticket, ...] = ()
    name: str = ""
    tile: SharedRange | None = None

    @cached_property
    def effects(self) -> Effects:
        return Effects(
            "gather",
            self.name,
            FABRIC,
            self.nbytes,
            writes_slot=self.slot,
            after=self.after,
            ticket=self.ticket,
            fills=True,
            tile=self.tile,
        )


@dataclass(frozen=True)
class Exchange:
    """Start giving every rank what all ranks have made of its share of a gradient.

    value     the gradient that this rank has made; nothing writes to it until the `Reduce` behind
              has arrived
    register  becomes the parts of all ranks
    nbytes    of the gradient
    shares    how ranks hold it: each gets what is of its share; None: every rank gets all of it
    is_tile   it is a part of a gradient
    tile      that part, where ranks hold shares; None: it is all of the gradient, or each gets all
    wide_nbytes  of the gradient in its parameter's dtype, in which it crosses if any rank has a
              hook of it; 0: it is made in that
    """

    value: Register
    register: Register
    entry: EntryIndex
    nbytes: int
    ticket: Ticket
    after: tuple[Ticket, ...] = ()
    name: str = ""
    shares: SharedRange | None = None
    tile: SharedRange | None = None
    is_tile: bool = False
    wide_nbytes: int = 0

    @cached_property
    def effects(self) -> Effects:
        return Effects(
            "exchange",
            self.name,
            FABRIC,
            self.nbytes,
            reads=(self.value,),
            defines=(self.register,),
            after=self.after,
            ticket=self.ticket,
            shares=self.shares,
            tile=self.tile,
            wide_nbytes=self.wide_nbytes,
        )


@dataclass(frozen=True)
class ExchangeBucket:
    """Start giving every rank the gradients of small entries of all ranks, which these have put
    into their buckets.

    pieces  what is in there, in order
    """

    pieces: tuple[Piece, ...]
    ticket: Ticket
    after: tuple[Ticket, ...] = ()

    @property
    def nbytes(self) -> int:
        """With the padding behind each piece."""
        return sum(in_bucket(piece.nbytes) for piece in self.pieces)

    @cached_property
    def effects(self) -> Effects:
        return Effects(
            "exchange",
            f"{len(self.pieces)} small gradients",
            FABRIC,
            self.nbytes,
            after=self.after,
            ticket=self.ticket,
            bucket=self.pieces,
        )


@dataclass(frozen=True)
class Wait:
    """Let compute wait for a fetch; `register` becomes a tensor of `layout` over the slot.

    slot    or neighbouring slots of parts of the value, of which the last is waited for here
    offset  first byte of the slot that the tensor lies over: of a share that is used by itself
    """

    ticket: Ticket
    slot: Slot
    layout: Layout
    register: Register
    name: str = ""
    offset: int = 0

    @cached_property
    def effects(self) -> Effects:
        return Effects(
            "wait",
            self.name,
            nbytes=self.layout.end_bytes,
            defines=(self.register,),
            views=self.slot,
            after=(self.ticket,),
            slot_begin=self.offset,
            viewed_as=self.layout.dtype,
        )


class LateChunk(NamedTuple):
    """Elements [first, last) of a late update, by its number among those of the schedule."""

    update: int
    first: int
    last: int


@dataclass(frozen=True)
class Run:
    """Compute a region.

    drops   registers that nobody reads afterwards
    ticket  if given, it is complete once compute has passed this instruction
    into    entries whose whole gradients are the outputs that the region places; nobody else reads
            those outputs
    late    the chunk of a late update that it computes, which makes nothing that is live outside
            the arena; None: it is a region of the graph
    """

    region: Region
    inputs: tuple[Register, ...]
    outputs: tuple[Register, ...]
    drops: tuple[Register, ...] = ()
    ticket: Ticket | None = None
    names: tuple[str, ...] = ()
    into: tuple[EntryIndex, ...] = ()
    late: LateChunk | None = None

    @cached_property
    def effects(self) -> Effects:
        return Effects(
            "run" if self.late is None else "update",
            self.region.text,
            region=self.region,
            reads=self.inputs,
            forgets=self.drops,
            defines=self.outputs,
            ticket=self.ticket,
            changes_live=self.late is None,
            into=self.into,
            nodes=self.names,
            on_host=self.region.on_host,
            writes=tuple([self.inputs[at] for at in self.region.writes]),
        )


@dataclass(frozen=True)
class Free:
    """Give a slot back; `register` must not be read any more.

    A later fetch into an overlapping range names, in its `after`, the last `Run` before this.
    """

    slot: Slot
    register: Register
    name: str = ""

    @cached_property
    def effects(self) -> Effects:
        return Effects(
            "free",
            self.name,
            nbytes=self.slot.nbytes,
            forgets=(self.register,),
            gives_back=self.slot,
        )


@dataclass(frozen=True)
class Reduce:
    """Start moving a gradient to its entry: it becomes the entry's gradient, or is added to it.

    With `of_nbytes`, the value is the tile from byte `begin` on of a gradient of that size; all
    tiles of a contribution come before those of the next one.

    stays   it is at home in the memory that compute made it in; nothing moves
    parts   register of what an `Exchange` has made of it: the sum of these goes home, in the order
            of ranks
    shared  all ranks take part, so that it is to be exchanged before (`passes/lower.py`)
    cast    it is narrower than its parameter, whose dtype is `cast.dtype`, and exact as it is
    share_nbytes  of the `nbytes`, those that go home on this rank, if it holds a share; 0: all
    bucketed  it is put into the bucket of the call, and goes home once an `ExchangeBucket` has
              exchanged all that is in there
    tile    of the gradient of what ranks hold shares of: this rank's part of it goes home
    shares  how ranks hold the value, all of a gradient or a tile; None: each has all of it
    """

    value: Register
    entry: EntryIndex
    after: tuple[Ticket, ...] = ()
    drop: bool = True
    name: str = ""
    nbytes: int = 0
    begin: int = 0
    of_nbytes: int = 0
    stays: bool = False
    parts: Register | None = None
    shared: bool = False
    cast: Cast | None = None
    share_nbytes: int = 0
    bucketed: bool = False
    tile: SharedRange | None = None
    shares: SharedRange | None = None

    @cached_property
    def effects(self) -> Effects:
        begin, end = self.begin, self.begin + (self.share_nbytes or self.nbytes)
        whole = None
        if self.tile is not None:
            whole, (begin, end) = (self.begin, self.begin + self.nbytes), self.tile.home
        parts = () if self.parts is None else (self.parts,)
        return Effects(
            "reduce",
            self.name,
            OUT,
            self.nbytes,
            reads=(self.value, *parts),
            forgets=(self.value, *parts) if self.drop else parts,
            home=HomeAccess(
                self.entry,
                begin,
                end,
                writes=True,
                role=GRADIENT,
                in_place=self.stays,
                of_nbytes=self.of_nbytes,
                tile=whole,
            ),
            after=self.after,
            changes_live=True,
            bucket=(Piece(self.entry, self.nbytes),) if self.bucketed else (),
            tile=self.tile,
        )


@dataclass(frozen=True)
class Store:
    """Start moving the bytes of a slot, which an update has written, to [begin, begin + nbytes) of
    an entry.

    offset  first byte of the slot that is read: of a share
    """

    entry: EntryIndex
    begin: int
    nbytes: int
    slot: Slot
    ticket: Ticket
    after: tuple[Ticket, ...] = ()
    name: str = ""
    offset: int = 0

    @cached_property
    def effects(self) -> Effects:
        return Effects(
            "store",
            self.name,
            OUT,
            self.nbytes,
            reads_slot=self.slot,
            home=HomeAccess(self.entry, self.begin, self.begin + self.nbytes, writes=True),
            after=self.after,
            ticket=self.ticket,
            slot_begin=self.offset,
        )


@dataclass(frozen=True)
class Borrow:
    """View an entry in place: `register` becomes a tensor of `layout` over its bytes, from `begin`
    on.

    For entries on a tier that compute can reach. Transfers of the same bytes are waited for.

    writes   whether compute changes the bytes
    on_host  they are for a region that the host computes, and rest in its memory
    """

    entry: EntryIndex
    begin: int
    layout: Layout
    register: Register
    writes: bool
    name: str = ""
    on_host: bool = False

    @cached_property
    def effects(self) -> Effects:
        nbytes = self.layout.end_bytes
        end = self.begin + nbytes
        return Effects(
            "borrow",
            self.name,
            nbytes=nbytes,
            defines=(self.register,),
            home=HomeAccess(self.entry, self.begin, end, True, self.writes, in_place=True),
            on_host=self.on_host,
        )


@dataclass(frozen=True)
class Offload:
    """Start moving a value that backward needs to `tier`, where it becomes a new entry.

    `register` becomes the handle of the entry, which lives as long as the handle. The value stays
    in device memory until a `Left` names `ticket`; nothing writes to it meanwhile.

    layout  of the value in the entry
    made    number among the entries that a call makes
    """

    value: Register
    tier: str
    layout: Layout
    register: Register
    made: int
    ticket: Ticket
    after: tuple[Ticket, ...] = ()
    name: str = ""

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @cached_property
    def effects(self) -> Effects:
        return Effects(
            "offload",
            self.name,
            OUT,
            self.nbytes,
            reads=(self.value,),
            defines=(self.register,),
            home=HomeAccess(
                EntryIndex(self.made),
                0,
                self.nbytes,
                writes=True,
                role=NEW,
                lasting=False,
                tier=self.tier,
            ),
            after=self.after,
            ticket=self.ticket,
        )


@dataclass(frozen=True)
class Left:
    """Let compute wait until the value in `register` is offloaded, and give its memory back."""

    ticket: Ticket
    register: Register
    nbytes: int = 0
    name: str = ""

    @cached_property
    def effects(self) -> Effects:
        return Effects(
            "left",
            self.name,
            nbytes=self.nbytes,
            forgets=(self.register,),
            after=(self.ticket,),
            changes_live=True,
        )


@dataclass(frozen=True)
class Drop:
    """Let go of a gradient that a late update has used.

    registers  over its bytes, which must not be read any more
    held       it stayed in memory outside the arena since backward
    """

    entry: EntryIndex
    registers: tuple[Register, ...]
    nbytes: int = 0
    held: bool = False
    name: str = ""

    @cached_property
    def effects(self) -> Effects:
        return Effects(
            "drop",
            self.name,
            nbytes=self.nbytes,
            forgets=self.registers,
            lets_go=self.nbytes if self.held else 0,
        )


SERIALS = count()
"""Source of `Schedule.serial`."""


@dataclass(frozen=True)
class Schedule:
    """One phase of one graph, ready to be walked.

    handles      register of each handle among the inputs; an EntryIndex points here
    inputs       number of registers that the call fills, from 0 on
    constants    registers that hold the same value in every call
    outputs      register or literal (None, an int) of each result
    sinks        entries that backward makes gradients of
    serial       tells schedules apart; unique in a process
    arena_bytes  bytes of the device arena that the slots lie in
    peak_bytes   largest sum of slots taken at once
    trains       a forward that a backward follows
    rows         updates of a step (`optimizer_step.Row`), so that it can be lowered anew
    holds        bytes that its calls have live outside the arena, if each region stands alone
    level_order  per instruction that changes live bytes, the numbers of the levels of `holds` that
                 it stands for; none, if they come one by one (`ir/joined_levels.py`)
    read_back    parameters that a backward reads, and their layouts in forward
    least_bytes  of an arena in which a call of either phase of its graph can be scheduled
    scratch_at   address, beyond the arena, from which on the slots lie; 0, if they lie in the arena
    operands     registers that hold the plain operands of late updates (`ir/late_updates.py`)
    copies       entries of a call that follow those of its handles: low-precision copies of these
                 (`passes/narrow_params.py`), or copies of the shares of all ranks
                 (`passes/keep_wholes.py`)
    traced_work  work of the phase as it was traced: without what passes recompute, or cut; None, if
                 it was not traced
    no_sync_of   serial of the backward of the same graph whose gradients ranks exchange; those of
                 this one are for this rank's sums. None: it is no such backward
    program      what it was lowered from, so that it can be arranged anew; None for a step
    """

    phase: Phase
    name: str
    instructions: tuple[Instruction, ...]
    handles: tuple[Register, ...]
    inputs: int
    constants: tuple[tuple[Register, Any], ...]
    outputs: tuple["Register | Literal", ...]
    registers: int
    sinks: tuple[EntryIndex, ...]
    serial: int
    arena_bytes: int
    peak_bytes: int
    budget_bytes: int | None
    names: Mapping[int, str]
    trains: bool = False
    rows: tuple[Any, ...] = ()
    holds: MemoryProfile = NOTHING_HELD
    level_order: tuple[tuple[int, ...], ...] = ()
    scratch_at: int = 0
    traced_work: Work | None = None
    least_bytes: int = 0
    read_back: tuple[tuple[EntryIndex, Layout], ...] = ()
    operands: tuple[Register, ...] = ()
    copies: tuple[CopyRead, ...] = ()
    no_sync_of: int | None = None
    program: "RegionProgram | None" = field(default=None, compare=False, repr=False)

    @property
    def call_kind(self) -> str:
        """Value of the phase, but "inference" for a forward that no backward follows, and with what
        sets it apart for a backward within `no_sync`."""
        if self.no_sync_of is not None:
            return "backward within no_sync"
        infers = self.phase is Phase.FORWARD and not self.trains
        return "inference" if infers else self.phase.value

    @cached_property
    def updates_late(self) -> bool:
        """Whether it computes late updates."""
        return any(isinstance(x, Run) and x.late is not None for x in self.instructions)

    @cached_property
    def gathers_inside(self) -> bool:
        """Whether a region gathers an entry by itself, as of a tiered tensor among the inputs that
        is no parameter: such an entry is not among those of the schedule."""
        return any(
            node.target is ops.gather
            for region in self.regions()
            for part in region.parts or (region,)
            if part.body is not None
            for node in part.body.nodes
        )

    def fetches(self) -> Iterator[Fetch]:
        return (i for i in self.instructions if isinstance(i, Fetch))

    @cached_property
    def effects(self) -> tuple[Effects, ...]:
        """Of its instructions, one by one."""
        return tuple([x.effects for x in self.instructions])

    @cached_property
    def collectives(self) -> tuple[tuple[str, int, int], ...]:
        """What crosses between ranks, kind by kind in order: kind, entry, bytes; of a bucket piece
        by piece."""
        gathers = [x for x in self.instructions if isinstance(x, Gather)]
        rows = [("gather", int(x.entry), x.nbytes) for x in gathers]
        for x in self.instructions:
            if isinstance(x, Exchange):
                rows.append(("exchange", int(x.entry), x.nbytes))
            elif isinstance(x, ExchangeBucket):
                rows += [("bucket", int(piece.entry), piece.nbytes) for piece in x.pieces]
        return tuple(rows)

    @cached_property
    def crossing_dtypes(self) -> tuple[tuple[str, int, str], ...]:
        """In which dtypes bytes cross between ranks, where as many of another dtype would cross
        alike: kind, entry, dtype of each gather and of each gradient that is made narrow."""
        values = self.program.values if self.program is not None else ()
        read = {value.entry: value.layout.dtype for value in values if value.share is not None}
        gathers = [x.entry for x in self.instructions if isinstance(x, Gather)]
        rows = [("gather", int(entry), str(read.get(entry))) for entry in gathers]
        narrow = sorted(self.narrow_gradients.items())
        return (*rows, *(("gradient", int(at), str(cast.copy_dtype)) for at, cast in narrow))

    def regions(self) -> list[Region]:
        """What it computes, in order."""
        return [x.region for x in self.effects if x.region is not None]

    @cached_property
    def lone_gradients(self) -> tuple[EntryIndex, ...]:
        """Entries for which a call makes one gradient, and that whole."""
        made = self._gradients()
        times = Counter(home.entry for home in made)
        return tuple(x.entry for x in made if times[x.entry] == 1 and not x.of_nbytes)

    @cached_property
    def narrow_gradients(self) -> Mapping[EntryIndex, Cast]:
        """Entries whose gradients are made in a narrower dtype."""
        sent = (x for x in self.instructions if isinstance(x, Reduce))
        return {x.entry: x.cast for x in sent if x.cast is not None}

    @cached_property
    def exchanged_shares(self) -> Mapping[EntryIndex, bool]:
        """Entries whose gradients ranks exchange, each getting what is of its share -> whether a
        gradient is so in tiles."""
        found: dict[EntryIndex, bool] = {}
        for x in self.instructions:
            if isinstance(x, Exchange) and x.shares is not None:
                found[x.entry] = x.is_tile or found.get(x.entry, False)
        return found

    @cached_property
    def staying(self) -> frozenset[EntryIndex]:
        """Entries whose gradients stay in the memory that compute makes them in."""
        return frozenset(home.entry for home in self._gradients() if home.in_place)

    @cached_property
    def changes_in_place(self) -> bool:
        """Whether it is a step that writes entries, moves nothing, and takes nothing of the
        arena."""
        rows = self.effects
        if self.phase is not Phase.STEP or any(x.is_transfer or x.takes for x in rows):
            return False
        return any(x.home is not None and x.writes_home for x in rows)

    @cached_property
    def staying_runs(self) -> "Mapping[int, tuple[Reduce, ...]]":
        """Index of the first of several gradients that stay, one right after the other -> all of
        them; each is whole, and dropped by the call."""
        runs: dict[int, list[Reduce]] = {}
        last = -1
        for index, x in enumerate(self.instructions):
            if not (isinstance(x, Reduce) and x.stays and x.drop and x.parts is None):
                last = -1
            elif not x.of_nbytes and not x.bucketed:
                last = index if last < 0 else last
                runs.setdefault(last, []).append(x)
            else:
                last = -1
        return {index: tuple(run) for index, run in runs.items() if len(run) > 1}

    @cached_property
    def at_rest(self) -> "tuple[Run | Reduce, ...]":
        """What it computes and which gradients it makes, in order, of a backward that moves
        nothing else and borrows all that it reads; each gradient is whole, the only one of its
        parameter, and dropped by the call. Nothing, of any other schedule."""
        if self.phase is not Phase.BACKWARD or not all(map(_is_at_rest, self.instructions)):
            return ()
        if len(self.lone_gradients) < len(self._gradients()):
            return ()
        return tuple(x for x in self.instructions if isinstance(x, Run | Reduce))

    @cached_property
    def borrows(self) -> "tuple[Borrow, ...]":
        """All that it borrows, in order."""
        return tuple(x for x in self.instructions if isinstance(x, Borrow))

    @cached_property
    def opening(self) -> "tuple[Borrow, ...]":
        """The borrows that it begins with, for what the device computes."""
        return tuple(takewhile(_is_for_device, self.instructions))  # type: ignore[arg-type]

    @cached_property
    def levels(self) -> tuple[LiveBytes, ...]:
        """Live bytes around each instruction that changes them, where these are known."""
        if not self.level_order:
            return self.holds.levels
        changing = [x for x in self.effects if x.changes_live]
        gradients = [
            SentGradient(numbers[0], home.nbytes, home.in_place)
            for numbers, x in zip(self.level_order, changing, strict=True)
            if (home := x.home) is not None and x.is_gradient
        ]
        return joined_levels(self.holds.levels, self.level_order, gradients)

    @cached_property
    def level_at(self) -> Mapping[int, LiveBytes]:
        """Index of each instruction that changes live bytes -> live bytes around it, where these
        are known."""
        changes = (i for i, x in enumerate(self.effects) if x.changes_live)
        return dict(zip(changes, self.levels, strict=False))

    def with_staying(self, entries: frozenset[EntryIndex]) -> "Schedule":
        """The schedule with the gradients of these entries left in the memory that compute makes
        them in."""
        if not entries:
            return self
        rows = [
            replace(x, stays=True) if isinstance(x, Reduce) and x.entry in entries else x
            for x in self.instructions
        ]
        return replace(self, instructions=tuple(rows), serial=next(SERIALS))

    def with_held(self, entries: frozenset[EntryIndex]) -> "Schedule":
        """The schedule of a forward with late updates whose operands `entries`, gradients, have
        stayed in the memory that backward made them in."""
        if not entries:
            return self
        rows = [
            replace(x, held=True) if isinstance(x, Drop) and x.entry in entries else x
            for x in self.instructions
        ]
        return replace(self, instructions=tuple(rows), serial=next(SERIALS))

    @cached_property
    def held_bytes(self) -> int:
        """Bytes of gradients that are held outside the arena when a call begins, and which it lets
        go of."""
        return sum(x.lets_go for x in self.effects)

    @cached_property
    def departing_bytes(self) -> int:
        """Upper bound, in bytes, on gradients in flight to their entries when a call of this
        schedule begins, and during it where no `LiveBytes.departing` is known: one is in flight
        while the next is made."""
        return 2 * max((home.nbytes for home in self._gradients()), default=0)

    def _gradients(self) -> Sequence[HomeAccess]:
        """The bytes of gradients that it sends, in order."""
        homes = [x.home for x in self.effects]
        return [h for h in homes if h is not None and h.role is GRADIENT]

    @cached_property
    def casts(self) -> tuple[tuple[EntryIndex, Cast], ...]:
        """Low-precision copies that it fetches."""
        return tuple(dict.fromkeys((f.entry, f.cast) for f in self.fetches() if f.cast))


def _is_for_device(x: Instruction) -> bool:
    """Whether an instruction lends the device an entry."""
    return isinstance(x, Borrow) and not x.on_host


def _is_at_rest(x: Instruction) -> bool:
    """Whether an instruction moves nothing, but a whole gradient that may rest where it is made."""
    if isinstance(x, Reduce):
        return x.drop and x.parts is None and not x.of_nbytes and not x.bucketed
    if isinstance(x, Run):
        return x.late is None and not x.region.on_host
    return _is_for_device(x)


@dataclass(frozen=True)
class Literal:
    """An output that is known without running: None, or a constant."""

    value: object


@dataclass(frozen=True)
class GradientOf(Literal):
    """The place of a gradient that was sent to its entry.

    None to autograd, unless hooks of the user wait there and need the gradient itself
    (`runtime/gradients/gradients.py`).
    """

    entry: EntryIndex


class Share(NamedTuple):
    """The bytes [begin, end) of a value that rest on this rank; the other ranks have the others.

    order     of its gather among those of the graph: all ranks gather in it, whatever each of them
              decides
    register  over these bytes alone, for a late update of them, before they are gathered; None:
              nobody updates them late
    updated   region behind the last chunk of that update: the gather starts there or later
    written   bytes that the update writes, from `begin` on
    tile      the value is a tile of what ranks hold shares of, and has these bytes of it; None: it
              is all of that
    """

    begin: int
    end: int
    order: int = 0
    register: Register | None = None
    updated: int = 0
    written: int = 0
    tile: SharedRange | None = None

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class ReadValue(NamedTuple):
    """A parameter, or an offloaded value, that regions read.

    first, last  regions that read it, by number
    register     of a tensor of `layout` over its bytes
    begin        first of its `nbytes` bytes in the entry, or in the entry's copy
    lasting      the entry outlives the step
    cast         the regions read the entry's copy in another dtype
    written      last region that writes it, a chunk of a late update: its bytes go home behind
                 that, while others read them; None: nobody writes it
    reach        an operand of a late update, which is used where it rests if compute reaches that
    in_place     it rests on the device, and is read there: nothing is fetched
    start        number of the region before which its fetch starts
    slot         its range of the arena; None as long as that is not decided, or if in place
    share        of the `nbytes`, those that rest on this rank: all ranks gather the others; None:
                 all of them
    gather       number of the region before which the gather of the others starts
    reader       first region that reads all bytes, where a late update reads the share before;
                 None: `first`
    kept_in      the entry in which all bytes are kept for later calls, once they are gathered;
                 None: they are not
    part_of      register of the value that it is a part of, in whose slot it lies: each part is
                 fetched, written and stored by itself; None: it is a value by itself
    in_parts     it has parts, which bring its bytes, and are read before it
    """

    entry: EntryIndex
    name: str
    register: Register
    layout: Layout
    begin: int
    nbytes: int
    first: int
    last: int
    lasting: bool = True
    cast: Cast | None = None
    written: int | None = None
    reach: bool = False
    in_place: bool = False
    start: int = 0
    slot: Slot | None = None
    share: Share | None = None
    gather: int = 0
    reader: int | None = None
    kept_in: EntryIndex | None = None
    part_of: Register | None = None
    in_parts: bool = False

    @property
    def writes(self) -> bool:
        """Whether a late update writes it."""
        return self.written is not None

    @property
    def read_whole(self) -> int:
        """First region that reads all bytes."""
        return self.first if self.reader is None else self.reader


Departure = Reduce | Offload | Left | Drop
"""What leaves the device, or has left, or was used up, between two regions. Nothing waits for
anything yet; the ticket of an offload, and of its `Left`, is its number among those of a call."""


@dataclass(frozen=True)
class RegionProgram:
    """One phase of a graph, by regions.

    outline       the schedule that it becomes, still without instructions
    regions       in order; nobody waits for any of them yet
    values        that they read, in the order of their first readers
    departures    departures[n]: what leaves before region n; one more than there are regions
    budget_bytes  of the arena, for what is fetched; None: unbounded
    late          updates that a forward is to compute as well (`late_updates.LateRows`)
    """

    outline: Schedule
    regions: tuple[Run, ...]
    values: tuple[ReadValue, ...]
    departures: tuple[tuple[Departure, ...], ...]
    budget_bytes: int | None = None
    late: Any = None

    @property
    def fetched(self) -> tuple[ReadValue, ...]:
        """The values that are not read in place."""
        return tuple(value for value in self.values if not value.in_place)

    @property
    def slotted(self) -> tuple[ReadValue, ...]:
        """Those of `fetched` that lie in a slot of their own, and not in that of another."""
        return tuple(value for value in self.fetched if value.part_of is None)

    def with_values(self, values: Iterable[ReadValue]) -> "RegionProgram":
        """The program with these values, of which something was decided."""
        return replace(self, values=tuple(values))
