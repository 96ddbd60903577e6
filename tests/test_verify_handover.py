"""The proof of two schedules that follow each other, one of them opened within the other."""

from dataclasses import replace

import pytest
from written import HIGH, LOW, borrow, fetch, free, run, schedule, store, wait

from zcompile.errors import ScheduleInvalid
from zcompile.ir.handover import Handover, handover, last_writes
from zcompile.ir.schedule import Schedule
from zcompile.ir.types import Phase
from zcompile.verify.schedule import Called, verify_handover, verify_schedule

STEP = (
    fetch(LOW, 0),
    wait(LOW, 0, 1),
    run(0, 1, ticket=1),
    store(LOW, 2, 1),
    free(LOW, 1),
    fetch(LOW, 3, 1, 2),
    wait(LOW, 3, 2),
    run(0, 2, ticket=4),
    store(LOW, 5, 4),
    free(LOW, 2),
)
ONE_USE = (fetch(LOW, 0), wait(LOW, 0, 1), run(1, out=(2,)), free(LOW, 1))
FIRST, LASTS = schedule(*ONE_USE), schedule(*STEP, phase=Phase.STEP)
(BRINGS,) = FIRST.fetches()
PASSING = schedule(replace(ONE_USE[0], lasting=False), *ONE_USE[1:])
IN_PLACE = schedule(borrow(1), run(1), phase=Phase.STEP)
BESIDE = replace(schedule(fetch(HIGH, 0), wait(HIGH, 0, 1), run(1), free(HIGH, 1)), scratch_at=512)
HIGHER = schedule(fetch(HIGH, 0), wait(HIGH, 0, 1), run(1, out=(2,)), free(HIGH, 1))

BROKEN_PAIRS: dict[str, tuple[tuple[Schedule, Schedule], Handover, str]] = {
    "after an instruction that is not there": (
        (LASTS, FIRST),
        Handover({10: [BRINGS]}, 1024),
        "fetches are handed over after instruction 10, which it has not",
    ),
    "a fetch of somebody else": (
        (LASTS, FIRST),
        Handover({9: [fetch(HIGH, 0)]}, 1024),
        "the fetch of 'w' is handed over, which the next has not",
    ),
    "the same fetch twice": (
        (LASTS, FIRST),
        Handover({9: [BRINGS, BRINGS]}, 1024),
        "the fetch of 'w' is handed over twice",
    ),
    "a gradient": (
        (LASTS, PASSING),
        Handover({9: list(PASSING.fetches())}, 1024),
        "'w' is handed over, which is new in every call",
    ),
    "a slot that is taken": (
        (LASTS, FIRST),
        Handover({8: [BRINGS]}, 1024),
        "'w' lies over 'w', which is taken",
    ),
    "a peak that is not true": (
        (LASTS, FIRST),
        Handover({9: [BRINGS]}, 513),
        "the peak of both is 512 bytes, it says 513",
    ),
    "more than the budget together": (
        (replace(LASTS, budget_bytes=1000), HIGHER),
        Handover({5: list(HIGHER.fetches())}, 1024),
        "1024 bytes are taken at once, the budget is 1000",
    ),
    "into the step scratch": (
        (FIRST, BESIDE),
        Handover({3: list(BESIDE.fetches())}, 1024),
        "fetches are handed over into memory that graphs hold until then",
    ),
    "what is stored afterwards": (
        (LASTS, HIGHER),
        Handover({7: list(HIGHER.fetches())}, 1024),
        "'w' was brought before what earlier compute made of it",
    ),
    "what is written in place afterwards": (
        (IN_PLACE, HIGHER),
        Handover({0: list(HIGHER.fetches())}, 512),
        "'w' was brought before what earlier compute made of it",
    ),
}


@pytest.mark.parametrize("case", BROKEN_PAIRS)
def test_a_broken_handover_earns_its_sentence(case):
    (now, then), planned, sentence = BROKEN_PAIRS[case]
    verify_schedule(now)
    verify_schedule(then)
    with pytest.raises(ScheduleInvalid) as caught:
        verify_handover(Called(now), Called(then), planned)
    assert caught.value.why == sentence


@pytest.mark.parametrize("then", [FIRST, PASSING, LASTS, IN_PLACE, HIGHER, BESIDE])
@pytest.mark.parametrize("now", [FIRST, PASSING, LASTS, IN_PLACE, HIGHER, BESIDE])
def test_what_is_planned_between_two_is_safe(now, then):
    written = last_writes(now, int)
    tickets = {f.ticket: written[0] for f in then.fetches() if 0 in written}
    verify_handover(Called(now), Called(then), handover(now, then, tickets))
    nothing = Handover({}, now.peak_bytes)
    verify_handover(Called(now), Called(then), nothing)


def test_what_two_calls_do_to_different_entries_is_no_matter():
    brings = Handover({7: list(HIGHER.fetches())}, 1024)
    verify_handover(Called(LASTS, ["a"]), Called(HIGHER, ["b"]), brings)
    with pytest.raises(ScheduleInvalid):
        verify_handover(Called(LASTS, ["a"]), Called(HIGHER, ["a"]), brings)
