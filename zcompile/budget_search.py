"""Which of several ways fits a budget, and, where none does, which budget would do. Pure.

A way is tried out as a whole, since what it needs depends on all that is decided after it. Ways
come the best first. Larger budgets are quicker to try than small ones, whose graphs are cut finely.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from zcompile.errors import BudgetExceeded

FAR, STRIDE = 16, 4
"""A budget that is such a part of a roomy one, or less, is come down to in such strides."""
UPWARDS, HALVINGS = 8, 2
"""Budgets tried out, to say which would do: a quarter more each, then halfway between."""

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
        """The first way that fits. raises BudgetExceeded, as said of the one that needs least"""
        refused: list[tuple[Way, BudgetExceeded]] = []
        for way in self.ways(budget):
            if len(refused) > 1 and self._in_vain(way, *refused[-2:]):
                break
            error = self.try_out(way, budget)
            if error is None:
                return way
            refused.append((way, error))
        raise min((error for _, error in refused), key=lambda error: error.needed_bytes)

    def _in_vain(
        self, way: Way, before: tuple[Way, BudgetExceeded], last: tuple[Way, BudgetExceeded]
    ) -> bool:
        """Whether more of the same did not help the last time, and `way` is nothing else."""
        same = self.alike(before[0], last[0]) and self.alike(last[0], way)
        return same and last[1].needed_bytes >= before[1].needed_bytes

    def _would_do(self, budget: int) -> bool:
        try:
            self.first(budget)
        except BudgetExceeded:
            return False
        return True

    def _refusal(
        self, budget: int, nearest: BudgetExceeded, low: int, high: int, known: bool
    ) -> BudgetExceeded:
        """`nearest` and a budget that does, looked for between `low`, which does not, and `high`,
        which should, or is `known` to."""

        def told(needed: int, todo: str) -> BudgetExceeded:
            return BudgetExceeded("device", budget, needed, nearest.where, nearest.alive, todo)

        needed = nearest.needed_bytes
        if (needed < high or not known) and self._would_do(needed):
            high = needed
        elif not known:
            for _ in range(UPWARDS):
                if self._would_do(high):
                    break
                low, high = high, high + high // 4
            else:
                todo = f"give zcompile.offload more device_memory than {low}, or a smaller batch"
                return told(needed, todo)
        for _ in range(HALVINGS):
            middle = (low + high) // 2
            low, high = (low, middle) if self._would_do(middle) else (middle, high)
        return told(high, f"give zcompile.offload device_memory={high} or more, or a smaller batch")


def between(budget: int, roomy: int) -> list[int]:
    """Budgets above `budget`, from the largest down, where it is far below a roomy one."""
    tried: list[int] = []
    if budget * FAR < roomy:
        tried.append(budget * STRIDE)
        while tried[-1] * STRIDE < roomy:
            tried.append(tried[-1] * STRIDE)
    return tried[::-1]
