"""Small models with a batch, each with one thing that slices of it can get wrong, and inputs."""

from collections.abc import Callable
from typing import Any

import torch
from small_models import GPT
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, BATCH, LENGTH, WORDS = 16, 8, 6, 32


class Loss(nn.Module):
    """A language model with its loss: the mean over tokens, of which some do not count."""

    def __init__(self, model: nn.Module, weights: bool = False) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("weight", torch.rand(WORDS) + 0.5 if weights else None)

    def forward(self, ids: Tensor, labels: Tensor, *more: Tensor) -> Tensor:
        logits = self.model(ids, *more)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=self.weight)


class Llama(nn.Module):
    """RMSNorm, rotary embedding, grouped-query attention, gated MLP."""

    def __init__(self, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, size = heads, groups, WIDTH // heads
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(3))
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, groups * size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        # As many rows as there are samples: a buffer whose first dimension is no batch.
        angles = torch.outer(torch.arange(BATCH).float(), 1.0 / torch.arange(1, size // 2 + 1))
        self.register_buffer("angles", torch.cat([angles, angles], 1))

    def _rotated(self, x: Tensor) -> Tensor:
        angles = self.angles[: x.shape[-2]]
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        batch, length, width = x.shape
        y = self.norms[0](x)
        q, k, v = (
            layer(y).view(batch, length, -1, width // self.heads).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        q, k = self._rotated(q), self._rotated(k)
        k, v = (t.repeat_interleave(self.heads // self.groups, dim=1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2)) / (width // self.heads) ** 0.5
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        mixed = scores.masked_fill(~mask, -1e9).softmax(-1) @ v
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.norms[1](x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return self.head(self.norms[2](x))


class ViT(nn.Module):
    """Patches by a convolution, a token for the class, attention of torch's own, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.places = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1) + self.places
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.head((x + self.mlp(x))[:, 0])


class Bert(nn.Module):
    """Attention under a mask of each sample, norms behind; tokens are given weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.kind = nn.Embedding(WORDS, WIDTH), nn.Embedding(2, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 3 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, kinds: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        x = self.layer(self.embed(ids) + self.kind(kinds), src_key_padding_mask=mask)
        loss = F.cross_entropy(self.head(x).transpose(1, 2), labels, reduction="none")
        weight = (~mask).float()
        return (loss * weight).sum() / weight.sum()


class Experts(nn.Module):
    """Each token goes through its two best experts, which are all computed."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.up = nn.Parameter(torch.randn(count, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(count, 2 * WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        best = scores.topk(2, dim=-1).values[:, -1:]
        share = torch.where(scores >= best, scores, 0.0)
        made = torch.relu(torch.einsum("td,edh->eth", tokens, self.up))
        made = torch.einsum("eth,ehd->etd", made, self.down)
        return x + torch.einsum("etd,te->td", made, share).view_as(x)


class SequenceFirst(nn.Module):
    """Values [length, batch, width], as nn.Transformer has them unless told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.mlp(x)


class Noisy(nn.Module):
    """Dropout between blocks, whose numbers are eager's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.first(x), 0.3)
        return x + F.dropout(self.second(F.dropout(x, 0.1)), 0.2)


class Statistics(nn.Module):
    """Batch normalisation between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.after, self.groups = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.before(x)))
        x = torch.relu(self.groups(self.after(x)))
        return self.head(F.max_pool2d(x, 2).mean((2, 3)))


class Resized(nn.Module):
    """Images that are made larger, and lines and volumes."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        planes = ("nearest", "nearest-exact", "bilinear", "bicubic")
        wide = sum(self.after(F.interpolate(h, scale_factor=2, mode=mode)) for mode in planes)
        lines, volumes = wide.flatten(2), wide[:, :, None]
        lines = F.interpolate(lines, scale_factor=1.5, mode="linear").tanh()
        volumes = F.interpolate(volumes, scale_factor=1.5, mode="trilinear").tanh()
        return lines.mean((1, 2)) + volumes.mean((1, 2, 3, 4))


class Returned(nn.Module):
    """Results that have gaps or are transposed, one that is of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.tanh(self.up(x))
        y = self.down(hidden)
        return y.detach().transpose(0, 1), hidden.chunk(2, dim=-1)[1], y.sum(0)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = GPT(1)

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(ids)


def _ids() -> Tensor:
    return torch.randint(0, WORDS, (BATCH, LENGTH))


def _labels() -> Tensor:
    return _ids().masked_fill(torch.rand(BATCH, LENGTH) < 0.3, -100)


def _masked() -> tuple[Tensor, ...]:
    mask = torch.arange(LENGTH) >= torch.randint(2, LENGTH + 1, (BATCH, 1))
    return _ids(), torch.randint(0, 2, (BATCH, LENGTH)), mask, _ids()


def _images() -> tuple[Tensor, ...]:
    return (torch.randn(BATCH, 3, 8, 8),)


def _rows() -> tuple[Tensor, ...]:
    return (torch.randn(BATCH, LENGTH, WIDTH),)


Inputs = Callable[[], tuple[Any, ...]]
BATCH_MODELS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "gpt": (lambda: Loss(GPT()), lambda: (_ids(), _labels())),
    "weights of words": (lambda: Loss(GPT(1), weights=True), lambda: (_ids(), _labels())),
    "llama": (lambda: Loss(Llama()), lambda: (_ids(), _labels())),
    "vit": (ViT, _images),
    "bert": (Bert, _masked),
    "experts": (lambda: nn.Sequential(Experts(), Experts()), _rows),
    "sequence first": (SequenceFirst, lambda: (torch.randn(LENGTH, BATCH, WIDTH),)),
    "dropout": (Noisy, _rows),
    "batch norm": (Statistics, _images),
    "resized": (Resized, _images),
    "returned": (Returned, _rows),
    "autocast": (Autocast, lambda: (_ids(),)),
}


def batch_model(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model and its inputs, always the same."""
    build, inputs = BATCH_MODELS[name]
    torch.manual_seed(0)
    return build(), inputs()
