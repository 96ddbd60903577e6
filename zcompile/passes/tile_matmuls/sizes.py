"""Chooses which weights are cut into tiles, and how large those are: pure, with a table of cases.

A weight that is read whole must be in the arena whole. What the budget cannot hold at once is cut
along its first dimension: a tile is gathered, used and given back, while the next one is in flight.
Tiles of whole disk blocks travel without a copy, and tiles of one size are one structure to
compile, so all but the last are alike.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from zcompile.ir.types import aligned

DISK_GRANULE = 4096
"""Bytes. A range that begins and ends at multiples of it can be read from disk straight into
place."""
SHARES = 2
"""Tiles of a weight on the device at once: one in use, and the next one in flight."""
PARTS = 2
"""Without `tile_bytes`, the tiles of a cut weight take at most one part in so many of the budget:
the rest is for what is read beside it."""
BUDGET_PARTS = (1, 2, 4, 8, 16)
"""Candidates: gathered values may take the budget divided by these; the rest is for what is
computed."""
MOST_TILES = 512
"""Most tiles of one weight. Each is a handful of graph nodes and a transfer; smaller ones cost more
in starting than in moving."""


def choose_tiles(rows: int, row_nbytes: int, most_nbytes: int) -> tuple[int, ...]:
    """Rows of each tile, none of more than `most_nbytes` as far as whole rows permit.

    All but the last are alike, and whole disk blocks where a tile has room for that.

    choose_tiles(10, 4096, 12288) == (3, 3, 3, 1)
    """
    least = -(-rows // MOST_TILES)
    size = min(rows, max(1, most_nbytes // max(1, row_nbytes), least))
    unit = DISK_GRANULE // gcd(DISK_GRANULE, max(1, row_nbytes))
    if unit > size:
        unit = 1
    size = max(size // unit, -(-least // unit)) * unit if size < rows else rows
    tiles = -(-rows // size)
    even = -(-rows // tiles)  # as large as so many tiles need to be
    size = min(size, -(-even // unit) * unit)
    return tuple(min(size, rows - begin) for begin in range(0, rows, size))


@dataclass(frozen=True)
class GatheredValue:
    """A gathered value: it is in the arena from its first read to its last.

    key         of the parameter; values of one parameter are cut alike
    reads       positions in the order of compute, ascending
    nbytes      of the value
    row_nbytes  of one row of it; 0: it cannot be cut
    """

    key: str
    reads: tuple[int, ...]
    nbytes: int
    row_nbytes: int


def choose_cuts(
    gathered: Sequence[GatheredValue], budget_bytes: int | None, tile_bytes: int | None
) -> Mapping[str, int]:
    """Parameters to cut -> the most bytes of a tile.

    Where reads of several values meet and the budget cannot hold them all, the largest that can be
    cut is, until they fit; where nothing can be cut any more, later passes refuse the budget.

    tile_bytes  every value of more than this is cut, and two tiles take no more; None: only what
                the budget cannot hold is cut
    """
    cut: dict[str, int] = {}
    for value in gathered:
        if tile_bytes is not None and value.row_nbytes and value.nbytes > tile_bytes:
            cut[value.key] = tile_bytes // SHARES
    if budget_bytes is None:
        return cut
    while True:
        taken, place = peak(gathered, cut)
        if taken <= budget_bytes:
            break
        found = [h for h in alive(gathered, place) if h.row_nbytes and h.key not in cut]
        if not found:
            break
        largest = max(found, key=lambda h: (h.nbytes, h.key))
        cut[largest.key] = min(tile_bytes or budget_bytes, budget_bytes) // PARTS // SHARES
    return {key: min(most, _room(key, gathered, cut, budget_bytes)) for key, most in cut.items()}


def cut_candidates(
    gathered: Sequence[GatheredValue], budget_bytes: int | None, tile_bytes: int | None
) -> Iterator[Mapping[str, int]]:
    """`choose_cuts` for the budget, half of it, ...: what gathered values may take."""
    found: list[Mapping[str, int]] = []
    for part in BUDGET_PARTS if budget_bytes is not None else BUDGET_PARTS[:1]:
        cuts = choose_cuts(gathered, budget_bytes and budget_bytes // part, tile_bytes)
        if cuts not in found:
            found.append(cuts)
            yield cuts


def alive(gathered: Sequence[GatheredValue], place: int) -> list[GatheredValue]:
    """Values that are in the arena at a position."""
    return [h for h in gathered if h.reads[0] <= place <= h.reads[-1]]


def peak(gathered: Sequence[GatheredValue], cut: Mapping[str, int]) -> tuple[int, int]:
    """Largest sum of bytes in the arena, and its position. Of a cut value one row counts, where it
    is read."""
    change: dict[int, int] = {}
    for value in gathered:
        spans = (
            [(p, p) for p in value.reads]
            if value.key in cut
            else [(value.reads[0], value.reads[-1])]
        )
        nbytes = aligned(value.row_nbytes if value.key in cut else value.nbytes)
        for first, last in spans:
            # Twice a place and one: what ends at a place is gathered there, what begins there too.
            change[2 * first] = change.get(2 * first, 0) + nbytes
            change[2 * last + 1] = change.get(2 * last + 1, 0) - nbytes
    most = now = where = 0
    for place in sorted(change):
        now += change[place]
        if now > most:
            most, where = now, place // 2
    return most, where


def _room(
    key: str, gathered: Sequence[GatheredValue], cut: Mapping[str, int], budget_bytes: int
) -> int:
    """The most bytes of a tile for which two fit beside all that is read with it.

    For which one fits, if two would be less than a row each.
    """
    own = [h for h in gathered if h.key == key]
    others = [h for h in gathered if h.key != key and h.key not in cut]
    beside = max(
        sum(aligned(h.nbytes) for h in alive(others, place)) for h in own for place in h.reads
    )
    room, row = budget_bytes - beside, max(h.row_nbytes for h in own)
    return room // SHARES if room // SHARES >= aligned(row) else room
