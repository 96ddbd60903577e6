"""Passes that slice a graph as they are told, whatever room there is."""

from dataclasses import dataclass, replace

from torch import fx

from zcompile.config import Config
from zcompile.ir.plan import BatchSlices, GraphPlan
from zcompile.passes.choose_tiles import ChooseTiles
from zcompile.passes.pipeline import pipeline
from zcompile.passes.slice_batch import SliceBatch
from zcompile.passes.slice_batch.stages import batch_graph
from zcompile.passes.tile_tokens import TileTokens
from zcompile.passes.tile_tokens.regions import regions_of

PASSES = pipeline(Config(device="cpu"))
UNCUT = tuple(replace(p, slices=False) if isinstance(p, ChooseTiles) else p for p in PASSES)
"""All passes; nothing is sliced by them."""


@dataclass(frozen=True)
class BatchInSlices(SliceBatch):
    """Runs the batch in so many slices, with as many stages as the level has."""

    slices: int = 2
    level: int = 0
    needs = ChooseTiles.needs

    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        found = batch_graph(graph)
        assert found is not None
        levels = [(), *found.levels()]
        cuts = levels[min(self.level, len(levels) - 1)]
        plan = super().rewrite(graph, replace(plan, batch=BatchSlices(self.slices, cuts)))
        return replace(plan, batch=None)


@dataclass(frozen=True)
class TokensInSlices(TileTokens):
    """Cuts the tokens of every region that can be cut so."""

    slices: int = 1
    needs = ChooseTiles.needs

    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        regions = [r for r in regions_of(graph) if self.slices in r.demand.counts]
        slices = {region.first: self.slices for region in regions}
        return super().rewrite(graph, replace(plan, slices=slices))
