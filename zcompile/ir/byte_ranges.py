"""Keeps values of ranges of bytes: who uses, or used last, which bytes of a block."""

from bisect import bisect_left, bisect_right
from typing import Generic, TypeVar

T = TypeVar("T")


class ByteRanges(Generic[T]):
    """Values of disjoint ranges of bytes, in order; empty at first.

    Reading or writing a range costs the logarithm of the number of ranges, and what it touches.
    """

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

    def bytes_over(self, begin: int, end: int) -> int:
        """How many bytes of [begin, end) have a value."""
        if begin >= end:
            return 0
        low, high = self._touched(begin, end)
        rows = zip(self._begins[low:high], self._rows[low:high], strict=True)
        return sum(min(end, last) - max(begin, first) for first, (last, _) in rows)

    def put(self, begin: int, end: int, value: T) -> None:
        """Set the value of [begin, end)."""
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
        """Indices [low, high) of the ranges that share a byte with [begin, end)."""
        low = bisect_right(self._begins, begin)
        if low and self._rows[low - 1][0] > begin:
            low -= 1
        return low, max(low, bisect_left(self._begins, end))
