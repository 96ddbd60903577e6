"""Which of several ways fits a budget, and, where none does, which budget would do. Pure.

A way is tried out as a whole, since what it needs depends on all that is decided after it. Ways
come the best first, and the last is the one that should need least. Larger budgets are quicker to
try than small ones, whose graphs are cut finely.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Generic, TypeVar

from zcompile.errors import BudgetExceeded

FAR, STRIDE = 16, 4
"""A budget that is such a part of a roomy one, or less, is come down to in such strides."""
GUESSES, SPARE = 3, 32
"""What the last way needs is tried as a budget so often, with such a part more each time: what is
chosen changes with the budget, and what is needed with that."""
UPWARDS, HALVINGS, NEAR = 8, 4, 8
"""Budgets tried out, to say which would do: a quarter more each, then halfway between in
proportion, until what does not is within such a part of what does."""

Way = TypeVar("Way")


@dataclass(frozen=True)
class BudgetSearch(Generic[Way]):
    """ways   of a budget, the best first; one at least
    try_out   a way within a budget: what is said against it, or None
    alike     whether of two ways, one after the other, the later is only more of the same
    """

    ways: Callable[[int], Iterable[Way]]
    try_out: Callable[[Way, int], BudgetExceeded | None]
    alike: Callable[[Way, Way], bool] = lambda _way, _later: True

    def best(self, budget: int, roomy: int) -> Way:
        """The first way with which everything fits `budget`.

        roomy   a budget that should hold everything, whichever way
        raises  BudgetExceeded, with a budget that was tried out and does
        """
        enough, known = roomy, False
        for tried in (*between(budget, roomy), budget):
            try:
                found = self.first(tried)
            except BudgetExceeded as nearest:
                raise self._refusal(budget, nearest, tried, enough, known) from None
            enough, known = tried, True
        return found

    def first(self, budget: int) -> Way:
        """The first way that fits. Once more of the same will hardly help, only the last is tried.

        raises  BudgetExceeded, as said of the one that needs least
        """
        refused: list[tuple[Way, BudgetExceeded]] = []
        ways = list(self.ways(budget))
        while ways:
            way = ways.pop(0)
            error = self.try_out(way, budget)
            if error is None:
                return way
            refused.append((way, error))
            if ways and self._in_vain(refused[-2:], ways[0], budget):
                ways = ways[-1:]
        raise min((error for _, error in refused), key=lambda error: error.needed_bytes)

    def _in_vain(
        self, refused: Sequence[tuple[Way, BudgetExceeded]], way: Way, budget: int
    ) -> bool:
        """Whether `way` is more of the same as the two refused last, which saved less than still is
        to be saved: finer and finer tiles save less each time."""
        if len(refused) < 2:
            return False
        (first, more), (then, less) = refused
        same = self.alike(first, then) and self.alike(then, way)
        return same and more.needed_bytes - less.needed_bytes < less.needed_bytes - budget

    def _against(self, budget: int) -> BudgetExceeded | None:
        """What is said of the last way: if nothing is, `first` finds one, this or a better."""
        *_, last = self.ways(budget)
        return self.try_out(last, budget)

    def _refusal(
        self, budget: int, nearest: BudgetExceeded, low: int, high: int, known: bool
    ) -> BudgetExceeded:
        """`nearest` and a budget that does, looked for between `low`, which does not, and `high`,
        which should, or is `known` to."""

        def told(needed: int, todo: str) -> BudgetExceeded:
            return BudgetExceeded("device", budget, needed, nearest.where, nearest.alive, todo)

        tried = max(nearest.needed_bytes, low + 1)
        for _ in range(GUESSES):
            if tried >= high and known:
                break
            error = self._against(tried)
            if error is None:
                high, known = tried, True
                break
            low = max(low, tried)
            tried = max(tried, error.needed_bytes) * (SPARE + 1) // SPARE
        if not known:
            high = max(high, tried)
        for _ in range(UPWARDS):
            if known or self._against(high) is None:
                break
            low, high = high, high + high // 4
        else:
            todo = f"give zcompile.offload more device_memory than {low}, or a smaller batch"
            return told(nearest.needed_bytes, todo)
        for _ in range(HALVINGS):
            if (high - low) * NEAR <= high:
                break
            middle = isqrt(low * high)  # what is told is to be near in proportion
            low, high = (low, middle) if self._against(middle) is None else (middle, high)
        return told(high, f"give zcompile.offload device_memory={high} or more, or a smaller batch")


def between(budget: int, roomy: int) -> list[int]:
    """Budgets above `budget`, from the largest down, where it is far below a roomy one."""
    tried: list[int] = []
    if budget * FAR < roomy:
        tried.append(budget * STRIDE)
        while tried[-1] * STRIDE < roomy:
            tried.append(tried[-1] * STRIDE)
    return tried[::-1]
