"""Two schedules and what one hands to the other, as one schedule that the model machine can run.

What the runtime promises between walks is written out: a fetch comes after all compute before its
walk, and after what still leaves from under it; one that is handed over comes after the compute
before its place.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zcompile.ir.handover import Handover
from zcompile.ir.schedule import (
    Borrow,
    EntryIndex,
    Fetch,
    Free,
    Instruction,
    Literal,
    Reduce,
    Run,
    Schedule,
    Store,
    Wait,
)
from zcompile.ir.types import Region

PASSED = Region("passed", "passed", lambda: ())
Starts = Mapping[int, Sequence[Fetch]]


def entries_of(schedule: Schedule) -> list[tuple[str, int]]:
    """What stands for each entry: its name, and which of that name it is."""
    seen: Counter[str] = Counter()
    keys = []
    for index in range(len(schedule.names)):
        name = schedule.names[index]
        keys.append((name, seen[name]))
        seen[name] += 1
    return keys


def honest(now: Schedule, starts: Starts) -> Handover:
    """With the peak that these starts have."""
    taken = peak = 0
    for index, x in enumerate(now.instructions):
        taken += x.slot.nbytes if isinstance(x, Fetch) else 0
        peak = max(peak, taken)
        taken -= x.slot.nbytes if isinstance(x, Free) else 0
        taken += sum(fetch.slot.nbytes for fetch in starts.get(index, ()))
        peak = max(peak, taken)
    return Handover(starts, peak)


def joined(now: Schedule, then: Schedule, starts: Starts) -> Schedule:
    return _Joint(now, then, starts).schedule()


@dataclass
class _Joint:
    now: Schedule
    then: Schedule
    starts: Starts
    rows: list[Instruction] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)

    def schedule(self) -> Schedule:
        first = {key: n for n, key in enumerate(entries_of(self.now))}
        second = {n: first.get(key, 1000 + n) for n, key in enumerate(entries_of(self.then))}
        handed = set[int]()
        for index, x in enumerate(self.now.instructions):
            self.rows.append(x)
            self.stores += [x] if isinstance(x, Store) else []
            for fetch in self.starts.get(index, ()):
                handed.add(fetch.ticket)
                self._start(_moved(replace(fetch, after=()), second), self._passed())
        begun = self._passed()
        for x in self.then.instructions:
            if not isinstance(x, Fetch):
                self.rows.append(_moved(x, second))
            elif x.ticket not in handed:
                self._start(_moved(x, second), begun)
        given = [*range(self.then.inputs), *(r for r, _ in self.then.constants)]
        results = [r if isinstance(r, Literal) else _FAR + r for r in self.then.outputs]
        return replace(
            self.now,
            instructions=tuple(self.rows),
            constants=(*self.now.constants, *((_FAR + r, None) for r in given)),  # type: ignore[arg-type]
            outputs=(*self.now.outputs, *results),  # type: ignore[arg-type]
            arena_bytes=max(self.now.arena_bytes, self.then.arena_bytes),
        )

    def _passed(self) -> Any:
        ticket = 2 * _FAR + len(self.rows)
        self.rows.append(Run(PASSED, (), (), ticket=ticket))  # type: ignore[arg-type]
        return ticket

    def _start(self, fetch: Any, passed: int) -> None:
        leaving = [x.ticket for x in self.stores if x.slot.overlaps(fetch.slot)]
        self.rows.append(replace(fetch, after=(*fetch.after, passed, *leaving)))


_FAR = 1_000_000
"""Between the registers and tickets of the two."""


def _moved(x: Any, entries: Mapping[int, int]) -> Any:
    """An instruction of the second schedule among those of the first."""
    changes = dict(_names(x))
    if isinstance(x, Fetch | Store | Reduce | Borrow):
        changes["entry"] = EntryIndex(entries[x.entry])
    return replace(x, **changes)


def _names(x: Any) -> Iterator[tuple[str, Any]]:
    if getattr(x, "ticket", None) is not None:
        yield "ticket", _FAR + x.ticket
    for many in ("after", "inputs", "outputs", "drops"):
        if hasattr(x, many):
            yield many, tuple(_FAR + name for name in getattr(x, many))
    if isinstance(x, Wait | Free | Borrow):
        yield "register", _FAR + x.register
    if isinstance(x, Reduce):
        yield "value", _FAR + x.value
