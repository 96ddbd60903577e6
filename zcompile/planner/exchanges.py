"""Exchanges the homes of two entries of one size where compute waits for one of them.

The linear program that places entries (`planner/placement.py`) weighs each phase as a whole. Which
entries of a group rest far away it leaves open, and each group spreads its own over the order of
use, so that all operands of one update may rest far away, and of the next none. Where links have as
much to do as compute, the first is waited for, and behind it a link is idle.

So a plan that is made is simulated. Where compute waits for entries, one that is waited for changes
places with one of the same size that rests nearer by, and is an operand of an update that is waited
for less. What the simulator finds faster stays. Every tier holds as many bytes as before.

What rests on the host and what rests on disk changes places by the hundred besides, as long as a
replay (`planner/replay.py`) finds the step shorter for it: whether layer after layer waits for as
much, whether what the next forward begins with is read behind backward, and whether gradients leave
as fast as they are made shows in no single exchange. The simulator judges what comes of it. Pure.
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from heapq import nlargest, nsmallest
from itertools import combinations, groupby, product

from zcompile.errors import BudgetExceeded
from zcompile.ir.effects import NEW, HomeAccess
from zcompile.ir.step import StepCall, StepTrace, Timeline
from zcompile.ir.types import SMALL_BYTES, EntryRef
from zcompile.machine.cost import Costs
from zcompile.machine.model import TIERS
from zcompile.passes.arrange import Arrangements
from zcompile.planner.bounds import demand_of
from zcompile.planner.placement import PLACED, Room, moved, operands_of_host_updates
from zcompile.planner.replay import Replay
from zcompile.planner.simulator import simulate
from zcompile.planner.step_plan import (
    Seconds,
    StepPlan,
    seconds_with_commit,
    with_homes,
)

WAITS = 50
"""Exchanges are tried as long as compute waits for entries for more than one part in so many of a
step."""
TRIES, IN_VAIN, ALONE_IN_VAIN = 24, 4, 12
"""Exchanges that are tried at most, and in a row without success: each costs an arrangement and a
simulation. In a row more of them, where none are replayed."""
GAINS = 1.0005
"""A step must be so many times as fast after an exchange: many small gains take long to find."""
FAR = TIERS[1:]
"""Tiers from which everything is fetched alike, unless compute reaches one of them."""
REPLAYS, ROUNDS, VAIN_ROUNDS = 96, 3, 2
"""Exchanges that are replayed before the simulator judges the homes that they led to; times that it
does, and in a row without success."""
REPLAYED = 400_000
"""Instructions that are replayed before it does, at most: a few seconds on one core."""


def exchanged(
    step: StepTrace,
    made_for: StepTrace,
    plan: StepPlan,
    costs: Costs,
    room: Room,
    seconds: Seconds,
    commit_bytes_per_s: float | None = None,
) -> tuple[StepPlan, Timeline]:
    """`plan`, or a faster one with as many bytes on each tier; and its times.

    step      as it was recorded
    made_for  that the plan was arranged from (`as_planned`)
    costs     at which steps are simulated
    room      bytes of each tier for the entries of this step, the whole arena among them
    seconds   simulates an arranged step
    commit_bytes_per_s  as of `plan_late_or_not`
    """
    known, updates, draw = Arrangements(), _updates(step), random.Random(0)
    tried = {tuple(plan.placement.homes.values())}
    takes_s = partial(seconds_with_commit, step, commit_bytes_per_s)
    best, best_s, times = plan, takes_s(plan), simulate(plan.step, costs, plan.placement.homes)

    def is_judged_faster(homes: Mapping[EntryRef, str]) -> bool:
        """Whether the simulator finds the step shorter with these homes; then it is the best."""
        nonlocal best, best_s, times
        tried.add(tuple(homes.values()))
        with suppress(BudgetExceeded):
            found = with_homes(best, made_for, homes, seconds, known)
            found_s = takes_s(found)
            if found_s * GAINS < best_s:
                best, best_s = found, found_s
                times = simulate(best.step, costs, homes)
                return True
        return False

    def waits_long() -> bool:
        return _waits_long(_awaited(best.step, times), times)

    def by_replays() -> None:
        """Exchange what rests on host and disk, many at a time."""
        alike, in_vain = _alike_on_far_tiers(made_for, best), 0
        if not alike or not waits_long():
            return
        replay = Replay(best.step, costs, best.placement.homes)
        size = sum(len(call.schedule.instructions) for call in best.step.calls)
        count = min(REPLAYS, max(1, REPLAYED // max(1, size)))
        for _ in range(ROUNDS):
            homes = _replayed(replay, best.placement.homes, alike, draw, count)
            is_new = tuple(homes.values()) not in tried
            in_vain = 0 if is_new and is_judged_faster(homes) else in_vain + 1
            if in_vain == VAIN_ROUNDS:
                return

    def one_by_one() -> None:
        """Exchange what rests on any two tiers, what promises most first."""
        most = IN_VAIN if _alike_on_far_tiers(made_for, best) else ALONE_IN_VAIN
        exchanges, count, in_vain = _exchanges(made_for, best, updates, times, most), 0, 0
        while in_vain < most and count < TRIES and (pair := next(exchanges, None)) is not None:
            homes, (near, far) = dict(best.placement.homes), pair
            homes[near], homes[far] = homes[far], homes[near]
            if tuple(homes.values()) in tried:
                continue
            count, in_vain = count + 1, in_vain + 1
            if is_judged_faster(homes):
                in_vain, exchanges = 0, _exchanges(made_for, best, updates, times, most)

    by_replays()
    before = best
    one_by_one()
    if best is not before:
        by_replays()  # of others on these tiers now
    if best is plan:
        return plan, times
    compute = demand_of(made_for, costs.region_seconds).phases_s
    rests = best.placement.homes
    placement = moved(plan.placement, rests, made_for, costs.machine, room, compute)
    return replace(best, placement=placement), times


def _exchanges(
    step: StepTrace,
    plan: StepPlan,
    updates: Mapping[EntryRef, EntryRef],
    times: Timeline,
    most: int,
) -> Iterator[tuple[EntryRef, EntryRef]]:
    """Entries to exchange, (nearer by, farther away), those that promise most first.

    step     that `plan` was arranged from
    updates  as of `_updates`
    times    of the plan
    most     entries of each size and tier that are looked at
    """
    homes = plan.placement.homes
    waits = defaultdict[EntryRef, float](float)
    for ref, awaited_s in _awaited(plan.step, times).items():
        waits[updates.get(ref, ref)] += awaited_s
    if not _waits_long(waits, times):
        return

    def waited_s(ref: EntryRef) -> float:
        return waits[updates.get(ref, ref)]

    def promises(pair: tuple[EntryRef, EntryRef]) -> float:
        return waited_s(pair[1]) - waited_s(pair[0])

    found = list[tuple[EntryRef, EntryRef]]()
    movable = sorted(_movable(step, homes), key=lambda ref: step.facts[ref].nbytes)
    for _, alike in groupby(movable, key=lambda ref: step.facts[ref].nbytes):
        on = {tier: list[EntryRef]() for tier in TIERS}
        for ref in alike:
            on[homes[ref]].append(ref)
        for near, far in combinations(TIERS, 2):
            least = nsmallest(most, on[near], key=waited_s)
            found += product(least, nlargest(most, on[far], key=waited_s))
    yield from sorted((pair for pair in found if promises(pair) > 0), key=promises, reverse=True)


def _waits_long(waits: Mapping[EntryRef, float], times: Timeline) -> bool:
    """Whether compute waits for entries for long enough to be worth exchanges."""
    return sum(waits.values()) * WAITS > times.step_s


def _alike_on_far_tiers(step: StepTrace, plan: StepPlan) -> list[list[EntryRef]]:
    """The entries of each size that rest on the host or on disk, if there are some on either; none,
    where a replay does not tell what becomes of an exchange: where compute reaches the host, what
    rests there is not fetched, and several ranks wait for each other.

    step  that `plan` was arranged from
    """
    every = [x for call in plan.step.calls for x in call.schedule.effects]
    if plan.arena.reach or any(x.is_collective or x.on_host for x in every):
        return []
    homes = plan.placement.homes
    found = defaultdict[int, list[EntryRef]](list)
    for ref in _movable(step, homes):
        if homes[ref] in FAR:
            found[step.facts[ref].nbytes].append(ref)
    return [refs for refs in found.values() if len({homes[ref] for ref in refs}) == len(FAR)]


def _replayed(
    replay: Replay,
    homes: Mapping[EntryRef, str],
    alike: Sequence[Sequence[EntryRef]],
    draw: random.Random,
    count: int,
) -> dict[EntryRef, str]:
    """The homes after exchanges of entries that are `alike`: of so many that are drawn, each that a
    replay finds shorter."""
    best, every = dict(homes), [refs for refs in alike for _ in refs]
    best_s = replay.seconds(best)
    for _ in range(count):
        refs = draw.choice(every)
        near, far = (draw.choice([r for r in refs if best[r] == tier]) for tier in FAR)
        best[near], best[far] = best[far], best[near]
        found_s = replay.seconds(best)
        if found_s * GAINS < best_s:
            best_s = found_s
        else:
            best[near], best[far] = best[far], best[near]
    return best


def _updates(step: StepTrace) -> dict[EntryRef, EntryRef]:
    """Each operand of an update -> the first operand of it. What no update has is by itself."""
    found = dict[EntryRef, EntryRef]()
    for call in step.calls:
        for row in call.schedule.rows:
            refs = [call.entries[column.entry] for column in row.columns]
            found |= dict.fromkeys(refs, refs[0])
    return found


def _awaited(step: StepTrace, times: Timeline) -> dict[EntryRef, float]:
    """Entries of an arranged step -> the seconds that compute waits for their bytes to move.

    Not those that a call makes: offloaded activations, which the plan of a step does not place.
    """
    moves = [
        {
            x.ticket: _entry_of(call, x.home)
            for x in call.schedule.effects
            if x.home is not None and x.home.role is not NEW
        }
        for call in step.calls
    ]
    waits = defaultdict[EntryRef, float](float)
    for moment in times.moments:
        if moment.stall_s > 0:
            of = moves[moment.call]
            refs = {of[ticket] for ticket in moment.instruction.effects.after if ticket in of}
            for ref in refs:
                waits[ref] += moment.stall_s / len(refs)
    return waits


def _entry_of(call: StepCall, home: HomeAccess) -> EntryRef:
    """The entry that an access is about, which may be a low-precision copy."""
    ref = call.entry_of(home)
    return ref if home.copy_dtype is None else ref.copy


def _movable(step: StepTrace, homes: Mapping[EntryRef, str]) -> Iterator[EntryRef]:
    """Entries that may rest on any tier. Operands of updates of the host rest there together."""
    together = operands_of_host_updates(step)
    for ref, home in homes.items():
        fact = step.facts[ref]
        large = fact.kind in PLACED and fact.nbytes > SMALL_BYTES
        if large and home in TIERS and not fact.pinned and ref not in together:
            yield ref
