"""Collects the facts of a run that its page shows.

Lists of thousands are columns, and texts in them are numbers into `names`. Times in columns are
microseconds since the first call of the step began; all other times are seconds, sizes bytes.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from zcompile.cli.tracks import INBOUND, LINKS, Hop, Side, sides
from zcompile.errors import RunUnreadable
from zcompile.ir.serialize import (
    EntryRecord,
    Graph,
    PassRecord,
    Run,
    TimelineRecord,
    plain,
    timeline_file,
)
from zcompile.ir.units import show_seconds, show_size
from zcompile.ir.version import VERSION

MOST_LINES = 20_000
"""Graphs with more lines are not compared: that would take minutes."""
MOST_DIFF_LINES = 4_000
"""Of a difference, so many lines are in the page."""
CONTEXT = 2
OFF = 1.25
"""A measured step that is so many times its prediction, or the other way round, is worth a word."""
MUCH_WAITING = 0.25
"""Of a step."""
_SIZE = re.compile(r"\s+\d+(\.\d+)? [KMGT]?i?B$")
"""The live bytes beside a line of a graph: they change where nothing else does."""


class Names:
    """Texts, each told once: `names[name]` is its number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def texts(self) -> list[str]:
        return list(self._numbers)


def facts_of(run: Run) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The facts of a run, and a sentence for each of its files that cannot be read."""
    names, damage = Names(), list[str]()
    record = None
    if timeline_file(run.path).exists():
        try:
            record = run.timeline()
        except RunUnreadable as error:
            damage.append(str(error))
    graphs = [_graph(run, graph, damage) for graph in run.graphs]
    facts: dict[str, Any] = {
        "title": run.path.name.encode(errors="replace").decode(),
        "zcompile": run.record.zcompile,
        "torch": run.record.torch,
        "config": plain(run.record.config),
        "graphs": graphs,
        "step": None,
        "entries": _entries(run, record, names, damage),
    }
    if record is not None:
        facts |= _step(record, names)
    facts["warnings"] = [*damage, *_warnings(run, record, bool(damage)), *_notes(graphs)]
    facts["names"] = names.texts()
    return facts, tuple(damage)


def _step(record: TimelineRecord, names: Names) -> dict[str, Any]:
    both = sides(record)
    moments = record.moments
    return {
        "step": {
            "number": record.step,
            "measured": plain(record.measured),
            "predicted": plain(record.predicted),
        },
        "moments": {
            "kind": [names[m.kind] for m in moments],
            "name": [names[m.name] for m in moments],
            "entry": [names[m.entry] for m in moments],
            "phase": [names[m.phase] for m in moments],
            "index": [m.index for m in moments],
            "nbytes": [m.nbytes for m in moments],
        },
        "sides": [_side(side, names) for side in both],
        "tiers": plain(record.tiers),
        "links": plain([row for row in record.links if row.link in LINKS]),
        "plan": plain(record.plan),
        "unplanned": record.unplanned,
    }


def _side(side: Side, names: Names) -> dict[str, Any]:
    slices = sorted(side.slices, key=lambda s: s.begin_s)
    hops = sorted(side.hops, key=lambda h: h.begin_s)
    return {
        "name": side.name,
        "step_s": side.step.step_s,
        "slices": {
            "moment": [s.moment for s in slices],
            "begin": _us(s.begin_s for s in slices),
            "end": _us(s.end_s for s in slices),
            "stall_begin": _us(s.stall_begin_s for s in slices),
            "stall": _us(s.stall_s for s in slices),
        },
        "hops": {link: _hops([h for h in hops if h.link == link], names) for link in LINKS},
        "spans": [
            {"phase": s.phase, "begin": _us([s.begin_s])[0], "end": _us([s.end_s])[0]}
            for s in side.spans
        ],
        "memory": _memory(side),
    }


def _hops(hops: Sequence[Hop], names: Names) -> dict[str, Any]:
    """What passed one link; -1 for a moment that is not known."""
    return {
        "name": [names[h.name] for h in hops],
        "nbytes": [h.nbytes for h in hops],
        "begin": _us(h.begin_s for h in hops),
        "end": _us(h.end_s for h in hops),
        "sender": [-1 if h.sender is None else h.sender for h in hops],
        "user": [-1 if h.user is None else h.user for h in hops],
    }


def _us(seconds: Iterable[float]) -> list[float]:
    return [round(s * 1e6, 1) for s in seconds]


def _memory(side: Side) -> dict[str, Any]:
    """Levels until a time: `device` with what of it lies outside the arena, `host`, `disk`.

    A level holds from the time before it, or the beginning; rows that change nothing are left out.
    """
    rows = sorted((s.end_s, s.levels) for s in side.slices if s.levels)
    kept = [
        row for row, after in pairwise([*rows, (0.0, ())]) if row[1] != after[1]
    ]  # of equal levels the last, which holds until then
    columns = zip(*(levels for _, levels in kept), strict=False)
    told = dict(zip(("device", "outside", "host", "disk"), map(list, columns), strict=False))
    return {"until": _us(time for time, _ in kept), **told}


def _entries(
    run: Run, record: TimelineRecord | None, names: Names, damage: list[str]
) -> dict[str, Any]:
    """What rests where: as the step had it, or, without one, as the graphs were compiled."""
    rows: Sequence[EntryRecord] = record.entries if record is not None else ()
    compiled = not rows
    if compiled:
        rows = tuple(_compiled(run, damage))
    moved: dict[tuple[str, bool], int] = {}
    for hop in record.passages if record is not None else ():
        key = hop.name, hop.link in INBOUND
        moved[key] = moved.get(key, 0) + hop.nbytes
    return {
        "compiled": compiled,
        "name": [names[row.name] for row in rows],
        "kind": [names[row.kind] for row in rows],
        "nbytes": [row.nbytes for row in rows],
        "home": [names[row.home] for row in rows],
        "plan": [names[row.plan or row.home] for row in rows],
        "arrives": [moved.get((row.name, True), 0) for row in rows],
        "leaves": [moved.get((row.name, False), 0) for row in rows],
    }


def _compiled(run: Run, damage: list[str]) -> Iterator[EntryRecord]:
    seen: set[str] = set()
    for graph in run.graphs:
        try:
            params = graph.plan().params
        except RunUnreadable as error:
            damage.append(str(error))
            continue
        for param in params:
            if param.name not in seen:
                seen.add(param.name)
                yield EntryRecord(param.name, "weight", param.nbytes, param.home)


def _graph(run: Run, graph: Graph, damage: list[str]) -> dict[str, Any]:
    known = run.record.graphs
    name = known[graph.index] if graph.index < len(known) else ""
    try:
        passes = graph.passes()
    except RunUnreadable as error:
        damage.append(str(error))
        passes = ()
    rows = []
    before: list[str] | None = None
    for row in passes:
        try:
            after = [_SIZE.sub("", line) for line in graph.text(row).splitlines()]
        except RunUnreadable as error:
            damage.append(str(error))
            after = None
        rows.append(plain(row) | _diff(run, row, before, after))
        before = after
    return {"index": graph.index, "name": name, "passes": rows}


def _diff(
    run: Run, row: PassRecord, before: list[str] | None, after: list[str] | None
) -> dict[str, Any]:
    """The difference that a pass made: lines, and a sentence on what is not there."""
    if after is None:
        return {"diff": [], "diff_note": "The graph after this pass cannot be read."}
    if before is None:
        return {"diff": [], "diff_note": f"{len(after)} lines, to begin with."}
    if before == after:
        return {"diff": [], "diff_note": "The graph is as before.", "same": True}
    asked = f"zinf diff {run.path.name} {row.step - 1:02d} {row.step:02d}"
    if max(len(before), len(after)) > MOST_LINES:
        return {"diff": [], "diff_note": f"{len(after)} lines are too many for a page: {asked}"}
    told = list(difflib.unified_diff(before, after, lineterm="", n=CONTEXT))[2:]
    more = len(told) - MOST_DIFF_LINES
    note = f"{more} more lines: {asked}" if more > 0 else ""
    return {"diff": told[:MOST_DIFF_LINES], "diff_note": note}


def _notes(graphs: Sequence[dict[str, Any]]) -> Iterator[str]:
    for graph in graphs:
        for row in graph["passes"]:
            yield from (f"{row['name']}, graph {graph['index']}: {note}" for note in row["notes"])


def _warnings(run: Run, record: TimelineRecord | None, damaged: bool) -> Iterator[str]:
    if run.record.zcompile != VERSION:
        yield f"The run was written by zcompile {run.record.zcompile}; this page by {VERSION}."
    if record is None:
        if not damaged:
            yield (
                "No step was measured yet: the second step of an optimizer is written when the "
                "third begins, so train for three."
            )
        return
    if record.format < 2:
        yield (
            "The run was written before links, memory and what rests where were recorded; train "
            "again to see them."
        )
    if record.unplanned:
        yield record.unplanned
    yield from _about_times(record)
    for tier in record.tiers:
        if tier.peak_bytes > tier.budget_bytes:
            held, most = show_size(tier.peak_bytes), show_size(tier.budget_bytes)
            yield f"The {tier.tier} held {held}, which is more than its {most}."
    astray = [row for row in record.entries if row.plan not in (None, row.home, "held")]
    if astray:
        size = show_size(sum(row.nbytes for row in astray))
        yield f"{len(astray)} entries, {size}, do not rest where the plan wants them."
    known = {row.link for row in record.passages}
    for link, nbytes in record.measured.nbytes.items():
        if record.format >= 2 and nbytes and link not in known:
            yield (
                f"{show_size(nbytes)} moved over {link} without a time of their own: that link "
                "is not timed here."
            )
    yield from record.inexact


def _about_times(record: TimelineRecord) -> Iterator[str]:
    measured, predicted = record.measured, record.predicted
    if predicted is None:
        yield "Nothing was predicted of this step."
    elif predicted.step_s > 0 and measured.step_s > 0:
        ratio = measured.step_s / predicted.step_s
        if max(ratio, 1 / ratio) > OFF:
            yield (
                f"The step took {show_seconds(measured.step_s)}, {ratio:.2f} times its prediction "
                f"of {show_seconds(predicted.step_s)}."
            )
    if measured.step_s > 0 and measured.stall_s / measured.step_s > MUCH_WAITING:
        share = measured.stall_s / measured.step_s
        yield f"Compute waited for transfers during {share:.0%} of the step."
