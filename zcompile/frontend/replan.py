"""Plans the steps of a session from those it has seen, and puts the plans into force.

The first steps run as the passes planned them, with everything fetched. Their record, with the
seconds of each region, becomes a plan (`planner/step_plan.py`), entries move to their homes once,
and from then on schedules are arranged for them (`passes/lower.py`). Joins the two wings for a
whole step as `backend.py` does for one graph.

The parts: schedules for the arena and the tiers as they are (`refitted`, `Rescheduling`), a plan of
a step on the machine of a session (`plan_of`, pure), and the controller that decides when to plan
and moves entries (`StepController`).
"""

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from zcompile.errors import BudgetExceeded, DiskUnusable, Unsupported
from zcompile.ir.optimizer_step import DEPTH, NO_ROOM
from zcompile.ir.schedule import EntryIndex, Schedule
from zcompile.ir.step import StepCall, StepTrace, joined, lasting, without_dead_entries
from zcompile.ir.types import ALIGNMENT, HELD, EntryRef, Phase
from zcompile.ir.units import show_size
from zcompile.machine.cost import Costs, replan_pays
from zcompile.memory.step_footprint import held_peak
from zcompile.passes.lower import ArenaShare, arrange
from zcompile.planner.bounds import bound, demand_of
from zcompile.planner.floor import floor
from zcompile.planner.placement import Room
from zcompile.planner.simulator import predicted, step_seconds
from zcompile.planner.step_plan import (
    UNBOUNDED_LEAD,
    Seconds,
    StepPlan,
    at_rest,
    plan_step,
    stay_and_scratch,
)
from zcompile.runtime.probe import machine_for
from zcompile.runtime.relocate import evict, relocate
from zcompile.runtime.session import Session
from zcompile.runtime.store.store import Entry
from zcompile.runtime.transfer.interrupts import deferred_interrupts
from zcompile.verify.schedule import verify_schedule


def lead_of(session: Session) -> int:
    """Runs that a fetch may start ahead, where bytes alone decide."""
    return UNBOUNDED_LEAD if session.config.max_lead else 0


def refitted(
    session: Session,
    schedule: Schedule,
    resident: frozenset[EntryIndex],
    budget_bytes: int,
    stay: frozenset[EntryIndex] = frozenset(),
) -> Schedule:
    """`schedule` arranged for a call whose `resident` entries rest on the device, and proven.

    stay    entries whose gradients stay there
    raises  BudgetExceeded, if what one run reads does not fit `budget_bytes` of the arena
    """
    made = arrange(schedule, resident, budget_bytes, lead_of(session), stay)
    verify_schedule(made)
    return made


def refusal(session: Session, schedule: Schedule, error: BudgetExceeded) -> BudgetExceeded:
    """The error that `refitted` raised, in terms of the device instead of the arena."""
    what = "parameters that one piece of compute reads together"
    return session.split.too_small(error, f"{schedule.phase.value} pass of the model", what)


class Rescheduling:
    """The controller of a session that plans no steps. Nothing rests on the device.

    Calls walk what the passes made, arranged anew where the arena has become too small for it.
    """

    records, arranges = False, False

    def __init__(self, session: Session) -> None:
        self._session = weakref.ref(session)
        self._made: dict[tuple[int, int], Schedule] = {}

    def fit(self, schedule: Schedule, entries: Sequence[Entry]) -> Schedule:
        """The schedule for a call.

        raises  BudgetExceeded, if what one run reads does not fit any more
        """
        session = self._session()
        assert session is not None, "a session asks, so it is there"
        budget = session.arena.budget_bytes
        if schedule.budget_bytes is None or schedule.arena_bytes <= budget:
            return schedule
        if schedule.phase is Phase.STEP:
            return schedule
        key = schedule.serial, budget
        if key not in self._made:
            try:
                self._made[key] = refitted(session, schedule, frozenset(), budget)
            except BudgetExceeded as error:
                raise refusal(session, schedule, error) from error
        return replace(self._made[key], holds=schedule.holds)

    def step_ended(self, step: StepTrace) -> None:
        """Nothing is planned."""

    def arena_resizes(self) -> None:
        """Nothing rests there; what is arranged for its size is kept by its size."""

    def reclaim(self, needed_bytes: int) -> bool:
        return False

    def evict_staying(self) -> None:
        """No gradient stays where it was made."""

    def prediction(self) -> None:
        return None


HOLES = 512
"""1/HOLES of the host is left over for holes. An entry that finds none large enough goes to the
disk, if there is one; that costs no more than to leave its size over for good."""


def costs_of(session: Session) -> Costs:
    """Costs of this machine, and of what ran on it."""
    machine = machine_for(session.config, session.device)
    return session.executor.clocks.costs(machine, session.ways())


def seconds_at(costs: Costs) -> Seconds:
    """The function that simulates an arranged step at these costs."""
    return lambda made, homes: step_seconds(made, costs, homes)


def plan_of(
    session: Session, step: StepTrace, costs: Costs, least_window: int, kept: frozenset[EntryRef]
) -> StepPlan:
    """The plan for a step like this one.

    least_window  bytes of the arena to leave free
    kept          gradients that are not gone when the next forward begins, so that none of them may
                  stay outside the arena
    raises        BudgetExceeded
    """
    room = room_of(session, step)
    chunk_bytes, arena_bytes = session.device.chunk_bytes, session.arena.budget_bytes
    stay, scratch = stay_and_scratch(
        step, costs.machine, arena_bytes, session.split.held_bytes, chunk_bytes, kept
    )
    window = min(least_window, arena_bytes)
    arena = ArenaShare(window, lead_of(session), chunk_bytes, room.reach, scratch=scratch)
    compute = demand_of(step, costs.region_seconds).phases_s
    return plan_step(step, costs.machine, room, arena, compute, seconds_at(costs), stay=stay)


def whole_room(session: Session) -> Room:
    """The budgets as they were given, whatever they were split into."""
    nbytes = {**session.homes.capacities(), "device": session.device_budget}
    nbytes["host"] = session.host_budget
    return Room(nbytes, session.reaches_host, session.reaches_host)


def prediction_of(
    session: Session, plan: StepPlan, base: StepTrace, costs: Costs
) -> dict[str, Any]:
    """`simulator.predicted` of a plan that was made for `base`, with its bound and its floor."""
    made = predicted(plan.step, costs, plan.placement.homes)
    demand = demand_of(base, costs.region_seconds)
    links = machine_for(session.config, session.device).links  # at the rates that they have
    least = bound(demand, links, room_of(session, base, holes=False))
    lowest = floor(base, demand, costs, links, whole_room(session))
    return made | {
        "least_s": least.seconds,
        "binding": least.binding,
        "least_compute_s": sum(demand.phases_s.values()),
        "floor_s": lowest.seconds,
        "floor_binding": lowest.binding,
        "floor_compute_s": lowest.compute_s,
    }


def room_of(session: Session, step: StepTrace, holes: bool = True) -> Room:
    """Bytes of the tiers for the entries of this step: all but those of other entries, and of
    `holes` on the host."""
    berths = session.arena.budget_bytes // ALIGNMENT * ALIGNMENT  # the last ends there
    nbytes = {"device": berths, **session.homes.capacities()}
    for entry in session.entries():
        if entry.ref not in step.facts and entry.home in nbytes:
            nbytes[entry.home] -= entry.place.extent.nbytes
    if holes:  # between entries of different sizes; what finds none goes to disk
        nbytes["host"] -= nbytes["host"] // HOLES
    reach, ring = session.reaches_host, session.ways().ring_bytes
    return Room(nbytes, reach, reach, ring, session.split.held_bytes)


log = logging.getLogger(__name__)

WARM_UP = 2
"""Steps that are seen before one is planned: the first makes the states, the second is usual."""

REVIEW = 3
"""A plan is reviewed again when so many times as many steps have been seen: costs that are known
better by then are worth some milliseconds, and those of a long run are known."""
PREDICTED_FOR = 4
"""Steps for which a prediction is not made anew."""
MOST_RELIEFS = 4
"""After so many, what needs the room has it for good."""
MOST_PLANS = 8
"""Most plans of a run: after so many its steps have nothing in common that is worth another."""


class StepController:
    """Plans the steps of one session, and gives its executor the schedules for the plan."""

    records = True

    def __init__(self, session: Session) -> None:
        self._session = weakref.ref(session)
        self._seen = 0
        self._arranged: dict[tuple[object, ...], tuple[Schedule, int]] = {}
        self._least_window = 0
        self._plans = 0
        self._next_review = WARM_UP * REVIEW
        self._predicted: tuple[int, dict[str, Any]] | None = None
        self._tried = False
        self._reliefs = 0
        self._evicted_in, self._barred = -1, False
        """The last step in which gradients that stayed had to go home; whether none may now."""
        self._base = StepTrace(())
        """What the plan in force was made for, as it was recorded."""
        self.plan: StepPlan | None = None

    @property
    def session(self) -> Session:
        session = self._session()
        assert session is not None, "a session asks, so it is there"
        return session

    def step_ended(self, step: StepTrace) -> None:
        """Take note of a recorded step, and plan, if it is time and there is anything new to
        plan."""
        self._seen += 1
        if self._seen < WARM_UP or self._plans > MOST_PLANS:
            return
        if self._tried and lasting(step) <= self._base.facts.keys():
            self._review()
            return
        alive = {entry.ref for entry in self.session.entries()}
        self._base, self._tried = joined(without_dead_entries(self._base, alive), step), True
        if (plan := self._try()) is not None:
            self.apply(plan)
        self._plans += 1
        if self._plans > MOST_PLANS:
            log.warning(
                "every step uses other parameters or states than those before: the plan of %d "
                "steps together stays",
                MOST_PLANS,
            )

    def _try(self) -> StepPlan | None:
        """A plan for `_base`; without one training goes on as before."""
        try:
            return self.planned(self._base)
        except (BudgetExceeded, Unsupported, DiskUnusable) as error:
            log.warning("a whole step could not be planned, so entries stay: %s", error)
            return None

    def _review(self) -> None:
        """Plan again, now and then, at costs as they are by now; put the plan into force if it
        pays."""
        plan = self.plan
        if plan is None or self._seen < self._next_review:
            return
        self._next_review = self._seen * REVIEW
        began = perf_counter()
        now_s = step_seconds(plan.step, self.costs(), plan.placement.homes)
        other = self._try()
        if other and replan_pays(now_s, other.seconds, 2 * (perf_counter() - began)):
            took = now_s, other.seconds
            log.info("costs have changed: a step would take %.3g s, and %.3g s planned anew", *took)
            self.apply(other)

    def prediction(self) -> dict[str, Any] | None:
        """Times of a step under the plan, at costs of a few steps ago at most, with bound and
        floor; None without a plan."""
        if self.plan is None:
            return None
        if self._predicted is None or self._seen >= self._predicted[0] + PREDICTED_FOR:
            self._predicted = self._seen, self.predicted_at(self.costs())
        return self._predicted[1]

    def predicted_at(self, costs: Costs) -> dict[str, Any]:
        """As `prediction`, at these costs; there is a plan."""
        assert self.plan is not None
        return prediction_of(self.session, self.plan, self._base, costs)

    def costs(self) -> Costs:
        """Costs of this machine, and of what ran on it."""
        return costs_of(self.session)

    def planned(self, step: StepTrace) -> StepPlan:
        """The plan for a step like this one, before the next begins: gradients that are alive then
        may not stay.

        raises  BudgetExceeded
        """
        alive = (e.ref for e in self.session.entries() if e.ref.is_gradient)
        kept = frozenset(step.facts if self._barred else alive)
        return plan_of(self.session, step, self.costs(), self._least_window, kept)

    def apply(self, plan: StepPlan) -> None:
        """Move every entry to its home; from here on schedules are arranged for it.

        At every instant a schedule may be arranged for where entries rest by then: what is on the
        device lies in berths, and the window ends where they begin. An interrupt comes afterwards.
        """
        with deferred_interrupts():
            self._apply(plan)

    def _apply(self, plan: StepPlan) -> None:
        session, homes = self.session, plan.placement.homes
        device = session.homes.device
        self._quiet()
        device.window_bytes = plan.arena.window_bytes
        left = evict(session, [e for e in self._near() if self._is_misplaced(e, homes)], homes)
        device.clear()
        wanted = sorted(
            (ref for ref, home in homes.items() if home == "device"),
            key=lambda ref: -plan.step.facts[ref].nbytes,
        )
        facts = [plan.step.facts[ref] for ref in wanted]
        crowded = [f.ref for f in facts if not device.plan(f.ref, f.name, f.nbytes)]
        homes = {ref: home for ref, home in homes.items() if ref not in set(crowded)}
        astray, rests = relocate(session, homes, self._base)
        # A gradient that has no berth is no entry yet, so that nothing says where it rests.
        rests = {**dict.fromkeys(crowded, "host"), **rests}
        plan = at_rest(plan, self._base, rests, session.window_bytes, seconds_at(self.costs()))
        self.plan, self._predicted = plan, None
        session.depth = plan.arena.depth
        session.scratch_use.plan(plan.arena.scratch)
        session.homes.plan_device(max(call.schedule.peak_bytes for call in plan.step.calls))
        lost = len(left) + len(crowded) + len(astray)
        binding = (f"{phase.value}: {by}" for phase, by in plan.placement.binding.items())
        log.info(
            "a step was planned: %s rest on the device, %s are left to stream through, and %s of "
            "gradients stay beside; %.3g s a step, bound by %s%s",
            show_size(device.planned_bytes),
            show_size(session.window_bytes),
            show_size(plan.staying_bytes),
            plan.seconds,
            ", ".join(binding),
            f"; {lost} entries found no room where they should rest" if lost else "",
        )

    def withdraw(self) -> None:
        """Move everything off the device, as far as other tiers have room."""
        session, device = self.session, self.session.homes.device
        with deferred_interrupts():
            self._quiet()
            self.plan, session.depth = None, DEPTH
            session.scratch_use.plan(NO_ROOM)
            session.homes.wanted = {}
            evict(session, self._near(), {})
            device.clear()
            device.window_bytes = session.arena.budget_bytes

    def evict_staying(self) -> None:
        """Send gradients home that stayed and were not set to None, since a forward needs their
        room.

        An evaluation may come before they are. If it is so step after step, none stays any more.
        """
        session = self.session
        held = [entry for entry in session.entries() if entry.home == HELD]
        if not held:
            return
        with deferred_interrupts():
            self._quiet()
            evict(session, held, {})
        again, self._evicted_in = self._seen - self._evicted_in == 1, self._seen
        log.info(
            "%d gradients that stayed go home: a forward needs their room%s",
            len(held),
            "; the next plan lets none stay" if again else "",
        )
        if again:
            self._barred, self._tried = True, False

    def arena_resizes(self) -> None:
        """Drop the plan: the arena is about to have another size."""
        self._plans = max(0, self._plans - (self.plan is not None))
        self.withdraw()
        self._tried = False

    def _quiet(self) -> None:
        """Wait until nothing is in flight or handed over, and forget schedules for where entries
        rest now."""
        session = self.session
        session.executor.foresight.abandon()
        session.drain()
        session.forget_steps()
        self._arranged.clear()

    def _near(self) -> list[Entry]:
        """Entries that rest on the device."""
        return [entry for entry in self.session.entries() if entry.place.tier.on_device]

    def _is_misplaced(self, entry: Entry, homes: Mapping[EntryRef, str]) -> bool:
        """Whether an entry is to leave the device, or its address there."""
        ref, extent, device = entry.ref, entry.place.extent, self.session.homes.device
        stays = homes.get(ref) == "device" and device.is_reserved_for(ref, extent)
        return not stays or extent.offset < device.window_bytes

    def reclaim(self, needed_bytes: int) -> bool:
        """Something needs more of the arena than the plan left: withdraw, and remember how much.

        False if that cannot help: nothing rests there, or a schedule that reads it is running.
        """
        session = self.session
        resident = session.homes.device.planned_bytes
        if not resident or session.executor.is_running:
            return False
        at_once = session.arena.used_bytes - resident + needed_bytes
        more = self._least_window + self._least_window // 8
        self._least_window = min(max(more, at_once), session.arena.budget_bytes)
        self._reliefs += 1
        self.withdraw()
        self._tried = self._reliefs >= MOST_RELIEFS
        log.log(
            logging.WARNING if self._tried else logging.INFO,
            "%s of the arena are needed at once: what rests on the device goes back%s",
            show_size(at_once),
            ", and stays there, since this keeps happening" if self._tried else "",
        )
        return True

    @property
    def arranges(self) -> bool:
        """Whether a plan is in force, or an entry rests on the device that could not leave."""
        return self.plan is not None or bool(self.session.homes.device.planned_bytes)

    def fit(self, schedule: Schedule, entries: Sequence[Entry]) -> Schedule:
        """The schedule for these very entries, where they rest now."""
        if schedule.phase is Phase.STEP or schedule.budget_bytes is None:
            return schedule
        session = self.session
        if not self.arranges and schedule.arena_bytes <= session.arena.budget_bytes:
            return schedule
        resident = frozenset(
            EntryIndex(n) for n, entry in enumerate(entries) if entry.place.tier.on_device
        )
        try:
            return self._refitted(schedule, resident, self._staying(schedule, entries))
        except BudgetExceeded as error:
            if not self.reclaim(error.needed_bytes):
                raise refusal(session, schedule, error) from error
            return self.fit(schedule, entries)  # which the arena may be too small for as it is

    def _staying(self, schedule: Schedule, entries: Sequence[Entry]) -> frozenset[EntryIndex]:
        """Entries whose gradients stay where this call makes them."""
        if self.plan is None or schedule.serial not in self._base.serials:
            return frozenset()
        call = StepCall(schedule, tuple(entry.ref for entry in entries))
        return call.making(self.plan.placement.stay)

    def _refitted(
        self, schedule: Schedule, resident: frozenset[EntryIndex], stay: frozenset[EntryIndex]
    ) -> Schedule:
        """The schedule arranged for this call; if others hold more than was planned, no gradient
        stays."""
        session, key = self.session, (schedule.serial, resident, stay)
        if key not in self._arranged:
            made = refitted(session, schedule, resident, session.window_bytes, stay)
            session.homes.plan_device(made.peak_bytes)
            self._arranged[key] = made, held_peak(made)
        made, held = self._arranged[key]
        if schedule.holds.sizes != made.holds.sizes:
            made = replace(made, holds=schedule.holds)
            held = held_peak(made) if stay else 0
        others = session.live_memory.nbytes - schedule.holds.saved_bytes
        if stay and others + held > session.split.held_bytes:
            return self._refitted(schedule, resident, frozenset())
        return made
