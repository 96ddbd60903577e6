"""Assigns addresses to blocks with lifetimes, so that no two that are alive together overlap.

Sizes are rounded up to `ALIGNMENT`; times are closed intervals of ints. Pure: same blocks, same
addresses, on every machine. The problem (dynamic storage allocation) is NP-hard, and now and then
nothing fits into the largest live sum. So `pack` tries several methods, cheapest first, until one
needs no more than that:

    first fit   in the orders of `ORDERS`: by size and by area as TensorFlow Lite's planners do
                (Pisarchyk and Lee, arXiv 2001.03288), by lifetime (exact where lives are nested, as
                in backpropagation), by birth (exact for streams of equal sizes), by the peak during
                a life
    best fit    picks the block for the lowest free place (Sekiyama et al., arXiv 1804.10001)
    repair      blocks that stuck out are placed first (squeaky wheel optimization, Joslin and
                Clements, JAIR 1999)
    time sweep  beam search through time: blocks get their addresses as they are born, at one end of
                a free range, and the most promising drafts go on

Where weights stream through a full arena, every moment is a puzzle of its own, and no order of
blocks solves all of them; that is what the time sweep is for. A draft is promising where neighbours
die together: it leaves few holes, for a short time. Work is counted in candidates, not in seconds,
so that the same blocks get the same addresses everywhere.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zcompile.ir.types import ALIGNMENT, aligned
from zcompile.memory.live_bytes import live_bytes


@dataclass(frozen=True)
class Sections:
    """Lifetimes of blocks in canonical form: from section to section, without the clock.

    A section is a stretch of time in which blocks begin to live and none ends. Times matter to a
    packing only in so far as they say who is alive together, so the same lifetimes on two clocks
    (positions of nodes, numbers of regions) have the same sections and are packed alike. MiniMalloc
    (Moffitt, ASPLOS 2023) cuts time in this way. The lists are in the order of the blocks.

    first, last  closed interval of sections that a block lives in
    sizes        in bytes, as packed
    alive        bytes alive in each section
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    sizes: tuple[int, ...]
    alive: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def peak(self) -> int:
        """Largest live sum, in bytes."""
        return max(self.alive, default=0)

    @property
    def pairs(self) -> int:
        """Number of (block, section) pairs: the area of all lifetimes."""
        return sum(b - a + 1 for a, b in zip(self.first, self.last, strict=True))

    def top(self, addresses: Sequence[int]) -> int:
        """End of the highest block."""
        return max((a + s for a, s in zip(addresses, self.sizes, strict=True)), default=0)

    def mirrored(self) -> "Sections":
        """The same with time running backwards; what packs one packs the other."""
        end = len(self.alive) - 1
        return Sections(
            tuple(end - last for last in self.last),
            tuple(end - first for first in self.first),
            self.sizes,
            self.alive[::-1],
        )


def sections(intervals: Sequence[tuple[int, int]], sizes: Sequence[int]) -> Sections:
    """The sections of blocks with these closed intervals of times and these sizes."""
    assert all(first <= last for first, last in intervals), "a block ends before it begins"
    events = sorted(
        [(first, 0, i) for i, (first, _) in enumerate(intervals)]
        + [(last, 1, i) for i, (_, last) in enumerate(intervals)]
    )
    begins, ends = [0] * len(sizes), [0] * len(sizes)
    section, ended = -1, True
    for _, end, block in events:
        if end:
            ends[block] = section
        elif ended:
            section += 1
        if not end:
            begins[block] = section
        ended = bool(end)
    alive = live_bytes(zip(begins, ends, sizes, strict=True), section + 1)
    return Sections(tuple(begins), tuple(ends), tuple(sizes), tuple(alive))


Key = Callable[[Sections, int], tuple[int, ...]]
Ints = npt.NDArray[np.int64]

FEW = 64
"""Blocks that are alive at a time, in the mean, up to which lists are faster than arrays (by timing
on one core). Its square is as many pairs of a block and a section as are few in any case."""


def _area(s: Sections, i: int) -> int:
    """Bytes times sections of block `i`."""
    return s.sizes[i] * (s.last[i] - s.first[i] + 1)


def _peak_during(s: Sections, i: int) -> int:
    """Largest live sum, in bytes, during the life of block `i`."""
    return max(s.alive[s.first[i] : s.last[i] + 1])


ORDERS: tuple[Key, ...] = (
    lambda s, i: (-s.sizes[i], s.first[i], i),
    lambda s, i: (-_area(s, i), s.first[i], i),
    lambda s, i: (-_peak_during(s, i), -_area(s, i), s.first[i], i),
    lambda s, i: (s.first[i] - s.last[i], -s.sizes[i], i),
    lambda s, i: (s.first[i], -s.last[i], i),
    lambda s, i: (s.first[i], -s.sizes[i], i),
    lambda s, i: (-s.last[i], -s.sizes[i], i),
    lambda s, i: (-_peak_during(s, i), s.first[i] - s.last[i], s.first[i], i),
)
"""Sort keys of blocks for first fit, smallest first. The first order is the one that has to be
beaten."""


def ordered(s: Sections, key: Key) -> list[int]:
    return sorted(range(len(s)), key=lambda i: key(s, i))


def first_fit(s: Sections, order: Sequence[int]) -> list[int]:
    """The address of each block, placed in this order, each at the lowest free address."""
    found = _first_fit_within(s, order, sum(s.sizes))
    assert found is not None, "no address is higher than if all blocks lay side by side"
    return found


def _first_fit_within(s: Sections, order: Sequence[int], most: int) -> list[int] | None:
    """The same; None as soon as a block ends beyond `most`."""
    few = s.pairs <= FEW * max(FEW, len(s.alive))
    return _over_sections(s, order, most) if few else _over_arrays(s, order, most)


def _over_sections(s: Sections, order: Sequence[int], most: int) -> list[int] | None:
    """By lists of the places in each section: a block looks only at those that are alive with it,
    so that a stream of many blocks takes time with their number."""
    addresses = [0] * len(s)
    # What is alive with a block is alive when it begins, or begins while it lives.
    alive: list[list[tuple[int, int]]] = [[] for _ in s.alive]
    begun: list[list[tuple[int, int]]] = [[] for _ in s.alive]
    for block in order:
        first, last, size, address = s.first[block], s.last[block], s.sizes[block], 0
        near = alive[first].copy()
        for places in begun[first + 1 : last + 1]:
            near += places
        near.sort()
        for other, end in near:
            if other - address >= size:
                break
            if end > address:
                address = end
        if address + size > most:
            return None
        addresses[block] = address
        place = address, address + size
        begun[first].append(place)
        for places in alive[first : last + 1]:
            places.append(place)
    return addresses


def _over_arrays(s: Sections, order: Sequence[int], most: int) -> list[int] | None:
    addresses = [0] * len(s)
    placed = np.zeros((4, len(s) + 1), np.int64)  # address, end, first, last; by address
    for count, block in enumerate(order):
        first, last, size = s.first[block], s.last[block], s.sizes[block]
        near = np.flatnonzero((placed[2, :count] <= last) & (placed[3, :count] >= first))
        address = _lowest(placed[0, near], placed[1, near], size)
        if address + size > most:
            return None
        addresses[block] = address
        at = int(np.searchsorted(placed[0, :count], address))
        placed[:, at + 1 : count + 1] = placed[:, at:count]
        placed[:, at] = address, address + size, first, last
    return addresses


def _lowest(begins: Ints, ends: Ints, size: int) -> int:
    """The lowest address with `size` free bytes between ranges [begins[i], ends[i]), sorted by
    begin."""
    if not len(begins) or begins[0] >= size:
        return 0
    tops = np.maximum.accumulate(ends)
    wide = begins[1:] - tops[:-1] >= size
    at = int(wide.argmax()) if len(wide) else 0
    return int(tops[at] if len(wide) and wide[at] else tops[-1])


def best_fit(s: Sections) -> list[int]:
    """The address of each block: the longest-lived block that fits goes onto the lowest place.

    A place is a stretch of sections with one height, as wide as it can be. Where no block fits, the
    place is raised to its lower neighbour.
    """
    found = _best_fit_within(s, sum(s.sizes))
    assert found is not None, "no place is higher than all blocks together"
    return found


def _best_fit_within(s: Sections, most: int) -> list[int] | None:
    """The same; None as soon as a block ends beyond `most`."""
    addresses = [0] * len(s)
    left = np.array(ordered(s, lambda s, i: (s.first[i] - s.last[i], -s.sizes[i], i)), np.int64)
    first, last = np.array(s.first, np.int64)[left], np.array(s.last, np.int64)[left]
    free = np.ones(len(s), np.bool_)
    places = [(0, len(s.alive) - 1, 0)]  # (from section, to section, height), by section
    remaining = len(s)
    while remaining:
        # The lowest place, and the longest-lived block that fits it.
        heights = [height for _, _, height in places]
        at = heights.index(min(heights))
        begin, end, height = places[at]
        fitting = free & (first >= begin) & (last <= end)
        pick = int(fitting.argmax())
        if not fitting[pick]:
            # No block fits: raise the place to its lower neighbour.
            beside = [places[k][2] for k in (at - 1, at + 1) if 0 <= k < len(places)]
            _replace(places, at, [(begin, end, min(beside))])
            continue
        block = int(left[pick])
        if height + s.sizes[block] > most:
            return None
        addresses[block], free[pick], remaining = height, False, remaining - 1
        # The block becomes a higher place; the rest of the place stays beside it.
        middle = (s.first[block], s.last[block], height + s.sizes[block])
        around = [(begin, middle[0] - 1, height), middle, (middle[1] + 1, end, height)]
        _replace(places, at, [place for place in around if place[0] <= place[1]])
        # Blocks that are placed are dropped now and then, so that searches stay short.
        if 2 * remaining < len(left):
            left, first, last = left[free], first[free], last[free]
            free = np.ones(remaining, np.bool_)
    return addresses


def _replace(places: list[tuple[int, int, int]], at: int, new: list[tuple[int, int, int]]) -> None:
    """Replace place `at` by `new`; neighbours of one height become one."""
    low, high = max(0, at - 1), min(len(places), at + 2)
    merged: list[tuple[int, int, int]] = []
    for begin, end, height in (*places[low:at], *new, *places[at + 1 : high]):
        if merged and merged[-1][2] == height:
            begin = merged.pop()[0]
        merged.append((begin, end, height))
    places[low:high] = merged


class Placed(NamedTuple):
    """A block that is alive: bytes [address, end), until section `last`."""

    address: int
    end: int
    last: int


@dataclass
class Work:
    """The rest of a search budget, in candidates."""

    left: int


@dataclass(frozen=True)
class Draft:
    """Addresses given so far.

    taken   blocks alive, in order of addresses, between two walls
    choice  the last address given: (block, address, the choice before)
    """

    taken: tuple[Placed, ...]
    choice: tuple[int, int, object] | None
    cost: int = 0


Candidate = tuple[int, int, int, int]
"""(cost, number of the draft, place in its `taken` before which to insert, address)."""


def time_sweep(
    s: Sections, capacity: int, width: int, work: Work, longest_first: bool = False
) -> list[int] | None:
    """The address of each block with all ends at most `capacity`; None if none was found.

    width          drafts that are kept; the more, the better and the slower
    longest_first  whether, of blocks born together, the longest-lived is placed first, not the
                   largest
    """
    newborn: list[list[int]] = [[] for _ in s.alive]
    for block, section in enumerate(s.first):
        newborn[section].append(block)
    never = len(s.alive)
    drafts = [Draft((Placed(-1, 0, never), Placed(capacity, capacity + 1, never)), None)]
    for section, blocks in enumerate(newborn):
        drafts = _aged(drafts, section)
        for block in _in_turn(s, blocks, longest_first):
            found = _candidates(drafts, s.sizes[block], s.last[block], section)
            work.left -= len(found) + sum(len(d.taken) for d in drafts)
            drafts = _kept(drafts, found, block, s, width)
            if not drafts or work.left < 0:
                return None
    return _addresses(drafts[0], len(s))


def _in_turn(s: Sections, blocks: Iterable[int], longest_first: bool) -> list[int]:
    if longest_first:
        return sorted(blocks, key=lambda i: (-s.last[i], -s.sizes[i], i))
    return sorted(blocks, key=lambda i: (-s.sizes[i], -s.last[i], i))


def _aged(drafts: Iterable[Draft], section: int) -> list[Draft]:
    """The drafts at this section, without blocks that are dead; of equal drafts, the first."""
    alike: dict[tuple[Placed, ...], Draft] = {}
    for draft in drafts:
        taken = tuple([p for p in draft.taken if p.last >= section])
        if taken not in alike:
            cost = sum(_cost(a, b, section) for a, b in pairwise(taken))
            alike[taken] = Draft(taken, draft.choice, cost)
    return list(alike.values())


def _cost(below: Placed, above: Placed, section: int) -> int:
    """How many sections, from `section` on, a hole has its end between two neighbours."""
    if below.end == above.address:
        return abs(below.last - above.last)
    return below.last + above.last - 2 * section + 2


def _candidates(drafts: Sequence[Draft], size: int, last: int, section: int) -> list[Candidate]:
    """Every address for a block at an end of a hole, in every draft."""
    found: list[Candidate] = []
    lasting = last - section + 1
    for number, draft in enumerate(drafts):
        below = draft.taken[0]
        for at, above in enumerate(draft.taken):
            room = above.address - below.end
            if room >= size:
                sides = abs(below.last - last), abs(above.last - last)
                cost = draft.cost - _cost(below, above, section)
                if room == size:
                    found.append((cost + sum(sides), number, at, below.end))
                else:
                    open_above = lasting + above.last - section + 1
                    open_below = lasting + below.last - section + 1
                    found.append((cost + sides[0] + open_above, number, at, below.end))
                    found.append((cost + sides[1] + open_below, number, at, above.address - size))
            below = above
    return found


def _kept(
    drafts: Sequence[Draft], found: list[Candidate], block: int, s: Sections, width: int
) -> list[Draft]:
    """The `width` best drafts with the block, all different."""
    kept: dict[tuple[Placed, ...], Draft] = {}
    for cost, number, at, address in sorted(found, key=itemgetter(0)):
        draft = drafts[number]
        placed = Placed(address, address + s.sizes[block], s.last[block])
        taken = (*draft.taken[:at], placed, *draft.taken[at:])
        if taken not in kept:
            kept[taken] = Draft(taken, (block, address, draft.choice), cost)
            if len(kept) == width:
                break
    return list(kept.values())


def _addresses(draft: Draft, count: int) -> list[int]:
    addresses = [0] * count
    choice = draft.choice
    while choice is not None:
        block, address, choice = choice  # type: ignore[assignment]
        addresses[block] = address
    return addresses


NEAR = 1.005
"""Ratio to the largest live sum from which on a packing is good enough to skip another time
sweep."""
WIDTHS = (8, 64, 512)
"""Drafts of the time sweep, round by round, as long as there is work left."""
SWEEP_WORK = 1_000_000
"""Candidates of all time sweeps in one `pack`: under a second on one core."""
ORDER_WORK = 450_000_000
"""Pairs of blocks compared by all orders in one `pack`: a few seconds with 10,000 blocks."""
REPAIRS = 8
"""Most rounds of repair."""


@dataclass(frozen=True)
class Block:
    """A block of memory with a lifetime.

    first, last  closed interval of times that its bytes are taken
    nbytes       size before rounding
    """

    first: int
    last: int
    nbytes: int


def live_peak(blocks: Sequence[Block]) -> int:
    """Largest sum of bytes alive at one time: lower bound of any packing."""
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
    """As `pack`, without any search: for a caller that asks often."""
    s = _sections(blocks)
    best = _Best(s)
    best.offer(first_fit(s, ordered(s, ORDERS[0])))
    if best.top > s.peak:
        best.offer(best_fit(s))
    return tuple(best.addresses)


def fits_quickly(blocks: Sequence[Block], budget_bytes: int) -> bool:
    """Whether addresses that `pack_quickly` finds end within the budget; told sooner."""
    s = _sections(blocks)
    if s.peak > budget_bytes:
        return False
    order = ordered(s, ORDERS[0])
    if _first_fit_within(s, order, budget_bytes) is not None:
        return True
    return _best_fit_within(s, budget_bytes) is not None


def fits(blocks: Sequence[Block], budget_bytes: int) -> tuple[int, ...] | None:
    """Addresses with which the blocks fit the budget; None if none were found.

    Quick where the answer is easy. Never None for a budget of what `pack` needs, or more.
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

    How many there are depends on the blocks alone, and their addresses on nothing else.
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
    """Lower the best packing by time sweeps, until its top is `enough` or out of work.

    First into the largest live sum itself, then, by bisection, into capacities between that and the
    best so far, with more and more drafts. The capacities do not depend on `enough`, so that `fits`
    finds whatever `pack` does.
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
    """The first packing that fits `capacity`: time forwards and backwards, largest and
    longest-lived first."""
    for way, longest in ways:
        addresses = time_sweep(way, capacity, width, work, longest)
        if addresses is not None or work.left < 0:
            return addresses
    return None
