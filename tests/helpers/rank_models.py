"""Small models that several ranks train, and what one process makes of the same batches."""

import hashlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCHES = 4
"""Of a step, for all ranks together."""
STEPS = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Words(nn.Module):
    """Predicts the next token; its tables are above 64 KiB, its norms and biases below."""

    def __init__(self, width: int = 96, tokens: int = 200, blocks: int = 1, tied: bool = False):
        super().__init__()
        self.table = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor, wanted: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), wanted.flatten())


def words(**kinds: Any) -> Words:
    torch.manual_seed(0)
    return Words(**kinds)


def batch(step: int, number: int, tokens: int = 200) -> tuple[Tensor, Tensor]:
    """Batch `number` of a step, whichever rank takes it."""
    drawn = torch.Generator().manual_seed(1000 * step + number)
    ids = torch.randint(tokens, (2, 9), generator=drawn)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def numbers_of(rank: int, ranks: int) -> Iterable[int]:
    """The batches of a step that a rank takes, in order: micro-batch by micro-batch, the ranks take
    neighbours."""
    return range(rank, BATCHES, ranks)


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def optimizer_named(name: str) -> MakeOptimizer:
    return {
        "adamw": adamw,
        "adam foreach": lambda p: torch.optim.Adam(p, lr=1e-3, foreach=True),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    }[name]


class Means:
    """The gradients that one process makes of the batches of all ranks in turn, each times 1/ranks,
    added up in the order in which they are taken."""

    def __init__(self, model: nn.Module, ranks: int) -> None:
        self._params, self._ranks = list(model.parameters()), ranks
        self._sums: dict[Tensor, Tensor] = {}

    def take(self) -> None:
        """Add what backward has made, and clear it."""
        for param in self._params:
            assert param.grad is not None
            part = param.grad.cpu() * (1.0 / self._ranks)
            self._sums[param] = self._sums[param] + part if param in self._sums else part
            param.grad = None

    def give(self) -> None:
        """Make the sums the gradients of an optimizer's step."""
        for param, total in self._sums.items():
            param.grad = total
        self._sums = {}


def train(
    model: nn.Module,
    run: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    rank: int,
    ranks: int,
    clip: float = 0.0,
    steps: Iterable[int] = range(STEPS),
    but_last: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[float]:
    """The loop as users write it; returns the losses of this rank.

    but_last  a context for the backward of each micro-batch but the last of a step
    """
    losses = []
    for step in steps:
        numbers = list(numbers_of(rank, ranks))
        for number in numbers:
            loss = run(*batch(step, number)) / len(numbers)
            with nullcontext() if number == numbers[-1] else but_last():
                loss.backward()
            losses.append(loss.item() * len(numbers))
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def digest(tensors: Iterable[Tensor]) -> str:
    made = hashlib.sha256()
    for tensor in tensors:
        made.update(
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return made.hexdigest()[:16]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Digests of weights and of states; a collective where ranks hold shares."""
    params = list(model.parameters())
    found = {"weights": digest(params)}
    for key in sorted({k for p in params for k in optimizer.state.get(p, {})}):
        found[key] = digest(
            optimizer.state[p][key] for p in params if key in optimizer.state.get(p, {})
        )
    return found


def whole_state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """As `state_of`, of parameters and states that FSDP2 has cut."""
    params = [param.full_tensor() for param in model.parameters()]
    states = [
        {key: getattr(value, "full_tensor", value.clone)() for key, value in held.items()}
        for held in (optimizer.state[param] for param in model.parameters())
    ]
    found = {"weights": digest(params)}
    return found | {key: digest(held[key] for held in states) for key in sorted(states[0])}


def trained_eagerly(
    optimizer: str = "adamw", clip: float = 0.0, steps: int = STEPS, **kinds: Any
) -> dict[str, str]:
    """What stock PyTorch makes of all batches, in one process."""
    model = words(**kinds)
    made = optimizer_named(optimizer)(model.parameters())
    train(model, model, made, 0, 1, clip, range(steps))
    return state_of(model, made)
