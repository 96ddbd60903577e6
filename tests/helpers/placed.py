"""Gradients that a region makes in their berths: a schedule that may, and some that may not."""

from collections.abc import Callable
from dataclasses import replace

from written import NOTHING, run, schedule

from zcompile.ir.schedule import EntryIndex, Reduce, Register, Schedule, Ticket

PLACED = replace(NOTHING, placed=(0,))
MADE = (
    replace(run(0, out=(2,), ticket=0), region=PLACED, into=(EntryIndex(0),)),
    Reduce(Register(2), EntryIndex(0), (Ticket(0),), True, "w"),
)
NOT_ALONE = "what is made as the gradient of '{}' is not that alone"

BROKEN_PLACES: dict[str, tuple[Callable[[], Schedule], str]] = {
    "a gradient in its berth that somebody else reads": (
        lambda: schedule(MADE[0], run(2, ticket=1), MADE[1]),
        NOT_ALONE.format(0),
    ),
    "a product in the berth of another gradient": (
        lambda: schedule(replace(MADE[0], into=(EntryIndex(1),)), MADE[1]),
        NOT_ALONE.format(1),
    ),
    "a product in a berth that never becomes a gradient": (
        lambda: schedule(MADE[0]),
        NOT_ALONE.format(0),
    ),
    "a region that is told of fewer berths than it fills": (
        lambda: schedule(replace(MADE[0], into=()), MADE[1]),
        "'nothing' places another number of outputs than it is told",
    ),
}
