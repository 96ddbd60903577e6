"""Cuts forward into segments, so that backward recomputes one segment at a time. Pure.

A search that gives up one value after another takes what is cheapest each time: of a chain of
residual sums it recomputes each from the one before, at no cost by itself, until the first op of
backward wants all of them at once. Segments are the other end (Chen et al., arXiv 1604.06174): what
crosses a border between two of them is there, saved or offloaded, and all else is recomputed.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from zcompile.ir.types import NEVER_RECOMPUTED
from zcompile.passes.plan_activations.problem import KEEP, RECOMPUTE, Problem, Value

COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of segments that are tried."""


@dataclass(frozen=True)
class Segments:
    """A cut of forward.

    actions  one per value: those that cross a border as wished, the others recomputed
    borders  values that cross a border between two segments
    """

    actions: tuple[str, ...]
    borders: frozenset[int]


def segments(problem: Problem, wished: Sequence[str]) -> Iterator[Segments]:
    """Forward in more and more segments of about as many bytes, cut where the fewest cross."""
    made = list(accumulate(_made(problem)))
    crossing = list(accumulate(_crossing(problem)))
    seen = set[frozenset[int]]()
    for count in COUNTS:
        parts = range(1, count)
        cuts = sorted({_cut(made, crossing, part / count, 0.5 / count) for part in parts})
        found = frozenset(
            number
            for number, value in enumerate(problem.values)
            if bisect_right(cuts, value.made) < bisect_right(cuts, value.read)
        )
        if found in seen:
            continue
        seen.add(found)
        yield Segments(
            tuple(
                RECOMPUTE if number not in found and _may_be(problem, value, action) else action
                for number, (value, action) in enumerate(zip(problem.values, wished, strict=True))
            ),
            found,
        )


def _may_be(problem: Problem, value: Value, wished: str) -> bool:
    """Whether a value may be recomputed, where nothing else is wished for it."""
    may_repeat = problem.makers[value.maker].may_repeat
    return wished == KEEP and may_repeat and value.wish not in NEVER_RECOMPUTED


def _made(problem: Problem) -> list[int]:
    """Bytes that each time of forward makes."""
    found = [0] * (problem.boundary + 1)
    for value in problem.values:
        found[min(value.made, problem.boundary)] += value.nbytes
    return found


def _crossing(problem: Problem) -> list[int]:
    """Of the bytes that forward has made before a time and reads at it or later: what is added to
    those of the time before."""
    found = [0] * (problem.boundary + 2)
    for value in problem.values:
        if value.made < value.read:
            found[min(value.made + 1, problem.boundary)] += value.nbytes
            found[min(value.read + 1, problem.boundary + 1)] -= value.nbytes
    return found[:-1]


def _cut(made: list[int], crossing: list[int], part: float, around: float) -> int:
    """The time that the fewest bytes cross, of those by which about `part` of all are made."""
    first = bisect_left(made, made[-1] * (part - around))
    last = bisect_left(made, made[-1] * (part + around))
    times = range(max(1, first), max(first, last, 1) + 1)
    return min(times, key=lambda at: (crossing[min(at, len(crossing) - 1)], at))
