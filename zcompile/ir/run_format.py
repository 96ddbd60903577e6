"""The run format: what a dump's files are called and what stands in them.

    DIR/run-<n>/run.json                         RunRecord
    DIR/run-<n>/timeline.json                    TimelineRecord, of the last step that was written
    DIR/run-<n>/graph<k>/passes.json             list of PassRecord, in the order they ran
    DIR/run-<n>/graph<k>/<NN>-<pass>.txt         the graph after that pass, as text
    DIR/run-<n>/graph<k>/<NN>-<pass>.json        the same as a list of NodeRecord
    DIR/run-<n>/graph<k>/plan.json               PlanRecord
    DIR/run-<n>/graph<k>/schedule-<phase>.json   list of InstructionRecord
    DIR/run-<n>/graph<k>/schedule-<phase>.txt    the same as text

A schedule is the one that the last call walked. Calls whose parameters rest on different tiers
walk different arrangements of one phase: the second stands in schedule-<phase>-2, and so on.

Step 0, `captured`, is the graph before the first pass. The records are the format: a writer fills
them and calls `records.encode`, so that a key is spelled once. Sizes and addresses are bytes; names
of nodes and parameters are for people. A reader ignores keys it does not know.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zcompile.ir.curve import Memory
from zcompile.ir.sliced_region import SlicedRegion
from zcompile.ir.units import show_size

CAPTURED = "captured"
PHASES = ("forward", "backward", "inference", "step")

_RUN = re.compile(r"run-(\d+)\Z")
_GRAPH = re.compile(r"graph(\d+)\Z")


@dataclass(frozen=True)
class RunRecord:
    """run.json. `graphs`: a name per graph, the k-th is that of graph<k>."""

    zcompile: str
    torch: str
    config: Mapping[str, object]
    graphs: tuple[str, ...]


@dataclass(frozen=True)
class PassRecord:
    """What one pass did. `did`: op -> how many more of it there are; peaks as predicted, bytes."""

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
    nbytes      what the value itself takes; 0 for a view
    live_bytes  what is alive on the device while this line runs
    module      dotted name of the module it was traced in
    param       dotted name of the parameter that this handle, gather, wait, release or reduction
                is about
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
    """A parameter as the plan knows it. `handle`: its placeholder; `home`: where it rests."""

    handle: str
    name: str
    shape: tuple[int | str, ...]
    dtype: str
    nbytes: int
    home: str


@dataclass(frozen=True)
class SlotRecord:
    """Where a gathered value lies, and from which to which line of its phase."""

    node: str
    param: str | None
    phase: str
    address: int
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class ActivationRecord:
    """What becomes of a value of forward that backward needs. `action`: "keep", "again", or the
    tier that it waits on; `seconds` that this was expected to cost by itself: of compute that is
    done again, or of the links."""

    node: str
    name: str
    nbytes: int
    action: str
    seconds: float
    why: str


@dataclass(frozen=True)
class ActivationCostRecord:
    """What becomes of all those values together, in seconds of a step: of compute that is done
    again, of transfers beyond what compute hides, and the least that any choice could take."""

    again_s: float
    exposed_s: float
    least_s: float | None


@dataclass(frozen=True)
class PlanRecord:
    """plan.json: what was decided for one graph. `memory`: what its values hold of the device, node
    by node, if all that backward needs were kept and as it was chosen; None without a budget."""

    name: str
    budget_bytes: int | None
    params: tuple[ParamRecord, ...]
    slots: tuple[SlotRecord, ...]
    regions: int
    distinct_regions: int
    notes: tuple[str, ...] = ()
    activations: tuple[ActivationRecord, ...] = ()
    activation_cost: ActivationCostRecord | None = None
    memory: Memory | None = None
    sliced: tuple[SlicedRegion, ...] = ()


@dataclass(frozen=True)
class InstructionRecord:
    """One instruction. `after`: tickets it waits for; `inputs`, `outputs`: registers."""

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
    """A step as it was, or as it was predicted. Seconds; bytes and busy seconds by link.

    step_s  from the end of one step to the end of the next
    phases  what lies between two calls counts to the later one
    """

    step_s: float
    compute_s: float
    stall_s: float
    phases: Mapping[str, float]
    nbytes: Mapping[str, int]
    busy_s: Mapping[str, float]


@dataclass(frozen=True)
class MomentRecord:
    """One instruction: where it stands, what it is, when it was and when it was predicted to be.

    call  which of the step's calls; index  which of its instructions
    Seconds from the beginning of the step. `stall_s`: of those, or right before, compute waited.
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


@dataclass(frozen=True)
class TimelineRecord:
    """timeline.json. `step` counts from 1; `predicted` is None where no machine was known."""

    step: int
    measured: StepRecord
    predicted: StepRecord | None
    moments: tuple[MomentRecord, ...]


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
    """Of one phase; arrangements count from 1."""
    return graph / f"{_schedule_name(phase, arrangement)}.json"


def schedule_text_file(graph: Path, phase: str, arrangement: int = 1) -> Path:
    return graph / f"{_schedule_name(phase, arrangement)}.txt"


def remove_schedules(graph: Path, phase: str) -> None:
    """Remove what stands there of one phase: every arrangement."""
    arrangement = 1
    while schedule_file(graph, phase, arrangement).exists():
        schedule_file(graph, phase, arrangement).unlink()
        schedule_text_file(graph, phase, arrangement).unlink(missing_ok=True)
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
