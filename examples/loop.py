"""The training loops of the examples: plain PyTorch, the same for tiered and for eager models.

Only the two lines that save and resume name zcompile; they take plain models too. Under torchrun
each rank takes its part of the batches (`ranks.py`); the rest is as it is for one process.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

import zcompile
from examples.ranks import ALONE, Ranks, clip_as_ranks_do, train_as
from examples.text import Batch, InputInvalid, batches

MOST_NORM = 1.0
"""Gradients are clipped to this norm."""
WARM_UP = 0.2
"""Part of the steps in which the learning rate rises; with less a deep model blows up at first."""

Watch = Callable[[int, float, float], None]
"""Told after each step: which one, its loss, its seconds."""


@dataclass(frozen=True)
class Task:
    """All that decides the numbers of a training, which is not where its states rest.

    build       a model with random values, on the CPU
    loss        of a model on a batch, a scalar
    text        uint8 [n]
    steps       optimizer steps, of `accumulate` batches each, on each rank
    batch       sequences, of `sequence` bytes each
    lr          the highest; it rises and falls along cosines
    seed        of the values and of the batches
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    text: Tensor
    steps: int
    accumulate: int
    batch: int
    sequence: int
    lr: float
    seed: int

    @property
    def tokens_per_step(self) -> int:
        return self.accumulate * self.batch * self.sequence


@dataclass(frozen=True)
class Keeping:
    """Where a training is kept.

    save    after the last step, and after each `every` steps
    resume  what it goes on from
    """

    save: Path | None = None
    every: int | None = None
    resume: Path | None = None

    def due(self, done: int, steps: int) -> bool:
        """Whether to save after `done` of `steps`."""
        often = self.every is not None and done % self.every == 0
        return self.save is not None and (often or done == steps)


def train(
    task: Task,
    model: nn.Module,
    device: torch.device,
    watch: Watch,
    keeping: Keeping = Keeping(),
    ranks: Ranks = ALONE,
) -> list[float]:
    """Train `model`, compiled or not; the loss of every step, in order: of all ranks, the mean.

    raises  InputInvalid, if what is resumed was another training
    """
    optimizer = AdamW(model.parameters(), lr=task.lr, fused=True)
    # OneCycleLR divides by the steps of either half less one, so few steps get no warm-up half.
    warm_up = WARM_UP if WARM_UP * task.steps > 1 else 0.5
    schedule = OneCycleLR(
        optimizer, task.lr, total_steps=task.steps, pct_start=warm_up, cycle_momentum=False
    )
    data = ranks.rounds(batches(task.text, task.batch, task.sequence, task.seed, device))
    clip = clip_as_ranks_do if ranks.is_twin else nn.utils.clip_grad_norm_
    model.train()
    losses: list[float] = []
    if keeping.resume is not None:
        extra = zcompile.resume(keeping.resume, model, optimizer)
        losses = _losses_so_far(task, extra, keeping.resume)
        schedule.load_state_dict(extra["schedule"])
        for _ in range(len(losses) * task.accumulate):
            next(data)
    for step in range(len(losses), task.steps):
        begin = time.perf_counter()
        found: list[float] = []
        for _ in range(task.accumulate):
            for batch in next(data):
                loss = task.loss(model, batch) / task.accumulate
                loss.backward()
                found.append(loss.item())
        clip(model.parameters(), MOST_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total := ranks.mean(found))
        watch(step, total, time.perf_counter() - begin)
        if keeping.due(step + 1, task.steps):
            told = {"losses": losses, "schedule": schedule.state_dict(), "seed": task.seed}
            zcompile.save(keeping.save, model, optimizer, **told)
    return losses


def _losses_so_far(task: Task, extra: dict[str, Any], path: Path) -> list[float]:
    steps, seed = extra["schedule"]["total_steps"], extra["seed"]
    if (steps, seed) != (task.steps, task.seed):
        raise InputInvalid(
            f"{path} is of a training of {steps} steps with seed {seed}; give "
            f"--steps {steps} --seed {seed}"
        )
    losses: list[float] = extra["losses"]
    return losses


def learn(model: nn.Module, losses: Iterable[Tensor], steps: int, lr: float) -> list[float]:
    """Train what may be trained on the first `steps` losses; their values, printed one by one.

    losses  scalars, each computed by the model when it is asked for
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = AdamW(trained, lr=lr, fused=True)
    values = []
    for loss in islice(losses, steps):
        loss.backward()
        nn.utils.clip_grad_norm_(trained, MOST_NORM)
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
        print(f"step {len(values)}  loss {values[-1]:.4f}")
    return values


@dataclass(frozen=True)
class Comparison:
    """How a training and its eager twin agree.

    steps       pairs of losses, of ours and theirs, that differ; by step
    parameters  largest difference of each parameter that differs; by name
    """

    steps: dict[int, tuple[float, float]]
    steps_in_all: int
    parameters: dict[str, float]
    parameters_in_all: int

    @property
    def equal(self) -> bool:
        return not self.steps and not self.parameters


def values_of(model: nn.Module, ranks: Ranks) -> Mapping[str, Tensor]:
    """The parameters to compare with: of several ranks copies, since all of them have to be there
    when one is read, and one of them compares."""
    named = dict(model.named_parameters())
    return named if ranks.size == 1 else {n: p.detach().cpu().clone() for n, p in named.items()}


def compare_with_eager(
    task: Task,
    values: Mapping[str, Tensor],
    losses: list[float],
    device: torch.device,
    watch: Watch,
    ranks: Ranks = ALONE,
) -> Comparison:
    """Train the same from the start without zcompile, in one process, and compare every bit.

    values, losses  what `train` left and returned; the parameters by the names of the model that
                    was built, uncompiled
    """
    torch.manual_seed(task.seed)
    eager = task.build().to(device)
    if ranks.size > 1:
        train_as(ranks, eager)
    theirs = train(task, eager, device, watch, ranks=ranks.twin)
    twins = dict(eager.named_parameters())
    apart = {}
    for name, param in values.items():
        ours, other = param.detach(), twins[name].detach()
        if not torch.equal(ours, other):
            apart[name] = float((ours - other).abs().max())
    pairs = enumerate(zip(losses, theirs, strict=True))
    differing = {step: pair for step, pair in pairs if pair[0] != pair[1]}
    return Comparison(differing, len(losses), apart, len(twins))
