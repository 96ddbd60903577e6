"""One plan for a whole step: what rests where, and how much of the arena is left to stream through.

The two depend on each other: a larger window hides more transfers, and holds fewer residents. So a
few windows are tried, from nothing (everything rests on the device) to what gives every fetch a
lead of many runs; each is placed, arranged and told how long it takes; the fastest is taken. Pure.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from zcompile.errors import BudgetExceeded
from zcompile.ir.optimizer_step import DEEP, DEEPER, DEPTH, NO_ROOM, StepRoom, paced_bytes
from zcompile.ir.schedule import EntryIndex, Fetch, Offload, Store
from zcompile.ir.step import StepTrace
from zcompile.ir.types import ALIGNMENT, ON_DEVICE, Phase, aligned
from zcompile.ir.units import KiB
from zcompile.machine.model import Machine
from zcompile.memory.step_footprint import held_in_steps, staying, staying_bytes
from zcompile.passes.lower import ArenaShare, arranged, window_bytes
from zcompile.planner.placement import Placement, Room, place

LEADS = (1, 2, 4, 8, 16)
"""Runs of lead that the windows tried have room for."""
PARTS = (64, 32, 16, 8, 2)
"""Parts of the arena that are tried too: chunks of an optimizer's step grow with the window."""
NEARLY = 50
"""A window that differs from one tried by less than this part of it is not tried: the step takes
about as long, and each costs a simulation."""
HOPELESS = 1.06
"""A placement that its own links bind to so many times the best step so far is not simulated: what
is left over from one phase to the next makes a step a few percent shorter than that, not more."""
NEAR = 1.01
"""A plan within so many times the bound is taken: no other could save more, and each costs a
simulation. Plans within so many times the fastest are as good."""
BEST = 2
"""Of the fastest plans, how many are tried with more chunks in flight: it changes which is the best
only among those that are nearly equal, and each costs a simulation."""
ROUNDS = 4
"""A placement changes what the window must hold, and that the placement; so often at most."""
LEAST_WINDOW = 256 * KiB
"""Of an arena that has room for it: with less, an optimizer's step crawls in chunks that are mostly
overhead, and what its ops make for themselves pushes the plan out."""
SCRATCH_CHUNKS = 16
"""Times the largest chunk of an operand is the most of a step scratch: 16 chunks of four operands
have a quarter of it each."""
SCRATCH_OPERANDS = 4
"""For `DEEP` paced chunks of so many operands room is kept from gradients that could stay."""
SCRATCH_SHARE = 8
"""Or such a part of what is beside the arena, if that is less."""
UNBOUNDED_LEAD = 64
"""Runs that a fetch may start ahead once the window bounds the bytes in flight."""

Seconds = Callable[[StepTrace, Mapping[int, str]], float]
"""How long a step takes that is arranged so, its entries resting there."""


@dataclass(frozen=True)
class StepPlan:
    """placement  what rests where
    arena         how the arena is shared
    step          as it will be walked
    seconds       that it will take
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
        """Of the arena: what rests there, and the most that a schedule takes beside it."""
        inside = (c.schedule.peak_bytes for c in self.step.calls if not c.schedule.scratch_at)
        return self.resident_bytes + max(inside, default=0)

    @property
    def staying_bytes(self) -> int:
        """Of gradients that stay beside the arena from backward to the optimizer's step."""
        return staying_bytes(self.step, self.placement.stay)

    @property
    def transfers(self) -> int:
        """Of a step, there and back."""
        rows = (x for call in self.step.calls for x in call.schedule.instructions)
        return sum(isinstance(x, Fetch | Store | Offload) for x in rows)

    @property
    def scratch_bytes(self) -> int:
        """Of the device beside the arena, for chunks of the optimizer's step."""
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
    stay: frozenset[int] = frozenset(),
) -> StepPlan:
    """The fastest of the plans tried, or the first that is near the least.

    machine  links and rates
    room     bytes of each tier for the entries of this step, the whole arena among them
    arena    its window is the least that must be left
    seconds  what an arranged step takes
    least_s  no plan takes less; 0, if that is not known
    stay     the gradients that stay where backward makes them (`memory/step_footprint.py`)
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
    """Of the fastest, and those that take hardly longer, the one with the fewest transfers: each is
    started by the host, which does that later than was foreseen where it is busy."""
    most = NEAR * min(plan.seconds for plan in plans)
    near = [plan for plan in plans if plan.seconds <= most]
    return min(near, key=lambda plan: (plan.transfers, plan.seconds))


def _refined(step: StepTrace, made: Sequence[StepPlan], seconds: Seconds) -> Iterator[StepPlan]:
    """The fastest of the plans once more, with more chunks of an optimizer's step in flight, and
    without a step scratch, into which nothing is handed over."""
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
    rests: Mapping[int, str],
    window_bytes: int,
    seconds: Seconds,
) -> StepPlan:
    """`plan` as it will be walked where its entries rest in truth: some may have found no room
    where they should rest, or are still where they should not be.

    step          what the plan was made for, as it was recorded
    rests         key of an entry -> where it is
    window_bytes  that are left to stream through
    """
    planned = plan.placement.homes
    homes = {key: rests.get(key, planned.get(key, fact.home)) for key, fact in step.facts.items()}
    if all(planned.get(key, step.facts[key].home) == home for key, home in homes.items()):
        return plan
    placement = replace(plan.placement, homes={**planned, **homes})
    try:
        return _planned(step, placement, replace(plan.arena, window_bytes=window_bytes), seconds)
    except BudgetExceeded:
        return plan  # the first call that needs more of the arena than is left will get it


def _planned(
    step: StepTrace, placement: Placement, arena: ArenaShare, seconds: Seconds
) -> StepPlan:
    made = arranged(step, placement.homes, arena)
    return StepPlan(placement, arena, made, seconds(made, placement.homes))


def stay_and_scratch(
    step: StepTrace,
    machine: Machine,
    arena_bytes: int,
    beside_bytes: int,
    chunk_bytes: int,
    kept: frozenset[int] = frozenset(),
) -> tuple[frozenset[int], StepRoom]:
    """The gradients that stay beside the arena until the optimizer has read them, and what it may
    stream through there: what nobody holds then.

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
    stay: frozenset[int],
) -> Iterator[tuple[int, Placement]]:
    """Windows to try, each with what is placed beside it."""
    whole = room.nbytes["device"]

    def beside(window: int) -> Placement:
        left = {**room.nbytes, "device": whole - window}
        return place(step, machine, replace(room, nbytes=left), compute_seconds, stay)

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
    for part in PARTS:
        window = max(least, whole // part)
        if new(window):
            yield window, beside(window)


def _needed(step: StepTrace, homes: Mapping[int, str], lead: int) -> int:
    """Bytes of arena in which every fetch of forward and backward starts `lead` runs ahead."""
    most = 0
    seen: set[tuple[int, frozenset[EntryIndex]]] = set()
    for call in step.calls:
        if call.phase is Phase.STEP or call.schedule.budget_bytes is None:
            continue
        resident = frozenset(
            EntryIndex(n) for n, key in enumerate(call.entries) if homes.get(key) in ON_DEVICE
        )
        if (call.schedule.serial, resident) not in seen:
            seen.add((call.schedule.serial, resident))
            most = max(most, window_bytes(call.schedule, resident, lead))
    return most
