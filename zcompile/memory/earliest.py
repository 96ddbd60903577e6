"""Gives each fetched value an address, and with it the time from which that is free.

`allocator.py` finds addresses for blocks whose lifetimes are known. Of a fetch only the end is: its
value is there until its last reader, and may come as early as there is a place for it. So values
are given places in the order of their first readers, each where it can start soonest:

    window of 4, all values of 2       address 0   a until 0 | c until 2 .....
    last readers of a, b, c: 0, 1, 2   address 2   b until 1 ......
                                       c starts before region 1, behind a

Of a stream of many small values and a few large ones this fills a window to the brim, where starts
that are chosen first leave holes: small values go to one end, and large ones to the other, so that
they leave each other whole ranges. Pure.
"""

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from zcompile.ir.types import ALIGNMENT, aligned
from zcompile.memory.window import Need

LARGE_PART = 8
"""A value that takes one part in so many of the window, or more, is large."""
WORK = 500_000
"""Ranges that are looked at for all values, at most: under a second on one core. Each value looks
at all of a window, so that a stream of many into a wide window would take minutes."""


class Place(NamedTuple):
    """An address, and the first region before which nothing lies there any more."""

    address: int
    free_from: int


class _Range(NamedTuple):
    """Bytes [begin, end) that are free from before a region on."""

    begin: int
    end: int
    free_from: int


def earliest_places(needs: Sequence[Need], budget_bytes: int) -> list[Place] | None:
    """The place of each value, within the budget; None where some value has none by the time of
    its first reader, or where finding all of them takes more than `WORK`.

    Needs come in the order of their first readers.
    """
    whole = budget_bytes // ALIGNMENT * ALIGNMENT
    ranges, found, work = [_Range(0, whole, 0)], list[Place](), 0
    for need in needs:
        work += len(ranges)
        if work > WORK:
            return None
        size = aligned(need.nbytes)
        large = size * LARGE_PART >= whole
        place = _soonest_from_top(ranges, size) if large else _soonest(ranges, size)
        if place is None or place.free_from > need.first:
            return None
        found.append(place)
        _take(ranges, _Range(place.address, place.address + size, need.last + 1))
    return found


def _soonest(ranges: Sequence[_Range], size: int) -> Place | None:
    """The place of so many bytes that is free soonest, of such the lowest."""
    best: Place | None = None
    for n, (address, _, free_from) in enumerate(ranges):
        for _, end, then in ranges[n:]:
            free_from = max(free_from, then)
            if best is not None and free_from >= best.free_from:
                break
            if end >= address + size:
                best = Place(address, free_from)
                break
    return best


def _soonest_from_top(ranges: Sequence[_Range], size: int) -> Place | None:
    """The same; of places that are free as soon the highest."""
    whole = ranges[-1].end
    mirrored = [_Range(whole - r.end, whole - r.begin, r.free_from) for r in reversed(ranges)]
    place = _soonest(mirrored, size)
    return None if place is None else Place(whole - place.address - size, place.free_from)


def _take(ranges: list[_Range], taken: _Range) -> None:
    """Put one more range on top of those below it; neighbours that are free from the same time on
    become one."""
    begin, end, _ = taken
    first = bisect_right(ranges, begin, key=attrgetter("begin")) - 1
    last = first
    while ranges[last].end < end:
        last += 1
    low, high = ranges[first], ranges[last]
    cut = [
        _Range(low.begin, begin, low.free_from),
        taken,
        _Range(end, high.end, high.free_from),
    ]
    around = [*ranges[max(0, first - 1) : first], *cut, *ranges[last + 1 : last + 2]]
    made: list[_Range] = []
    for r in around:
        if r.begin >= r.end:
            continue
        if made and made[-1].free_from == r.free_from:
            made[-1] = _Range(made[-1].begin, r.end, r.free_from)
        else:
            made.append(r)
    ranges[max(0, first - 1) : last + 2] = made
