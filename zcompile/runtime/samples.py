"""Seconds of things that happen again and again, and the one figure that stands for each.

The mean of the last RECENT counts, of which none counts for more than MOST times their median. A
step is the sum of hundreds of such times and comes near the sum of their means: noise only ever
adds, so medians or minima would sum up to too little every time. The limit leaves out what a
machine that sleeps adds. What was *cold*, when kernels are chosen and pages are touched for the
first time, counts only as long as nothing else is known.
"""

from collections import deque
from statistics import fmean, median

RECENT = 64
"""Samples kept of each thing that is timed."""
MOST = 16.0
"""Times the median."""


class Samples:
    """Seconds by key."""

    def __init__(self) -> None:
        self._times: dict[object, deque[float]] = {}
        self._cold: set[object] = set()

    def note(self, key: object, seconds: float, cold: bool = False) -> None:
        """`cold`: it was the first of its kind."""
        known = key in self._times
        if cold and known and key not in self._cold:
            return
        if cold:
            self._cold.add(key)
        elif key in self._cold:
            self._cold.discard(key)
            del self._times[key]
        self._times.setdefault(key, deque(maxlen=RECENT)).append(seconds)

    def least(self, key: object) -> float:
        return min(self._times[key])

    def means(self) -> dict[object, float]:
        return {key: _mean(times) for key, times in self._times.items()}

    def medians(self) -> dict[object, float]:
        return {key: median(times) for key, times in self._times.items()}

    def leasts(self) -> dict[object, float]:
        return {key: min(times) for key, times in self._times.items()}


def _mean(times: deque[float]) -> float:
    most = MOST * median(times)
    return fmean(min(seconds, most) for seconds in times)
