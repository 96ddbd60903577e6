"""Every schedule that differs from a given one in one small thing that could make it unsafe.

What a schedule says of its bytes is counted anew, so that no mutant is caught for that alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from races import allocations, recounted

from zcompile.ir.schedule import (
    Agree,
    Borrow,
    Fetch,
    Free,
    Gather,
    Instruction,
    Left,
    Offload,
    Reduce,
    Run,
    Schedule,
    Slot,
    Store,
    Ticket,
    Wait,
)
from zcompile.ir.types import ALIGNMENT

Mutant = tuple[str, Callable[[], Schedule]]
"""What is done to which instruction, for people; and what comes of it."""

FARTHEST = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
"""Instructions that something is moved by."""
TRANSFERS = Fetch, Store, Reduce, Offload, Gather
NEIGHBOURS = 4
"""How many others of its kind something is swapped with."""


def _with(schedule: Schedule, *changes: tuple[int, Any]) -> Schedule:
    """Other instructions at these places; None leaves one out."""
    rows: list[Any] = list(schedule.instructions)
    for at, row in changes:
        rows[at] = row
    return recounted(schedule, tuple(row for row in rows if row is not None))


def _at(schedule: Schedule, *kinds: type) -> Iterator[tuple[int, Any]]:
    return ((i, x) for i, x in enumerate(schedule.instructions) if isinstance(x, kinds))


def waits_dropped(schedule: Schedule) -> Iterator[Mutant]:
    """Left out; or for a transfer that is waited for already."""
    waits = list(_at(schedule, Wait, Left))
    for i, _ in waits:
        yield f"wait {i} dropped", partial(_with, schedule, (i, None))
    for (_, x), (i, y) in pairwise(waits):
        yield f"wait {i} for {x.ticket}", partial(_with, schedule, (i, replace(y, ticket=x.ticket)))


def events_dropped(schedule: Schedule) -> Iterator[Mutant]:
    """A ticket of a run with all its uses; or one use of one ticket."""
    for i, x in _at(schedule, Run):
        if x.ticket is not None:
            uses = [(k, _not_after(y, x.ticket)) for k, y in _at(schedule, *TRANSFERS)]
            yield (
                f"ticket of {i} dropped",
                partial(_with, schedule, (i, replace(x, ticket=None)), *uses),
            )
    for i, x in _at(schedule, *TRANSFERS):
        for ticket in x.after:
            yield f"{i} not after {ticket}", partial(_with, schedule, (i, _not_after(x, ticket)))


def _not_after(x: Any, ticket: int) -> Any:
    return replace(x, after=tuple(t for t in x.after if t != ticket))


def _earlier(schedule: Schedule, *kinds: type) -> Iterator[Mutant]:
    rows = schedule.instructions
    for i, x in _at(schedule, *kinds):
        for by in FARTHEST:
            if (to := i - by) >= 0:
                moved = (*rows[:to], x, *rows[to:i], *rows[i + 1 :])
                yield f"{type(x).__name__.lower()} {i} at {to}", partial(recounted, schedule, moved)


def releases_earlier(schedule: Schedule) -> Iterator[Mutant]:
    return _earlier(schedule, Free, Left)


def transfers_earlier(schedule: Schedule) -> Iterator[Mutant]:
    return _earlier(schedule, *TRANSFERS)


def addresses_swapped(schedule: Schedule) -> Iterator[Mutant]:
    """Of two slots, wherever they are named; and of two instructions of one kind."""
    groups = allocations(schedule)
    for k, group in enumerate(groups):
        slot = schedule.instructions[group[0]].slot
        for other in groups[k + 1 : k + 1 + NEIGHBOURS]:
            place = schedule.instructions[other[0]].slot
            if slot.address != place.address:
                here = _slots(schedule, group, Slot(place.address, slot.nbytes))
                there = _slots(schedule, other, Slot(slot.address, place.nbytes))
                swapped = partial(_with, schedule, *here, *there)
                yield f"slots of {group[0]} and {other[0]} swapped", swapped
    for kind in (Fetch, Wait, Store, Free):
        rows = list(_at(schedule, kind))
        for (i, x), (k, y) in pairwise(rows):
            if x.slot != y.slot:
                swapped = partial(
                    _with, schedule, (i, replace(x, slot=y.slot)), (k, replace(y, slot=x.slot))
                )
                yield f"slots at {i} and {k} swapped", swapped


def _slots(schedule: Schedule, group: list[int], slot: Slot) -> list[tuple[int, Any]]:
    return [(i, replace(schedule.instructions[i], slot=slot)) for i in group]


def buffers_shrunk(schedule: Schedule) -> Iterator[Mutant]:
    """To half, by what alignment adds and one byte, by one unit; and what is brought into them."""
    for group in allocations(schedule):
        fetch: Any = schedule.instructions[group[0]]
        slot = fetch.slot
        for nbytes in {slot.nbytes // 2, fetch.nbytes - 1, slot.nbytes - ALIGNMENT}:
            if nbytes > 0:
                smaller = _slots(schedule, group, Slot(slot.address, nbytes))
                yield f"slot of {group[0]} of {nbytes}", partial(_with, schedule, *smaller)
        for nbytes in {fetch.nbytes // 2, fetch.nbytes - 4}:
            if nbytes > 0:
                less = replace(fetch, nbytes=nbytes)
                yield f"fetch {group[0]} of {nbytes}", partial(_with, schedule, (group[0], less))


def transfers_reordered(schedule: Schedule) -> Iterator[Mutant]:
    """Two transfers on different streams in each other's place."""
    rows = list(_at(schedule, *TRANSFERS))
    for n, (i, x) in enumerate(rows):
        others = [(k, y) for k, y in rows[n + 1 :] if isinstance(y, Fetch) != isinstance(x, Fetch)]
        for k, y in others[:NEIGHBOURS]:
            yield f"{i} and {k} reordered", partial(_with, schedule, (i, y), (k, x))


def stores_dropped(schedule: Schedule) -> Iterator[Mutant]:
    """With all uses of their tickets."""
    for i, x in _at(schedule, Store):
        uses = [(k, _not_after(y, x.ticket)) for k, y in _at(schedule, *TRANSFERS) if k != i]
        yield f"store {i} dropped", partial(_with, schedule, *uses, (i, None))


def regions_earlier(schedule: Schedule) -> Iterator[Mutant]:
    """A region of the graph, with what brings its operands right before it, ahead of late updates
    that stand there."""
    rows = schedule.instructions
    updates = [i for i, x in _at(schedule, Run) if x.late is not None]
    for i, x in _at(schedule, Run):
        if x.late is not None:
            continue
        first = i
        while isinstance(rows[first - 1], Wait | Borrow) and rows[first - 1].register in x.inputs:
            first -= 1
        for to in [update for update in updates if update < first][-NEIGHBOURS:]:
            moved = (*rows[:to], *rows[first : i + 1], *rows[to:first], *rows[i + 1 :])
            yield f"run {i} at {to}", partial(recounted, schedule, moved)


def wholes_earlier(schedule: Schedule) -> Iterator[Mutant]:
    """A region of the graph reads what ranks gather before this rank's share of that is updated:
    of a fetch of its own, which the update's comes behind."""
    rows = schedule.instructions
    agreement = tuple(x.ticket for _, x in _at(schedule, Agree))
    tickets = (getattr(x, "ticket", None) for x in rows)
    ticket = max((t for t in tickets if t is not None), default=0)
    for group in allocations(schedule):
        gathers = [i for i in group if isinstance(rows[i], Gather)]
        waits = [i for i in group if isinstance(rows[i], Wait)]
        if not gathers or len(waits) < 2:
            continue  # nobody updates it
        fetch: Any = rows[group[0]]
        gather: Any = rows[gathers[0]]
        wait: Any = rows[waits[-1]]
        reader = next(i for i, x in _at(schedule, Run) if wait.register in x.inputs)
        slot = Slot(schedule.arena_bytes, fetch.slot.nbytes)
        fetched, gathered = Ticket(ticket + 1), Ticket(ticket + 2)
        before: list[Instruction] = [
            replace(fetch, slot=slot, ticket=fetched, after=()),
            replace(gather, slot=slot, ticket=gathered, after=(*agreement, fetched)),
            replace(wait, slot=slot, ticket=gathered),
            rows[reader],
            Free(slot, wait.register, wait.name),
        ]
        gone = {gathers[0], waits[-1], reader}
        moved = []
        for i, x in enumerate(rows):
            moved += before if i == waits[0] else []
            moved += [x] if i not in gone else []
        unbounded = replace(schedule, budget_bytes=None)
        yield f"run {reader} at {waits[0]}", partial(recounted, unbounded, tuple(moved))


MUTATIONS: dict[str, Callable[[Schedule], Iterator[Mutant]]] = {
    "drop a wait": waits_dropped,
    "drop an event": events_dropped,
    "release earlier": releases_earlier,
    "swap two addresses": addresses_swapped,
    "shrink a buffer": buffers_shrunk,
    "reorder two transfers": transfers_reordered,
    "start a transfer earlier": transfers_earlier,
    "leave a store out": stores_dropped,
    "compute earlier than an update": regions_earlier,
    "read all before a share is updated": wholes_earlier,
}
