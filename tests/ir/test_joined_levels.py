"""Levels of joined regions: what counts longer, and where gradients are joined."""

from zcompile.ir.joined_levels import SentGradient, joined_levels, joins_of
from zcompile.ir.types import LiveBytes


def level(before, peak, after, departing=0):
    return LiveBytes(before, peak, after, departing)


APART = (
    level(8, 9, 8),
    level(8, 8, 8, 4),
    level(8, 9, 8),
    level(8, 8, 8, 4),
    level(8, 9, 8),
    level(8, 8, 6, 4),
)
"""Three regions, each with a gradient of 2 bytes; the first is joined when the third is sent."""
SENT = [SentGradient(number, 2, True) for number in (1, 3, 5)]
LONGER = (*APART, level(6, 9, 6), level(6, 6, 4, 4))
"""And once more: the second is joined when the fourth is sent."""
SENT_LONGER = [*SENT, SentGradient(7, 2, True)]


def test_regions_one_by_one_keep_their_levels():
    order = [(number,) for number in range(len(APART))]
    assert joined_levels(APART, order, SENT) == APART


def test_gradients_of_a_joined_region_are_sent_behind_it():
    order = [(0, 2, 4), (1,), (3,), (5,)]
    assert joined_levels(APART, order, SENT) == (
        level(8, 9, 8),
        level(8, 8, 8, 4),
        level(8, 8, 8, 4),
        level(8, 8, 6, 4),
    )


def test_what_was_joined_between_the_parts_counts_until_it_is_joined_behind_them():
    order = [(0, 2, 4, 6), (1,), (3,), (5,), (7,)]
    assert joined_levels(LONGER, order, SENT_LONGER) == (
        level(8, 11, 8),
        level(8, 8, 8, 4),
        level(8, 8, 8, 4),
        level(8, 8, 8, 6),
        level(8, 8, 4, 4),
    )


def test_what_is_never_joined_counts_to_the_end():
    levels = (*LONGER[:-1], level(4, 9, 4))
    order = [(0, 2, 4, 6, 7), (1,), (3,), (5,)]
    assert joined_levels(levels, order, SENT) == (
        level(8, 11, 6),
        level(6, 6, 6, 4),
        level(6, 6, 6, 4),
        level(6, 6, 6, 6),
    )


def test_what_leaves_in_between_keeps_its_level_and_its_bound():
    gradients = [*SENT[:1], SentGradient(3, 2, False), *SENT_LONGER[2:]]
    order = [(0, 2), (1,), (3,), (4, 6), (5,), (7,)]
    assert joined_levels(LONGER, order, gradients) == (
        level(8, 9, 8),
        level(8, 8, 8, 4),
        level(8, 8, 8, 4),
        level(8, 11, 8),
        level(8, 8, 8, 6),
        level(8, 8, 4, 4),
    )


def test_the_oldest_are_joined_until_the_next_fits():
    joined, bounds = joins_of(LONGER, SENT_LONGER)
    assert joined == [2, 3, 4, 4]
    assert bounds == [4, 4, 4, 4]
    assert joins_of(LONGER, SENT_LONGER, late=(1, 3, 5, 7)) == ([4, 4, 4, 4], [4, 4, 6, 8])


def test_where_no_bound_is_known_two_of_the_largest_are_in_flight():
    assert joins_of((), SENT_LONGER) == joins_of(LONGER, SENT_LONGER)
