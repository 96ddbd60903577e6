"""Runs the loss over a large vocabulary over tiles of it; logits never exist as a whole."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from zcompile.ir.graph import find
from zcompile.ir.plan import GraphPlan, Note, Rounding
from zcompile.ir.torch_compat import hint
from zcompile.ir.types import NodeName
from zcompile.passes.base import Fact, Pass
from zcompile.passes.tile_loss.match import SOFTMAX, Loss, NoMatch, match_loss
from zcompile.passes.tile_loss.tiled import Cut, Tiles, choose_cut, rewrite_loss

SHARE_OF_BUDGET = 8
"""Without `tile_bytes`, logits that take more than this part of the device budget are tiled: stock
code holds three or four values of their size at once."""

MOST_PIECES = 128
"""Most pieces of logits, without `tile_bytes`: each is some fifteen ops in each phase."""


@dataclass(frozen=True)
class TileLoss(Pass):
    """Cut lm_head and cross-entropy into tiles of classes.

        %l  = aten.mm(%x, %wt)                    for each tile of rows of %w:
        %lp = aten._log_softmax(%l)         ->        %l = aten.mm(%x, %wt[:, a:b]); online sums
        %n  = aten.nll_loss_forward(%lp, %y)      %n = aten.nll_loss_forward(%picked, 0)
        ...                                       for each tile again (backward):
        %g  = aten._log_softmax_backward(..)          %l, %g = .., in place
        %dx = aten.mm(%g, %w)                         %dx += aten.mm(%g, %w[a:b])
        %dw = aten.mm(%g.T, %x)                       %dw[a:b] = aten.mm(%g.T, %x)

    Sums over the classes are taken in another order, so numbers differ from eager's in the last
    bits. Where logits are small nothing is changed, and every bit stays.

    tile_bytes  working memory of a piece of logits; None: a share of the device budget
    fused       kernels compute what follows the products of a tile; else torch's ops do
    """

    tile_bytes: int | None = None
    fused: bool = False

    name: ClassVar[str] = "tile-loss"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.PHASES_ASSIGNED})
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.LOSSES_TILED})

    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        if self.tile_bytes is None and plan.budget_bytes is None:
            return plan
        share = (plan.budget_bytes or 0) // SHARE_OF_BUDGET
        for softmax in find(graph, SOFTMAX):
            given = self.tile_bytes or share, self.tile_bytes is None, self.fused
            plan = _tile(graph, softmax, plan, *given)
        return plan


def _nbytes(value: torch.Tensor) -> int:
    count = value.dtype.itemsize
    for size in value.shape:
        count *= hint(size)
    return count


def _tile(
    graph: fx.Graph,
    softmax: fx.Node,
    plan: GraphPlan,
    tile_bytes: int,
    at_will: bool,
    fused: bool,
) -> GraphPlan:
    """Tile the loss around a log-softmax, if it can be; the plan says why not.

    at_will  whether larger tiles may be taken, so that there are at most `MOST_PIECES`
    """
    nbytes = _nbytes(softmax.meta["val"])
    try:
        loss = match_loss(graph, softmax)
    except NoMatch as why:
        if nbytes <= tile_bytes:
            return plan
        note = Note(TileLoss.name, NodeName(softmax.name), f"{why}; so its {nbytes} bytes are kept")
        return replace(plan, notes=(*plan.notes, note))
    cut, dtype = cut_of(loss, tile_bytes)
    while at_will and cut is not None and _pieces(loss, cut) > MOST_PIECES:
        tile_bytes = 2 * max(1, tile_bytes)
        cut, dtype = cut_of(loss, tile_bytes)
    if cut is None:
        return plan
    where = _weight_of(loss, plan)
    rewrite_loss(graph, Tiles(loss, cut, dtype, fused), plan.params)
    summed = f"the loss is summed over {_pieces(loss, cut)} pieces of its logits"
    return replace(plan, roundings=(*plan.roundings, Rounding(TileLoss.name, where, summed)))


def _weight_of(loss: Loss, plan: GraphPlan) -> str:
    """Name of the parameter that makes the logits, for people; else of the value."""
    node = loss.weight
    while node.name not in plan.params and node.all_input_nodes:
        node = node.all_input_nodes[0]
    spec = plan.params.get(NodeName(node.name))
    return loss.weight.name if spec is None else str(spec.name)


def _pieces(loss: Loss, cut: Cut) -> int:
    """Number of pieces of logits."""
    tokens = loss.softmax.meta["val"].numel() // loss.classes
    return -(-hint(tokens) // cut.tokens) * -(-loss.classes // cut.classes)


def cut_of(loss: Loss, tile_bytes: int) -> tuple[Cut | None, torch.dtype]:
    """How a loss is cut, and the dtype in which its exponentials are summed."""
    found, made = loss.softmax.meta["val"], loss.product.meta["val"]
    dtype = torch.promote_types(torch.promote_types(found.dtype, made.dtype), torch.float32)
    # A piece of logits exists once if it is made in the dtype of its exponentials; otherwise as
    # made, as they are, and as a gradient.
    cast = 0 if made.dtype is dtype else 2 * made.dtype.itemsize
    tokens = _nbytes(found) // (found.dtype.itemsize * loss.classes)
    row_nbytes = loss.width * loss.weight.meta["val"].dtype.itemsize
    whole = max(_nbytes(found), _nbytes(made))
    logit = dtype.itemsize + cast
    return choose_cut(whole, tokens, loss.classes, logit, row_nbytes, tile_bytes), dtype
