"""Many narrow values are widened by few calls: each call of the device costs the host as much as a
small value takes to be widened."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zcompile.ir.units import MiB

WIDE_BYTES = 16 * MiB
"""Of wide values that are there at once, unless one alone takes more: enough that a device computes
for longer than a call takes the host, and little beside what a model has there."""


def batches(nbytes: Sequence[int]) -> Iterator[slice]:
    """Runs of values of which the wide ones may be there at once, in order.

    nbytes  of each, once it is wide
    """
    begin, taken = 0, 0
    for at, more in enumerate(nbytes):
        if taken and taken + more > WIDE_BYTES:
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
