"""Models whose gradients come in part from compiled graphs, and in part by autograd."""

from collections.abc import Callable
from typing import Any

import torch
from rank_models import batch, words
from torch import Tensor, nn
from torch.nn import functional as F

KINDS = ("eager", "loss beside", "function beside", "broken")
"""Nothing is compiled; a loss is added outside, by a function whose backward is its own; a graph
break leaves a part outside."""


class Broken(nn.Module):
    """A part of it is never compiled, and a weight is used in both."""

    def __init__(self) -> None:
        super().__init__()
        self.words = words(blocks=1)
        self.between = nn.Linear(96, 96)

    def forward(self, ids: Tensor, wanted: Tensor) -> Tensor:
        x = self.words.blocks[0](self.words.table(ids))
        x = self.apart(x)
        x = self.words.norm(x)
        return F.cross_entropy(self.words.head(x).flatten(0, 1), wanted.flatten())

    @torch.compiler.disable
    def apart(self, x: Tensor) -> Tensor:
        return x + self.between(x) + (x @ self.words.table.weight.t()) @ self.words.head.weight


def built(kind: str) -> nn.Module:
    """KINDS: which."""
    torch.manual_seed(0)
    return Broken() if kind == "broken" else words(blocks=1)


def loss_beside(model: Any, loss: Tensor) -> Tensor:
    """What many add to a loss: it comes by autograd, and not by a compiled graph."""
    return loss + 1e-3 * model.head.weight.square().sum() + 1e-3 * model.norm.weight.sum()


def called(kind: str, model: nn.Module, run: Callable[..., Tensor], number: int) -> Tensor:
    """The loss of a batch."""
    loss: Tensor = run(*batch(number // 100, number % 100))
    if kind == "function beside":
        return loss + 1e-3 * Squares.apply(model.head.weight)  # type: ignore[no-untyped-call]  # torch's
    return loss_beside(model, loss) if kind == "loss beside" else loss


class Squares(torch.autograd.Function):
    """The sum of squares, computed where autograd records nothing."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return (weight * weight).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (weight,) = ctx.saved_tensors
        return 2 * grad * weight
