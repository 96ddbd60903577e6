"""Pacing: a link that is slower than the machine it is emulated on.

A link is serial: n bytes keep it for n / rate seconds, one transfer after the other. The real
transfer happens first and counts towards that time.
"""

import threading
import time


class Pace:
    """The throttle of one link; thread-safe. `bytes_per_s` None lets everything pass."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._opened = threading.Event()

    def hold(self, nbytes: int, since: float) -> None:
        """Return once `nbytes` that set out at `since` (perf_counter) may have arrived."""
        if self.bytes_per_s is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, since) + nbytes / self.bytes_per_s
            free_at = self._free_at
        while (left := free_at - time.perf_counter()) > 0 and not self._opened.is_set():
            self._opened.wait(left)

    def open(self) -> None:
        """Hold nobody any longer; the store is closing."""
        self._opened.set()
