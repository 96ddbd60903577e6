"""Runs blocks over slices of tokens where the device cannot hold their hidden values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from zcompile.errors import quoted
from zcompile.ir.graph import aliases_of, module_of, phase_of
from zcompile.ir.memory_curve import SlicedRegion
from zcompile.ir.plan import GraphPlan, Note, Rounding
from zcompile.ir.saved_values import SavedValues, is_value, storage_bytes
from zcompile.ir.torch_compat import Dispatched, is_random
from zcompile.ir.types import Phase
from zcompile.ir.units import show_size
from zcompile.passes.base import Fact, Pass
from zcompile.passes.tile_tokens.regions import Region, regions_of, tokens_of
from zcompile.passes.tile_tokens.rewrite import rewrite_region
from zcompile.passes.tile_tokens.rules import PRODUCTS, Tokens


def why_not_sliced(graph: fx.Graph, regions: Sequence[Region], least: int) -> list[str]:
    """For each module with a large value outside of all regions, why it is not sliced: sentences
    for people.

    Only modules that could be sliced if tokens had a fixed number, or nothing drew random numbers.

    least  bytes from which on a value is large
    """
    values, numbers = SavedValues(graph), tokens_of(graph)
    inside = {node for region in regions for node in region.inside}
    found: dict[str, str] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not is_value(node) or values.root(node) is not node:
            continue
        nbytes = storage_bytes(node)
        if nbytes <= least or node in inside or phase_of(node) is not Phase.FORWARD:
            continue
        name = module_of(node) or f"%{node.name}"
        if name not in found and (why := _reason(values, numbers, node)):
            found[name] = (
                f"{show_size(nbytes)} of {quoted(name)} are not cut into slices of tokens: {why}"
            )
    return list(found.values())


def _reason(values: SavedValues, numbers: Sequence[Tokens], node: fx.Node) -> str:
    if node.target in PRODUCTS and not isinstance(node.meta["val"].shape[0], int):
        return "how many there are is known at run time only"
    if not any(tokens.lead(node) for tokens in numbers):
        return ""
    users = (user for alias in aliases_of(node) for user in alias.users)
    for near in (values.maker(node), *users):
        if isinstance(near.target, Dispatched) and is_random(near):
            return f"%{near.name} draws random numbers, which is not repeated"
    return ""


@dataclass(frozen=True)
class TileTokens(Pass):
    """Cut the tokens of a region that treats each by itself.

        %a = aten.mm(%x, %up)                 for each slice of tokens:
        %r = aten.relu(%a)             ->         %a = aten.mm(%x[i:j], %up);  %r = aten.relu(%a)
        %y = aten.mm(%r, %down)                   %y[i:j] = aten.mm(%r, %down)
        ...                                   for each slice again (backward):
        %dr = aten.mm(%dy, %down.T)               %a, %r as in forward;  %dr = .., %da = ..
        %da = relu_backward(%dr, %r)              %dx[i:j] = aten.mm(%da, %up.T)
        %dx = aten.mm(%da, %up.T)                 %dup += aten.mm(%x[i:j].T, %da)
        %dup = aten.mm(%x.T, %da)

    The results are put together once, at the end. Gradients of weights add up over the slices,
    which rounds otherwise; products of fewer rows may, if the library takes another kernel.

    Which regions, and into how many slices, stands in `GraphPlan.slices`.
    """

    name: ClassVar[str] = "tile-tokens"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.TILES_CHOSEN})
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.TOKENS_TILED})

    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        if not plan.slices:
            return plan
        chosen = [r for r in regions_of(graph) if r.first in plan.slices]
        slices = [plan.slices[r.first] for r in chosen]
        sliced = write_slices(graph, chosen, slices)
        notes = [Note(self.name, None, region.describe()) for region in sliced]
        return _with_slices(replace(plan, notes=(*plan.notes, *notes)), sliced)


def _with_slices(plan: GraphPlan, sliced: tuple[SlicedRegion, ...]) -> GraphPlan:
    why = "gradients of its weights are added up slice after slice, and products have fewer rows"
    rounded = [Rounding(TileTokens.name, region.name, why) for region in sliced]
    return replace(plan, sliced=sliced, roundings=(*plan.roundings, *rounded))


def write_slices(
    graph: fx.Graph, regions: Sequence[Region], slices: Sequence[int]
) -> tuple[SlicedRegion, ...]:
    """Write the slices into the graph; returns the regions that are sliced now."""
    return tuple(
        _record(region, count)
        for region, count in zip(regions, slices, strict=True)
        if count > 1 and rewrite_region(graph, region, count)
    )


def _record(region: Region, slices: int) -> SlicedRegion:
    need = region.demand
    inside = need.held(slices) - need.whole
    return SlicedRegion(region.name, slices, region.tokens.count, need.whole, need.sliced, inside)
