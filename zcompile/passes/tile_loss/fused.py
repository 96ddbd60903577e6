"""The same of a tile as `formulas.py` computes, by the kernels of cross-entropy.

A tile's products are as they were; what follows them is one op in each phase instead of about a
dozen, which reads the logits once, and backward writes them once. Sums of exponentials are taken in
another order than torch's, as they are over tiles at all.
"""

import torch
from torch import Tensor

from triton_kernels.cross_entropy.op import see_tile as see
from triton_kernels.cross_entropy.op import see_tile_and_sum, tile_gradient_
from zcompile.passes.tile_loss.formulas import Seen, Slice, logits_of


def see_tile(
    seen: Seen[Tensor], rows: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Seen[Tensor]:
    """What is known with one tile more."""
    logits, known = logits_of(rows, weight, bias), (seen.greatest, seen.total, seen.picked)
    assert seen.greatest.dtype is dtype, "the kernel sums in the dtype of what it is given"
    summed = None
    if seen.sum is None:
        greatest, total, picked = see(logits, seen.target, *known)
    else:
        greatest, total, picked, summed = see_tile_and_sum(logits, seen.target, *known, seen.sum)
    return Seen(seen.target - weight.shape[0], greatest, total, picked, summed)


def tile_gradient(
    piece: Slice[Tensor], weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradient of one tile of logits [tokens, classes], in the memory of the logits, and the
    targets for the next tile."""
    logits, target = logits_of(piece.rows, weight, bias), piece.target
    assert piece.log_norm.dtype is dtype, "the kernel computes in the dtype of what it is given"
    made = tile_gradient_(logits, target, piece.log_norm, piece.loses, piece.picked, piece.spread)
    return made, target if piece.picked is None else target - weight.shape[0]
