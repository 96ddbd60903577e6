"""Gradients that stay in the memory that compute made them in, beside the arena.

Nothing is reserved for them: they lie where they were made, and their memory is free once they die.
"""

from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor

from zcompile.errors import TierFull
from zcompile.ir.types import HELD, Layout
from zcompile.runtime.tiers.tier_near import NearTier
from zcompile.runtime.tiers.tiers import Extent


class HeldTier(NearTier):
    """Tensors of the device, by the entries that they are. Compute alone moves their bytes."""

    name = HELD

    def __init__(self) -> None:
        self._bytes: dict[int, Tensor] = {}
        self._numbers = count()

    def take(self, value: Tensor, name: str) -> Extent:
        """Here `value` stays: 1-D, contiguous, and a storage of its own."""
        number = next(self._numbers)
        self._bytes[number] = value.view(torch.uint8)
        return Extent(number, 0, value.nbytes, name)

    def view(self, extent: Extent, begin: int, layout: Layout) -> Tensor:
        """A tensor over the bytes from `begin` on."""
        return layout.view(self._bytes[extent.file][begin : begin + layout.end_bytes])

    def pieces(self, extent: Extent, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        yield begin, self._bytes[extent.file][begin:end]

    def reserve(self, nbytes: int, name: str) -> Extent:
        """What is here was made here. raises  TierFull"""
        raise TierFull(name, nbytes, [self.usage()])

    def release(self, extent: Extent) -> None:
        del self._bytes[extent.file]

    def usage(self) -> tuple[str, int, int]:
        used = sum(value.numel() for value in self._bytes.values())
        return self.name, used, used

    def close(self) -> None:
        self._bytes.clear()
