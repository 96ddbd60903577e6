"""Computes one tile of a loss, in torch functions of a slice of tokens and a tile of classes.

Forward keeps three numbers per token: the greatest logit so far (m), the sum of exponentials
relative to it (s), and the logit of the target once its tile has come:

    l = x @ W[a:b].T;  n = max(m, max l);  s = s * exp(m - n) + sum exp(l - n);  m = n
    log p(target) = l[target] - (m + log s)

The likelihood itself is the op that was there, over one class: of the targets' log-probabilities
[T, 1], with targets that say 0 where they are valid. So reductions, ignored tokens and errors of
targets out of range stay what they were.

Backward recomputes each tile of logits and turns it into gradients:

    g = spread + onehot * picked - exp(l - log_norm) * total
    dx += g @ W[a:b];  dW[a:b] = g.T @ x;  db[a:b] = sum g

`picked` is the gradient of the target's log-probability, by the likelihood's own backward; `spread`
the gradient that label smoothing gives to all classes; `total` their sum over the classes.

Shapes: x [tokens, width], W [classes, width], l and g [tokens, classes], numbers per token [tokens,
1]. `dtype` is the one in which exponentials are summed, and gradients over tiles.
"""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")
"""A tensor, or the node that makes it."""

IGNORED = torch.iinfo(torch.int64).min
"""Target of a token that is ignored: no class of any vocabulary."""


def logits_of(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A tile of logits [tokens, classes], of rows [tokens, width], weight and bias [classes]."""
    transposed = weight.t()
    return torch.mm(rows, transposed) if bias is None else torch.addmm(bias, rows, transposed)


def one_hot(target: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """For every token a class of this tile, and whether its target is another one: [tokens, 1]
    each.

    target  less the number of classes in the tiles before, so that equal tiles are equal code
    """
    index = target.clamp(0, classes - 1)
    return index, index != target


# Forward


class Seen(NamedTuple, Generic[Value]):
    """What forward knows of some tokens after some tiles: [tokens, 1] each.

    target    less the number of classes in these tiles
    greatest  logit (m)
    total     sum of exponentials, relative to the greatest (s)
    picked    logit of the target, if it is in one of these tiles
    sum       of the logits, if somebody asks
    """

    target: Value
    greatest: Value
    total: Value
    picked: Value
    sum: Value | None


def nothing_seen(target: Tensor, dtype: torch.dtype, with_sum: bool) -> Seen[Tensor]:
    """What is known before the first tile, of targets [tokens, 1] int64."""
    zero = torch.zeros_like(target, dtype=dtype)
    # The least finite number, not -inf: over a tile of -inf alone, -inf - -inf would be nan.
    greatest = torch.full_like(zero, torch.finfo(dtype).min)
    return Seen(target, greatest, zero, zero, zero if with_sum else None)


def see_tile(
    seen: Seen[Tensor], rows: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Seen[Tensor]:
    """What is known with one tile more, whose logits are overwritten by their exponentials."""
    classes = weight.shape[0]
    logits = logits_of(rows, weight, bias).to(dtype)
    greatest = torch.maximum(seen.greatest, logits.amax(1, keepdim=True))
    index, other = one_hot(seen.target, classes)
    here = logits.gather(1, index)
    logits_sum = None if seen.sum is None else seen.sum + logits.sum(1, keepdim=True)
    tile_total = logits.sub_(greatest).exp_().sum(1, keepdim=True)
    total = torch.addcmul(tile_total, seen.total, (seen.greatest - greatest).exp())
    picked = torch.where(other, seen.picked, here)
    return Seen(seen.target - classes, greatest, total, picked, logits_sum)


def log_norm_of(seen: Seen[Tensor]) -> Tensor:
    """Log of the sum of exponentials of all logits of a token: [tokens, 1]."""
    return seen.greatest + seen.total.log()


def log_prob_of(picked: Tensor, log_norm: Tensor, dtype: torch.dtype) -> Tensor:
    """Log-probability of the targets [tokens, 1], in `dtype`."""
    return (picked - log_norm).to(dtype)


def summed_log_probs(
    logits_sum: Tensor, log_norm: Tensor, classes: int, dtype: torch.dtype
) -> Tensor:
    """Sum of the log-probabilities of all classes [tokens], in `dtype`."""
    return (logits_sum - log_norm * classes).squeeze(1).to(dtype)


def one_class(targets: Tensor, classes: int, ignored: int) -> Tensor:
    """Targets over one class [tokens]: 0 if valid, `IGNORED` if ignored; all others stay, and are
    out of range."""
    inside = torch.logical_and(targets >= 0, targets < classes)
    return targets.masked_fill(inside, 0).masked_fill(targets == ignored, IGNORED)


# Backward


class Slice(NamedTuple, Generic[Value]):
    """A slice of the tokens in backward: [tokens, 1] each, but for the rows [tokens, width].

    target   less the number of classes in the tiles before
    picked   gradient of the target's log-probability, if there is one
    spread   gradient of every log-probability, if there is one
    loses    -`total`: the factor of every exponential
    """

    rows: Value
    target: Value
    log_norm: Value
    picked: Value | None
    spread: Value | None
    loses: Value


def picked_gradient(
    gradient: Tensor,
    log_prob: Tensor,
    targets: Tensor,
    weights: Tensor,
    reduction: int,
    rounded: torch.dtype,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient [tokens, 1] of the targets' log-probabilities, by the likelihood's own backward.

    rounded   dtype of the gradient that the log-softmax is given, whose roundings are kept
    gradient  of the likelihood: [tokens], or one number
    targets   as `one_class` makes them
    weights   sum of the targets' weights, which forward returned
    """
    backward = torch.ops.aten.nll_loss_backward.default
    made: Tensor = backward(gradient, log_prob, targets, None, reduction, IGNORED, weights)
    return made.to(rounded).to(dtype)


def rounded_beside(picked: Tensor, spread: Tensor, rounded: torch.dtype) -> Tensor:
    """`picked` such that its sum with `spread` is the sum as stock code rounds it: [tokens, 1]."""
    return (picked + spread).to(rounded).to(picked.dtype) - spread


def factor_of_exponentials(picked: Tensor | None, spread: Tensor | None, classes: int) -> Tensor:
    """-`total`, of gradients of the picked one and of all `classes`: [tokens, 1]."""
    if spread is None:
        assert picked is not None, "a gradient begins somewhere"
        return -picked
    return spread * -classes if picked is None else -picked + spread * -classes


def tile_gradient(
    piece: Slice[Tensor], weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradient of one tile of logits [tokens, classes], in the memory of its exponentials, and the
    targets for the next tile."""
    classes = weight.shape[0]
    logits, target = logits_of(piece.rows, weight, bias), piece.target
    made = logits.to(dtype).sub_(piece.log_norm).exp_().mul_(piece.loses)
    if piece.spread is not None:
        made = made.add_(piece.spread)
    if piece.picked is not None:
        index, other = one_hot(target, classes)
        made = made.scatter_add_(1, index, piece.picked.masked_fill(other, 0))
        target = target - classes
    return made.to(logits.dtype), target


def add_product(so_far: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """so_far + left @ right [n, m]; sums of several are kept in `dtype`."""
    if so_far is None:
        return torch.mm(left, right)
    if left.dtype is dtype:
        return torch.addmm(so_far, left, right)
    more = torch.mm(left, right).to(dtype)
    return so_far.to(dtype) + more


def weight_gradient(
    gradients: Sequence[Tensor], rows: Sequence[Tensor], dtype: torch.dtype
) -> Tensor:
    """Gradient [classes, width] of a tile of the weight, of the gradients of its logits per slice
    of tokens."""
    made = None
    for gradient, x in zip(gradients, rows, strict=True):
        made = add_product(made, gradient.t(), x, dtype)
    assert made is not None, "there are tokens"
    return made.to(gradients[0].dtype)


def bias_gradient(gradients: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Gradient [1, classes] of a tile of the bias, of the same."""
    first, *others = (gradient.sum(0, keepdim=True) for gradient in gradients)
    for other in others:
        first = first.to(dtype) + other.to(dtype)
    return first.to(gradients[0].dtype)


# Tiles of a weight's gradient put together


def numbers(like: Tensor, count: int) -> Tensor:
    """0, 1, .. [count] int64, on the device of `like`."""
    return like.new_ones([count], dtype=torch.int64).cumsum(0) - 1


def put_rows(whole: Tensor, at: Tensor, tile: Tensor) -> tuple[Tensor, Tensor]:
    """`whole` [classes, width] with the rows `at` overwritten by `tile`, and numbers of the rows
    behind them.

    at  [n], of which the first have a row in `tile`
    """
    rows = tile.shape[0]
    made = whole.index_copy_(0, at if rows == at.shape[0] else at[:rows], tile)
    return made, at + at.shape[0]
