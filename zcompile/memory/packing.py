"""Addresses from live ranges: which buffer lies where, so that nothing alive overlaps.

Sizes are rounded up to `ALIGNMENT`; times are closed intervals of ints. Pure: same blocks, same
addresses, on every machine. The problem (dynamic storage allocation) is NP-hard, and now and then
nothing fits into the largest live sum; so several ways are tried, cheapest first, until one needs
no more than that: the orders of `first_fit`, best fit, what stuck out placed first (squeaky wheel
optimization, Joslin and Clements, JAIR 1999), and a beam search through time (`time_sweep`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zcompile.ir.types import ALIGNMENT, aligned
from zcompile.memory.first_fit import ORDERS, best_fit, first_fit, ordered
from zcompile.memory.sections import Sections, sections
from zcompile.memory.time_sweep import Work, time_sweep

NEAR = 1.005
"""Of the largest live sum: so close, a packing is not worth another search through time."""
WIDTHS = (8, 64, 512)
"""Drafts of the search through time, round by round, as long as there is work left."""
SWEEP_WORK = 1_000_000
"""Candidates of all searches through time in one `pack`: under a second on one core."""
ORDER_WORK = 450_000_000
"""Pairs of blocks compared by all orders in one `pack`: a few seconds with 10,000 blocks."""
REPAIRS = 8
"""How often what stuck out is placed first."""


@dataclass(frozen=True)
class Block:
    """first, last  the closed interval of times the bytes are taken
    nbytes          size before rounding
    """

    first: int
    last: int
    nbytes: int


def live_peak(blocks: Sequence[Block]) -> int:
    """The largest sum of bytes alive at one time: no packing can need less."""
    return _sections(blocks).peak


def pack(blocks: Sequence[Block]) -> tuple[int, ...]:
    """The address of each block, in the order given."""
    s = _sections(blocks)
    best = _Best(s)
    for addresses in _ordered_attempts(s):
        best.offer(addresses)
        if best.top <= s.peak:
            return tuple(best.addresses)
    _search(best, s.peak, Work(SWEEP_WORK))
    return tuple(best.addresses)


def pack_quickly(blocks: Sequence[Block]) -> tuple[int, ...]:
    """As `pack`, without any search: for a caller that asks again and again."""
    s = _sections(blocks)
    best = _Best(s)
    best.offer(first_fit(s, ordered(s, ORDERS[0])))
    if best.top > s.peak:
        best.offer(best_fit(s))
    return tuple(best.addresses)


def fits(blocks: Sequence[Block], budget_bytes: int) -> tuple[int, ...] | None:
    """Addresses with which the blocks fit the budget, or None if none were found.

    Quick where the answer is easy. Never None for what `pack` needs, or more.
    """
    s = _sections(blocks)
    if s.peak > budget_bytes:
        return None
    best = _Best(s)
    for addresses in _ordered_attempts(s):
        best.offer(addresses)
        if best.top <= budget_bytes:
            return tuple(best.addresses)
    straight = time_sweep(s, budget_bytes // ALIGNMENT * ALIGNMENT, WIDTHS[0], Work(SWEEP_WORK))
    if straight is not None:
        return tuple(straight)
    _search(best, budget_bytes, Work(SWEEP_WORK))
    return tuple(best.addresses) if best.top <= budget_bytes else None


def packed_bytes(blocks: Sequence[Block], addresses: Sequence[int]) -> int:
    """End of the highest block."""
    return max((a + aligned(b.nbytes) for a, b in zip(addresses, blocks, strict=True)), default=0)


def _sections(blocks: Sequence[Block]) -> Sections:
    return sections([(b.first, b.last) for b in blocks], [aligned(b.nbytes) for b in blocks])


class _Best:
    """The lowest of the packings offered."""

    def __init__(self, s: Sections) -> None:
        self.sections = s
        self.addresses: Sequence[int] = ()
        self.top = sum(s.sizes) + 1

    def offer(self, addresses: Sequence[int]) -> None:
        if (top := self.sections.top(addresses)) < self.top:
            self.addresses, self.top = addresses, top


def _ordered_attempts(s: Sections) -> Iterator[Sequence[int]]:
    """Packings made in one go: first fit by size, best fit, other orders, repairs of the best.

    How many depends on the blocks alone, and their addresses on nothing else.
    """
    most = max(1, ORDER_WORK // max(1, len(s) ** 2))
    best = _Best(s)
    best.offer(first_fit(s, ordered(s, ORDERS[0])))
    yield best.addresses
    yield (addresses := best_fit(s))
    best.offer(addresses)
    for key in ORDERS[1:most]:
        yield (addresses := first_fit(s, ordered(s, key)))
        best.offer(addresses)
    order = sorted(range(len(s)), key=lambda i: (best.addresses[i], i))
    for _ in range(min(REPAIRS, max(0, most - len(ORDERS)))):
        yield (addresses := first_fit(s, order))
        out = {i for i in order if addresses[i] + s.sizes[i] > s.peak}
        order = [i for i in order if i in out] + [i for i in order if i not in out]


def _search(best: _Best, enough: int, work: Work) -> None:
    """Lower the best packing by searches through time, until `enough` or out of work.

    First into the largest live sum itself, then, by bisection, into what lies between that and
    the best so far, with more and more drafts. What is tried does not depend on `enough`, so that
    `fits` finds whatever `pack` does.
    """
    s = best.sections
    ways = [(way, longest) for longest in (False, True) for way in (s, s.mirrored())]
    for width in WIDTHS:
        capacity, low = s.peak, s.peak - ALIGNMENT
        while low < capacity < best.top and best.top > max(enough, NEAR * s.peak):
            found = _first_found(ways, capacity, width, work)
            if found is not None:
                best.offer(found)
            elif work.left < 0:
                return
            else:
                low = capacity
            capacity = (low + best.top) // 2 // ALIGNMENT * ALIGNMENT


def _first_found(
    ways: Sequence[tuple[Sections, bool]], capacity: int, width: int, work: Work
) -> list[int] | None:
    """Of searches forwards and backwards, the largest first and the longest-lived first."""
    for way, longest in ways:
        addresses = time_sweep(way, capacity, width, work, longest)
        if addresses is not None or work.left < 0:
            return addresses
    return None
