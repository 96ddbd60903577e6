"""Schedules for an arena that has given way, where no step is planned."""

import weakref
from collections.abc import Sequence

from zcompile.arrange import arrange
from zcompile.errors import BudgetExceeded
from zcompile.runtime.session import Session
from zcompile.runtime.store import Entry
from zcompile.schedule import Schedule
from zcompile.specs import Phase
from zcompile.step_plan import UNBOUNDED_LEAD
from zcompile.verify_schedule import verify_schedule


class Refitting:
    """Gives an executor the schedules of one session as they were planned, or, where the arena has
    become too small for one, arranged anew for what it is by now. Nothing rests on the device."""

    def __init__(self, session: Session) -> None:
        self._session = weakref.ref(session)
        self._made: dict[tuple[int, int], Schedule] = {}

    def fit(self, schedule: Schedule, entries: Sequence[Entry]) -> Schedule:
        """raises  BudgetExceeded, if what one run reads does not fit any more"""
        session = self._session()
        assert session is not None, "a session asks, so it is there"
        budget = session.arena.budget_bytes
        if schedule.phase is Phase.STEP or schedule.budget_bytes is None:
            return schedule
        if schedule.arena_bytes <= budget:
            return schedule
        key = schedule.serial, budget
        if key not in self._made:
            lead = UNBOUNDED_LEAD if session.config.max_lead else 0
            try:
                made = arrange(schedule, frozenset(), budget, lead)
            except BudgetExceeded as error:
                raise session.too_small(
                    error, f"{schedule.phase.value} pass of the model",
                    "parameters that one piece of compute reads together",
                ) from error  # fmt: skip
            verify_schedule(made)
            self._made[key] = made
        return self._made[key]
