"""Live memory counts the bytes that compiled graphs hold on the device outside the arena.

A storage counts once, while a register of a call, a transfer, or autograd (for backward) holds it.
What a region makes and drops inside cannot be seen from here; the schedule says how much that is.

Gradients lie in memory that compute made, outside the arena. Before one is sent home, compute joins
the oldest of those in flight until the others take no more than the schedule allows
(`InFlightGradients`): on CUDA the host does not wait, since what compute makes next comes after
their copies. When memory comes back does then not depend on how fast a link is, so live bytes can
be counted before the call (`memory/footprint.py`).

A put that ends a schedule reads its slot while the next schedule already begins. Within one
schedule the `after` of a fetch says what to wait for; between schedules `PendingReads` does: a
fetch waits for every transfer that reads the bytes it overwrites.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple

from torch import Tensor, UntypedStorage

from zcompile.ir.schedule import Run
from zcompile.ir.ties import Dead, Tie, tie_to
from zcompile.ir.torch_compat import storage_of
from zcompile.ir.types import LiveBytes, MemoryProfile
from zcompile.runtime.meter import Gauge
from zcompile.runtime.transfer.ticket import Ticket

# --- Storages, counted once ---


class LiveStorage:
    """A storage, and how many hold it. `watch`: the tie that tells that it died, or a chain of
    them."""

    __slots__ = ("holders", "key", "nbytes", "watch")

    def __init__(self, key: int, nbytes: int) -> None:
        self.key, self.nbytes, self.holders = key, nbytes, 0
        self.watch: object = None

    def watch_by(self, told: Tie) -> None:
        """Keep a tie that tells of its death."""
        self.watch = told if self.watch is None else [self.watch, told]

    @classmethod
    def standing_for(cls, value: Tensor) -> "LiveStorage":
        """A storage of its own to count, which `value` would have had elsewhere."""
        return cls(0, value.nbytes)


LiveStorages = Sequence[LiveStorage]
NO_STORAGES: LiveStorages = ()
NO_LEVEL = LiveBytes()


class LiveMemory:
    """The storages that are live now. Called by one thread at a time, but for what dies."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._rows: dict[int, LiveStorage] = {}
        self._died = Dead()

    @property
    def nbytes(self) -> int:
        """Live bytes, in all."""
        self._reap()
        return self._gauge.now

    @property
    def counted(self) -> int:
        """As `nbytes`, with what died since somebody looked."""
        return self._gauge.now

    def exchange(
        self, dropped: Iterable[LiveStorages], made: Iterable[object]
    ) -> list[LiveStorages]:
        """Drop some storages and hold those of each of some values, in one moment."""
        if self._died:
            self._reap()
        change = 0
        for gone in dropped:  # first, since what is made may have the place of what died by now
            for row in gone:
                row.holders -= 1
                if row.holders == 0:
                    self._rows.pop(row.key, None)
                    change -= row.nbytes
        found: list[LiveStorages] = []
        for value in made:
            # A plain tensor, the usual case, is not asked what it is.
            rows = (
                (self._row(storage_of(value)),) if type(value) is Tensor else self._rows_of(value)
            )
            for row in rows:
                if row.holders == 0:
                    change += row.nbytes
                row.holders += 1
            found.append(rows)
        if change:
            self._gauge.change(change)
        return found

    def more(self, values: Iterable[Tensor]) -> int:
        """Bytes of the storages of `values` that are not live now."""
        storages = {id(s): s for value in values for s in storages_of(value)}
        return sum(s.nbytes() for key, s in storages.items() if key not in self._rows)

    def rise(self, nbytes: int) -> None:
        """Count `nbytes` more that are live for a moment."""
        self._reap()
        self._gauge.touch(nbytes)

    def keep(self, value: object) -> None:
        """Count a value until it dies: somebody else holds it from here on, as autograd or a
        gradient."""
        for storage in storages_of(value):
            row = self._row(storage)
            assert row.holders, "a call holds it still"
            row.holders += 1
            row.watch_by(tie_to(storage, self._died, row))

    def hold_each(self, values: Iterable[Tensor]) -> None:
        """As `keep` of values that nobody holds yet."""
        self._reap()
        change = 0
        for value in values:
            storage = storage_of(value)
            row = self._row(storage)
            if row.holders == 0:
                change += row.nbytes
            row.holders += 1
            row.watch_by(tie_to(storage, self._died, row))
        if change:
            self._gauge.change(change)

    def drop(self, rows: LiveStorages) -> None:
        """Drop some storages."""
        change = 0
        for row in rows:
            row.holders -= 1
            if row.holders == 0:
                self._rows.pop(row.key, None)
                change -= row.nbytes
        if change:
            self._gauge.change(change)

    def pass_on(self, rows: LiveStorages, value: Tensor) -> LiveStorages:
        """Hold the storage of `value` in place of `rows`, and count it until it dies: as `exchange`
        and `keep`. Returns what is held instead."""
        storage = storage_of(value)
        if len(rows) != 1 or rows[0].key != id(storage):
            (rows,) = self.exchange([rows], [value])
            self.keep(value)
            return rows
        (row,) = rows
        row.holders += 1
        row.watch_by(tie_to(storage, self._died, row))
        return rows

    def _rows_of(self, value: object) -> LiveStorages:
        """One for each storage of a value."""
        if isinstance(value, Tensor):
            return (self._row(storage_of(value)),)
        if isinstance(value, LiveStorage):
            return (value,)
        if isinstance(value, list | tuple):
            return [row for part in value for row in self._rows_of(part)]
        return NO_STORAGES

    def _row(self, storage: UntypedStorage) -> LiveStorage:
        # The id is that of the storage for as long as it lives: torch keeps one object for each.
        key = id(storage)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = LiveStorage(key, storage.nbytes())
        return row

    def _reap(self) -> None:
        """Drop the storages that died. They only say so, without any lock, since they may die
        anywhere."""
        freed = 0
        while self._died:
            row = self._died.popleft().mark
            row.holders -= 1
            if row.holders == 0:
                self._rows.pop(row.key, None)
                freed += row.nbytes
        if freed:
            self._gauge.change(-freed)


def storages_of(value: object) -> Iterator[UntypedStorage]:
    """The storages of the tensors in a value."""
    if isinstance(value, Tensor):
        yield storage_of(value)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from storages_of(part)


class CallMemory:
    """The storages that the registers of one call hold."""

    def __init__(
        self,
        live_memory: LiveMemory,
        holds: MemoryProfile,
        levels: Iterable[LiveBytes],
        values: Sequence[Any],
    ) -> None:
        self._live_memory, self._holds = live_memory, holds
        self._levels = iter(levels)
        given = [*holds.given]
        rows = live_memory.exchange((), (values[r] for r in given))
        self._lent = live_memory.exchange((), (values[r] for r in holds.lent))
        self._begun = live_memory.counted
        self._most_more = 0
        self._rows: dict[int, LiveStorages] = dict(zip(given, rows, strict=True))

    def rises(self) -> LiveBytes:
        """The next instruction that changes live bytes is about to run; returns its planned
        bytes."""
        level, live = next(self._levels, NO_LEVEL), self._live_memory
        more = max(0, level.peak - level.before)
        if more:
            live.rise(more)
        self._most_more = max(self._most_more, live.counted + more - self._begun)
        return level

    def most_more(self) -> int:
        """The most bytes that were live by now, beyond those that were when the call began."""
        return max(self._most_more, self._live_memory.counted - self._begun)

    def ran(self, run: Run, values: Sequence[Any], placed: bool = False) -> None:
        """A region has made its results, and dropped what nobody reads any more.

        placed  those that it places lie elsewhere: each counts as if it had a storage of its own
        """
        counted, held = self._holds.registers, self._rows
        if not counted:
            return
        dropped = [held.pop(r) for r in run.drops if r in held]
        made = [r for r in run.outputs if r in counted]
        elsewhere = {run.outputs[at] for at in run.region.placed} if placed else ()
        rows = self._live_memory.exchange(
            dropped,
            [LiveStorage.standing_for(values[r]) if r in elsewhere else values[r] for r in made],
        )
        held.update(zip(made, rows, strict=True))

    def copied(self, register: int, copy: Tensor) -> None:
        """A copy of the value of a register was made, for a transfer. It counts until the register
        lets go, though it may die before, when that transfer has ended."""
        counted = LiveStorage.standing_for(copy)
        (rows,) = self._live_memory.exchange((), [counted])
        self._rows[register] = [*self._rows.get(register, NO_STORAGES), *rows]

    def gives(self, register: int) -> LiveStorages:
        """The storages of a register, which somebody else takes over."""
        return self._rows.pop(register, NO_STORAGES)

    def lets_go(self, register: int) -> None:
        """Drop the storages of a register."""
        self._live_memory.exchange([self.gives(register)], ())

    def end(self, values: Sequence[Any]) -> None:
        """The call is over: what backward needs is autograd's now, the rest its caller's."""
        for register in self._holds.kept:
            self._live_memory.keep(values[register])
        self.abandon()

    def abandon(self) -> None:
        """Drop all storages of the call."""
        rows = [*self._rows.values(), *self._lent]
        self._rows, self._lent = {}, []
        self._live_memory.exchange(rows, ())


# --- Gradients in flight ---


_Sent = tuple[Ticket, Tensor | LiveStorage]


class _InFlight(NamedTuple):
    """One gradient in flight.

    nbytes  that count against the bound
    sent    what is read, and the ticket that is complete once nothing reads it any more; of one
            that stays, what holds it until then
    rows    the live storages of what is read
    """

    nbytes: int
    sent: "Sequence[_Sent]"
    rows: LiveStorages


Lingering = tuple[tuple[int, int], ...]
"""Of gradients in flight when a call has ended, their bytes, and those that are live for that."""


class InFlightGradients:
    """The gradients in flight to their home tiers, oldest first.

    waited_s  seconds that the host waited for them, in all
    """

    def __init__(self, live_memory: LiveMemory) -> None:
        self.waited_s = 0.0
        self._live_memory = live_memory
        self._transfers: deque[_InFlight] = deque()
        self._nbytes = 0
        self._sent: list[_Sent] | None = None

    @property
    def expects(self) -> bool:
        """Whether what is put now is part of a gradient that compute is going to join."""
        return self._sent is not None

    def exceeds(self, nbytes: int, most_bytes: int) -> bool:
        """Whether compute must join some before `nbytes` more may be sent."""
        return bool(self._transfers) and self._nbytes + nbytes > most_bytes

    def expect(self, nbytes: int, most_bytes: int) -> None:
        """Let compute join the oldest until `nbytes` more fit into `most_bytes`.

        Those are about to be sent.

        From here to `sent`, whatever `note` is told of is part of them.
        raises  what a transfer that is waited for failed with until it had read; what fails later
                is raised by the next use of its entry, and by `drain`
        """
        self.make_way(nbytes, most_bytes)
        self._sent = []

    def make_way(self, nbytes: int, most_bytes: int) -> None:
        """Let compute join the oldest until `nbytes` more fit. raises  as `expect`"""
        while self.exceeds(nbytes, most_bytes):
            self._join_oldest()

    def note(self, source: Tensor | LiveStorage, ticket: Ticket) -> None:
        """`ticket` is complete once nothing reads `source` any more."""
        if self._sent is not None:
            self._sent.append((ticket, source))

    def sent(self, nbytes: int, instead_of: LiveStorages, stays: bool = False) -> None:
        """The expected gradient is in flight, and counts for that; `instead_of` counts no more.

        stays  it is held by more than that until it dies: it was made where it is at home
        """
        sent, self._sent = self._sent or [], None
        sources = [source for _, source in sent]
        (rows,) = self._live_memory.exchange([instead_of], [sources])
        if stays:
            self._live_memory.keep(sources)
        self._transfers.append(_InFlight(nbytes, sent, rows))
        self._nbytes += nbytes

    def stays(self, nbytes: int, value: Tensor, held: LiveStorages, ticket: Ticket) -> None:
        """As `expect`, `note` and `sent`, of a gradient that stays where it was made, once it
        does not exceed."""
        rows = self._live_memory.pass_on(held, value)
        self._transfers.append(_InFlight(nbytes, ((ticket, value),), rows))
        self._nbytes += nbytes

    def at_rest(self) -> bool:
        """Whether nothing is read that moves: gradients count as in flight that are at home."""
        return not any([transfer.sent for transfer in self._transfers])

    def lingering(self) -> "Lingering":
        """Those in flight that are at home and do not stay."""
        rows = ((x.nbytes, sum([r.nbytes for r in x.rows if not r.watch])) for x in self._transfers)
        return tuple([(nbytes, live) for nbytes, live in rows if live])

    def linger(self, rows: "Lingering") -> None:
        """Let those be in flight that `lingering` told of, and no others; none of them moves."""
        self.wait_down_to()
        for nbytes, live in rows:
            (held,) = self._live_memory.exchange((), [LiveStorage(0, live)])
            self._transfers.append(_InFlight(nbytes, (), held))
            self._nbytes += nbytes

    def wait_down_to(self, most_bytes: int = 0) -> None:
        """Let compute join the oldest until at most `most_bytes` are in flight.

        raises  what a transfer failed with
        """
        if not most_bytes:
            self._join_all()
        while self._transfers and self._nbytes > most_bytes:
            self._join_oldest()

    def abandon(self) -> None:
        """After an error: drop all without waiting."""
        self._live_memory.exchange([d.rows for d in self._transfers], ())
        self._transfers.clear()
        self._nbytes, self._sent = 0, None

    def _join_all(self) -> None:
        """As `_join_oldest`, of hundreds that stayed at once."""
        if not self._transfers:
            return
        joined, since = list[_InFlight](), perf_counter()
        try:
            while self._transfers:
                transfer = self._transfers.popleft()
                joined.append(transfer)
                for ticket, _ in transfer.sent:
                    ticket.join_compute()
        finally:
            self._nbytes -= sum([transfer.nbytes for transfer in joined])
            self._live_memory.exchange([transfer.rows for transfer in joined], ())
            self.waited_s += perf_counter() - since

    def _join_oldest(self) -> None:
        transfer = self._transfers.popleft()
        self._nbytes -= transfer.nbytes
        self._live_memory.drop(transfer.rows)
        since = perf_counter()
        for ticket, _ in transfer.sent:
            ticket.join_compute()  # which has the memory then
        self.waited_s += perf_counter() - since


# --- Reads of the arena ---

MOST_PENDING = 64
"""Reads kept before those that ended are dropped; a step has a few in flight at once."""


class PendingReads:
    """The transfers that still read device memory."""

    def __init__(self) -> None:
        self._reads: list[tuple[int, int, Ticket]] = []

    def add(self, source: Tensor, ticket: Ticket) -> None:
        """Note a transfer: `ticket` is complete once nothing reads `source` any more."""
        if len(self._reads) > MOST_PENDING:
            self._reads = [row for row in self._reads if not row[2].done()]
        begin = source.data_ptr()
        self._reads.append((begin, begin + source.nbytes, ticket))

    def of(self, target: Tensor) -> Sequence[Ticket]:
        """The tickets to wait for before `target` is overwritten."""
        if not self._reads:
            return ()
        begin = target.data_ptr()
        end = begin + target.nbytes
        return [
            ticket
            for low, high, ticket in self._reads
            if low < end and begin < high and not ticket.done()
        ]
