"""Plans a whole step: which tier each entry rests on, and how much of the arena is left to stream
through.

The two depend on each other: a larger window hides more transfers, and leaves room for fewer
residents. So a few windows are tried, from nothing (everything rests on the device) to one that
gives every fetch a lead of many runs; each is placed, scheduled and simulated; the fastest is
taken. Pure.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from zcompile.errors import BudgetExceeded
from zcompile.ir.optimizer_step import DEEP, DEEPER, DEPTH, NO_ROOM, StepRoom, paced_bytes
from zcompile.ir.schedule import EntryIndex
from zcompile.ir.step import StepTrace
from zcompile.ir.types import ALIGNMENT, ON_DEVICE, EntryRef, Phase, aligned
from zcompile.ir.units import KiB
from zcompile.machine.model import Machine
from zcompile.memory.step_footprint import held_in_steps, staying, staying_bytes
from zcompile.passes.arrange import ArenaShare, arranged, window_bytes
from zcompile.planner.placement import Placement, Room, place

LEADS = (1, 2, 4, 8, 16)
"""Runs of lead that the windows tried have room for."""
PARTS = (64, 32, 16, 8, 2)
"""The arena divided by these is tried as a window too: chunks of an optimizer's step grow with
it."""
NEARLY = 50
"""A window that differs from one tried by less than 1/NEARLY of that is not tried: the step takes
about as long, and each costs a simulation."""
HOPELESS = 1.06
"""A placement whose own links bind it to so many times the best step so far is not simulated: work
that is left over from one phase to the next makes a step a few percent shorter than that bound, not
more."""
NEAR = 1.01
"""A plan within so many times the bound is taken: no other could save more, and each costs a
simulation. Plans within so many times the fastest count as equally fast."""
BEST = 2
"""Number of the fastest plans that are tried with more chunks in flight: it changes which is the
best only among those that are nearly equal, and each costs a simulation."""
ROUNDS = 4
"""Most rounds of fitting a window to its placement: a placement changes what the window must hold,
and the window the placement."""
LEAST_WINDOW = 256 * KiB
"""Least window of an arena that has room for it: with less, an optimizer's step crawls in chunks
that are mostly overhead, and temporaries of its ops push the plan out."""
SCRATCH_CHUNKS = 16
"""Largest step scratch, in chunks of an operand: 16 chunks leave four operands a quarter of it
each."""
SCRATCH_OPERANDS = 4
"""Room for `DEEP` paced chunks of so many operands is kept from gradients that could stay."""
SCRATCH_SHARE = 8
"""At most one part in so many of the memory outside the arena is kept so."""
UNBOUNDED_LEAD = 64
"""Runs that a fetch may start ahead once the window bounds the bytes in flight."""

Seconds = Callable[[StepTrace, Mapping[EntryRef, str]], float]
"""(arranged step, homes of its entries) -> seconds of the step."""


@dataclass(frozen=True)
class StepPlan:
    """A plan of a whole step.

    placement  the tier of each entry
    arena      how the arena is shared
    step       as it will be walked
    seconds    that it will take
    """

    placement: Placement
    arena: ArenaShare
    step: StepTrace
    seconds: float

    @property
    def resident_bytes(self) -> int:
        return self.placement.resident_bytes(self.step)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the arena: entries that rest there, and the slots of a schedule beside
        them."""
        inside = (c.schedule.peak_bytes for c in self.step.calls if not c.schedule.scratch_at)
        return self.resident_bytes + max(inside, default=0)

    @property
    def staying_bytes(self) -> int:
        """Bytes of gradients that stay outside the arena from backward to the optimizer's step."""
        return staying_bytes(self.step, self.placement.stay)

    @property
    def transfers(self) -> int:
        """Number of transfers of a step, there and back, without those of gradients."""
        rows = (x for call in self.step.calls for x in call.schedule.effects)
        return sum(x.is_transfer and not x.is_gradient for x in rows)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the step scratch, for chunks of the optimizer's step."""
        scratched = (c.schedule for c in self.step.calls if c.schedule.scratch_at)
        return max((made.arena_bytes - made.scratch_at for made in scratched), default=0)


def plan_step(
    step: StepTrace,
    machine: Machine,
    room: Room,
    arena: ArenaShare,
    compute_seconds: Mapping[Phase, float],
    seconds: Seconds,
    least_s: float = 0.0,
    stay: frozenset[EntryRef] = frozenset(),
) -> StepPlan:
    """The fastest of the plans tried, or the first that is near the bound.

    machine  links and rates
    room     bytes of each tier for the entries of this step, the whole arena among them
    arena    its window is the least that must be left
    seconds  simulates an arranged step
    least_s  lower bound, in seconds, on any plan; 0, if that is not known
    stay     gradients that stay where backward makes them (`memory/step_footprint.py`)
    raises   BudgetExceeded, if not even what one run reads fits
    """
    made: list[StepPlan] = []
    refused: tuple[int, BudgetExceeded] | None = None
    windows = list(_windows(step, machine, room, arena, compute_seconds, stay))
    for window, placement in sorted(windows, key=lambda row: (row[1].least_seconds, row[0])):
        if made and placement.least_seconds > HOPELESS * min(plan.seconds for plan in made):
            break
        shared = replace(arena, window_bytes=window, depth=DEPTH)
        try:
            plan = _planned(step, placement, shared, seconds)
        except BudgetExceeded as error:
            if refused is None or window >= refused[0]:
                # Of the widest, which is the arena that was asked for; without the frames it
                # came through, which hold the values of the call that was about to run.
                refused = window, error.with_traceback(None)
            continue
        if plan.seconds <= NEAR * least_s:
            return plan
        made.append(plan)
        if not window:
            break  # nothing moves
    if not made:
        assert refused is not None
        raise refused[1]
    return _simplest((*made, *_refined(step, made, seconds)))


def _simplest(plans: Sequence[StepPlan]) -> StepPlan:
    """The plan with the fewest transfers of the fastest, and of those that take hardly longer.

    Each transfer is started by the host, later than it was foreseen where the host is busy.
    """
    most = NEAR * min(plan.seconds for plan in plans)
    near = [plan for plan in plans if plan.seconds <= most]
    return min(near, key=lambda plan: (plan.transfers, plan.seconds))


def _refined(step: StepTrace, made: Sequence[StepPlan], seconds: Seconds) -> Iterator[StepPlan]:
    """The fastest plans with more chunks of an optimizer's step in flight.

    Also without a step scratch, into which nothing is handed over.
    """
    for plan in sorted(made, key=lambda plan: plan.seconds)[:BEST]:
        if plan.arena.window_bytes:
            scratch = replace(plan.arena.scratch, depth=DEEPER)
            rooms = (scratch, NO_ROOM) if plan.scratch_bytes else (NO_ROOM,)
            for room in rooms:
                with suppress(BudgetExceeded):
                    deeper = replace(plan.arena, depth=DEEP, scratch=room)
                    yield _planned(step, plan.placement, deeper, seconds)


def at_rest(
    plan: StepPlan,
    step: StepTrace,
    rests: Mapping[EntryRef, str],
    window_bytes: int,
    seconds: Seconds,
) -> StepPlan:
    """`plan` as it will be walked with entries where they really rest.

    Some may have found no room on their tier, or are still where they should not be.

    step          that the plan was made for, as it was recorded
    rests         entry -> the tier that it is on
    window_bytes  that are left to stream through
    """
    planned = plan.placement.homes
    homes = {ref: rests.get(ref, planned.get(ref, fact.home)) for ref, fact in step.facts.items()}
    if all(planned.get(ref, step.facts[ref].home) == home for ref, home in homes.items()):
        return plan
    placement = replace(plan.placement, homes={**planned, **homes})
    try:
        return _planned(step, placement, replace(plan.arena, window_bytes=window_bytes), seconds)
    except BudgetExceeded:
        return plan  # the first call that needs more of the arena than is left will get it


def _planned(
    step: StepTrace, placement: Placement, arena: ArenaShare, seconds: Seconds
) -> StepPlan:
    """The plan of a placement and an arena."""
    made = arranged(step, placement.homes, arena)
    return StepPlan(placement, arena, made, seconds(made, placement.homes))


def stay_and_scratch(
    step: StepTrace,
    machine: Machine,
    arena_bytes: int,
    beside_bytes: int,
    chunk_bytes: int,
    kept: frozenset[EntryRef] = frozenset(),
) -> tuple[frozenset[EntryRef], StepRoom]:
    """The gradients that stay outside the arena, and the step scratch in the memory that is free
    there.

    beside_bytes  of the device, set aside for graphs
    chunk_bytes   of one operand, at most
    kept          gradients that are not gone when the next forward begins
    """
    paced = paced_bytes((link.bytes_per_s for link in machine.links.values()), chunk_bytes)
    scratch = min(SCRATCH_OPERANDS * DEEP * paced, beside_bytes // SCRATCH_SHARE)
    stay = staying(step, beside_bytes, scratch, kept)
    free = max(0, beside_bytes - held_in_steps([call.with_staying(stay) for call in step.calls]))
    nbytes = min(free, SCRATCH_CHUNKS * chunk_bytes) // ALIGNMENT * ALIGNMENT
    return stay, StepRoom(aligned(arena_bytes), nbytes, paced, DEEP)


def _windows(
    step: StepTrace,
    machine: Machine,
    room: Room,
    arena: ArenaShare,
    compute_seconds: Mapping[Phase, float],
    stay: frozenset[EntryRef],
) -> Iterator[tuple[int, Placement]]:
    """Windows to try, each with the placement beside it."""
    whole = room.nbytes["device"]

    def beside(window: int) -> Placement:
        left = {**room.nbytes, "device": whole - window}
        return place(step, machine, replace(room, nbytes=left), compute_seconds, stay)

    # No window at all, if everything rests on the device.
    everything = beside(0)
    if set(everything.homes.values()) <= ON_DEVICE and not arena.window_bytes:
        yield 0, everything
    least = max(arena.window_bytes, whole // PARTS[0], min(whole // 8, LEAST_WINDOW))
    tried: list[int] = []

    def new(window: int) -> bool:
        near = any(abs(window - other) * NEARLY < other for other in tried)
        if window in tried or (near and window < whole):
            return False
        tried.append(window)
        return True

    # Windows for some leads: smaller ones leave more residents, which need smaller ones.
    for lead in LEADS if arena.max_lead else (0,):
        window = min(whole, max(_needed(step, {}, lead), least))
        placement = beside(window)
        for _ in range(ROUNDS):
            fewer = min(whole, max(_needed(step, placement.homes, lead), least))
            if fewer >= window:
                break
            window, placement = fewer, beside(fewer)
        if new(window):
            yield window, placement
    # Windows by parts of the arena, for chunks of the optimizer.
    for part in PARTS:
        window = max(least, whole // part)
        if new(window):
            yield window, beside(window)


def _needed(step: StepTrace, homes: Mapping[EntryRef, str], lead: int) -> int:
    """Bytes of arena in which every fetch of forward and backward starts `lead` runs ahead."""
    most = 0
    seen: set[tuple[int, frozenset[EntryIndex]]] = set()
    for call in step.calls:
        if call.phase is Phase.STEP or call.schedule.budget_bytes is None:
            continue
        resident = frozenset(
            EntryIndex(n) for n, ref in enumerate(call.entries) if homes.get(ref) in ON_DEVICE
        )
        if (call.schedule.serial, resident) not in seen:
            seen.add((call.schedule.serial, resident))
            most = max(most, window_bytes(call.schedule, resident, lead))
    return most
