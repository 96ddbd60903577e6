"""Compute between our ops, cut into regions."""

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zcompile.graph import is_compute, phase_of, set_region
from zcompile.passes.base import Fact, Pass
from zcompile.plan import Plan


@dataclass(frozen=True)
class CutRegions(Pass):
    """Give each run of compute nodes between two zinf ops a number.

        %f = zinf.wait(%p)                        %f = zinf.wait(%p)
        %t = aten.t(%f)                           %t = aten.t(%f)            region 0
        %y = aten.mm(%x, %t)              ->      %y = aten.mm(%x, %t)       region 0
        zinf.release(%f)                          zinf.release(%f)
        %z = aten.relu(%y)                        %z = aten.relu(%y)         region 1

    Regions of equal structure are compiled once; that is decided when the graph is lowered, from
    what the nodes are. No node moves.
    """

    name: ClassVar[str] = "cut-regions"
    needs: ClassVar[frozenset[Fact]] = frozenset(
        {Fact.PARAMS_RELEASED, Fact.GRADS_REDUCED, Fact.PHASES_ASSIGNED}
    )
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS_CUT})

    def rewrite(self, graph: fx.Graph, plan: Plan) -> Plan:
        region, open_phase = -1, None
        for node in graph.nodes:
            if not is_compute(node):
                open_phase = open_phase if node.op in ("placeholder", "get_attr") else None
                continue
            if phase_of(node) is not open_phase:
                region, open_phase = region + 1, phase_of(node)
            set_region(node, region)
        return plan
