"""Orders moments of compute and transfers of a schedule, and tracks what is known of byte ranges.

Compute acts in order, so a moment of compute is a number. A transfer has a start and an end. An
order between the two is given by what both devices guarantee, and by nothing else:

    a transfer starts after the moments of compute, and after the ends of the transfers, that it
    is told to wait for
    compute that waits for a transfer goes on after its end, and so after all that it waited for

That an instruction stands above another orders compute with compute alone: the host runs ahead of
the device, copies of one link may overtake each other on their way through the disk, and links run
beside each other.

The file has two parts: that order (`Transfer`), and reads and writes of the bytes of entries
(`HomeBytes`).
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch

from zcompile.ir.byte_ranges import ByteRanges
from zcompile.ir.effects import GRADIENT, NEW, HomeAccess
from zcompile.ir.schedule import Schedule

NEVER = -2
"""The moment before every other: of a transfer that waits for no compute at all."""
BEGUN = -1
"""The moment that a call begins: after all compute that was submitted before."""


@dataclass(eq=False, slots=True)
class Transfer:
    """A transfer, and what surely happens before it starts and after it ends.

    passed  the last moment of compute that surely lies before its start
    after   transfers that surely end before its start, but for those that compute had seen by
            `passed`, so that a chain of transfers stays as long as what is in flight
    seen    the moment from which on compute surely comes after its end; None: not yet
    """

    passed: int
    after: frozenset["Transfer"]
    seen: int | None = None

    def starts_after(self, moment: int) -> bool:
        return moment <= self.passed

    def starts_after_end_of(self, other: "Transfer") -> bool:
        return other.ended_by(self.passed) or other in self.after

    def ended_by(self, moment: int) -> bool:
        """Whether compute at `moment` surely comes after its end."""
        return self.seen is not None and self.seen <= moment

    @classmethod
    def at(cls, moment: int) -> "Transfer":
        """What compute does at `moment`: it starts and ends there."""
        return cls(moment, frozenset(), moment)

    def wait_at(self, moment: int) -> None:
        """Let compute at `moment` wait for it."""
        for transfer in (self, *self.after):
            if transfer.seen is None:
                transfer.seen = moment


def start(moments: Iterable[int], transfers: Iterable[Transfer]) -> Transfer:
    """The transfer that is told to wait for these moments of compute and these transfers."""
    before = set[Transfer]()
    passed = max(moments, default=NEVER)
    for transfer in transfers:
        passed = max(passed, transfer.passed)
        before |= {transfer, *transfer.after}
    return Transfer(passed, frozenset(t for t in before if not t.ended_by(passed)))


U = TypeVar("U")
Copies = Mapping[tuple[Hashable, torch.dtype], Hashable]
"""(entry, dtype) -> the entry of its low-precision copy."""


class Span(NamedTuple):
    """Bytes [begin, end) of an entry."""

    entry: Hashable
    begin: int
    end: int


def span_of(home: HomeAccess | None, entries: Sequence[Hashable], copies: Copies) -> Span | None:
    """The bytes that an access names; None, if they are of a gradient or of a new entry, which
    nothing in the schedule reads."""
    if home is None or home.role in (GRADIENT, NEW):
        return None
    entry = entries[home.entry]
    if home.copy_dtype is not None:
        entry = copies.get((entry, home.copy_dtype), (entry, home.copy_dtype))
    return Span(entry, home.begin, home.end)


def moved_and_borrowed(schedule: Schedule, spans: Sequence[Span | None]) -> "set[Span]":
    """Spans that compute uses in place, while transfers move some of the same bytes."""
    every = zip(schedule.effects, spans, strict=True)
    rows = [(x, span) for x, span in every if span is not None]
    borrowed = {span for x, span in rows if not x.is_transfer}
    entries = {span.entry for span in borrowed}
    moved: dict[Hashable, ByteRanges[bool]] = {entry: ByteRanges() for entry in entries}
    for x, span in rows:
        if x.is_transfer and span.entry in entries:
            moved[span.entry].put(span.begin, span.end, True)
    return {span for span in borrowed if moved[span.entry].over(span.begin, span.end)}


@dataclass(frozen=True)
class _Write(Generic[U]):
    """The last write of a range.

    submitted  moment of the store, or of the compute that wrote in place
    by         the use of a slot that was stored; None: a value, or in place
    """

    submitted: int
    by: U | None


class HomeBytes(Generic[U]):
    """Checks that compute reads what earlier compute wrote to entries.

    Transfers of the same bytes take effect in the order of their submission, so nothing races here.
    But a fetch that is submitted before the store of what an earlier compute writes brings the
    bytes from before. The order that is meant is that of the computes. Only entries that are
    written are tracked.
    """

    def __init__(self) -> None:
        self._written: dict[Hashable, ByteRanges[_Write[U]]] = {}
        self._read: dict[Hashable, ByteRanges[tuple[int, U]]] = {}

    def watch(self, entries: Iterable[Hashable]) -> None:
        """Track these entries, which will be written."""
        for entry in entries:
            self._written.setdefault(entry, ByteRanges())
            self._read.setdefault(entry, ByteRanges())

    def read(self, span: Span, by: U, fetched: int, now: int) -> bool:
        """Compute reads bytes that `by` brought. False, if they were written after they were
        fetched."""
        if span.entry not in self._written:
            return True
        written = self._written[span.entry].over(span.begin, span.end)
        self._read[span.entry].put(span.begin, span.end, (now, by))
        return all(w.by is by or w.submitted < fetched for w in written)

    def store(self, span: Span, by: U | None, made: int, now: int) -> bool:
        """Store what compute made, of `by` if that is a use of a slot, until moment `made`.

        False, if compute has read the bytes by another use since, and was to see the new ones.
        """
        read = self._read[span.entry].over(span.begin, span.end)
        self._written[span.entry].put(span.begin, span.end, _Write(now, by))
        return all(other is by or moment <= made for moment, other in read)

    def write_in_place(self, span: Span, now: int) -> None:
        """Compute writes the bytes where they rest."""
        self._written[span.entry].put(span.begin, span.end, _Write(now, None))
