"""A schedule of a graph taken apart: its runs, what they read, and what leaves between them."""

from dataclasses import dataclass

from zcompile.ir.schedule import Fetch, Free, Left, Offload, Reduce, Run, Schedule, Ticket, Wait


@dataclass(frozen=True)
class Value:
    """A parameter in the arena: its three instructions, and the first and last run that read it."""

    fetch: Fetch
    wait: Wait
    free: Free
    first: int
    last: int


@dataclass(frozen=True)
class Stages:
    """A schedule taken apart. `leaving[n]`: what leaves, or has left, before run n."""

    runs: tuple[Run, ...]
    values: tuple[Value, ...]
    leaving: tuple[tuple[Reduce | Offload | Left, ...], ...]


def take_apart(schedule: Schedule) -> Stages:
    """Runs, what they read, and what leaves after them."""
    runs: list[Run] = []
    leaving: list[list[Reduce | Offload | Left]] = [[]]
    fetches: dict[Ticket, Fetch] = {}
    waits: dict[int, tuple[Wait, int]] = {}
    values = []
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
    return Stages(tuple(runs), tuple(values), tuple(tuple(rows) for rows in leaving))
