"""The meter holds what was measured: bytes per link, seconds per activity, peaks per tier, counts.

Bytes are counted where they move, peaks where bytes are handed out; nothing here is copied from a
plan, except `planned_peak`, which is there to be compared.
"""

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from zcompile.config import LINKS
from zcompile.ir.step import Passage

SECONDS = ("compute", "stall", "optimizer")
TOTALS = ("steps", "gathers", "updates_on_host")
"""Counts of events; a reset zeroes them."""
STRUCTURE = ("graphs", "regions", "distinct_regions")
"""Counts of what was compiled; they stay true, so a reset leaves them."""
MOST_SPANS = 4096
"""Device stopwatch pairs kept unread; far more than are in flight on a stream at once."""

MOST_PASSAGES = 1 << 18
"""Passages kept for a timeline; a step of some hundred layers has a tenth of that."""

Value = dict[str, int] | dict[str, float] | int


class Stamp(Protocol):
    """A moment on a device's clock."""

    def until(self, later: "Stamp") -> float:
        """Seconds from here to `later`; blocks until the device has passed both."""

    def passed(self) -> bool:
        """Whether the device has passed it."""


@dataclass(eq=False)
class Walk:
    """One walk of a schedule, to which spans belong.

    schedule  its serial
    timed     its spans are of all activities, one after the other; else one span is of all of it
    over      it came to its end, of which the next span is the last: nothing was raised
    """

    schedule: int
    timed: bool
    over: bool = False

    def end(self) -> None:
        """Note that it is over."""
        self.over = True


MOST_SPLITS = 1024
"""Schedules of which is kept how the time of their walks divides."""


class Gauge:
    """A level and its high-water mark; thread-safe. `within`: a level that this is a part of."""

    def __init__(self, within: "Gauge | None" = None) -> None:
        self.now = 0
        self.peak = 0
        self._crest = 0
        self._within = within
        self._lock = threading.Lock()

    def change(self, delta: int) -> None:
        with self._lock:
            self.now += delta
            if self.now > self._crest:
                self._crest = self.now
                if self.now > self.peak:
                    self.peak = self.now
        if self._within is not None:
            self._within.change(delta)

    def touch(self, more: int) -> None:
        """Count a level that is higher by `more` for a moment."""
        self.at_least(self.now + more)
        if self._within is not None:
            self._within.touch(more)

    def at_least(self, level: int) -> None:
        """Raise the high-water mark to `level`."""
        with self._lock:
            self.peak = max(self.peak, level)
            self._crest = max(self._crest, level)

    def crest(self) -> int:
        """Highest level since this was asked last."""
        with self._lock:
            crest, self._crest = self._crest, self.now
            return crest

    def reset(self) -> None:
        with self._lock:
            self.peak = self._crest = self.now


@dataclass(frozen=True)
class Totals:
    """What was counted in all, resets or not: bytes by link, seconds by activity, steps."""

    nbytes: Mapping[str, int]
    seconds: Mapping[str, float]
    steps: int


class Meter:
    """The measurements of one store; thread-safe."""

    def __init__(self) -> None:
        self.together, self.host, self.disk = Gauge(), Gauge(), Gauge()
        self.device, self.activations = Gauge(self.together), Gauge(self.together)
        self.planned_device, self.planned_host, self.planned_disk = Gauge(), Gauge(), Gauge()
        self.planned_activations, self.planned_together = Gauge(), Gauge()
        self._lock = threading.Lock()
        self._bytes = dict.fromkeys(LINKS, 0)
        self._seconds = dict.fromkeys(SECONDS, 0.0)
        self._busy: dict[str, tuple[int, float, float]] = {}
        self._counts = dict.fromkeys((*TOTALS, *STRUCTURE), 0)
        self._before = Totals(dict.fromkeys(LINKS, 0), dict.fromkeys(SECONDS, 0.0), 0)
        """What had been counted by the last reset."""
        self._spans: deque[tuple[str, Stamp, Stamp, Walk | None]] = deque()
        self._splits: dict[int, dict[str, float]] = {}
        """Serial of a schedule -> the seconds of each activity in its last walk that was timed to
        the end."""
        self._latest: tuple[Walk | None, dict[str, float]] = None, {}
        """The timed walk of which a span was read last, and its seconds so far."""
        self._passages: deque[Passage] | None = None

    def moved(self, link: str, nbytes: int) -> None:
        """`nbytes` have travelled over `link`, or are enqueued there where the device orders copies
        itself."""
        with self._lock:
            self._bytes[link] += nbytes

    def busy(self, link: str, nbytes: int, since: float, until: float, name: str = "") -> None:
        """`nbytes` of an entry called `name` that set out over `link` at `since` have arrived;
        times of one clock, in its order.

        The time in which several were in flight at once counts once, for the first to arrive.
        """
        with self._lock:
            total, seconds, last = self._busy.get(link, (0, 0.0, 0.0))
            begin = min(max(since, last), until)
            self._busy[link] = total + nbytes, seconds + until - begin, max(last, until)
            if self._passages is not None:
                self._passages.append(Passage(link, name, nbytes, begin, until))

    def keep_passages(self, wanted: bool) -> None:
        """Remember what passes links from here on, or no more."""
        with self._lock:
            self._passages = deque(maxlen=MOST_PASSAGES) if wanted else None

    def take_passages(self) -> tuple[Passage, ...]:
        """What has passed links since this was asked last, in the order of arrival."""
        with self._lock:
            taken = tuple(self._passages or ())
            if self._passages is not None:
                self._passages.clear()
        return taken

    def crests(self) -> tuple[int, int, int, int]:
        """Highest levels since this was asked last: bytes of the arena and of live values of graphs
        outside it, of these alone, of the host, and of the disk."""
        both, outside = self.together.crest(), self.activations.crest()
        return both, outside, self.host.crest(), self.disk.crest()

    def traffic(self) -> dict[str, tuple[int, float]]:
        """Bytes and seconds in use of each link that can tell, in all; no reset touches them."""
        with self._lock:
            return {link: row[:2] for link, row in self._busy.items()}

    def add(self, activity: str, seconds: float) -> None:
        """`activity`, one of SECONDS, took that long."""
        with self._lock:
            self._seconds[activity] += seconds

    def span(self, activity: str, begin: Stamp, end: Stamp, walk: Walk | None = None) -> None:
        """`activity` lasted from `begin` to `end` of the device's clock, which is read later.

        walk  that it is a part of, if it is; of one that is not timed, the span is divided as the
              last one of its schedule was that is
        """
        self._spans.append((activity, begin, end, walk))
        if len(self._spans) > MOST_SPANS:
            self._read_spans(MOST_SPANS // 2)

    def count(self, what: str, n: int = 1) -> None:
        """`n` more of one of TOTALS or STRUCTURE."""
        with self._lock:
            self._counts[what] += n

    def plan_device(self, nbytes: int) -> None:
        """Note that so many bytes of the device arena will be used at once."""
        self.planned_device.at_least(nbytes)

    def bytes(self) -> dict[str, int]:
        with self._lock:
            return dict(self._bytes)

    def seconds(self) -> dict[str, float]:
        self._read_spans(0)
        with self._lock:
            return dict(self._seconds)

    def in_all(self) -> Totals:
        """What was counted in all; seconds as far as the device has come, which is not waited
        for."""
        self._read_spans(0, waits=False)
        with self._lock:
            return self._totals()

    def _totals(self) -> Totals:
        before = self._before
        return Totals(
            {link: n + before.nbytes[link] for link, n in self._bytes.items()},
            {what: s + before.seconds[what] for what, s in self._seconds.items()},
            self._counts["steps"] + before.steps,
        )

    def peak(self) -> dict[str, int]:
        return {
            "device": self.device.peak,
            "host": self.host.peak,
            "disk": self.disk.peak,
            "activations": self.activations.peak,
            "together": self.together.peak,
        }

    def planned_peak(self) -> dict[str, int]:
        return {
            "device": self.planned_device.peak,
            "host": self.planned_host.peak,
            "disk": self.planned_disk.peak,
            "activations": self.planned_activations.peak,
            "together": self.planned_together.peak,
        }

    def snapshot(self) -> dict[str, Value]:
        """All of it as a plain dict: the value of `zcompile.stats`."""
        with self._lock:
            counts = dict(self._counts)
        return {
            "bytes": self.bytes(),
            "seconds": self.seconds(),
            "peak": self.peak(),
            "planned_peak": self.planned_peak(),
            **counts,
        }

    def reset(self) -> None:
        """Zero the totals; peaks start again from what is in use now."""
        self._read_spans(0)
        with self._lock:
            self._before = self._totals()
            self._bytes = dict.fromkeys(LINKS, 0)
            self._seconds = dict.fromkeys(SECONDS, 0.0)
            self._counts.update(dict.fromkeys(TOTALS, 0))
        for gauge in (self.device, self.activations, self.together, self.host, self.disk):
            gauge.reset()

    def _read_spans(self, keep: int, waits: bool = True) -> None:
        """Count all but `keep` spans; `waits`: also those that the device has not passed."""
        while len(self._spans) > keep:
            try:
                if not waits and not self._spans[0][2].passed():
                    return
                activity, begin, end, walk = self._spans.popleft()
            except IndexError:  # another thread reads them too
                return
            seconds = begin.until(end)
            if walk is None:
                self.add(activity, seconds)
            else:
                self._add_of(walk, activity, seconds)

    def _add_of(self, walk: Walk, activity: str, seconds: float) -> None:
        """As `add`, of a span of a walk."""
        with self._lock:
            if walk.timed:
                if self._latest[0] is not walk:
                    self._latest = walk, {}
                split = self._latest[1]
                split[activity] = split.get(activity, 0.0) + seconds
                if walk.over:
                    if len(self._splits) >= MOST_SPLITS:
                        self._splits.clear()
                    self._splits[walk.schedule] = split
                self._seconds[activity] += seconds
                return
            parts = self._splits.get(walk.schedule, {})
            whole = sum(parts.values())
            if not whole:  # nothing is known of it
                parts, whole = {activity: 1.0}, 1.0
            for part, part_s in parts.items():
                self._seconds[part] += seconds * part_s / whole
