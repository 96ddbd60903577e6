"""Random training loops, the same on every rank and in one process of plain PyTorch.

`drawn(seed)` draws a loop: an optimizer, a dtype, how many micro-batches, and what is done besides
in each step. `trained` runs it. With a mesh each rank takes its own batches; without one, a process
takes those of all ranks in turn, which is what the ranks must be equal to, bit by bit.
"""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from small_models import Block
from torch import Tensor, nn, optim
from torch.nn import functional as F

import zcompile

TOKENS, WIDTH = 211, 96
WIDE = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}
SETTINGS: dict[str, dict[str, Any]] = {
    "host": WIDE,
    "roomy": {**WIDE, "device_memory": "12MiB"},
    "slow links": {**WIDE, "throttle": {"h2d": "300MB/s", "d2h": "300MB/s"}},
    "stage 2": {**WIDE, "device_memory": "16MiB", "stage": 2},
    "stage 3": {**WIDE, "stage": 3},
    "unplanned": {**WIDE, "residency": False},
}
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "adamw": lambda p: optim.AdamW(p, lr=1e-3),
    "adamw, fused": lambda p: optim.AdamW(p, lr=1e-3, fused=True),
    "amsgrad, in lists": lambda p: optim.Adam(p, lr=1e-3, amsgrad=True, foreach=True),
    "nesterov": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "nadam": lambda p: optim.NAdam(p, lr=1e-3),
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "groups": lambda p: optim.AdamW(
        [{"params": p[:5], "weight_decay": 0.0}, {"params": p[5:], "lr": 2e-3}], lr=1e-3
    ),
}


class Words(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.places = nn.Parameter(torch.randn(32, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block(WIDTH, heads=4) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids[:, :-1]) + self.places[: ids.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids[:, 1:].flatten())


@dataclass(frozen=True)
class Program:
    """A loop. acts: what is done besides, step by step."""

    seed: int
    ranks: int
    setting: str
    optimizer: str
    narrow: bool
    micro_batches: int
    acts: tuple[tuple[str, ...], ...]


@dataclass
class Loop:
    """A loop that runs.

    told   what a user sees on the way, the same on all ranks
    losses those of this rank
    """

    program: Program
    model: nn.Module
    run: Callable[..., Tensor]
    ranks: list[int]
    params: list[Tensor] = field(default_factory=list)
    told: list[object] = field(default_factory=list)
    losses: dict[tuple[int, int, int], float] = field(default_factory=dict)
    size: tuple[int, int] = (4, 16)
    hook: Any = None
    average: list[Tensor] | None = None

    def __post_init__(self) -> None:
        self.params = list(self.model.parameters())
        self.restart(self.program.optimizer)

    def restart(self, name: str) -> None:
        self.optimizer = OPTIMIZERS[name](self.params)

    def batch(self, number: int) -> Tensor:
        drawn = torch.Generator().manual_seed(1_000_003 * self.program.seed + number)
        rows, length = self.size
        return torch.randint(TOKENS, (rows, length + 1), generator=drawn)

    def loss(self, number: int) -> Tensor:
        narrow = torch.autocast("cpu", torch.bfloat16) if self.program.narrow else nullcontext()
        with narrow:
            return self.run(self.batch(number))

    def gradients(self, step: int, micro_batches: int) -> None:
        alone = len(self.ranks) == 1 and self.program.ranks > 1
        parts = micro_batches * (1 if alone else self.program.ranks)
        for micro in range(micro_batches):
            for rank in self.ranks:
                loss = self.loss(100 * step + micro * self.program.ranks + rank)
                (loss / parts).backward()
                self.losses[step, micro, rank] = loss.item()

    def sum_of(self, tensors: Any) -> float:
        return sum(float(tensor.detach().double().sum()) for tensor in tensors)


# --- What is done besides ---


def longer(loop: Loop) -> None:
    loop.size = loop.size[0], 28 - loop.size[1]


def smaller(loop: Loop) -> None:
    loop.size = 7 - loop.size[0], loop.size[1]


def hooked(loop: Loop) -> None:
    weight: Any = loop.model.blocks[1].down.weight  # type: ignore[index,union-attr]  # of Words
    if loop.hook is None:
        loop.hook = weight.register_hook(lambda grad: grad * 0.5)
    else:
        loop.hook.remove()
        loop.hook = None


BEFORE = {"longer": longer, "smaller": smaller, "hooked": hooked}


def noise(loop: Loop) -> None:
    with torch.no_grad():
        for param in loop.params[3:9]:
            if param.grad is not None:
                param.grad.add_(torch.full_like(param.grad, 1e-3))


def look_at_gradients(loop: Loop) -> None:
    loop.told.append(loop.sum_of(p.grad for p in loop.params if p.grad is not None))


def drop_a_gradient(loop: Loop) -> None:
    loop.params[7].grad = None


BETWEEN = {"noise": noise, "look": look_at_gradients, "drop": drop_a_gradient}


def twice(loop: Loop) -> None:
    loop.optimizer.step()


def slower(loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        group["lr"] *= 0.5


def evaluated(loop: Loop) -> None:
    with torch.no_grad():
        loop.told.append(loop.loss(10_001).item())


def inferred(loop: Loop) -> None:
    with torch.inference_mode():
        loop.told.append(loop.loss(10_002).item())


def called_uncompiled(loop: Loop) -> None:
    with torch.no_grad():
        loop.told.append(loop.model(loop.batch(10_003)).item())


def averaged(loop: Loop) -> None:
    with torch.no_grad():
        if loop.average is None:
            loop.average = [p.detach().clone() for p in loop.params]
        else:
            torch._foreach_lerp_(loop.average, [p.detach() for p in loop.params], 0.1)


def frozen(loop: Loop) -> None:
    for param in loop.model.blocks[0].parameters():  # type: ignore[index]  # of Words
        param.requires_grad_(not param.requires_grad)


def loaded(loop: Loop) -> None:
    loop.model.load_state_dict({k: v.clone() for k, v in loop.model.state_dict().items()})


def states_loaded(loop: Loop) -> None:
    loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))


def shown(loop: Loop) -> None:
    loop.told.append(repr(loop.params[4]))


def changed(loop: Loop) -> None:
    with torch.no_grad():
        loop.params[6].mul_(1.01)
        loop.params[5][2:5] += 0.01


def restarted(loop: Loop) -> None:
    loop.restart("nesterov" if loop.program.optimizer != "nesterov" else "adamw")


def copied(loop: Loop) -> None:
    loop.told.append(loop.sum_of(copy.deepcopy(loop.model.state_dict()).values()))


AFTER = {
    f.__name__: f
    for f in (
        *(twice, slower, evaluated, inferred, called_uncompiled, averaged, frozen),
        *(loaded, states_loaded, shown, changed, restarted, copied),
    )
}
OTHERS = ("skipped", "more", "zeroed")
"""No step of the optimizer; one micro-batch more than else; gradients become zeros, not None."""
ACTS = (*BEFORE, *BETWEEN, *AFTER, *OTHERS)


def drawn(seed: int) -> Program:
    """A loop of six steps, long enough for plans to be made and made anew."""
    of = random.Random(seed)
    setting = of.choice([*SETTINGS])
    acts = [tuple(of.sample(ACTS, of.choice([0, 1, 1, 2]))) for _ in range(6)]
    return Program(
        seed=seed,
        ranks=of.choice([2, 2, 2, 4]),
        setting=setting,
        optimizer=of.choice([*OPTIMIZERS]),
        narrow=of.random() < 0.4,
        micro_batches=of.choice([1, 1, 2]),
        acts=tuple(acts),
    )


def trained(mesh: Any, program: Program) -> tuple[dict[Any, float], list[object], list[Any]]:
    """Losses, what was seen, and all values at the end.

    mesh  of the ranks; None: one process of plain PyTorch takes the batches of all of them
    """
    torch.manual_seed(program.seed)
    model = Words()
    if mesh is None:
        loop = Loop(program, model, model, list(range(program.ranks)))
    else:
        zcompile.offload(model, mesh=mesh, **SETTINGS[program.setting])
        loop = Loop(program, model, torch.compile(model, backend="zinf"), [mesh.get_local_rank()])
    for step, acts in enumerate(program.acts):
        for name in (name for name in acts if name in BEFORE):
            BEFORE[name](loop)
        loop.gradients(step, program.micro_batches + ("more" in acts))
        for name in (name for name in acts if name in BETWEEN):
            BETWEEN[name](loop)
        if "skipped" not in acts:
            loop.optimizer.step()
        for name in (name for name in acts if name in AFTER):
            AFTER[name](loop)
        loop.optimizer.zero_grad(set_to_none="zeroed" not in acts)
    found = [tensor.detach().tolist() for tensor in _values(loop)]
    if mesh is not None:
        assert not zcompile.stats(model)["inexact"], "nothing is in tiles or slices here"
        zcompile.close(model)
    return loop.losses, loop.told, found


def _values(loop: Loop) -> Iterator[Tensor]:
    yield from loop.params
    for param in loop.params:
        yield from (v for v in loop.optimizer.state[param].values() if isinstance(v, Tensor))
    yield from loop.average or ()
