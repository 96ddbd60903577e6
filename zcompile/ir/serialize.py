"""Defines the run format: the files of a dump, the records in them, and their JSON.

    DIR/run-<n>/run.json                         RunRecord
    DIR/run-<n>/timeline.json                    TimelineRecord, of the last step that was written
    DIR/run-<n>/graph<k>/passes.json             list of PassRecord, in the order they ran
    DIR/run-<n>/graph<k>/<NN>-<pass>.txt         the graph after that pass, as text
    DIR/run-<n>/graph<k>/<NN>-<pass>.json        the same as a list of NodeRecord
    DIR/run-<n>/graph<k>/plan.json               PlanRecord
    DIR/run-<n>/graph<k>/schedule-<phase>.json   list of InstructionRecord
    DIR/run-<n>/graph<k>/schedule-<phase>.txt    the same as text

A schedule is the one that the last call walked. Calls whose parameters rest on different tiers walk
different arrangements of one phase: the second stands in schedule-<phase>-2, and so on.

Run and timeline carry the number of the format they are written in (`FORMAT`); a reader refuses
what is newer than itself, and finds less in what is older.

Step 0, `captured`, is the graph before the first pass. The records are the format: a writer fills
them and calls `encode`, so that a key is spelled once; the annotations of their fields say how they
are read back. Sizes and addresses are bytes; names of nodes and parameters are for people. A reader
ignores keys it does not know.
"""

import dataclasses
import functools
import itertools
import json
import math
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from zcompile.errors import NotInRun, RunUnreadable
from zcompile.ir.memory_curve import Activation, ActivationCost, Memory, SlicedRegion
from zcompile.ir.units import show_size

FORMAT = 2
"""1: as dumps were before they said so. 2: what passes links, memory over a step, what rests where,
and what binds a step stand in timeline.json."""

CAPTURED = "captured"
PHASES = ("forward", "backward", "backward-within-no_sync", "inference", "step")

_RUN = re.compile(r"run-(\d+)\Z")
_GRAPH = re.compile(r"graph(\d+)\Z")


@dataclass(frozen=True)
class RunRecord:
    """run.json. graphs[k] is the name of graph<k>; format: `FORMAT` of who wrote it."""

    zcompile: str
    torch: str
    config: Mapping[str, object]
    graphs: tuple[str, ...]
    format: int = 1


@dataclass(frozen=True)
class PassRecord:
    """One pass over one graph. did: op -> how many more of it there are; peaks as predicted."""

    step: int
    name: str
    did: Mapping[str, int]
    peak_before: int
    peak_after: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeRecord:
    """One line of a graph.

    op          fx's: "placeholder", "call_function", "output", ...
    target      as printed: "zinf.fetch", "aten.mm"
    phase       one of PHASES
    args        each argument as printed; a node that is read is written "%name"
    shape       a symbolic size is its text; None, like dtype, if the value is not a tensor
    nbytes      of the storages that it makes; 0 for a view, and for what the caller holds
    live_bytes  that the graph has live on the device while this line runs, slots of gathered
                parameters included
    module      dotted name of the module it was traced in
    param       dotted name of the parameter behind this handle, gather, wait, release or reduction
    """

    name: str
    op: str
    target: str
    phase: str
    args: tuple[str, ...]
    shape: tuple[int | str, ...] | None
    dtype: str | None
    nbytes: int
    live_bytes: int
    module: str | None = None
    param: str | None = None


@dataclass(frozen=True)
class ParamRecord:
    """A parameter as the plan knows it. handle: its placeholder; home: the tier it rests on."""

    handle: str
    name: str
    shape: tuple[int | str, ...]
    dtype: str
    nbytes: int
    home: str


@dataclass(frozen=True)
class PlanRecord:
    """plan.json: the decisions about one graph.

    memory  memory curves with everything saved that backward needs, and as it was chosen; None
            without a budget
    """

    name: str
    budget_bytes: int | None
    params: tuple[ParamRecord, ...]
    regions: int
    distinct_regions: int
    notes: tuple[str, ...] = ()
    activations: tuple[Activation, ...] = ()
    activation_cost: ActivationCost | None = None
    memory: Memory | None = None
    sliced: tuple[SlicedRegion, ...] = ()


@dataclass(frozen=True)
class InstructionRecord:
    """One instruction. after: tickets it waits for; inputs, outputs: registers."""

    index: int
    stream: str
    kind: str
    name: str
    nbytes: int
    address: int | None
    ticket: int | None
    after: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepRecord:
    """A measured or predicted step. Seconds; bytes and busy seconds by link.

    step_s  from the end of one step to the end of the next
    phases  time between two calls counts to the later one
    """

    step_s: float
    compute_s: float
    stall_s: float
    phases: Mapping[str, float]
    nbytes: Mapping[str, int]
    busy_s: Mapping[str, float]


@dataclass(frozen=True)
class MomentRecord:
    """One instruction of a step, with its measured and predicted times.

    call     number of the call in the step
    index    of the instruction in its schedule
    stall_s  that compute waited during the instruction, or right before
    entry    name of the entry whose bytes it moves or uses, in this very call; "": of none
    stream   as in `InstructionRecord`
    used_by  of a fetch: index of the first instruction of its call that computes with what it
             brings; None: of another instruction, or nothing does
    levels   measured peaks of bytes since the instruction before: of the device, of values of
             graphs alone that lie there outside the arena, of the host, of the disk; empty: not
             measured
    predicted_levels  predicted peaks of bytes during it: of the device, and of values outside the
             arena alone
    Seconds from the beginning of the step.
    """

    call: int
    phase: str
    index: int
    kind: str
    name: str
    begin_s: float
    end_s: float
    stall_s: float
    predicted_begin_s: float | None = None
    predicted_end_s: float | None = None
    predicted_stall_s: float | None = None
    entry: str = ""
    stream: str = ""
    nbytes: int = 0
    used_by: int | None = None
    levels: tuple[int, ...] = ()
    predicted_levels: tuple[int, ...] = ()


@dataclass(frozen=True)
class PassageRecord:
    """Bytes of an entry on a link, which carries one passage at a time.

    name         of the entry
    call, index  of the instruction that sent them, as in `MomentRecord`; None: not known
    Seconds from the beginning of the step; negative before it.
    """

    link: str
    name: str
    nbytes: int
    begin_s: float
    end_s: float
    call: int | None = None
    index: int | None = None


@dataclass(frozen=True)
class TierRecord:
    """A tier. budget_bytes: that it may hold; peak_bytes: most that it held at once in the step.

    Both of all that it holds: of the device, of the arena and values of graphs outside it.
    """

    tier: str
    budget_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class EntryRecord:
    """An entry of the store.

    kind  "weight", "gradient", "state", "copy" (in another dtype) or "other"
    home  tier that it rested on in the step; "held": on the device, where compute made it
    plan  tier that the plan wants it on; None without a plan
    """

    name: str
    kind: str
    nbytes: int
    home: str
    plan: str | None = None


@dataclass(frozen=True)
class LinkRecord:
    """Capacity of a link: bytes per second at which it is known to carry long transfers."""

    link: str
    bytes_per_s: float


@dataclass(frozen=True)
class ShadowRecord:
    """Seconds of a step that one more GiB of a tier saves: planned again, and of the bound."""

    tier: str
    planned_s: float
    least_s: float


@dataclass(frozen=True)
class StepPlanRecord:
    """The plan of a whole step that was in force.

    least_s, least_by  lower bound, in seconds, of plans that compute what this one does with the
                       same split of the device; compute or the link that it is due to, for people
    floor_s, floor_by  the same of all plans within the budgets
    binding            phase -> compute or the link that binds it
    window_bytes       of the arena, that entries stream through
    staying_bytes      of gradients that stay outside the arena until the optimizer has read them
    """

    least_s: float
    least_by: str
    floor_s: float
    floor_by: str
    binding: Mapping[str, str]
    window_bytes: int
    staying_bytes: int
    shadows: tuple[ShadowRecord, ...]


@dataclass(frozen=True)
class TimelineRecord:
    """timeline.json.

    step        counts from 1
    predicted   None where no machine was known
    passages    measured; a link that cannot tell, as those of CUDA, has none
    plan        None: none was in force, since `unplanned` (a sentence, for people)
    inexact     what may round otherwise than eager's, a sentence each
    """

    step: int
    measured: StepRecord
    predicted: StepRecord | None
    moments: tuple[MomentRecord, ...]
    format: int = 1
    passages: tuple[PassageRecord, ...] = ()
    predicted_passages: tuple[PassageRecord, ...] = ()
    tiers: tuple[TierRecord, ...] = ()
    entries: tuple[EntryRecord, ...] = ()
    links: tuple[LinkRecord, ...] = ()
    plan: StepPlanRecord | None = None
    unplanned: str = ""
    inexact: tuple[str, ...] = ()


def run_file(run: Path) -> Path:
    return run / "run.json"


def timeline_file(run: Path) -> Path:
    return run / "timeline.json"


def graph_dir(run: Path, graph: int) -> Path:
    return run / f"graph{graph}"


def passes_file(graph: Path) -> Path:
    return graph / "passes.json"


def text_file(graph: Path, step: int, name: str) -> Path:
    return graph / f"{step:02d}-{name}.txt"


def nodes_file(graph: Path, step: int, name: str) -> Path:
    return graph / f"{step:02d}-{name}.json"


def plan_file(graph: Path) -> Path:
    return graph / "plan.json"


def schedule_file(graph: Path, phase: str, arrangement: int = 1) -> Path:
    """Path of one schedule of a phase; arrangements count from 1."""
    return graph / f"{_schedule_name(phase, arrangement)}.json"


def schedule_text_file(graph: Path, phase: str, arrangement: int = 1) -> Path:
    return graph / f"{_schedule_name(phase, arrangement)}.txt"


def program_text_file(graph: Path, phase: str, arrangement: int = 1) -> Path:
    """Path of the region program that a schedule was lowered from, as text."""
    return graph / f"{_schedule_name(phase, arrangement).replace('schedule', 'program', 1)}.txt"


def remove_schedules(graph: Path, phase: str) -> None:
    """Remove every arrangement of one phase."""
    arrangement = 1
    while schedule_file(graph, phase, arrangement).exists():
        schedule_file(graph, phase, arrangement).unlink()
        schedule_text_file(graph, phase, arrangement).unlink(missing_ok=True)
        program_text_file(graph, phase, arrangement).unlink(missing_ok=True)
        arrangement += 1


def _schedule_name(phase: str, arrangement: int) -> str:
    return f"schedule-{phase}" if arrangement == 1 else f"schedule-{phase}-{arrangement}"


def new_run(root: Path) -> Path:
    """Make and return the next DIR/run-<n>; two processes never get the same one.

    raises  OSError, if the directory cannot be made
    """
    root.mkdir(parents=True, exist_ok=True)
    number = max((n for n, _ in runs_in(root)), default=-1) + 1
    while True:
        try:
            (root / f"run-{number}").mkdir()
        except FileExistsError:  # another process was faster
            number += 1
        else:
            return root / f"run-{number}"


def pass_line(row: PassRecord) -> str:
    """One pass, one line, for `zinf show` and the log.

    02 release-params    zinf.release +3                           peak 3.38 -> 3.38 KiB
    """
    did = ", ".join(f"{op} {count:+d}" for op, count in sorted(row.did.items()))
    did = did or ("as captured" if row.name == CAPTURED else "order only")
    before, after = show_size(row.peak_before), show_size(row.peak_after)
    if before.split()[1] == after.split()[1]:
        before = before.split()[0]
    return f"{row.step:02d} {row.name:<18} {did:<58} peak {before} -> {after}"


def runs_in(root: Path) -> tuple[tuple[int, Path], ...]:
    """Number and directory of each run, oldest first."""
    return _numbered(root, _RUN)


def graphs_in(run: Path) -> tuple[tuple[int, Path], ...]:
    """Number and directory of each graph of a run, in the order they were captured."""
    return _numbered(run, _GRAPH)


def graph_number(path: Path) -> int | None:
    """k of a directory called graph<k>; None for any other name."""
    match = _GRAPH.match(path.name)
    return int(match[1]) if match else None


def _numbered(parent: Path, name: re.Pattern[str]) -> tuple[tuple[int, Path], ...]:
    matches = ((name.match(path.name), path) for path in parent.iterdir() if path.is_dir())
    return tuple(sorted((int(match[1]), path) for match, path in matches if match))


R = TypeVar("R")


def encode(record: object) -> str:
    """JSON text of a record or a sequence of records: one key or row a line, ends with a newline.

    record  dataclasses, mappings, sequences, texts, numbers and None
    """
    return json.dumps(plain(record), indent=1, allow_nan=False) + "\n"


def plain(record: object) -> Any:
    """The lists, dicts, texts and numbers of a record."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {f.name: plain(getattr(record, f.name)) for f in dataclasses.fields(record)}
    if isinstance(record, Mapping):
        return {str(key): plain(value) for key, value in record.items()}
    if isinstance(record, list | tuple):
        return [plain(value) for value in record]
    return record if isinstance(record, str | int | float | None) else str(record)


def decode(kind: type[R], value: object, where: str = "the top") -> R:
    """The record of type `kind` that JSON `value` stands for.

    kind    a record, tuple[X, ...], Mapping[str, X], X | Y
    raises  ValueError, which says where in the text something else was found
    """
    return cast(R, _decode(kind, value, where))


def _decode(kind: Any, value: object, where: str) -> object:
    origin = get_origin(kind)
    if kind is object:
        return value
    if dataclasses.is_dataclass(kind):
        return _record(cast(type, kind), value, where)
    if origin in (Union, types.UnionType):
        return _union(get_args(kind), value, where)
    if origin is tuple and isinstance(value, list):
        inner = get_args(kind)[0]
        return tuple(_decode(inner, row, f"{where}[{i}]") for i, row in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        inner = get_args(kind)[1]
        return {key: _decode(inner, row, f"{where}.{key}") for key, row in value.items()}
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    raise _unexpected(kind, value, where)


def _record(kind: type, value: object, where: str) -> object:
    if not isinstance(value, dict):
        raise _unexpected(kind, value, where)
    hints = _hints(kind)
    given = {}
    for field in dataclasses.fields(kind):
        if field.name in value:
            inner = f"{where}.{field.name}"
            given[field.name] = _decode(hints[field.name], value[field.name], inner)
        elif field.default is dataclasses.MISSING:
            raise ValueError(f"{where} lacks {field.name!r}")
    return kind(**given)


@functools.cache
def _hints(kind: type) -> Mapping[str, Any]:
    """Types of the fields of a record; looking them up takes longer than reading a record."""
    return get_type_hints(kind)


def _union(kinds: tuple[Any, ...], value: object, where: str) -> object:
    for kind in kinds:
        try:
            return _decode(kind, value, where)
        except ValueError:
            continue
    raise _unexpected(" or ".join(_name(kind) for kind in kinds), value, where)


def _unexpected(kind: Any, value: object, where: str) -> ValueError:
    return ValueError(f"{where} should be {_name(kind)}, and is {value!r:.60}")


def _name(kind: Any) -> str:
    return kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))


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
        """Numbers of the schedules of a phase, from 1.

        There are several under a plan that keeps the parameters of some calls on the device, and of
        others not.
        """
        numbers = itertools.count(1)
        there = itertools.takewhile(lambda n: schedule_file(self.path, phase, n).exists(), numbers)
        return tuple(there)

    def schedule(self, phase: str, arrangement: int = 1) -> tuple[InstructionRecord, ...]:
        path = schedule_file(self.path, phase, arrangement)
        return _read(tuple[InstructionRecord, ...], path)

    def schedule_text(self, phase: str, arrangement: int = 1) -> str:
        return _text(schedule_text_file(self.path, phase, arrangement))

    def program_text(self, phase: str, arrangement: int = 1) -> str:
        """The region program that the schedule was lowered from."""
        return _text(program_text_file(self.path, phase, arrangement))


@dataclass(frozen=True)
class Run:
    """A run directory, its record, and the graphs that were asked for."""

    path: Path
    record: RunRecord
    graphs: tuple[Graph, ...]

    def timeline(self) -> TimelineRecord:
        """The last step that was written.

        raises  RunUnreadable, if none was
        """
        path = timeline_file(self.path)
        if not path.exists():
            raise RunUnreadable(
                self.path,
                "holds no timeline: the second step of an optimizer is "
                "written when the third begins, so train for three",
            )
        record = _read(TimelineRecord, path)
        _check_format(path, record.format)
        return record


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
    _check_format(path, record.format, f" by zcompile {record.zcompile}")
    graphs = tuple(Graph(found, index) for index, found in graphs_in(path))
    if not graphs:
        raise RunUnreadable(path, "holds no graph yet")
    if graph is not None:
        known = [str(row.index) for row in graphs]
        graphs = tuple(row for row in graphs if row.index == graph)
        if not graphs:
            raise NotInRun(path, "graph", str(graph), known)
    return Run(path, record, graphs)


def _check_format(path: Path, found: int, by: str = "") -> None:
    """raises  RunUnreadable, if a newer version wrote it"""
    if found > FORMAT:
        raise RunUnreadable(
            path,
            f"is written in format {found}{by}, and this version reads up to {FORMAT}: take "
            "the version that wrote it",
        )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RunUnreadable(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RunUnreadable(path, f"is not UTF-8 text: {error}") from error


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is no number")
    return value


def _read(kind: type[R], path: Path) -> R:
    text = _text(path)
    try:
        return decode(kind, json.loads(text, parse_float=_finite, parse_constant=_finite))
    except (ValueError, RecursionError) as error:
        raise RunUnreadable(path, f"is not what a dump writes: {error}") from error
