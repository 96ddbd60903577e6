"""A range of elements as boxes, in which formats with blocks of tensors (DCP) keep shares."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A block of a tensor whose elements are consecutive in storage.

    offsets, sizes  per dimension of the tensor
    first           its first element, in the order of storage
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def boxes_of(size: Sequence[int], stride: Sequence[int], first: int, last: int) -> list[Box]:
    """The elements [first, last), in the order of storage, of a tensor without gaps: at most twice
    as many boxes as it has dimensions, less one, in that order.

    size=(4, 6), first=4, last=20:  row 0 from 4 on, rows 1 and 2 whole, row 3 up to 2
    """
    order = storage_order(size, stride)
    found, at = [], first
    for offsets, sizes in _row_major([size[dim] for dim in order], first, last):
        places = [order.index(dim) for dim in range(len(order))]
        box = Box(tuple(offsets[p] for p in places), tuple(sizes[p] for p in places), at)
        found.append(box)
        at += box.numel
    return found


def storage_order(size: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dimensions of a tensor without gaps, from the one of the largest steps to that of the
    smallest."""
    return sorted(range(len(size)), key=lambda dim: (-stride[dim], -size[dim], dim))


def _row_major(
    size: Sequence[int], first: int, last: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the boxes of the elements [first, last) of a row-major tensor."""
    if first >= last:
        return
    if not size:
        yield (), ()
        return
    if len(size) == 1:
        yield (first,), (last - first,)
        return
    row = prod(size[1:])
    low, high = -(-first // row), last // row
    if low > high:  # all of it within one row
        for offsets, sizes in _row_major(size[1:], first - high * row, last - high * row):
            yield (high, *offsets), (1, *sizes)
        return
    if first < low * row:
        for offsets, sizes in _row_major(size[1:], first - (low - 1) * row, row):
            yield (low - 1, *offsets), (1, *sizes)
    if low < high:
        zeros = (0,) * (len(size) - 1)
        yield (low, *zeros), (high - low, *size[1:])
    if high * row < last:
        for offsets, sizes in _row_major(size[1:], 0, last - high * row):
            yield (high, *offsets), (1, *sizes)
