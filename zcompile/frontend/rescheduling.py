"""Gives each call the schedule for where its entries rest, and for the arena as it is.

The passes made a schedule that fetches everything. For a call it is arranged anew
(`passes/arrange.py::rearrange`) where an entry rests on the device, where a gradient is to stay
there, or where the arena has become smaller. What was arranged is proven, and kept until entries
move.
"""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zcompile.errors import BudgetExceeded
from zcompile.ir.late_updates import LateRows
from zcompile.ir.schedule import EntryIndex, Schedule
from zcompile.ir.step import StepTrace
from zcompile.ir.types import HELD, Phase
from zcompile.memory.step_footprint import held_peak
from zcompile.passes.arrange import rearrange
from zcompile.planner.step_plan import UNBOUNDED_LEAD
from zcompile.runtime.late import JoiningRows
from zcompile.runtime.session import Session
from zcompile.runtime.store.store import Entry
from zcompile.verify.schedule import verify_schedule

NOTHING_LATE = LateRows()


def lead_of(session: Session) -> int:
    """Runs that a fetch may start ahead, where bytes alone decide."""
    return UNBOUNDED_LEAD if session.config.max_lead else 0


def refitted(
    session: Session,
    schedule: Schedule,
    resident: frozenset[EntryIndex],
    budget_bytes: int,
    stay: frozenset[EntryIndex] = frozenset(),
    late: LateRows = NOTHING_LATE,
    reached: frozenset[EntryIndex] = frozenset(),
    held: frozenset[EntryIndex] = frozenset(),
) -> Schedule:
    """`schedule` arranged for a call whose `resident` entries rest on the device, and proven.

    stay     entries whose gradients stay there
    late     updates that it computes
    reached  operands of these on the host, where compute reaches them
    held     operands of these that have stayed where backward made them
    raises  BudgetExceeded, if what one run reads does not fit `budget_bytes` of the arena
    """
    if late.updates:
        assert schedule.program is not None, "of a graph"
        device = session.device
        joining = replace(late, chunk_bytes=device.chunk_bytes, least_bytes=device.late_chunk_bytes)
        schedule = replace(schedule, program=replace(schedule.program, late=joining))
    lead = lead_of(session)
    made = rearrange(schedule, budget_bytes, lead, resident, stay, reached, held)
    verify_schedule(made)
    return made


def refusal(session: Session, schedule: Schedule, error: BudgetExceeded) -> BudgetExceeded:
    """The error that `refitted` raised, in terms of the device instead of the arena."""
    what = "parameters that one piece of compute reads together"
    return session.split.too_small(error, f"{schedule.phase.value} pass of the model", what)


class Rescheduling:
    """The controller of a session that plans no steps: entries stay where they were put first."""

    records = False

    def __init__(self, session: Session) -> None:
        self._session = weakref.ref(session)
        self._arranged: dict[tuple[object, ...], tuple[Schedule, int]] = {}

    @property
    def session(self) -> Session:
        session = self._session()
        assert session is not None, "a session asks, so it is there"
        return session

    @property
    def arranges(self) -> bool:
        """Whether calls are arranged although the arena has room for what the passes made."""
        return False

    def fit(self, schedule: Schedule, entries: Sequence[Entry]) -> Schedule:
        """The schedule for these very entries, where they rest now.

        raises  BudgetExceeded, if what one run reads does not fit the arena any more
        """
        if schedule.phase is Phase.STEP or schedule.budget_bytes is None:
            return schedule
        session = self.session
        if not self.arranges and schedule.arena_bytes <= session.arena.budget_bytes:
            return schedule
        joining = session.late.joining(schedule, entries)
        more = () if joining is None else joining.entries
        resident = frozenset(
            EntryIndex(n) for n, entry in enumerate((*entries, *more)) if entry.place.tier.on_device
        )
        try:
            stay = self.staying(schedule, entries)
            return self._refitted(schedule, entries, resident, stay, joining)
        except BudgetExceeded as error:
            if joining is not None:
                session.late.settle()  # forward alone needs less
                return self.fit(schedule, entries)
            if not self.reclaim(error.needed_bytes):
                raise refusal(session, schedule, error) from error
            return self.fit(schedule, entries)  # which the arena may be too small for as it is

    def too_large(self, schedule: Schedule, entries: Sequence[Entry]) -> BudgetExceeded | None:
        """Why the arena has no room for a call of these entries, where they rest now; None: it has.

        No update joins the call.
        """
        rows = (EntryIndex(n) for n, entry in enumerate(entries) if entry.place.tier.on_device)
        try:
            self._refitted(schedule, entries, frozenset(rows), frozenset())
        except BudgetExceeded as error:
            return error.with_traceback(None)
        return None

    def _refitted(
        self,
        schedule: Schedule,
        entries: Sequence[Entry],
        resident: frozenset[EntryIndex],
        stay: frozenset[EntryIndex],
        joining: JoiningRows | None = None,
    ) -> Schedule:
        """The schedule arranged for this call; if others hold more than was planned, no gradient
        stays."""
        session = self.session
        late, reached, held_late = NOTHING_LATE, frozenset[EntryIndex](), frozenset[EntryIndex]()
        if joining is not None:
            late = joining.late
            rows = [(EntryIndex(len(entries) + n), e) for n, e in enumerate(joining.entries)]
            near = (n for n, e in rows if not e.on_device and session.can_view_in_place(e))
            reached, held_late = frozenset(near), frozenset(n for n, e in rows if e.home == HELD)
        joined = None if joining is None else joining.key
        key = schedule.serial, resident, stay, reached, held_late, joined
        if key not in self._arranged:
            window = session.window_bytes
            made = refitted(session, schedule, resident, window, stay, late, reached, held_late)
            session.homes.plan_device(made.peak_bytes)
            self._arranged[key] = made, held_peak(made)
        made, held = self._arranged[key]
        if schedule.holds.sizes != made.holds.sizes:
            made = replace(made, holds=schedule.holds)
            held = held_peak(made) if stay or held_late else 0
        others = session.live_memory.nbytes - schedule.holds.saved_bytes - made.held_bytes
        if others + held <= session.split.held_bytes:
            return made
        if held_late:
            session.late.settle()  # so that their memory is free
            return self.fit(schedule, entries)
        if stay:
            return self._refitted(schedule, entries, resident, frozenset(), joining)
        return made

    def forget(self) -> None:
        """Entries move, or the arena gets another size: what was arranged is not for that."""
        self._arranged.clear()

    @property
    def plans_copies(self) -> bool:
        """Whether a plan is in force by which calls read copies in low precision."""
        return False

    def narrowed(self, schedule: Schedule, entries: Sequence[Entry]) -> Schedule:
        """`schedule`, or the one that reads copies of these entries in its place."""
        return schedule

    def staying(self, schedule: Schedule, entries: Sequence[Entry]) -> frozenset[EntryIndex]:
        """Entries whose gradients stay where this call makes them."""
        return frozenset()

    def step_ended(self, step: StepTrace) -> None:
        """Nothing is planned."""

    def arena_resizes(self) -> None:
        self.forget()

    def reclaim(self, needed_bytes: int) -> bool:
        """False: nothing rests in the arena."""
        return False

    def evict_staying(self) -> None:
        """No gradient stays."""

    def updates_in_the_way(self) -> None:
        """No update is late."""

    def prediction(self) -> dict[str, Any] | None:
        """None: there is no plan."""
        return None
