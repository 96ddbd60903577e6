"""Explains a run, read off the last graph, the plan and the schedules: `zinf explain`.

    TENSOR        the life of one parameter, or what became of a value that backward needs
    activations   what became of all those values, with the memory that graphs take
    memory        that memory alone
    slices        the regions that run over slices of tokens or of the batch, and large values that
                  do not

Readers of a parameter are found by following its gathered value: a node that reads it and takes no
bytes of its own is a view of it, and is followed too; any other node is a reader.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zcompile.cli.format import Answer, curve_lines
from zcompile.errors import NotInRun
from zcompile.ir.memory_curve import Activation, ActivationCost, Memory, SlicedRegion
from zcompile.ir.serialize import (
    Graph,
    InstructionRecord,
    NodeRecord,
    ParamRecord,
    PassRecord,
    open_run,
)
from zcompile.ir.units import show_seconds, show_size

SLICES = "slices"
"""Asks for all regions that run over slices, and for large values that do not."""
PASS = "choose-tiles"


@dataclass(frozen=True)
class GraphSlices:
    """The sliced regions of a graph.

    notes  sentences on large values that are computed for all tokens at once
    """

    graph: int
    regions: tuple[SlicedRegion, ...]
    notes: tuple[str, ...]


def slices_of(graph: Graph, asked: str) -> Iterator[GraphSlices]:
    """The sliced regions of the graph, if slices are asked for; or the region of that name."""
    regions = graph.plan().sliced
    if asked == SLICES:
        told = {region.describe() for region in regions}
        notes = (note for row in graph.passes() if row.name == PASS for note in row.notes)
        yield GraphSlices(graph.index, regions, tuple(note for note in notes if note not in told))
    elif named := tuple(region for region in regions if region.name == asked):
        yield GraphSlices(graph.index, named, ())


def slices_text(found: Sequence[GraphSlices]) -> str:
    """A line for each region and each note; one line, if there are none."""
    units = dict.fromkeys(region.unit for row in found for region in row.regions)
    lines = [f"regions that run over slices of {' and '.join(units)}, and what they hold at once"]
    if not any(row.regions for row in found):
        lines = ["nothing runs over slices of tokens, or of the batch"]
    for row in found:
        lines += (f"  graph{row.graph}  {_region_text(region)}" for region in row.regions)
    lines += (f"  graph{row.graph}  note: {note}" for row in found for note in row.notes)
    return "\n".join(lines) + "\n"


def _region_text(region: SlicedRegion) -> str:
    inside, one = show_size(region.inside_bytes), show_size(region.sliced_bytes)
    cut = f"{region.slices} slices of {region.tokens} {region.unit}"
    return (
        f"{region.name:<40} {cut:<28} {inside:>10} inside become {one}, "
        f"beside {show_size(region.whole_bytes)} whole"
    )


ALL = "activations"
"""Asks for all values that backward needs, and for the memory of graphs."""
MEMORY = "memory"
"""Asks for the memory of graphs alone."""
_SAID = {
    "keep": "kept",
    "again": "made again in backward",
    "host": "moved to the host",
    "disk": "moved to disk",
}


@dataclass(frozen=True)
class Fate:
    """What became of a value that backward needs."""

    graph: int
    activation: Activation


@dataclass(frozen=True)
class GraphMemory:
    """Live bytes of a graph, and the cost of not saving everything."""

    graph: int
    memory: Memory
    cost: ActivationCost | None


def fates_of(graph: Graph, asked: str) -> Iterator[Fate]:
    """The value asked for, by its node or its name; or all of them."""
    for row in graph.plan().activations:
        if asked in (ALL, row.node, row.name):
            yield Fate(graph.index, row)


def memories_of(graph: Graph, asked: str) -> Iterator[GraphMemory]:
    """Memory of a graph whose device is bounded, if all values are asked for, or just this."""
    plan = graph.plan()
    if asked in (ALL, MEMORY) and plan.memory is not None:
        yield GraphMemory(graph.index, plan.memory, plan.activation_cost)


def memory_text(found: GraphMemory) -> str:
    """The cost of the choice, and the memory curve before and after it."""
    lines = [f"graph{found.graph}: what its values hold of the device, node by node"]
    cost = found.cost
    if cost is not None:
        least = (
            ""
            if cost.least_s is None
            else (f"; nothing that fits costs less than {show_seconds(cost.least_s)}")
        )
        again, exposed = show_seconds(cost.again_s), show_seconds(cost.exposed_s)
        lines.append(
            f"  expected to cost {show_seconds(cost.again_s + cost.exposed_s)} a step: {again} of "
            f"compute done again, {exposed} of transfers beyond what compute hides{least}"
        )
    return "\n".join([*lines, *curve_lines(found.memory)]) + "\n"


def fate_text(fates: Sequence[Fate]) -> str:
    """One line for each value, and a sum."""
    lines = ["what backward needs of forward"]
    for fate in fates:
        row = fate.activation
        lines.append(
            f"  graph{fate.graph}  {row.name:<40} {show_size(row.nbytes):>10}  "
            f"{_SAID.get(row.action, row.action):<22} {row.seconds * 1e3:9.3f} ms  {row.why}"
        )
    for action, said in _SAID.items():
        rows = [fate.activation for fate in fates if fate.activation.action == action]
        if rows and len(fates) > 1:
            size = show_size(sum(row.nbytes for row in rows))
            seconds = sum(row.seconds for row in rows)
            lines.append(f"  {len(rows)} {said}: {size}, {seconds * 1e3:.3f} ms")
    return "\n".join(lines) + "\n"


_READ = re.compile(r"%([A-Za-z_]\w*)")
_GRAD = "zinf.reduce_grad"
_OURS = {
    "zinf.gather": "gathered",
    "zinf.fetch": "fetch starts",
    "zinf.wait": "waited for",
    "zinf.release": "released",
    _GRAD: "gradient goes home",
    "zinf.reduce_tile": "a tile of the gradient goes home",
    "zinf.offload": "leaves the device",
    "zinf.left": "has left",
}
IN_DTYPE = " in "
"""Between the name of a parameter and the dtype of a copy of it."""
_VALUES = ("zinf.gather", "zinf.fetch", "zinf.wait")


@dataclass(frozen=True)
class Event:
    """One line that is about the parameter. line: counts from 0 within its phase."""

    line: int
    node: str
    target: str
    what: str
    module: str | None
    live_bytes: int


@dataclass(frozen=True)
class PhaseLife:
    """The events of one phase.

    instructions  about the parameter, of the schedules that calls walk
    ahead         regions that each of its fetches starts before the first that reads it
    """

    phase: str
    events: tuple[Event, ...]
    instructions: tuple[InstructionRecord, ...]
    ahead: tuple[int, ...]


@dataclass(frozen=True)
class Effect:
    """What one pass did to the parameter: op -> how many more or fewer."""

    step: int
    name: str
    did: dict[str, int]


@dataclass(frozen=True)
class Life:
    """The life of a parameter."""

    graph: int
    param: ParamRecord
    phases: tuple[PhaseLife, ...]
    passes: tuple[Effect, ...]


def explain(path: Path, graph: int | None, tensor: str) -> Answer:
    """The tier of `tensor`, its readers, when it comes and goes, and what each pass did to it.

    raises  RunUnreadable, NotInRun with the nearest names
    """
    run = open_run(path, graph)
    lives, known = [], dict[str, None]()
    fates: list[Fate] = []
    memories: list[GraphMemory] = []
    slices: list[GraphSlices] = []
    for each in run.graphs:
        params = each.plan().params
        fates += fates_of(each, tensor)
        memories += memories_of(each, tensor)
        slices += slices_of(each, tensor)
        known.update(dict.fromkeys(param.name for param in params))
        named = (param for param in params if param.name == tensor)
        lives += [_life(each, param) for param in named][:1]
    if not lives and not fates and not memories and not slices:
        raise NotInRun(run.path, "parameter", tensor, known)
    text = [
        *([fate_text(fates)] if fates else []),
        *(memory_text(row) for row in memories),
        *([slices_text(slices)] if slices else []),
        *(_text(life) for life in lives),
    ]
    return Answer("\n".join(text), [*fates, *memories, *slices, *lives])


def _life(graph: Graph, param: ParamRecord) -> Life:
    stages = [(row, graph.nodes(row)) for row in graph.passes()]
    last = stages[-1][1] if stages else ()
    phases = dict.fromkeys([*(node.phase for node in last), *graph.phases()])
    lives = (_phase_life(graph, param, phase, last) for phase in phases)
    told = (life for life in lives if life.events or life.instructions)
    return Life(graph.index, param, tuple(told), tuple(_effects(param.name, stages)))


def _phase_life(
    graph: Graph, param: ParamRecord, phase: str, nodes: Sequence[NodeRecord]
) -> PhaseLife:
    mine = [node for node in nodes if node.phase == phase]
    schedules = [graph.schedule(phase, number) for number in graph.arrangements(phase)]
    return PhaseLife(
        phase=phase,
        events=tuple(_events(param.name, mine)),
        instructions=tuple(r for rows in schedules for r in rows if _is_of(r, param.name)),
        ahead=tuple(lead for rows in schedules for lead in _leads(param.name, rows)),
    )


def _is_of(row: InstructionRecord, name: str) -> bool:
    """Whether an instruction is about a parameter, or about a low-precision copy of it."""
    return row.name == name or row.name.startswith(f"{name}{IN_DTYPE}")


def _leads(name: str, rows: Sequence[InstructionRecord]) -> Iterator[int]:
    """For each fetch of the parameter, the regions that compute between it and its wait."""
    fetched: dict[int, int] = {}
    runs = 0
    for row in rows:
        if row.kind == "run":
            runs += 1
        elif _is_of(row, name) and row.kind == "fetch" and row.ticket is not None:
            fetched[row.ticket] = runs
        elif _is_of(row, name) and row.kind == "wait":
            yield from (runs - fetched[ticket] for ticket in row.after)


def _events(name: str, nodes: Sequence[NodeRecord]) -> Iterator[Event]:
    values: set[str] = set()
    for line, node in enumerate(nodes):
        reads = values & {read for arg in node.args for read in _READ.findall(arg)}
        if node.param == name and node.op == "placeholder":
            what = "its handle"
        elif node.param == name and node.target in _OURS:
            what = _OURS[node.target]
        elif reads and node.op == "output":
            what = "leaves the graph"
        elif reads:
            what = "a view of it" if node.nbytes == 0 else "reads it"
        else:
            continue
        if what == "a view of it" or node.target in _VALUES:
            values.add(node.name)
        target = node.op if node.op in ("placeholder", "output") else node.target
        yield Event(line, node.name, target, what, node.module, node.live_bytes)


def _effects(
    name: str, stages: Sequence[tuple[PassRecord, Sequence[NodeRecord]]]
) -> Iterator[Effect]:
    for (_, before), (row, after) in itertools.pairwise(stages):
        counts = Counter(node.target for node in after if node.param == name)
        counts.subtract(Counter(node.target for node in before if node.param == name))
        did = {target: count for target, count in sorted(counts.items()) if count}
        yield Effect(row.step, row.name, did)


def _text(life: Life) -> str:
    param = life.param
    shape = ", ".join(str(size) for size in param.shape)
    lines = [
        f"{param.name}: {param.dtype}[{shape}], {show_size(param.nbytes)}, rests on {param.home}",
        f"graph{life.graph}, where its handle is %{param.handle}",
    ]
    for phase in life.phases:
        lines += ["", f"  {phase.phase}", *_phase_lines(phase)]
    lines += ["", "  passes"]
    lines += (f"    {row.step:02d} {row.name:<18} {_effect_text(row)}" for row in life.passes)
    return "\n".join(lines) + "\n"


def _phase_lines(phase: PhaseLife) -> Iterator[str]:
    for event in phase.events:
        where = f"  in {event.module}" if event.module else ""
        yield (
            f"    {event.line:5d}  {event.what:<18} {event.target:<20} %{event.node:<24} "
            f"{show_size(event.live_bytes):>9} live{where}"
        )
    if phase.instructions:
        steps = ", ".join(map(_instruction_text, phase.instructions))
        yield f"           in the schedule that calls walk: {steps}"
    if phase.ahead:
        leads = ", ".join(map(str, phase.ahead))
        yield f"           fetched so many regions before the first that reads it: {leads}"


def _instruction_text(row: InstructionRecord) -> str:
    said = f"{row.index} {row.kind}"
    if IN_DTYPE in row.name:
        said += f" (its copy{row.name[row.name.rindex(IN_DTYPE) :]})"
    if row.kind != "fetch" or row.address is None:
        return said
    return f"{said} into [{row.address}, {row.address + row.nbytes}) of the arena"


def _effect_text(row: Effect) -> str:
    return ", ".join(f"{target} {count:+d}" for target, count in row.did.items()) or "nothing"
