"""Schedules that keep a gradient on the device wrongly."""

from dataclasses import replace

from written import run, schedule

from zcompile.ir.schedule import EntryIndex, Reduce, Register, Schedule, Ticket
from zcompile.ir.types import LiveBytes, MemoryProfile, Phase

ROWS = (
    run(0, out=(1,), ticket=0),
    Reduce(Register(1), EntryIndex(0), (Ticket(0),), True, "w", 4, stays=True),
)


OWN = MemoryProfile((LiveBytes(0, 4, 4), LiveBytes(4, 4, 4, alone=True)))


def staying(reduce: Reduce, holds: MemoryProfile = OWN) -> Schedule:
    return replace(schedule(ROWS[0], reduce, phase=Phase.BACKWARD), holds=holds)


BROKEN_STAYING = {
    "a tile": (
        staying(replace(ROWS[1], of_nbytes=8)),
        "the gradient of 'w' stays, and is not all that comes for it",
    ),
    "one that comes twice": (
        replace(
            staying(ROWS[1]),
            instructions=(
                *ROWS,
                run(0, out=(2,), ticket=1),
                replace(ROWS[1], value=Register(2), after=(Ticket(1),)),
            ),
        ),
        "the gradient of 'w' stays, and is not all that comes for it",
    ),
    "read later": (
        staying(replace(ROWS[1], drop=False)),
        "the gradient of 'w' stays, and is read later as a value",
    ),
    "memory of others": (
        staying(ROWS[1], MemoryProfile((LiveBytes(), LiveBytes(alone=False)))),
        "the gradient of 'w' stays, in memory that is not its own",
    ),
    "memory that nothing is known of": (
        staying(ROWS[1], MemoryProfile()),
        "the gradient of 'w' stays, in memory that is not its own",
    ),
}
