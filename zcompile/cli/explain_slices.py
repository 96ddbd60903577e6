"""Which regions run over slices of tokens, and what is large and does not: the part of `zinf
explain` that is about them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zcompile.ir.plan import SlicedRegion
from zcompile.ir.serialize import Graph
from zcompile.ir.units import show_size

SLICES = "slices"
"""Asks for every region that runs over slices of tokens, and for what does not."""
PASS = "tile-tokens"


@dataclass(frozen=True)
class GraphSlices:
    """notes  of the pass that decides: what is large and runs over all tokens at once, and why"""

    graph: int
    regions: tuple[SlicedRegion, ...]
    notes: tuple[str, ...]


def slices_of(graph: Graph, asked: str) -> Iterator[GraphSlices]:
    """Of the graph, if slices are asked for; or the region of that name, if it has one."""
    regions = graph.plan().sliced
    if asked == SLICES:
        told = {region.told() for region in regions}
        notes = (note for row in graph.passes() if row.name == PASS for note in row.notes)
        yield GraphSlices(graph.index, regions, tuple(note for note in notes if note not in told))
    elif named := tuple(region for region in regions if region.name == asked):
        yield GraphSlices(graph.index, named, ())


def slices_text(found: Sequence[GraphSlices]) -> str:
    """A line for each region and each note; one line, if there are none."""
    lines = ["regions that run over slices of tokens, and what they hold at once"]
    if not any(row.regions for row in found):
        lines = ["nothing runs over slices of tokens"]
    for row in found:
        lines += (f"  graph{row.graph}  {_region_text(region)}" for region in row.regions)
    lines += (f"  graph{row.graph}  note: {note}" for row in found for note in row.notes)
    return "\n".join(lines) + "\n"


def _region_text(region: SlicedRegion) -> str:
    inside, one = show_size(region.inside_bytes), show_size(region.sliced_bytes)
    cut = f"{region.slices} slices of {region.tokens} tokens"
    return (
        f"{region.name:<40} {cut:<28} {inside:>10} inside become {one}, "
        f"beside {show_size(region.whole_bytes)} whole"
    )
