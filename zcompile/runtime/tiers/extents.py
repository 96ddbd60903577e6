"""Range allocators hand out ranges of an address space; written ranges say which bytes hold a
value.

The host tier and each file of the disk tier have one `RangeAllocator`; each entry has one
`WrittenRanges`: its other bytes are blank.
"""

from bisect import bisect_left, bisect_right


class RangeAllocator:
    """Allocates ranges of [0, capacity), all multiples of `alignment`; best fit, lowest on a
    tie."""

    def __init__(self, alignment: int, capacity: int = 0) -> None:
        self.alignment = alignment
        self.capacity = 0
        self.used_bytes = 0
        self._free: list[tuple[int, int]] = []  # (begin, end), ordered, never adjacent
        self.grow(capacity // alignment * alignment)

    def aligned(self, nbytes: int) -> int:
        return -(-nbytes // self.alignment) * self.alignment

    def take(self, nbytes: int) -> int | None:
        """Offset of `nbytes` (rounded up) that nobody holds; None when no hole is large enough."""
        nbytes = self.aligned(nbytes)
        if nbytes == 0:
            return 0
        fits = [
            (end - begin, begin, at)
            for at, (begin, end) in enumerate(self._free)
            if end - begin >= nbytes
        ]
        if not fits:
            return None
        _, begin, at = min(fits)
        _, end = self._free[at]
        self._free[at : at + 1] = [(begin + nbytes, end)] if begin + nbytes < end else []
        self.used_bytes += nbytes
        return begin

    def take_within(self, nbytes: int, begin: int, end: int, last: bool = False) -> int | None:
        """Offset of `nbytes` (rounded up) in the first hole of [begin, end) that has them, at its
        beginning.

        last     take the last such hole instead, at its end
        returns  None when no hole is large enough
        """
        nbytes = self.aligned(nbytes)
        holes = (
            (max(low, begin), min(high, end))
            for low, high in (reversed(self._free) if last else self._free)
        )
        offset = next(
            (high - nbytes if last else low for low, high in holes if high - low >= nbytes), None
        )
        if offset is not None:
            taken = self.take_at(offset, nbytes)
            assert taken, "a hole is free"
        return offset

    def take_at(self, offset: int, nbytes: int) -> bool:
        """Take [offset, offset + nbytes), rounded up; False when any of it is taken or beyond."""
        end = offset + self.aligned(nbytes)
        if end == offset:
            return True
        at = bisect_right(self._free, offset, key=lambda r: r[0]) - 1
        if at < 0 or self._free[at][1] < end:
            return False
        low, high = self._free[at]
        left, right = (low, offset), (end, high)
        self._free[at : at + 1] = [(a, b) for a, b in (left, right) if a < b]
        self.used_bytes += end - offset
        return True

    def give(self, offset: int, nbytes: int) -> None:
        """Take back what `take` returned."""
        nbytes = self.aligned(nbytes)
        if nbytes:
            self.used_bytes -= nbytes
            self._insert(offset, offset + nbytes)

    def grow(self, nbytes: int) -> None:
        """Move the end of the address space up by `nbytes`."""
        if nbytes:
            self._insert(self.capacity, self.capacity + nbytes)
            self.capacity += nbytes

    def spare_at_end(self) -> int:
        """Free bytes at the end of the space, which `grow` would extend."""
        if self._free and self._free[-1][1] == self.capacity:
            return self._free[-1][1] - self._free[-1][0]
        return 0

    def _insert(self, begin: int, end: int) -> None:
        at = bisect_left(self._free, (begin, end))
        assert at == 0 or self._free[at - 1][1] <= begin, "a range was given back twice"
        assert at == len(self._free) or end <= self._free[at][0], "a range was given back twice"
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at > 0 and self._free[at - 1][1] == begin:
            at -= 1
            begin = self._free.pop(at)[0]
        self._free.insert(at, (begin, end))


class WrittenRanges:
    """The bytes of an entry that hold a value: disjoint ranges, ordered, never adjacent."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    @classmethod
    def to(cls, end: int) -> "WrittenRanges":
        """Of an entry of which all bytes, up to `end`, hold a value."""
        made = cls()
        if end:
            made._ranges.append((0, end))
        return made

    def copy(self) -> "WrittenRanges":
        copied = WrittenRanges()
        copied._ranges = list(self._ranges)
        return copied

    def add(self, begin: int, end: int) -> None:
        if begin >= end:
            return
        first = bisect_left(self._ranges, begin, key=lambda r: r[1])
        last = bisect_right(self._ranges, end, key=lambda r: r[0])
        if first < last:
            begin = min(begin, self._ranges[first][0])
            end = max(end, self._ranges[last - 1][1])
        self._ranges[first:last] = [(begin, end)]

    def clear(self) -> None:
        self._ranges.clear()

    def holds(self, begin: int, end: int) -> bool:
        """Whether one range has all of [begin, end): the usual case, found at once."""
        return len(self._ranges) == 1 and self._ranges[0][0] <= begin and end <= self._ranges[0][1]

    def covers(self, begin: int, end: int) -> bool:
        return all(held for _, _, held in self.pieces(begin, end))

    def touches(self, begin: int, end: int) -> bool:
        """Whether any byte of [begin, end) holds a value."""
        return any(held for _, _, held in self.pieces(begin, end))

    def pieces(self, begin: int, end: int) -> list[tuple[int, int, bool]]:
        """[begin, end) cut into (begin, end, whether the bytes hold a value)."""
        cut: list[tuple[int, int, bool]] = []
        if begin >= end:
            return cut
        at = begin
        for low, high in self._ranges[bisect_right(self._ranges, begin, key=lambda r: r[1]) :]:
            if low >= end:
                break
            if at < low:
                cut.append((at, low, False))
            at = min(high, end)
            cut.append((max(low, begin), at, True))
        if at < end:
            cut.append((at, end, False))
        return cut
