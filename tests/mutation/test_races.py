"""The three races that `design.md` names, in steps as they are lowered: shown, and caught."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from mutation.judge import changed, meaning
from mutation.samples import of_step

from zcompile.errors import ScheduleInvalid
from zcompile.ir.schedule import Fetch, Run, Schedule, Store
from zcompile.verify.schedule import verify_schedule

STEP = of_step("adam")["3 lanes, resident nothing"]
COMPUTED = {x.ticket for x in STEP.instructions if isinstance(x, Run)}
STORED = {x.ticket for x in STEP.instructions if isinstance(x, Store)}


def without(kind: type, tickets: set[Any]) -> Schedule:
    """The step, with nothing of `kind` waiting for these any more."""
    rows = [
        replace(x, after=tuple(t for t in x.after if t not in tickets))
        if isinstance(x, kind)
        else x
        for x in STEP.instructions
    ]
    return replace(STEP, instructions=tuple(rows))


RACES: dict[str, tuple[Callable[[], Schedule], str]] = {
    "a device-to-host copy that does not wait for the optimizer's write": (
        lambda: without(Store, COMPUTED),
        "does not wait for the compute that writes it",
    ),
    "a reload buffer reused too early": (
        lambda: without(Fetch, STORED),
        "does not wait for the store of",
    ),
    "a copy stream that does not wait for compute before overwriting a buffer": (
        lambda: without(Fetch, COMPUTED | STORED),
        "does not wait for the compute that reads",
    ),
}


@pytest.mark.parametrize("race", RACES)
def test_a_race_on_record_is_caught(race):
    make, sentence = RACES[race]
    with pytest.raises(ScheduleInvalid, match=sentence):
        verify_schedule(make())


@pytest.mark.parametrize("race", RACES)
def test_a_race_on_record_shows_when_it_is_run(race):
    make, _ = RACES[race]
    assert changed(STEP, make(), meaning(STEP))


def test_what_waits_for_a_store_need_not_wait_for_what_the_store_waited_for():
    """The verifier follows tickets through transfers."""
    columns_written = {x.slot for x in STEP.instructions if isinstance(x, Store)}
    rows = [
        replace(x, after=tuple(t for t in x.after if t in STORED))
        if isinstance(x, Fetch) and x.slot in columns_written
        else x
        for x in STEP.instructions
    ]
    less = replace(STEP, instructions=tuple(rows))
    assert less != STEP
    verify_schedule(less)
    assert not changed(STEP, less, meaning(STEP))
