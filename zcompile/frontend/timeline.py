"""Writes the timeline of a step, measured beside predicted, to a dump (`zinf timeline`,
`zinf report`).

Beside the times of instructions stands what passed the links, what memory was taken, what rests
where, and what binds the step.
"""

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from zcompile.errors import ZinfError, quoted
from zcompile.frontend.replan import StepController, plan_in_force, why_unplanned
from zcompile.ir import printer, serialize
from zcompile.ir import serialize as form
from zcompile.ir.effects import IN, Effects
from zcompile.ir.schedule import Schedule
from zcompile.ir.step import EntryFact, Moment, Passage, StepCall, StepTrace, Timeline
from zcompile.ir.types import EntryKind, EntryRef
from zcompile.machine.cost import Costs
from zcompile.planner.outlook import Shadow
from zcompile.planner.simulator import simulate
from zcompile.planner.step_plan import StepPlan
from zcompile.runtime.probe import machine_for
from zcompile.runtime.profile import Walked, facts_of
from zcompile.runtime.progress import working
from zcompile.runtime.session import Session

log = logging.getLogger(__name__)

KINDS = {
    EntryKind.PARAM: "weight",
    EntryKind.GRAD: "gradient",
    EntryKind.STATE: "state",
    EntryKind.COPY: "copy",
}
"""Kinds of entries, as a dump calls them; all others are "other"."""


def dump_steps(session: Session, run: Path) -> None:
    """Write steps of `session` to the run from here on.

    The second, the fourth, the eighth and so on, each over the one before.
    """
    executor = session.executor
    if not executor.clocks.keeps_timeline:
        executor.keep_timeline(_Writer(session, run).step_ended)


class _Writer:
    """Writes the steps of one session, which it does not keep alive."""

    def __init__(self, session: Session, run: Path) -> None:
        self._session = weakref.ref(session)
        self._run = run
        self._steps = 0
        self._nbytes: Mapping[str, int] = {}
        self._traffic: dict[str, tuple[int, float]] = {}
        self._shadows: tuple[StepPlan, tuple[Shadow, ...]] | None = None
        self._plan: StepPlan | None = None
        """The plan in force when the step began that runs now."""

    def step_ended(self) -> None:
        session = self._session()
        if session is None:
            return
        self._steps += 1
        # Where a step ends the next one may be planned, and it was walked under the plan before.
        plan, self._plan = self._plan, plan_in_force(session)
        moved, busy = self._since(session)
        passages = session.meter.take_passages()
        if self._steps >= 2 and not self._steps & (self._steps - 1):
            with working("writing what a step was"):
                self._write(session, plan, moved, busy, passages)
            session.meter.take_passages()
            session.executor.clocks.forget()

    def _since(self, session: Session) -> tuple[dict[str, int], dict[str, float]]:
        """Bytes and busy seconds of each link since the last call of this method."""
        meter = session.meter
        before, self._nbytes = self._nbytes, meter.in_all().nbytes
        then, self._traffic = self._traffic, meter.traffic()
        moved = {link: n - before.get(link, 0) for link, n in self._nbytes.items()}
        busy = {link: row[1] - then.get(link, (0, 0.0))[1] for link, row in self._traffic.items()}
        return moved, busy

    def _write(
        self,
        session: Session,
        plan: StepPlan | None,
        moved: dict[str, int],
        busy: dict[str, float],
        passages: tuple[Passage, ...],
    ) -> None:
        """Write the step that has ended, which was walked under `plan`."""
        clocks = session.executor.clocks
        step, walks = session.executor.recorder.last_walked, clocks.timeline()
        machine = machine_for(session.config, session.device)
        costs = clocks.costs(machine, session.ways())
        simulated = simulate(step, costs) if step is not None else None
        with suppress(ZinfError, OSError):  # whoever needs what failed will raise it
            session.drain()  # what the step still sends is part of it
        passages = (*passages, *session.meter.take_passages())
        measured = replace(measured_of(walks, clocks.last_step_s()), nbytes=moved, busy_s=busy)
        record = replace(
            timeline_record(self._steps, measured, walks, simulated, step, passages),
            tiers=_tiers(session, walks),
            entries=tuple(_entries(session, step, plan)),
            links=tuple(form.LinkRecord(k, link.bytes_per_s) for k, link in machine.links.items()),
            plan=self._told(session, plan, costs),
            unplanned=_unplanned(session, plan),
            inexact=tuple(
                f"{quoted(where)} may round otherwise than eager's, by {by}: {why}"
                for (where, by), why in session.inexact.items()
            ),
        )
        path = form.timeline_file(self._run)
        unfinished = path.with_suffix(".tmp")  # nobody reads half a step
        try:
            unfinished.write_text(serialize.encode(record))
            unfinished.replace(path)
        except OSError as error:  # training goes on: nothing that it computes hangs on the dump
            log.warning("%s takes no timeline any more: %s", self._run, error.strerror or error)
            session.executor.drop_timeline()

    def _told(
        self, session: Session, plan: StepPlan | None, costs: Costs
    ) -> form.StepPlanRecord | None:
        """The record of `plan`; None, if it is in force no more."""
        controller = session.controller
        if not isinstance(controller, StepController) or plan is None or plan is not self._plan:
            return None
        told = controller.predicted_at(costs)
        if self._shadows is None or self._shadows[0] is not plan:
            self._shadows = plan, controller.shadows(costs)
        describe = costs.machine.describe
        return form.StepPlanRecord(
            least_s=told["least_s"],
            least_by=describe(told["binding"]),
            floor_s=told["floor_s"],
            floor_by=describe(told["floor_binding"]),
            binding={p.value: describe(by) for p, by in plan.placement.binding.items()},
            window_bytes=plan.arena.window_bytes,
            staying_bytes=plan.staying_bytes,
            shadows=tuple(
                form.ShadowRecord(row.tier, row.planned_s, row.least_s) for row in self._shadows[1]
            ),
        )


def _unplanned(session: Session, plan: StepPlan | None) -> str:
    """Why nothing is told of the plan of a step, as a sentence; "" if `plan` is in force still."""
    if plan is None:
        # Where one is in force by now, it was made of this very step.
        why = why_unplanned(session) or "the first steps are observed"
        return f"No plan was in force in this step: {why}."
    gone = plan is not plan_in_force(session)
    return "The step was walked under a plan that has gone." if gone else ""


def _tiers(session: Session, walks: Sequence[Walked]) -> tuple[form.TierRecord, ...]:
    """Budget of each tier, and the most that it held while the step was walked."""
    budgets = session.budgets
    levels = [row for walk in walks for row in walk.levels]
    columns = {"device": 0, "host": 2, "disk": 3}
    return tuple(
        form.TierRecord(tier, budgets[tier], max((row[at] for row in levels), default=0))
        for tier, at in columns.items()
        if tier in budgets
    )


def _entries(
    session: Session, step: StepTrace | None, plan: StepPlan | None
) -> Iterator[form.EntryRecord]:
    """The entries that the step used, as they rested in it, and the others that last."""
    facts: dict[EntryRef, EntryFact] = dict(step.facts) if step is not None else {}
    others = facts_of([entry for entry in session.entries() if entry.kind.lasting])
    homes: Mapping[EntryRef, str] = plan.placement.homes if plan is not None else {}
    for ref, fact in (others | facts).items():
        if fact.kind is not EntryKind.ACTIVATION:
            kind = KINDS.get(fact.kind, "other")
            yield form.EntryRecord(fact.name, kind, fact.nbytes, fact.home, homes.get(ref))


def timeline_record(
    number: int,
    measured: form.StepRecord,
    walks: Sequence[Walked],
    simulated: Timeline | None,
    step: StepTrace | None = None,
    passages: Sequence[Passage] = (),
) -> form.TimelineRecord:
    """The record of step `number`: measured, with the prediction instruction by instruction.

    step      what was walked, if it was recorded: names entries
    passages  measured, on the clock of `walks`
    """
    begun = walks[0].begins[0]
    ended = begun + measured.step_s
    ahead = {(m.call, m.number): m for m in simulated.moments} if simulated else {}
    moments = tuple(
        row
        for call, walk in enumerate(walks)
        for row in _moments(call, walk, begun, ahead, _call_of(step, call, walk), step)
    )
    return form.TimelineRecord(
        step=number,
        measured=measured,
        predicted=_predicted(simulated),
        moments=moments,
        format=form.FORMAT,
        passages=tuple(
            _passage(row, begun) for row in passages if row.end_s > begun and row.begin_s < ended
        ),
        predicted_passages=tuple(_passage(row, 0.0) for row in simulated.passages)
        if simulated
        else (),
    )


def _passage(row: Passage, begun: float) -> form.PassageRecord:
    times = row.begin_s - begun, row.end_s - begun
    return form.PassageRecord(row.link, row.name, row.nbytes, *times, row.call, row.number)


def _call_of(step: StepTrace | None, number: int, walk: Walked) -> StepCall | None:
    """The record of a walk, if it is of that very schedule."""
    if step is None or number >= len(step.calls):
        return None
    call = step.calls[number]
    return call if call.schedule.serial == walk.schedule.serial else None


def _moments(
    number: int,
    walk: Walked,
    begun: float,
    ahead: Mapping[tuple[int, int], Moment],
    call: StepCall | None,
    step: StepTrace | None,
) -> Iterator[form.MomentRecord]:
    """The instructions of one walk."""
    facts = step.facts if step is not None else {}
    homes = [facts[ref].home if ref in facts else "" for ref in call.entries] if call else ()
    uses, brought = _uses(walk.schedule), dict[int, str]()
    for index, x in enumerate(walk.schedule.effects):
        stream, kind, name, nbytes = printer.instruction_row(x, homes)
        predicted = ahead.get((number, index))
        entry = _entry_name(x, call, facts)
        if x.ticket is not None and x.is_transfer:
            brought[x.ticket] = entry
        elif not entry and x.region is None:  # it waits for a transfer
            entry = next((brought[ticket] for ticket in x.after if ticket in brought), "")
        yield form.MomentRecord(
            call=number,
            phase=walk.schedule.phase.value,
            index=index,
            kind=kind,
            name=name,
            begin_s=walk.begins[index] - begun,
            end_s=walk.ends[index] - begun,
            stall_s=walk.stalls.get(index, 0.0),
            predicted_begin_s=predicted.begin_s if predicted else None,
            predicted_end_s=predicted.end_s if predicted else None,
            predicted_stall_s=predicted.stall_s if predicted else None,
            entry=entry,
            stream=stream,
            nbytes=nbytes,
            used_by=uses.get(index),
            levels=walk.levels[index] if walk.levels else (),
            predicted_levels=(predicted.together_bytes, predicted.outside_bytes)
            if predicted
            else (),
        )


def _entry_name(x: Effects, call: StepCall | None, facts: Mapping[EntryRef, EntryFact]) -> str:
    """Name of the entry that an instruction is about in this call."""
    if x.home is None:
        return ""
    fact = facts.get(call.entry_of(x.home)) if call is not None else None
    return x.name if fact is None else fact.name


def _uses(schedule: Schedule) -> dict[int, int]:
    """Index of each fetch -> index of the first region that reads what it brings."""
    fetched: dict[int, int] = {}
    held: dict[int, int] = {}
    uses: dict[int, int] = {}
    for index, x in enumerate(schedule.effects):
        if x.lane is IN and x.ticket is not None:
            fetched[x.ticket] = index
        elif x.region is None:
            arrived = (fetched[ticket] for ticket in x.after if ticket in fetched)
            held.update(dict.fromkeys(x.defines, next(arrived, -1)))
        for register in x.reads if x.region is not None else ():
            if (fetch := held.get(register, -1)) >= 0:
                uses.setdefault(fetch, index)
    return uses


def measured_of(walks: Sequence[Walked], step_s: float | None = None) -> form.StepRecord:
    """The measured times of a step.

    step_s  from its first call to that of the next step; time that no walk covers came before the
            first call, as in a prediction
    """
    compute_s = sum(
        end - begin
        for walk in walks
        for x, begin, end in zip(walk.schedule.effects, walk.begins, walk.ends, strict=True)
        if x.region is not None
    )
    phases = dict[str, float]()
    since = walks[0].begins[0]
    for walk in walks:
        phase = walk.schedule.phase.value
        end = walk.ends[-1]
        phases[phase] = phases.get(phase, 0.0) + end - since
        since = end
    walked_s = sum(phases.values())
    first = walks[0].schedule.phase.value
    phases[first] += max(0.0, (step_s or 0.0) - walked_s)
    stall_s = sum((sum(walk.stalls.values()) for walk in walks), 0.0)
    return form.StepRecord(sum(phases.values()), compute_s, stall_s, phases, {}, {})


def _predicted(simulated: Timeline | None) -> form.StepRecord | None:
    if simulated is None:
        return None
    phases = {phase.value: seconds for phase, seconds in simulated.phases.items()}
    return form.StepRecord(
        simulated.step_s,
        simulated.compute_s,
        simulated.stall_s,
        phases,
        simulated.nbytes,
        simulated.busy_s,
    )
