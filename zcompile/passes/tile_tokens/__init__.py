"""Runs blocks over slices of tokens where the device cannot hold their hidden values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from torch import fx

from zcompile.errors import BudgetExceeded
from zcompile.ir.graph import aliases_of, copy_graph, module_of, phase_of
from zcompile.ir.memory_curve import SlicedRegion
from zcompile.ir.plan import GraphPlan, Note, Rounding
from zcompile.ir.saved_values import SavedValues, is_value, storage_bytes
from zcompile.ir.torch_compat import Dispatched, is_random
from zcompile.ir.types import Phase
from zcompile.ir.units import show_size
from zcompile.passes.base import Fact, Pass
from zcompile.passes.tile_tokens.regions import Region, regions_of, slice_candidates, tokens_of
from zcompile.passes.tile_tokens.rewrite import rewrite_region
from zcompile.passes.tile_tokens.rules import PRODUCTS, Tokens
from zcompile.passes.trial import between


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
        name = module_of(node) or node.name
        if name not in found and (why := _reason(values, numbers, node)):
            found[name] = f"{show_size(nbytes)} of {name} are not cut into slices of tokens: {why}"
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


SMALL = 4
"""A region of less than one part in so many of the budget is left alone: if the graph does not fit
then, that is due to something else."""

CUTS = 2
"""Most cuts of weights that are tried out beside slices, the coarsest first; a slice reads all
tiles."""
HOPELESS = 2
"""Ratio of need to budget from which on finer tiles are not tried out beside slices."""
GROWTH, ENOUGH = 2, 2000
"""Nodes that slices may add: so many times the nodes of the graph, or `ENOUGH`; every trial goes
over all of them."""

Slices = tuple[int, ...]
"""Number of slices of each region."""


class Cutter(Protocol):
    """Decides on weights and all that comes after, and says whether that fits."""

    def upper_bound(self, graph: fx.Graph, plan: GraphPlan) -> int:
        """Bytes that hold everything whatever is decided."""

    def fitting(
        self, graph: fx.Graph, plan: GraphPlan, most: int | None = None
    ) -> Mapping[str, int]:
        """The cuts of weights with which everything fits; tries `most` of them.

        raises  BudgetExceeded
        """


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

    Only where nothing else is enough: slices are tried out with all that comes after, and the
    fewest with which everything fits are taken. What fits without is left as it is, and what does
    not fit with them either. The cuts of weights that were tried out are handed on
    (`GraphPlan.cuts`).

    cutter  tries all that comes after out on a copy of the graph; None: nothing is changed
    slices  of every region, without a look at the budget; None: as many as are needed
    """

    cutter: Cutter | None = None
    slices: int | None = None

    name: ClassVar[str] = "tile-tokens"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.PHASES_ASSIGNED})
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.TOKENS_TILED})

    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        if self.slices is not None:
            regions = regions_of(graph)
            written = [self.slices if self.slices in r.demand.counts else 1 for r in regions]
            return _with_slices(plan, _write(graph, regions, written))
        if plan.budget_bytes is None or self.cutter is None:
            return plan
        upper_bound = self.cutter.upper_bound(graph, plan)
        if upper_bound <= plan.budget_bytes:
            return plan
        least = plan.budget_bytes // SMALL
        regions = [r for r in regions_of(graph) if r.demand.sliced > least]
        why = why_not_sliced(graph, regions, least)
        if not regions and not why:
            return plan
        return _Trials(graph, plan, self.cutter, regions, why).planned(
            plan.budget_bytes, upper_bound
        )


class _Trials:
    """Tries out slices of the regions of a graph.

    why   sentences on large values that are not sliced
    cuts  of weights, with which the slices that were found fit
    """

    def __init__(
        self,
        graph: fx.Graph,
        plan: GraphPlan,
        cutter: Cutter,
        regions: Sequence[Region],
        why: Sequence[str],
    ) -> None:
        self.graph, self.plan, self.cutter = graph, plan, cutter
        self.regions, self.why = regions, why
        self.cuts: Mapping[str, int] = {}

    def planned(self, budget: int, upper_bound: int) -> GraphPlan:
        """The plan, and the graph in slices, if it takes any.

        Where nothing fits, graph and cuts are left as they are, and it is for later passes to
        refuse the budget.
        """
        found: Slices | None = None
        for tried in (*between(budget, upper_bound), budget):
            found = self._first(tried)
            if found is None:
                text = f"slices of tokens do not make it fit {show_size(tried)}"
                texts = [*([text] if self.regions else []), *self.why]
                return self._noted(self.plan, texts)
        assert found is not None, "the budget itself is tried out"
        plan = replace(self.plan, cuts=self.cuts)
        if max(found, default=1) == 1:
            return plan
        sliced = _write(self.graph, self.regions, found)
        texts = [*(region.describe() for region in sliced), *self.why]
        return self._noted(_with_slices(plan, sliced), texts)

    def _noted(self, plan: GraphPlan, texts: Sequence[str]) -> GraphPlan:
        notes = [Note(TileTokens.name, None, text) for text in texts]
        return replace(plan, notes=(*plan.notes, *notes))

    def _first(self, budget: int) -> Slices | None:
        """The fewest slices with which everything fits; None, if there are none."""
        demands = [region.demand for region in self.regions]
        most = max(GROWTH * len(self.graph.nodes), ENOUGH)
        least: int | None = None
        for slices in slice_candidates(demands, budget):
            nodes = sum(n * len(r.nodes) for r, n in zip(self.regions, slices, strict=True))
            sliced = max(slices, default=1) > 1
            if sliced and nodes > most:
                return None
            needed = self._needed(slices, budget)
            if needed is None:
                return slices
            if sliced and least is not None and needed >= least:
                return None  # more slices do not help
            least = needed if sliced else None
        return None

    def _needed(self, slices: Slices, budget: int) -> int | None:
        """Bytes that these slices need, with the cuts that need least; None: everything fits."""
        plan = replace(self.plan, budget_bytes=budget)
        sliced = max(slices, default=1) > 1
        graph = self.graph
        try:
            if sliced:
                graph, mapping = copy_graph(graph)
                _write(graph, [region.in_copy(mapping) for region in self.regions], slices)
            self.cuts = self._cuts(graph, plan, sliced)
        except BudgetExceeded as error:
            return error.needed_bytes
        return None

    def _cuts(self, graph: fx.Graph, plan: GraphPlan, sliced: bool) -> Mapping[str, int]:
        """The cuts of weights with which the slices fit.

        raises  BudgetExceeded
        """
        if not sliced:
            return self.cutter.fitting(graph, plan)
        assert plan.budget_bytes is not None
        for count in range(1, CUTS):
            try:
                return self.cutter.fitting(graph, plan, count)
            except BudgetExceeded as error:
                if error.needed_bytes > HOPELESS * plan.budget_bytes:
                    raise  # finer tiles save less than a budget: none takes more than that
        return self.cutter.fitting(graph, plan, CUTS)


def _with_slices(plan: GraphPlan, sliced: tuple[SlicedRegion, ...]) -> GraphPlan:
    why = "gradients of its weights are added up slice after slice, and products have fewer rows"
    rounded = [Rounding(TileTokens.name, region.name, why) for region in sliced]
    return replace(plan, sliced=sliced, roundings=(*plan.roundings, *rounded))


def _write(
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
