"""Bytes of entries at home: whether what is computed with is what earlier computes left there.

Transfers of the same bytes take effect in the order of their submission, so nothing races here.
But a fetch that is submitted before the store of what an earlier compute writes brings what was
there before. The order that is meant is that of the computes.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch

from zcompile.ir.schedule import Borrow, Fetch, Schedule, Store
from zcompile.verify.byte_ranges import ByteRanges

U = TypeVar("U")
Copies = Mapping[tuple[Hashable, torch.dtype], Hashable]
"""(entry, dtype) -> the entry that holds its copy in that dtype."""


class Span(NamedTuple):
    """Bytes [begin, end) of an entry."""

    entry: Hashable
    begin: int
    end: int


def span_of(access: Fetch | Store | Borrow, entries: Sequence[Hashable], copies: Copies) -> Span:
    """The bytes at home that are read or written."""
    entry = entries[access.entry]
    if isinstance(access, Borrow):
        layout = access.layout
        reach = (layout.offset + layout.span) * layout.dtype.itemsize
        return Span(entry, access.begin, access.begin + reach)
    if isinstance(access, Fetch) and access.cast is not None:
        narrow = access.cast.narrow
        entry = copies.get((entry, narrow), (entry, narrow))
    return Span(entry, access.begin, access.begin + access.nbytes)


def moved_and_borrowed(schedule: Schedule, spans: Sequence[Span | None]) -> "set[Span]":
    """Spans that compute has where they rest, while transfers move some of the same bytes."""
    rows = list(zip(schedule.instructions, spans, strict=True))
    borrowed = {span for x, span in rows if isinstance(x, Borrow) and span is not None}
    entries = {span.entry for span in borrowed}
    moved: dict[Hashable, ByteRanges[bool]] = {entry: ByteRanges() for entry in entries}
    for x, span in rows:
        if isinstance(x, Fetch | Store) and span is not None and span.entry in entries:
            moved[span.entry].put(span.begin, span.end, True)
    return {span for span in borrowed if moved[span.entry].over(span.begin, span.end)}


@dataclass(frozen=True)
class _Write(Generic[U]):
    """submitted  when: of a store, or the compute itself, if it wrote in place
    by            the use of a slot that was stored; None: in place
    """

    submitted: int
    by: U | None


class HomeBytes(Generic[U]):
    """Who last wrote and read which bytes at home; of entries that are written at all."""

    def __init__(self) -> None:
        self._written: dict[Hashable, ByteRanges[_Write[U]]] = {}
        self._read: dict[Hashable, ByteRanges[tuple[int, U]]] = {}

    def watch(self, entries: Iterable[Hashable]) -> None:
        """These will be written."""
        for entry in entries:
            self._written.setdefault(entry, ByteRanges())
            self._read.setdefault(entry, ByteRanges())

    def read(self, span: Span, by: U, fetched: int, now: int) -> bool:
        """Compute reads what `by` brought. False, if it was written after it was fetched."""
        if span.entry not in self._written:
            return True
        written = self._written[span.entry].over(span.begin, span.end)
        self._read[span.entry].put(span.begin, span.end, (now, by))
        return all(w.by is by or w.submitted < fetched for w in written)

    def store(self, span: Span, by: U, made: int, now: int) -> bool:
        """What compute made of `by` until `made` goes home. False, if others read it since, who
        were to see it."""
        read = self._read[span.entry].over(span.begin, span.end)
        self._written[span.entry].put(span.begin, span.end, _Write(now, by))
        return all(other is by or moment <= made for moment, other in read)

    def write_in_place(self, span: Span, now: int) -> None:
        """Compute writes them where they rest."""
        self._written[span.entry].put(span.begin, span.end, _Write(now, None))
