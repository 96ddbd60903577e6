"""The cores of a device that computes on the host's own are taken by one piece of compute at a
time."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class Cores:
    """Says who computes: a region of a call, or work of the host beside it. Either takes all
    cores; at once, each would take as much longer, and no time of theirs could be told.

    waited_s  seconds that calls have waited, in all
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def for_host(self) -> Iterator[None]:
        """A context in which work of the host has them."""
        with self._lock:
            yield

    def take_at_once(self) -> bool:
        """Take them for a region that waits for no work of the host, if they are free; to be given
        back."""
        return self._lock.acquire(blocking=False)

    def take(self) -> None:
        """The same, once they are free."""
        began = perf_counter()
        self._lock.acquire()
        self.waited_s += perf_counter() - began

    def give_back(self) -> None:
        """The region is over."""
        self._lock.release()
