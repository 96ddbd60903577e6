"""Plans the steps of a session from those it has seen, and puts the plans into force.

The first steps run as the passes planned them, with everything fetched. Their record, with the
seconds of each region, becomes a plan (`planner/step_plan.py`), entries move to their homes once,
and from then on schedules are arranged for them (`frontend/rescheduling.py`).

The controller is a state machine. `TRANSITIONS` is all of it: what is done when something happens,
and in which state that leaves the controller.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from time import perf_counter
from typing import Any, NamedTuple

import torch

from zcompile.errors import KEEP_LESS, BudgetExceeded, DiskUnusable, TierFull, Unsupported
from zcompile.frontend.gc_pause import gc_paused
from zcompile.frontend.kept_wholes import KeptWholes
from zcompile.frontend.rescheduling import Rescheduling
from zcompile.frontend.session_plan import (
    costs_of,
    plan_of,
    prediction_of,
    seconds_at,
    shadows_of,
)
from zcompile.ir.optimizer_step import DEPTH, NO_ROOM
from zcompile.ir.schedule import EntryIndex, Schedule
from zcompile.ir.step import StepCall, StepTrace, joined, without_dead_entries
from zcompile.ir.types import HELD, EntryKind, EntryRef, Phase
from zcompile.ir.units import show_size
from zcompile.machine.cost import Costs, replan_pays
from zcompile.planner.host_step import order_of_need, without_host_updates
from zcompile.planner.narrow_step import without_copies
from zcompile.planner.outlook import Shadow
from zcompile.planner.simulator import step_seconds
from zcompile.planner.step_plan import StepPlan, at_rest
from zcompile.runtime.host_updates import NOBODY
from zcompile.runtime.late import LateUpdates
from zcompile.runtime.progress import tell, working
from zcompile.runtime.relocate import evict, relocate
from zcompile.runtime.session import Session
from zcompile.runtime.store.store import Entry
from zcompile.runtime.transfer.interrupts import deferred_interrupts

log = logging.getLogger(__name__)

WARM_UP = 2
"""Steps that are seen before one is planned: the first makes the states, the second is usual."""

REVIEW = 3
"""A plan is reviewed again when so many times as many steps have been seen: costs that are known
better by then are worth some milliseconds, and those of a long run are known."""
PREDICTED_FOR = 4
"""Steps for which a prediction is not made anew."""
MOST_RECLAIMS = 4
"""After so many, what needs the room has it for good."""
MOST_PLANS = 8
"""Most plans of a run: after so many its steps have nothing in common that is worth another."""
NOT_PLANNED = (BudgetExceeded, Unsupported, DiskUnusable)
"""Errors after which a step has no plan, and nothing was changed."""

PLACES = {"device": "the device", "host": "the host", "disk": "disk"}
"""Tiers, for people."""


class State(Enum):
    """What the controller does with the next step."""

    OBSERVING = auto()
    """No plan is in force, and the next step is planned."""
    PLANNED = auto()
    """A plan is in force. It is reviewed now and then, and made anew for a step that it lacks."""
    OUTDATED = auto()
    """A plan is in force, and the next step is planned anew."""
    WITHDRAWN = auto()
    """No plan is in force, and none is made until a step uses other parameters or states."""


class Event(Enum):
    """What may happen to a plan."""

    SAME_STEP = auto()
    """A step has ended that uses nothing but what steps before it did."""
    NEW_STEP = auto()
    """A step has ended that uses parameters or states which no step before it did."""
    ROOM_NEEDED = auto()
    """Something needs more of the arena than the plan leaves, and gets what rests there."""
    ROOM_NEEDED_OFTEN = auto()
    """The same, for the last time."""
    GRADIENTS_IN_THE_WAY = auto()
    """Step after step, gradients that stayed had to go home."""
    COPIES_CHANGE = auto()
    """Other copies of parameters are to be kept than the plan in force keeps, of the shares of all
    ranks or in low precision: rank 0 keeps others, or this rank has given them up."""
    UPDATES_IN_THE_WAY = auto()
    """Step after step, late updates were asked for before the next forward."""
    ARENA_RESIZES = auto()
    """The arena is about to have another size."""


class Transition(NamedTuple):
    """What is done, and the state afterwards: where it was done, and where it could not be."""

    action: Callable[["StepController"], bool]
    state: State
    otherwise: State


class StepController(Rescheduling):
    """Plans the steps of one session, and gives its executor the schedules for the plan.

    plan   the one in force, as it was put into force
    state  says what becomes of the next step
    """

    records = True

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.plan: StepPlan | None = None
        self.state = State.OBSERVING
        self._last = self._base = StepTrace(())
        """The step that ended last; what the plan in force was made for, as it was recorded."""
        self._alive: tuple[StepTrace, int] = self._base, -1
        """A step of which all lasting entries were alive, and how many had died in all by then."""
        self._seen = self._plans = self._reclaims = 0
        self._next_review = WARM_UP * REVIEW
        self._predicted: tuple[int, dict[str, Any]] | None = None
        self._least_window = 0
        """Bytes of the arena to leave free, as far as is known."""
        self._may_be_late = True
        """Whether updates may be late."""
        self._wholes = KeptWholes(session, self)
        self._narrow_serials: frozenset[int] = frozenset()
        """Of the schedules that read such copies."""
        self._holds_wholes = False
        """Whether the plan in force keeps parameters whole."""
        self._evicted_in, self._may_stay = -1, session.fabric is None
        """The last step in which gradients that stayed had to go home; whether any may stay, which
        ranks exchange instead."""

    def handle(self, event: Event) -> None:
        """Do what `TRANSITIONS` says. An event that it does not name in this state is ignored.

        After an interrupt, or an error, the state is true of what was done, and the next step is
        planned.
        """
        if (then := TRANSITIONS.get((self.state, event))) is None:
            return
        try:
            done = then.action(self)
        except BaseException:
            self.state = State.OBSERVING if self.plan is None else State.OUTDATED
            raise
        self.state = then.state if done else then.otherwise

    # What happens.

    def step_ended(self, step: StepTrace) -> None:
        """Take note of a recorded step. It is an event, but for the first ones, for one of which
        every call used something that is gone by now, and after the last plan that a run may
        have."""
        self._seen += 1
        unplanned = self._seen < WARM_UP or self._plans > MOST_PLANS
        change = self._wholes.step_ended(None if unplanned else self.plan)
        if unplanned:
            return
        self._last = self._of_alive(step)
        if change:
            self.handle(Event.COPIES_CHANGE)
        if not self._last.calls:
            return
        known = self._last.lasting <= self._base.facts.keys()
        self.handle(Event.SAME_STEP if known else Event.NEW_STEP)

    def arena_resizes(self) -> None:
        """Drop the plan: the arena is about to have another size."""
        self.handle(Event.ARENA_RESIZES)

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
        self._reclaims += 1
        often = self._reclaims >= MOST_RECLAIMS
        self.handle(Event.ROOM_NEEDED_OFTEN if often else Event.ROOM_NEEDED)
        log.log(
            logging.WARNING if often else logging.INFO,
            "%s of the arena are needed at once: what rests on the device goes back%s",
            show_size(at_once),
            ", and stays there, since this keeps happening" if often else "",
        )
        return True

    def evict_staying(self) -> None:
        """Send gradients home that stayed and were not set to None, since a forward needs their
        room.

        An evaluation may come before they are. If it is so step after step, none stays any more.
        """
        session = self.session

        def held() -> list[Entry]:
            return [entry for entry in session.entries() if entry.home == HELD]

        if not (found := held()):
            return
        with deferred_interrupts():
            self._quiet()
            evict(session, held(), {})  # those of late updates may be gone by now
        again, self._evicted_in = self._seen - self._evicted_in == 1, self._seen
        log.info(
            "%d gradients that stayed go home: a forward needs their room%s",
            len(found),
            "; the next plan lets none stay" if again else "",
        )
        if again:
            self.handle(Event.GRADIENTS_IN_THE_WAY)

    def updates_in_the_way(self) -> None:
        """Let no update be late any more, from the next plan on: what they wait with is asked for
        before the next forward, step after step."""
        log.info(
            "parameters, gradients or states are used between each step and the next forward: the "
            "next plan lets no update wait for that"
        )
        self.handle(Event.UPDATES_IN_THE_WAY)

    # What is done, as `TRANSITIONS` says; whether it could be.

    def _plan_anew(self) -> bool:
        """Plan the steps seen so far, together with the last one, and put the plan into force."""
        last = without_host_updates(without_copies(self._last))
        self._base = joined(self._of_alive(self._base), last)
        if (plan := self._try()) is not None:
            self.apply(plan)
        self._plans += 1
        if self._plans > MOST_PLANS:
            log.warning(
                "every step uses other parameters or states than those before: the plan of %d "
                "steps together stays",
                MOST_PLANS,
            )
        return plan is not None

    def _review(self) -> bool:
        """Plan again, now and then, at costs as they are by now; put the plan into force if it
        pays."""
        plan = self.plan
        if plan is None or self._seen < self._next_review:
            return False
        self._next_review = self._seen * REVIEW
        base = self._of_alive(self._base)
        if not base.calls:
            return False
        self._base = base
        began = perf_counter()
        now_s = step_seconds(plan.step, self.costs(), plan.placement.homes)
        try:
            other = self.planned(base)
        except NOT_PLANNED as error:
            log.info("a step could not be planned anew, so the plan stays: %s", error)
            return False
        if not replan_pays(now_s, other.seconds, 2 * (perf_counter() - began)):
            return False
        took = now_s, other.seconds
        log.info("costs have changed: a step would take %.3g s, and %.3g s planned anew", *took)
        self.apply(other)
        return True

    def withdraw(self) -> bool:
        """Move everything off the device, as far as other tiers have room."""
        session, device = self.session, self.session.homes.device
        with deferred_interrupts():
            self._quiet()
            self.plan = None
            session.late.want({})
            session.host_updates.want(NOBODY)
            session.stream_through(DEPTH, NO_ROOM)
            session.homes.want({})
            session.homes.expect_results(0)
            self._drop_copies_of_plan()
            evict(session, self._resident(), {})
            device.clear()
            device.open_window(session.arena.budget_bytes)
        return True

    def _start_over(self) -> bool:
        """Withdraw from a plan that was made for another arena, and does not count."""
        self._plans = max(0, self._plans - (self.plan is not None))
        return self.withdraw()

    def _let_none_stay(self) -> bool:
        """From the next plan on all gradients go home."""
        self._may_stay = False
        return True

    def _let_none_be_late(self) -> bool:
        """From the next plan on all updates are computed when the optimizer is called."""
        self._may_be_late = False
        return True

    def _plan_next(self) -> bool:
        """Do nothing at once: the next plan asks what copies are to be kept."""
        return True

    # Plans.

    def _of_alive(self, step: StepTrace) -> StepTrace:
        """A recorded step without the calls that used what is gone by now."""
        session = self.session
        session.enter("")  # which buries the dead
        step_seen, died = self._alive
        if step_seen is step and died == session.lasting_died:
            return step
        alive = {entry.ref for entry in session.entries()}
        if not step.lasting <= alive:
            return without_dead_entries(step, alive)
        self._alive = step, session.lasting_died
        return step

    def _try(self) -> StepPlan | None:
        """A plan for `_base`, or else one that keeps nothing whole; without one training goes on as
        before.

        raises  BudgetExceeded, Unsupported, DiskUnusable, if all must be kept whole
        """
        try:
            plan = self.planned(self._base)
            # What keeps weights whole was not tried with copies, and says nothing of their room.
            if self._wholes.wants_copies() and not (plan.reads or plan.wholes):
                self._wholes.give_up_copies("this rank has no room for them, or no plan with them")
            return plan
        except NOT_PLANNED as error:
            if self._wholes.is_required:
                if not isinstance(error, BudgetExceeded):
                    raise
                raise self.session.split.too_small_for_plan(error, KEEP_LESS) from None
            if not isinstance(error, BudgetExceeded) or not self._wholes.wanted(self._base):
                log.warning("a whole step could not be planned, so entries stay: %s", error)
                return None
            self._wholes.give_up(error)
        return self._try()

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

    def shadows(self, costs: Costs) -> tuple[Shadow, ...]:
        """What one more GiB of device and host would save of a step; there is a plan."""
        assert self.plan is not None
        with gc_paused():
            return shadows_of(self.session, self.plan, self._base, costs)

    def costs(self) -> Costs:
        """Costs of this machine, and of what ran on it."""
        return costs_of(self.session)

    def planned(self, step: StepTrace) -> StepPlan:
        """The plan for a step like this one, before the next begins: gradients that are alive then
        may not stay. It may be thrown away: nothing changes.

        raises  BudgetExceeded, Unsupported, DiskUnusable
        """
        entries = {entry.ref: entry for entry in self.session.entries()}
        alive = (
            ref for ref in entries if ref.is_gradient and _is_kept(entries[ref], self.session.late)
        )
        kept = frozenset(alive if self._may_stay else step.facts)
        with gc_paused():
            return plan_of(
                self.session,
                step,
                self.costs(),
                self._least_window,
                kept,
                self._may_be_late,
                self._wholes.wanted(step),
                self._wholes.wants_copies(),
            )

    def apply(self, plan: StepPlan) -> None:
        """Move every entry to its home; from here on schedules are arranged for it.

        At every instant a schedule may be arranged for where entries rest by then: what is on the
        device lies in berths, and the window ends where they begin. An interrupt comes afterwards.
        """
        with deferred_interrupts(), working("putting the plan into force"):
            self._apply(plan)

    def _apply(self, plan: StepPlan) -> None:
        session, homes = self.session, plan.placement.homes
        device = session.homes.device
        self._quiet()
        session.late.want({})
        session.host_updates.want(NOBODY)
        self._drop_copies_of_plan()
        device.open_window(plan.arena.window_bytes)
        left = evict(session, [e for e in self._resident() if self._is_misplaced(e, homes)], homes)
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
        if (copies := self._make_room_for_copies(plan)) is None:
            if (without := self._try()) is None:
                self.withdraw()
                return
            return self._apply(without)
        rests |= copies
        costs = self.costs()
        session.write_behind(costs.ways.behind_bytes)
        plan = at_rest(plan, self._base, rests, session.window_bytes, seconds_at(costs))
        self.plan, self._predicted = plan, None
        self._narrow_serials = frozenset(made.serial for made in plan.reads.values())
        session.late.want(plan.late)
        session.host_updates.want(plan.on_host, order_of_need(plan.step))
        session.stream_through(plan.arena.depth, plan.arena.scratch)
        session.homes.expect_results(plan.result_bytes)
        session.homes.plan_device(
            max(
                call.schedule.peak_bytes + (plan.result_bytes if call.phase is Phase.STEP else 0)
                for call in plan.step.calls
            )
        )
        lost = len(left) + len(crowded) + len(astray)
        text = summary(plan, session.window_bytes)
        tell(log, text + (f"; {lost} entries found no room where they should rest" if lost else ""))

    def _make_room_for_copies(self, plan: StepPlan) -> dict[EntryRef, str] | None:
        """Make blank copies where the plan wants them, in low precision or of the shares of all
        ranks; the first call that reads them makes their values.

        Returns where they rest; None, if there is no room: none is kept.
        """
        session = self.session
        entries = {entry.ref: entry for entry in session.entries()}
        made: dict[EntryRef, str] = {}
        try:
            dtypes = dtypes_of_copies(plan, whole=True)
            for ref in plan.wholes:
                fact, entry = plan.step.facts[ref.copy], entries.get(ref)
                if entry is None:
                    continue  # it has gone since: no call reads it any more
                whole = session.create(fact.name, EntryKind.COPY, fact.nbytes, copy_of=entry.key)
                entry.keep_whole(whole, dtypes[ref.copy])
                if not whole.on_device:
                    raise TierFull(fact.name, fact.nbytes, [session.homes.device.usage()])
                made[ref.copy] = whole.home
            for ref, dtype in dtypes_of_copies(plan, whole=False).items():
                fact, entry = plan.step.facts[ref], entries.get(ref.owner)
                if entry is None:
                    continue
                copy = session.create(fact.name, EntryKind.COPY, fact.nbytes, copy_of=entry.key)
                entry.keep_copy(dtype, copy)
                made[ref] = copy.home
        except TierFull as error:
            log.info("no copies of weights are kept: %s", error)
            self._drop_copies()
            if not plan.wholes:
                self._wholes.give_up_copies(error)
                return None
            if self._wholes.is_required:
                raise
            self._wholes.give_up(error)
            return None
        self._holds_wholes = bool(plan.wholes)
        if plan.wholes:
            self._wholes.are_kept()
        return made

    def _drop_copies_of_plan(self) -> None:
        """Keep none of the copies of the plan that was in force."""
        if self._narrow_serials or self._holds_wholes:
            self._drop_copies()
            self._narrow_serials, self._holds_wholes = frozenset(), False

    def _drop_copies(self) -> None:
        """Keep no copies any more."""
        for entry in self.session.entries():
            if entry.copies or entry.whole is not None:
                self.session.drop_copies(entry)
        self.session.enter("")  # which frees them

    def _quiet(self) -> None:
        """Wait until nothing is in flight or handed over, or late, and forget schedules for where
        entries rest now."""
        session = self.session
        session.late.finish()
        session.executor.foresight.abandon()
        session.drain()
        session.forget_steps()
        self.forget()

    def _resident(self) -> list[Entry]:
        """Entries that rest on the device."""
        return [entry for entry in self.session.entries() if entry.on_device]

    def _is_misplaced(self, entry: Entry, homes: Mapping[EntryRef, str]) -> bool:
        """Whether an entry is to leave the device, or its address there."""
        ref, extent, device = entry.ref, entry.place.extent, self.session.homes.device
        stays = homes.get(ref) == "device" and device.is_reserved_for(ref, extent)
        return not stays or extent.offset < device.window_bytes

    @property
    def arranges(self) -> bool:
        """Whether a plan is in force, or an entry rests on the device that could not leave."""
        return self.plan is not None or bool(self.session.homes.device.planned_bytes)

    @property
    def plans_copies(self) -> bool:
        """Whether the plan in force keeps copies in low precision."""
        return self.plan is not None and bool(self.plan.reads)

    def narrowed(self, schedule: Schedule, entries: Sequence[Entry]) -> Schedule:
        """`schedule`, or the one that reads low-precision copies in its place, if the plan keeps
        one of each that it reads; of several ranks, the one that reads what all of them keep."""
        if self._wholes.agrees:
            return self._wholes.agreed(schedule, entries)
        if not self.plans_copies or schedule.phase is Phase.STEP:
            return schedule
        narrow = self.session.reading_copies(schedule.serial)
        if narrow is None:
            return schedule
        kept = all(c.cast.copy_dtype in entries[c.entry].copies for c in narrow.copies)
        return narrow if kept else schedule

    def staying(self, schedule: Schedule, entries: Sequence[Entry]) -> frozenset[EntryIndex]:
        """Entries whose gradients stay where this call makes them."""
        if self.plan is None or schedule.serial not in self._base.serials | self._narrow_serials:
            return frozenset()
        call = StepCall(schedule, tuple(entry.ref for entry in entries))
        return call.making(self.plan.placement.stay)


def dtypes_of_copies(plan: StepPlan, whole: bool) -> dict[EntryRef, torch.dtype]:
    """The copies of a plan, and their dtypes: those in low precision, or those of the shares of all
    ranks (`whole`)."""
    return {
        call.entries[len(call.schedule.handles) + n]: copy.cast.copy_dtype
        for call in plan.step.calls
        for n, copy in enumerate(call.schedule.copies)
        if copy.whole is whole
    }


def _is_kept(gradient: Entry, late: LateUpdates) -> bool:
    """Whether somebody else than a late update keeps a gradient alive."""
    return gradient.waits is None or not late.alone_keep(gradient)


def summary(plan: StepPlan, window_bytes: int) -> str:
    """What a plan says, in one line: what rests where, what a step takes, what binds it.

    window_bytes  of the device, that are left to stream through
    """
    nbytes = Counter[str]()
    for ref, home in plan.placement.homes.items():
        nbytes[home] += plan.step.facts[ref].nbytes
    rests = [
        f"{show_size(nbytes[tier])} on {place}" for tier, place in PLACES.items() if nbytes[tier]
    ]
    told = [f"{show_size(window_bytes)} of the device to stream through"]
    if plan.staying_bytes:
        told.append(f"{show_size(plan.staying_bytes)} of gradients stay where they are made")
    if plan.reads:
        told.append(f"{len(plan.copies)} weights travel as copies in the dtype they are read in")
    if plan.wholes:
        told.append(f"all of {len(plan.wholes)} parameters rests on every rank")
    if plan.late:
        told.append(f"{len(plan.late)} parameters are updated in the next forward")
    if plan.late_s is not None:
        told.append(
            "no parameter is updated in the next forward, with which a step would take "
            f"{plan.late_s:.3g} s"
        )
    if plan.on_host:
        told.append(
            f"{len(plan.on_host)} parameters are updated by the host, where they rest, beside the "
            "next forward"
        )
    binding = plan.placement.binding
    by = set(binding.values())
    each = by if len(by) == 1 else (f"{link} in {phase.value}" for phase, link in binding.items())
    return (
        f"a step was planned: {', '.join(rests) or 'nothing'} at rest, {', '.join(told)}; "
        f"{plan.seconds:.3g} s a step, bound by {', '.join(each)}"
    )


def plan_in_force(session: Session) -> StepPlan | None:
    """The plan of a whole step that is in force."""
    controller = session.controller
    return controller.plan if isinstance(controller, StepController) else None


def why_unplanned(session: Session) -> str:
    """Why no plan of a whole step is in force, as a clause; "" if one is."""
    because = session.config.stays_because
    if because:
        return f"with {because} entries rest where they were put first"
    controller = session.controller
    if not isinstance(controller, StepController) or controller.plan is not None:
        return ""
    if controller.state is State.WITHDRAWN:
        return "none could be made, or kept in force, as the log of the run says"
    return "the first steps are observed"


OBSERVING, PLANNED, OUTDATED, WITHDRAWN = State
_plan, _review = StepController._plan_anew, StepController._review
_withdraw, _start_over = StepController.withdraw, StepController._start_over
_let_none_stay = StepController._let_none_stay
_let_none_be_late = StepController._let_none_be_late
_plan_next = StepController._plan_next

TRANSITIONS: Mapping[tuple[State, Event], Transition] = {
    (state, event): Transition(action, then, otherwise)
    for state, event, action, then, otherwise in (
        # in this state, on this event: do this, then be in that state; in that one if it failed
        (OBSERVING, Event.SAME_STEP, _plan, PLANNED, WITHDRAWN),
        (OBSERVING, Event.NEW_STEP, _plan, PLANNED, WITHDRAWN),
        (OBSERVING, Event.ROOM_NEEDED, _withdraw, OBSERVING, OBSERVING),
        (OBSERVING, Event.ROOM_NEEDED_OFTEN, _withdraw, WITHDRAWN, WITHDRAWN),
        (OBSERVING, Event.GRADIENTS_IN_THE_WAY, _let_none_stay, OBSERVING, OBSERVING),
        (OBSERVING, Event.COPIES_CHANGE, _plan_next, OBSERVING, OBSERVING),
        (OBSERVING, Event.UPDATES_IN_THE_WAY, _let_none_be_late, OBSERVING, OBSERVING),
        (OBSERVING, Event.ARENA_RESIZES, _start_over, OBSERVING, OBSERVING),
        (PLANNED, Event.SAME_STEP, _review, PLANNED, PLANNED),
        (PLANNED, Event.NEW_STEP, _plan, PLANNED, PLANNED),
        (PLANNED, Event.ROOM_NEEDED, _withdraw, OBSERVING, OBSERVING),
        (PLANNED, Event.ROOM_NEEDED_OFTEN, _withdraw, WITHDRAWN, WITHDRAWN),
        (PLANNED, Event.GRADIENTS_IN_THE_WAY, _let_none_stay, OUTDATED, OUTDATED),
        (PLANNED, Event.COPIES_CHANGE, _plan_next, OUTDATED, OUTDATED),
        (PLANNED, Event.UPDATES_IN_THE_WAY, _let_none_be_late, OUTDATED, OUTDATED),
        (PLANNED, Event.ARENA_RESIZES, _start_over, OBSERVING, OBSERVING),
        (OUTDATED, Event.SAME_STEP, _plan, PLANNED, PLANNED),
        (OUTDATED, Event.NEW_STEP, _plan, PLANNED, PLANNED),
        (OUTDATED, Event.ROOM_NEEDED, _withdraw, OBSERVING, OBSERVING),
        (OUTDATED, Event.ROOM_NEEDED_OFTEN, _withdraw, WITHDRAWN, WITHDRAWN),
        (OUTDATED, Event.GRADIENTS_IN_THE_WAY, _let_none_stay, OUTDATED, OUTDATED),
        (OUTDATED, Event.COPIES_CHANGE, _plan_next, OUTDATED, OUTDATED),
        (OUTDATED, Event.UPDATES_IN_THE_WAY, _let_none_be_late, OUTDATED, OUTDATED),
        (OUTDATED, Event.ARENA_RESIZES, _start_over, OBSERVING, OBSERVING),
        (WITHDRAWN, Event.NEW_STEP, _plan, PLANNED, WITHDRAWN),
        (WITHDRAWN, Event.ROOM_NEEDED, _withdraw, OBSERVING, OBSERVING),
        (WITHDRAWN, Event.ROOM_NEEDED_OFTEN, _withdraw, WITHDRAWN, WITHDRAWN),
        (WITHDRAWN, Event.GRADIENTS_IN_THE_WAY, _let_none_stay, OBSERVING, OBSERVING),
        (WITHDRAWN, Event.COPIES_CHANGE, _plan_next, WITHDRAWN, WITHDRAWN),
        (WITHDRAWN, Event.UPDATES_IN_THE_WAY, _let_none_be_late, WITHDRAWN, WITHDRAWN),
        (WITHDRAWN, Event.ARENA_RESIZES, _start_over, OBSERVING, OBSERVING),
    )
}
"""All that the controller does with a plan. A step without news is ignored where the plan was
withdrawn: (WITHDRAWN, SAME_STEP) is the one pair that is not here."""
