"""Gives the bytes of a gathered parameter back after its last reader."""

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import find, insert, phase_of, readers_of
from zcompile.ir.plan import GraphPlan
from zcompile.passes.base import Fact, Pass


@dataclass(frozen=True)
class ReleaseParams(Pass):
    """Free a gathered parameter once nothing reads it, or a view of it.

    %full = zinf.wait(%pending)               %full = zinf.wait(%pending)
    %t    = aten.t(%full)             ->      %t    = aten.t(%full)
    %y    = aten.mm(%x, %t)                   %y    = aten.mm(%x, %t)
                                              zinf.release(%full)
    """

    name: ClassVar[str] = "release-params"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_GATHERED})
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_RELEASED})

    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        for full in find(graph, ops.wait):
            reader = max(readers_of(full))
            with graph.inserting_after(reader):
                insert(graph, ops.release, full, like=reader, phase=phase_of(full), val=None)
        return plan
