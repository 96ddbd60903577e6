"""What is known of each byte of a block: disjoint ranges in order, each with a value.

Reading or writing a range costs the logarithm of how many there are, and what it touches.
"""

from bisect import bisect_left, bisect_right
from typing import Generic, TypeVar

T = TypeVar("T")


class ByteRanges(Generic[T]):
    """Nothing is known at first."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._rows: list[tuple[int, T]] = []
        """End and value, beside each begin."""

    def over(self, begin: int, end: int) -> list[T]:
        """The values of all ranges that share a byte with [begin, end), in order."""
        if begin >= end:
            return []
        low, high = self._touched(begin, end)
        return [value for _, value in self._rows[low:high]]

    def put(self, begin: int, end: int, value: T) -> None:
        """From here on this is what is known of [begin, end)."""
        if begin >= end:
            return
        low, high = self._touched(begin, end)
        begins, rows = [begin], [(end, value)]
        if low < high:
            first, (first_end, first_value) = self._begins[low], self._rows[low]
            last_end, last_value = self._rows[high - 1]
            if first < begin:
                begins.insert(0, first)
                rows.insert(0, (min(first_end, begin), first_value))
            if last_end > end:
                begins.append(end)
                rows.append((last_end, last_value))
        self._begins[low:high] = begins
        self._rows[low:high] = rows

    def _touched(self, begin: int, end: int) -> tuple[int, int]:
        """Which ranges share a byte with [begin, end): from the first to one past the last."""
        low = bisect_right(self._begins, begin)
        if low and self._rows[low - 1][0] > begin:
            low -= 1
        return low, max(low, bisect_left(self._begins, end))
