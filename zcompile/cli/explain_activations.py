"""What became of values that backward needs: the part of `zinf explain` that is about them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zcompile.run_format import ActivationRecord
from zcompile.runs import Graph
from zcompile.units import show_size

ALL = "activations"
"""Asks for every value that backward needs."""
_SAID = {"keep": "kept", "again": "made again in backward", "host": "moved to the host",
         "disk": "moved to disk"}  # fmt: skip


@dataclass(frozen=True)
class Fate:
    graph: int
    activation: ActivationRecord


def fates_of(graph: Graph, asked: str) -> Iterator[Fate]:
    """Those of the value asked for, by its node or its name; or of all."""
    for row in graph.plan().activations:
        if asked in (ALL, row.node, row.name):
            yield Fate(graph.index, row)


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
