"""The cores of a device that computes on the host's own are taken by one piece of compute at a
time, as long as nobody waits for what comes after it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from zcompile.runtime.transfer.waiting import WAITS, Bell


class Cores:
    """Says who computes: a region of a call, or work of the host beside it. Either takes all
    cores; at once, each would take as much longer, and no time of theirs could be told.

    Regions come first. Work of the host gives way to them, unless any thread waits: it may be the
    one that computes, in the midst of a region, and wait for that work.

    waited_s  seconds that calls have waited, in all
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._lock = threading.Lock()
        """Held by who computes alone."""
        self._region_waits = False

    @contextmanager
    def for_host(self) -> Iterator[None]:
        """A context in which work of the host computes: alone, or beside a region while somebody
        waits."""
        alone = self._give_way()
        try:
            yield
        finally:
            if alone:
                self._lock.release()

    def take_at_once(self) -> bool:
        """Take them for a region that waits for no work of the host, if they are free; to be given
        back."""
        return self._lock.acquire(blocking=False)

    def take(self) -> None:
        """The same, once they are free."""
        began = perf_counter()
        self._region_waits = True
        try:
            self._lock.acquire()
        finally:
            self._region_waits = False
        self.waited_s += perf_counter() - began

    def give_back(self) -> None:
        """The region is over."""
        self._lock.release()
        WAITS.ring()

    def _give_way(self) -> bool:
        """Return when work of the host may compute: True, once no region does or wants to, and it
        has taken the cores; False, if somebody waits meanwhile."""
        bell: Bell = Bell()
        WAITS.bells.append(bell)
        try:
            while self._region_waits or not self._lock.acquire(blocking=False):
                if WAITS:
                    return False
                bell.get()
            return True
        finally:
            WAITS.bells.remove(bell)
