"""Tries decisions out: the first candidate that fits a budget, and, where none does, a budget that
would do.

A candidate is tried out as a whole, on a copy of the graph (`Trial`), since what it needs depends
on all that is decided after it.
Candidates come the best first, and the last is the one that should need least. Larger budgets are
quicker to try than small ones, whose graphs are cut finely.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isqrt
from typing import Generic, TypeVar

from torch import fx

from zcompile.errors import BudgetExceeded, more_device_memory
from zcompile.ir.copies import copy_graph
from zcompile.ir.plan import GraphPlan
from zcompile.memory.footprint import Footprint, footprint
from zcompile.memory.window import smallest_window
from zcompile.passes.base import Pass

FAR, STRIDE = 16, 4
"""Ratio of a safe budget to the user's from which on larger budgets are tried before (`between`),
and the factor from each to the next."""
REFUSED_GUESSES, SPARE = 3, 32
"""How often the bytes that the last candidate needs are tried as a budget, each time 1/SPARE
larger: the choice changes with the budget, and the need with the choice."""
UPWARDS, HALVINGS, NEAR = 8, 4, 8
"""Searching for a budget that does: steps up by a quarter; then halvings in proportion, until the
largest known to fail is within 1/NEAR of the smallest known to do."""

Candidate = TypeVar("Candidate")


@dataclass
class Tried:
    """A copy of a graph, and its plan, after a trial."""

    graph: fx.Graph
    plan: GraphPlan

    @cached_property
    def held(self) -> Footprint:
        """What is live outside the arena."""
        return footprint(self.graph, self.plan.params)

    def needed(self) -> tuple[int, int]:
        """Bytes of the device that are needed: live outside the arena, and the smallest window."""
        held = max(self.held.peak, self.plan.beside.nbytes)
        return held, smallest_window(self.graph, self.plan)


def not_told() -> None:
    """Tell nobody of a trial."""


@dataclass(frozen=True)
class Trial:
    """Runs passes on copies of a graph. Which ones, the pipeline says.

    tried  is called before each
    """

    passes: Sequence[Pass]
    tried: Callable[[], None] = field(default=not_told, compare=False)

    def on_copy(self, graph: fx.Graph, plan: GraphPlan) -> Tried:
        """The graph and plan after the passes.

        raises  BudgetExceeded
        """
        self.tried()
        copy, _ = copy_graph(graph)
        for pass_ in self.passes:
            plan = pass_.rewrite(copy, plan)
        return Tried(copy, plan)


@dataclass(frozen=True)
class BudgetSearch(Generic[Candidate]):
    """Tries candidates out within budgets.

    candidates  budget -> candidates, the best first; at least one
    try_out     (candidate, budget) -> the refusal of the passes, or None if everything fits
    refines     (candidate, next one) -> whether the next is only a finer version of the same
    hopeless    (candidate, budget) -> whether a lower bound says that it does not fit; it is not
                tried then, unless it is the last
    """

    candidates: Callable[[int], Iterable[Candidate]]
    try_out: Callable[[Candidate, int], BudgetExceeded | None]
    refines: Callable[[Candidate, Candidate], bool] = lambda _way, _later: True
    hopeless: Callable[[Candidate, int], bool] = lambda _way, _budget: False

    def best(self, budget: int, upper_bound: int) -> Candidate:
        """The first candidate with which everything fits `budget`.

        upper_bound  a budget that should hold everything, whichever candidate is taken
        raises       BudgetExceeded, with a budget that was tried out and does
        """
        enough, known = upper_bound, False
        for tried in (*between(budget, upper_bound), budget):
            try:
                found = self.first(tried)
            except BudgetExceeded as nearest:
                raise self._refusal(budget, nearest, tried, enough, known) from None
            enough, known = tried, True
        return found

    def first(self, budget: int) -> Candidate:
        """The first candidate that fits `budget`. Once finer ones will hardly help, only the last
        is tried.

        raises  BudgetExceeded, of the candidate that needs least
        """
        refused: list[tuple[Candidate, BudgetExceeded]] = []
        candidates = list(self.candidates(budget))
        while candidates:
            candidate = candidates.pop(0)
            if candidates and self.hopeless(candidate, budget):
                continue
            error = self.try_out(candidate, budget)
            if error is None:
                return candidate
            refused.append((candidate, error))
            if candidates and self._in_vain(refused[-2:], candidates[0], budget):
                candidates = candidates[-1:]
        raise min((error for _, error in refused), key=lambda error: error.needed_bytes)

    def _in_vain(
        self, refused: Sequence[tuple[Candidate, BudgetExceeded]], candidate: Candidate, budget: int
    ) -> bool:
        """Whether trying `candidate` is in vain: it refines the two refused last, and the second of
        those saved fewer bytes than are still missing. Finer and finer tiles save less each time.
        """
        if len(refused) < 2:
            return False
        (first, more), (then, less) = refused
        same = self.refines(first, then) and self.refines(then, candidate)
        return same and more.needed_bytes - less.needed_bytes < less.needed_bytes - budget

    def _against(self, budget: int) -> BudgetExceeded | None:
        """The refusal of the last candidate; if it is None, `first` finds that candidate or a
        better one."""
        *_, last = self.candidates(budget)
        return self.try_out(last, budget)

    def _refusal(
        self, budget: int, nearest: BudgetExceeded, low: int, high: int, known: bool
    ) -> BudgetExceeded:
        """`nearest` with a budget that does.

        low    a budget that does not do
        high   a budget that should; `known`: that does
        """

        def refusal(needed: int, todo: str) -> BudgetExceeded:
            return BudgetExceeded("device", budget, needed, nearest.where, nearest.alive, todo)

        # First guesses: what the last candidate needs.
        tried = max(nearest.needed_bytes, low + 1)
        for _ in range(REFUSED_GUESSES):
            if tried >= high and known:
                break
            error = self._against(tried)
            if error is None:
                high, known = tried, True
                break
            low = max(low, tried)
            tried = max(tried, error.needed_bytes) * (SPARE + 1) // SPARE
        # Upwards, until a budget does.
        if not known:
            high = max(high, tried)
        for _ in range(UPWARDS):
            if known or self._against(high) is None:
                break
            low, high = high, high + high // 4
        else:
            todo = f"give zcompile.offload more device_memory than {low}, or a smaller batch"
            return refusal(nearest.needed_bytes, todo)
        # Down again, between the largest that fails and the smallest that does.
        for _ in range(HALVINGS):
            if (high - low) * NEAR <= high:
                break
            middle = isqrt(low * high)  # near in proportion is near enough
            low, high = (low, middle) if self._against(middle) is None else (middle, high)
        return refusal(high, f"{more_device_memory(high)}, or a smaller batch")


def between(budget: int, upper_bound: int) -> list[int]:
    """Budgets above `budget`, from the largest down, if it is far below `upper_bound`."""
    tried: list[int] = []
    if budget * FAR < upper_bound:
        tried.append(budget * STRIDE)
        while tried[-1] * STRIDE < upper_bound:
            tried.append(tried[-1] * STRIDE)
    return tried[::-1]
