"""Schedules written by hand: one constructor per instruction, and an honest account of bytes."""

from typing import Any

import torch
from races import recounted

from zcompile.ir.schedule import (
    SERIALS,
    Borrow,
    EntryIndex,
    Fetch,
    Free,
    Instruction,
    Register,
    Run,
    Schedule,
    Slot,
    Store,
    Ticket,
    Wait,
)
from zcompile.ir.types import Layout, Phase, Region

NOTHING = Region("key", "nothing", lambda *values: ())
LOW, HIGH = Slot(0, 512), Slot(512, 512)
FLOATS = Layout((128,), (1,), 0, torch.float32)


def fetch(slot: Slot, ticket: int, *after: int, name: str = "w", nbytes: int = 512) -> Fetch:
    return Fetch(EntryIndex(0), 0, nbytes, slot, Ticket(ticket), after, name)  # type: ignore[arg-type]


def wait(slot: Slot, ticket: int, register: int, layout: Layout = FLOATS) -> Wait:
    return Wait(Ticket(ticket), slot, layout, Register(register), "w")


def run(
    *inputs: int, out: tuple[int, ...] = (), ticket: int | None = None, drops: tuple[int, ...] = ()
) -> Run:
    return Run(NOTHING, inputs, out, drops, ticket)  # type: ignore[arg-type]


def free(slot: Slot, register: int) -> Free:
    return Free(slot, Register(register), "w")


def store(slot: Slot, ticket: int, *after: int, nbytes: int = 512) -> Store:
    return Store(EntryIndex(0), 0, nbytes, slot, Ticket(ticket), after, "w")  # type: ignore[arg-type]


def borrow(register: int, layout: Layout = FLOATS) -> Borrow:
    return Borrow(EntryIndex(0), 0, layout, Register(register), True, "w")


def schedule(
    *rows: Instruction,
    outputs: tuple[Any, ...] = (),
    phase: Phase = Phase.FORWARD,
    budget: int | None = None,
) -> Schedule:
    """One input, register 0; the account of bytes is honest."""
    made = Schedule(
        phase, "test", (), (Register(0),), 1, (), outputs, 20, (), next(SERIALS), 0, 0, budget, {}
    )
    return recounted(made, rows)
