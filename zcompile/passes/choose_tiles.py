"""Decides how finely weights, tokens and the batch are cut: tries out what an estimate cannot
tell."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import ClassVar

from torch import fx

from zcompile.errors import BudgetExceeded, more_device_memory
from zcompile.ir.copies import copy_graph
from zcompile.ir.graph import output_of
from zcompile.ir.plan import BatchSlices, GraphPlan, Note
from zcompile.ir.torch_compat import gradient_of
from zcompile.ir.types import Layout, NodeName
from zcompile.ir.units import show_size
from zcompile.memory.footprint import Footprint, footprint
from zcompile.memory.least_held import least_held
from zcompile.passes.base import Fact, Pass
from zcompile.passes.reduce_grads import sinks
from zcompile.passes.slice_batch import why_no_batch, write_batch_slices
from zcompile.passes.slice_batch.stages import MOST_SLICES, BatchGraph, batch_graph, counts_of
from zcompile.passes.tile_matmuls import gathered_values
from zcompile.passes.tile_matmuls.sizes import GatheredValue, alive, cut_candidates, peak
from zcompile.passes.tile_tokens import why_not_sliced, write_slices
from zcompile.passes.tile_tokens.regions import Region, regions_of, slice_candidates
from zcompile.passes.trial import SPARE, BudgetSearch, Trial, between

UPPER_BOUND_FACTOR = 1.125
"""Bytes counted before the other passes, times this, are at least as many as counted after them."""
SMALL = 4
"""A region of less than one part in so many of the budget is left alone: if the graph does not fit
then, that is due to something else."""
CUTS = 2
"""Most cuts of weights that are tried out beside slices, the coarsest first; a slice reads all
tiles."""
GUESSES = 3
"""Most budgets that are tried to offer one that does in slices, each with `CUTS` at most."""
HOPELESS = 2
"""Ratio of need to budget from which on finer tiles are not tried out beside slices."""
GROWTH, ENOUGH = 2, 2000
"""Nodes that slices may add: so many times the nodes of the graph, or `ENOUGH`; every trial goes
over all of them."""
WEIGHTS = 8
"""Weights of a stage of the batch take at most one part in so many of the budget, where stages can
be as small: they are there for all slices, with their gradients, while those of the next come."""
NOTHING_SPLITS = "what no plan can split"
"""Where a budget is exceeded that is refused before anything is tried."""

Slices = tuple[int, ...]
"""Number of slices of each region."""
Cuts = Mapping[str, int]
"""Handle of each weight that is cut -> most bytes of a tile (`GraphPlan.cuts`)."""


@dataclass(frozen=True)
class ChooseTiles(Pass):
    """Write into the plan which regions run over slices of tokens, whether the batch runs in
    slices, and which weights are cut.

        budget 64 MiB                              budget 64 MiB
                                        ->         slices {%mm: 4}; cuts {%h: 2 MiB}

    How much of the budget weights may take depends on the values that the graph holds beside them,
    and that on what becomes of its activations: what an estimate cannot tell is tried out on copies
    of the graph, the coarsest cuts first, with the activations that are chosen for each.

    Slices come only where nothing else is enough: the fewest with which everything fits; of the
    batch only where slices of tokens are not enough. Where these are not either, the budget is
    refused, with one that does. Activations that were chosen in the trial of an uncut graph are
    handed on. The graph does not change.

    A budget below what nothing can split is refused before anything is tried.

    tile_bytes  a weight of more is cut, and two tiles take no more; None: only weights that the
                budget cannot hold are cut
    trial       runs what is decided afterwards; None: only what the budget cannot hold is cut
    slices      whether tokens and the batch may be cut
    narrows     whether weights may come in a narrower dtype
    """

    tile_bytes: int | None = None
    trial: Trial | None = None
    slices: bool = True
    narrows: bool = False

    name: ClassVar[str] = "choose-tiles"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.PHASES_ASSIGNED})
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.TILES_CHOSEN})

    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        gathered, budget = gathered_values(graph, plan), plan.budget_bytes
        coarsest = next(cut_candidates(gathered, budget, self.tile_bytes))
        if budget is None or self.trial is None:
            return replace(plan, cuts=coarsest)
        held = footprint(graph, plan.params)
        regions = regions_of(graph)
        batch = _LateBatch(graph)
        try:
            self._refuse_hopeless(budget, plan, gathered, held, regions, batch)
        except BudgetExceeded as error:
            if self.slices:
                least = budget // SMALL
                why = [*why_not_sliced(graph, regions, least), *batch.why(least)]
                for text in why:
                    error.add_note(text)
            raise
        upper_bound = _upper_bound(held, plan, gathered)
        if upper_bound <= budget and not coarsest:
            return replace(plan, cuts=coarsest)
        whole = _CutSearch(graph, plan, self.tile_bytes, self.trial, self.narrows)
        slices, nearest = _AnySlices(whole, regions, batch, upper_bound), None
        if self.slices and upper_bound > budget:
            plan, nearest = slices.planned(budget)
        if plan.cuts is None:
            try:
                plan = replace(plan, cuts=whole.search().best(budget, upper_bound))
            except BudgetExceeded as error:
                refused = slices.offered(error, nearest) if nearest else error
                for note in plan.notes:
                    if note.by == self.name:
                        refused.add_note(note.text)
                raise refused from None
        return plan if plan.slices or plan.batch else whole.with_activations(plan)

    def _refuse_hopeless(
        self,
        budget: int,
        plan: GraphPlan,
        gathered: Sequence[GatheredValue],
        held: Footprint,
        regions: Sequence[Region],
        batch: "_LateBatch",
    ) -> None:
        """Refuse a budget below a lower bound on what the graph needs.

        raises  BudgetExceeded
        """
        parts = regions if self.slices else ()
        sliced, inside = ({n for r in parts for n in getattr(r, k)} for k in ("nodes", "inside"))
        # Of weights, what is read at once, a row of each that can be cut.
        weights, place = 0, 0
        if not self.narrows:
            finest = {value.key: 0 for value in gathered if value.row_nbytes}
            weights, place = peak(gathered, finest)
        values = least_held(held, sliced, inside)
        if self.slices and weights + sum(v.nbytes for v in values) > budget and batch.found:
            slices = min(MOST_SLICES, batch.found.batch.count)
            makes = batch.found.batch.makes_slices()
            values = least_held(held, sliced, inside, makes, slices)
        rows = [(held.title(value), value.nbytes) for value in values]
        if (nbytes := sum(n for _, n in rows)) < plan.beside.nbytes:
            nbytes, rows = plan.beside.nbytes, [("values of graphs compiled before", nbytes)]
        nbytes += weights
        for value in alive(gathered, place) if weights else ():
            name = plan.params[NodeName(value.key)].name
            cut = f"a row of {name}" if value.row_nbytes else str(name)
            rows.append((cut, value.row_nbytes or value.nbytes))
        if nbytes > budget:
            raise BudgetExceeded(
                "device",
                budget,
                nbytes,
                NOTHING_SPLITS,
                rows,
                f"{more_device_memory(nbytes)}: a lower bound, found at once; what really would do "
                "is more, and is found by trials from there on",
            )


@dataclass
class _LateBatch:
    """The batch of a graph, looked for when it is asked for."""

    graph: fx.Graph

    @cached_property
    def found(self) -> BatchGraph | None:
        return batch_graph(self.graph)

    def why(self, least: int) -> list[str]:
        """Why large values are not made in slices of the batch: sentences."""
        return why_no_batch(self.graph, self.found, least)


@dataclass
class _CutSearch:
    """Tries out cuts of the weights of one graph.

    narrows  whether weights may come in a narrower dtype
    tried    (budget, cuts) -> the refusal, or the plan; what was tried is not tried again
    """

    graph: fx.Graph
    plan: GraphPlan
    tile_bytes: int | None
    trial: Trial
    narrows: bool
    tried: dict[object, BudgetExceeded | GraphPlan] = field(default_factory=dict)

    def search(self, most: int | None = None) -> BudgetSearch[Cuts]:
        """Over the candidates of this graph, or the `most` coarsest."""
        gathered = gathered_values(self.graph, self.plan)
        gradients = _gradient_bytes(self.graph, self.plan)

        def hopeless(cuts: Cuts, budget: int) -> bool:
            # A weight that is not cut leaves as a whole gradient, beside what is gathered.
            weights = 0 if self.narrows else peak(gathered, cuts)[0]
            gradient = max((n for key, n in gradients.items() if key not in cuts), default=0)
            return weights + gradient > budget

        return BudgetSearch(
            lambda budget: islice(cut_candidates(gathered, budget, self.tile_bytes), most),
            self.refused,
            refines=lambda cuts, finer: cuts.keys() == finer.keys(),
            hopeless=hopeless,
        )

    def fitting(self, budget: int, upper_bound: int) -> Cuts | None:
        """The first cuts that make it fit; larger budgets are tried before one that is far below.
        None, if there are none."""
        try:
            for tried in (*between(budget, upper_bound), budget):
                cuts = self.search().first(tried)
        except BudgetExceeded:
            return None
        return cuts

    def refused(self, cuts: Cuts, budget: int) -> BudgetExceeded | None:
        """The refusal of what comes after; None, if everything fits."""
        key = budget, tuple(cuts.items())
        if key not in self.tried:
            plan = replace(self.plan, budget_bytes=budget, cuts=cuts)
            try:
                self.tried[key] = self.trial.on_copy(self.graph, plan).plan
            except BudgetExceeded as error:
                self.tried[key] = error.with_traceback(None)  # whose frames hold the copy
        found = self.tried[key]
        return found if isinstance(found, BudgetExceeded) else None

    def with_activations(self, plan: GraphPlan) -> GraphPlan:
        """The plan with what was chosen for activations in its trial. Nodes that cutting adds have
        names of their own in each copy, so that only an uncut graph has any."""
        made = self.tried.get((plan.budget_bytes, ()))
        if plan.cuts or not isinstance(made, GraphPlan):
            return plan
        return replace(plan, activations=made.activations, activation_cost=made.activation_cost)


@dataclass(frozen=True)
class _Nearest:
    """Slices that did not fit and need least of those that were tried.

    needed  bytes
    within  tries them within another budget, with cuts of weights

            raises  BudgetExceeded
    """

    needed: int
    within: Callable[[int], Cuts]


class _SliceSearch:
    """Tries out slices of the regions of a graph, with cuts of its weights.

    why      sentences on large values that are not sliced
    cuts     of weights, with which the slices that were found fit
    nearest  to fit, of what was tried last; None: no slices were
    """

    def __init__(self, whole: _CutSearch, regions: Sequence[Region], why: Sequence[str]) -> None:
        self.whole, self.regions, self.why = whole, regions, why
        self.cuts: Cuts = {}
        self.nearest: _Nearest | None = None

    def planned(self, budget: int, upper_bound: int) -> GraphPlan:
        """The plan with slices, if it takes any, and the cuts beside them.

        Where nothing fits, both are left open.
        """
        plan, found = self.whole.plan, (1,) * len(self.regions)
        for tried in (*between(budget, upper_bound), budget):
            first = self._first(tried)
            if first is None:
                text = f"slices of tokens do not make it fit {show_size(tried)}"
                return self._noted(plan, [*([text] if self.regions else []), *self.why])
            found = first
        plan = replace(plan, cuts=self.cuts)
        if max(found, default=1) == 1:
            return plan
        rows = zip(self.regions, found, strict=True)
        slices = {region.first: n for region, n in rows if n > 1}
        return self._noted(replace(plan, slices=slices), self.why)

    def _noted(self, plan: GraphPlan, texts: Sequence[str]) -> GraphPlan:
        notes = [Note(ChooseTiles.name, None, text) for text in texts]
        return replace(plan, notes=(*plan.notes, *notes))

    def _first(self, budget: int) -> Slices | None:
        """The fewest slices with which everything fits; None, if there are none."""
        demands = [region.demand for region in self.regions]
        most = max(GROWTH * len(self.whole.graph.nodes), ENOUGH)
        least: int | None = None
        for slices in slice_candidates(demands, budget):
            nodes = sum(n * len(r.nodes) for r, n in zip(self.regions, slices, strict=True))
            sliced = max(slices, default=1) > 1
            if sliced and nodes > most:
                return None
            try:
                self.cuts = self._cuts(slices, budget, sliced=sliced)
            except BudgetExceeded as error:
                if sliced and least is not None and error.needed_bytes >= least:
                    return None  # more slices do not help
                least = error.needed_bytes if sliced else None
                if sliced:
                    again = partial(self._cuts, slices, sliced=True)
                    self.nearest = _Nearest(error.needed_bytes, again)
            else:
                return slices
        return None

    def _cuts(self, slices: Slices, budget: int, *, sliced: bool) -> Cuts:
        """The cuts of weights with which the slices fit.

        raises  BudgetExceeded, of the cuts that need least
        """
        if not sliced:
            return self.whole.search().first(budget)
        graph, mapping = copy_graph(self.whole.graph)
        write_slices(graph, [region.in_copy(mapping) for region in self.regions], slices)
        return _cuts_beside(replace(self.whole, graph=graph, tried={}), budget)


@dataclass
class _AnySlices:
    """Tries out slices of tokens, and of the batch where neither those nor cuts of weights alone
    are enough.

    regions      of tokens
    upper_bound  a budget that should hold everything, whole
    """

    whole: _CutSearch
    regions: Sequence[Region]
    batch: _LateBatch
    upper_bound: int

    def planned(self, budget: int) -> tuple[GraphPlan, _Nearest | None]:
        """The plan with the slices that fit, if it takes any, and the cuts beside them; where
        nothing fits, both are left open. Beside it the slices that are nearest to fit."""
        plan, tokens = self._of_tokens(budget)
        if plan.cuts is not None:
            return plan, tokens
        cuts = self.whole.fitting(budget, self.upper_bound)
        if cuts is not None:
            return replace(plan, cuts=cuts), tokens
        plan, samples = _BatchSearch(self.whole, self.batch).planned(plan, budget)
        tried = [found for found in (tokens, samples) if found is not None]
        return plan, min(tried, key=lambda found: found.needed, default=None)

    def _of_tokens(self, budget: int) -> tuple[GraphPlan, _Nearest | None]:
        least = budget // SMALL
        regions = [r for r in self.regions if r.demand.sliced > least]
        why = why_not_sliced(self.whole.graph, regions, least)
        if not regions and not why:
            return self.whole.plan, None
        search = _SliceSearch(self.whole, regions, why)
        return search.planned(budget, self.upper_bound), search.nearest

    def offered(self, refused: BudgetExceeded, nearest: _Nearest) -> BudgetExceeded:
        """The refusal of a graph that stays whole, with a budget that does in slices, if that is
        less: a little more than the slices need that are nearest to fit."""
        needed = nearest.needed
        for _ in range(GUESSES):
            offer = needed * (SPARE + 1) // SPARE
            if offer >= refused.needed_bytes:
                return refused
            try:
                nearest.within(offer)
            except BudgetExceeded as error:
                needed = max(offer, error.needed_bytes)
            else:
                break
        else:
            return refused
        where, enough, more = refused.where, refused.needed_bytes, more_device_memory(offer)
        if self.whole.fitting(offer, self.upper_bound) is None:
            where = f"without slices, {where}"
            more += " (it runs in slices of tokens or the batch there, which changes the last bits)"
        else:
            enough = offer
        todo = f"{more}, or a smaller batch"
        return BudgetExceeded(
            refused.tier, refused.budget_bytes, enough, where, refused.alive, todo
        )


@dataclass
class _BatchSearch:
    """Tries out slices of the batch of a graph, with cuts of its weights."""

    whole: _CutSearch
    batch: _LateBatch

    def planned(self, plan: GraphPlan, budget: int) -> tuple[GraphPlan, _Nearest | None]:
        """The plan with the fewest slices that fit, and the cuts beside them; where nothing fits,
        both are left open. Beside it the slices that are nearest to fit."""
        found, nearest = self.batch.found, None
        for slices in counts_of(found.batch.count) if found is not None else ():
            tried: list[_Nearest] = []
            for chosen in self._candidates(slices, budget):
                within = partial(self._cuts, chosen)
                try:
                    return replace(self.whole.plan, batch=chosen, cuts=within(budget)), nearest
                except BudgetExceeded as error:
                    tried.append(_Nearest(error.needed_bytes, within))
                    if error.needed_bytes > HOPELESS * budget:
                        break
            if not tried:
                continue
            least = min(tried, key=lambda refused: refused.needed)
            if nearest is not None and least.needed >= nearest.needed:
                break  # more slices do not help
            nearest = least
        texts = self.batch.why(budget // SMALL)
        if nearest is not None:
            text = f"slices of the batch do not make it fit {show_size(budget)}"
            texts = [f"{text}, they need {show_size(nearest.needed)}", *texts]
        notes = [Note(ChooseTiles.name, None, text) for text in texts]
        return replace(plan, notes=(*plan.notes, *notes)), nearest

    def _candidates(self, slices: int, budget: int) -> Iterator[BatchSlices]:
        """Where stages may begin: first such that they are as large as their weights permit, then
        smaller and smaller ones, which leave more values to later stages."""
        found = self.batch.found
        assert found is not None, "there is a batch"
        levels, count = found.levels(), found.batch.count
        merged = found.merged(levels[0], budget // WEIGHTS) if levels else ()
        for cuts in dict.fromkeys([merged, *levels]):
            stages = found.stages(cuts)
            inside = max(map(found.inside, (*stages.forward, *stages.backward)))
            if inside // count * -(-count // slices) <= budget:
                yield BatchSlices(slices, cuts)

    def _cuts(self, chosen: BatchSlices, budget: int) -> Cuts:
        """The cuts of weights with which the slices fit.

        raises  BudgetExceeded, of the cuts that need least
        """
        graph, _ = copy_graph(self.whole.graph)
        write_batch_slices(graph, chosen)
        plan = replace(self.whole.plan, batch=chosen)
        return _cuts_beside(replace(self.whole, graph=graph, plan=plan, tried={}), budget)


def _cuts_beside(sliced: _CutSearch, budget: int) -> Cuts:
    """The cuts of weights with which a graph fits that is in slices already.

    raises  BudgetExceeded, of the cuts that need least
    """
    search: Callable[[int], BudgetSearch[Cuts]] = sliced.search
    for count in range(1, CUTS):
        try:
            return search(count).first(budget)
        except BudgetExceeded as error:
            if error.needed_bytes > HOPELESS * budget:
                raise  # finer tiles save less than a budget: none takes more than that
    return search(CUTS).first(budget)


def _gradient_bytes(graph: fx.Graph, plan: GraphPlan) -> dict[str, int]:
    """Handle of each weight that is trained -> bytes that hold its gradient where that is made."""
    handles, output = sinks(graph, plan), output_of(graph)
    descs = output.meta.get("desc") or ()
    results = output.args[0] if isinstance(output.args[0], list | tuple) else ()
    return {
        handle.name: Layout.of(result.meta["val"]).nbytes
        for result, desc in zip(results, descs, strict=False)
        if isinstance(result, fx.Node) and (handle := handles.get(gradient_of(desc))) is not None
    }


def _upper_bound(held: Footprint, plan: GraphPlan, gathered: Sequence[GatheredValue]) -> int:
    """Bytes that hold everything whatever is decided, when nothing is cut."""
    beside = max(plan.beside.nbytes, held.peak)
    at_once, _ = peak(gathered, {})
    return int(UPPER_BOUND_FACTOR * (beside + 2 * at_once))
