"""Plans a whole step: which tier each entry rests on, and how much of the arena is left to stream
through.

The two depend on each other: a larger window hides more transfers, and leaves room for fewer
residents. So a few windows are tried, from nothing (everything rests on the device) to one that
gives every fetch a lead of many runs; each is placed, scheduled and simulated; the fastest is
taken. Pure.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import inf
from types import MappingProxyType
from typing import Protocol

from zcompile.errors import KEEP_LESS, BudgetExceeded, more_device_memory
from zcompile.ir.effects import IN
from zcompile.ir.optimizer_step import (
    DEEP,
    DEEPER,
    DEPTH,
    LEAST_PACED_BYTES,
    NO_ROOM,
    StepRoom,
    paced_bytes,
)
from zcompile.ir.schedule import EntryIndex, Schedule
from zcompile.ir.step import StepTrace
from zcompile.ir.types import ALIGNMENT, ON_DEVICE, SMALL_BYTES, EntryRef, Phase, aligned
from zcompile.ir.units import KiB
from zcompile.machine.model import TIER_LINKS, Machine
from zcompile.memory.step_footprint import can_stay, held_in_steps, staying, staying_bytes
from zcompile.passes.arrange import (
    ArenaShare,
    Arrangements,
    arranged,
    wider_than,
    window_bytes,
)
from zcompile.planner.host_step import updated_on_host, with_host_updates
from zcompile.planner.late_step import LateStep, with_late_step
from zcompile.planner.narrow_step import NOTHING_NARROW, Reading, with_copies
from zcompile.planner.placement import (
    PLACED,
    Group,
    Placement,
    Room,
    group,
    operands_of_host_updates,
    place,
)
from zcompile.planner.whole_step import NO_WHOLES, gathered_in, sets_to_try, with_wholes

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
WITHIN_REACH = 1.1
"""And of these such as take at most so many times the fastest: more chunks in flight make a step up
to a tenth shorter."""
ROUNDED_BADLY = 1.02
"""A placement of whole numbers is tried where all that were rounded are so many times as long as it
promises to be. Of many layers a share loses next to nothing by rounding, so that this costs no time
where plans take long."""
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

NOTHING_LATE: Mapping[EntryRef, int] = MappingProxyType({})

Seconds = Callable[[StepTrace, Mapping[EntryRef, str]], float]
"""(arranged step, homes of its entries) -> seconds of the step."""


@dataclass(frozen=True)
class StepPlan:
    """A plan of a whole step.

    placement  the tier of each entry
    arena      how the arena is shared
    step       as it will be walked
    seconds    that it will take
    late       parameter whose update is late -> serial of the recorded forward that computes it
    reads      serial of a recorded schedule -> the one that reads low-precision copies in its place
    wholes     parameters of which all rests on the device, and not only the share of this rank
    on_host    parameters that the host updates, where they rest
    late_s     seconds of the fastest plan with late updates, where those do not pay; None: they do,
               or no such plan was made
    """

    placement: Placement
    arena: ArenaShare
    step: StepTrace
    seconds: float
    late: Mapping[EntryRef, int] = field(default_factory=lambda: NOTHING_LATE)
    reads: Mapping[int, Schedule] = field(default_factory=lambda: NOTHING_NARROW)
    wholes: frozenset[EntryRef] = NO_WHOLES
    on_host: frozenset[EntryRef] = frozenset()
    late_s: float | None = None

    @property
    def copies(self) -> list[EntryRef]:
        """The copies that are kept, as entries: in low precision, or of the shares of all ranks."""
        return [ref for ref in self.step.facts if ref.is_copy]

    @property
    def resident_bytes(self) -> int:
        return self.placement.resident_bytes(self.step)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the arena: entries that rest there, and the slots of a schedule beside
        them, and results of list ops in an optimizer's step."""
        inside = (
            (0 if c.schedule.scratch_at else c.schedule.peak_bytes)
            + (self.result_bytes if c.phase is Phase.STEP else 0)
            for c in self.step.calls
        )
        return self.resident_bytes + max(inside, default=0)

    @property
    def result_bytes(self) -> int:
        """Bytes of results of list ops that rest in the arena while an optimizer goes on: all of
        them if nothing moves meanwhile and there is room, and never more than that."""
        return self.step.result_bytes

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
    wanted: Sequence[int] | None = None,
    below_s: float = inf,
) -> StepPlan | None:
    """The fastest of the plans tried, or the first that is near the bound; None, if none was made
    and no placement that is left to try promises a step of less than `below_s` seconds.

    machine  links and rates
    room     bytes of each tier for the entries of this step, the whole arena among them
    arena    its window is the least that must be left
    seconds  simulates an arranged step
    least_s  lower bound, in seconds, on any plan; 0, if that is not known
    stay     gradients that stay where backward makes them (`memory/step_footprint.py`)
    wanted   windows to try; None: those that leads and chunks ask for
    below_s  seconds of a step that another plan takes
    raises   BudgetExceeded, if not even what one run reads fits
    """
    made: list[StepPlan] = []
    known: Arrangements = {}
    refused: tuple[int, BudgetExceeded] | None = None
    crowded: list[tuple[int, Placement]] = []
    """Windows beside which the device has no room for what is pinned to it."""
    # Several leads and parts of the arena ask for one window.
    groups = group(step, machine, room, stay)
    beside = cache(partial(_beside, step, machine, room, compute_seconds, stay, groups))
    if wanted is None:
        still = beside(0)
        if _needs_no_window(still, arena):
            if _beside_pinned(step, still, 0) > room.nbytes["device"]:
                crowded.append((0, still))
            else:
                try:
                    # Nothing moves: no other plan is faster.
                    return _planned(step, still, replace(arena, depth=DEPTH), seconds, known)
                except BudgetExceeded as error:
                    refused = 0, error.with_traceback(None)
        windows = list(_windows(step, room.nbytes["device"], arena, beside))
    else:
        windows = [(window, beside(window)) for window in wanted]
    for window, placement in sorted(windows, key=lambda row: (row[1].least_seconds, row[0])):
        shortest_s = min((plan.seconds for plan in made), default=inf)
        if placement.least_seconds > HOPELESS * min(shortest_s, below_s):
            if not made:
                return None
            break
        if _beside_pinned(step, placement, window) > room.nbytes["device"]:
            crowded.append((window, placement))
            continue
        shared = replace(arena, window_bytes=window, depth=DEPTH)
        try:
            plan = _planned(step, placement, shared, seconds, known)
        except BudgetExceeded as error:
            if refused is None or window >= refused[0]:
                # Of the widest, which is the arena that was asked for; without the frames it
                # came through, which hold the values of the call that was about to run.
                refused = window, error.with_traceback(None)
            continue
        if plan.seconds <= NEAR * least_s:
            return plan
        made.append(plan)
    if not made:
        if crowded:
            raise _too_crowded(step, room, arena, crowded)
        assert refused is not None
        _, nearest = refused
        try:
            raise nearest
        finally:
            # Its frames would hold it, and with it all that its callers hold, until a garbage
            # collection: a call that goes on without a plan may need that room.
            del nearest, refused
    for window, placement in _in_whole_entries(windows, made, beside):
        if _beside_pinned(step, placement, window) <= room.nbytes["device"]:
            with suppress(BudgetExceeded):
                shared = replace(arena, window_bytes=window, depth=DEPTH)
                made.append(_planned(step, placement, shared, seconds, known))
                break  # of the others less is promised, and each costs a simulation
    return _simplest((*made, *_refined(step, made, seconds, known, below_s)))


def _pinned_bytes(step: StepTrace) -> int:
    return sum(aligned(fact.nbytes) for fact in step.facts.values() if fact.pinned)


def _beside_pinned(step: StepTrace, placement: Placement, window: int) -> int:
    """Bytes of device that a window needs beside what is pinned there; 0, if nothing is."""
    return aligned(placement.resident_bytes(step) + window) if _pinned_bytes(step) else 0


def _too_crowded(
    step: StepTrace, room: Room, arena: ArenaShare, crowded: Sequence[tuple[int, Placement]]
) -> BudgetExceeded:
    """The error where what is pinned leaves no window: of the narrowest that a step can be arranged
    in, with which it would have a plan."""
    narrowest = sorted(crowded, key=lambda row: row[0])
    window, placement = narrowest[-1]
    for least, beside in narrowest:
        with suppress(BudgetExceeded):
            arranged(step, beside.homes, replace(arena, window_bytes=least, depth=DEPTH))
            window, placement = least, beside
            break
    needed = _beside_pinned(step, placement, window)
    pinned = [(fact.name, fact.nbytes) for fact in step.facts.values() if fact.pinned]
    return BudgetExceeded(
        "device",
        room.nbytes["device"],
        needed,
        "a step whose parameters are kept whole on every rank",
        [*pinned, ("the window to stream through", window)],
        f"{more_device_memory(needed)}, or {KEEP_LESS}",
    )


LATE_PAYS = 1.01
"""A plan with late updates must be so many times as fast: it keeps gradients for longer, and what
reads a parameter right after a step finds it updated only then."""

LATE_LEADS, LATE_PART = (1, 4), 6
"""Runs of lead that windows for late updates have room for, and the part of the arena that is tried
as well: few, since each is a schedule of many chunks."""
WIDE_PART = 8
"""An entry that takes one part in so many of the arena, or more, is wide: windows are fitted to
whole numbers of these."""
SMALL_WINDOW_PART = 12
"""A window of this part of the arena is tried as well where some weights are wider than that, if
there is room for all of these beside it: no placement that leaves one of them elsewhere passes such
a window, and chunks alone need no more."""


class Planned(Protocol):
    """Makes a plan of a step, or none, as `plan_step` does.

    kept     gradients that may not stay
    windows  to try; None: it chooses them
    """

    def __call__(
        self,
        step: StepTrace,
        kept: frozenset[EntryRef],
        windows: Sequence[int] | None,
        below_s: float = inf,
        /,
    ) -> StepPlan | None: ...


def planned_alone(planned: Planned, step: StepTrace, kept: frozenset[EntryRef]) -> StepPlan:
    """The plan of a step that is compared with no other."""
    plan = planned(step, kept, None)
    assert plan is not None, "every step takes less than an infinite time"
    return plan


def plan_late_or_not(
    step: StepTrace,
    planned: Planned,
    kept: frozenset[EntryRef],
    room: Room,
    chunk_bytes: int,
    seconds: Seconds,
    least_window: int = 0,
    commit_bytes_per_s: float | None = None,
    late_chunk_bytes: int = LEAST_PACED_BYTES,
) -> StepPlan:
    """The fastest of some plans: of a step as it was recorded, and with late updates.

    All updates are late that may be, also of what rests on the device: compute of a forward whose
    links are behind it goes on while they catch up, and in a step of its own it would be added to
    that. Where their gradients cannot stay for so long, or a forward has no room for them, those
    are late whose operands move in a step, and the others are computed at once, where they rest.
    Two placements are tried: one for a step with late updates, and that of the step without, where
    a small streaming buffer may leave more on the device.

    planned       makes a plan
    kept          gradients that are not gone when the next forward begins
    room          bytes of each tier for the entries of this step, the whole arena among them
    chunk_bytes   of an operand, at most
    least_window  of the arena, that must be left
    commit_bytes_per_s  at which the commits of a durable run write what does not rest on disk;
                        None: there are no commits
    late_chunk_bytes  of an operand in a chunk of a late update, at least, where room allows
    raises        BudgetExceeded
    """
    plan = planned_alone(planned, step, kept)
    all_late = with_late_step(step, chunk_bytes, least_bytes=late_chunk_bytes)
    if all_late is None or not _moves_in_steps(plan):
        return plan
    if set(all_late.forwards.values()) != {step.calls[0].schedule.serial}:
        # Gradients that stay are counted until the first call of a step only.
        kept |= {ref.gradient for ref in all_late.forwards}
    made, whole = [], room.nbytes["device"]
    windows = _windows_beside(all_late.step, plan, whole, least_window)
    with suppress(BudgetExceeded):
        if windows and (other := planned(all_late.step, kept, windows)) is not None:
            made.append(replace(other, late=all_late.forwards))
    window = max(whole // SMALL_WINDOW_PART, _least_window(step, whole, least_window))
    if (pinning := _with_wide_pinned(all_late.step, window, whole)) is not None:
        with suppress(BudgetExceeded):
            if (other := planned(pinning, kept, [window])) is not None:
                made.append(replace(other, late=all_late.forwards))
    moving = _moving(step, all_late.forwards, plan.placement, room.reach)
    ways: list[Callable[[], LateStep | None]] = [lambda: all_late]
    if set(moving) != set(all_late.forwards):
        ways.append(lambda: with_late_step(step, chunk_bytes, moving, late_chunk_bytes))
    for way in ways:
        late = way()
        if late is None or not can_stay(late.step, plan.placement.stay, room.held_bytes, kept):
            continue
        if late is all_late and any(_is_planned_as(other, plan) for other in made):
            break  # the search has found that placement
        with suppress(BudgetExceeded):
            found = _planned(late.step, plan.placement, plan.arena, seconds)
            made.append(replace(found, late=late.forwards))
            break

    takes_s = partial(seconds_with_commit, step, commit_bytes_per_s)
    if not made:
        return plan
    best = min(made, key=takes_s)
    if takes_s(best) * LATE_PAYS < takes_s(plan):
        return best
    return replace(plan, late_s=best.seconds)


def _is_planned_as(plan: StepPlan, other: StepPlan) -> bool:
    """Whether two plans have everything rest in the same places, and stream through one window."""
    return plan.arena == other.arena and plan.placement.homes == other.placement.homes


def _with_wide_pinned(step: StepTrace, window: int, whole: int) -> StepTrace | None:
    """The step with all that is wider than a window of an arena of `whole` bytes pinned to the
    device; None if nothing is, or if there is no room for that."""
    wide = wider_than(step, window)
    nbytes = sum(aligned(fact.nbytes) for ref, fact in step.facts.items() if ref in wide)
    if not wide or nbytes + _pinned_bytes(step) > whole - window:
        return None
    facts = {ref: replace(f, pinned=f.pinned or ref in wide) for ref, f in step.facts.items()}
    return replace(step, facts=facts)


def seconds_with_commit(step: StepTrace, commit_bytes_per_s: float | None, plan: StepPlan) -> float:
    """Seconds of a step of a plan, with the commit behind it, if there is one."""
    if commit_bytes_per_s is None:
        return plan.seconds
    return plan.seconds + _committed_beside(plan, step) / commit_bytes_per_s


def _to_beat(seconds: float, pays: float) -> float:
    """The seconds that a plan must stay below, to be `pays` times as fast as one that takes
    `seconds`; infinite for 0 times."""
    return seconds / pays if pays else inf


HOST_PAYS = 1.01
"""A plan in which the host computes updates must be so many times as fast."""


def plan_on_host_or_not(
    step: StepTrace,
    plan: StepPlan,
    planned: Planned,
    kept: frozenset[EntryRef],
    room: Room,
    least_window: int = 0,
    commit_bytes_per_s: float | None = None,
) -> StepPlan:
    """`plan`, or a faster one in which the host computes updates of parameters that rest there with
    gradients and states; no update is late in that.

    planned  makes a plan
    kept     gradients that are not gone when the next forward begins
    room     bytes of each tier for the entries of this step, the whole arena among them
    least_window, commit_bytes_per_s  as of `plan_late_or_not`
    """
    takes_s = partial(seconds_with_commit, step, commit_bytes_per_s)
    if room.reach or not (_moves_in_steps(plan) or plan.late):
        return plan
    marked = with_host_updates(step)
    if marked is None:
        return plan
    homed = {ref for ref in operands_of_host_updates(marked) if ref.is_gradient}
    # Other entries rest on the device than in `plan`: perhaps none that a forward reads.
    whole, nothing = room.nbytes["device"], dict[EntryRef, str]()
    beside = {min(_needed(step, nothing, lead), whole) for lead in LATE_LEADS}
    windows = sorted({*_windows_beside(step, plan, whole, least_window), *beside})
    windows = [window for window in windows if window >= least_window]
    if not windows:
        return plan
    with suppress(BudgetExceeded):
        found = planned(marked, kept | homed, windows, _to_beat(takes_s(plan), HOST_PAYS))
        if found is not None and takes_s(found) * HOST_PAYS < takes_s(plan):
            on_host = updated_on_host(marked, found.placement.homes)
            return replace(found, on_host=on_host) if on_host else plan
    return plan


def _committed_beside(plan: StepPlan, step: StepTrace) -> int:
    """Bytes that the commit of a durable run writes when the step has ended: what the optimizer has
    written that does not rest on disk, and gradients of late updates that do not, as inputs of what
    is still to come.

    step  as it was recorded
    """
    rows = ((call, row) for call in step.calls for row in call.schedule.rows)
    written = {call.entries[c.entry] for call, row in rows for c in row.columns if c.writes}
    refs = {ref for ref in written if not ref.is_gradient} | {ref.gradient for ref in plan.late}
    facts = [step.facts[ref] for ref in refs if ref in step.facts]
    homes = plan.placement.homes
    return sum(fact.nbytes for fact in facts if homes.get(fact.ref, fact.home) != "disk")


def _windows_beside(step: StepTrace, plan: StepPlan, whole: int, least_window: int) -> list[int]:
    """Windows to try for a step whose updates are computed elsewhere than in `plan`."""
    homes = plan.placement.homes
    found = {_needed(step, homes, lead) for lead in LATE_LEADS}
    window, left = plan.arena.window_bytes, _left_by(plan, whole)
    found |= {window, whole // LATE_PART}
    if (left - window) * MUCH_WIDER > window:
        found.add(left)
    found |= _beside_whole_entries(step, homes, whole)
    least = _least_window(step, whole, least_window)
    return sorted({min(max(window, least), whole) for window in found})


def _beside_whole_entries(
    step: StepTrace, homes: Mapping[EntryRef, str], whole: int
) -> frozenset[int]:
    """The window that as many of the widest entries as can rest beside it leave, where each of
    these takes a large part of an arena of `whole` bytes: with another, part of an entry lies idle.

    homes  under which all that one run reads fits the window
    """
    sizes = [aligned(fact.nbytes) for fact in step.facts.values() if fact.kind in PLACED]
    widest = max(sizes, default=0)
    if widest * WIDE_PART < whole:
        return frozenset()
    left = whole - sum(size for size in sizes if size <= SMALL_BYTES)
    spare = left - _needed(step, homes, 0)
    return frozenset() if spare < 0 else frozenset({left - spare // widest * widest})


def _least_window(step: StepTrace, whole: int, least_window: int) -> int:
    """The least window to try of an arena of `whole` bytes, of which `least_window` must be left.

    With less, chunks of an optimizer's step are small and many, in the forward too, which needs
    room for the least of them alone where its weights rest on the device.
    """
    free = max(0, whole - _pinned_bytes(step))
    return max(least_window, free // PARTS[0], min(free // 8, LEAST_WINDOW))


WIDER, MUCH_WIDER = 16, 2
"""A plan is tried with all that its residents leave to stream through where that is wider than its
window by more than one part in so many; and late updates beside such a window, which takes longer
to find out."""


def _left_by(plan: StepPlan, device_bytes: int) -> int:
    """Bytes of the arena that residents leave: whole entries do not fill what a window leaves for
    them.

    device_bytes  of the whole arena
    """
    return (device_bytes - plan.resident_bytes) // ALIGNMENT * ALIGNMENT


def widened_or_not(
    step: StepTrace, plan: StepPlan, device_bytes: int, seconds: Seconds
) -> StepPlan:
    """`plan`, or a faster one with the same residents that streams through all that they leave.

    step          that the plan was arranged from (`as_planned`)
    device_bytes  of the whole arena
    """
    left, window = _left_by(plan, device_bytes), plan.arena.window_bytes
    if not window or (left - window) * WIDER <= window:
        return plan
    with suppress(BudgetExceeded):
        wider = replace(plan.arena, window_bytes=left)
        found = _planned(step, plan.placement, wider, seconds)
        if found.seconds < plan.seconds:
            return replace(plan, arena=wider, step=found.step, seconds=found.seconds)
    return plan


NARROW_PAYS = 1.01
"""A plan with low-precision copies must be so many times as fast: they take memory."""


def plan_narrow_or_not(
    step: StepTrace,
    plan: StepPlan,
    planned: Planned,
    reading: Reading,
    room: Room,
    copies: bool | None = None,
) -> StepPlan:
    """`plan`, or a faster one that reads low-precision copies of weights, where the tiers have room
    for them.

    planned  makes a plan, for a step whose updates are not late
    copies   whether it is to read any if there is room, as another rank does, or none; None: it
             reads them where that is faster
    """
    if copies is False or not (copies or _moves_weights(plan)):
        return plan
    narrow = with_copies(step, reading)
    if narrow is None or not _has_room(narrow.step, room):
        return plan
    with suppress(BudgetExceeded):
        below_s = inf if copies else _to_beat(plan.seconds, NARROW_PAYS)
        found = planned(narrow.step, frozenset(), None, below_s)
        if found is not None and (copies or found.seconds < below_s):
            return replace(found, reads=narrow.reads)
    return plan


WHOLES_PAY = 1.01
"""A plan that keeps all of some parameters must be so many times as fast: they take memory."""


def plan_with_wholes(step: StepTrace, planned: Planned, wanted: frozenset[EntryRef]) -> StepPlan:
    """The plan of a step in which all of `wanted` is kept on the device; no update is late.

    planned  makes a plan
    raises   BudgetExceeded
    """
    return replace(planned_alone(planned, with_wholes(step, wanted), NO_WHOLES), wholes=wanted)


def plan_whole_or_not(
    step: StepTrace, plan: StepPlan, planned: Planned, device_bytes: int
) -> StepPlan:
    """`plan`, or a faster one that keeps all of some parameters on the device.

    planned       makes a plan, for a step whose updates are not late
    device_bytes  that there are for entries
    """
    best = plan
    for wanted in sets_to_try(gathered_in(step), device_bytes):
        with suppress(BudgetExceeded):
            below_s = _to_beat(best.seconds, WHOLES_PAY)
            found = planned(with_wholes(step, wanted), NO_WHOLES, None, below_s)
            if found is not None and found.seconds < below_s:
                best = replace(found, wholes=wanted)
    return best


def _moves_weights(plan: StepPlan) -> bool:
    """Whether weights are brought for forward or backward."""
    return any(
        x.lane is IN and (home := x.home) is not None and home.lasting
        for call in plan.step.calls
        if call.phase is not Phase.STEP
        for x in call.schedule.effects
    )


def _has_room(step: StepTrace, room: Room) -> bool:
    """Whether the tiers have room for all entries of a step."""
    nbytes = sum(aligned(fact.nbytes) for fact in step.facts.values())
    return nbytes <= sum(room.nbytes.values())


def as_read(step: StepTrace, plan: StepPlan) -> StepTrace:
    """A step as it was recorded, with the copies of the plan."""
    if plan.wholes:
        return with_wholes(step, plan.wholes)
    narrow = with_copies(step, plan.reads.get) if plan.reads else None
    return step if narrow is None else narrow.step


def as_planned(step: StepTrace, plan: StepPlan) -> StepTrace:
    """A step as it was recorded, with the copies of the plan, and with those of its updates late,
    or on the host, that are so in it."""
    step = as_read(step, plan)
    if plan.on_host and (marked := with_host_updates(step, plan.on_host)) is not None:
        return marked
    if not plan.late:
        return step
    arena = plan.arena
    late = with_late_step(step, arena.chunk_bytes, plan.late, arena.late_chunk_bytes)
    return step if late is None else late.step


def _moves_in_steps(plan: StepPlan) -> bool:
    """Whether anything moves while an optimizer goes on."""
    steps = (call.schedule for call in plan.step.calls if call.phase is Phase.STEP)
    return any(x.is_transfer for schedule in steps for x in schedule.effects)


def _moving(
    step: StepTrace, weights: Mapping[EntryRef, int], placement: Placement, reach: bool
) -> list[EntryRef]:
    """The parameters of which an operand of the update moves when that is computed, in order."""
    still = ON_DEVICE | {"host"} if reach else ON_DEVICE
    rows = (
        {call.entries[column.entry] for column in row.columns}
        for call in step.calls
        for row in call.schedule.rows
    )
    moving = set[EntryRef]()
    for refs in rows:
        if any(placement.homes.get(ref, step.facts[ref].home) not in still for ref in refs):
            moving |= refs & weights.keys()
    return [ref for ref in weights if ref in moving]


def _simplest(plans: Sequence[StepPlan]) -> StepPlan:
    """The plan with the fewest transfers of the fastest, and of those that take hardly longer.

    Each transfer is started by the host, later than it was foreseen where the host is busy.
    """
    most = NEAR * min(plan.seconds for plan in plans)
    near = [plan for plan in plans if plan.seconds <= most]
    return min(near, key=lambda plan: (plan.transfers, plan.seconds))


def _refined(
    step: StepTrace,
    made: Sequence[StepPlan],
    seconds: Seconds,
    known: Arrangements,
    below_s: float,
) -> Iterator[StepPlan]:
    """The fastest plans with more chunks of an optimizer's step in flight, if it moves anything.

    Also without a step scratch, into which nothing is handed over. Forward and backward stay as
    they were arranged, which is `known`.
    """
    best = sorted(made, key=lambda plan: plan.seconds)[:BEST]
    for plan in best:
        near = plan.seconds <= WITHIN_REACH * min(best[0].seconds, below_s)
        if near and plan.arena.window_bytes and _moves_in_steps(plan):
            scratch = replace(plan.arena.scratch, depth=DEEPER)
            rooms = (scratch, NO_ROOM) if plan.scratch_bytes else (NO_ROOM,)
            for room in rooms:
                with suppress(BudgetExceeded):
                    deeper = replace(plan.arena, depth=DEEP, scratch=room)
                    yield _planned(step, plan.placement, deeper, seconds, known)


def with_homes(
    plan: StepPlan,
    step: StepTrace,
    homes: Mapping[EntryRef, str],
    seconds: Seconds,
    known: Arrangements | None = None,
) -> StepPlan:
    """`plan` with entries on other tiers, and all else as it is.

    step    that the plan was arranged from (`as_planned`)
    known   what was arranged of that before; is added to
    raises  BudgetExceeded
    """
    placement = replace(plan.placement, homes=homes)
    found = _planned(step, placement, plan.arena, seconds, known)
    return replace(plan, placement=placement, step=found.step, seconds=found.seconds)


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
    read = as_read(step, plan)
    homes = {ref: rests.get(ref, planned.get(ref, fact.home)) for ref, fact in read.facts.items()}
    if all(planned.get(ref, read.facts[ref].home) == home for ref, home in homes.items()):
        return plan
    placement = replace(plan.placement, homes={**planned, **homes})
    shared = replace(plan.arena, window_bytes=window_bytes)
    for made, late in ((as_planned(step, plan), plan.late), (read, NOTHING_LATE)):
        with suppress(BudgetExceeded):
            made_plan = _planned(made, placement, shared, seconds)
            on_host = updated_on_host(made, placement.homes)
            same = replace(made_plan, late=late, reads=plan.reads, wholes=plan.wholes)
            return replace(same, on_host=on_host)
    return plan  # the first call that needs more of the arena than is left will get it


def _planned(
    step: StepTrace,
    placement: Placement,
    arena: ArenaShare,
    seconds: Seconds,
    known: Arrangements | None = None,
) -> StepPlan:
    """The plan of a placement and an arena.

    known  what was arranged for other plans of the step
    """
    made = arranged(step, placement.homes, arena, known)
    left = arena.nbytes - arena.window_bytes - placement.resident_bytes(made)
    made = replace(made, result_bytes=min(step.result_bytes, max(left, 0) // ALIGNMENT * ALIGNMENT))
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
    rates = [link.bytes_per_s for name, link in machine.links.items() if name in TIER_LINKS]
    paced = paced_bytes(rates, chunk_bytes)
    scratch = min(SCRATCH_OPERANDS * DEEP * paced, beside_bytes // SCRATCH_SHARE)
    stay = staying(step, beside_bytes, scratch, kept)
    free = max(0, beside_bytes - held_in_steps([call.with_staying(stay) for call in step.calls]))
    nbytes = min(free, SCRATCH_CHUNKS * chunk_bytes) // ALIGNMENT * ALIGNMENT
    return stay, StepRoom(aligned(arena_bytes), nbytes, paced, DEEP)


def _beside(
    step: StepTrace,
    machine: Machine,
    room: Room,
    compute_seconds: Mapping[Phase, float],
    stay: frozenset[EntryRef],
    groups: Sequence[Group],
    window: int,
    whole: bool = False,
) -> Placement:
    """The placement in what a window leaves of the device.

    groups, whole  as of `place`
    """
    left = {**room.nbytes, "device": room.nbytes["device"] - window}
    return place(step, machine, replace(room, nbytes=left), compute_seconds, stay, whole, groups)


Beside = Callable[..., Placement]
"""(window, whole=False) -> `_beside`, of one step and its room."""


def _in_whole_entries(
    windows: Sequence[tuple[int, Placement]],
    made: Sequence[StepPlan],
    beside: Beside,
) -> list[tuple[int, Placement]]:
    """Those of the windows with which a placement by whole numbers promises a step that is well
    below all that were made, with that placement, if it is another than the rounded one, which was
    tried; the most promising first.

    beside  makes one
    """
    best = min(plan.placement.rounded_seconds for plan in made) / ROUNDED_BADLY
    rows = []
    for window, rounded in windows:
        if rounded.least_seconds < best:
            whole = beside(window, whole=True)
            if whole.rounded_seconds < best and whole.homes != rounded.homes:
                rows.append((window, whole))
    return sorted(rows, key=lambda row: (row[1].rounded_seconds, row[0]))


def _needs_no_window(placement: Placement, arena: ArenaShare) -> bool:
    """Whether everything rests on the device, and no window is asked for."""
    return set(placement.homes.values()) <= ON_DEVICE and not arena.window_bytes


def _windows(
    step: StepTrace, whole: int, arena: ArenaShare, beside: Beside
) -> Iterator[tuple[int, Placement]]:
    """Windows to try, each with the placement beside it.

    whole   bytes of the arena
    beside  makes such a placement
    """
    pinned = _pinned_bytes(step)
    free = max(0, whole - pinned)
    least = _least_window(step, whole, arena.window_bytes)
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
    # All that is left beside what is pinned, if that is all that it leaves.
    if pinned and free not in tried:
        yield free, beside(free)


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
