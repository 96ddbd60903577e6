"""Packings made block by block in a fixed order; the order is what tells them apart.

`first_fit` puts each block of an order at the lowest address that is free while it lives. `ORDERS`
are those worth trying: by size and by area as TensorFlow Lite's planners do (Pisarchyk and Lee,
arXiv 2001.03288), by lifetime (exact where lives are nested, as in backpropagation), by birth
(exact for streams of equal sizes), and by how full the fullest moment of a life is. `best_fit`
goes the other way round and picks the block for the lowest free place (Sekiyama et al., arXiv
1804.10001).
"""

from bisect import insort
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from zcompile.memory.sections import Sections

Key = Callable[[Sections, int], tuple[int, ...]]
Ints = npt.NDArray[np.int64]

MANY = 600
"""Blocks from which on arrays are faster than lists (by timing, on one core)."""


def _area(s: Sections, i: int) -> int:
    return s.sizes[i] * (s.last[i] - s.first[i] + 1)


def _fullest(s: Sections, i: int) -> int:
    return max(s.alive[s.first[i] : s.last[i] + 1])


ORDERS: tuple[Key, ...] = (
    lambda s, i: (-s.sizes[i], s.first[i], i),
    lambda s, i: (-_area(s, i), s.first[i], i),
    lambda s, i: (-_fullest(s, i), -_area(s, i), s.first[i], i),
    lambda s, i: (s.first[i] - s.last[i], -s.sizes[i], i),
    lambda s, i: (s.first[i], -s.last[i], i),
    lambda s, i: (s.first[i], -s.sizes[i], i),
    lambda s, i: (-s.last[i], -s.sizes[i], i),
    lambda s, i: (-_fullest(s, i), s.first[i] - s.last[i], s.first[i], i),
)
"""What blocks are sorted by, least first. The first is the one that has to be beaten."""


def ordered(s: Sections, key: Key) -> list[int]:
    return sorted(range(len(s)), key=lambda i: key(s, i))


def first_fit(s: Sections, order: Sequence[int]) -> list[int]:
    """The address of each block, placed in this order, each as low as it can be."""
    return _over_lists(s, order) if len(s) < MANY else _over_arrays(s, order)


def _over_lists(s: Sections, order: Sequence[int]) -> list[int]:
    addresses = [0] * len(s)
    placed: list[tuple[int, int, int, int]] = []  # (address, end, first, last), by address
    for block in order:
        first, last, size, address = s.first[block], s.last[block], s.sizes[block], 0
        for other, end, begins, ends in placed:
            if begins > last or ends < first:
                continue
            if other - address >= size:
                break
            if end > address:
                address = end
        addresses[block] = address
        insort(placed, (address, address + size, first, last))
    return addresses


def _over_arrays(s: Sections, order: Sequence[int]) -> list[int]:
    addresses = [0] * len(s)
    placed = np.zeros((4, len(s) + 1), np.int64)  # address, end, first, last; by address
    for count, block in enumerate(order):
        first, last, size = s.first[block], s.last[block], s.sizes[block]
        near = np.flatnonzero((placed[2, :count] <= last) & (placed[3, :count] >= first))
        address = _lowest(placed[0, near], placed[1, near], size)
        addresses[block] = address
        at = int(np.searchsorted(placed[0, :count], address))
        placed[:, at + 1 : count + 1] = placed[:, at:count]
        placed[:, at] = address, address + size, first, last
    return addresses


def _lowest(begins: Ints, ends: Ints, size: int) -> int:
    """The lowest address with `size` free bytes between these ranges, which begin in order."""
    if not len(begins) or begins[0] >= size:
        return 0
    tops = np.maximum.accumulate(ends)
    wide = begins[1:] - tops[:-1] >= size
    at = int(wide.argmax()) if len(wide) else 0
    return int(tops[at] if len(wide) and wide[at] else tops[-1])


def best_fit(s: Sections) -> list[int]:
    """The address of each block: the longest-lived that fits goes onto the lowest place.

    A place is a stretch of sections with one height, as wide as it can be. Where nothing fits it
    is raised to its lower neighbour.
    """
    addresses = [0] * len(s)
    left = np.array(ordered(s, lambda s, i: (s.first[i] - s.last[i], -s.sizes[i], i)), np.int64)
    first, last = np.array(s.first, np.int64)[left], np.array(s.last, np.int64)[left]
    free = np.ones(len(s), np.bool_)
    places = [(0, len(s.alive) - 1, 0)]  # (from section, to section, height), by section
    remaining = len(s)
    while remaining:
        heights = [height for _, _, height in places]
        at = heights.index(min(heights))
        begin, end, height = places[at]
        fitting = free & (first >= begin) & (last <= end)
        pick = int(fitting.argmax())
        if not fitting[pick]:
            beside = [places[k][2] for k in (at - 1, at + 1) if 0 <= k < len(places)]
            _replace(places, at, [(begin, end, min(beside))])
            continue
        block = int(left[pick])
        addresses[block], free[pick], remaining = height, False, remaining - 1
        middle = (s.first[block], s.last[block], height + s.sizes[block])
        around = [(begin, middle[0] - 1, height), middle, (middle[1] + 1, end, height)]
        _replace(places, at, [place for place in around if place[0] <= place[1]])
        if 2 * remaining < len(left):
            left, first, last = left[free], first[free], last[free]
            free = np.ones(remaining, np.bool_)
    return addresses


def _replace(places: list[tuple[int, int, int]], at: int, new: list[tuple[int, int, int]]) -> None:
    """Put `new` in the place of one; neighbours of one height become one."""
    low, high = max(0, at - 1), min(len(places), at + 2)
    merged: list[tuple[int, int, int]] = []
    for begin, end, height in (*places[low:at], *new, *places[at + 1 : high]):
        if merged and merged[-1][2] == height:
            begin = merged.pop()[0]
        merged.append((begin, end, height))
    places[low:high] = merged
