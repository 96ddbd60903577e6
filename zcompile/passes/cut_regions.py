"""Cuts compute between zinf ops into regions."""

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import aliases_of, find, is_compute, phase_of, region_of, set_region
from zcompile.ir.plan import GraphPlan
from zcompile.passes.base import Fact, Pass


@dataclass(frozen=True)
class CutRegions(Pass):
    """Give each run of compute nodes between two zinf ops a number.

        %f = zinf.wait(%p)                        %f = zinf.wait(%p)
        %t = aten.t(%f)                           %t = aten.t(%f)            region 0
        %y = aten.mm(%x, %t)              ->      %y = aten.mm(%x, %t)       region 0
        zinf.release(%f)                          zinf.release(%f)
        %z = aten.relu(%y)                        %z = aten.relu(%y)         region 1

    Regions of equal structure are compiled once; that is decided when the graph is lowered, from
    what the nodes are. No node moves, but a view of a gathered parameter that several regions read
    is made in each, so that a schedule names the bytes that a region reads.
    """

    name: ClassVar[str] = "cut-regions"
    needs: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.PARAMS_RELEASED, Fact.GRADS_REDUCED, Fact.FUSIONS_FOUND}
    )
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS_CUT})

    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        heads: dict[int, fx.Node] = {}
        region, open_phase = -1, None
        for node in graph.nodes:
            if not is_compute(node):
                open_phase = open_phase if node.op in ("placeholder", "get_attr") else None
                continue
            if phase_of(node) is not open_phase:
                region, open_phase = region + 1, phase_of(node)
                heads[region] = node
            set_region(node, region)
        for wait in find(graph, ops.wait):
            _view_again(graph, wait, heads)
        return plan


def _view_again(graph: fx.Graph, wait: fx.Node, heads: dict[int, fx.Node]) -> None:
    """Give each region that reads a view of `wait` that view of its own, at its head."""
    views = [alias for alias in aliases_of(wait) if alias is not wait]
    made: dict[tuple[fx.Node, int], fx.Node] = {}
    made_of: dict[fx.Node, fx.Node] = {}

    def again(view: fx.Node, region: int) -> fx.Node:
        view = made_of.get(view, view)  # a view may read one that was made for its region already
        if view not in views or region_of(view) == region:
            return view
        if (view, region) not in made:
            sources = {n: again(n, region) for n in view.all_input_nodes}
            with graph.inserting_before(heads[region]):
                made[view, region] = graph.node_copy(view, sources.__getitem__)
            set_region(made[view, region], region)
            made_of[made[view, region]] = view
        return made[view, region]

    for view in views:
        for reader in list(view.users):
            region = region_of(reader)
            if region is not None and region != region_of(view):
                reader.replace_input_with(view, again(view, region))
