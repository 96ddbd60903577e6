"""Prints graphs and schedules in the one text form of the dump, the golden tests and the errors.

Also lines up rows of text as columns (`table`).
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import fx

from zcompile.ir.effects import COMPUTE, ENTRY, IN, OUT, Effects, Slot
from zcompile.ir.fusions import fusions_of
from zcompile.ir.graph import phase_of
from zcompile.ir.schedule import Departure, RegionProgram, Schedule
from zcompile.ir.torch_compat import Dispatched
from zcompile.ir.types import ON_DEVICE
from zcompile.ir.units import show_size

_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
_EXCERPT_LINES = 3


def type_of(value: object) -> str:
    """ "f32[4, 32]" for a tensor, "sym" for a size, "" for anything else."""
    if isinstance(value, torch.Tensor):
        dtype = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{', '.join(str(n) for n in value.size())}]"
    return "sym" if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else ""


def target_of(node: fx.Node) -> str:
    """ "aten.mm", "zinf.wait", "getitem"; the overload only where it is not the default."""
    if isinstance(node.target, Dispatched):
        return str(node.target).removesuffix(".default")
    return getattr(node.target, "__name__", str(node.target))


def argument(value: object) -> str:
    """An argument as text; a node is written "%name"."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(argument(v) for v in value) + "]"
    return str(value)


def line(node: fx.Node) -> str:
    """One node as text. A fetch shows its handle alone: the rest stands in its type."""
    if node.op == "output":
        (results,) = node.args
        return f"return {argument(results if isinstance(results, list | tuple) else [results])}"
    kind = type_of(node.meta.get("val"))
    left = f"%{node.name}: {kind}" if kind else f"%{node.name}"
    if node.op != "call_function":
        return f"{left} = {node.op}"
    target = target_of(node)
    args = node.args[:1] if target in ("zinf.gather", "zinf.fetch") else node.args
    inside = [argument(a) for a in args]
    inside += [f"{k}={argument(v)}" for k, v in node.kwargs.items()]
    call = f"{target}({', '.join(inside)})"
    return call if node.meta.get("val") is None else f"{left} = {call}"


def text(graph: fx.Graph, live: Sequence[int] | None = None) -> str:
    """The graph by phase, one node a line. What Inductor compiles in one piece is bracketed:

        / %add: f32[4, 32] = aten.add.Tensor(%x, %y)
        | %native_layer_norm = aten.native_layer_norm(%add, ...)
        \\ %getitem: f32[4, 32] = getitem(%native_layer_norm, 0)

    live  bytes live while each node runs, for a column at the right; None: no column
    """
    rows: list[str] = []
    phase = None
    brackets: dict[fx.Node, str] = {}
    for members in fusions_of(graph.nodes).values():
        brackets |= dict.fromkeys(members, "|") | {members[0]: "/", members[-1]: "\\"}
    for index, node in enumerate(graph.nodes):
        if node.op == "placeholder":
            continue
        if node.op != "output" and phase_of(node) is not phase:
            phase = phase_of(node)
            rows.append(f"{phase.value}:")
        size = "" if live is None else show_size(live[index])
        rows.append(f"{brackets.get(node, ' ')} {line(node):<86} {size}".rstrip())
    return "\n".join(rows) + "\n"


def excerpt(graph: fx.Graph, culprit: fx.Node) -> str:
    """The lines around a node, which is marked."""
    nodes = list(graph.nodes)
    at = nodes.index(culprit)
    start, end = max(0, at - _EXCERPT_LINES), at + _EXCERPT_LINES + 1
    return "\n".join(
        f"  {'>' if node is culprit else ' '} {line(node)}" for node in nodes[start:end]
    )


_LINKS = {
    (IN, "host"): "h2d",
    (IN, "disk"): "disk_read",
    (OUT, "host"): "d2h",
    (OUT, "disk"): "disk_write",
}


def stream_of(x: Effects, homes: Sequence[str] = ()) -> str:
    """Where an instruction acts: "compute", or the link to or from the tier where its bytes rest.

    "device", if they rest there; "in" or "out", if it is not known where they rest.

    homes  tier of each entry of the call; none, if they are not known
    """
    home = x.home
    if x.is_collective:
        return x.lane.value
    if home is None or not x.is_transfer or x.stays:
        return COMPUTE.value
    tier = homes[home.entry] if homes and home.role is ENTRY else home.tier
    return "device" if tier in ON_DEVICE else _LINKS.get((x.lane, tier), x.lane.value)


def instruction_row(x: Effects, homes: Sequence[str] = ()) -> tuple[str, str, str, int]:
    """Stream, kind, name and bytes of an instruction; `homes` as `stream_of` has them."""
    return stream_of(x, homes), "stay" if x.stays else x.kind, x.name, x.nbytes


def slot_of(x: Effects) -> Slot | None:
    """The slot that an instruction is about."""
    return x.takes or x.views or x.reads_slot or x.writes_slot or x.gives_back


def schedule_text(schedule: Schedule, homes: Sequence[str] = ()) -> str:
    """The schedule, one instruction a line: stream, kind, name, bytes, address, tickets.

    t1   it gives out ticket 1
    <t1  it waits for ticket 1

    homes  tier of each entry of the call; none, if they are not known
    """
    rows = [
        f"{schedule.phase.value} of {schedule.name}: {len(schedule.instructions)} instructions, "
        f"peak {show_size(schedule.peak_bytes)} in an arena of {show_size(schedule.arena_bytes)}"
    ]
    for index, x in enumerate(schedule.effects):
        stream, kind, name, nbytes = instruction_row(x, homes)
        slot = slot_of(x)
        where = "" if slot is None else f"@{slot.address}"
        given = [] if x.ticket is None else [f"t{x.ticket}"]
        tickets = " ".join([*given, *(f"<t{t}" for t in x.after)])
        row = f"{index:>5}  {stream:<11}{kind:<8}{name:<40.60} {nbytes or '':>12} {where:>12}"
        rows.append(f"{row}  {tickets}".rstrip())
    return "\n".join(rows) + "\n"


def program_text(program: RegionProgram) -> str:
    """The region program: for each region what starts before it, what it reads, and what leaves
    after it."""
    outline = program.outline
    fetched, budget = sum(not v.in_parts for v in program.fetched), program.budget_bytes
    within = "" if budget is None else f" within {show_size(budget)}"
    rows = [
        f"{outline.phase.value} of {outline.name}: {len(program.regions)} regions read "
        f"{len(program.values)} values, {fetched} of them fetched{within}"
    ]
    starting, reading = defaultdict(list), defaultdict(list)
    for value in program.values:
        until = f" until region {value.last}" if value.last > value.first else ""
        if value.in_place:
            reading[value.read_whole].append(f"  reads    {value.name} in place{until}")
            continue
        reading[value.read_whole].append(f"  reads    {value.name}{until}")
        if value.in_parts:
            continue
        slot = value.slot
        where = "" if slot is None else f" into [{slot.address}, {slot.end})"
        ahead = value.first - value.start
        lead = f", {ahead} ahead" if ahead else ""
        starting[value.start].append(f"  fetches  {value.name}{where}{lead}")
    rows += map(_departure_row, program.departures[0])
    for n, run in enumerate(program.regions):
        rows += [f"region {n}: {run.region.text}", *starting[n], *reading[n]]
        rows += map(_departure_row, program.departures[n + 1])
    return "\n".join(rows) + "\n"


def _departure_row(x: Departure) -> str:
    _, kind, name, _ = instruction_row(x.effects)
    return f"  {kind:<7}  {name}"
