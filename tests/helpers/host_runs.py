"""Runs of a small GPT whose updates the host computes, beside the same model in plain PyTorch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from planned_runs import PLANNED, THROTTLE, WEIGHT_BYTES, gpt, held_bytes, ids, loss_of, offloaded
from torch import nn

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.ir.units import Bytes
from zcompile.planner import host_step, step_plan


def let_host_update_all(monkeypatch: Any) -> None:
    """Plan all updates for the host that it may compute, also what is small and does not pay."""
    monkeypatch.setattr(step_plan, "HOST_PAYS", 0.0)
    monkeypatch.setattr(host_step, "SMALL_BYTES", 0)


def streaming() -> dict[str, object]:
    """Fields with which weights and states rest on the host, behind a slow bus."""
    return {"device_memory": Bytes(WEIGHT_BYTES + held_bytes()), "throttle": THROTTLE}


class Pair:
    """A model that trains so, and the same model in plain PyTorch, step by step.

    make  an optimizer of a list of parameters
    """

    def __init__(self, make: Any, **fields: object) -> None:
        self.plain, (self.model, self.compiled) = gpt(), offloaded(**{**streaming(), **fields})
        self.optimizers = [make([*model.parameters()]) for model in (self.plain, self.model)]
        self.number = 0

    @property
    def session(self) -> Any:
        return session_behind(self.model)

    def step(self, steps: int = 1, clip: bool = True) -> "Pair":
        sides = ((self.plain, self.plain), (self.model, self.compiled))
        for _ in range(steps):
            for (model, forward), optimizer in zip(sides, self.optimizers, strict=True):
                loss_of(forward, ids(self.number)).backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            self.number += 1
        return self

    def equal(self) -> bool:
        """Whether parameters and states have the same bits."""
        mine = [p.on_host() for p in self.model.parameters()]
        return all(map(torch.equal, mine, self.plain.parameters())) and all(
            torch.equal(torch.as_tensor(a.on_host() if hasattr(a, "on_host") else a), b)
            for p, q in zip(self.model.parameters(), self.plain.parameters(), strict=True)
            for a, b in zip(
                self.optimizers[1].state[p].values(),
                self.optimizers[0].state[q].values(),
                strict=True,
            )
            if isinstance(b, torch.Tensor)
        )

    @property
    def on_host(self) -> int:
        """Updates that the host has computed."""
        return int(zcompile.stats(self.model)["updates_on_host"])


@contextmanager
def trained_pair(make: Any, **fields: object) -> Iterator[Pair]:
    """A pair under a plan in which the host updates parameters."""
    pair = Pair(make, **fields).step(PLANNED)
    assert pair.session.controller.plan.on_host, "the host may update some"
    yield pair
    zcompile.close(pair.model)
