"""Divides the elements of a tensor over ranks: every rank holds one contiguous share.

Shares are equal and in the order of storage. Each begins at a multiple of `SHARE_ELEMENTS`, so that
an element keeps its place in every vector loop, however many ranks there are: an elementwise op
then computes the same bits over shares as over the whole. The last shares are filled up with
padding, which is never shown and never saved.

Or all of a tensor is with one rank, its owner, as in ZeRO before ZeRO-Infinity: that comes over the
links of one rank alone, and is there to be compared with. Other ranks have a share without any
elements, of padding alone, so that nothing else need know of shares that are empty.

Ranks here are those that hold one whole together, counted from 0: where several groups hold a whole
each (`rank_mesh.py`), those of one group.
"""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from zcompile.ir.types import SMALL_BYTES, Layout, OneOwner, ParamSpec

SHARE_ELEMENTS = 1024
"""Shares are multiples of it, as are the chunks of an optimizer's step (`CHUNK_ELEMENTS`)."""
PIECE_BYTES = 64
"""In a bucket each gradient begins at a multiple, so that its elements are aligned."""


@dataclass(frozen=True)
class Partition:
    """The share of one rank in a tensor of `numel` elements that `ranks` ranks hold together.

    numel=5000, ranks=2:  rank 0 holds [0, 3072), rank 1 holds [3072, 5000) and 1144 of padding
             owner=1:  rank 0 holds 1024 of padding, rank 1 holds [0, 5000) and 120 of padding

    owner  the rank that holds all of it; None: each holds a slice
    """

    numel: int
    rank: int
    ranks: int
    owner: int | None = None

    @cached_property
    def count(self) -> int:
        """Elements of this rank's share, padding included; slices of all ranks have as many."""
        each = -(-self.numel // self.ranks)
        if self.owner is not None:
            each = self.numel if self.rank == self.owner else 1
        return -(-each // SHARE_ELEMENTS) * SHARE_ELEMENTS

    @property
    def padded(self) -> int:
        """Elements of all slices together, padding included."""
        assert self.owner is None, "shares are as large"
        return self.count * self.ranks

    @property
    def one_owner(self) -> OneOwner | None:
        """Which rank holds all of it; None: none does."""
        return None if self.owner is None else OneOwner(self.owner, self.rank, self.ranks)

    @property
    def own(self) -> tuple[int, int]:
        """The elements [first, last) of the tensor that this rank holds."""
        return self.of_rank(self.rank)

    @property
    def own_count(self) -> int:
        """Elements that this rank holds, without padding; none, if there are not enough."""
        first, last = self.own
        return last - first

    def of_rank(self, rank: int) -> tuple[int, int]:
        """The elements [first, last) of the tensor that `rank` holds."""
        if self.owner is not None:
            # No elements lie where they keep the order of shares.
            first, last = (self.numel * int(at) for at in (rank > self.owner, rank >= self.owner))
            return first, last
        return min(self.numel, rank * self.count), min(self.numel, (rank + 1) * self.count)

    def range_of(self, itemsize: int) -> "SharedRange":
        """All of the tensor, or of its gradient, as ranks hold it.

        itemsize  bytes of an element
        """
        nbytes, share_nbytes = self.numel * itemsize, self.count * itemsize
        return SharedRange(0, nbytes, share_nbytes, self.rank, self.ranks, self.owner)

    def cut(self, flat: Tensor) -> Tensor:
        """The share of this rank in a copy: [count, ...], the padding zeros.

        flat  [numel, ...], any dtype
        """
        first, last = self.own
        share = torch.zeros(self.count, *flat.shape[1:], dtype=flat.dtype, device=flat.device)
        share[: last - first] = flat[first:last]
        return share


def partition_of(
    layout: Layout, rank: int, ranks: int, owner: Callable[[int], int] | None = None
) -> Partition | None:
    """How a tensor is divided; None, if every rank holds all of it.

    That is so of small ones, whose collectives would cost more than their bytes, and of those that
    have gaps or read as something else than their bytes.

    owner  chooses the one rank that holds all of so many bytes; None: each holds a slice
    """
    if layout.nbytes <= SMALL_BYTES or not layout.covers(layout.nbytes):
        return None
    return Partition(layout.numel, rank, ranks, None if owner is None else owner(layout.nbytes))


class Owners:
    """Chooses a rank for each parameter, one after the other: the one with the fewest bytes so far,
    of those the first. All ranks have the same parameters in the same order, and so agree. Whatever
    else a rank makes, be it of its own, chooses by its name alone."""

    def __init__(self, ranks: int) -> None:
        self._nbytes = [0] * ranks

    def next(self, nbytes: int) -> int:
        """The owner of a parameter of so many bytes."""
        owner = self._nbytes.index(min(self._nbytes))
        self._nbytes[owner] += nbytes
        return owner

    def named(self, name: str) -> int:
        """The owner of what is no parameter."""
        return zlib.crc32(name.encode()) % len(self._nbytes)

    @property
    def nbytes(self) -> tuple[int, ...]:
        """What each rank was given so far."""
        return tuple(self._nbytes)

    def go_back_to(self, nbytes: Iterable[int]) -> None:
        """Let what was given since be nobody's: the tensors are not made after all."""
        self._nbytes = list(nbytes)


@dataclass(frozen=True)
class SharedRange:
    """Bytes [begin, begin + nbytes) of a tensor that ranks hold shares of: a tile of a weight, or
    of a gradient, or all of it. Each rank holds a part of it, or nothing.

    share_nbytes=4096, ranks=2, of which this is the second:
      bytes [3072, 6144):  rank 0 holds [0, 1024) of these 3072, this one [1024, 3072), which are
      the first 2048 of its share

    begin, nbytes  among the bytes of the tensor
    share_nbytes   of this rank's share, padding included; slices are all as large
    rank, ranks    this one, of how many
    owner          the rank that holds all of the tensor; None: each holds a slice
    """

    begin: int
    nbytes: int
    share_nbytes: int
    rank: int
    ranks: int
    owner: int | None = None

    def of_rank(self, rank: int) -> tuple[int, int]:
        """Those of its bytes that `rank` holds, [first, last) of `nbytes`."""
        if self.owner is not None:
            return 0, (self.nbytes if rank == self.owner else 0)
        first = rank * self.share_nbytes - self.begin
        last = first + self.share_nbytes
        return max(0, min(self.nbytes, first)), max(0, min(self.nbytes, last))

    @property
    def own(self) -> tuple[int, int]:
        """Those of its bytes that this rank holds, [first, last) of `nbytes`."""
        return self.of_rank(self.rank)

    @property
    def own_nbytes(self) -> int:
        """How many of its bytes this rank holds; 0: none."""
        first, last = self.own
        return last - first

    @property
    def home(self) -> tuple[int, int]:
        """The bytes [begin, end) of this rank's share that are of it; (0, 0): none."""
        first, last = self.own
        if first == last:
            return 0, 0
        at = self.begin - (0 if self.owner is not None else self.rank * self.share_nbytes)
        return at + first, at + last

    def in_nbytes(self, nbytes: int) -> "SharedRange":
        """The same elements in a dtype in which they have so many bytes."""
        begin, share_nbytes = (n * nbytes // self.nbytes for n in (self.begin, self.share_nbytes))
        return SharedRange(begin, nbytes, share_nbytes, self.rank, self.ranks, self.owner)


def shared_range(spec: ParamSpec, begin: int, numel: int, itemsize: int) -> SharedRange | None:
    """The elements [begin, begin + numel) of a parameter, or of its gradient, as ranks hold them;
    None, if each rank has all of it.

    itemsize  bytes of an element: a copy, or a gradient, may be of another dtype
    """
    if spec.share is None:
        return None
    first, last = spec.share
    share_nbytes = (last - first) // spec.layout.dtype.itemsize * itemsize
    owner, rank, ranks = spec.one_owner or (
        None,
        first // (last - first),
        spec.nbytes // (last - first),
    )
    return SharedRange(begin * itemsize, numel * itemsize, share_nbytes, rank, ranks, owner)


def range_of_fetch(spec: ParamSpec, brings: Layout) -> SharedRange | None:
    """As `shared_range`, of what a fetch brings: a tile of a weight, which is in one piece; None,
    if that is all of it, of which each rank holds a slice."""
    if not brings.dense or brings.numel >= spec.layout.numel:
        if spec.one_owner is None:
            return None
        return shared_range(spec, 0, spec.layout.numel, brings.dtype.itemsize)
    return shared_range(spec, brings.offset, brings.numel, brings.dtype.itemsize)


class Crossing(NamedTuple):
    """The bytes of a link between ranks that one collective takes.

    Ranks are taken for a ring, in which each passes on what has come to it. As much goes out as
    comes in, at the same time, so what counts is what comes: of what is gathered the shares of all
    others, of a gradient what each other has made of this rank's share, which has no padding then.
    Plans, throttles and what was measured all count so.

    arrives  bytes that come to this rank from the others
    slowest  the most that come to any of them, which a ring takes the time of; more than `arrives`
             where a tile lies in the shares of some ranks more than in those of others, and
             where a gradient is divided with padding
    """

    arrives: int
    slowest: int


def gathered(nbytes: int, ranks: int, tile: SharedRange | None = None) -> Crossing:
    """What crosses when each of so many ranks gets all of `nbytes`, of which they hold shares.

    tile  whose bytes these are; None: those of all shares, padding included
    """
    if tile is None:
        each = nbytes * (ranks - 1) // ranks
        return Crossing(each, each)
    least = min(last - first for first, last in map(tile.of_rank, range(ranks)))
    return Crossing(nbytes - tile.own_nbytes, nbytes - least)


def in_bucket(nbytes: int) -> int:
    """Bytes that a small gradient takes where several cross together, padding included."""
    return -(-nbytes // PIECE_BYTES) * PIECE_BYTES


def exchanged(nbytes: int, ranks: int, tile: SharedRange | None = None) -> Crossing:
    """What crosses when each of so many ranks gets what all have made of its share of `nbytes`.

    tile  whose bytes these are, all of a gradient or a part; None: every rank gets all of them
    """
    others = ranks - 1
    if tile is not None:
        most = _most_of(tile)
        return Crossing(tile.own_nbytes * others, most * others)
    return Crossing(nbytes * others, nbytes * others)


def summed_over_replicas(tile: SharedRange, replicas: int) -> Crossing:
    """What crosses when each of so many ranks that hold the same share gets what the groups of all
    have made of it.

    tile  the bytes that are summed up, all of a gradient or a part
    """
    others = replicas - 1
    return Crossing(tile.own_nbytes * others, _most_of(tile) * others)


def _most_of(tile: SharedRange) -> int:
    """The most bytes of a range that any rank holds."""
    return max(last - first for first, last in map(tile.of_rank, range(tile.ranks)))
