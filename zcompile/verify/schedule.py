"""Proves schedules safe, without a device: each by itself, and one that hands over to the next.

Every access of every byte can be read off the list: a fetch writes a slot, compute touches it at
the runs that read its register, and through views at any run until it is given back; a store or a
gradient reads it; a borrow touches an entry where it rests. Two accesses of the same bytes, one of
them writing, must be ordered by `happens_before.py`, the way that was meant. What the runtime
promises beyond the list:

    a fetch comes after all compute that was submitted before its walk began
    a fetch comes after what earlier walks still move out of the bytes it will lie in, and after
    gradients that leave from there, whose end has no ticket
    transfers of the same bytes of an entry take effect at home in the order of their submission,
    and a borrow waits for those before it

That the memory of a gradient that stays is its own is read off its level (`memory/footprint.py`);
the runtime checks its bytes and strides once more before it keeps it.

`Walk` is the state of one walk of a schedule; `Proof` applies the rules, instruction after
instruction.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from zcompile.errors import ScheduleInvalid
from zcompile.ir.byte_ranges import ByteRanges
from zcompile.ir.handover import Handover
from zcompile.ir.printer import instruction_row
from zcompile.ir.schedule import (
    Borrow,
    EntryIndex,
    Fetch,
    Free,
    Instruction,
    Left,
    Literal,
    Offload,
    Reduce,
    Register,
    Run,
    Schedule,
    Slot,
    Store,
    Ticket,
    Wait,
)
from zcompile.ir.types import ALIGNMENT, LiveBytes, aligned
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
        rows = self.schedule.instructions
        most = max((int(x.entry) for x in rows if isinstance(x, Fetch | Store | Borrow)), default=0)
        entries = self.entries or range(most + 1)
        return [
            span_of(x, entries, self.copies) if isinstance(x, Fetch | Store | Borrow) else None
            for x in rows
        ]


@dataclass(eq=False)
class SlotUse:
    """The use of a slot, from the fetch that takes it to its release.

    walk     number of the walk that it belongs to
    span     bytes of the entry that it brings
    at       moment at which the fetch was submitted
    brought  the transfer of the fetch
    touched  the last moment of compute that may have read or written the slot
    stores   transfers to the entry that read the slot
    """

    walk: int
    fetch: Fetch
    span: Span
    at: int
    brought: Transfer
    touched: int = NEVER
    stores: list[Transfer] = field(default_factory=list)
    freed: bool = False


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
        self.leaving: dict[Ticket, Offload] = {}
        """Values whose departure compute has not waited for."""
        self.taken = {use.fetch.slot: use for use in given.values()}
        self.made_at = {Register(r): begun for r in range(schedule.inputs)}
        self.made_at |= {register: begun for register, _ in schedule.constants}
        self.bound: dict[Register, SlotUse] = {}
        self.borrowed: dict[Register, Span] = {}
        self.written_in_place: dict[Register, Span] = {}
        self._leaving: dict[EntryIndex, _Tiles] = {}

    @property
    def span(self) -> Span:
        """The bytes of an entry that the current instruction reads or writes."""
        span = self.spans[self.index]
        assert span is not None
        return span

    def written(self) -> list[Hashable]:
        """The entries whose bytes it writes."""
        rows = zip(self.schedule.instructions, self.spans, strict=True)
        return [s.entry for x, s in rows if s is not None and _writes(x)]

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

    def forget(self, register: Register) -> None:
        """Drop a register: it must not be read any more."""
        self.made_at.pop(register, None)
        self.bound.pop(register, None)
        self.borrowed.pop(register, None)
        self.written_in_place.pop(register, None)

    def define(self, register: Register, moment: int) -> None:
        """Give a register a new value, made at `moment`."""
        self.forget(register)
        self.made_at[register] = moment

    def tile_leaves(self, reduce: Reduce) -> None:
        """Check a tile of a gradient: none of its bytes was sent before in the same
        contribution."""
        begin, end = reduce.begin, reduce.begin + reduce.nbytes
        tiles = self._leaving.setdefault(reduce.entry, _Tiles(reduce.of_nbytes))
        if not reduce.nbytes or end > reduce.of_nbytes or tiles.nbytes != reduce.of_nbytes:
            raise self.fail(
                f"bytes {begin} to {end} of the gradient of {reduce.name!r}, which has "
                f"{tiles.nbytes}, are no tile of it"
            )
        if tiles.left.over(begin, end):
            raise self.fail(
                f"bytes {begin} to {end} of the gradient of {reduce.name!r} leave before the "
                "contribution that they left in is whole"
            )
        tiles.left.put(begin, end, True)
        tiles.missing -= reduce.nbytes
        if not tiles.missing:
            del self._leaving[reduce.entry]

    def all_tiles_left(self) -> None:
        """Check that every contribution is whole."""
        for entry, tiles in self._leaving.items():
            raise self.fail(
                f"{tiles.missing} bytes of the gradient of {self.schedule.names.get(entry)!r} "
                "never leave"
            )

    def fail(self, why: str) -> ScheduleInvalid:
        """The error: the sentence, and the instructions around the one it is about."""
        rows = self.schedule.instructions
        first = max(0, self.index - 3)
        shown = [
            f"  {'>' if i == self.index else ' '} {i:>5}  "
            + "  ".join(str(part) for part in instruction_row(rows[i]) if part is not None)
            for i in range(first, min(len(rows), self.index + 2))
        ]
        return ScheduleInvalid(why, "\n".join(shown))


def _writes(x: Instruction) -> bool:
    return isinstance(x, Store) or (isinstance(x, Borrow) and x.writes)


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
        """Check the next instruction of `walk`.

        raises  ScheduleInvalid
        """
        walk.index = index
        self.now += 1
        match walk.schedule.instructions[index]:
            case Fetch() as fetch:
                self._fetch(walk, fetch)
            case Wait() as wait:
                self._wait(walk, wait)
            case Run() as run:
                self._run(walk, run)
            case Free() as free:
                self._free(walk, free)
            case Reduce() as reduce:
                self._reduce(walk, reduce)
            case Store() as store:
                self._store(walk, store)
            case Borrow() as borrow:
                self._borrow(walk, borrow)
            case Offload() as offload:
                self._offload(walk, offload)
            case Left() as left:
                _left(walk, left, self.now)

    def end(self, walk: Walk) -> None:
        """Check what must hold once all of `walk` was stepped through.

        raises  ScheduleInvalid
        """
        for use in walk.taken.values():
            raise walk.fail(f"{use.fetch.name!r} is never given back")
        for offload in walk.leaving.values():
            raise walk.fail(f"nobody waits until {offload.name!r} has left")
        walk.all_tiles_left()
        for result in walk.schedule.outputs:
            if not isinstance(result, Literal) and result not in walk.made_at:
                raise walk.fail(f"register {result} is returned, and nothing made it")
            if result in walk.borrowed:
                raise walk.fail(f"register {result} is returned, and lies in an entry's own bytes")

    def hand(self, walk: Walk, fetch: Fetch, span: Span) -> SlotUse:
        """Start `fetch`, which is of the walk after `walk`, here.

        raises  ScheduleInvalid
        """
        moment = self.now
        self.now += 1
        use = SlotUse(walk.number + 1, fetch, span, self.now, start([moment], ()))
        self._take(walk, use)
        return use

    def _fetch(self, walk: Walk, fetch: Fetch) -> None:
        moments, transfers = walk.after(fetch.after)
        walk.new(fetch.ticket)
        if fetch.ticket in walk.given:
            walk.transfers[fetch.ticket] = walk.given[fetch.ticket].brought
            return
        brought = start([walk.begun, *moments], transfers)
        use = SlotUse(walk.number, fetch, walk.span, self.now, brought)
        self._take(walk, use)
        walk.transfers[fetch.ticket] = brought
        walk.taken[fetch.slot] = use

    def _take(self, walk: Walk, use: SlotUse) -> None:
        """Give the bytes of a fetch's slot to it, if nothing else uses them."""
        fetch, slot = use.fetch, use.fetch.slot
        # A read from disk may fill whole granules, so that it reaches into the padding.
        if fetch.nbytes and aligned(fetch.nbytes) > slot.nbytes:
            raise walk.fail(f"{fetch.name!r} brings {fetch.nbytes} bytes into {slot.nbytes}")
        if slot.address % ALIGNMENT:
            raise walk.fail(
                f"the slot of {fetch.name!r} begins at {slot.address}, between two multiples "
                f"of {ALIGNMENT}"
            )
        if use.walk == walk.number and slot.end > walk.schedule.arena_bytes:
            raise walk.fail(f"the slot of {fetch.name!r} ends beyond the arena")
        if use.walk == walk.number and slot.address < walk.schedule.scratch_at:
            raise walk.fail(f"the slot of {fetch.name!r} begins before the step scratch")
        for old in self._arena.over(slot.address, slot.end):
            self._may_overwrite(walk, use, old)
        self._arena.put(slot.address, slot.end, use)
        self.taken += slot.nbytes
        self.peak = max(self.peak, self.taken)
        budget = walk.schedule.budget_bytes
        if budget is not None and self.taken > budget:
            raise walk.fail(f"{self.taken} bytes are taken at once, the budget is {budget}")

    def _may_overwrite(self, walk: Walk, use: SlotUse, old: SlotUse) -> None:
        """Check that the use `old` of the same bytes is over when the fetch of `use` starts."""
        new, name = use.fetch.name, old.fetch.name
        if not old.freed:
            raise walk.fail(f"{new!r} lies over {name!r}, which is taken")
        if not use.brought.starts_after(old.touched):
            raise walk.fail(
                f"the fetch of {new!r} does not wait for the compute that "
                f"reads {name!r} in the same bytes"
            )
        if not use.brought.starts_after_end_of(old.brought):
            raise walk.fail(
                f"the fetch of {new!r} does not wait for the fetch of {name!r} into the same bytes"
            )
        if old.walk == use.walk and not all(map(use.brought.starts_after_end_of, old.stores)):
            raise walk.fail(
                f"the fetch of {new!r} does not wait for the store of {name!r} from the same bytes"
            )

    def _wait(self, walk: Walk, wait: Wait) -> None:
        use = walk.use_of(wait.slot, wait.name)
        if use.fetch.ticket != wait.ticket:
            raise walk.fail(
                f"it waits for ticket {wait.ticket}, the bytes come with {use.fetch.ticket}"
            )
        end = (wait.layout.offset + wait.layout.span) * wait.layout.dtype.itemsize
        if end > use.fetch.nbytes:
            raise walk.fail(
                f"{wait.name!r} reads {end} bytes of {use.fetch.nbytes} that were brought"
            )
        use.brought.wait_at(self.now)
        walk.define(wait.register, self.now)
        walk.bound[wait.register] = use

    def _run(self, walk: Walk, run: Run) -> None:
        for register in run.inputs:
            if register not in walk.made_at:
                raise walk.fail(
                    f"register {register} is read before its wait, or after it was given back"
                )
            if register in walk.bound:
                self._touch(walk, walk.bound[register])
            elif register in walk.written_in_place:
                self._homes.write_in_place(walk.written_in_place[register], self.now)
        for register in run.drops:
            walk.forget(register)
        for register in run.outputs:
            walk.define(register, self.now)
        walk.last_run = self.now
        if run.ticket is not None:
            walk.new(run.ticket)
            walk.moments[run.ticket] = self.now

    def _touch(self, walk: Walk, use: SlotUse) -> None:
        """Compute reads and, in an optimizer's step, writes a slot."""
        name = use.fetch.name
        if not all(store.ended_by(self.now) for store in use.stores):
            raise walk.fail(f"{name!r} is computed with while its store reads it")
        if not self._homes.read(use.span, use, use.at, self.now):
            raise walk.fail(f"{name!r} was brought before what earlier compute made of it")
        use.touched = self.now

    def _free(self, walk: Walk, free: Free) -> None:
        use = walk.use_of(free.slot, free.name)
        if not use.brought.ended_by(self.now):
            raise walk.fail(f"{free.name!r} is given back while its fetch may still write")
        use.freed = True
        # Views of the value may have been read by later regions than the value itself.
        use.touched = max(use.touched, walk.last_run)
        walk.forget(free.register)
        for register in [r for r, bound in walk.bound.items() if bound is use]:
            walk.forget(register)
        del walk.taken[free.slot]
        self.taken -= free.slot.nbytes

    def _reduce(self, walk: Walk, reduce: Reduce) -> None:
        if reduce.value not in walk.made_at:
            raise walk.fail(f"register {reduce.value} is sent home, and nothing made it")
        if reduce.value in walk.borrowed:
            raise walk.fail(
                f"the gradient of {reduce.name!r} lies in an entry's own bytes, "
                "which may change while it leaves"
            )
        leaves = start(*walk.after(reduce.after))
        if not leaves.starts_after(walk.made_at[reduce.value]):
            raise walk.fail(f"the gradient of {reduce.name!r} leaves before it is computed")
        if reduce.of_nbytes:
            walk.tile_leaves(reduce)
        if reduce.stays:
            _stays(walk, reduce)
        if reduce.drop:
            walk.forget(reduce.value)

    def _offload(self, walk: Walk, offload: Offload) -> None:
        value, name = offload.value, offload.name
        if value not in walk.made_at:
            raise walk.fail(f"register {value} is offloaded, and nothing made it")
        if value in walk.borrowed or value in walk.bound:
            raise walk.fail(f"{name!r} is offloaded, and lies in bytes of an entry or of the arena")
        leaves = start(*walk.after(offload.after))
        if not leaves.starts_after(walk.made_at[value]):
            raise walk.fail(f"{name!r} leaves before it is computed")
        walk.new(offload.ticket)
        walk.transfers[offload.ticket] = leaves
        walk.leaving[offload.ticket] = offload
        walk.define(offload.register, self.now)

    def _store(self, walk: Walk, store: Store) -> None:
        use = walk.use_of(store.slot, store.name)
        leaves = start(*walk.after(store.after))
        if not use.brought.ended_by(self.now):
            raise walk.fail(f"{store.name!r} is stored before its fetch is waited for")
        if not leaves.starts_after(use.touched):
            raise walk.fail(
                f"the store of {store.name!r} does not wait for the compute that writes it"
            )
        if not leaves.starts_after_end_of(use.brought):
            raise walk.fail(f"the store of {store.name!r} does not wait for its fetch")
        if store.nbytes > use.fetch.nbytes:
            raise walk.fail(f"{store.name!r} stores more bytes than were brought")
        if not self._homes.store(walk.span, use, use.touched, self.now):
            raise walk.fail(f"{store.name!r} goes home after later compute read it from there")
        walk.new(store.ticket)
        walk.transfers[store.ticket] = leaves
        use.stores.append(leaves)

    def _borrow(self, walk: Walk, borrow: Borrow) -> None:
        if walk.span in walk.torn:
            raise walk.fail(f"{borrow.name!r} is computed with where it rests, and moved as well")
        walk.define(borrow.register, self.now)
        walk.borrowed[borrow.register] = walk.span
        if borrow.writes:
            walk.written_in_place[borrow.register] = walk.span


def _stays(walk: Walk, reduce: Reduce) -> None:
    """Check a gradient that becomes an entry in place.

    It must be all that comes for the entry, in memory of its own, and the call reads it no more.
    """
    if reduce.entry not in walk.schedule.lone_gradients:
        raise walk.fail(f"the gradient of {reduce.name!r} stays, and is not all that comes for it")
    if not reduce.drop:
        raise walk.fail(f"the gradient of {reduce.name!r} stays, and is read later as a value")
    if not walk.schedule.level_at.get(walk.index, LiveBytes()).alone:
        raise walk.fail(f"the gradient of {reduce.name!r} stays, in memory that is not its own")


def _left(walk: Walk, left: Left, now: int) -> None:
    """Give the memory of an offloaded value back."""
    offload = walk.leaving.pop(left.ticket, None)
    if offload is None or offload.value != left.register:
        raise walk.fail(f"register {left.register} does not leave with ticket {left.ticket}")
    if left.register not in walk.made_at:
        raise walk.fail(f"the memory of {left.name!r} was given back before")
    walk.transfers[left.ticket].wait_at(now)
    walk.forget(left.register)


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
    fetches = {x: i for i, x in enumerate(then.schedule.instructions) if isinstance(x, Fetch)}
    spans = then.spans()
    for index in range(len(now.schedule.instructions)):
        proof.step(first, index)
        for fetch in handover.starts.get(index, ()):
            _may_be_handed(first, fetch, fetches, given)
            span = spans[fetches[fetch]]
            assert span is not None
            given[fetch.ticket] = proof.hand(first, fetch, span)
    proof.end(first)
    if proof.peak != handover.peak_bytes:
        raise first.fail(f"the peak of both is {proof.peak} bytes, it says {handover.peak_bytes}")
    # Walk `then` with those fetches in flight.
    second = proof.begin(then, given)
    for index in range(len(then.schedule.instructions)):
        proof.step(second, index)
    proof.end(second)


def _may_be_handed(
    walk: Walk, fetch: Fetch, fetches: Mapping[Fetch, int], given: Mapping[Ticket, SlotUse]
) -> None:
    """Check that `fetch` is one of the next schedule, handed over once, and can be foreseen."""
    if fetch not in fetches:
        raise walk.fail(f"the fetch of {fetch.name!r} is handed over, which the next has not")
    if fetch.ticket in given:
        raise walk.fail(f"the fetch of {fetch.name!r} is handed over twice")
    if not fetch.lasting:
        raise walk.fail(f"{fetch.name!r} is handed over, which is new in every call")


def _account(walk: Walk, peak: int) -> None:
    """Check that a schedule's own numbers of bytes are true, to the byte."""
    schedule = walk.schedule
    end = max((fetch.slot.end for fetch in schedule.fetches()), default=0)
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
    schedule, readers = walk.schedule, _readers(walk.schedule)
    for run in schedule.instructions:
        if not isinstance(run, Run) or not (run.into or run.region.placed):
            continue
        if len(run.into) != len(run.region.placed):
            raise walk.fail(f"{run.region.text!r} places another number of outputs than it is told")
        for at, entry in zip(run.region.placed, run.into, strict=True):
            match readers.get(run.outputs[at]):
                case [Reduce(entry=taker, drop=True, of_nbytes=0)] if taker == entry:
                    pass
                case _:
                    name = schedule.names.get(entry, str(entry))
                    raise walk.fail(f"what is made as the gradient of {name!r} is not that alone")


def _readers(schedule: Schedule) -> Mapping[Register, list[object]]:
    """Readers of each register, in order; that a result is not dropped is proven elsewhere."""
    found: dict[Register, list[object]] = {}
    for x in schedule.instructions:
        match x:
            case Run():
                registers = x.inputs
            case Reduce() | Offload():
                registers = (x.value,)
            case _:
                registers = ()
        for register in registers:
            found.setdefault(register, []).append(x)
    return found
