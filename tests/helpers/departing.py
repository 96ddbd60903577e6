"""Schedules in which a saved value leaves, each with one fault, and the sentence for it."""

from collections.abc import Callable
from dataclasses import replace

import torch
from written import HIGH, borrow, fetch, run, schedule, wait

from zcompile.ir.schedule import Instruction, Left, Offload, Register, Schedule, Ticket
from zcompile.ir.types import Layout

ROW = Layout((16,), (1,), 0, torch.float32)

OFFLOAD = Offload(Register(1), "host", ROW, Register(2), 0, Ticket(1), (Ticket(0),), "v")
LEFT = Left(Ticket(1), Register(1), 64, "v")
LEAVING: tuple[Instruction, ...] = (
    run(0, out=(1,), ticket=0),
    OFFLOAD,
    run(1, out=(3,)),
    LEFT,
)

BROKEN_DEPARTURES: dict[str, tuple[Callable[[], Schedule], str]] = {
    "a value that leaves before it is made": (
        lambda: schedule(LEAVING[0], replace(OFFLOAD, after=()), *LEAVING[2:]),
        "'v' leaves before it is computed",
    ),
    "a value that nothing made": (
        lambda: schedule(*LEAVING[:1], replace(OFFLOAD, value=Register(9)), *LEAVING[2:]),
        "register 9 leaves, and nothing made it",
    ),
    "a value whose departure nobody waits for": (
        lambda: schedule(*LEAVING[:3]),
        "nobody waits until 'v' has left",
    ),
    "a wait for the departure of another": (
        lambda: schedule(*LEAVING[:3], replace(LEFT, ticket=Ticket(0))),
        "register 1 does not leave with ticket 0",
    ),
    "a departure that is waited for twice": (
        lambda: schedule(*LEAVING, LEFT),
        "register 1 does not leave with ticket 1",
    ),
    "a value that was dropped while it left": (
        lambda: schedule(*LEAVING[:2], run(1, out=(3,), drops=(1,)), LEFT),
        "the memory of 'v' was given back before",
    ),
    "a value that is read after it has left": (
        lambda: schedule(*LEAVING, run(1)),
        "register 1 is read before its wait, or after it was given back",
    ),
    "a value that lies in the arena": (
        lambda: schedule(fetch(HIGH, 7), wait(HIGH, 7, 1), replace(OFFLOAD, after=())),
        "'v' lies in bytes of an entry or of the arena, which may change while it leaves",
    ),
    "a value that is a parameter where it rests": (
        lambda: schedule(borrow(1), replace(OFFLOAD, after=())),
        "'v' lies in bytes of an entry or of the arena, which may change while it leaves",
    ),
}
