"""Schedules arranged anew for what a session's arena is by now, and where entries rest."""

import weakref
from collections.abc import Sequence
from dataclasses import replace

from zcompile.errors import BudgetExceeded
from zcompile.ir.schedule import EntryIndex, Schedule
from zcompile.ir.types import Phase
from zcompile.passes.lower import arrange
from zcompile.planner.step_plan import UNBOUNDED_LEAD
from zcompile.runtime.session import Session
from zcompile.runtime.store.store import Entry
from zcompile.verify.schedule import verify_schedule


def lead_of(session: Session) -> int:
    """Runs that a fetch may start ahead, where bytes alone decide."""
    return UNBOUNDED_LEAD if session.config.max_lead else 0


def refitted(
    session: Session,
    schedule: Schedule,
    resident: frozenset[EntryIndex],
    budget_bytes: int,
    stay: frozenset[EntryIndex] = frozenset(),
) -> Schedule:
    """`schedule` arranged for a call whose `resident` entries rest on the device and the gradients
    of whose entries `stay` there, and proven.

    raises  BudgetExceeded, if what one run reads does not fit `budget_bytes` of the arena
    """
    made = arrange(schedule, resident, budget_bytes, lead_of(session), stay)
    verify_schedule(made)
    return made


def refusal(session: Session, schedule: Schedule, error: BudgetExceeded) -> BudgetExceeded:
    """What `refitted` raised, told of the device instead of the arena."""
    what = "parameters that one piece of compute reads together"
    return session.split.too_small(error, f"{schedule.phase.value} pass of the model", what)


class Refitting:
    """Where no step is planned: schedules as the passes made them, or, where the arena has become
    too small for one, arranged anew. Nothing rests on the device."""

    def __init__(self, session: Session) -> None:
        self._session = weakref.ref(session)
        self._made: dict[tuple[int, int], Schedule] = {}

    def fit(self, schedule: Schedule, entries: Sequence[Entry]) -> Schedule:
        """raises  BudgetExceeded, if what one run reads does not fit any more"""
        session = self._session()
        assert session is not None, "a session asks, so it is there"
        budget = session.arena.budget_bytes
        if schedule.budget_bytes is None or schedule.arena_bytes <= budget:
            return schedule
        if schedule.phase is Phase.STEP:
            return schedule
        key = schedule.serial, budget
        if key not in self._made:
            try:
                self._made[key] = refitted(session, schedule, frozenset(), budget)
            except BudgetExceeded as error:
                raise refusal(session, schedule, error) from error
        return replace(self._made[key], holds=schedule.holds)
