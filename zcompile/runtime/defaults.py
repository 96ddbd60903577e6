"""What an executor goes by until a planner decides."""

from collections.abc import Callable, Sequence

from zcompile.ir.schedule import Schedule
from zcompile.ir.step import Step
from zcompile.runtime.store.store import Entry

Fit = Callable[[Schedule, Sequence[Entry]], Schedule]
"""The schedule for these very entries, where they rest now."""


def as_it_is(schedule: Schedule, entries: Sequence[Entry]) -> Schedule:
    """What the passes planned: every parameter is fetched."""
    return schedule


def has_room(nbytes: int, schedule: Schedule) -> None:
    """There is room for what is held beside the arena."""


def nobody_plans(step: Step) -> None:
    """What rests where stays as it is."""
