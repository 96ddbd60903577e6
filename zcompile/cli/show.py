"""Prints what stands in a dump, stage by stage: `zinf show`, `zinf diff`, `zinf schedule`."""

import difflib
from dataclasses import dataclass
from pathlib import Path

from zcompile.cli.format import Answer
from zcompile.errors import NotInRun
from zcompile.ir.serialize import (
    Graph,
    InstructionRecord,
    NodeRecord,
    PassRecord,
    Run,
    RunRecord,
    open_run,
    pass_line,
    text_file,
)


@dataclass(frozen=True)
class GraphPasses:
    """The passes of one graph."""

    graph: int
    name: str
    passes: tuple[PassRecord, ...]


@dataclass(frozen=True)
class Overview:
    """All passes of a run."""

    path: Path
    run: RunRecord
    graphs: tuple[GraphPasses, ...]


@dataclass(frozen=True)
class Stage:
    """A graph after one pass."""

    graph: int
    step: int
    name: str
    nodes: tuple[NodeRecord, ...]


@dataclass(frozen=True)
class Difference:
    """The difference of a graph between two passes."""

    graph: int
    a: str
    b: str
    same: bool
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Scheduled:
    """One schedule of a graph."""

    graph: int
    phase: str
    instructions: tuple[InstructionRecord, ...]
    arrangement: int = 1


def show(path: Path, graph: int | None, stage: str | None) -> Answer:
    """One line per pass; with `stage`, a pass's number or name, the graph after it.

    raises  RunUnreadable, NotInRun
    """
    run = open_run(path, graph)
    return _overview(run) if stage is None else _stage(run, stage)


def _overview(run: Run) -> Answer:
    rows = [GraphPasses(g.index, _graph_name(run, g), g.passes()) for g in run.graphs]
    lines = [f"{run.path.name}: zcompile {run.record.zcompile}, torch {run.record.torch}"]
    for row in rows:
        lines.append(f"graph{row.graph}" + (f": {row.name}" if row.name else ""))
        for done in row.passes:
            lines.append(f"  {pass_line(done)}")
            lines += (f"       note: {note}" for note in done.notes)
    return Answer("\n".join(lines), Overview(run.path, run.record, tuple(rows)))


def _graph_name(run: Run, graph: Graph) -> str:
    names = run.record.graphs
    return names[graph.index] if graph.index < len(names) else ""


def _stage(run: Run, key: str) -> Answer:
    found = [(graph, graph.find(key)) for graph in run.graphs]
    texts = [(f"graph{graph.index}", graph.text(row)) for graph, row in found]
    stages = [Stage(graph.index, row.step, row.name, graph.nodes(row)) for graph, row in found]
    return Answer(_titled(texts), stages)


def diff(path: Path, graph: int | None, a: str, b: str) -> Answer:
    """The graphs after passes `a` and `b` as a unified diff; exit code 1 if they differ.

    raises  RunUnreadable, NotInRun
    """
    found = [_difference(each, a, b) for each in open_run(path, graph).graphs]
    text = "\n".join("\n".join(row.lines) for row in found if not row.same)
    same = all(row.same for row in found)
    return Answer(text or "no difference", found, 0 if same else 1)


def _difference(graph: Graph, a: str, b: str) -> Difference:
    before, after = graph.find(a), graph.find(b)
    lines = difflib.unified_diff(
        graph.text(before).splitlines(),
        graph.text(after).splitlines(),
        f"graph{graph.index}/{text_file(graph.path, before.step, before.name).name}",
        f"graph{graph.index}/{text_file(graph.path, after.step, after.name).name}",
        lineterm="",
    )
    told = tuple(lines)
    return Difference(graph.index, before.name, after.name, not told, told)


def schedule(path: Path, graph: int | None, phase: str | None, regions: bool = False) -> Answer:
    """The instructions that calls of every phase, or of one, walked last.

    regions  the region programs that these were lowered from, in place of their text

    raises  RunUnreadable, NotInRun if no graph asked about has such a phase
    """
    run = open_run(path, graph)
    found = [
        (g, p, n)
        for g in run.graphs
        for p in g.phases()
        if phase in (None, p)
        for n in g.arrangements(p)
    ]
    if not found:
        known = sorted({p for g in run.graphs for p in g.phases()})
        raise NotInRun(run.path, "schedule of phase", phase or "any", known)
    texts = [
        (
            f"graph{g.index} {p}" + (f", arrangement {n}" if n > 1 else ""),
            g.program_text(p, n) if regions else g.schedule_text(p, n),
        )
        for g, p, n in found
    ]
    rows = [Scheduled(g.index, p, g.schedule(p, n), n) for g, p, n in found]
    return Answer(_titled(texts), rows)


def _titled(texts: list[tuple[str, str]]) -> str:
    """One text as it stands; several with a line above each."""
    if len(texts) == 1:
        return texts[0][1]
    return "\n".join(f"# {title}\n{text}" for title, text in texts)
