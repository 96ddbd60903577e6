"""Who knows of what: clocks of streams, events and host threads, and the accesses they order.

A clock maps the name of a stream, or of a piece of host work, to how far whoever has the clock
knows it to have come. An access (`Memory.touch`) is done by one of them at one tick. A second
access of the same bytes is ordered behind it if its doer's clock has that tick: then the first is
over in whatever time things take. If one of the two writes and neither is ordered, that is a pair
of accesses that nothing but luck keeps apart.

What a host thread knows is a *scope*: a thread has one from its beginning, and enters others for
what it does on behalf of somebody else (a callback, a job of a queue). A scope knows what it was
given, and what it learns by waiting; when it ends the thread knows what it knew before.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

Clock = dict[str, int]

LOCK = threading.RLock()
"""Guards all clocks; in itself it passes no knowledge."""


def learn(into: Clock, what: Mapping[str, int]) -> None:
    """Let `into` know `what` too."""
    for name, tick in what.items():
        if into.get(name, 0) < tick:
            into[name] = tick


def knows(clock: Mapping[str, int], what: Mapping[str, int]) -> bool:
    return all(clock.get(name, 0) >= tick for name, tick in what.items())


def joined(*clocks: Mapping[str, int]) -> Clock:
    found: Clock = {}
    for clock in clocks:
        learn(found, clock)
    return found


def common(one: Mapping[str, int], other: Mapping[str, int]) -> Clock:
    """What both know."""
    return {name: min(tick, other[name]) for name, tick in one.items() if name in other}


# --- Host threads ---

_NUMBERS = count(1)


@dataclass
class Scope:
    """What a host thread knows while it does one thing.

    name  of it as a doer of accesses: no two scopes have the same
    """

    known: Clock
    name: str = field(default_factory=lambda: f"host{next(_NUMBERS)}")
    tick: int = 0


_THREADS = threading.local()


def scope() -> Scope:
    """The one that this thread is in."""
    if not hasattr(_THREADS, "scopes"):
        _THREADS.scopes = [Scope({})]
    return _THREADS.scopes[-1]


def known() -> Clock:
    """What this thread knows now, as a copy."""
    with LOCK:
        return dict(scope().known)


def told(what: Mapping[str, int]) -> None:
    """This thread learns something."""
    with LOCK:
        learn(scope().known, what)


@contextmanager
def knowing(*what: Mapping[str, int]) -> Iterator[Scope]:
    """The thread does something, of which it knows this and no more."""
    scope()
    with LOCK:
        made = Scope(joined(*what))
    _THREADS.scopes.append(made)
    try:
        yield made
    finally:
        _THREADS.scopes.pop()


# --- Accesses ---


class Doer:
    """A stream, or whatever else does one thing after the other, and knows what came before it."""

    def __init__(self, name: str) -> None:
        self.name, self.known, self.tick = name, dict[str, int](), 0


class Access(NamedTuple):
    """Bytes [begin, end) of memory, read or written by `doer` as its work number `tick`."""

    begin: int
    end: int
    writes: bool
    doer: str
    tick: int
    label: str


class Pair(NamedTuple):
    """Two accesses of the same bytes, one of them writing, in the order in which they came."""

    first: str
    second: str


PAGE = 1 << 14


class Memory:
    """The accesses that a later one may have to be ordered behind."""

    def __init__(self) -> None:
        self.pairs: Counter[Pair] = Counter()
        self.accesses = 0
        self._pages: dict[int, dict[Access, None]] = {}

    def touch(
        self,
        doer: Doer | Scope,
        label: str,
        reads: list[tuple[int, int]],
        writes: list[tuple[int, int]],
    ) -> None:
        """`doer` does a piece of work that reads and writes such ranges (begin, end)."""
        with LOCK:
            doer.tick += 1
            doer.known[doer.name] = doer.tick
            for ranges, writing in ((reads, False), (writes, True)):
                for begin, end in ranges:
                    if begin < end:
                        made = Access(begin, end, writing, doer.name, doer.tick, label)
                        self._touch(made, doer.known)

    def _touch(self, new: Access, clock: Clock) -> None:
        self.accesses += 1
        for old in self._within(new.begin, new.end):
            ordered = clock.get(old.doer, 0) >= old.tick
            if not ordered and (old.writes or new.writes):
                self.pairs[_pair(old, new)] += 1
            covered = ordered and new.begin <= old.begin and old.end <= new.end
            if covered and (new.writes or (not old.writes and old.doer == new.doer)):
                self._drop(old)  # who is ordered behind the new one is behind this one too
        for page in range(new.begin // PAGE, (new.end - 1) // PAGE + 1):
            self._pages.setdefault(page, {})[new] = None

    def free(self, begin: int, end: int, *clocks: Mapping[str, int]) -> None:
        """Memory goes back to its allocator, of somebody who knows `clocks`: who is given it next
        may write to it at once."""
        with LOCK:
            for old in self._within(begin, end):
                if all(clock.get(old.doer, 0) < old.tick for clock in clocks):
                    self.pairs[Pair(_said(old), "freed")] += 1
                self._drop(old)

    def gone(self, begin: int, end: int) -> None:
        """Memory that nobody but host threads touches, each while it holds it, is let go of."""
        with LOCK:
            for old in self._within(begin, end):
                self._drop(old)

    def forget(self) -> None:
        """All is over, and known to all."""
        with LOCK:
            self._pages.clear()
            self.pairs.clear()

    def _within(self, begin: int, end: int) -> list[Access]:
        pages = range(begin // PAGE, (end - 1) // PAGE + 1)
        found = {old: None for page in pages for old in self._pages.get(page, ())}
        return [old for old in found if old.begin < end and begin < old.end]

    def _drop(self, old: Access) -> None:
        for page in range(old.begin // PAGE, (old.end - 1) // PAGE + 1):
            self._pages[page].pop(old, None)


def _said(access: Access) -> str:
    return f"{access.label} {'writes' if access.writes else 'reads'}"


def _pair(old: Access, new: Access) -> Pair:
    return Pair(_said(old), _said(new))
