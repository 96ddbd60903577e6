"""Gradients that stay where compute makes them: which may, as the proof has it, and which not."""

from dataclasses import replace

import pytest
from broken_staying import BROKEN_STAYING, ROWS, staying
from mutation.samples import TILED, compiled
from sampled import sampled
from small_models import SMALL_MODELS, UNALIKE

from zcompile.errors import ScheduleInvalid
from zcompile.ir.schedule import Reduce, Schedule
from zcompile.ir.types import Phase
from zcompile.verify.schedule import verify_schedule


def test_what_they_were_broken_from_is_safe():
    verify_schedule(staying(ROWS[1]))


@pytest.mark.parametrize("case", BROKEN_STAYING)
def test_one_that_may_not_stay_earns_its_sentence(case):
    broken, sentence = BROKEN_STAYING[case]
    with pytest.raises(ScheduleInvalid) as caught:
        verify_schedule(broken)
    assert caught.value.why == sentence


def reduces(made: Schedule):
    """(where, the reduce, what is held around it) of each."""
    assert len(made.level_at) == len(made.holds.levels)
    rows = made.instructions
    return [
        (i, rows[i], level) for i, level in made.level_at.items() if isinstance(rows[i], Reduce)
    ]


def marked(made: Schedule, at: int, **how) -> Schedule:
    rows = list(made.instructions)
    rows[at] = replace(rows[at], **how)
    return replace(made, instructions=tuple(rows))


def accepted(made: Schedule) -> bool:
    try:
        verify_schedule(made)
    except ScheduleInvalid as error:
        if "stays" not in error.why:
            raise
        return False
    return True


@pytest.mark.parametrize("name", sampled([*SMALL_MODELS, *TILED], *UNALIKE[1::2], *TILED))
def test_in_a_real_backward_those_stay_that_are_whole_and_whose_memory_is_their_own(name):
    seen = 0
    for made in compiled(name):
        for at, reduce, level in reduces(made) if made.phase is Phase.BACKWARD else ():
            whole = level.alone and reduce.entry in made.lone_gradients
            assert accepted(marked(made, at, stays=True)) == whole
            assert not whole or reduce.drop, "what is read later is not its own"
            assert not accepted(marked(made, at, stays=True, drop=False))
            seen += whole
    assert seen
