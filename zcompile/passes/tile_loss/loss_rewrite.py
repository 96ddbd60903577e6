"""Writes a loss over a vocabulary anew, tile by tile: no value has one number per token and class.

Per token are kept the greatest logit so far, the sum of exponentials below it, and the logit of the
target once its tile has come:

    l = x @ W[a:b].T;  n = max(m, max l);  s = s * exp(m - n) + sum exp(l - n);  m = n
    log p(target) = l[target] - (m + log s)

The likelihood itself is the op that was there, over one class: of the targets' log-probabilities
[T, 1], with targets that say 0 where they are valid. So reductions, ignored tokens and errors of
targets out of range stay what they were. Backward makes each tile of logits again
(`loss_backward.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import fx

from zcompile.ir.graph import phase_of
from zcompile.ir.rewrite import Pen
from zcompile.ir.types import NodeName, ParamSpec
from zcompile.passes.tile_loss.loss_backward import IGNORED, Facts, write_backward
from zcompile.passes.tile_loss.loss_gradient import way_home
from zcompile.passes.tile_loss.loss_tiles import Tiles, one_hot, product, rows_of_targets
from zcompile.passes.tile_loss.match import Loss

aten = torch.ops.aten


def rewrite_loss(
    graph: fx.Graph, tiles: Tiles, params: Mapping[NodeName, ParamSpec] = MappingProxyType({})
) -> None:
    """Rewrite both halves in place; what is not read any more is erased.

    params  the tiered parameters, to whose gradients tiles are sent home
    """
    loss = tiles.loss
    first = min((loss.likelihood, *loss.sums))
    pen = Pen(graph, phase_of(first), loss.softmax)
    with graph.inserting_before(first):
        rows = rows_of_targets(pen, loss)
        column = pen(aten.unsqueeze.default, loss.likelihood.args[1], 1)
        facts = _forward(pen, tiles, rows, column)
    _, _, weight, reduction, _ = loss.likelihood.args
    loss.likelihood.args = (facts.log_prob, facts.targets, weight, reduction, IGNORED)
    if (gradients := loss.gradients) is not None:
        pen = Pen(graph, phase_of(gradients.top), gradients.top)
        with graph.inserting_before(gradients.top):
            write_backward(pen, tiles, gradients, facts, way_home(graph, params, loss))
    graph.eliminate_dead_code()


@dataclass
class _Slice:
    """Some of the tokens, and what is known of them so far: [tokens, 1] each, but for the rows.

    target  less the classes that the tiles before had
    total   sum of exponentials, relative to the greatest
    sum     of the logits, if somebody asks
    """

    rows: fx.Node
    target: fx.Node
    greatest: fx.Node
    total: fx.Node
    picked: fx.Node
    sum: fx.Node | None


def _forward(pen: Pen, tiles: Tiles, rows: fx.Node, column: fx.Node) -> Facts:
    loss, loss_dtype = tiles.loss, tiles.loss.softmax.meta["val"].dtype
    slices = [_begin(pen, tiles, rows, column, *bounds) for bounds in tiles.tokens]
    for a, b in tiles.classes:
        weight, bias = tiles.weight(pen, a, b), tiles.bias(pen, a, b)
        for piece in slices:
            logits = pen.cast(product(pen, piece.rows, weight, bias), tiles.dtype)
            _forward_tile(pen, logits, piece, b - a)
    norms = [pen(aten.add.Tensor, s.greatest, pen(aten.log.default, s.total)) for s in slices]
    log_norm, picked = pen.joined(norms), pen.joined([s.picked for s in slices])
    log_prob = pen.cast(pen(aten.sub.Tensor, picked, log_norm), loss_dtype)
    for total in loss.sums:
        logits_sum = pen.joined([s.sum for s in slices if s.sum is not None])
        norm = pen(aten.mul.Scalar, log_norm, loss.classes)
        summed = pen(aten.squeeze.dim, pen(aten.sub.Tensor, logits_sum, norm), 1)
        total.replace_all_uses_with(pen.cast(summed, loss_dtype))
    return Facts(rows, column, log_norm, log_prob, _one_class(pen, loss))


def _begin(pen: Pen, tiles: Tiles, rows: fx.Node, column: fx.Node, a: int, b: int) -> _Slice:
    # The least finite number, not -inf: over a tile of -inf alone, -inf - -inf would be nan.
    least, target = torch.finfo(tiles.dtype).min, pen.rows(column, a, b)
    zero = pen(aten.zeros_like.default, target, dtype=tiles.dtype)
    greatest = pen(aten.full_like.default, zero, least)
    wanted = zero if tiles.loss.sums else None
    return _Slice(pen.rows(rows, a, b), target, greatest, zero, zero, wanted)


def _forward_tile(pen: Pen, logits: fx.Node, piece: _Slice, classes: int) -> None:
    """One tile of logits, which its exponentials overwrite."""
    tile_max = pen(aten.amax.default, logits, [1], True)
    greatest = pen(aten.maximum.default, piece.greatest, tile_max)
    index, other = one_hot(pen, piece.target, classes)
    picked = pen(aten.gather.default, logits, 1, index)
    if piece.sum is not None:
        tile_sum = pen(aten.sum.dim_IntList, logits, [1], True)
        piece.sum = pen(aten.add.Tensor, piece.sum, tile_sum)
    exponentials = pen(aten.exp_.default, pen(aten.sub_.Tensor, logits, greatest))
    tile_total = pen(aten.sum.dim_IntList, exponentials, [1], True)
    shrunk = pen(aten.exp.default, pen(aten.sub.Tensor, piece.greatest, greatest))
    piece.total = pen(aten.addcmul.default, tile_total, piece.total, shrunk)
    piece.picked = pen(aten.where.self, other, piece.picked, picked)
    piece.greatest = greatest
    piece.target = pen(aten.sub.Tensor, piece.target, classes)


def _one_class(pen: Pen, loss: Loss) -> fx.Node:
    """0 for a valid target, `IGNORED` for an ignored one; all others stay, and are out of range."""
    _, targets, _, _, ignored = loss.likelihood.args
    low = pen(aten.ge.Scalar, targets, 0)
    inside = pen(aten.logical_and.default, low, pen(aten.lt.Scalar, targets, loss.classes))
    valid = pen(aten.masked_fill.Scalar, targets, inside, 0)
    return pen(aten.masked_fill.Scalar, valid, pen(aten.eq.Scalar, targets, ignored), IGNORED)
