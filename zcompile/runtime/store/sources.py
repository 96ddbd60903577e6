"""A source is what an entry took its values from, where torch would have made both one tensor.

`p.data = x` makes p and x the same memory in torch. An entry cannot lie in the memory of a plain
tensor that others share, nor in another store. Then it takes the values, and whoever uses it after
the other was written is told, since it would show something else than torch does.
"""

import weakref
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from zcompile.errors import ParameterChanged
from zcompile.ir.ties import Dead, Tie, tie_to
from zcompile.ir.torch_compat import (
    held_outside_python,
    holders_of_memory,
    is_untouched,
    materialised,
    memory_of,
    raw_bytes,
    watch_memory,
)
from zcompile.ir.types import Layout
from zcompile.ir.units import KiB

ASSIGN_AGAIN = "assign .data once more after such a write, or give it a copy of its own (x.clone())"
HOW_TO_GO_ON = (
    "to go on with the values of the parameter, drop what else holds that memory (as a state_dict "
    "from before); for what was written, assign that (p.data = x); or write to a copy (x.clone())"
)
SMALL = 64 * KiB
"""Host memory of at most this size is compared each time: faster than asking who holds it."""


class SourcedEntry(Protocol):
    """What a source needs of an entry.

    store  has `read_all(entry)`, its bytes
    """

    sources: "tuple[Source, ...]"
    version: int
    store: Any

    @property
    def name(self) -> str: ...


class Source(Protocol):
    """What an entry took its values from."""

    def holds(self, entry: SourcedEntry) -> bool:
        """Whether anybody could still write the other side.

        raises  ParameterChanged, if somebody did
        """

    def before_write(self, entry: SourcedEntry) -> None:
        """The entry is about to be written, and will not have the values any more that it took."""

    def dissolve(self) -> None:
        """The entry has other values now."""


# --- Of an entry ---


def check_sources(entry: SourcedEntry) -> None:
    """raises  ParameterChanged, if what the entry took its values from has others now"""
    entry.sources = tuple(s for s in entry.sources if s.holds(entry))


def let_go(entry: SourcedEntry) -> bool:
    """Let go of memory that the values of the entry were taken from, if nobody else holds it by
    now; whether none is held any more.

    raises  ParameterChanged, if it was written meanwhile
    """
    held = (s for s in entry.sources if isinstance(s, MemorySource))
    if not any(source.is_held_by_others() for source in held):
        check_sources(entry)
    return not entry.sources


def before_write(entry: SourcedEntry) -> None:
    """Let sources note what they will compare with, before the entry is written."""
    for source in entry.sources:
        source.before_write(entry)


def drop_sources(entry: SourcedEntry) -> None:
    """Drop all sources of an entry that takes other values."""
    sources, entry.sources = entry.sources, ()
    for source in sources:
        source.dissolve()


def taken_from(value: Tensor) -> Iterator[SourcedEntry]:
    """The entries that took their values from where `value` lies, the very same elements.

    Only while neither was written since.
    """
    for tie in list(_sources_of(value)):
        source: MemorySource | None = tie()
        if source is None or not source.is_shown_by(value):
            continue
        entry = source._entry()
        if entry is not None and entry.version == source._version and source.is_current(entry):
            yield entry


# --- Plain memory ---

_SOURCES: dict[int, set[Tie]] = {}
"""Memory -> the sources that hold it: parts of one vector are the `.data` of many parameters."""
_DEAD = Dead()
"""Ties of sources that have died."""
_NEW: deque["weakref.ref[MemorySource]"] = deque()
"""Sources of whose memory nobody has asked yet who else holds it."""


class MemorySource:
    """The memory of a plain tensor as a source, held until nobody holds it but sources.

    Torch's count of its writes says much, and costs nothing, but `x.data` and storages count
    elsewhere. So torch is made to tell of any write (`watch_memory`), and once the memory was
    touched, which a reader may do too, bytes are compared at each use with what was taken. They are
    from the beginning, where torch cannot tell: of memory that is not its own, or that somebody
    holds outside Python. What was taken is in the entry, until that is written; then in a checksum.

    raises  ParameterChanged, if an entry took its values from there before, and was written since
    """

    def __init__(self, entry: SourcedEntry, value: Tensor) -> None:
        self._value = value.detach()
        self._writes = _write_count(self._value)
        small = self._value.is_cpu and self._value.nbytes <= SMALL
        self._watched = not small and watch_memory(self._value)
        self._sum = None if self._watched else _checksum_of(self._value)
        if self._watched:
            _NEW.append(weakref.ref(self))
        self._entry, self._version = weakref.ref(entry), entry.version
        self._told = False
        """Whether a write was reported: once, even if who wrote has dropped the memory."""
        memory, others = memory_of(self._value), _sources_of(self._value)
        for tie in list(others):
            other: MemorySource | None = tie()
            if other is not None and _share_bytes(other._value, self._value):
                other._share_with(entry)
        _SOURCES.setdefault(memory, others).add(tie_to(self, _DEAD, memory))
        entry.sources = (*entry.sources, self)

    def _share_with(self, entry: SourcedEntry) -> None:
        """Another entry takes its values from here too."""
        mine = self._entry()
        if mine is None or mine is entry:
            return
        if mine.version != self._version:
            raise _written_apart(entry, mine)
        EntrySource(entry, mine)

    def holds(self, entry: SourcedEntry) -> bool:
        others = self.is_held_by_others()
        if (others or not self._told) and not self.is_current(entry):
            self._told = True
            raise ParameterChanged(
                entry.name,
                "took the values of a plain tensor, and that tensor, or one that shares its "
                "memory, was written since",
                HOW_TO_GO_ON,
            )
        return others

    def is_held_by_others(self) -> bool:
        """Whether anybody but sources holds the memory."""
        return holders_of_memory(self._value) > len(_sources_of(self._value))

    def is_current(self, entry: SourcedEntry) -> bool:
        """Whether the memory has the values that were taken."""
        if _write_count(self._value) != self._writes:
            return False
        if self._is_untouched():
            return True
        if self._sum is None:
            self._sum = self._sum_of_entry(entry)
        return _checksum_of(self._value) == self._sum

    def _is_untouched(self) -> bool:
        """Whether torch says that nobody wrote; if not, it cannot say so any more."""
        _ask_for_holders()
        if self._watched and not is_untouched(self._value):
            self._watched = False
        return self._watched

    def before_write(self, entry: SourcedEntry) -> None:
        if self._sum is not None or entry.version != self._version:
            return
        if not self._is_untouched():
            self._sum = self._sum_of_entry(entry)
        elif self.is_held_by_others():
            self._sum = _checksum_of(self._value)

    def _sum_of_entry(self, entry: SourcedEntry) -> int | None:
        if entry.version != self._version:
            return None  # nobody knows any more what was taken
        sources, entry.sources = entry.sources, ()  # who reads looks at these first
        try:
            bytes_ = entry.store.read_all(entry)
        finally:
            entry.sources = sources
        return _checksum_of(Layout.of(self._value).view(bytes_))

    def is_shown_by(self, value: Tensor) -> bool:
        """Whether `value` lies exactly where the values were taken from."""
        mine = self._value
        return mine.storage_offset() == value.storage_offset() and Layout.of(mine) == Layout.of(
            value
        )

    def dissolve(self) -> None:
        """Nothing of the other side knows of it."""


def _ask_for_holders() -> None:
    """Ask for all new sources at once who else holds their memory, and may write it unseen by
    torch."""
    found = []
    while _NEW:
        try:
            source = _NEW.popleft()()
        except IndexError:  # another thread was here
            break
        if source is not None and source.is_held_by_others():
            found.append(source)
    values = [source._value for source in found]
    for source, outside in zip(found, held_outside_python(values), strict=True) if found else ():
        source._watched = source._watched and not outside


def _sources_of(value: Tensor) -> set[Tie]:
    """The sources that hold the memory of `value`, which lives."""
    while _DEAD:
        try:
            gone = _DEAD.popleft()
        except IndexError:  # another thread was here
            break
        others = _SOURCES.get(gone.mark, set())
        others.discard(gone)
        if not others:
            _SOURCES.pop(gone.mark, None)
    return _SOURCES.get(memory_of(value), set())


def _share_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether the bytes that two tensors of one memory span have any in common."""
    (begin, end), (other_begin, other_end) = map(_byte_span, (a, b))
    return max(begin, other_begin) < min(end, other_end)


def _byte_span(value: Tensor) -> tuple[int, int]:
    begin = int(value.storage_offset()) * value.element_size()
    return begin, begin + Layout.of(value).nbytes


def _write_count(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version  # those are not counted


def _checksum_of(value: Tensor) -> int:
    if _byte_span(value)[1] > value.untyped_storage().nbytes():
        return -1  # somebody took the memory away
    flat = materialised(value.cpu()).contiguous()
    return zlib.crc32(raw_bytes(flat)) if flat.numel() else 0


# --- Other entries ---


class EntrySource:
    """A source between two entries with the values of one memory, as those of two stores.

    Neither may be used after the other was written.
    """

    def __init__(self, one: SourcedEntry, other: SourcedEntry) -> None:
        self._sides = tuple((weakref.ref(side), side.version) for side in (one, other))
        for side in (one, other):
            side.sources = (*side.sources, self)

    def holds(self, entry: SourcedEntry) -> bool:
        ((other, version),) = [side for side in self._sides if side[0]() is not entry]
        found = other()
        if found is not None and found.version != version:
            raise _written_apart(entry, found)
        return found is not None

    def before_write(self, entry: SourcedEntry) -> None:
        """Versions tell."""

    def dissolve(self) -> None:
        for side, _ in self._sides:
            if (entry := side()) is not None:
                entry.sources = tuple(s for s in entry.sources if s is not self)


def _written_apart(entry: SourcedEntry, other: SourcedEntry) -> ParameterChanged:
    return ParameterChanged(
        entry.name,
        f"shares its .data with {other.name!r}, of another offloaded model or by a plain tensor "
        "that others hold, and that was written since",
        "offload both models as one module, let one take the .data of the other, or "
        + ASSIGN_AGAIN,
    )
