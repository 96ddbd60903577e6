"""What a program finds when it begins: a small model, optimizers, and verbs.

A program is plain Python that runs on either side: on a model that torch holds, and on the same
model offloaded. Verbs that only one side can follow (`move`) do nothing on the other.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.runtime.relocate import move as move_entry
from zcompile.runtime.session import session_of

torch._functorch.config.donated_buffer = False  # else stock backends refuse retain_graph

BUDGETS: dict[str, dict[str, Any]] = {
    "roomy": {"device_memory": "1MiB", "host_memory": "16MiB"},
    "tight": {"device_memory": "24KiB", "host_memory": "16MiB"},
    "disk": {"device_memory": "256KiB", "host_memory": "256KiB", "disk": "disk"},
}
"""roomy  everything fits
tight  the arena holds one of the large parameters and little else, so that ops stream in chunks
disk   the host has room for staging only, so that everything rests on disk at first
"""


class Boom(Exception):
    """Raised by the code of a user."""


class Model(nn.Module):
    """Parameters of many layouts and dtypes; two pairs alike, one used twice, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 48), nn.Linear(40, 48)
        self.conv = nn.Parameter(torch.randn(4, 3, 3, 3))
        self.left, self.right = nn.Parameter(torch.randn(7, 7)), nn.Parameter(torch.randn(7, 7))
        self.turned = nn.Parameter(torch.randn(6, 5, 4).permute(2, 0, 1))
        self.narrow = nn.Parameter(torch.randn(33, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.randn(()))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.register_buffer("count", torch.zeros(3))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x)) * self.scale
        y = y + self.second(torch.relu(self.first(x[:, :40]))[:, :40])
        if self.fails:
            raise Boom("the model")
        z = (self.left @ self.right.t()) * self.frozen
        return (
            y.sum()
            + z.square().mean()
            + (self.turned * self.turned[0]).mean()
            + self.narrow.float().exp().mean()
            + F.conv2d(x[:, :27].reshape(-1, 3, 3, 3), self.conv, padding=1).square().mean()
        )


def optimizer(kind: str, params: Any) -> torch.optim.Optimizer:
    return OPTIMIZERS[kind](list(params))


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "sgd forloop": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=False),
    # Not of bfloat16: torch's kernel for the CPU takes most elements' momentum from elsewhere.
    "sgd fused": lambda ps: torch.optim.SGD(
        [p for p in ps if p.dtype == torch.float32], lr=0.1, momentum=0.9, fused=True
    ),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "adamw forloop": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=False, amsgrad=True),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.9, centered=True),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, lr=0.01),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, lr=0.01, max_iter=2),
}


def names(budget: str | None, disk: Path | None = None) -> dict[str, Any]:
    """The names that a program begins with; on a `budget` with the model offloaded, else plain."""
    torch.manual_seed(0)
    model = Model()
    old = optimizer("sgd momentum", model.parameters())
    if budget is not None:
        fields = BUDGETS[budget] | ({"disk": disk} if "disk" in BUDGETS[budget] else {})
        zcompile.offload(model, device="cpu", **fields)
    return {
        "torch": torch,
        "nn": nn,
        "copy": copy,
        "Boom": Boom,
        "m": model,
        "c": torch.compile(model, backend="aot_eager" if budget is None else "zinf"),
        "x": torch.randn(3, 40),
        "opt": old,
        "optimizer": optimizer,
        "log": {},
        "move": move,
        "noted": noted,
        "stepping": stepping,
        "node_of": node_of,
        "clip": nn.utils.clip_grad_norm_,
        "clip_values": nn.utils.clip_grad_value_,
        "swap_tensors": torch.utils.swap_tensors,
        "swap_values": swap_values,
    }


def move(tensor: Tensor | None, home: str) -> None:
    """The bytes behind a tiered tensor rest on `home` from here on, if there is room."""
    entry = getattr(tensor, "entry", None)
    if entry is None:
        return
    session = session_of(entry)
    session.executor.foresight.abandon()
    session.drain()
    session.forget_steps()
    if home == "device":
        device = session.homes.device
        device.window_bytes = min(device.window_bytes, session.arena.budget_bytes * 3 // 4)
        device.plan(entry.ref, entry.name, entry.nbytes)
    move_entry(session, entry, home)


def noted(log: dict[str, list[Tensor]], name: str, then: str = "") -> Callable[..., Any]:
    """A hook that keeps what it is given under `name`, and then doubles gradients, or raises."""
    kept = log[name] = []

    def hook(*given: Any) -> Any:
        values = [given[0].grad] if then == "grad" else torch.utils._pytree.tree_leaves(given)
        kept.extend(value.detach().clone() for value in values if isinstance(value, Tensor))
        if then == "raise" and len(kept) < 3:
            raise Boom(name)
        if then == "double":
            return (
                given[0] * 2
                if isinstance(given[0], Tensor)
                else tuple(None if g is None else g * 2 for g in given[0])
            )
        return None

    return hook


def stepping(param: Tensor) -> None:
    """A hook that steps as soon as a gradient is there; what torch is told is to be None."""
    param.data.add_(param.grad, alpha=-0.1)


def node_of(param: Tensor) -> Any:
    """The node that adds up the gradient of a leaf."""
    return torch.autograd.graph.get_gradient_edge(param).node


def swap_values(a: Tensor, b: Tensor) -> None:
    with torch.no_grad():
        held = a.clone()
        a.copy_(b)
        b.copy_(held)


def close(model: nn.Module) -> None:
    session_behind(model).close()
