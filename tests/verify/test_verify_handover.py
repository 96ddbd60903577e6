"""The proof of two schedules that follow each other, one of them opened within the other."""

import pytest
from broken_pairs import BESIDE, BROKEN_PAIRS, FIRST, HIGHER, IN_PLACE, LASTS, PASSING

from zcompile.errors import ScheduleInvalid
from zcompile.ir.handover import Handover, handover, last_writes
from zcompile.verify.schedule import ScheduleCall, verify_handover, verify_schedule


@pytest.mark.parametrize("case", BROKEN_PAIRS)
def test_a_broken_handover_earns_its_sentence(case):
    (now, then), planned, sentence = BROKEN_PAIRS[case]
    verify_schedule(now)
    verify_schedule(then)
    with pytest.raises(ScheduleInvalid) as caught:
        verify_handover(ScheduleCall(now), ScheduleCall(then), planned)
    assert caught.value.why == sentence


@pytest.mark.parametrize("then", [FIRST, PASSING, LASTS, IN_PLACE, HIGHER, BESIDE])
@pytest.mark.parametrize("now", [FIRST, PASSING, LASTS, IN_PLACE, HIGHER, BESIDE])
def test_what_is_planned_between_two_is_safe(now, then):
    written = last_writes(now, int)
    tickets = {f.ticket: written[0] for f in then.fetches() if 0 in written}
    verify_handover(ScheduleCall(now), ScheduleCall(then), handover(now, then, tickets))
    nothing = Handover({}, now.peak_bytes)
    verify_handover(ScheduleCall(now), ScheduleCall(then), nothing)


def test_what_two_calls_do_to_different_entries_is_no_matter():
    brings = Handover({7: list(HIGHER.fetches())}, 1024)
    verify_handover(ScheduleCall(LASTS, ["a"]), ScheduleCall(HIGHER, ["b"]), brings)
    with pytest.raises(ScheduleInvalid):
        verify_handover(ScheduleCall(LASTS, ["a"]), ScheduleCall(HIGHER, ["a"]), brings)
