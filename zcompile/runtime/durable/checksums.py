"""Checksums of what rests on disk: taken of each piece as it is written, kept until it is replaced.

A piece is what one write brought. Whoever reads it back whole can tell whether a bit has changed.
"""

import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

try:
    import xxhash
except ImportError:  # pragma: no cover  # slower without it, by a factor of six; still right
    xxhash = None  # type: ignore[assignment]  # as any optional module

Sum = Callable[[memoryview], int]


def _sums() -> Mapping[str, Sum]:
    found: dict[str, Sum] = {"crc32": zlib.crc32}
    if xxhash is not None:
        found["xxh3_64"] = xxhash.xxh3_64_intdigest
    return found


SUMS = _sums()
"""Name -> checksum. Both release the GIL; XXH3 makes 22 GB/s and CRC-32 4 GB/s on a core."""
BEST = "xxh3_64" if "xxh3_64" in SUMS else "crc32"
"""What new data is summed with."""


class Running:
    """The checksum `name` of bytes that come in parts, in order."""

    def __init__(self, name: str) -> None:
        self._xxh3 = xxhash.xxh3_64() if name == "xxh3_64" else None
        self._crc = 0

    def update(self, part: memoryview) -> None:
        if self._xxh3 is not None:
            self._xxh3.update(part)
        else:
            self._crc = zlib.crc32(part, self._crc)

    def value(self) -> int:
        return self._crc if self._xxh3 is None else self._xxh3.intdigest()


@dataclass(frozen=True)
class Piece:
    """Bytes [begin, end) of an extent.

    checksum  of exactly these; None: not known, since a part of what was written was replaced
    """

    begin: int
    end: int
    checksum: int | None


class Pieces:
    """The checksums of an entry as it is now: disjoint pieces, ordered."""

    def __init__(self, pieces: tuple[Piece, ...] = ()) -> None:
        self._pieces = list(pieces)

    def all(self) -> tuple[Piece, ...]:
        return tuple(self._pieces)

    def add(self, begin: int, end: int) -> None:
        """[begin, end) is being written; its checksum comes by `know`."""
        first = bisect_right(self._pieces, begin, key=lambda p: p.end)
        last = bisect_left(self._pieces, end, key=lambda p: p.begin)
        kept = []
        for old in self._pieces[first:last]:
            if old.begin < begin:
                kept.append(Piece(old.begin, begin, None))
            if old.end > end:
                kept.append(Piece(end, old.end, None))
        kept.append(Piece(begin, end, None))
        self._pieces[first:last] = sorted(kept, key=lambda p: p.begin)

    def know(self, begin: int, end: int, checksum: int) -> None:
        """The checksum of [begin, end), unless that is no piece any more."""
        at = bisect_left(self._pieces, begin, key=lambda p: p.begin)
        if at < len(self._pieces):
            piece = self._pieces[at]
            if (piece.begin, piece.end) == (begin, end):
                self._pieces[at] = replace(piece, checksum=checksum)
