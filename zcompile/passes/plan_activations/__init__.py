"""Gives backward what it needs of forward's values: saved, recomputed, or offloaded meanwhile."""

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zcompile.ir.plan import GraphPlan
from zcompile.ir.saved_values import SavedValues
from zcompile.passes.base import Fact, Pass
from zcompile.passes.plan_activations.problem import KEEP, RECOMPUTE
from zcompile.passes.plan_activations.rewrite import Borders, Rewriting, plan_offload, sink_views


@dataclass(frozen=True)
class PlanActivations(Pass):
    """Recompute and offload the values of which the plan says so.

        %r = aten.relu(%a)                        %r = aten.relu(%a)
        %y = aten.mm(%r, %t)                      %h = zinf.offload(%r, "host")
        ...                               ->      %y = aten.mm(%r, %t)
        %dw = aten.mm(%dy, %r)  (backward)        zinf.left(%r, %h)
        %da = relu_backward(%dr, %r)              ...
                                                  %s = zinf.gather(%h)
                                                  %dw = aten.mm(%dy, %s)
                                                  %da = relu_backward(%dr, %s)

    or, recomputed:                               %r_1 = aten.relu(%a)
                                                  %dw = aten.mm(%dy, %r_1)

    Which ones stands in `GraphPlan.activations`.
    """

    name: ClassVar[str] = "plan-activations"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.ACTIVATIONS_CHOSEN})
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.ACTIVATIONS_PLANNED})

    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        given_up = {a.node: a for a in plan.activations if a.action != KEEP}
        if not given_up:
            return plan
        roots = {node: given_up[node.name] for node in graph.nodes if node.name in given_up}
        sink_views(graph)
        borders = Borders(graph)
        again = frozenset(node for node, a in roots.items() if a.action == RECOMPUTE)
        moves = {
            node: plan_offload(borders, node, a.action, a.left_at)
            for node, a in roots.items()
            if a.action != RECOMPUTE
        }
        return Rewriting(SavedValues(graph), plan, again, moves).rewrite()
