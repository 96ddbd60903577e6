"""Schedules in which the host computes what is not in its reach, or waits for it."""

from collections.abc import Callable
from dataclasses import replace

from written import LOW, NOTHING, borrow, fetch, free, run, schedule, wait

from zcompile.ir.schedule import EntryIndex, Register, Run, Schedule, Ticket
from zcompile.ir.types import Phase

ON_HOST = replace(NOTHING, on_host=True)
LENT = replace(borrow(1), entry=EntryIndex(1), on_host=True)


def run_on_host(*inputs: int, out: tuple[int, ...] = (), ticket: int | None = None) -> Run:
    made = None if ticket is None else Ticket(ticket)
    return Run(ON_HOST, tuple(map(Register, inputs)), tuple(map(Register, out)), ticket=made)


def step(*rows: object) -> Schedule:
    return schedule(*rows, phase=Phase.STEP)  # type: ignore[arg-type]


HOST_ROW = (LENT, run_on_host(0, 1))
"""A row of one operand that the host updates, with a plain value of the call."""

BROKEN_HOST: dict[str, tuple[Callable[[], Schedule], str]] = {
    "what lies in the arena": (
        lambda: step(fetch(LOW, 0), wait(LOW, 0, 2), LENT, run_on_host(1, 2), free(LOW, 2)),
        "the host computes with register 2, which it is not lent",
    ),
    "what the device is lent": (
        lambda: step(borrow(1), run_on_host(1)),
        "the host computes with register 1, which it is not lent",
    ),
    "what was computed by the device": (
        lambda: step(run(0, out=(2,)), LENT, run_on_host(1, 2)),
        "the host computes with register 2, which it is not lent",
    ),
    "the device, what the host is lent": (
        lambda: step(LENT, run(1)),
        "the device computes with register 1, which the host is lent",
    ),
    "a value, and not an update in place": (
        lambda: step(LENT, run_on_host(1, out=(2,))),
        "what the host computes is an update in place, which nothing waits for",
    ),
    "what a transfer waits for": (
        lambda: step(LENT, run_on_host(1, ticket=0)),
        "what the host computes is an update in place, which nothing waits for",
    ),
}
