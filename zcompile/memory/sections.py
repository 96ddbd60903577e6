"""Live ranges in canonical form: when blocks are alive, without the clock they were told in.

Times matter to a packing only in so far as they say who is alive together. A section is a stretch
of time in which blocks begin to live and none ends; every block lives from one section to
another. Two tellings of the same story (positions of nodes, numbers of regions) have the same
sections, so that they are packed alike. MiniMalloc (Moffitt, ASPLOS 2023) cuts time in this way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Sections:
    """Blocks over sections; the lists are in the order of the blocks.

    first, last  the closed interval of sections a block lives in
    sizes        in bytes, as packed
    alive        bytes alive, section by section
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    sizes: tuple[int, ...]
    alive: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def peak(self) -> int:
        return max(self.alive, default=0)

    @property
    def pairs(self) -> int:
        """How many (block, section) there are: the area of all live ranges."""
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
    """From closed intervals of times, one for each size."""
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
    changes = [0] * (section + 2)
    for begin, last, size in zip(begins, ends, sizes, strict=True):
        changes[begin] += size
        changes[last + 1] -= size
    alive = tuple(accumulate(changes[:-1]))
    return Sections(tuple(begins), tuple(ends), tuple(sizes), alive)
