"""Which rank writes which page of a file that several ranks write together.

Of a tensor that they share, each rank has one range of bytes; all else is with the first rank. So a
file is a row of stretches, each held by one rank, that need not begin at a page. A page is written
by one rank, so that no write of one can undo a write of another, on whatever filesystem: who has
its first byte writes it, but the first rank what it has anything but shares in. The others that
hold bytes of such a page send them there, less than a page each.

      rank 0         rank 1            rank 2                    holds
    |-----------|--.-----------|----.----------|
    0          p1             p2              p3                 pages
      rank 0     rank 0         rank 1                           writes
                    rank 1 sends    rank 2 sends
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zcompile.checkpoint.safetensors import PAGE_BYTES
from zcompile.ir.partition import Partition


class SharedRow(NamedTuple):
    """A tensor of a file of which ranks have shares: `numel` elements, from byte `begin` on.

    owner  the rank that has all of it; None: each has a slice
    """

    begin: int
    numel: int
    itemsize: int
    owner: int | None = None

    def of_rank(self, rank: int, ranks: int) -> tuple[int, int]:
        """The bytes [begin, end) of the file that are of a rank's share."""
        first, last = Partition(self.numel, rank, ranks, self.owner).of_rank(rank)
        return self.begin + first * self.itemsize, self.begin + last * self.itemsize


class Stretch(NamedTuple):
    """Bytes [begin, end) of a file, which `holder` has, and `writer` writes."""

    begin: int
    end: int
    holder: int
    writer: int


def stretches_of(nbytes: int, rows: Sequence[SharedRow], ranks: int) -> list[Stretch]:
    """All bytes of a file, in order; those of a page have one writer.

    nbytes  of the file
    rows    what ranks have shares of, in the order of the file; all else is with rank 0
    """
    held = list(_held(nbytes, rows, ranks))
    writers: dict[int, int] = {}
    for begin, end, holder, is_share in held:
        for page in (begin // PAGE_BYTES, (end - 1) // PAGE_BYTES):
            writers.setdefault(page, holder)
            if not is_share:
                writers[page] = holder
    found: list[Stretch] = []
    for begin, end, holder, _ in held:
        # Its first page and its last one may be another's to write.
        head = min(end, (begin // PAGE_BYTES + 1) * PAGE_BYTES)
        tail = max(head, end // PAGE_BYTES * PAGE_BYTES)
        for low, high in ((begin, head), (head, tail), (tail, end)):
            if low < high:
                found.append(Stretch(low, high, holder, writers.get(low // PAGE_BYTES, holder)))
    return list(_joined(found))


def _held(
    nbytes: int, rows: Sequence[SharedRow], ranks: int
) -> Iterator[tuple[int, int, int, bool]]:
    """Ranges of bytes, each with who has it, and whether it is of a share."""
    at = 0
    for row in rows:
        if at < row.begin:
            yield at, row.begin, 0, False
        for rank in range(ranks):
            begin, end = row.of_rank(rank, ranks)
            if begin < end:
                yield begin, end, rank, True
        at = row.begin + row.numel * row.itemsize
    if at < nbytes:
        yield at, nbytes, 0, False


def _joined(stretches: Sequence[Stretch]) -> Iterator[Stretch]:
    """Neighbours that one rank holds and one writes as one."""
    last: Stretch | None = None
    for stretch in stretches:
        if last is not None and last[2:] == stretch[2:]:
            last = last._replace(end=stretch.end)
            continue
        if last is not None:
            yield last
        last = stretch
    if last is not None:
        yield last
