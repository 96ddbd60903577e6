"""What the kernels of cross-entropy compute, in torch: the online logsumexp of arXiv 1805.02867.

For every token three numbers are carried from tile to tile of the vocabulary, where l are the
logits of a tile: the greatest logit (m), the sum of exponentials relative to it (s), and the
target's logit.

    n = max(m, max l);  s = s * exp(m - n) + sum exp(l - n);  m = n

m starts at the least finite number, since over a tile of -inf alone -inf - -inf would be nan.
Backward turns a tile of logits into its gradient, where log_norm is m + log s after the last tile:

    g = exp(l - log_norm) * loses + spread + onehot * picked
"""

import torch
from torch import Tensor


def see_tile(
    logits: Tensor, target: Tensor, greatest: Tensor, total: Tensor, picked: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Greatest, total and picked with one tile more; see `op.py::see_tile`."""
    wide = logits.to(greatest.dtype)
    most = torch.maximum(greatest, wide.amax(1, keepdim=True))
    more = (wide - most).exp().sum(1, keepdim=True)
    index, here = _one_hot(target, logits.shape[1])
    found = torch.where(here, wide.gather(1, index), picked)
    return most, torch.addcmul(more, total, (greatest - most).exp()), found


def see_tile_and_sum(
    logits: Tensor, target: Tensor, greatest: Tensor, total: Tensor, picked: Tensor, sum: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same, and the sum of the logits with those of the tile."""
    more = logits.to(greatest.dtype).sum(1, keepdim=True)
    return (*see_tile(logits, target, greatest, total, picked), sum + more)


def tile_gradient_(
    logits: Tensor,
    target: Tensor,
    log_norm: Tensor,
    loses: Tensor,
    picked: Tensor | None,
    spread: Tensor | None,
) -> Tensor:
    """Turn logits into their gradient, in place; see `op.py::tile_gradient_`."""
    made = (logits.to(log_norm.dtype) - log_norm).exp() * loses
    if spread is not None:
        made = made + spread
    if picked is not None:
        index, here = _one_hot(target, logits.shape[1])
        made = made.scatter_add(1, index, torch.where(here, picked, 0))
    return logits.copy_(made)


def _one_hot(target: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """For every token a class of this tile, and whether it is the target: [tokens, 1] each."""
    index = target.clamp(0, classes - 1)
    return index, index == target
