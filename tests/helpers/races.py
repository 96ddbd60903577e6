"""What can go wrong in a schedule, by brute force: who may touch which byte before whom.

The verifier walks a schedule once and keeps a few facts; this oracle builds the order of all
events and looks at every two accesses of the same bytes. A transfer happens at any time between
its start, which waits for the tickets in `after`, and the wait for its own ticket. That an
instruction stands earlier in the list orders compute with compute and gathers with gathers, and
nothing else.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zcompile.ir.schedule import (
    Agree,
    Borrow,
    Drop,
    Fetch,
    Free,
    Gather,
    Instruction,
    Left,
    Literal,
    Offload,
    Reduce,
    Run,
    Schedule,
    Slot,
    Store,
    Wait,
)
from zcompile.ir.types import Phase

Transfer = Fetch | Store | Reduce | Offload


@dataclass(frozen=True)
class Access:
    """Instruction `index` reads or writes bytes [begin, end) of the arena."""

    index: int
    begin: int
    end: int
    writes: bool


class Order:
    """Which event comes surely before which: two events, start and end, per instruction."""

    def __init__(self, schedule: Schedule) -> None:
        self.rows = schedule.instructions
        kinds = Fetch | Run | Store | Offload | Agree | Gather
        givers = {
            row.ticket: i
            for i, row in enumerate(self.rows)
            if isinstance(row, kinds) and row.ticket is not None
        }
        self.before: list[int] = []  # per event, a set of events as bits
        compute = gathers = 0
        for i, row in enumerate(self.rows):
            start = compute if isinstance(row, Wait | Left | Run) else 0
            start |= gathers if isinstance(row, Gather) else 0
            after = getattr(row, "after", ())
            tickets = (row.ticket,) if isinstance(row, Wait | Left) else after
            for ticket in tickets:
                if (giver := givers.get(ticket, i)) < i:
                    start |= self.before[2 * giver + 1] | 1 << 2 * giver + 1
            self.before.append(start)
            self.before.append(start | 1 << 2 * i)
            if isinstance(row, Wait | Left | Run):
                compute = self.before[-1] | 1 << 2 * i + 1
            elif isinstance(row, Gather):
                gathers = self.before[-1] | 1 << 2 * i + 1

    def follows(self, later: int, earlier: int) -> bool:
        """Instruction `later` starts after `earlier` has ended, whatever the speeds."""
        return bool(self.before[2 * later] >> 2 * earlier + 1 & 1)


def faults(schedule: Schedule) -> Iterator[str]:
    """Every way in which running this schedule could go wrong; nothing for a safe one."""
    yield from _registers(schedule)
    yield from _account(schedule)
    accesses = list(_accesses(schedule))
    order = Order(schedule)
    for j, later in enumerate(accesses):
        for earlier in accesses[:j]:
            same = earlier.begin < later.end and later.begin < earlier.end
            matters = same and (earlier.writes or later.writes) and earlier.index != later.index
            if matters and not order.follows(later.index, earlier.index):
                yield f"{later.index} races with {earlier.index}"
    for i, row in enumerate(schedule.instructions):
        if isinstance(row, Reduce | Offload):
            made = [
                k
                for k, run in enumerate(schedule.instructions[:i])
                if isinstance(run, Run) and row.value in run.outputs
            ]
            if made and not order.follows(i, made[-1]):
                yield f"{i} sends a value away before it is computed"


def _accesses(schedule: Schedule) -> Iterator[Access]:
    bound: dict[int, tuple[int, int]] = {}
    shares: dict[Slot, tuple[int, int]] = {}
    for i, row in enumerate(schedule.instructions):
        match row:
            case Fetch() | Store():
                begin = row.slot.address + row.offset
                yield Access(i, begin, begin + row.nbytes, isinstance(row, Fetch))
                if isinstance(row, Fetch):
                    shares[row.slot] = begin, begin + row.nbytes
            case Gather():
                first, last = shares.get(row.slot, (row.slot.address, row.slot.address))
                yield Access(i, first, last, False)
                yield Access(i, row.slot.address, first, True)
                yield Access(i, last, row.slot.address + row.nbytes, True)
            case Wait():
                begin = row.slot.address + row.offset
                end = (row.layout.offset + row.layout.span) * row.layout.dtype.itemsize
                bound[row.register] = (begin, begin + end)
            case Run():
                for register in row.inputs:
                    if register in bound:
                        updates = schedule.phase is Phase.STEP or row.late is not None
                        yield Access(i, *bound[register], updates)
            case Free():
                bound.pop(row.register, None)


def _registers(schedule: Schedule) -> Iterator[str]:
    leaving: dict[int, int] = {}
    given = (*(register for register, _ in schedule.constants), *schedule.operands)
    defined = {*range(schedule.inputs), *given}
    for i, row in enumerate(schedule.instructions):
        match row:
            case Wait() | Borrow():
                defined.add(row.register)
            case Run():
                yield from (f"{i} reads nothing" for r in row.inputs if r not in defined)
                defined |= set(row.outputs)
                defined -= set(row.drops)
            case Reduce():
                if row.value not in defined:
                    yield f"{i} reads nothing"
                if row.drop:
                    defined.discard(row.value)
            case Offload():
                if row.value not in defined:
                    yield f"{i} reads nothing"
                defined.add(row.register)
                leaving[row.ticket] = row.value
            case Left():
                if leaving.pop(row.ticket, None) != row.register or row.register not in defined:
                    yield f"{i} waits for what does not leave"
                defined.discard(row.register)
            case Free():
                defined.discard(row.register)
            case Drop():
                defined -= set(row.registers)
    yield from (f"{value} is kept" for value in leaving.values())
    for result in schedule.outputs:
        if not isinstance(result, Literal) and result not in defined:
            yield f"{result} is returned and was not made"


def _account(schedule: Schedule) -> Iterator[str]:
    """Each slot is large enough, taken once, waited for, given back once, and used in between."""
    taken: dict[Slot, Fetch] = {}
    waited: set[Slot] = set()
    for i, row in enumerate(schedule.instructions):
        match row:
            case Fetch():
                if any(slot.overlaps(row.slot) for slot in taken):
                    yield f"{i} takes what is taken"
                too_large = row.offset + row.nbytes > row.slot.nbytes
                if too_large or row.slot.end > schedule.arena_bytes:
                    yield f"{i} does not fit"
                taken[row.slot] = row
                waited.discard(row.slot)
            case Gather():
                if row.slot not in taken or row.nbytes > row.slot.nbytes:
                    yield f"{i} does not fit"
                else:  # from here on all of it is brought
                    all_of_it = replace(taken[row.slot], nbytes=row.nbytes, ticket=row.ticket)
                    taken[row.slot] = replace(all_of_it, offset=0)
                    waited.discard(row.slot)
            case Wait():
                end = (row.layout.offset + row.layout.span) * row.layout.dtype.itemsize
                end += row.offset
                *parts, last = _fetches_into(row.slot, taken) or [None]
                before = row.slot.nbytes - last.slot.nbytes if last else 0
                brought = before + last.offset + last.nbytes if last else 0
                if last is None or last.ticket != row.ticket or end > brought:
                    yield f"{i} waits for other bytes"
                elif not waited.issuperset(part.slot for part in parts):
                    yield f"{i} does not wait for all parts"
                if not parts:
                    waited.add(row.slot)
            case Store():
                if row.slot not in waited or row.nbytes > taken[row.slot].nbytes:
                    yield f"{i} stores what is not there"
            case Free():
                if row.slot not in taken or row.slot not in waited:
                    yield f"{i} gives back what is not there"
                taken.pop(row.slot, None)
                waited.discard(row.slot)
    yield from (f"{slot} is kept" for slot in taken)
    most, end = peak(schedule.instructions)
    if most != schedule.peak_bytes or end > schedule.arena_bytes:
        yield "the account is wrong"
    if schedule.budget_bytes is not None and most > schedule.budget_bytes:
        yield "the budget is broken"


def _fetches_into(slot: Slot, taken: dict[Slot, Fetch]) -> list[Fetch]:
    """The fetches that fill a slot with bytes of an entry, or of its copy in another dtype, that
    follow each other; nothing, if they do not."""
    found = sorted(
        (f for at, f in taken.items() if at.overlaps(slot)), key=lambda f: f.slot.address
    )
    at, byte = slot.address, found[0].begin if found else 0
    for fetch in found:
        if (fetch.slot.address, fetch.begin) != (at, byte):
            return []
        if (fetch.entry, fetch.cast) != (found[0].entry, found[0].cast):
            return []
        at, byte = fetch.slot.end, fetch.begin + fetch.slot.nbytes
        if fetch is not found[-1] and fetch.nbytes != fetch.slot.nbytes:
            return []
    return found if at == slot.end else []


def peak(rows: tuple[Instruction, ...]) -> tuple[int, int]:
    """The most bytes taken at once, and the end of the highest slot."""
    now = most = end = 0
    for row in rows:
        if isinstance(row, Fetch):
            now += row.slot.nbytes
            most, end = max(most, now), max(end, row.slot.end)
        elif isinstance(row, Free):
            now -= row.slot.nbytes
    return most, end


def recounted(schedule: Schedule, rows: tuple[Instruction, ...]) -> Schedule:
    """`schedule` with other instructions and an honest account of them."""
    most, end = peak(rows)
    return replace(schedule, instructions=rows, peak_bytes=most, arena_bytes=end)


Mutant = tuple[str, Schedule]


def mutants(schedule: Schedule) -> Iterator[Mutant]:
    """Every schedule that differs in one small thing which could make it unsafe."""
    yield from _without_waits(schedule)
    yield from _without_tickets(schedule)
    yield from _with_early_frees(schedule)
    yield from _with_other_slots(schedule)


def _without_waits(schedule: Schedule) -> Iterator[Mutant]:
    rows = schedule.instructions
    for i, row in enumerate(rows):
        if isinstance(row, Wait):
            yield f"no wait {i}", replace(schedule, instructions=rows[:i] + rows[i + 1 :])


def _without_tickets(schedule: Schedule) -> Iterator[Mutant]:
    rows = schedule.instructions
    for i, row in enumerate(rows):
        for ticket in getattr(row, "after", ()):
            less = replace(row, after=tuple(t for t in row.after if t != ticket))
            changed = (*rows[:i], less, *rows[i + 1 :])
            yield f"{i} not after {ticket}", replace(schedule, instructions=changed)


def _with_early_frees(schedule: Schedule) -> Iterator[Mutant]:
    """Each release, moved up over the instruction before it, over two, over three ..."""
    rows = schedule.instructions
    for i, row in enumerate(rows):
        if not isinstance(row, Free):
            continue
        for to in range(max(0, i - 6), i):
            changed = (*rows[:to], row, *rows[to:i], *rows[i + 1 :])
            yield f"free {i} at {to}", recounted(schedule, changed)


def _with_other_slots(schedule: Schedule) -> Iterator[Mutant]:
    """Two addresses swapped; one slot halved; one slot too small by what alignment adds."""
    groups = allocations(schedule)
    for k, group in enumerate(groups):
        slot = schedule.instructions[group[0]].slot
        for nbytes in (slot.nbytes // 2, schedule.instructions[group[0]].nbytes - 1):
            yield f"{group[0]} in {nbytes}", _moved(schedule, {k: Slot(slot.address, nbytes)})
        for n in range(k + 1, min(k + 5, len(groups))):
            other = schedule.instructions[groups[n][0]].slot
            swapped = {k: Slot(other.address, slot.nbytes), n: Slot(slot.address, other.nbytes)}
            yield f"swap {group[0]} and {groups[n][0]}", _moved(schedule, swapped)


def _moved(schedule: Schedule, slots: dict[int, Slot]) -> Schedule:
    rows = list(schedule.instructions)
    groups = allocations(schedule)
    for group, slot in slots.items():
        for i in groups[group]:
            rows[i] = replace(rows[i], slot=slot)
    return recounted(schedule, tuple(rows))


def allocations(schedule: Schedule) -> list[list[int]]:
    """The instructions that speak of one taken slot, from its fetch to its release."""
    groups: list[list[int]] = []
    open_: dict[Slot, list[int]] = {}
    for i, row in enumerate(schedule.instructions):
        if isinstance(row, Fetch):
            groups.append([i])
            open_[row.slot] = groups[-1]
        elif (
            isinstance(row, Wait | Store | Gather | Free) and row.slot in open_
        ):  # and not over its parts
            open_[row.slot].append(i)
    return groups
