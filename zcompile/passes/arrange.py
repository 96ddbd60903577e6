"""A schedule arranged anew for a placement: what rests on the device is not moved any more.

The passes plan a graph as if every parameter came from afar, since a graph does not know which
entries a call will be about. Once a placement says what rests on the device, the same list is
arranged for it: resident parameters are borrowed where they lie, and the fetches that are left
start as early as the arena's window allows.

        fetch a -> [0, 4K)                        fetch b -> [0, 8K)
        fetch b -> [4K, 12K)                      borrow a
        wait a                                    run 0
        run 0                           ->        wait b
        free a                                    run 1
        wait b                                    free b
        run 1
        free b
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zcompile.ir.optimizer_step import DEPTH, NO_ROOM, Column, StepRoom, lower_step
from zcompile.ir.program import Stages, Value, take_apart
from zcompile.ir.schedule import (
    SERIALS,
    Borrow,
    EntryIndex,
    Instruction,
    Offload,
    Schedule,
    Slot,
    Ticket,
)
from zcompile.ir.step import Step
from zcompile.ir.types import HELD, ON_DEVICE, Phase, aligned
from zcompile.memory.device_peaks import peak_of
from zcompile.memory.packing import Block, fits, live_peak, pack_quickly, packed_bytes
from zcompile.passes.schedule_prefetch import Need, choose_starts


def arrange(
    schedule: Schedule,
    resident: frozenset[EntryIndex],
    budget_bytes: int | None,
    max_lead: int,
    stay: frozenset[EntryIndex] = frozenset(),
) -> Schedule:
    """`schedule` (forward or backward) for a call whose `resident` entries rest on the device, and
    the gradients of whose entries `stay` where they are made.

    budget_bytes  of the arena, for what is fetched
    max_lead      runs that a fetch may start ahead of its first reader
    raises  BudgetExceeded, if what one run reads does not fit
    """
    stages = take_apart(schedule.with_staying(stay))
    moved = [v for v in stages.values if v.fetch.entry not in resident or v.fetch.cast is not None]
    needs = [Need(v.fetch.name, v.first, v.last, v.fetch.nbytes) for v in moved]
    starts = choose_starts(needs, budget_bytes, max_lead, schedule.phase.value)
    blocks = [Block(s, v.last, v.fetch.nbytes) for s, v in zip(starts, moved, strict=True)]
    addresses = pack_quickly(blocks)
    if budget_bytes is not None and packed_bytes(blocks, addresses) > budget_bytes:
        found = fits(blocks, budget_bytes)
        assert found is not None, "`choose_starts` let them pass"
        addresses = found
    slots = [
        Slot(address, aligned(block.nbytes))
        for address, block in zip(addresses, blocks, strict=True)
    ]
    placed = [_placed(*each) for each in zip(moved, slots, strict=True)]
    arriving = {v.wait.register for v in moved}
    still = [v for v in stages.values if v.wait.register not in arriving]
    instructions = tuple(_Assembly(stages, placed, starts, still).instructions())
    return replace(
        schedule,
        instructions=instructions,
        serial=next(SERIALS),
        arena_bytes=max((slot.end for slot in slots), default=0),
        peak_bytes=peak_of(instructions),
        budget_bytes=budget_bytes,
    )


@dataclass(frozen=True)
class ArenaShare:
    """How a step's schedules share the arena with what rests there.

    window_bytes  for what is fetched
    max_lead      runs that a fetch may start ahead
    chunk_bytes   most bytes per operand and chunk of the optimizer's step
    depth         most chunks of that step in the arena at once
    annex         beside the arena, where no graph holds it: for that step, if it is larger
    reach         that step computes with what rests on the host where it lies
    """

    window_bytes: int
    max_lead: int
    chunk_bytes: int
    reach: bool = False
    depth: int = DEPTH
    annex: StepRoom = NO_ROOM

    @property
    def step_room(self) -> StepRoom:
        """What the optimizer's step streams through."""
        window = StepRoom(0, self.window_bytes, self.chunk_bytes, self.depth)
        return self.annex if self.annex.nbytes > window.nbytes else window


def arranged(step: Step, homes: Mapping[int, str], arena: ArenaShare) -> Step:
    """A whole step under a placement, as the runtime will walk it.

    raises  BudgetExceeded, if what one run reads does not fit the window
    """
    made: dict[tuple[object, ...], Schedule] = {}
    calls, held = [], {key for key, home in homes.items() if home == HELD}
    for call in step.calls:
        at = tuple(homes.get(key, step.facts[key].home) for key in call.entries)
        stay = call.making(held)
        known = call.schedule.serial, at, stay
        if known not in made:
            made[known] = _arranged(call.schedule, at, stay, arena)
        as_held = replace(made[known], holds=call.schedule.holds)
        calls.append(replace(call, schedule=as_held))
    facts = {key: replace(f, home=homes.get(key, f.home)) for key, f in step.facts.items()}
    return replace(step, calls=tuple(calls), facts=facts)


def _arranged(
    schedule: Schedule, homes: Sequence[str], stay: frozenset[EntryIndex], arena: ArenaShare
) -> Schedule:
    if schedule.budget_bytes is None:
        return schedule
    if schedule.phase is not Phase.STEP:
        resident = frozenset(EntryIndex(n) for n, home in enumerate(homes) if home in ON_DEVICE)
        return arrange(schedule, resident, arena.window_bytes, arena.max_lead, stay)
    still = ON_DEVICE | {"host"} if arena.reach else ON_DEVICE
    rows = [
        replace(row, columns=tuple(_rests(c, homes[c.entry], still) for c in row.columns))
        for row in schedule.rows
    ]
    return lower_step(schedule.name, rows, schedule.inputs, len(schedule.names), arena.step_room)


def _rests(column: Column, home: str, still: frozenset[str]) -> Column:
    resident = home in ON_DEVICE if column.eased else home in still
    return replace(column, resident=resident, far=home == "disk")


def window_bytes(schedule: Schedule, resident: frozenset[EntryIndex], lead: int) -> int:
    """Bytes of the arena in which each fetch of a graph could start `lead` runs ahead."""
    moved = [v for v in take_apart(schedule).values if v.fetch.entry not in resident]
    return live_peak([Block(max(0, v.first - lead), v.last, v.fetch.nbytes) for v in moved])


def _placed(value: Value, slot: Slot) -> Value:
    return replace(
        value,
        fetch=replace(value.fetch, slot=slot),
        wait=replace(value.wait, slot=slot),
        free=replace(value.free, slot=slot),
    )


class _Assembly:
    """Writes the list down again; tickets say what a slot's next fetch must wait for."""

    def __init__(
        self,
        stages: Stages,
        moved: Sequence[Value],
        starts: Sequence[int],
        still: Sequence[Value],
    ) -> None:
        self._stages = stages
        self._starting: dict[int, list[Value]] = {}
        self._arriving: dict[int, list[Value]] = {}
        self._leaving: dict[int, list[Value]] = {}
        self._borrowed: dict[int, list[Value]] = {}
        for value, start in zip(moved, starts, strict=True):
            self._starting.setdefault(start, []).append(value)
            self._arriving.setdefault(value.first, []).append(value)
            self._leaving.setdefault(value.last, []).append(value)
        for value in still:
            self._borrowed.setdefault(value.first, []).append(value)
        given = [r.ticket for r in stages.runs if r.ticket is not None]
        given += [v.fetch.ticket for v in stages.values]
        given += [x.ticket for rows in stages.leaving for x in rows if isinstance(x, Offload)]
        self._next = max(given, default=-1) + 1
        self._tickets = [run.ticket for run in stages.runs]
        self._busy: list[tuple[Slot, int]] = []

    def instructions(self) -> Iterator[Instruction]:
        after = self._afters()
        yield from self._stages.leaving[0]
        for n, run in enumerate(self._stages.runs):
            yield from (replace(v.fetch, after=after[v.fetch.ticket])
                        for v in self._starting.get(n, ()))  # fmt: skip
            yield from (v.wait for v in self._arriving.get(n, ()))
            yield from (_borrow(v) for v in self._borrowed.get(n, ()))
            yield replace(run, ticket=self._tickets[n])
            yield from (v.free for v in self._leaving.get(n, ()))
            yield from self._stages.leaving[n + 1]

    def _afters(self) -> dict[Ticket, tuple[Ticket, ...]]:
        """What each fetch must come after: the last run that read what lay in its bytes."""
        after: dict[Ticket, tuple[Ticket, ...]] = {}
        for n in range(len(self._stages.runs)):
            for value in self._starting.get(n, ()):
                slot = value.fetch.slot
                last = max((r for old, r in self._busy if old.overlaps(slot)), default=None)
                after[value.fetch.ticket] = () if last is None else (self._ticket(last),)
                self._busy = [
                    (old, r) for old, r in self._busy
                    if not (slot.address <= old.address and old.end <= slot.end)
                ]  # fmt: skip
            self._busy += [(v.free.slot, n) for v in self._leaving.get(n, ())]
        return after

    def _ticket(self, run: int) -> Ticket:
        found = self._tickets[run]
        if found is None:
            found = self._tickets[run] = Ticket(self._next)
            self._next += 1
        return found


def _borrow(value: Value) -> Borrow:
    wait = value.wait
    return Borrow(
        value.fetch.entry, value.fetch.begin, wait.layout, wait.register, False, wait.name
    )
