"""Writes a step as Chrome trace events, which Perfetto opens: `zinf timeline RUN --perfetto`.

Predicted and measured are two processes; calls, compute, waits and each link are their threads;
memory is a counter. A flow leads from a passage over a link to the instruction that first computes
with what it brought. Times are microseconds.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zcompile.cli.format import Answer, write_file
from zcompile.cli.tracks import LINKS, Side, sides
from zcompile.ir.serialize import MomentRecord, open_run

Event = dict[str, Any]
THREADS = ("calls", "compute", "waits", *LINKS)
TIERS = ("device", "of these, outside the arena", "host", "disk")


@dataclass(frozen=True)
class Written:
    """A trace on disk. slices, flows: how many of them it holds."""

    path: Path
    slices: int
    flows: int


def write(path: Path, target: Path) -> Answer:
    """Write the last step that the run wrote to `target`.

    raises  RunUnreadable, ConfigInvalid if the file cannot be written
    """
    run = open_run(path)
    record = run.timeline()
    events = [
        event
        for number, side in enumerate(sides(record), 1)
        for event in _events(number, side, record.moments)
    ]
    first = min((e["ts"] for e in events if "ts" in e), default=0.0)
    for event in events:
        if "ts" in event:  # a trace begins at 0
            event["ts"] = round(event["ts"] - first, 3)
    name = f"step {record.step} of {run.path.name}"
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": name}}
    write_file("perfetto", target, json.dumps(document, allow_nan=False))
    kinds = [event["ph"] for event in events]
    written = Written(target, kinds.count("X"), kinds.count("s"))
    return Answer(
        f"{target}: {name}, {written.slices} slices and {written.flows} flows; open it in "
        "Perfetto, or in chrome://tracing",
        written,
    )


def _events(pid: int, side: Side, moments: tuple[MomentRecord, ...]) -> Iterator[Event]:
    """The events of one process."""
    yield _named("process_name", pid, 0, side.name)
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    threads = {name: tid for tid, name in enumerate(THREADS, 1)}
    for name, tid in threads.items():
        yield _named("thread_name", pid, tid, name)
    for span in side.spans:
        yield _slice(pid, threads["calls"], span.phase, span.begin_s, span.end_s, {})
    for s in side.slices:
        m = moments[s.moment]
        args = {"kind": m.kind, "phase": m.phase, "number": m.index, "bytes": m.nbytes}
        args |= {"entry": m.entry} if m.entry else {}
        title = f"{m.kind} {m.name}"
        yield _slice(pid, threads["compute"], title, s.begin_s, s.end_s, args)
        if s.stall_s > 0:
            ended = s.stall_begin_s + s.stall_s
            yield _slice(pid, threads["waits"], f"before {title}", s.stall_begin_s, ended, {})
        for tier, nbytes in zip(TIERS, s.levels, strict=False):
            yield {"ph": "C", "name": f"{tier}, bytes", "pid": pid, "ts": s.end_s * 1e6} | {
                "args": {"bytes": nbytes}
            }
    begins = {s.moment: s.begin_s for s in side.slices}
    for number, hop in enumerate(side.hops):
        if hop.link not in threads:
            continue
        tid = threads[hop.link]
        yield _slice(pid, tid, hop.name, hop.begin_s, hop.end_s, {"bytes": hop.nbytes})
        if hop.user in begins and begins[hop.user] >= hop.begin_s:
            flow = {"name": "first use", "cat": "flow", "id": f"{pid}.{number}", "pid": pid}
            yield {"ph": "s", "tid": tid, "ts": hop.begin_s * 1e6, **flow}
            used_s = begins[hop.user]
            yield {"ph": "f", "bp": "e", "tid": threads["compute"], "ts": used_s * 1e6, **flow}


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(
    pid: int, tid: int, name: str, begin_s: float, end_s: float, args: dict[str, Any]
) -> Event:
    """A complete event; microseconds."""
    dur = round(max(0.0, end_s - begin_s) * 1e6, 3)
    event = {"ph": "X", "cat": "zinf", "name": name, "pid": pid, "tid": tid, "ts": begin_s * 1e6}
    return event | {"dur": dur, "args": args}
