"""Into how many slices of tokens regions are cut: tables."""

import pytest

from zcompile.passes.tile_tokens.regions import RegionDemand, choose_slices, counts_of, more_slices

HALVES = (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("count", "split", "counts"),
    [
        (8, None, (1, 2, 4, 8)),
        (12, (2, 6), (1, 2, 4, 12)),
        (12, (3, 4), (1, 3, 6, 12)),  # whole sequences first, then equal parts of each
        (7, None, (1, 7)),
        (6, (2, 3), (1, 2, 6)),
        (1, None, (1,)),
        (4096, (1, 4096), (1, 2, 4, 8, 16)),
        (67, None, (1,)),  # no equal slices that are few enough
    ],
)
def test_counts_are_those_that_tokens_permit(count, split, counts):
    assert counts_of(count, split) == counts


@pytest.mark.parametrize(
    ("whole", "sliced", "room", "chosen"),
    [
        (10, 80, 90, 1),
        (10, 80, 89, 2),
        (10, 80, 50, 2),
        (10, 80, 30, 4),
        (10, 80, 29, 8),
        (10, 80, 5, 8),  # nothing fits: as many as there can be
    ],
)
def test_the_fewest_slices_that_fit_are_chosen(whole, sliced, room, chosen):
    assert choose_slices([RegionDemand(whole, sliced, HALVES)], room) == (chosen,)


@pytest.mark.parametrize(
    ("sliced", "slices", "made"),
    [
        ((80, 80), (1, 1), (2, 2)),
        ((80, 40), (1, 1), (2, 1)),
        ((80, 40), (2, 1), (4, 2)),
        ((80, 40), (4, 1), (4, 2)),
        ((80, 40), (8, 4), None),
        ((), (), None),
    ],
)
def test_what_holds_most_is_cut_once_more(sliced, slices, made):
    assert more_slices([RegionDemand(0, nbytes, HALVES) for nbytes in sliced], slices) == made
