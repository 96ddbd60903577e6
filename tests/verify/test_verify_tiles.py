"""Gradients that leave in tiles: what is wrong with a list of them, and what is not."""

from dataclasses import replace

import pytest
from broken_tiles import BROKEN_TILES
from written import LOW, fetch, free, run, schedule, wait

from zcompile.errors import ScheduleInvalid
from zcompile.ir.schedule import EntryIndex, Reduce, Register, Schedule, Ticket
from zcompile.verify.schedule import verify_schedule


def tiles(*spans: tuple[int, int], of: int = 128) -> Schedule:
    """A gradient of `of` bytes leaves in these tiles."""
    rows = [
        Reduce(Register(2), EntryIndex(0), (Ticket(1),), False, "w", nbytes, begin, of)
        for begin, nbytes in spans
    ]
    made = schedule(
        fetch(LOW, 0), wait(LOW, 0, 1), run(0, 1, out=(2,), ticket=1), *rows, free(LOW, 1)
    )
    return replace(made, names={0: "w"})


@pytest.mark.parametrize("case", BROKEN_TILES)
def test_tiles_that_are_no_gradient_earn_their_sentence(case):
    spans, sentence = BROKEN_TILES[case]
    with pytest.raises(ScheduleInvalid) as caught:
        verify_schedule(tiles(*spans))
    assert caught.value.why == sentence


def test_a_gradient_may_leave_in_tiles_again_and_again():
    verify_schedule(tiles((64, 64), (0, 64), (0, 128)))
