"""Where weights are cut, as tables; and what every choice keeps, whatever is asked."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zcompile.ir.types import aligned
from zcompile.passes.tile_matmuls.sizes import MOST_TILES, GatheredValue, choose_cuts, choose_tiles

K = 1024


@pytest.mark.parametrize(
    ("rows", "row_nbytes", "most_nbytes", "chosen"),
    [
        (8, 4 * K, 32 * K, (8,)),  # it fits
        (8, 4 * K, 16 * K, (4, 4)),
        (8, 4 * K, 12 * K, (3, 3, 2)),  # the last may be smaller
        (9, 4 * K, 32 * K, (5, 4)),  # no larger than two tiles need to be
        (8, 4 * K, 1, (1,) * 8),  # never less than a row
        (16, 1 * K, 6 * K, (4, 4, 4, 4)),  # whole granules of the disk
        (16, 1 * K, 3 * K, (3, 3, 3, 3, 3, 1)),  # too small for them
        (7, 3 * K, 13 * K, (4, 3)),
        (1, 4 * K, 16, (1,)),
        (3, 0, 16, (3,)),  # rows without bytes
    ],
)
def test_choose_tiles(rows, row_nbytes, most_nbytes, chosen):
    assert choose_tiles(rows, row_nbytes, most_nbytes) == chosen


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 10**6))
@example(2049, 1024, 1)  # whole granules would make one tile too many
def test_tiles_cover_all_rows_and_are_alike(rows, row_nbytes, most_nbytes):
    tiles = choose_tiles(rows, row_nbytes, most_nbytes)
    assert sum(tiles) == rows
    assert len(tiles) <= MOST_TILES
    assert len(set(tiles[:-1])) <= 1
    assert 0 < tiles[-1] <= tiles[0]
    if tiles[0] > 1 and len(tiles) < MOST_TILES // 2:
        assert tiles[0] * row_nbytes <= max(most_nbytes, row_nbytes)


def held(key, *reads, kib=8, row=64):
    return GatheredValue(key, reads, kib * K, row)


@pytest.mark.parametrize(
    ("values", "budget", "tile_bytes", "chosen"),
    [
        ([held("a", 1), held("b", 2)], 8 * K, None, {}),  # one after the other
        ([held("a", 1), held("b", 1)], 16 * K, None, {}),
        ([held("a", 1), held("b", 1, kib=2)], 8 * K, None, {"a": 2 * K}),  # the larger one
        ([held("a", 1), held("b", 1, kib=6)], 8 * K, None, {"a": 1 * K}),  # what the other leaves
        ([held("a", 1, 9), held("b", 5, kib=4)], 8 * K, None, {"a": 2 * K}),  # alive in between
        ([held("a", 1, row=0), held("b", 1, kib=6)], 12 * K, None, {"b": 2 * K}),
        ([held("a", 1, row=0)], 4 * K, None, {}),  # nothing can be done
        ([held("a", 1), held("a", 7), held("b", 3)], 4 * K, None, {"a": 1 * K, "b": 1 * K}),
        ([held("a", 1)], None, 4 * K, {"a": 2 * K}),
        ([held("a", 1)], None, 8 * K, {}),  # it is no larger
        ([held("a", 1)], 64 * K, 4 * K, {"a": 2 * K}),
        ([held("a", 1)], 4 * K, 6 * K, {"a": 2 * K}),  # the budget holds two of these
        ([held("a", 1)], 4 * K, 64 * K, {"a": 1 * K}),
        ([held("a", 1, row=3 * K)], 4 * K, None, {"a": 1 * K}),
    ],
)
def test_choose_cuts(values, budget, tile_bytes, chosen):
    assert choose_cuts(values, budget, tile_bytes) == chosen


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 20), min_size=1, max_size=3), st.integers(1, 64)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 128),
)
def test_what_is_left_whole_fits(rows, budget_kib):
    values = [
        GatheredValue(str(n), tuple(sorted(reads)), kib * K, 512)
        for n, (reads, kib) in enumerate(rows)
    ]
    cuts = choose_cuts(values, budget_kib * K, None)
    for place in range(21):
        whole = [v for v in values if v.key not in cuts and v.reads[0] <= place <= v.reads[-1]]
        assert sum(aligned(v.nbytes) for v in whole) <= budget_kib * K
