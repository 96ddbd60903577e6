"""A packing into so many bytes, found by walking through time with several drafts at once.

Where weights stream through a full arena, every moment is a puzzle of its own, and no order of
blocks solves all of them. So blocks get their addresses as they are born, at one end of a free
range, and the `width` most promising drafts go on (beam search). A draft promises much where
neighbours die together: what it leaves are few holes, for a short time. Work is counted in
candidates, not in seconds, so that the same blocks get the same addresses everywhere.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from zcompile.memory.sections import Sections


class Placed(NamedTuple):
    """A block that lives: bytes [address, end), until section `last`."""

    address: int
    end: int
    last: int


@dataclass
class Work:
    """What may still be tried, in candidates looked at."""

    left: int


@dataclass(frozen=True)
class Draft:
    """Addresses given so far: `taken` in order of addresses, between two walls, and `choice`
    the last one, (block, address, the choice before)."""

    taken: tuple[Placed, ...]
    choice: tuple[int, int, object] | None
    cost: int = 0


Candidate = tuple[int, int, int, int]
"""Cost, number of the draft, place in its `taken` before which to insert, address."""


def time_sweep(
    s: Sections, capacity: int, width: int, work: Work, longest_first: bool = False
) -> list[int] | None:
    """The address of each block with all ends at most `capacity`; None if none was found.

    width          drafts that are kept; the more, the better and the slower
    longest_first  of those born together, rather than the largest first
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
    """The drafts at this section, without the dead; of those that now look alike, the first."""
    alike: dict[tuple[Placed, ...], Draft] = {}
    for draft in drafts:
        taken = tuple([p for p in draft.taken if p.last >= section])
        if taken not in alike:
            cost = sum(_cost(a, b, section) for a, b in pairwise(taken))
            alike[taken] = Draft(taken, draft.choice, cost)
    return list(alike.values())


def _cost(below: Placed, above: Placed, section: int) -> int:
    """How long, from now on, a hole has its end between the two."""
    if below.end == above.address:
        return abs(below.last - above.last)
    return below.last + above.last - 2 * section + 2


def _candidates(drafts: Sequence[Draft], size: int, last: int, section: int) -> list[Candidate]:
    """Every way to put a block at an end of a hole, in every draft."""
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
    """The best drafts with the block, all different."""
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
