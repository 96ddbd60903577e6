"""What rests on the device while training goes on: planned from a step that was seen.

The first steps run as the passes planned them, with everything fetched. Their record, with what
each region took, becomes a plan (`step_plan.py`), entries move to their homes once, and from then
on schedules are arranged for them (`arrange.py`). Joins the two wings for a whole step as
`backend.py` does for one graph.
"""

import logging
import weakref
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

from zcompile.arrange import Arena, arrange
from zcompile.bounds import bound
from zcompile.cost import Costs, replan_pays
from zcompile.demand import demand_of
from zcompile.errors import BudgetExceeded, DiskUnusable, Unsupported
from zcompile.loads import Room
from zcompile.packing import ALIGNMENT, aligned
from zcompile.prediction import predicted
from zcompile.runtime.interrupts import deferred_interrupts
from zcompile.runtime.moves import move, resettle
from zcompile.runtime.probe import machine_for
from zcompile.runtime.recorder import key_of
from zcompile.runtime.session import Session
from zcompile.runtime.store import Entry
from zcompile.schedule import EntryIndex, Schedule
from zcompile.simulate import simulate
from zcompile.specs import Phase
from zcompile.step_plan import UNBOUNDED_LEAD, StepPlan, compute_seconds, plan_step
from zcompile.steps import Step
from zcompile.units import show_size
from zcompile.verify_schedule import verify_schedule

log = logging.getLogger(__name__)

WARM_UP = 2
"""Steps that are seen before one is planned: the first makes the states, the second is usual."""

REVIEW = 3
"""A plan is looked at again when so many times as many steps have been seen: costs that are known
better by then are worth some milliseconds, and those of a long run are known."""
PREDICTED_FOR = 4
"""Steps for which a prediction is not made anew."""
MOST_PLANS = 8
"""After so many the steps of a run have nothing in common that is worth another."""


class Residency:
    """Plans the steps of one session, and gives its executor the schedules for the plan."""

    def __init__(self, session: Session) -> None:
        self._session = weakref.ref(session)
        self._seen = 0
        self._arranged: dict[tuple[int, frozenset[EntryIndex]], Schedule] = {}
        self._least_window = 0
        self._plans = 0
        self._next_review = WARM_UP * REVIEW
        self._predicted: tuple[int, dict[str, Any]] | None = None
        self._tried = False
        self._base = Step(())
        """What the plan in force was made for, as it was recorded."""
        self.plan: StepPlan | None = None

    @property
    def session(self) -> Session:
        session = self._session()
        assert session is not None, "a session asks, so it is there"
        return session

    def step_ended(self, step: Step) -> None:
        """A step was recorded: plan, if it is time and there is anything new to plan."""
        self._seen += 1
        if self._seen < WARM_UP or self._plans > MOST_PLANS:
            return
        if self._tried and _lasting(step) <= self._base.facts.keys():
            self._review()
            return
        self._base, self._tried = joined(self._base, step), True
        self._plan_anew()
        self._plans += 1
        if self._plans > MOST_PLANS:
            log.warning(
                "every step uses other parameters or states than those before: the plan of %d "
                "steps together stays", MOST_PLANS
            )  # fmt: skip

    def _plan_anew(self) -> None:
        """A plan for `_base`; without one training goes on as the passes planned it."""
        with deferred_interrupts():  # one between two moves would leave neither plan in force
            self.withdraw()
            try:
                self.apply(self.planned(self._base))
            except (BudgetExceeded, Unsupported, DiskUnusable) as error:
                self.session.homes.device.clear()
                log.warning("a whole step could not be planned, so every use fetches: %s", error)

    def _review(self) -> None:
        """Plan again, now and then, at costs as they are by now; keep that if it pays."""
        plan = self.plan
        if plan is None or self._seen < self._next_review:
            return
        self._next_review = self._seen * REVIEW
        began = perf_counter()
        now_s = simulate(plan.step, self.costs(), plan.placement.homes).step_s
        other = self.planned(self._base)
        if replan_pays(now_s, other.seconds, 2 * (perf_counter() - began)):
            log.info("costs have changed: a step would take %.3g s, and %.3g s planned anew", now_s,
                     other.seconds)  # fmt: skip
            self._plan_anew()

    def prediction(self) -> dict[str, Any] | None:
        """What a step under the plan should take, at costs as they were a few steps ago at most;
        as `prediction.predicted`, with the least that any plan could take and what
        binds it. None: no step was planned yet."""
        if self.plan is None:
            return None
        if self._predicted is None or self._seen >= self._predicted[0] + PREDICTED_FOR:
            costs, plan = self.costs(), self.plan
            made = predicted(plan.step, costs, plan.placement.homes)
            demand = demand_of(self._base, costs.region_seconds)
            least = bound(demand, costs.machine.links, self._room(self._base))
            made |= {"least_s": least.seconds, "binding": least.binding}
            self._predicted = self._seen, made
        return self._predicted[1]

    def costs(self) -> Costs:
        """What is known of this machine and what ran on it."""
        session = self.session
        return session.executor.clocks.costs(
            machine_for(session.config, session.device), session.ways()
        )

    def planned(self, step: Step) -> StepPlan:
        """The plan for a step like this one. raises BudgetExceeded"""
        session, room, costs = self.session, self._room(step), self.costs()
        lead = UNBOUNDED_LEAD if session.config.max_lead else 0
        arena = Arena(self._least_window, lead, session.device.chunk_bytes, room.reach)
        compute = compute_seconds(step, costs.region_seconds)

        def seconds(made: Step, homes: Mapping[int, str]) -> float:
            return simulate(made, costs, homes).step_s

        return plan_step(step, costs.machine, room, arena, compute, seconds)

    def _room(self, step: Step) -> Room:
        """What the tiers have for the entries of this step: all but what others rest on."""
        session = self.session
        nbytes = {"device": session.device_budget, **session.homes.capacities()}
        for entry in session.entries():
            if key_of(entry) not in step.facts and entry.home in nbytes:
                nbytes[entry.home] -= entry.place.extent.nbytes
        # First fit leaves holes between entries of different sizes; what finds none goes to disk.
        largest = max((fact.nbytes for fact in step.facts.values()), default=0)
        nbytes["host"] = max(0, nbytes["host"] - max(largest, nbytes["host"] // 32))
        return Room(nbytes, session.reaches_host, session.reaches_host)

    def apply(self, plan: StepPlan) -> None:
        """Move every entry to its home; from here on schedules are arranged for it."""
        session, homes = self.session, plan.placement.homes
        top = session.device_budget // ALIGNMENT * ALIGNMENT
        for key, home in homes.items():
            if home == "device":
                fact = plan.step.facts[key]
                top -= aligned(fact.nbytes)
                session.homes.device.plan(key, fact.name, top, fact.nbytes)
        left = resettle(session, homes)
        self.plan = session.plan = plan
        self._predicted = None
        session.window_bytes, session.depth = plan.arena.window_bytes, plan.arena.depth
        session.steps.clear()
        session.meter.resident_bytes = session.homes.device.planned_bytes
        session.meter.plan_device(max(call.schedule.peak_bytes for call in plan.step.calls))
        log.info(
            "a step was planned: %s rest on the device, %s are left to stream through; "
            "%.3g s a step, bound by %s%s",
            show_size(plan.resident_bytes),
            show_size(plan.arena.window_bytes),
            plan.seconds,
            ", ".join(f"{phase.value}: {by}" for phase, by in plan.placement.binding.items()),
            f"; {len(left)} entries found no room where they should rest" if left else "",
        )

    def withdraw(self) -> None:
        """Nothing rests on the device any more, as far as other tiers have room."""
        session = self.session
        if self.plan is None:
            return
        away = {key: "host" for key, home in self.plan.placement.homes.items() if home == "device"}
        for entry in resettle(session, away):
            move(session, entry, "disk")
        session.homes.wanted = {}
        session.homes.device.clear()
        self._arranged.clear()
        session.steps.clear()
        session.meter.resident_bytes = session.homes.device.planned_bytes
        session.window_bytes = session.device_budget - session.homes.device.planned_bytes
        self.plan = session.plan = None

    def relieve(self, needed_bytes: int) -> bool:
        """Something needs more of the arena than the plan left: withdraw, and remember how much.

        False if that cannot help: nothing rests there, or a schedule that reads it is running.
        """
        session = self.session
        if self.plan is None or session.executor.is_running:
            return False
        self._least_window = max(self._least_window, needed_bytes)
        self._tried = False
        log.info("%s of the arena are needed at once: what rests on the device goes back",
                 show_size(needed_bytes))  # fmt: skip
        with deferred_interrupts():
            self.withdraw()
        return True

    def fit(self, schedule: Schedule, entries: Sequence[Entry]) -> Schedule:
        """The schedule for these very entries, where they rest now."""
        plan = self.plan
        if plan is None or schedule.phase is Phase.STEP or schedule.budget_bytes is None:
            return schedule
        resident = frozenset(
            EntryIndex(n) for n, entry in enumerate(entries) if entry.place.tier.on_device
        )
        key = schedule.serial, resident
        if key not in self._arranged:
            try:
                made = arrange(schedule, resident, plan.arena.window_bytes, plan.arena.max_lead)
            except BudgetExceeded as error:
                if not self.relieve(error.needed_bytes):
                    raise
                return schedule
            verify_schedule(made)
            self.session.meter.plan_device(made.peak_bytes)
            self._arranged[key] = made
        return self._arranged[key]


def joined(before: Step, step: Step) -> Step:
    """`step`, with those planned for before if it does not replace them: a generator and its
    discriminator take turns, and each must find its own on the device."""
    if _lasting(before) <= step.facts.keys():
        return step
    facts = {**before.facts, **step.facts}
    return Step((*before.calls, *step.calls), facts, max(before.micro_batches, step.micro_batches))


def _lasting(step: Step) -> set[int]:
    return {key for key, fact in step.facts.items() if fact.kind.lasting}
