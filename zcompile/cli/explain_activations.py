"""What became of values that backward needs, and what a graph holds with them: the part of `zinf
explain` that is about them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zcompile.cli.curves import curve_lines
from zcompile.ir.plan import Memory
from zcompile.ir.serialize import ActivationCostRecord, ActivationRecord, Graph
from zcompile.ir.units import show_seconds, show_size

ALL = "activations"
"""Asks for every value that backward needs, and for what is held with them."""
MEMORY = "memory"
"""Asks for that alone."""
_SAID = {"keep": "kept", "again": "made again in backward", "host": "moved to the host",
         "disk": "moved to disk"}  # fmt: skip


@dataclass(frozen=True)
class Fate:
    graph: int
    activation: ActivationRecord


@dataclass(frozen=True)
class GraphMemory:
    """What a graph's values hold of the device, and what it costs that not all are kept."""

    graph: int
    memory: Memory
    cost: ActivationCostRecord | None


def fates_of(graph: Graph, asked: str) -> Iterator[Fate]:
    """Those of the value asked for, by its node or its name; or of all."""
    for row in graph.plan().activations:
        if asked in (ALL, row.node, row.name):
            yield Fate(graph.index, row)


def memories_of(graph: Graph, asked: str) -> Iterator[GraphMemory]:
    """Of a graph whose device is bounded, if all values are asked for, or just this."""
    plan = graph.plan()
    if asked in (ALL, MEMORY) and plan.memory is not None:
        yield GraphMemory(graph.index, plan.memory, plan.activation_cost)


def memory_text(found: GraphMemory) -> str:
    """What the choice costs, and the curve before and after it."""
    lines = [f"graph{found.graph}: what its values hold of the device, node by node"]
    cost = found.cost
    if cost is not None:
        least = "" if cost.least_s is None else (
            f"; nothing that fits costs less than {show_seconds(cost.least_s)}")  # fmt: skip
        again, exposed = show_seconds(cost.again_s), show_seconds(cost.exposed_s)
        lines.append(
            f"  expected to cost {show_seconds(cost.again_s + cost.exposed_s)} a step: {again} of "
            f"compute done again, {exposed} of transfers beyond what compute hides{least}"
        )
    return "\n".join([*lines, *curve_lines(found.memory)]) + "\n"


def fate_text(fates: Sequence[Fate]) -> str:
    """A line each, and what they come to."""
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
