"""The link of a rank to the others: what has come over it, in which time, and how fast it may come.

Ranks of one machine stand in for those of a slower network: with a throttle, each collective holds
the link of its rank for its bytes, one after the other, as a throttled link between tiers is held
(`device/cpu.py`). What is counted as a collective's bytes says `ir/partition.py`.

The bytes themselves are sent at once. Behind them each rank waits until its link would have carried
what it takes, and only then tells those that it has exchanged messages with. So a collective ends
nowhere before the bytes could have come, had they set out when the last of those that send them
came to it; and as ranks only wait for a time that they know, and for each other in the order of a
lane, a throttle cannot make two wait in a circle.

Where groups of ranks each hold a whole, what crosses within a group may pass another link than what
crosses between groups (`LinksOfMesh`).
"""

import threading
import time
from typing import NamedTuple

from zcompile.ir.partition import Crossing
from zcompile.runtime.device.cpu import Throttle

LONG_BYTES = 64 * 1024
"""Of a collective whose rate counts: a shorter one says more of latencies."""
NOTHING = Crossing(0, 0)


class RankLink:
    """What comes to one rank from the others; thread-safe.

    name         "rank_to_rank", or "node_to_node": the slowest that a ring over all ranks passes
    bytes_per_s  of its throttle; None: it has none
    """

    def __init__(self, name: str = "rank_to_rank", bytes_per_s: float | None = None) -> None:
        self.name, self.bytes_per_s = name, bytes_per_s
        self._throttle = Throttle(bytes_per_s)
        self._lock = threading.Lock()
        self._nbytes, self._seconds = 0, 0.0
        """As `totals` tells them."""
        self._carried, self._carried_s = 0, 0.0
        """Bytes that came to the rank to which the most did, and seconds, since the beginning."""
        self._begun: list[float] = []
        """When those collectives began that are on their way."""
        self._since = 0.0
        """Since when some have been."""
        self._holding: set[str] = set()
        self.best_bytes_per_s = 0.0
        """The highest rate at which a long collective was carried, without its throttle."""

    @property
    def is_paced(self) -> bool:
        """Whether it has a throttle; the same on all ranks."""
        return self.bytes_per_s is not None

    def hold(self, what: str, nbytes: int, since: float) -> None:
        """Return once `nbytes` that set out at `since` (perf_counter) may have passed.

        what  for people
        """
        took = time.perf_counter() - since
        if nbytes >= LONG_BYTES and took > 0:
            self.best_bytes_per_s = max(self.best_bytes_per_s, nbytes / took)
        self._holding.add(what)
        try:
            self._throttle.delay(nbytes, since)
        finally:
            self._holding.discard(what)

    def holding(self) -> str:
        """What waits for the throttle, for people; "": nothing."""
        held = next(iter(tuple(self._holding)), "")
        return held and f"paces {held} by its throttle"

    def begins(self, at: float) -> None:
        """A collective begins now, `at` on the clock of perf_counter: those that overlap before
        their turn in the lane. Its bytes count as on their way until it `ends`, which this rank
        learns in that turn, maybe after they came; time in which two are counts once."""
        with self._lock:
            if not self._begun:
                self._since = at
            self._begun.append(at)

    def ends(self, came: Crossing, since: float, at: float) -> None:
        """A collective that began at `since` ends now, in which so much has come; `NOTHING`: it has
        failed."""
        with self._lock:
            self._nbytes += came.arrives
            self._carried += came.slowest
            self._begun.remove(since)
            if not self._begun:
                self._seconds += at - self._since
                self._carried_s += at - self._since

    @property
    def mean_bytes_per_s(self) -> float:
        """The rate of all that has come; 0.0: nothing has."""
        with self._lock:
            return self._carried / self._carried_s if self._carried_s else 0.0

    def totals(self, reset: bool = False) -> tuple[int, float]:
        """Bytes that have come, and seconds in which some were on their way; since the last
        `reset`, and all of what was on its way then."""
        with self._lock:
            seconds = self._seconds
            if self._begun:
                seconds += max(0.0, time.perf_counter() - self._since)
            found = self._nbytes, seconds
            if reset:
                self._nbytes, self._seconds = 0, 0.0
                rest = min(self._begun, default=self._since)
                self._carried_s += rest - self._since
                self._since = rest
        return found

    def stop(self) -> None:
        """Hold nothing back any more: the ranks have failed, or the session ends."""
        self._throttle.stop()


class LinksOfMesh(NamedTuple):
    """The links of collectives, by the ranks that these are over: for each the slowest that a ring
    over them passes. Two that pass the same one share it.

    of_group     those that hold a whole together
    of_replicas  those that hold the same share
    of_all       all that train the model
    """

    of_group: RankLink
    of_replicas: RankLink
    of_all: RankLink

    @classmethod
    def all_one(cls, link: RankLink) -> "LinksOfMesh":
        return cls(link, link, link)

    def distinct(self) -> list[RankLink]:
        """Each of the links once."""
        return list({link.name: link for link in self}.values())

    def named(self, name: str) -> RankLink | None:
        """The link of this name; None: nothing passes it."""
        return next((link for link in self if link.name == name), None)

    def stop(self) -> None:
        """As `RankLink.stop`, each."""
        for link in self:
            link.stop()
