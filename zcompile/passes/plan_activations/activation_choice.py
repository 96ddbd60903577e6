"""Which values are kept for backward, which are made again, which are moved: chosen within budgets.

A knapsack with precedence: memory at every time is a constraint, and what is made again wants what
its op reads. It is solved greedily: while too much is held, the value is given up that costs the
fewest seconds per byte at the time at which the most is held; at the end whatever has come to fit
is kept again (`activation_search.py`). Several such ways are tried, one of them from the rounded
solution of the linear relaxation (`activation_bound.py`), whose optimum says how far the best of
them can be from the least; of the best, what costs most is exchanged for others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zcompile.passes.plan_activations.activation_bound import relaxed
from zcompile.passes.plan_activations.activation_problem import (
    AGAIN,
    KEEP,
    MOVED,
    REPEATED,
    Answer,
    Problem,
)
from zcompile.passes.plan_activations.activation_search import Search

EXCHANGED = 8
"""Of the costliest values given up, so many are kept, and others given up for them, if that costs
less."""
NEAR = 1.1
"""Times the bound, and nothing is exchanged any more: it is a search for each that is."""


@dataclass(frozen=True)
class Choice:
    """actions    one per value
    answer        what they take
    least_seconds of the linear relaxation: nothing that fits takes less; None: not known
    fits          within all budgets; else it is what needs least
    """

    actions: tuple[str, ...]
    answer: Answer
    least_seconds: float | None
    fits: bool

    @property
    def gap(self) -> float | None:
        """By how much more than the least it may take, as a part of it, at most."""
        if self.least_seconds is None or not self.fits:
            return None
        if self.answer.seconds <= self.least_seconds:
            return 0.0
        return self.answer.seconds / max(self.least_seconds, 1e-12) - 1


def choose(problem: Problem, ways: Sequence[str], quickly: bool = False) -> Choice:
    """The best answer found.

    ways     what may be done to a value but to keep it: AGAIN, and tiers
    quickly  look in one way only, and without a bound
    """
    wished = wishes(problem, ways)
    first = Search(problem, ways, wished)
    if first.over <= 0:
        return Choice(tuple(wished), first.answer, None, True)
    if quickly:
        best = _nearest([first.run()], problem, ways, wished)
        return Choice(tuple(best.actions), best.answer, None, best.over <= 0)
    bound = relaxed(problem, ways, wished)
    tried = [first.run()]
    if len(ways) > 1:
        tried += [Search(problem, [way], wished, wholly=True).run(also=ways) for way in ways]
    tried.append(Search(problem, ways, wished, wholly=True).run())
    if bound is not None:
        tried.append(Search(problem, ways, bound.actions).run())
    best = _nearest(tried, problem, ways, wished)
    least = None if bound is None else bound.seconds
    if best.over <= 0 and (least is None or best.answer.seconds > NEAR * least):
        best = _exchanged(best, ways, wished)
    return Choice(tuple(best.actions), best.answer, least, best.over <= 0)


def _nearest(
    tried: list[Search], problem: Problem, ways: Sequence[str], wished: Sequence[str]
) -> Search:
    """The least costly of those that fit. Where none does, another that only looks at bytes is
    tried too; what needs least is found without a look at seconds, which are measured."""
    if all(search.over > 0 for search in tried):
        tried = [*tried, Search(problem, ways, wished, frugal=True).run()]
    return min(tried, key=lambda search: (max(0, search.over), search.answer.seconds))


def _exchanged(best: Search, ways: Sequence[str], wished: Sequence[str]) -> Search:
    """What costs most is kept after all, and others are given up for it, where that costs less.
    Greed, which gives up one by one, takes a large value for the few bytes missing at last.
    """
    seen = set[int]()
    while len(seen) < EXCHANGED:
        given = [n for n in best.given_up(wished) if n not in seen]
        if not given:
            break
        number = max(given, key=best.seconds_of)
        seen.add(number)
        other = best.without(number, ways, wished).run()
        if other.over <= 0 and other.answer.seconds < best.answer.seconds:
            best = other
    return best


def wishes(problem: Problem, ways: Sequence[str]) -> list[str]:
    """Where a search begins: everything is kept, but for what the user asked for."""
    actions = []
    for value in problem.values:
        action = KEEP
        if value.wish in REPEATED and problem.makers[value.maker].may_repeat:
            action = AGAIN
        elif value.wish in MOVED and value.may_move and "host" in problem.tiers:
            action = "host"
        actions.append(action)
    return actions
