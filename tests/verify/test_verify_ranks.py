"""The proof of schedules of one of several ranks."""

import pytest
from broken_ranks import BACKWARD, BROKEN_RANKS, TILED, of_rank

from zcompile.errors import ScheduleInvalid
from zcompile.verify.schedule import verify_schedule


def test_what_they_were_broken_from_is_safe():
    verify_schedule(of_rank(BACKWARD))
    verify_schedule(of_rank(TILED))


@pytest.mark.parametrize("case", BROKEN_RANKS)
def test_a_broken_schedule_of_a_rank_earns_its_sentence(case):
    make, sentence = BROKEN_RANKS[case]
    with pytest.raises(ScheduleInvalid) as caught:
        verify_schedule(make())
    assert caught.value.why == sentence


def test_the_collectives_are_listed_kind_by_kind():
    assert of_rank(BACKWARD).collectives == (
        ("gather", 0, 1024),
        ("gather", 1, 1024),
        ("exchange", 0, 1024),
        ("exchange", 1, 1024),
    )
