"""A Llama, plain: the shape of Llama 2 7 B by default, and its loss."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class LlamaShape:
    """Sizes; by default those of 6.7 B parameters.

    context  most tokens of a sequence
    """

    layers: int = 32
    width: int = 4096
    hidden: int = 11008
    heads: int = 32
    vocabulary: int = 32000
    context: int = 2048


def rotations(shape: LlamaShape) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary embeddings, [context, width / heads] each."""
    size = shape.width // shape.heads
    rates = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.outer(torch.arange(shape.context, dtype=torch.float32), rates)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x  [batch, heads, sequence, size]"""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Linear(nn.Module):
    """`nn.Linear` without a bias, and with values from the beginning: `nn.Linear` draws them once
    its parameter is registered, when `zcompile.init` has sent it to its tier already."""

    def __init__(self, size: int, made: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(made, size).normal_(std=0.02))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class Block(nn.Module):
    """Attention with rotary embeddings, then a gated perceptron, each on a normalized copy."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.query = Linear(shape.width, shape.width)
        self.key = Linear(shape.width, shape.width)
        self.value = Linear(shape.width, shape.width)
        self.out = Linear(shape.width, shape.width)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.gate = Linear(shape.width, shape.hidden)
        self.up = Linear(shape.width, shape.hidden)
        self.down = Linear(shape.hidden, shape.width)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x  [batch, sequence, width]"""
        batch, sequence, width = x.shape
        split = (batch, sequence, self.heads, width // self.heads)
        query, key, value = (
            made(x).view(split).transpose(1, 2) for made in (self.query, self.key, self.value)
        )
        cos, sin = cos.to(query.dtype), sin.to(query.dtype)
        mixed = functional.scaled_dot_product_attention(
            rotated(query, cos, sin), rotated(key, cos, sin), value, is_causal=True
        )
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return out

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x), cos, sin)
        normed = self.mlp_norm(x)
        changed: Tensor = self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return x + changed


class Llama(nn.Module):
    """Tokens and targets in, the loss out."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed = Linear(shape.width, shape.vocabulary)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.head = Linear(shape.width, shape.vocabulary)
        for name, made in zip(("cos", "sin"), rotations(shape), strict=True):
            self.register_buffer(name, made, persistent=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """ids, targets  int64 [batch, sequence]"""
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = functional.embedding(ids, self.embed.weight)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
