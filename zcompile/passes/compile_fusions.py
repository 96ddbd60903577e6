"""Compiles the fusions of a graph, by whoever can."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from zcompile.ir.fusions import Fused, fusions_of, set_fused, set_fusion
from zcompile.ir.plan import GraphPlan, Note
from zcompile.ir.types import NodeName
from zcompile.passes.base import Fact, Pass

CompileFusion = Callable[[Sequence[fx.Node]], Fused | str]
"""Nodes of a fusion -> what it was compiled to, or why not."""


@dataclass(frozen=True)
class CompileFusions(Pass):
    """Replace each fusion by what it was compiled to; one that is refused is run as it is.

        %a = aten.add(%x, %r)           1         %a = aten.add(%x, %r)           1  |
        %n = aten.native_layer_norm(%a) 1   ->    %n = aten.native_layer_norm(%a) 1  | one kernel
        %s = aten.sum(%n)               2         %s = aten.sum(%n)                     refused

    No node moves: regions call what was compiled in place of these nodes. What it takes at its
    peak is known from here on, and the budget is split by that.

    compiler  None: fusions stay as they are found, as in a dry run, and count as if compiled
    """

    name: ClassVar[str] = "compile-fusions"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.FUSIONS_FOUND, Fact.REGIONS_CUT})
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.FUSIONS_COMPILED})

    compiler: CompileFusion | None = None

    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        if self.compiler is None:
            return plan
        notes: dict[str, Note] = {}
        for nodes in fusions_of(graph.nodes).values():
            made = self.compiler(nodes)
            if isinstance(made, Fused):
                set_fused(nodes, made)
                continue
            set_fusion(nodes, None)
            text = f"%{nodes[0].name} to %{nodes[-1].name} run eagerly: {made}"
            notes.setdefault(made, Note(self.name, NodeName(nodes[0].name), text))
        return replace(plan, notes=(*plan.notes, *notes.values()))
