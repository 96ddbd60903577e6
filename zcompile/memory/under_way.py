"""Gradients on their way home: which are waited for before another leaves. Pure.

A gradient that has left is held until it is joined, and that happens when another leaves: the
oldest are joined until all that are under way take no more than was planned for that moment. Twice
the largest of them always may, so that one leaves while the next is made. More may where a call
holds less than it does at its peak: what is held is highest where backward begins, and falls as it
goes on, so that a slow link may fall behind compute ever further, and compute need not wait for it.

    held beside them   9 8 6 4 2      of a peak of 11, at the nodes after each gradient
    may be under way   2 3 5 7 9
"""

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Leaving:
    """A gradient leaves.

    at      index of the node with which it does
    nbytes  that travel
    holds   storages that it holds: key -> bytes, index of the last node that holds them anyway
    """

    at: int
    nbytes: int
    holds: Mapping[Hashable, tuple[int, int]]


@dataclass(frozen=True)
class Joins:
    """most  per gradient, bytes that may be under way once it has left, its own included
    until    storage -> index of the node before which it is joined, or of the last of all
    left     storages that are under way when the last node is over
    """

    most: tuple[int, ...]
    until: Mapping[Hashable, int]
    left: frozenset[Hashable]


def plan_joins(leaving: Sequence[Leaving], held: Sequence[int], fills: bool) -> Joins:
    """held   bytes per node, without what is only held since it is under way
    fills  whether as much may be under way as has room below the peak
    """
    end = len(held) - 1
    nexts = [*(gradient.at for gradient in leaving), end][1:]
    tight = _joined(leaving, None, nexts, [0] * len(leaving), end)
    if not fills or not leaving:
        return tight
    peak = max(_with(held, leaving, tight.until))
    room = [
        peak - max(held[gradient.at + 1 : then + 1], default=peak)
        for gradient, then in zip(leaving, nexts, strict=True)
    ]
    return _joined(leaving, tight.most, nexts, room, end)


def _joined(
    leaving: Sequence[Leaving],
    allowed: Sequence[int] | None,
    nexts: Sequence[int],
    room: Sequence[int],
    end: int,
) -> Joins:
    """allowed  bytes under way with each gradient, wherever; None: twice the largest of them
    room     beside what is held anyway, from each gradient to the next
    """
    under_way: deque[Leaving] = deque()
    most: list[int] = []
    until: dict[Hashable, int] = {}
    largest, joined = 2 * max((g.nbytes for g in leaving), default=0), False
    for number, (gradient, then, free) in enumerate(zip(leaving, nexts, room, strict=True)):
        under_way.append(gradient)
        while len(under_way) > 1:
            sizes = [g.nbytes for g in under_way]
            least = 2 * max(sizes) if allowed is None else allowed[number]
            if sum(sizes) <= least or _only_held_by(under_way, then) <= free:
                break
            until |= dict.fromkeys(under_way.popleft().holds, gradient.at)
            joined = True
        sizes = [g.nbytes for g in under_way]
        # As long as none had to be joined, what is left of calls before may be under way as well.
        most.append(sum(sizes) if joined else max(sum(sizes), largest))
    left = frozenset(key for gradient in under_way for key in gradient.holds)
    return Joins(tuple(most), until | dict.fromkeys(left, end), left)


def _only_held_by(under_way: Iterable[Leaving], then: int) -> int:
    """Bytes of storages that nothing else holds until node `then`."""
    held = {key: row for gradient in under_way for key, row in gradient.holds.items()}
    return sum(nbytes for nbytes, last in held.values() if last < then)


def _with(
    held: Sequence[int], leaving: Sequence[Leaving], until: Mapping[Hashable, int]
) -> list[int]:
    """Bytes per node, with what is under way."""
    change = [0] * (len(held) + 1)
    for key, (nbytes, last) in {k: row for g in leaving for k, row in g.holds.items()}.items():
        if until[key] > last:
            change[last + 1] += nbytes
            change[until[key] + 1] -= nbytes
    return [n + more for n, more in zip(held, accumulate(change), strict=False)]
