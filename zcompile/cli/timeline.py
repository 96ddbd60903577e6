"""Prints a step as it was, beside its prediction: `zinf timeline`."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from zcompile.cli.format import Answer
from zcompile.ir.serialize import MomentRecord, StepRecord, TimelineRecord, open_run
from zcompile.ir.units import show_seconds, show_size

MOST_STALLS = 10
"""Most stalls that are shown, longest first."""
COLUMNS = 72
"""Width of the strip of a phase."""


def timeline(path: Path) -> Answer:
    """The last step that the run wrote.

    raises  RunUnreadable
    """
    run = open_run(path)
    record = run.timeline()
    return Answer("\n".join(_lines(run.path.name, record)), record)


def _lines(run: str, record: TimelineRecord) -> Iterator[str]:
    yield f"step {record.step} of {run}"
    yield f"  {'':<20} {'measured':>12} {'predicted':>12} {'ratio':>7}"
    measured, predicted = record.measured, record.predicted
    rows = [("whole step", "step_s"), ("compute", "compute_s"), ("stall", "stall_s")]
    for title, field in rows:
        yield _row(title, getattr(measured, field), getattr(predicted, field, None))
    for phase, seconds in measured.phases.items():
        yield _row(phase, seconds, predicted.phases.get(phase) if predicted else None)
    yield from _link_lines(measured, predicted)
    yield ""
    yield from _strips(record.moments)
    yield from _stalls(record.moments)


def _row(title: str, measured_s: float, predicted_s: float | None) -> str:
    if predicted_s is None:
        return f"  {title:<20} {show_seconds(measured_s):>12}"
    ratio = f"{predicted_s / measured_s:.2f}" if measured_s else ""
    shown = show_seconds(measured_s), show_seconds(predicted_s)
    return f"  {title:<20} {shown[0]:>12} {shown[1]:>12} {ratio:>7}"


def _link_lines(measured: StepRecord, predicted: StepRecord | None) -> Iterator[str]:
    for link, nbytes in measured.nbytes.items():
        expected = predicted.nbytes.get(link, 0) if predicted else 0
        if nbytes or expected:
            ahead = show_size(expected) if predicted else ""
            yield f"  {link:<20} {show_size(nbytes):>12} {ahead:>12}"
            busy_s = predicted.busy_s.get(link) if predicted else None
            yield _row(f"{link} in use", measured.busy_s.get(link, 0.0), busy_s)


def _strips(moments: Sequence[MomentRecord]) -> Iterator[str]:
    """Each call as a strip: # computes, . waits for a transfer, blank is the host's own time."""
    yield "compute over time: # computes, . waits for a transfer"
    for (call, phase), rows in groupby(moments, key=lambda m: (m.call, m.phase)):
        several = list(rows)
        yield f"  {call:>3} {phase:<10} measured  |{_strip(several, _as_measured)}|"
        if several[0].predicted_begin_s is not None:
            yield f"  {'':>3} {'':<10} predicted |{_strip(several, _as_predicted)}|"
    yield ""


Span = tuple[float, float, float]
"""(begin, end, seconds of stall in between)."""


def _as_measured(moment: MomentRecord) -> Span:
    return moment.begin_s, moment.end_s, moment.stall_s


def _as_predicted(moment: MomentRecord) -> Span:
    begin, end = moment.predicted_begin_s or 0.0, moment.predicted_end_s or 0.0
    stall = moment.predicted_stall_s or 0.0
    return begin - stall, end, stall


def _strip(rows: Sequence[MomentRecord], span_of: Callable[[MomentRecord], Span]) -> str:
    """One mark for each column: what took most of its time."""
    spans = [(m.kind, *span_of(m)) for m in rows]
    since, until = min(s[1] for s in spans), max(s[2] for s in spans)
    width_s = (until - since) / COLUMNS or 1.0
    work, stalls = [0.0] * COLUMNS, [0.0] * COLUMNS
    for kind, begin, end, stall in spans:
        _spread(stalls, (begin - since) / width_s, (begin + stall - since) / width_s)
        if kind == "run":
            _spread(work, (begin + stall - since) / width_s, (end - since) / width_s)
    return "".join(_mark(w, s) for w, s in zip(work, stalls, strict=True))


def _spread(columns: list[float], low: float, high: float) -> None:
    """Add to each column its share of [low, high), in columns."""
    for at in range(max(0, int(low)), min(len(columns), int(high) + 1)):
        columns[at] += max(0.0, min(high, at + 1) - max(low, at))


def _mark(work: float, stall: float) -> str:
    if max(work, stall) < 0.25:
        return " "
    return "#" if work >= stall else "."


def _stalls(moments: Sequence[MomentRecord]) -> Iterator[str]:
    longest = sorted(moments, key=lambda m: -m.stall_s)[:MOST_STALLS]
    longest = [m for m in longest if m.stall_s > 0]
    if longest:
        yield "longest stalls"
    for m in longest:
        ahead = "" if m.predicted_stall_s is None else show_seconds(m.predicted_stall_s)
        yield (
            f"  {m.phase:<10} {m.index:>6}  {m.kind:<8} {m.name:<40.40} "
            f"{show_seconds(m.stall_s):>10} {ahead:>10}"
        )
