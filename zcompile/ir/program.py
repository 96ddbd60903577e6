"""Splits a schedule of a graph into regions, the values they read, and transfers between them."""

from dataclasses import dataclass

from zcompile.ir.schedule import Fetch, Free, Left, Offload, Reduce, Run, Schedule, Ticket, Wait


@dataclass(frozen=True)
class Value:
    """A parameter in the arena: its instructions, and the first and last run that reads it."""

    fetch: Fetch
    wait: Wait
    free: Free
    first: int
    last: int


@dataclass(frozen=True)
class RegionProgram:
    """A schedule by regions.

    runs     in order
    values   by the first run that reads each
    leaving  leaving[n]: transfers off the device that start, or are waited for, before run n
    """

    runs: tuple[Run, ...]
    values: tuple[Value, ...]
    leaving: tuple[tuple[Reduce | Offload | Left, ...], ...]


def program_of(schedule: Schedule) -> RegionProgram:
    """The regions of a schedule, the values they read, and the transfers between them."""
    runs: list[Run] = []
    leaving: list[list[Reduce | Offload | Left]] = [[]]
    fetches: dict[Ticket, Fetch] = {}
    waits: dict[int, tuple[Wait, int]] = {}
    values = []
    # A value is complete when it is freed; transfers belong to the run before them.
    for x in schedule.instructions:
        match x:
            case Run():
                runs.append(x)
                leaving.append([])
            case Fetch():
                fetches[x.ticket] = x
            case Wait():
                waits[x.register] = (x, len(runs))
            case Free():
                wait, first = waits.pop(x.register)
                last = max(first, len(runs) - 1)
                values.append(Value(fetches[wait.ticket], wait, x, first, last))
            case Reduce() | Offload() | Left():
                leaving[-1].append(x)
            case _:
                raise AssertionError(f"{x} in a schedule of a graph")
    values.sort(key=lambda v: v.first)
    return RegionProgram(tuple(runs), tuple(values), tuple(tuple(rows) for rows in leaving))
