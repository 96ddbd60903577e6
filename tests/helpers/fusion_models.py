"""Models whose compute lies between products, attention and convolutions; and their gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from small_models import GPT
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import profile

import zcompile

WIDTH, VOCABULARY, LENGTH = 32, 64, 16


class WithLoss(nn.Module):
    """A GPT that returns its loss; with dropout, if asked for."""

    def __init__(self, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.gpt, self.dropout = GPT(layers, WIDTH, VOCABULARY), nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.gpt(ids[:, :-1])
        return functional.cross_entropy(self.dropout(logits).flatten(0, 1), ids[:, 1:].flatten())


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class LlamaBlock(nn.Module):
    """Rotary positions, RMS norms, a gated MLP; no biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, width = x.shape

        def in_heads(y: Tensor) -> Tensor:
            return y.view(batch, length, self.heads, -1).transpose(1, 2)

        def turned(y: Tensor) -> Tensor:
            left, right = y.chunk(2, -1)
            return y * turn[0] + torch.cat((-right, left), -1) * turn[1]

        y = self.norm1(x)
        q, k, v = in_heads(self.q(y)), in_heads(self.k(y)), in_heads(self.v(y))
        mixed = functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, layers: int = 1, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        each = width // heads
        rates = 10000.0 ** (-torch.arange(0, each, 2) / each)
        angles = torch.outer(torch.arange(LENGTH), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids[:, :-1])
        for block in self.blocks:
            x = block(x, (self.cos, self.sin))
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Vision(nn.Module):
    """Convolutions, batch and group norms, a residual, a mean.

    Its classes fill vectors: what is left over is computed one by one, by another exponential.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.second = nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False)
        self.third = nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(16), nn.BatchNorm2d(32)
        self.norm3, self.head = nn.GroupNorm(4, 32), nn.Linear(32, 32)
        self.register_buffer("labels", torch.tensor([3, 1, 4, 1]))

    def forward(self, images: Tensor) -> Tensor:
        x = functional.relu(self.norm1(self.first(images)))
        x = functional.relu(self.norm2(self.second(x)))
        x = x + functional.silu(self.norm3(self.third(x)))
        return functional.cross_entropy(self.head(x.mean((2, 3))), self.labels)


def ids(number: int = 0) -> Tensor:
    seeded = torch.Generator().manual_seed(number)
    return torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=seeded)


def images(number: int = 0) -> Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(number))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "gpt": (WithLoss, ids),
    "llama": (Llama, ids),
    "vision": (Vision, images),
}


@dataclass
class Results:
    """The loss of a call, and the gradient of each parameter."""

    loss: Tensor
    grads: dict[str, Tensor]

    def equals(self, other: "Results") -> bool:
        same = (torch.equal(self.grads[name], other.grads[name]) for name in self.grads)
        return torch.equal(self.loss, other.loss) and all(same)


def results(run: Callable[..., Tensor], model: nn.Module, given: Tensor, amp: bool = False) -> Any:
    """Of one call and its backward; gradients are dropped."""
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        loss = run(given)
    loss.backward()
    grads = {
        name: torch.empty(p.shape, dtype=p.dtype).copy_(p.grad)
        for name, p in model.named_parameters()
    }
    model.zero_grad()
    return Results(loss.detach().clone(), grads)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def offloaded(build: Callable[[], nn.Module], **fields: Any) -> tuple[nn.Module, Any]:
    """A model whose regions Inductor compiles, and its compiled call."""
    torch._dynamo.reset()
    known = {"device": "cpu", "device_memory": "16MiB", "host_memory": "64MiB"}
    model = zcompile.offload(seeded(build), **{**known, "regions": "inductor", **fields})
    return model, torch.compile(model, backend="zinf")


def allocated_at_most(call: Callable[..., Any], values: Sequence[Tensor]) -> int:
    """Bytes that torch's allocator gave out at the peak of a call."""
    with torch.no_grad(), profile(profile_memory=True) as told:
        call(*values)
    events = [e for e in told.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most
