"""Reading a dump back: runs, their graphs, and the records of `run_format`."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from zcompile.errors import NotInRun, RunUnreadable
from zcompile.ir.records import decode
from zcompile.ir.run_format import (
    PHASES,
    InstructionRecord,
    NodeRecord,
    PassRecord,
    PlanRecord,
    RunRecord,
    TimelineRecord,
    graph_number,
    graphs_in,
    nodes_file,
    passes_file,
    plan_file,
    run_file,
    runs_in,
    schedule_file,
    schedule_text_file,
    text_file,
    timeline_file,
)

R = TypeVar("R")


@dataclass(frozen=True)
class Graph:
    """One graph of a run; its files are read when they are asked for.

    raises  RunUnreadable, from every method
    """

    path: Path
    index: int

    def passes(self) -> tuple[PassRecord, ...]:
        return _read(tuple[PassRecord, ...], passes_file(self.path))

    def find(self, key: str) -> PassRecord:
        """The pass of a number ("2", "02") or a name.

        raises  NotInRun
        """
        passes = self.passes()
        for row in passes:
            if key == row.name or (key.isdecimal() and int(key) == row.step):
                return row
        raise NotInRun(self.path, "pass", key, [row.name for row in passes])

    def text(self, row: PassRecord) -> str:
        return _text(text_file(self.path, row.step, row.name))

    def nodes(self, row: PassRecord) -> tuple[NodeRecord, ...]:
        return _read(tuple[NodeRecord, ...], nodes_file(self.path, row.step, row.name))

    def plan(self) -> PlanRecord:
        return _read(PlanRecord, plan_file(self.path))

    def phases(self) -> tuple[str, ...]:
        """The phases that have a schedule."""
        return tuple(phase for phase in PHASES if schedule_file(self.path, phase).exists())

    def arrangements(self, phase: str) -> tuple[int, ...]:
        """Numbers of the schedules of a phase, from 1; several under a plan that keeps the
        parameters of some calls on the device, and of others not."""
        numbers = itertools.count(1)
        there = itertools.takewhile(lambda n: schedule_file(self.path, phase, n).exists(), numbers)
        return tuple(there)

    def schedule(self, phase: str, arrangement: int = 1) -> tuple[InstructionRecord, ...]:
        path = schedule_file(self.path, phase, arrangement)
        return _read(tuple[InstructionRecord, ...], path)

    def schedule_text(self, phase: str, arrangement: int = 1) -> str:
        return _text(schedule_text_file(self.path, phase, arrangement))


@dataclass(frozen=True)
class Run:
    """One run directory and the graphs one asked about."""

    path: Path
    record: RunRecord
    graphs: tuple[Graph, ...]

    def timeline(self) -> TimelineRecord:
        """The last step that was written. raises  RunUnreadable, if none was"""
        path = timeline_file(self.path)
        if not path.exists():
            raise RunUnreadable(self.path, "holds no timeline: the second step of an optimizer is "
                                "written when the third begins, so train for three")  # fmt: skip
        return _read(TimelineRecord, path)


def open_run(path: Path, graph: int | None = None) -> Run:
    """A run from DIR (its newest run), DIR/run-3, or DIR/run-3/graph0.

    graph   only this one; overrides what the path says
    raises  RunUnreadable, NotInRun
    """
    if not path.is_dir():
        raise RunUnreadable(path, "is not a directory" if path.exists() else "does not exist")
    path = path.resolve()
    if (named := graph_number(path)) is not None:
        graph = named if graph is None else graph
        path = path.parent
    elif not run_file(path).exists():
        if not (numbered := runs_in(path)):
            raise RunUnreadable(path, "holds no run")
        path = numbered[-1][1]
    record = _read(RunRecord, run_file(path))
    graphs = tuple(Graph(found, index) for index, found in graphs_in(path))
    if not graphs:
        raise RunUnreadable(path, "holds no graph yet")
    if graph is not None:
        known = [str(row.index) for row in graphs]
        graphs = tuple(row for row in graphs if row.index == graph)
        if not graphs:
            raise NotInRun(path, "graph", str(graph), known)
    return Run(path, record, graphs)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RunUnreadable(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RunUnreadable(path, f"is not UTF-8 text: {error}") from error


def _read(kind: type[R], path: Path) -> R:
    text = _text(path)
    try:
        return decode(kind, json.loads(text))
    except ValueError as error:
        raise RunUnreadable(path, f"is not what a dump writes: {error}") from error
