"""Schedules a region program: when each fetch starts, and where it lies in the arena.

The same passes do so twice. When a graph is compiled nobody knows which entries its calls will be
about, so every value is fetched. Once a placement says what rests on the device, `arrange` makes
the schedule for it: resident values are read in place, and the fetches that are left start as early
as the arena's window allows.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from zcompile.ir.optimizer_step import (
    DEPTH,
    LEAST_PACED_BYTES,
    NO_ROOM,
    Column,
    Row,
    StepRoom,
    lower_step,
)
from zcompile.ir.schedule import (
    Departure,
    EntryIndex,
    ReadValue,
    Reduce,
    RegionProgram,
    Schedule,
)
from zcompile.ir.step import StepTrace
from zcompile.ir.types import HELD, ON_DEVICE, EntryRef, Phase
from zcompile.memory.allocator import Block, live_peak
from zcompile.passes.allocate_arena import allocate_arena
from zcompile.passes.join_regions import join_regions
from zcompile.passes.keep_wholes import keep_wholes
from zcompile.passes.late_updates import bytes_at_once, with_late_updates
from zcompile.passes.lower import lower
from zcompile.passes.schedule_prefetch import schedule_prefetch

NONE: frozenset[EntryIndex] = frozenset()
LATE_ROOM = 2
"""Late updates are given so many times the room of what the forward reads itself."""


def arrange(
    program: RegionProgram,
    budget_bytes: int | None,
    max_lead: int,
    resident: frozenset[EntryIndex] = NONE,
    stay: frozenset[EntryIndex] = NONE,
    reached: frozenset[EntryIndex] = NONE,
) -> Schedule:
    """The schedule of a program for calls whose `resident` entries rest on the device.

    budget_bytes  of the arena, for what is fetched
    max_lead      regions that a fetch may start ahead of its first reader
    stay          entries whose gradients stay where they are made
    reached       entries that late updates use on the host, where compute reaches them
    raises        BudgetExceeded, if what one region reads does not fit
    """
    return lower(_placed(program, budget_bytes, max_lead, resident, stay, reached))


def _placed(
    program: RegionProgram,
    budget_bytes: int | None,
    max_lead: int,
    resident: frozenset[EntryIndex],
    stay: frozenset[EntryIndex],
    reached: frozenset[EntryIndex],
) -> RegionProgram:
    """The program with everything decided that `arrange` decides."""
    program = replace(program, budget_bytes=budget_bytes)
    program = with_late_updates(program, budget_bytes)  # what else a forward computes
    program = apply_placement(program, resident, stay, reached)  # what is read in place, what stays
    program = schedule_prefetch(program, max_lead)  # start each fetch early enough
    return allocate_arena(program)  # every fetched value has an address


def rearrange(
    schedule: Schedule,
    budget_bytes: int | None,
    max_lead: int,
    resident: frozenset[EntryIndex] = NONE,
    stay: frozenset[EntryIndex] = NONE,
    reached: frozenset[EntryIndex] = NONE,
    held: frozenset[EntryIndex] = NONE,
) -> Schedule:
    """`schedule`, which is of a graph, arranged anew (`arrange`), and regions joined between which
    nothing moves.

    held  gradients for late updates that have stayed where backward made them
    """
    assert schedule.program is not None, "a step is lowered anew from its rows"
    program = _placed(schedule.program, budget_bytes, max_lead, resident, stay, reached)
    made = lower(join_regions(program, schedule.holds.levels)).with_held(held)
    # What it may be arranged from once more has all regions, and those of the graph alone.
    again = program if schedule.program.late is None else schedule.program
    return replace(made, holds=schedule.holds, program=again)


def apply_placement(
    program: RegionProgram,
    resident: frozenset[EntryIndex],
    stay: frozenset[EntryIndex],
    reached: frozenset[EntryIndex] = NONE,
) -> RegionProgram:
    """Read `resident` entries where they rest, and leave the gradients of `stay` where they are
    made.

        a: fetched, read by region 0                  a: read in place by region 0
        after region 3: the gradient of a       ->    after region 3: the gradient of a stays

    A copy in another dtype is fetched even if its entry is resident, and so is a share, which goes
    into its place among those of all ranks; an operand of a late update is used on the host, if
    compute reaches that. A gradient that ranks exchange leaves the memory it was made in.
    """

    def placed(x: Departure) -> Departure:
        stays = isinstance(x, Reduce) and x.entry in stay and not x.shared
        return replace(x, stays=stays) if isinstance(x, Reduce) and x.stays != stays else x

    departures = tuple(tuple(map(placed, rows)) for rows in program.departures)

    def in_place(v: ReadValue) -> bool:
        if v.cast is not None or v.share is not None:
            return False
        return v.entry in resident or (v.reach and v.entry in reached)

    return replace(program, departures=departures).with_values(
        v._replace(in_place=in_place(v), start=v.first, gather=v.read_whole, slot=None)
        for v in program.values
    )


def keeping_wholes(schedule: Schedule, kept: Set[EntryIndex], made: Set[EntryIndex]) -> Schedule:
    """The schedule of calls for which all of the entries `kept` rests on the device, of what ranks
    hold shares of. It is as if there were room for everything, and still to be arranged.

    made  of `kept`, those that were written since they were gathered
    """
    assert schedule.program is not None, "of a graph"
    program, own = keep_wholes(schedule.program, kept, made), len(schedule.handles)
    resting = frozenset(EntryIndex(own + n) for n in range(len(program.outline.copies)))
    return replace(
        arrange(program, None, 0, resting),
        holds=schedule.holds,
        budget_bytes=schedule.budget_bytes,
        program=program,
    )


def without_exchanges(schedule: Schedule, max_lead: int) -> Schedule:
    """The schedule of a backward whose gradients ranks do not exchange, since each rank adds up its
    own until a later backward exchanges the sums: each goes home as a whole. The schedule itself,
    if ranks exchange none.

        after 0: the gradient of a, shared      ->    after 0: the gradient of a

    All that it gathers it gathers as before, and the ranks agree on it in any case.
    """
    program = schedule.program
    assert program is not None, "of a graph"
    if not any(isinstance(x, Reduce) and x.shared for rows in program.departures for x in rows):
        return schedule

    def own(x: Departure) -> Departure:
        if not isinstance(x, Reduce):
            return x
        return replace(x, shared=False, share_nbytes=0, tile=None, shares=None)

    outline = replace(program.outline, no_sync_of=schedule.serial)
    departures = tuple(tuple(map(own, rows)) for rows in program.departures)
    program = replace(program, outline=outline, departures=departures)
    made = arrange(program, schedule.budget_bytes, max_lead)
    return replace(made, holds=schedule.holds)


@dataclass(frozen=True)
class ArenaShare:
    """How the schedules of a step share the arena with entries that rest there.

    window_bytes  for what is fetched
    max_lead      runs that a fetch may start ahead
    chunk_bytes   most bytes per operand and chunk of the optimizer's step
    reach         whether updates of an optimizer compute with entries on the host in place
    depth         most chunks of that step in the arena at once
    scratch       memory outside the arena that no graph holds during that step; used if it is
                  larger
    nbytes        of the arena; what neither streams nor rests there takes results of list ops
    late_chunk_bytes  least bytes per operand and chunk of an update that joins a forward, where
                  room allows
    """

    window_bytes: int
    max_lead: int
    chunk_bytes: int
    reach: bool = False
    depth: int = DEPTH
    scratch: StepRoom = NO_ROOM
    nbytes: int = 0
    late_chunk_bytes: int = LEAST_PACED_BYTES

    @property
    def step_room(self) -> StepRoom:
        """Memory that the optimizer's step streams through."""
        window = StepRoom(0, self.window_bytes, self.chunk_bytes, self.depth)
        return self.scratch if self.scratch.nbytes > window.nbytes else window

    def of(self, phase: Phase) -> tuple[object, ...]:
        """All of it that the schedule of a call of a phase depends on."""
        if phase is Phase.STEP:
            return self.step_room, self.reach
        return self.window_bytes, self.max_lead, self.reach


Arrangements = dict[tuple[object, ...], Schedule]
"""Schedules that were arranged, by all that they depend on; those of steps that are compared."""


def arranged(
    step: StepTrace,
    homes: Mapping[EntryRef, str],
    arena: ArenaShare,
    known: Arrangements | None = None,
) -> StepTrace:
    """A whole step under a placement, as the runtime will walk it.

    homes   key of an entry -> the tier that it rests on
    known   what was arranged before, of calls of this record of the step; is added to
    raises  BudgetExceeded, if what one run reads does not fit the window
    """
    made = {} if known is None else known
    as_held: dict[tuple[int, int], Schedule] = {}  # one object for all calls that walk it
    calls, held = [], {ref for ref, home in homes.items() if home == HELD}
    for call in step.calls:
        at = tuple(homes.get(ref, step.facts[ref].home) for ref in call.entries)
        stay = call.making(held)
        share = arena.of(call.phase)
        key = call.schedule.serial, _told_apart(at, call.phase, arena), stay, share
        if key not in made:
            made[key] = _arranged(call.schedule, at, stay, arena)
        schedule, holds = made[key], call.schedule.holds
        both = schedule.serial, id(holds)
        if both not in as_held:
            same = schedule.holds is holds
            as_held[both] = schedule if same else replace(schedule, holds=holds)
        calls.append(replace(call, schedule=as_held[both]))
    facts = {ref: replace(f, home=homes.get(ref, f.home)) for ref, f in step.facts.items()}
    return replace(step, calls=tuple(calls), facts=facts)


def _told_apart(homes: tuple[str, ...], phase: Phase, arena: ArenaShare) -> tuple[str, ...]:
    """The homes as far as `_arranged` tells them apart: in forward and backward, what is fetched
    comes alike from everywhere."""
    if phase is Phase.STEP:
        return homes
    apart = ON_DEVICE | {"host"} if arena.reach else ON_DEVICE
    return tuple(home if home in apart else "" for home in homes)


def _arranged(
    schedule: Schedule, homes: Sequence[str], stay: frozenset[EntryIndex], arena: ArenaShare
) -> Schedule:
    if schedule.budget_bytes is None:
        return schedule
    if schedule.phase is not Phase.STEP:
        resident = frozenset(EntryIndex(n) for n, home in enumerate(homes) if home in ON_DEVICE)
        near = frozenset(EntryIndex(n) for n, home in enumerate(homes) if home == "host")
        reached = near if arena.reach else NONE
        held = frozenset(EntryIndex(n) for n, home in enumerate(homes) if home == HELD)
        window, lead = arena.window_bytes, arena.max_lead
        return rearrange(schedule, window, lead, resident, stay, reached, held)
    still = ON_DEVICE | {"host"} if arena.reach else ON_DEVICE
    rows = [_at_rest(row, homes, still) for row in schedule.rows]
    return lower_step(schedule.name, rows, schedule.inputs, len(schedule.names), arena.step_room)


def _at_rest(row: Row, homes: Sequence[str], still: frozenset[str]) -> Row:
    """`row` with its operands where they rest: computed by the host, if it may be and all of them
    are there."""
    if row.on_host and all(homes[column.entry] == "host" for column in row.columns):
        return row.resting_on_host()
    columns = tuple(_rests(c, homes[c.entry], still) for c in row.columns)
    return replace(row, columns=columns, on_host=False)


def _rests(column: Column, home: str, still: frozenset[str]) -> Column:
    """`column` with its operand on tier `home`."""
    resident = home in ON_DEVICE if column.eased else home in still
    return replace(column, resident=resident, far=home == "disk")


def window_bytes(schedule: Schedule, resident: frozenset[EntryIndex], lead: int) -> int:
    """Bytes of the arena in which each fetch of a graph could start `lead` regions ahead."""
    assert schedule.program is not None, "of a graph"

    def needed(program: RegionProgram) -> int:
        values = (v for v in program.slotted if v.share or v.entry not in resident)
        return live_peak([Block(max(0, v.first - lead), v.last, v.nbytes) for v in values])

    nbytes = needed(schedule.program)
    if schedule.program.late is None:
        return nbytes
    return needed(with_late_updates(schedule.program, LATE_ROOM * nbytes))


def wider_than(step: StepTrace, window_bytes: int) -> frozenset[EntryRef]:
    """The entries of a step that must rest on the device, if so much of the arena is left for what
    is fetched: of them a region of forward or backward reads more at once."""
    found = set[EntryRef]()
    for call in {(c.schedule.serial, c.entries): c for c in step.calls}.values():
        program = call.schedule.program
        if program is not None and call.schedule.budget_bytes is not None:
            needs = bytes_at_once(program, window_bytes)
            found |= {call.entries[entry] for entry, nbytes in needs if nbytes > window_bytes}
    return frozenset(found)
