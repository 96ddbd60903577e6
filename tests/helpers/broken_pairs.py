"""Pairs of schedules of which the second begins too early."""

from dataclasses import replace

from written import HIGH, LOW, borrow, fetch, free, run, schedule, store, wait

from zcompile.ir.handover import Handover
from zcompile.ir.schedule import Schedule
from zcompile.ir.types import Phase

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
