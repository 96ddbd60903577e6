"""Into how many slices of tokens a region is cut: pure, with a table of cases."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MOST_SLICES = 16
"""A block's hidden values in so many slices are less than what enters and leaves it, which is there
whole; and products of few rows run far under a device's peak."""


@dataclass(frozen=True)
class RegionDemand:
    """Bytes that a region holds at once, whatever becomes of all other values.

    whole   of what enters and leaves it
    sliced  of what is made inside, in one slice of all tokens
    counts  numbers of equal slices that its tokens permit, ascending, from 1 on
    least   of what is made inside, in one slice of all tokens, that one op reads and makes
    """

    whole: int
    sliced: int
    counts: tuple[int, ...] = (1,)
    least: int = 0

    def held(self, slices: int) -> int:
        return self.whole + -(-self.sliced // slices)


def counts_of(count: int, split: tuple[int, int] | None) -> tuple[int, ...]:
    """Numbers of equal slices, each at least twice the one before; where tokens come as batch and
    length, of whole sequences or of equal parts of each."""

    def permits(slices: int) -> bool:
        if count % slices:
            return False
        if split is None or not split[0] % slices:
            return True
        return not slices % split[0] and not split[1] % (slices // split[0])

    found = [1]
    for slices in range(2, min(count, MOST_SLICES) + 1):
        if slices >= 2 * found[-1] and permits(slices):
            found.append(slices)
    return tuple(found)


def choose_slices(demands: Sequence[RegionDemand], room: int) -> tuple[int, ...]:
    """Of each region the fewest slices with which it fits `room` alone; the most, if none does."""
    return tuple(
        next((n for n in demand.counts if demand.held(n) <= room), demand.counts[-1])
        for demand in demands
    )


def finer(demands: Sequence[RegionDemand], slices: Sequence[int]) -> tuple[int, ...] | None:
    """One step on: those that hold most, and all that hold as much, in more slices; None if one
    of these cannot be cut further."""
    most = max((d.held(n) for d, n in zip(demands, slices, strict=True)), default=0)
    made = []
    for demand, count in zip(demands, slices, strict=True):
        if demand.held(count) == most:
            more = [n for n in demand.counts if n > count]
            if not more:
                return None
            count = more[0]
        made.append(count)
    return tuple(made) if made else None


def ways_to_slice(demands: Sequence[RegionDemand], room: int) -> Iterator[tuple[int, ...]]:
    """Nothing sliced, if that may fit; the fewest slices with which each region fits alone; then
    ever more of those that hold most."""
    whole = (1,) * len(demands)
    if all(demand.least <= room for demand in demands):
        yield whole
    tried: tuple[int, ...] | None = choose_slices(demands, room)
    if tried == whole:
        tried = finer(demands, whole)
    while tried is not None:
        yield tried
        tried = finer(demands, tried)
