"""Divides the elements of a tensor over ranks: every rank holds one contiguous share.

Shares are equal and in the order of storage. Each begins at a multiple of `SHARE_ELEMENTS`, so that
an element keeps its place in every vector loop, however many ranks there are: an elementwise op
then computes the same bits over shares as over the whole. The last shares are filled up with
padding, which is never shown and never saved.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zcompile.ir.types import SMALL_BYTES, Layout

SHARE_ELEMENTS = 1024
"""Shares are multiples of it, as are the chunks of an optimizer's step (`CHUNK_ELEMENTS`)."""


@dataclass(frozen=True)
class Partition:
    """The share of one rank in a tensor of `numel` elements that `ranks` ranks hold together.

    numel=5000, ranks=2:  rank 0 holds [0, 3072), rank 1 holds [3072, 5000) and 1144 of padding
    """

    numel: int
    rank: int
    ranks: int

    @cached_property
    def count(self) -> int:
        """Elements of each share, padding included."""
        each = -(-self.numel // self.ranks)
        return -(-each // SHARE_ELEMENTS) * SHARE_ELEMENTS

    @property
    def padded(self) -> int:
        """Elements of all shares together, padding included."""
        return self.count * self.ranks

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
        return min(self.numel, rank * self.count), min(self.numel, (rank + 1) * self.count)

    def cut(self, flat: Tensor) -> Tensor:
        """The share of this rank in a copy: [count, ...], the padding zeros.

        flat  [numel, ...], any dtype
        """
        first, last = self.own
        share = torch.zeros(self.count, *flat.shape[1:], dtype=flat.dtype, device=flat.device)
        share[: last - first] = flat[first:last]
        return share


def partition_of(layout: Layout, rank: int, ranks: int) -> Partition | None:
    """How a tensor is divided; None, if every rank holds all of it.

    That is so of small ones, whose collectives would cost more than their bytes, and of those that
    have gaps or read as something else than their bytes.
    """
    if layout.nbytes <= SMALL_BYTES or not layout.covers(layout.nbytes):
        return None
    return Partition(layout.numel, rank, ranks)
