"""What compiled graphs hold of the device beside the arena, as it is: storages, counted once.

A storage counts while a register of a call, a departure, or autograd (for backward) holds it. What
a region makes and lets go of inside cannot be seen from here; the schedule says how much that is.

Device memory on its way home: held until a planned point, not until a copy happens to end.

Gradients lie in memory that compute made, outside the arena. Before one leaves, the oldest of
those under way are joined until all of them take no more than the schedule allows. When memory
comes back does then not depend on how fast a link is, so what is held at once can be counted
before it happens (`memory/footprint.py`).

Bytes that are still on their way out of the arena.

A store that ends a schedule reads its slot while the next schedule already begins. Within one
schedule the `after` of a fetch says what to wait for; between schedules this does: a fetch waits
for every departure that it would overwrite.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import Tensor, UntypedStorage

from zcompile.ir.schedule import Run
from zcompile.ir.ties import Tie
from zcompile.ir.torch_compat import storage_of
from zcompile.ir.types import LiveBytes, MemoryProfile
from zcompile.runtime.meter import Gauge
from zcompile.runtime.transfer.ticket import Ticket


class Row:
    """A storage, and how many hold it. `watch`: what tells that it died."""

    __slots__ = ("holders", "key", "nbytes", "watch")

    def __init__(self, key: int, nbytes: int) -> None:
        self.key, self.nbytes, self.holders = key, nbytes, 0
        self.watch: list[Tie] = []

    @classmethod
    def standing_for(cls, value: Tensor) -> "Row":
        """Counts as a storage of its own, which `value` would have had elsewhere."""
        return cls(0, value.nbytes)


Rows = Sequence[Row]
NO_ROWS: Rows = ()
NO_LEVEL = LiveBytes()


class LiveMemory:
    """The storages held now. Called by one thread at a time, but for what dies."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._rows: dict[int, Row] = {}
        self._died: deque[Tie] = deque()

    @property
    def nbytes(self) -> int:
        """Held now, in all."""
        self._reap()
        return self._gauge.now

    def exchange(self, dropped: Iterable[Rows], made: Iterable[object]) -> list[Rows]:
        """Let go of some storages and hold those of each of some values, in one moment."""
        if self._died:
            self._reap()
        change = 0
        for gone in dropped:  # first, since what is made may have the place of what died by now
            for row in gone:
                row.holders -= 1
                if row.holders == 0:
                    self._rows.pop(row.key, None)
                    change -= row.nbytes
        found: list[Rows] = []
        for value in made:
            rows = self._rows_of(value)
            for row in rows:
                if row.holders == 0:
                    change += row.nbytes
                row.holders += 1
            found.append(rows)
        if change:
            self._gauge.change(change)
        return found

    def more(self, values: Iterable[Tensor]) -> int:
        """Bytes of their storages that are not held now."""
        storages = {id(s): s for value in values for s in storages_of(value)}
        return sum(s.nbytes() for key, s in storages.items() if key not in self._rows)

    def rise(self, nbytes: int) -> None:
        """So much more is held for a moment."""
        self._reap()
        self._gauge.touch(nbytes)

    def keep(self, value: object) -> None:
        """Somebody else holds it from here on, until it dies: autograd, or a gradient."""
        for storage in storages_of(value):
            row = self._row(storage)
            assert row.holders, "a call holds it still"
            row.holders += 1
            row.watch.append(Tie(storage, self._died, row))

    def _rows_of(self, value: object) -> Rows:
        """One for each storage of a value."""
        if isinstance(value, Tensor):
            return (self._row(storage_of(value)),)
        if isinstance(value, Row):
            return (value,)
        if isinstance(value, list | tuple):
            return [row for part in value for row in self._rows_of(part)]
        return NO_ROWS

    def _row(self, storage: UntypedStorage) -> Row:
        # The id is that of the storage for as long as it lives: torch keeps one object for each.
        key = id(storage)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = Row(key, storage.nbytes())
        return row

    def _reap(self) -> None:
        """Let go of what died. It only says so, without any lock, since it may die anywhere."""
        while self._died:
            row = self._died.popleft().mark
            row.holders -= 1
            if row.holders == 0:
                self._rows.pop(row.key, None)
                self._gauge.change(-row.nbytes)


def storages_of(value: object) -> Iterator[UntypedStorage]:
    """Of the tensors that a value is."""
    if isinstance(value, Tensor):
        yield storage_of(value)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from storages_of(part)


class CallMemory:
    """What the registers of one call hold."""

    def __init__(self, holding: LiveMemory, holds: MemoryProfile, values: Sequence[Any]) -> None:
        self._holding, self._holds = holding, holds
        self._levels = iter(holds.levels)
        given = [*holds.given]
        rows = holding.exchange((), (values[r] for r in given))
        self._rows: dict[int, Rows] = dict(zip(given, rows, strict=True))

    def rises(self) -> LiveBytes:
        """The next instruction that changes what is held is about to be carried out."""
        level = next(self._levels, NO_LEVEL)
        if level.peak > level.before:
            self._holding.rise(level.peak - level.before)
        return level

    def ran(self, run: Run, values: Sequence[Any], placed: bool = False) -> None:
        """A region has made its results, and let go of what nobody reads any more.

        placed  those that it places lie elsewhere: each counts as if it had a storage of its own
        """
        counted, held = self._holds.registers, self._rows
        if not counted:
            return
        dropped = [held.pop(r) for r in run.drops if r in held]
        made = [r for r in run.outputs if r in counted]
        elsewhere = {run.outputs[at] for at in run.region.placed} if placed else ()
        rows = self._holding.exchange(
            dropped,
            [Row.standing_for(values[r]) if r in elsewhere else values[r] for r in made],
        )
        held.update(zip(made, rows, strict=True))

    def gives(self, register: int) -> Rows:
        """What a register held, which somebody else takes over."""
        return self._rows.pop(register, NO_ROWS)

    def lets_go(self, register: int) -> None:
        """Of what a register held."""
        self._holding.exchange([self.gives(register)], ())

    def end(self, values: Sequence[Any]) -> None:
        """The call is over: what backward needs is autograd's now, the rest its caller's."""
        for register in self._holds.kept:
            self._holding.keep(values[register])
        self.abandon()

    def abandon(self) -> None:
        """Nothing is held any more."""
        rows, self._rows = self._rows, {}
        self._holding.exchange(rows.values(), ())


MANY = 64
"""Departures kept before those that ended are forgotten; a step has a few under way at once."""


class Departures:
    """The transfers out of device memory that have not ended."""

    def __init__(self) -> None:
        self._leaving: list[tuple[int, int, Ticket]] = []

    def leave(self, source: Tensor, ticket: Ticket) -> None:
        """`ticket` is complete once nothing reads `source` any more."""
        if len(self._leaving) > MANY:
            self._leaving = [row for row in self._leaving if not row[2].done()]
        begin = source.data_ptr()
        self._leaving.append((begin, begin + source.nbytes, ticket))

    def under(self, target: Tensor) -> Sequence[Ticket]:
        """What must end before `target` is overwritten."""
        self._leaving = [row for row in self._leaving if not row[2].done()]
        begin = target.data_ptr()
        end = begin + target.nbytes
        return [ticket for low, high, ticket in self._leaving if low < end and begin < high]


@dataclass(frozen=True)
class _Departure:
    """nbytes   that count against what may be under way at once
    tickets  complete once nothing reads `sources` any more
    rows     of the storages that `sources` hold
    """

    nbytes: int
    tickets: Sequence[Ticket]
    sources: Sequence[Tensor | Row]
    rows: Rows


class Leaving:
    """What is under way, oldest first.

    waited_s  how long joins have waited, in all
    """

    def __init__(self, holding: LiveMemory) -> None:
        self.waited_s = 0.0
        self._holding = holding
        self._departures: deque[_Departure] = deque()
        self._nbytes = 0
        self._sent: list[tuple[Ticket, Tensor | Row]] | None = None

    def crowded(self, nbytes: int, most_bytes: int) -> bool:
        """Whether some are to be joined before so many bytes leave."""
        return bool(self._departures) and self._nbytes + nbytes > most_bytes

    def expect(self, nbytes: int, most_bytes: int) -> None:
        """So many bytes are about to leave: join the oldest until all fit into `most_bytes`.

        From here to `sent`, whatever `note` is told of leaves with them.
        raises  what a transfer that is joined failed with until it had read; what fails later is
                raised by the next use of its entry, and by `drain`
        """
        while self.crowded(nbytes, most_bytes):
            self._join()
        self._sent = []

    def note(self, source: Tensor | Row, ticket: Ticket) -> None:
        """`ticket` is complete once nothing reads `source` any more."""
        if self._sent is not None:
            self._sent.append((ticket, source))

    def sent(self, nbytes: int, instead_of: Rows, stays: bool = False) -> None:
        """What was expected is under way, and held for that; `instead_of` no more.

        stays  it is held by more than that until it dies: it was made where it is at home
        """
        sent, self._sent = self._sent or [], None
        sources = [source for _, source in sent]
        (rows,) = self._holding.exchange([instead_of], [sources])
        if stays:
            self._holding.keep(sources)
        self._departures.append(_Departure(nbytes, [t for t, _ in sent], sources, rows))
        self._nbytes += nbytes

    def join(self, most_bytes: int = 0) -> None:
        """No more than `most_bytes` are under way any more. raises  what a transfer failed with"""
        while self._departures and (self._nbytes > most_bytes or not most_bytes):
            self._join()

    def abandon(self) -> None:
        """After an error: whatever was under way is not waited for here."""
        self._holding.exchange([d.rows for d in self._departures], ())
        self._departures.clear()
        self._nbytes, self._sent = 0, None

    def _join(self) -> None:
        departure = self._departures.popleft()
        self._nbytes -= departure.nbytes
        self._holding.exchange([departure.rows], ())
        since = perf_counter()
        for ticket in departure.tickets:
            ticket.wait()
        self.waited_s += perf_counter() - since
