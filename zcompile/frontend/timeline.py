"""Writes the timeline of a step, measured beside predicted, to a dump (`zinf timeline`)."""

import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zcompile.ir import printer, serialize
from zcompile.ir import serialize as form
from zcompile.ir.step import Moment, Timeline
from zcompile.planner.simulator import simulate
from zcompile.runtime.probe import machine_for
from zcompile.runtime.profile import Walked
from zcompile.runtime.session import Session

log = logging.getLogger(__name__)


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
        self._nbytes: dict[str, int] = {}
        self._traffic: dict[str, tuple[int, float]] = {}

    def step_ended(self) -> None:
        session = self._session()
        if session is None:
            return
        self._steps += 1
        moved, busy = self._since(session)
        if self._steps >= 2 and not self._steps & (self._steps - 1):
            self._write(session, moved, busy)
            session.executor.clocks.forget()

    def _since(self, session: Session) -> tuple[dict[str, int], dict[str, float]]:
        """Bytes and busy seconds of each link since the last call of this method."""
        meter = session.meter
        before, self._nbytes = self._nbytes, meter.bytes()
        then, self._traffic = self._traffic, meter.traffic()
        moved = {link: max(0, n - before.get(link, 0)) for link, n in self._nbytes.items()}
        busy = {link: row[1] - then.get(link, (0, 0.0))[1] for link, row in self._traffic.items()}
        return moved, busy

    def _write(self, session: Session, moved: dict[str, int], busy: dict[str, float]) -> None:
        clocks = session.executor.clocks
        step, walks = session.executor.recorder.last_walked, clocks.timeline()
        simulated = None
        if step is not None:
            machine = machine_for(session.config, session.device)
            simulated = simulate(step, clocks.costs(machine, session.ways()))
        measured = replace(measured_of(walks, clocks.last_step_s()), nbytes=moved, busy_s=busy)
        record = timeline_record(self._steps, measured, walks, simulated)
        try:
            form.timeline_file(self._run).write_text(serialize.encode(record))
        except OSError as error:  # training goes on: nothing that it computes hangs on the dump
            log.warning("%s takes no timeline any more: %s", self._run, error.strerror or error)
            session.executor.drop_timeline()


def timeline_record(
    number: int, measured: form.StepRecord, walks: Sequence[Walked], simulated: Timeline | None
) -> form.TimelineRecord:
    """The record of step `number`: measured, with the prediction instruction by instruction."""
    begun = walks[0].begins[0]
    ahead = {(m.call, m.number): m for m in simulated.moments} if simulated else {}
    moments = tuple(
        _moment(call, index, walk, begun, ahead.get((call, index)))
        for call, walk in enumerate(walks)
        for index in range(len(walk.begins))
    )
    return form.TimelineRecord(number, measured, _predicted(simulated), moments)


def _moment(
    call: int, index: int, walk: Walked, begun: float, ahead: Moment | None
) -> form.MomentRecord:
    _, kind, name, _ = printer.instruction_row(walk.schedule.effects[index])
    return form.MomentRecord(
        call=call,
        phase=walk.schedule.phase.value,
        index=index,
        kind=kind,
        name=name,
        begin_s=walk.begins[index] - begun,
        end_s=walk.ends[index] - begun,
        stall_s=walk.stalls.get(index, 0.0),
        predicted_begin_s=ahead.begin_s if ahead else None,
        predicted_end_s=ahead.end_s if ahead else None,
        predicted_stall_s=ahead.stall_s if ahead else None,
    )


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
