"""Tables for one launch over many tensors: where each row lies, and which program takes what.

A row is one parameter, or one gradient: addresses and sizes that are known when the kernel starts
and not when it is compiled. Rows are taken in pieces, so that a large one is shared among programs
and a small one does not hold any up.
"""

from array import array
from collections.abc import Sequence
from itertools import chain

import torch
import triton.language as tl
from torch import Tensor

COALESCED = 16
"""Bytes of the widest access of a thread, and what its address is a multiple of."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Dtypes of what rows may hold."""


def pieces_of(numels: Sequence[int], piece: int) -> Tensor:
    """Every piece as (row, first element): [pieces, 2] int64 on the CPU, in order.

    pieces_of([5, 0, 2], 4) is [[0, 0], [0, 4], [2, 0]]

    piece  elements of a piece; the last of a row may have fewer
    """
    sizes = torch.tensor(numels, dtype=torch.int64)
    counts = (sizes + piece - 1) // piece
    rows = torch.repeat_interleave(torch.arange(len(numels)), counts)
    firsts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return torch.stack([rows, (torch.arange(len(rows)) - firsts) * piece], 1)


def on_device(rows: Sequence[Sequence[int]], pieces: Tensor, device: torch.device) -> list[Tensor]:
    """Rows and pieces where a kernel reads them, brought by one copy that nobody waits for.

    rows     as many int64 numbers each
    returns  [rows, numbers] and [pieces, 2], int64 on `device`
    """
    # An array takes numbers out of Python sooner than torch does.
    table = torch.frombuffer(array("q", chain.from_iterable(rows)), dtype=torch.int64)
    table = table.view(len(rows), -1)
    both = torch.cat([table.flatten(), pieces.flatten()])
    if device.type == "cuda":
        both = both.pin_memory().to(device, non_blocking=True)
    first, second = both.split([table.numel(), pieces.numel()])
    return [first.view(table.shape), second.view(pieces.shape)]


def aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether every tensor begins where the widest access may."""
    return all(tensor.data_ptr() % COALESCED == 0 for tensor in tensors)


def programs_on(device: torch.device, pieces: int, per_core: int) -> int:
    """How many programs to launch: enough to fill the device, none without work.

    per_core  programs that one multiprocessor holds at once
    """
    if device.type != "cuda":
        return min(pieces, 2)  # interpreted, one after another: two show that pieces are shared
    cores = torch.cuda.get_device_properties(device).multi_processor_count
    return min(pieces, cores * per_core)
