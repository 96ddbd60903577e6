"""Many narrow values are widened by few calls: each call of the device costs the host as much as a
small value takes to be widened."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zcompile.ir.units import MiB

WIDE_BYTES = 16 * MiB
"""Of wide values that are there at once, unless one alone takes more: enough that a device computes
for longer than a call takes the host."""
WIDE_SHARE = 64
"""A small device may have so small a part of itself for them."""


def most_wide(device_bytes: int) -> int:
    """Bytes of wide values that may be there at once, beside the budget of the device."""
    return min(WIDE_BYTES, device_bytes // WIDE_SHARE)


def batches(nbytes: Sequence[int], most: int) -> Iterator[slice]:
    """Runs of values of which the wide ones may be there at once, in order.

    nbytes  of each, once it is wide
    most    bytes, if one alone does not take more
    """
    begin, taken = 0, 0
    for at, more in enumerate(nbytes):
        if taken and taken + more > most:
            yield slice(begin, at)
            begin, taken = at, 0
        taken += more
    if begin < len(nbytes):
        yield slice(begin, len(nbytes))


def widened(values: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The values, all of one device and one dtype, in a wider one."""
    wide = [torch.empty_like(value, dtype=dtype) for value in values]
    torch.ops.aten._foreach_copy_.default(wide, values)
    return wide
