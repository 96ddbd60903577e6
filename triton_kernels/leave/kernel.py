"""The kernel that packs gradients: one launch for all of them, by addresses that it reads."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.table import COALESCED, TYPES, aligned, on_device, pieces_of, programs_on

BLOCK = 2048
"""Elements of a gradient that one program takes at once: 8 for each of 256 threads. Gradients are
small, and a link is fed by many; a loop over blocks inside would be unrolled, and spill."""
WARPS = 8
PER_CORE = 4
"""Programs per multiprocessor: 32 warps."""


@triton.jit
def leave_rows(
    rows,
    pieces,
    n_pieces,
    GRAD: tl.constexpr,
    PACKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row is 3 numbers: addresses of the gradient and of its place, and how many elements.
    ALIGNED: bytes of which every address is a multiple."""
    for n in range(tl.program_id(0), n_pieces, tl.num_programs(0)):
        row = rows + tl.load(pieces + 2 * n) * 3
        begin = tl.multiple_of(tl.load(pieces + 2 * n + 1), BLOCK)
        source = tl.multiple_of(tl.load(row).to(tl.pointer_type(GRAD)), ALIGNED)
        place = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(PACKED)), ALIGNED)
        end = tl.load(row + 2)
        at = begin + tl.arange(0, BLOCK)
        if begin + BLOCK <= end:
            tl.store(place + at, tl.load(source + at).to(PACKED))
        else:
            tl.store(place + at, tl.load(source + at, mask=at < end).to(PACKED), mask=at < end)


def launch(grads: Sequence[Tensor], packed: Tensor, offsets: Sequence[int]) -> None:
    """Pack what `op.py::leave` was given, and has checked; there is at least one gradient."""
    begin, itemsize = packed.data_ptr(), packed.dtype.itemsize
    places = [begin + offset * itemsize for offset in offsets]
    lines = [[g.data_ptr(), place, g.numel()] for g, place in zip(grads, places, strict=True)]
    pieces = pieces_of([g.numel() for g in grads], BLOCK)
    n_pieces, device = len(pieces), grads[0].device
    if n_pieces == 0:
        return
    rows, pieces = on_device(lines, pieces, device)
    wide = aligned(grads) and all(place % COALESCED == 0 for place in places)
    leave_rows[(programs_on(device, n_pieces, PER_CORE),)](
        rows,
        pieces,
        n_pieces,
        GRAD=TYPES[grads[0].dtype],
        PACKED=TYPES[packed.dtype],
        ALIGNED=COALESCED if wide else 1,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
