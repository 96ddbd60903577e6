"""Proves schedules safe, without a device: each by itself, and one that hands over to the next.

Every access of every byte can be read off the effects of the instructions (`ir/effects.py`): a
fetch writes a slot, compute touches it at the runs that read its register, and through views at any
run until it is given back; a store or a gradient reads it; a borrow touches an entry where it
rests. Two accesses of the same bytes, one of
them writing, must be ordered by `happens_before.py`, the way that was meant.

What an update writes in a slot goes home, to where it was brought from, before the slot is given
back. A forward that updates parameters reads them behind that: no update writes bytes that a region
of the graph has read before, and who reads bytes of which some were updated reads them when all
were.

Ranks do not deadlock if each collective waits for what comes before it in a schedule alone, and all
ranks start those of one kind in the same order. The first is read off the tickets: none is waited
for that was not given out, and collectives of a kind are carried out in the order of the list. The
second is agreed on in each call before the first of them: no collective of any kind comes before
that. What a rank brings to each gather is the same one of equal shares. Gathers stand in the order
of their first readers, which is up to the graph alone. What is kept of them for later calls is what
was gathered, and all of it.

What the runtime promises beyond the list:

    a fetch comes after all compute that was submitted before its walk began
    a fetch comes after what earlier walks still move out of the bytes it will lie in, and after
    gradients that leave from there, whose end has no ticket; a gather likewise, of all it fills
    collectives of one kind begin and end in the order of their submission; of two that touch the
    same bytes, the second begins when the first has ended
    transfers of the same bytes of an entry take effect at home in the order of their submission,
    and a borrow waits for those before it
    what the host computes is in flight on the bytes that it was lent, as a transfer of them that
    was submitted then: it takes effect in that order, though the next instruction is walked
    meanwhile; it has plain values of the call in its own memory, as they were

That the memory of a gradient that stays is its own is read off its level (`memory/footprint.py`);
the runtime checks its bytes and strides once more before it keeps it.

`Walk` is the state of one walk of a schedule; `Proof` applies the rules, instruction after
instruction.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch

from zcompile.errors import ScheduleInvalid
from zcompile.ir.byte_ranges import ByteRanges
from zcompile.ir.effects import COMPUTE, ENTRY, FABRIC, IN, OUT, Effects, HomeAccess
from zcompile.ir.handover import Handover
from zcompile.ir.partition import SharedRange
from zcompile.ir.printer import instruction_row
from zcompile.ir.schedule import (
    CopyRead,
    EntryIndex,
    Literal,
    Piece,
    Register,
    Schedule,
    Slot,
    Ticket,
)
from zcompile.ir.types import ALIGNMENT, LiveBytes, Phase, aligned
from zcompile.verify.happens_before import (
    BEGUN,
    NEVER,
    Copies,
    HomeBytes,
    Span,
    Transfer,
    moved_and_borrowed,
    span_of,
    start,
)


@dataclass(frozen=True)
class ScheduleCall:
    """A schedule and the entries of its call.

    entries  key of the entry behind each index, the same in every call; empty: the index
    copies   (entry, dtype) -> entry of its copy
    """

    schedule: Schedule
    entries: Sequence[Hashable] = ()
    copies: Copies = field(default_factory=dict)

    def spans(self) -> list[Span | None]:
        """Per instruction, the bytes of an entry that it reads or writes."""
        homes = [x.home for x in self.schedule.effects]
        most = max((int(home.entry) for home in homes if home is not None), default=0)
        entries = self.entries or range(most + 1)
        return [span_of(home, entries, self.copies) for home in homes]


@dataclass(eq=False)
class SlotUse:
    """The use of a slot, from the instruction that takes it to its release.

    walk     number of the walk that it belongs to
    taker    effects of the instruction that takes it
    span     bytes of the entry that it brings; None: of none
    at       moment at which that instruction was submitted
    brought  the transfer, or compute, that wrote the slot last; a gather fills it after a fetch
    filled   bytes that are there by then, from the first on, or those of a share from where it
             begins
    touched  the last moment of compute that may have read or written the slot
    stores   transfers that read the slot
    unsaved  bytes of the slot, begin and end, that compute wrote and no store sends home
    """

    walk: int
    slot: Slot
    taker: Effects
    span: Span | None
    at: int
    brought: Transfer
    touched: int = NEVER
    stores: list[Transfer] = field(default_factory=list)
    freed: bool = False
    gathered: bool = False
    filled: int = -1
    unsaved: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.filled < 0:
            self.filled = self.taker.nbytes

    @property
    def name(self) -> str:
        return self.taker.name

    def goes_on_from(self, before: "SlotUse") -> bool:
        """Whether it brings the bytes of an entry that follow those of another, which fill their
        slot."""
        mine, its = self.taker.home, before.taker.home
        if mine is None or its is None or self.gathered or before.gathered:
            return False
        if before.filled != before.slot.nbytes or self.taker.slot_begin or before.taker.slot_begin:
            return False
        return mine._replace(begin=its.begin, end=its.end) == its and mine.begin == its.end

    def write(self, begin: int, end: int) -> None:
        """Note that compute writes those bytes of the slot."""
        if self.unsaved is not None:
            begin, end = min(begin, self.unsaved[0]), max(end, self.unsaved[1])
        self.unsaved = begin, end

    def save(self, begin: int, nbytes: int, to: Span | None) -> None:
        """Note that those bytes of the slot are sent to bytes of an entry."""
        if self.unsaved is None or self.span is None:
            return
        home = self.span.begin - self.taker.slot_begin + begin
        first, last = self.unsaved
        if to == Span(self.span.entry, home, home + nbytes) and begin <= first:
            self.unsaved = self.unsaved if begin + nbytes < last else None

    def holds(self, begin: int, nbytes: int) -> bool:
        """Whether those bytes of the slot were brought: of a share, as long as it is not gathered,
        no others."""
        first = 0 if self.gathered else self.taker.slot_begin
        return first <= begin and begin + nbytes <= first + self.filled


class _View(NamedTuple):
    """What a register lies over: bytes [begin, end) of the arena, in one slot or in several side by
    side."""

    uses: tuple[SlotUse, ...]
    begin: int
    end: int

    @property
    def span(self) -> Span | None:
        """The bytes of an entry that were brought there: of what is gathered, those of this rank's
        share, as each rank has a proof of its own; None: of none."""
        first, last = self.uses[0], self.uses[-1]
        if first.span is None or last.span is None:
            return None
        return Span(first.span.entry, first.span.begin, last.span.end)

    def write(self) -> None:
        """Note that compute writes all of it."""
        for use in self.uses:
            begin = max(0, self.begin - use.slot.address)
            use.write(begin, min(use.slot.nbytes, self.end - use.slot.address))


class _Tiles:
    """The tiles of one contribution to a gradient of `nbytes` that were sent."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = self.missing = nbytes
        self.left: ByteRanges[bool] = ByteRanges()


class Walk:
    """State of one walk of a schedule: registers, tickets, slots that are taken.

    number  tells it from the walks before it
    begun   the moment it began
    given   its fetches that were in flight by then
    torn    spans that compute uses in place and transfers move as well
    """

    def __init__(
        self, called: ScheduleCall, number: int, begun: int, given: Mapping[Ticket, SlotUse]
    ) -> None:
        self.schedule = schedule = called.schedule
        self.number = number
        self.begun = begun
        self.index = 0
        """Of the instruction at hand."""
        self.spans = called.spans()
        self.torn = moved_and_borrowed(schedule, self.spans)
        self.given = given
        self.last_run = NEVER
        self.transfers: dict[Ticket, Transfer] = {}
        self.moments: dict[Ticket, int] = {}
        self.leaving: dict[Ticket, Effects] = {}
        """Transfers of values of the call that nobody has waited for."""
        self.taken = {use.slot: use for use in given.values()}
        self.made_at = {Register(r): begun for r in range(schedule.inputs)}
        self.made_at |= dict.fromkeys(schedule.operands, begun)
        self.made_at |= {register: begun for register, _ in schedule.constants}
        self.bound: dict[Register, _View] = {}
        self.read: dict[Hashable, ByteRanges[bool]] = defaultdict(ByteRanges)
        """Bytes of entries that regions of the graph have read."""
        self.updated: dict[Hashable, ByteRanges[bool]] = defaultdict(ByteRanges)
        """Those that late updates have written."""
        self.borrowed: dict[Register, Span] = {}
        self.names: dict[Register, str] = {}
        """Of what lies in slots, or is borrowed."""
        self.written_in_place: dict[Register, Span] = {}
        self.lent_to_host: set[Register] = set()
        """Of those that are borrowed, those for what the host computes."""
        self._leaving: dict[EntryIndex, _Tiles] = {}
        self.parts: dict[Register, tuple[Effects, Transfer]] = {}
        """What an exchange makes of a gradient, until that goes home."""
        self.bucket: list[Piece] = []
        """Gradients that are in the bucket, and have not been exchanged."""
        self.agreement: Transfer | None = None
        """Of all ranks on what the call is."""
        self.unread: list[SlotUse] = []
        """What was gathered and is still to be read, in order."""
        own = len(schedule.handles)
        wholes = [(own + n, copy) for n, copy in enumerate(schedule.copies) if copy.whole]
        self.keeping = {EntryIndex(at): copy for at, copy in wholes if copy.made}
        """Entries in which what is gathered is still to be kept."""
        self.wholes = frozenset(EntryIndex(at) for at, _ in wholes)
        copies = ((own + n, copy.cast.copy_dtype) for n, copy in enumerate(schedule.copies))
        self._copies = {EntryIndex(at): dtype for at, dtype in copies}
        self.part: tuple[int, int, str] | None = None
        """Which share this rank has, of how many, and of what was gathered first."""
        self.last_collective: dict[str, Transfer] = {}
        """The collective of each kind that was started last."""

    def copy_dtype(self, x: Effects) -> torch.dtype | None:
        """The dtype of the copy that a fetch brings; None: it brings none."""
        if x.home is None:
            return None
        if x.home.role is not ENTRY:
            return x.home.copy_dtype
        return self._copies.get(x.home.entry)

    def written(self) -> list[Hashable]:
        """The entries whose bytes it writes."""
        rows = zip(self.schedule.effects, self.spans, strict=True)
        return [s.entry for x, s in rows if s is not None and x.writes_home]

    def new(self, ticket: Ticket) -> None:
        """Check that a ticket is new."""
        if ticket in self.transfers or ticket in self.moments:
            raise self.fail(f"ticket {ticket} is given out twice")

    def after(self, tickets: Sequence[Ticket]) -> tuple[list[int], list[Transfer]]:
        """The moments of compute and the transfers that these tickets stand for."""
        for ticket in tickets:
            if ticket not in self.transfers and ticket not in self.moments:
                raise self.fail(f"it waits for ticket {ticket}, which nothing before it gives out")
        return (
            [self.moments[t] for t in tickets if t in self.moments],
            [self.transfers[t] for t in tickets if t in self.transfers],
        )

    def use_of(self, slot: Slot, name: str) -> SlotUse:
        """The use that a slot has now."""
        if slot not in self.taken:
            raise self.fail(f"{name!r} has no slot {slot} that is taken here")
        return self.taken[slot]

    def uses_under(self, slot: Slot, name: str) -> tuple[SlotUse, ...]:
        """The use that a slot has now, or those of the parts of a value, side by side in it."""
        parts = [u for u in self.taken.values() if slot.address <= u.slot.address < slot.end]
        if slot in self.taken or not parts:
            return (self.use_of(slot, name),)
        parts.sort(key=lambda use: use.slot.address)
        ends = [slot.address, *(use.slot.end for use in parts)]
        fill = [use.slot.address for use in parts] == ends[:-1] and ends[-1] == slot.end
        if not fill or not all(use.goes_on_from(before) for before, use in pairwise(parts)):
            raise self.fail(f"{name!r} lies over parts that do not follow each other")
        return tuple(parts)

    def forget(self, register: Register) -> None:
        """Drop a register: it must not be read any more."""
        self.made_at.pop(register, None)
        self.bound.pop(register, None)
        self.borrowed.pop(register, None)
        self.written_in_place.pop(register, None)
        self.lent_to_host.discard(register)

    def define(self, register: Register, moment: int) -> None:
        """Give a register a new value, made at `moment`."""
        self.forget(register)
        self.made_at[register] = moment

    def tile_leaves(self, home: HomeAccess, name: str) -> None:
        """Check a tile of a gradient: none of its bytes was sent before in the same
        contribution."""
        begin, end, of_nbytes = home.begin, home.end, home.of_nbytes
        tiles = self._leaving.setdefault(home.entry, _Tiles(of_nbytes))
        if home.tile is not None:
            begin, end = home.tile
        if begin == end or end > of_nbytes or tiles.nbytes != of_nbytes:
            raise self.fail(
                f"bytes {begin} to {end} of the gradient of {name!r}, which has "
                f"{tiles.nbytes}, are no tile of it"
            )
        if tiles.left.over(begin, end):
            raise self.fail(
                f"bytes {begin} to {end} of the gradient of {name!r} leave before the "
                "contribution that they left in is whole"
            )
        tiles.left.put(begin, end, True)
        tiles.missing -= end - begin
        if not tiles.missing:
            del self._leaving[home.entry]

    def all_tiles_left(self) -> None:
        """Check that every contribution is whole."""
        for entry, tiles in self._leaving.items():
            raise self.fail(
                f"{tiles.missing} bytes of the gradient of {self.schedule.names.get(entry)!r} "
                "never leave"
            )

    def fail(self, why: str) -> ScheduleInvalid:
        """The error: the sentence, and the instructions around the one it is about."""
        rows = self.schedule.effects
        first = max(0, self.index - 3)
        shown = [
            f"  {'>' if i == self.index else ' '} {i:>5}  "
            + "  ".join(str(part) for part in instruction_row(rows[i]) if part)
            for i in range(first, min(len(rows), self.index + 2))
        ]
        return ScheduleInvalid(why, "\n".join(shown))


class Proof:
    """Proves one walk, or several that follow each other.

    now    counts what is submitted; a moment of compute is the count of its instruction
    taken  bytes of the slots that are taken
    peak   largest sum of those in the current walk
    """

    def __init__(self) -> None:
        self.now = BEGUN
        self.taken = self.peak = 0
        self._walks = 0
        self._arena: ByteRanges[SlotUse] = ByteRanges()
        self._homes: HomeBytes[SlotUse] = HomeBytes()

    def begin(self, called: ScheduleCall, given: Mapping[Ticket, SlotUse]) -> Walk:
        """Begin a walk; `given` are its fetches that were started before."""
        self._walks += 1
        self.peak = self.taken
        walk = Walk(called, self._walks, self.now, given)
        self._homes.watch(walk.written())
        return walk

    def step(self, walk: Walk, index: int) -> None:
        """Check the next instruction of `walk`, effect after effect.

        raises  ScheduleInvalid
        """
        walk.index = index
        self.now += 1
        x, span = walk.schedule.effects[index], walk.spans[index]
        if x.reads:
            self._read_registers(walk, x)
        if x.region is not None:
            _in_reach(walk, x)
            if walk.schedule.phase is not Phase.STEP:
                _follows_updates(walk, x)
        act = self._act(walk, x)
        if x.lane is FABRIC:
            act = _collective(walk, x, act)
        elif x.bucket:
            walk.bucket += x.bucket
        if x.ticket is not None:
            walk.new(x.ticket)
            if x.lane is COMPUTE:
                walk.moments[x.ticket] = self.now
            else:
                given = walk.given.get(x.ticket)
                walk.transfers[x.ticket] = act if given is None else given.brought
                if given is not None:
                    return  # it was started, and checked, in the walk before
        if x.takes is not None:
            self._take(walk, SlotUse(walk.number, x.takes, x, span, self.now, act))
        elif x.writes_slot is not None:
            self._write_slot(walk, x, act, span)
        if x.reads_slot is not None:
            self._read_slot(walk, x, act, span)
        if x.is_transfer and x.reads:
            self._send(walk, x, act, span)
        if x.gives_back is not None:
            self._give_back(walk, x)
        for register in x.forgets:
            walk.forget(register)
        for register in x.defines:
            walk.define(register, self.now)
            if x.lane is FABRIC:
                walk.parts[register] = x, act
        if x.views is not None:
            self._view(walk, x)
        if x.lane is COMPUTE:
            if span is not None:
                self._borrow(walk, x, span)
            if x.reads or x.region is not None:
                walk.last_run = self.now

    def end(self, walk: Walk) -> None:
        """Check what must hold once all of `walk` was stepped through.

        raises  ScheduleInvalid
        """
        for use in walk.taken.values():
            raise walk.fail(f"{use.name!r} is never given back")
        for exchanged, _ in walk.parts.values():
            raise walk.fail(f"the exchanged gradient of {exchanged.name!r} never goes home")
        for copy in walk.keeping.values():
            name = walk.schedule.names.get(copy.entry)
            raise walk.fail(f"all of {name!r} is out of date, and the call does not keep it")
        if walk.bucket:
            raise walk.fail(f"{len(walk.bucket)} gradients stay in the bucket: they never go home")
        for leaves in walk.leaving.values():
            raise walk.fail(f"nobody waits until {leaves.name!r} has left")
        walk.all_tiles_left()
        for result in walk.schedule.outputs:
            if not isinstance(result, Literal) and result not in walk.made_at:
                raise walk.fail(f"register {result} is returned, and nothing made it")
            if result in walk.borrowed:
                raise walk.fail(f"register {result} is returned, and lies in an entry's own bytes")

    def hand(self, walk: Walk, x: Effects, span: Span | None) -> SlotUse:
        """Start a fetch, which is of the walk after `walk`, here.

        raises  ScheduleInvalid
        """
        moment = self.now
        self.now += 1
        assert x.takes is not None, "what is handed over takes a slot"
        use = SlotUse(walk.number + 1, x.takes, x, span, self.now, start([moment], ()))
        self._take(walk, use)
        return use

    def _act(self, walk: Walk, x: Effects) -> Transfer:
        """What the instruction does, in the order that its tickets give: a transfer, or a moment of
        compute, which goes on once what it waits for is over."""
        if x.lane is COMPUTE:
            if x.after:
                if x.forgets:
                    _left(walk, x)
                for transfer in walk.after(x.after)[1]:
                    transfer.wait_at(self.now)
            return Transfer.at(self.now)
        moments, transfers = walk.after(x.after)
        if x.lane is IN or x.fills:
            moments.append(walk.begun)
        return start(moments, transfers)

    def _read_registers(self, walk: Walk, x: Effects) -> None:
        """Check that what an instruction reads is there; compute may write what it reads."""
        for register in x.reads:
            if register not in walk.made_at:
                if x.lane is COMPUTE:
                    why = "is read before its wait, or after it was given back"
                else:
                    why = "leaves, and nothing made it"
                raise walk.fail(f"register {register} {why}")
            if x.lane is not COMPUTE:
                continue
            if register in walk.parts:
                raise walk.fail(f"register {register} is exchanged, and computed with as a value")
            if register in walk.bound:
                view = walk.bound[register]
                for use in view.uses:
                    if use.gathered and x.updates:
                        raise walk.fail(f"{use.name!r} is updated after it is gathered")
                    self._touch(walk, use, x.updates or walk.schedule.phase is Phase.STEP)
                if register in x.writes:
                    view.write()
            elif register in walk.written_in_place:
                self._homes.write_in_place(walk.written_in_place[register], self.now)

    def _touch(self, walk: Walk, use: SlotUse, writes: bool = False) -> None:
        """Compute reads a slot and, in an update, `writes` it."""
        if writes and not all(store.ended_by(self.now) for store in use.stores):
            raise walk.fail(f"{use.name!r} is computed with while its store reads it")
        if not use.brought.ended_by(self.now):
            raise walk.fail(f"{use.name!r} is computed with while it is gathered")
        if use.span is not None and not self._homes.read(use.span, use, use.at, self.now):
            raise walk.fail(f"{use.name!r} was brought before what earlier compute made of it")
        use.touched = self.now

    def _take(self, walk: Walk, use: SlotUse) -> None:
        """Give the bytes of a slot to its new use, if nothing else uses them."""
        slot, name, nbytes = use.slot, use.name, use.taker.nbytes
        # A read from disk may fill whole granules, so that it reaches into the padding.
        if nbytes and aligned(use.taker.slot_begin + nbytes) > slot.nbytes:
            raise walk.fail(f"{name!r} brings {nbytes} bytes into {slot.nbytes}")
        if use.taker.tile is not None:
            _is_part_of_tile(walk, use.taker, use.taker.tile)
        elif use.taker.slot_begin % ALIGNMENT:
            raise walk.fail(f"the share of {name!r} lies between two multiples of {ALIGNMENT}")
        if slot.address % ALIGNMENT:
            raise walk.fail(
                f"the slot of {name!r} begins at {slot.address}, between two multiples "
                f"of {ALIGNMENT}"
            )
        if use.walk == walk.number:
            if slot.end > walk.schedule.arena_bytes:
                raise walk.fail(f"the slot of {name!r} ends beyond the arena")
            if slot.address < walk.schedule.scratch_at:
                raise walk.fail(f"the slot of {name!r} begins before the step scratch")
            walk.taken[slot] = use
        for old in self._arena.over(slot.address, slot.end):
            if not old.freed:
                raise walk.fail(f"{name!r} lies over {old.name!r}, which is taken")
            _comes_after(walk, use.taker, use.brought, old, old.walk == use.walk)
        self._arena.put(slot.address, slot.end, use)
        self.taken += slot.nbytes
        self.peak = max(self.peak, self.taken)
        budget = walk.schedule.budget_bytes
        if budget is not None and self.taken > budget:
            raise walk.fail(f"{self.taken} bytes are taken at once, the budget is {budget}")

    def _write_slot(self, walk: Walk, x: Effects, act: Transfer, span: Span | None) -> None:
        """Write bytes of a slot that is taken already, once all that used them is over."""
        assert x.writes_slot is not None
        use = walk.use_of(x.writes_slot, x.name)
        # A gather only reads the share that an update may store meanwhile.
        _comes_after(walk, x, act, use, not x.fills)
        if x.fills:
            self._fill(walk, x, act, use)
        elif x.lane is COMPUTE:
            use.touched = self.now
        else:
            use.brought, use.span, use.at, use.filled = act, span, self.now, x.nbytes

    def _fill(self, walk: Walk, x: Effects, act: Transfer, use: SlotUse) -> None:
        """Gather the shares of all ranks in a slot that this rank's was brought to."""
        if x.nbytes > use.slot.nbytes:
            raise walk.fail(f"{x.name!r} gathers {x.nbytes} bytes into {use.slot.nbytes}")
        if use.gathered:
            raise walk.fail(f"{x.name!r} is gathered twice")
        if use.name != x.name:
            raise walk.fail(f"{x.name!r} is gathered where {use.name!r} lies")
        if use.touched != NEVER and not use.stores:
            raise walk.fail(f"{x.name!r} is gathered, and its late update was not sent home")
        _is_a_share(walk, x, use)
        use.brought, use.filled, use.gathered = act, x.nbytes, True
        walk.unread.append(use)

    def _read_slot(self, walk: Walk, x: Effects, act: Transfer, span: Span | None) -> None:
        """Read bytes of a slot that is taken, and write them to an entry."""
        assert x.reads_slot is not None
        use = walk.use_of(x.reads_slot, x.name)
        if not use.brought.ended_by(self.now):
            raise walk.fail(f"{x.name!r} is read from its slot before its {_kind(use)} is over")
        if not act.starts_after(use.touched):
            raise walk.fail(
                f"the {x.kind} of {x.name!r} does not wait for the compute that writes it"
            )
        if not act.starts_after_end_of(use.brought):
            raise walk.fail(f"the {x.kind} of {x.name!r} does not wait for its {_kind(use)}")
        if not use.holds(x.slot_begin, x.nbytes):
            raise walk.fail(f"{x.name!r} reads {x.nbytes} bytes {_brought(x, use)}")
        if x.lane is COMPUTE:
            self._touch(walk, use)
            return
        if span is not None and not self._homes.store(span, use, use.touched, self.now):
            raise walk.fail(f"{x.name!r} goes home after later compute read it from there")
        if x.home is not None and (kept := walk.keeping.pop(x.home.entry, None)) is not None:
            _is_all_of(walk, x, use, kept)
        use.save(x.slot_begin, x.nbytes, span)
        use.stores.append(act)

    def _give_back(self, walk: Walk, x: Effects) -> None:
        """End the use of a slot."""
        assert x.gives_back is not None
        use = walk.use_of(x.gives_back, x.name)
        if not use.brought.ended_by(self.now):
            raise walk.fail(f"{x.name!r} is given back while its {_kind(use)} may still write")
        if use.unsaved is not None:
            raise walk.fail(
                f"{x.name!r} is given back, and what compute wrote there is not sent home"
            )
        use.freed = True
        # Views of the value may have been read by later regions than the value itself.
        use.touched = max(use.touched, walk.last_run)
        for register in [r for r, view in walk.bound.items() if use in view.uses]:
            walk.forget(register)
        del walk.taken[use.slot]
        self.taken -= use.slot.nbytes

    def _view(self, walk: Walk, x: Effects) -> None:
        """Let registers lie over the bytes of a slot, which are there by now."""
        assert x.views is not None
        uses = walk.uses_under(x.views, x.name)
        *parts, use = uses
        # The bytes of a fetch are not those of another, though both be over.
        other = bool(x.after) and use.taker.lane is IN and use.brought not in walk.after(x.after)[1]
        late = [use] if other else [u for u in uses if not u.brought.ended_by(self.now)]
        if late:
            waits = " and ".join(map(str, x.after)) or "none"
            raise walk.fail(
                f"it waits for ticket {waits}, the bytes come with {late[0].taker.ticket}"
            )
        nbytes = x.nbytes - sum(part.slot.nbytes for part in parts)
        if not use.holds(x.slot_begin, nbytes):
            raise walk.fail(f"{x.name!r} reads {nbytes} bytes {_brought(x, use)}")
        copied = walk.copy_dtype(use.taker)
        if copied is not None and x.viewed_as is not copied:
            raise walk.fail(f"{x.name!r} is read as {x.viewed_as}, and is a copy in {copied}")
        if use in walk.unread:
            if walk.unread[0] is not use:
                first = walk.unread[0].name
                raise walk.fail(
                    f"{x.name!r} is gathered after {first!r}, and read before: the order of "
                    "gathers is not that of their readers, as it is on other ranks"
                )
            walk.unread.pop(0)
        begin = x.views.address + x.slot_begin
        walk.names |= dict.fromkeys(x.defines, x.name)
        walk.bound |= dict.fromkeys(x.defines, _View(uses, begin, begin + x.nbytes))

    def _borrow(self, walk: Walk, x: Effects, span: Span) -> None:
        """Let registers lie over bytes of an entry where they rest."""
        if x.home is not None and x.home.entry in walk.wholes and x.writes_home:
            raise walk.fail(f"{x.name!r} is written where all of it rests, on this rank alone")
        if x.home is not None and x.home.entry in walk.keeping:
            raise walk.fail(f"{x.name!r} is read where it rests before it is kept there")
        if span in walk.torn:
            raise walk.fail(f"{x.name!r} is computed with where it rests, and moved as well")
        for register in x.defines:
            walk.borrowed[register], walk.names[register] = span, x.name
            if x.on_host:
                walk.lent_to_host.add(register)
            if x.writes_home:
                walk.written_in_place[register] = span
        if x.writes_home and not x.defines:
            self._homes.write_in_place(span, self.now)

    def _send(self, walk: Walk, x: Effects, act: Transfer, span: Span | None) -> None:
        """Check values that leave the device, and keep their memory until they have."""
        what = f"the gradient of {x.name!r}" if x.is_gradient else repr(x.name)
        for register in x.reads:
            # The runtime knows what arena bytes leave only for transfers without a ticket.
            held = x.ticket is not None and x.lane is OUT and register in walk.bound
            if register in walk.borrowed or held:
                raise walk.fail(
                    f"{what} lies in bytes of an entry or of the arena, which may change while it "
                    "leaves"
                )
            if not act.starts_after(walk.made_at[register]) and register not in walk.parts:
                raise walk.fail(f"{what} leaves before it is computed")
        if x.lane is FABRIC:
            return  # it is at home once it is summed up
        _parts_leave(walk, x, act)
        made = max(walk.made_at[register] for register in x.reads if register not in walk.parts)
        for register in x.reads:
            walk.parts.pop(register, None)
        if span is not None and not self._homes.store(span, None, made, self.now):
            raise walk.fail(f"{x.name!r} goes home after later compute read it from there")
        if x.ticket is not None:
            walk.leaving[x.ticket] = x
        if x.home is not None and x.is_gradient:
            if x.home.of_nbytes:
                walk.tile_leaves(x.home, x.name)
            if x.stays:
                _stays(walk, x, x.home)


def _in_reach(walk: Walk, x: Effects) -> None:
    """Check that the host computes with what it was lent in its own memory, and with values that
    the call was given, and the device with nothing that the host was lent."""
    for register in x.reads:
        if x.on_host:
            given = register < walk.schedule.inputs and register not in walk.borrowed
            if register not in walk.lent_to_host and not given:
                raise walk.fail(f"the host computes with register {register}, which it is not lent")
        elif register in walk.lent_to_host:
            raise walk.fail(f"the device computes with register {register}, which the host is lent")
    if x.on_host and (x.defines or x.ticket is not None or x.into):
        raise walk.fail("what the host computes is an update in place, which nothing waits for")


def _follows_updates(walk: Walk, x: Effects) -> None:
    """Check that late updates come before what reads the same bytes of an entry, and that of what a
    region of the graph reads all is updated, or nothing."""
    for register in x.reads:
        view = walk.bound.get(register)
        span = walk.borrowed.get(register) if view is None else view.span
        if span is None:
            continue
        name = walk.names[register]
        read, updated = walk.read[span.entry], walk.updated[span.entry]
        if register in x.writes:
            if read.over(span.begin, span.end):
                raise walk.fail(f"{name!r} is updated after compute has read it")
            updated.put(span.begin, span.end, True)
        elif not x.updates:
            if 0 < updated.bytes_over(span.begin, span.end) < span.end - span.begin:
                raise walk.fail(f"{name!r} is read, and only a part of it is updated")
            read.put(span.begin, span.end, True)


def _collective(walk: Walk, x: Effects, act: Transfer) -> Transfer:
    """Check the order of a collective; returns what it does, which the lane puts behind the one of
    its kind before."""
    if x.ticket is None:
        raise walk.fail(f"nobody can wait for the {x.kind} of {x.name!r}")
    last = walk.last_collective.get(x.kind)
    if last is not None:
        act = start([act.passed], [last, *act.after])
    if x.is_agreement:
        if walk.agreement is not None or walk.last_collective:
            raise walk.fail("the ranks agree on the call after its first collective")
        walk.agreement = act
    elif walk.agreement is None or not act.starts_after_end_of(walk.agreement):
        raise walk.fail(
            f"the {x.kind} of {x.name!r} does not wait until the ranks agree on the call"
        )
    if x.bucket:
        if list(x.bucket) != walk.bucket:
            raise walk.fail("what is exchanged is not what was put into the bucket")
        walk.bucket.clear()
        if not act.starts_after(walk.last_run):
            raise walk.fail("the bucket leaves before what is in it was computed")
    walk.last_collective[x.kind] = act
    return act


def _is_a_share(walk: Walk, x: Effects, use: SlotUse) -> None:
    """Check that what this rank brings to a gather is a share, and as with the other gathers, the
    same one of as many: as one in another dtype would not be. Its dtype is compared where a copy is
    read."""
    begin, nbytes, tile = use.taker.slot_begin, use.taker.nbytes, x.tile
    if tile != use.taker.tile or (tile is not None and tile.nbytes != x.nbytes):
        raise walk.fail(f"{x.name!r} is gathered as another range than what was brought of it")
    if tile is not None:
        _is_same_rank(walk, x, tile.rank, tile.ranks)
        return
    if not nbytes or x.nbytes % nbytes or begin % nbytes:
        raise walk.fail(
            f"{nbytes} bytes of {x.name!r} from {begin} on are no share of the {x.nbytes} that are "
            "gathered"
        )
    rank, ranks = begin // nbytes, x.nbytes // nbytes
    if rank >= ranks:
        raise walk.fail(
            f"{x.name!r} is gathered with this rank's share as number {rank} of {ranks}"
        )
    _is_same_rank(walk, x, rank, ranks)


def _is_same_rank(walk: Walk, x: Effects, rank: int, ranks: int) -> None:
    """Check that this rank has the same share in all that is gathered, of as many."""
    if walk.part is None:
        walk.part = rank, ranks, x.name
    elif walk.part[:2] != (rank, ranks):
        first, of, name = walk.part
        raise walk.fail(
            f"{x.name!r} is gathered with this rank's share as number {rank} of {ranks}, and "
            f"{name!r} as number {first} of {of}"
        )


def _is_part_of_tile(walk: Walk, x: Effects, tile: SharedRange) -> None:
    """Check that what a fetch brings of a tile is what this rank's share has of it, in its
    place."""
    assert x.home is not None, "it is a fetch"
    first, last = tile.own
    if (x.slot_begin, x.nbytes) != (first, last - first) or (x.home.begin, x.home.end) != tile.home:
        raise walk.fail(
            f"bytes {x.home.begin} to {x.home.end} of {x.name!r} are brought to {x.slot_begin}, "
            "and are not what this rank holds of the tile"
        )


def _is_all_of(walk: Walk, x: Effects, use: SlotUse, kept: CopyRead) -> None:
    """Check that what is kept for later calls is what all ranks have brought, and all of it."""
    assert x.home is not None
    of = None if use.taker.home is None else use.taker.home.entry
    if not use.gathered or of != kept.entry:
        raise walk.fail(
            f"{x.name!r} is kept for later calls, and is not what ranks have gathered of it"
        )
    if (x.home.begin, x.home.end, x.slot_begin) != (0, kept.nbytes, 0):
        raise walk.fail(f"of {x.name!r} only a part is kept for later calls")


def _parts_leave(walk: Walk, x: Effects, act: Transfer) -> None:
    """Check that a gradient which is exchanged goes home once that is over, and as itself."""
    if not x.is_gradient:
        return
    for register in x.reads:
        if register not in walk.parts:
            continue
        exchange, arrives = walk.parts[register]
        if not act.starts_after_end_of(arrives):
            raise walk.fail(f"the gradient of {x.name!r} goes home before it is exchanged")
        if exchange.name != x.name or exchange.reads[0] not in x.reads:
            raise walk.fail(
                f"the gradient of {x.name!r} goes home as the exchanged one of {exchange.name!r}"
            )
        if exchange.tile != x.tile:
            raise walk.fail(f"the gradient of {x.name!r} goes home as another tile of it")
        if exchange.nbytes != x.nbytes:
            raise walk.fail(
                f"{x.nbytes} bytes are the gradient of {x.name!r}, and {exchange.nbytes} are "
                "exchanged of it"
            )


def _brought(x: Effects, use: SlotUse) -> str:
    """Which bytes were there for one who reads others, for people."""
    begin = use.taker.slot_begin
    if use.gathered or not begin:
        return f"of {use.filled} that were brought"
    at = f"from {x.slot_begin} on" if x.slot_begin else "of it"
    return f"{at}, and only its share, {begin} to {begin + use.filled}, was brought"


def _kind(use: SlotUse) -> str:
    return use.taker.kind


def _comes_after(walk: Walk, x: Effects, act: Transfer, old: SlotUse, stores: bool) -> None:
    """Check that all that used bytes of a slot before is over when `act` writes them.

    stores  whether transfers out of the old use are looked at; those of an earlier walk are waited
            for by the runtime
    """
    whose = f"the {x.kind} of {x.name!r} does not wait for"
    if not act.starts_after(old.touched):
        raise walk.fail(f"{whose} the compute that reads {old.name!r} in the same bytes")
    if not act.starts_after_end_of(old.brought):
        raise walk.fail(f"{whose} the {_kind(old)} of {old.name!r} into the same bytes")
    if stores and not all(map(act.starts_after_end_of, old.stores)):
        raise walk.fail(f"{whose} the store of {old.name!r} from the same bytes")


def _stays(walk: Walk, x: Effects, home: HomeAccess) -> None:
    """Check a gradient that becomes an entry in place.

    It must be all that comes for the entry, in memory of its own, and the call reads it no more.
    """
    if home.entry not in walk.schedule.lone_gradients:
        raise walk.fail(f"the gradient of {x.name!r} stays, and is not all that comes for it")
    if not x.forgets:
        raise walk.fail(f"the gradient of {x.name!r} stays, and is read later as a value")
    if not walk.schedule.level_at.get(walk.index, LiveBytes()).alone:
        raise walk.fail(f"the gradient of {x.name!r} stays, in memory that is not its own")


def _left(walk: Walk, x: Effects) -> None:
    """Check that the values whose memory compute gives back are those it waits for."""
    leaving = [walk.leaving.pop(ticket) for ticket in x.after if ticket in walk.leaving]
    for register in x.forgets:
        if not any(register in leaves.reads for leaves in leaving):
            raise walk.fail(f"register {register} does not leave with ticket {x.after[0]}")
        if register not in walk.made_at:
            raise walk.fail(f"the memory of {x.name!r} was given back before")


def verify_schedule(schedule: Schedule, entries: Sequence[Hashable] = ()) -> None:
    """Prove one schedule safe by itself.

    entries  key of the entry behind each index; empty: all are different
    raises   ScheduleInvalid with the sentence and the instruction, on the first unsafe one
    """
    proof = Proof()
    walk = proof.begin(ScheduleCall(schedule, entries), {})
    for index in range(len(schedule.instructions)):
        proof.step(walk, index)
    proof.end(walk)
    _account(walk, proof.peak)
    _gradients_are_placed_alone(walk)


def verify_handover(now: ScheduleCall, then: ScheduleCall, handover: Handover) -> None:
    """Prove `then` safe right after `now`, with the fetches that are handed over in flight by then.

    Both are safe by themselves. What one writes and the other fetches is known by their entries.

    raises  ScheduleInvalid, which shows the schedule that is not safe beside the other
    """
    proof = Proof()
    first = proof.begin(now, {})
    for index in handover.starts:
        if not 0 <= index < len(now.schedule.instructions):
            raise first.fail(f"fetches are handed over after instruction {index}, which it has not")
    if handover.starts and then.schedule.scratch_at:
        raise first.fail("fetches are handed over into memory that graphs hold until then")
    # Walk `now`, and start the fetches that it hands over.
    given: dict[Ticket, SlotUse] = {}
    fetches = {x: i for i, x in enumerate(then.schedule.effects) if x.lane is IN}
    spans = then.spans()
    for index in range(len(now.schedule.instructions)):
        proof.step(first, index)
        for fetch in handover.starts.get(index, ()):
            x = fetch.effects
            ticket = _may_be_handed(first, x, fetches, given)
            given[ticket] = proof.hand(first, x, spans[fetches[x]])
    proof.end(first)
    if proof.peak != handover.peak_bytes:
        raise first.fail(f"the peak of both is {proof.peak} bytes, it says {handover.peak_bytes}")
    # Walk `then` with those fetches in flight.
    second = proof.begin(then, given)
    for index in range(len(then.schedule.instructions)):
        proof.step(second, index)
    proof.end(second)


def _may_be_handed(
    walk: Walk, x: Effects, fetches: Mapping[Effects, int], given: Mapping[Ticket, SlotUse]
) -> Ticket:
    """Check that a fetch is one of the next schedule, handed over once, and can be foreseen.

    returns  its ticket
    """
    if x not in fetches or x.ticket is None:
        raise walk.fail(f"the fetch of {x.name!r} is handed over, which the next has not")
    if x.ticket in given:
        raise walk.fail(f"the fetch of {x.name!r} is handed over twice")
    if x.home is None or not x.home.lasting:
        raise walk.fail(f"{x.name!r} is handed over, which is new in every call")
    return x.ticket


def _account(walk: Walk, peak: int) -> None:
    """Check that a schedule's own numbers of bytes are true, to the byte."""
    schedule = walk.schedule
    slots = (x.takes for x in schedule.effects)
    end = max((slot.end for slot in slots if slot is not None), default=0)
    if end != schedule.arena_bytes:
        raise walk.fail(f"the slots end at {end}, the schedule says {schedule.arena_bytes}")
    if peak != schedule.peak_bytes:
        raise walk.fail(f"the peak is {peak} bytes, the schedule says {schedule.peak_bytes}")
    if schedule.budget_bytes is not None and end > schedule.budget_bytes:
        raise walk.fail(f"the slots end at {end}, the budget is {schedule.budget_bytes}")


def _gradients_are_placed_alone(walk: Walk) -> None:
    """Check outputs that a region makes in the memory of a gradient's entry.

    Each is sent as that gradient, and nobody else reads it: from then on it may change.
    """
    schedule, readers = walk.schedule, dict[Register, list[Effects]]()
    for x in schedule.effects:
        for register in x.reads:
            readers.setdefault(register, []).append(x)
    for x in schedule.effects:
        if x.region is None or not (x.into or x.region.placed):
            continue
        if len(x.into) != len(x.region.placed):
            raise walk.fail(f"{x.name!r} places another number of outputs than it is told")
        for at, entry in zip(x.region.placed, x.into, strict=True):
            found = readers.get(x.defines[at], [])
            if len(found) != 1 or not _is_whole_gradient(found[0], entry):
                name = schedule.names.get(entry, str(entry))
                raise walk.fail(f"what is made as the gradient of {name!r} is not that alone")


def _is_whole_gradient(x: Effects, entry: EntryIndex) -> bool:
    """Whether it sends all of the gradient of `entry`, which is not read afterwards."""
    home = x.home
    return (
        home is not None
        and x.is_gradient
        and (home.entry, home.of_nbytes, bool(x.forgets))
        == (
            entry,
            0,
            True,
        )
    )
