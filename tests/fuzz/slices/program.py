"""A model whose forward is a few lines that nobody wrote, and what plain eager code makes of it.

All of it is in float64, so that what differs by more than roundings of 1e-16 is wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZES = ((4, 4, 4), (4, 8, 4), (4, 4, 8), (8, 4, 4), (6, 6, 4), (4, 2, 4), (5, 4, 8), (2, 6, 4))
"""Samples, tokens, width: sizes that could be taken for each other, and some that could not."""
MOST = max(max(sizes) for sizes in SIZES)
SIMPLEST = "x"
"""Of all results."""
SEED = 3
"""Of what is drawn while a program runs."""


@dataclass(frozen=True)
class Program:
    """sizes   samples, tokens, width
    lines   of the forward
    result  that it returns
    slices  of the batch
    level   of the cuts between stages: 0 for none, the more the finer
    tokens  slices of tokens
    """

    sizes: tuple[int, int, int]
    lines: tuple[str, ...]
    result: str
    slices: int
    level: int
    tokens: int

    @property
    def forward(self) -> str:
        body = "\n".join(f"    {line}" for line in (*self.lines, f"return {self.result}"))
        return f"def forward(m, x, ids, mask, share):\n{body}\n"

    def text(self, reason: str) -> str:
        """The program as Python that runs by itself."""
        return f"""
# {reason}
from fuzz.slices.check import check  # with PYTHONPATH=.:tests:tests/helpers
from fuzz.slices.program import Program
check({self!r})

{self.forward}"""


def heads(x: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values of two heads each, [batch, head, tokens, size]."""
    return tuple((n * x).unflatten(-1, (2, -1)).transpose(1, 2) for n in (1, 2, 3))


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(-2)


NAMES: dict[str, Any] = {"torch": torch, "F": F, "heads": heads, "merged": merged}


class Model(nn.Module):
    """Layers for [batch, tokens, width], and parameters and constants that are broadcast."""

    forward: Any

    def __init__(self, program: Program) -> None:
        super().__init__()
        width = program.sizes[2]
        self.first, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.words, self.head = nn.Embedding(MOST, width), nn.Linear(width, MOST)
        self.row = nn.Parameter(torch.randn(MOST))
        self.table, self.square = (nn.Parameter(torch.randn(MOST, MOST) / 2) for _ in range(2))
        self.bank = nn.Parameter(torch.randn(MOST, MOST, MOST) / 2)
        self.large = nn.Parameter(torch.randn(MOST**2, MOST**2) / 8)
        self.kernel = nn.Parameter(torch.randn(MOST, MOST, 3) / 3)
        self.register_buffer("places", torch.randn(MOST, MOST))
        self.register_buffer("weights", torch.rand(MOST) + 0.5)
        self.double()
        made: dict[str, Any] = {}
        exec(compile(program.forward, "<forward>", "exec"), NAMES, made)
        self.forward = made["forward"].__get__(self)


def built(program: Program) -> tuple[Model, tuple[Tensor, ...]]:
    """Its model, and x, ids, mask and share; x has a gradient, as what another graph made has."""
    torch.manual_seed(0)
    model, (batch, tokens, width) = Model(program), program.sizes
    return model, (
        torch.randn(batch, tokens, width).double().requires_grad_(),
        torch.randint(MOST, (batch, tokens)),
        torch.rand(batch, tokens) > 0.3,
        torch.rand(batch, tokens).double() + 0.1,
    )


def computed(program: Program, tangents: Sequence[Tensor] = ()) -> dict[str, Tensor]:
    """What plain eager code gives: outputs, and gradients of x and of parameters.

    tangents  what backward starts from; ones, if there are none
    """
    model, given = built(program)
    torch.manual_seed(SEED)
    made = model(*given)
    outputs = [made] if isinstance(made, Tensor) else list(made)
    roots = [value for value in outputs if value.requires_grad]
    torch.autograd.backward(roots, tangents or [torch.ones_like(value) for value in roots])
    found = {f"output {n}": value.detach() for n, value in enumerate(outputs)}
    leaves = {"x": given[0], **dict(model.named_parameters())}
    return found | {f"grad of {n}": t.grad for n, t in leaves.items() if t.grad is not None}
