"""Small models, each with one thing that a compiler can get wrong, and inputs for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def mlp(width: int = 8) -> nn.Module:
    """Two layers: the model of the golden graphs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Embedding, blocks, a head that is the embedding again."""

    def __init__(self, layers: int = 2, width: int = 16, vocabulary: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Tied(nn.Module):
    """One weight, read as a table and as a matrix; one of its rows may be padding."""

    def __init__(self, rows: int = 12, width: int = 8, padding_idx: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, width, padding_idx=padding_idx)
        self.head = nn.Linear(width, rows, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids)))


class Twice(nn.Module):
    """A module called twice, with another between."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.between = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(torch.relu(self.between(torch.relu(self.shared(x)))))


class TwoPlaces(nn.Module):
    """A parameter read by two ops of different kinds, far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale) + self.scale.exp()


class OneView(nn.Module):
    """A view of a parameter, made once and read in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 8))
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.weight.transpose(1, 2).unbind(0)
        return self.inner(torch.relu(x @ first)) @ first @ second


class ReturnsView(nn.Module):
    """A result that is a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, self.weight.t()


class Autocast(nn.Module):
    """Two layers that compute in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)
    )


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.Dropout(0.3),
        nn.ReLU(),
        nn.Linear(16, 8),
        nn.Dropout(0.2),
        nn.Linear(8, 4),
    )


def _rows() -> tuple[Tensor, ...]:
    return (torch.randn(4, 8),)


SMALL_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "mlp": (mlp, _rows),
    "transformer block": (Block, lambda: (torch.randn(2, 5, 16),)),
    "gpt": (GPT, lambda: (torch.randint(0, 32, (2, 6)),)),
    "tied embeddings": (Tied, lambda: (torch.randint(0, 12, (3, 5)),)),
    "convolution": (convolution, lambda: (torch.randn(2, 2, 6, 6),)),
    "dropout": (dropout, _rows),
    "module called twice": (Twice, _rows),
    "parameter in two places": (TwoPlaces, _rows),
    "view in two places": (OneView, _rows),
    "batch norm": (batch_norm, _rows),
    "returns a view": (ReturnsView, _rows),
    "bf16 autocast": (Autocast, _rows),
}
UNALIKE = (
    "tied embeddings",
    "module called twice",
    "view in two places",
    "bf16 autocast",
)
"""Of those, a few whose graphs have little in common: for tests that look at graphs alone. A
transformer block is not among them: it takes as long as all of these."""


def small(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model of SMALL_MODELS and its inputs, always with the same values."""
    torch.manual_seed(1)
    make, inputs = SMALL_MODELS[name]
    return make(), inputs()


class Mean(nn.Module):
    """A model without a head, and a loss that no tile of a vocabulary touches."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(input_ids=ids, use_cache=False).last_hidden_state.square().mean()
