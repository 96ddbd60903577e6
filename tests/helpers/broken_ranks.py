"""Schedules of one of several ranks: a safe one, and those that would hang, mix or race."""

from dataclasses import replace

import torch
from written import NOTHING, free, schedule, wait

from zcompile.ir.schedule import (
    Agree,
    EntryIndex,
    Exchange,
    Fetch,
    Gather,
    Instruction,
    Reduce,
    Register,
    Run,
    Schedule,
    Slot,
    Ticket,
)
from zcompile.ir.types import Layout, Phase

WIDE, NEXT = Slot(0, 1024), Slot(1024, 1024)
"""Slots of two shares of 512 bytes; this rank holds the second of each."""
WHOLE = Layout((256,), (1,), 0, torch.float32)


def share(slot: Slot, ticket: int, entry: int, name: str, *after: int) -> Fetch:
    return Fetch(EntryIndex(entry), 0, 512, slot, Ticket(ticket), after, name, offset=512)  # type: ignore[arg-type]


def gather(slot: Slot, ticket: int, entry: int, name: str, *after: int) -> Gather:
    return Gather(EntryIndex(entry), 1024, slot, Ticket(ticket), after, name)  # type: ignore[arg-type]


def whole(slot: Slot, ticket: int, register: int, name: str = "w") -> Instruction:
    return replace(wait(slot, ticket, register, WHOLE), name=name)


def computed(*inputs: int, out: tuple[int, ...] = (), ticket: int | None = None) -> Run:
    return Run(NOTHING, inputs, out, (), ticket)  # type: ignore[arg-type]


def exchange(value: int, parts: int, entry: int, ticket: int, name: str, *after: int) -> Exchange:
    waits = tuple(map(Ticket, after))
    made = Register(value), Register(parts), EntryIndex(entry)
    return Exchange(*made, 1024, Ticket(ticket), waits, name)


def home(value: int, parts: int, entry: int, name: str, *after: int) -> Reduce:
    row = Reduce(Register(value), EntryIndex(entry), tuple(map(Ticket, after)), True, name, 1024)
    return replace(row, parts=Register(parts), shared=True)


BACKWARD: tuple[Instruction, ...] = (
    Agree(Ticket(0), "backward"),
    share(WIDE, 1, 0, "w"),
    gather(WIDE, 2, 0, "w", 0, 1),
    share(NEXT, 3, 1, "v"),
    gather(NEXT, 4, 1, "v", 3),
    whole(WIDE, 2, 1),
    computed(0, 1, out=(2,), ticket=5),
    free(WIDE, 1),
    exchange(2, 10, 0, 6, "w", 0, 5),
    home(2, 10, 0, "w", 5, 6),
    whole(NEXT, 4, 3, "v"),
    computed(0, 3, out=(4,), ticket=7),
    free(NEXT, 3),
    exchange(4, 11, 1, 8, "v", 7),
    home(4, 11, 1, "v", 7, 8),
)
"""Two weights are gathered, read one after the other, and their gradients exchanged."""


def of_rank(rows: tuple[Instruction, ...]) -> Schedule:
    return schedule(*rows, phase=Phase.BACKWARD)


def _but(at: int, *instead: Instruction) -> Schedule:
    return of_rank((*BACKWARD[:at], *instead, *BACKWARD[at + 1 :]))


BROKEN_RANKS = {
    "a collective that nobody can wait for": (
        lambda: _but(4, replace(BACKWARD[4], ticket=None)),
        "nobody can wait for the gather of 'v'",
    ),
    "a call that is agreed on too late": (
        lambda: of_rank((*BACKWARD[:5], Agree(Ticket(9), "backward"), *BACKWARD[5:])),
        "the ranks agree on the call after its first collective",
    ),
    "a call that is not agreed on": (
        lambda: _but(2, gather(WIDE, 2, 0, "w", 1)),
        "the gather of 'w' does not wait until the ranks agree on the call",
    ),
    "an exchange that is not agreed on": (
        lambda: of_rank(
            (
                BACKWARD[0],
                computed(0, out=(2,), ticket=5),
                exchange(2, 10, 0, 6, "w", 5),
                BACKWARD[9],
            )
        ),
        "the exchange of 'w' does not wait until the ranks agree on the call",
    ),
    "a gather that does not wait for its share": (
        lambda: _but(2, gather(WIDE, 2, 0, "w", 0)),
        "the gather of 'w' does not wait for the fetch of 'w' into the same bytes",
    ),
    "a gather of more than there is room for": (
        lambda: _but(2, replace(BACKWARD[2], nbytes=1536)),
        "'w' gathers 1536 bytes into 1024",
    ),
    "a gather of another weight than was fetched": (
        lambda: _but(2, gather(WIDE, 2, 1, "v", 0, 1)),
        "'v' is gathered where 'w' lies",
    ),
    "a weight that is gathered twice": (
        lambda: of_rank((*BACKWARD[:3], gather(WIDE, 9, 0, "w", 2), *BACKWARD[3:])),
        "'w' is gathered twice",
    ),
    "a share that nobody fetched": (
        lambda: of_rank((*BACKWARD[:10], gather(WIDE, 9, 0, "w", 2), *BACKWARD[10:])),
        "'w' has no slot Slot(address=0, nbytes=1024) that is taken here",
    ),
    "gathers in another order than they are read": (
        lambda: of_rank(
            (
                *BACKWARD[:2],
                BACKWARD[3],
                gather(NEXT, 4, 1, "v", 0, 3),
                gather(WIDE, 2, 0, "w", 1),
                *BACKWARD[5:],
            )
        ),
        "'w' is gathered after 'v', and read before: the order of gathers is not that of their "
        "readers, as it is on other ranks",
    ),
    "a weight that is read before it is whole": (
        lambda: _but(5, whole(WIDE, 1, 1)),
        "it waits for ticket 1, the bytes come with 1",
    ),
    "a weight of which only a share is there": (
        lambda: of_rank((BACKWARD[0], BACKWARD[1], whole(WIDE, 1, 1), free(WIDE, 1))),
        "'w' reads 1024 bytes of 0 that were brought",
    ),
    "a share between two multiples": (
        lambda: _but(1, replace(BACKWARD[1], offset=256)),
        "the share of 'w' lies between two multiples of 512",
    ),
    "a share that ends beyond its slot": (
        lambda: _but(1, replace(BACKWARD[1], offset=1024)),
        "'w' brings 512 bytes into 1024",
    ),
    "an exchange before the gradient is made": (
        lambda: _but(8, exchange(2, 10, 0, 6, "w", 0)),
        "'w' leaves before it is computed",
    ),
    "a gradient that goes home before it is exchanged": (
        lambda: _but(9, home(2, 10, 0, "w", 5)),
        "the gradient of 'w' goes home before it is exchanged",
    ),
    "a gradient that goes home as another": (
        lambda: of_rank(
            (*BACKWARD[:9], *BACKWARD[10:14], home(4, 10, 1, "v", 7, 6, 8), BACKWARD[9])
        ),
        "the gradient of 'v' goes home as the exchanged one of 'w'",
    ),
    "a gradient that never goes home": (
        lambda: of_rank((*BACKWARD[:9], *BACKWARD[10:])),
        "the exchanged gradient of 'w' never goes home",
    ),
    "parts that are computed with": (
        lambda: of_rank((*BACKWARD[:9], computed(0, 10), *BACKWARD[9:])),
        "register 10 is exchanged, and computed with as a value",
    ),
}
"""What is wrong -> the schedule, and the sentence of the proof."""
