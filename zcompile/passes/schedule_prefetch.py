"""Starts each fetch early enough to be there in time, and no earlier than the budget allows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import find, phase_of, region_of
from zcompile.ir.plan import NOTHING_BESIDE, GraphMemory, GraphPlan
from zcompile.ir.types import Phase, aligned
from zcompile.memory.allocator import live_peak
from zcompile.memory.window import (
    Need,
    blocks_of,
    check_fits,
    in_place,
    needs_of,
    quickly_packed,
)
from zcompile.passes.base import Fact, Pass


@dataclass(frozen=True)
class SchedulePrefetch(Pass):
    """Move fetches ahead of the compute they can hide behind.

        %a = zinf.wait(%a_pending)                %a = zinf.wait(%a_pending)
        %y = aten.mm(%x, %a)                      %b_pending = zinf.fetch(%b_handle)
        zinf.release(%a)                  ->      %y = aten.mm(%x, %a)
        %b_pending = zinf.fetch(%b_handle)        zinf.release(%a)
        %b = zinf.wait(%b_pending)                %b = zinf.wait(%b_pending)

    max_lead  regions a fetch may start ahead of its first reader; 0 leaves every fetch in place
    """

    max_lead: int = 8

    name: ClassVar[str] = "schedule-prefetch"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS_CUT})
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.FETCHES_PLACED})

    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            fetches = [n for n in find(graph, ops.fetch) if phase_of(n) is phase]
            if not fetches:
                continue
            _settle_boundaries(graph, phase)
            needs = needs_of(graph, plan, phase)
            starts = choose_starts(
                needs, plan.budget_bytes, self.max_lead, phase.value, plan.beside
            )
            _move(graph, phase, dict(zip(fetches, starts, strict=True)))
        return plan


def choose_starts(
    needs: Sequence[Need],
    budget_bytes: int | None,
    max_lead: int,
    where: str,
    beside: GraphMemory = NOTHING_BESIDE,
) -> tuple[int, ...]:
    """For each fetch the region before which it starts: that of its first reader, or up to
    `max_lead` earlier.

    Needs come in the order of their first readers. Soonest first, each is moved as early as the
    bytes allowed in flight permit; the allowance is the largest, found by bisection, for which the
    addresses still fit.

    where   phase, for the error
    beside  live bytes outside the arena, for the error
    raises  BudgetExceeded, if they do not fit even without any lead
    """
    latest = in_place(needs)
    if budget_bytes is None:
        return tuple(max(0, first - max_lead) for first in latest)
    if quickly_packed(needs, latest) > budget_bytes:
        check_fits(needs, budget_bytes, where, beside)
        return latest  # addresses are hard enough to find as it is
    best, low, high = latest, live_peak(blocks_of(needs, latest)), budget_bytes
    starts = _leads(needs, high, max_lead)
    if quickly_packed(needs, starts) <= budget_bytes:
        return starts
    for _ in range(12):
        allowance = (low + high) // 2
        starts = _leads(needs, allowance, max_lead)
        if quickly_packed(needs, starts) <= budget_bytes:
            best, low = starts, allowance
        else:
            high = allowance
    return best


def _leads(needs: Sequence[Need], allowance: int, max_lead: int) -> tuple[int, ...]:
    """For each fetch the earliest start with which at most `allowance` bytes are taken at once."""
    last = max((need.last for need in needs), default=0)
    alive = [0] * (last + 1)
    sizes = [aligned(need.nbytes) for need in needs]
    for need, size in zip(needs, sizes, strict=True):
        for region in range(need.first, need.last + 1):
            alive[region] += size
    starts = []
    for need, size in zip(needs, sizes, strict=True):
        start, earliest, most = need.first, max(0, need.first - max_lead), allowance - size
        while start > earliest and alive[start - 1] <= most:
            start -= 1
            alive[start] += size
        starts.append(start)
    return tuple(starts)


def _settle_boundaries(graph: fx.Graph, phase: Phase) -> None:
    """Between two regions, put releases and reductions before fetches and waits.

    A release that came after the wait of the next parameter would keep both alive at once.
    """
    nodes = [n for n in graph.nodes if n.op == "call_function" and phase_of(n) is phase]
    pending: list[fx.Node] = []
    for node in nodes:
        if node.target in (ops.fetch, ops.wait):
            pending.append(node)
        elif node.target in (ops.release, *ops.SINKS):
            if pending and node.args[0] not in pending:
                pending[0].prepend(node)
        else:
            pending = []


def _move(graph: fx.Graph, phase: Phase, starts: dict[fx.Node, int]) -> None:
    """Put each fetch at the head of the block of waits that precedes its region."""
    heads: dict[int, fx.Node] = {}
    head: fx.Node | None = None
    for node in graph.nodes:
        if node.op != "call_function" or phase_of(node) is not phase:
            continue
        region = region_of(node)
        if region is not None:
            heads.setdefault(region, head or node)
            head = None
        elif node.target is ops.wait:
            head = head or node
        elif node.target in (ops.release, *ops.SINKS):
            head = None
    first = min(heads)
    for fetch, start in starts.items():
        heads[max(start, first)].prepend(fetch)
