"""Adds up the bytes that are live at each time: the one sweep behind every count of memory.

Who lives when is found elsewhere: storages of a graph in `footprint.py`, blocks of an arena in
`allocator.py`.
"""

from collections.abc import Iterable
from itertools import accumulate


def live_bytes(lives: Iterable[tuple[int, int, int]], times: int) -> list[int]:
    """Bytes live at each of the times 0 to `times - 1`.

    lives  (first, last, nbytes): live from time `first` to time `last`, both included; not at all,
           if `last` comes before `first`

    live_bytes([(0, 2, 8), (1, 1, 4)], 4) == [8, 12, 8, 0]
    """
    change = [0] * (times + 1)
    for first, last, nbytes in lives:
        if first <= last:
            change[first] += nbytes
            change[last + 1] -= nbytes
    return list(accumulate(change[:-1]))
