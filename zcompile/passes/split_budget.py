"""Splits the device budget between the arena and the values that graphs hold outside it."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from zcompile.errors import BudgetExceeded, more_device_memory
from zcompile.ir import ops
from zcompile.ir.graph import find
from zcompile.ir.plan import GraphMemory, GraphPlan
from zcompile.ir.types import Phase
from zcompile.memory.footprint import footprint
from zcompile.memory.window import check_fits, needs_of
from zcompile.passes.base import Fact, Pass


@dataclass(frozen=True)
class SplitBudget(Pass):
    """Leave room for the values between ops, which torch's allocator holds.

        budget 64 MiB                             budget 40 MiB: of the arena, for what is fetched
        %a = aten.mm(%x, %w)              ->      live   24 MiB: at most, values of this graph or
        %b = aten.relu(%a)                                       of one that was compiled before

    Passes after this one plan the arena within the rest, which is checked to hold what regions read
    together. The graph does not change.
    """

    name: ClassVar[str] = "split-budget"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS_CUT})
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.BUDGET_SPLIT})

    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        if plan.budget_bytes is None:
            return plan
        held = footprint(graph, plan.params)
        most, where = plan.beside.nbytes, "graphs compiled before"
        rows = [(f"values of {where}", most)]
        if held.peak > most:
            most, rows, where = held.peak, held.describe(held.peak_at), held.where
        if most > plan.budget_bytes and not find(graph, ops.fetch):
            raise BudgetExceeded(
                "device",
                plan.budget_bytes,
                most,
                where,
                rows,
                f"{more_device_memory(most)}, or a smaller batch",
            )
        beside = GraphMemory(most, where, tuple(rows), plan.budget_bytes)
        left = max(0, plan.budget_bytes - most)
        least = max(
            check_fits(needs_of(graph, plan, phase), left, phase.value, beside)
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        )
        return replace(
            plan, beside=beside, budget_bytes=left, held=held.as_curve(), least_bytes=least
        )
