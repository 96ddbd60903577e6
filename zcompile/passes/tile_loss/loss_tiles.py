"""What both halves of a tiled loss are written with: a pen, tiles of the weight, slices of tokens.

Rows are numbered as the targets are. Where the model takes some of the tokens' logits only, it is
those tokens' rows that are taken instead, before the product.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import CASTS
from zcompile.ir.rewrite import Pen
from zcompile.passes.tile_loss.loss_choice import Cut
from zcompile.passes.tile_loss.match import PICKS, UNPICKS, VIEWS, Loss, picks

aten = torch.ops.aten


@dataclass(frozen=True)
class Tiles:
    """A loss and how it is cut.

    dtype  in which exponentials are summed, and gradients over tiles
    """

    loss: Loss
    cut: Cut
    dtype: torch.dtype

    @property
    def classes(self) -> list[tuple[int, int]]:
        """First class of each tile, and the one past its last."""
        return _bounds(self.loss.classes, self.cut.classes)

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """First token of each slice, and the one past its last; one slice if sizes are dynamic."""
        count = self.loss.likelihood.args[0].meta["val"].shape[0]  # type: ignore[union-attr]
        if not isinstance(count, int):
            return [(0, torch.iinfo(torch.int64).max)]
        return _bounds(count, self.cut.tokens)

    def weight(self, pen: Pen, a: int, b: int) -> fx.Node:
        """Rows of the weight, [b - a, width]."""
        return pen.rows(self.loss.weight, a, b)

    def bias(self, pen: Pen, a: int, b: int) -> fx.Node | None:
        return None if self.loss.bias is None else pen.rows(self.loss.bias, a, b)


def gather_of(weight: fx.Node) -> fx.Node | None:
    """The gather of all of a row-major parameter, itself or under a cast; else None."""
    node: object = weight
    if weight.target in CASTS:
        node = weight.args[0]
    if not isinstance(node, fx.Node) or node.target is not ops.gather:
        return None
    return node if node.meta["val"].is_contiguous() else None


def _bounds(count: int, step: int) -> list[tuple[int, int]]:
    return [(a, min(a + step, count)) for a in range(0, count, step)] or [(0, count)]


def product(pen: Pen, rows: fx.Node, weight: fx.Node, bias: fx.Node | None) -> fx.Node:
    """A tile of logits."""
    turned = pen(aten.t.default, weight)
    if bias is None:
        return pen(aten.mm.default, rows, turned)
    return pen(aten.addmm.default, bias, rows, turned)


def one_hot(pen: Pen, target: fx.Node, classes: int) -> tuple[fx.Node, fx.Node]:
    """A class of this tile for every token, and whether its target is another one.

    target  less the classes that the tiles before had, so that equal tiles are equal code
    """
    index = pen(aten.clamp.default, target, 0, classes - 1)
    return index, pen(aten.ne.Tensor, index, target)


def rows_of_targets(pen: Pen, loss: Loss) -> fx.Node:
    """The product's left factor with one row per target: [tokens, width]."""
    if not picks(loss.chain):
        return loss.rows
    rows = again(pen, loss.chain, pen.row_major(loss.rows), loss.width)
    if rows.meta["val"].dim() != 2:
        rows = pen(aten.view.default, pen.row_major(rows), [-1, loss.width])
    return rows


def again(pen: Pen, chain: Sequence[fx.Node], source: fx.Node, width: int) -> fx.Node:
    """What `chain` does to rows of logits, done to rows of another width."""
    for node in chain:
        source = _once_more(pen, node, source, width)
    return source


def _once_more(pen: Pen, node: fx.Node, source: fx.Node, width: int) -> fx.Node:
    if node.target in CASTS:
        return source
    if node.target is aten.clone.default:
        return pen.row_major(source)
    _, *rest = node.args
    if node.target in VIEWS | UNPICKS:
        rest[0] = [*rest[0][:-1], width]  # type: ignore[index,misc]  # sizes
    if node.target in VIEWS:
        return pen(aten.view.default, pen.row_major(source), *rest)
    assert node.target in PICKS | UNPICKS, node
    return pen(node.target, source, *rest)
