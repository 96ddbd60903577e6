"""The backward half of a tiled loss: each tile of logits is made again, and turned into gradients.

    g = spread + onehot * picked - exp(l - log_norm) * total
    dx += g @ W[a:b];  dW[a:b] = g.T @ x;  db[a:b] = sum g

`picked` is what the likelihood's own backward says of the target's log-probability, `spread` what
label smoothing says of all of them, `total` their sum over the classes.
"""

from dataclasses import dataclass

import torch
from torch import fx

from zcompile.ir.rewrite import Pen
from zcompile.passes.tile_loss.loss_gradient import Leaving, Taker, Way, Whole
from zcompile.passes.tile_loss.loss_tiles import Tiles, again, one_hot, product
from zcompile.passes.tile_loss.match import Gradients, picks

aten = torch.ops.aten
IGNORED = torch.iinfo(torch.int64).min
"""Target of a token that is ignored: no class of any vocabulary."""


@dataclass(frozen=True)
class Facts:
    """What forward leaves for backward: rows [tokens, width], the rest per token.

    column    the targets [tokens, 1]; targets [tokens] is what they became
    log_norm  log of the sum of exponentials of a token's logits [tokens, 1]
    log_prob  of the targets [tokens, 1], in the dtype that the log-softmax had
    """

    rows: fx.Node
    column: fx.Node
    log_norm: fx.Node
    log_prob: fx.Node
    targets: fx.Node


@dataclass
class _Slice:
    """Some of the tokens; [tokens, 1] each, but for the rows and their gradient.

    target  less the classes that the tiles before had
    loses   what every exponential is multiplied with: `total`, negative
    """

    rows: fx.Node
    target: fx.Node
    log_norm: fx.Node
    picked: fx.Node | None
    spread: fx.Node | None
    loses: fx.Node
    gradient: fx.Node | None = None


def write_backward(
    pen: Pen, tiles: Tiles, gradients: Gradients, facts: Facts, way: Way | None
) -> None:
    """Gradients of rows and bias take the places of the old ones, and so does that of the weight,
    unless there is a way home."""
    slices = _slices(pen, tiles, gradients, facts)
    of_weight: Taker | None = Leaving(pen, way) if way is not None else None
    if of_weight is None and gradients.weight is not None:
        of_weight = Whole(pen, gradients.weight, tiles)
    of_bias = []
    for a, b in tiles.classes:
        weight, bias = tiles.weight(pen, a, b), tiles.bias(pen, a, b)
        tile = [_gradient(pen, tiles, piece, weight, bias, b - a) for piece in slices]
        if gradients.rows is not None:
            for piece, gradient in zip(slices, tile, strict=True):
                piece.gradient = _plus(pen, tiles, piece.gradient, gradient, weight)
        if of_weight is not None:
            of_weight.take(_of_weight(pen, tiles, tile, slices))
        if gradients.bias is not None:
            of_bias.append(_of_bias(pen, tiles, tile))
    if gradients.rows is not None:
        parts = [piece.gradient for piece in slices if piece.gradient is not None]
        _finish_rows(pen, gradients, gradients.rows, pen.joined(parts))
    if of_weight is not None:
        of_weight.finish()
    if gradients.bias is not None:
        gradients.bias.replace_all_uses_with(pen(aten.cat.default, of_bias, 1))


def _slices(pen: Pen, tiles: Tiles, gradients: Gradients, facts: Facts) -> list[_Slice]:
    picked, spread, loses = _starts(pen, tiles, gradients, facts)

    def part(node: fx.Node | None, a: int, b: int) -> fx.Node | None:
        return None if node is None else pen.rows(node, a, b)

    return [
        _Slice(
            pen.rows(facts.rows, a, b),
            pen.rows(facts.column, a, b),
            pen.rows(facts.log_norm, a, b),
            part(picked, a, b),
            part(spread, a, b),
            pen.rows(loses, a, b),
        )
        for a, b in tiles.tokens
    ]


def _starts(
    pen: Pen, tiles: Tiles, gradients: Gradients, facts: Facts
) -> tuple[fx.Node | None, fx.Node | None, fx.Node]:
    """`picked`, `spread` and -`total`, [tokens, 1] each."""
    picked = spread = None
    if (likelihood := gradients.likelihood) is not None:
        start, _, _, weight, reduction, _, weights = likelihood.args
        picked = pen(
            likelihood.target, start, facts.log_prob, facts.targets, weight, reduction, IGNORED,  # type: ignore[arg-type]  # an op
            weights,
        )  # fmt: skip
        picked = pen.cast(picked, tiles.dtype)
    for more in gradients.spreads:
        more = pen.cast(more, tiles.dtype)
        spread = more if spread is None else pen(aten.add.Tensor, spread, more)
    loses = None if picked is None else pen(aten.neg.default, picked)
    if spread is not None:
        all_classes = pen(aten.mul.Scalar, spread, -tiles.loss.classes)
        loses = all_classes if loses is None else pen(aten.add.Tensor, loses, all_classes)
    assert loses is not None, "a gradient begins somewhere"
    return picked, spread, loses


def _gradient(
    pen: Pen, tiles: Tiles, piece: _Slice, weight: fx.Node, bias: fx.Node | None, classes: int
) -> fx.Node:
    """Gradient of one tile of logits, in the place of its exponentials."""
    logits = product(pen, piece.rows, weight, bias)
    made = pen(aten.sub_.Tensor, pen.cast(logits, tiles.dtype), piece.log_norm)
    made = pen(aten.mul_.Tensor, pen(aten.exp_.default, made), piece.loses)
    if piece.spread is not None:
        made = pen(aten.add_.Tensor, made, piece.spread)
    if piece.picked is not None:
        index, other = one_hot(pen, piece.target, classes)
        added = pen(aten.masked_fill.Scalar, piece.picked, other, 0)
        made = pen(aten.scatter_add_.default, made, 1, index, added)
        piece.target = pen(aten.sub.Tensor, piece.target, classes)
    return pen.cast(made, logits.meta["val"].dtype)


def _of_weight(pen: Pen, tiles: Tiles, tile: list[fx.Node], slices: list[_Slice]) -> fx.Node:
    made = None
    for gradient, piece in zip(tile, slices, strict=True):
        made = _plus(pen, tiles, made, pen(aten.t.default, gradient), piece.rows)
    assert made is not None, "there are tokens"
    return pen.cast(made, tile[0].meta["val"].dtype)


def _of_bias(pen: Pen, tiles: Tiles, tile: list[fx.Node]) -> fx.Node:
    first, *others = (pen(aten.sum.dim_IntList, gradient, [0], True) for gradient in tile)
    for other in others:
        sums = (pen.cast(part, tiles.dtype) for part in (first, other))
        first = pen(aten.add.Tensor, *sums)
    return pen.cast(first, tile[0].meta["val"].dtype)


def _plus(pen: Pen, tiles: Tiles, so_far: fx.Node | None, left: fx.Node, right: fx.Node) -> fx.Node:
    """so_far + left @ right; sums of several are kept in the dtype of the tiles."""
    if so_far is None:
        return pen(aten.mm.default, left, right)
    if left.meta["val"].dtype is tiles.dtype:
        return pen(aten.addmm.default, so_far, left, right)
    more = pen.cast(pen(aten.mm.default, left, right), tiles.dtype)
    return pen(aten.add.Tensor, pen.cast(so_far, tiles.dtype), more)


def _finish_rows(pen: Pen, gradients: Gradients, old: fx.Node, gradient: fx.Node) -> None:
    """Gradients of the targets' rows become those of all rows of the product."""
    gradient = pen.cast(gradient, old.meta["val"].dtype)
    if picks(gradients.chain):
        width, sizes = old.meta["val"].shape[1], gradients.top.meta["val"].shape
        if len(sizes) != 2:
            gradient = pen(aten.view.default, gradient, [*sizes[:-1], width])
        gradient = again(pen, gradients.chain, gradient, width)
    old.replace_all_uses_with(gradient)
