"""What a model holds, by the names of its `state_dict`, and where kept values come from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zcompile.checkpoint.plain_values import check_dense

COMPILED = "_orig_mod"
"""What `torch.compile(module)` keeps the module itself under; no part of a name."""


@dataclass(frozen=True)
class Fact:
    """What is known of a stored tensor before it is read."""

    dtype: torch.dtype
    size: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.size)}"


class StateSource(Protocol):
    """A state that was kept: a checkpoint, or the last commit of a durable directory.

    where  for people, "/data/checkpoint"
    """

    where: str

    @property
    def meta(self) -> Mapping[str, Any]:
        """As `TrainingState.meta`."""

    def facts(self) -> Mapping[str, Fact]:
        """Every tensor that it holds, by name."""

    def fill(self, name: str, target: Tensor) -> None:
        """Give `target`, tiered or plain, of the same dtype and size, the value kept as `name`."""


@dataclass(frozen=True)
class Held:
    """What a model holds by the names of its `state_dict`.

    tensors  parameters and persistent buffers, each once
    aliases  further names of a tensor -> its first
    states   what `get_extra_state` of modules gave
    """

    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    states: dict[str, object]


def held_by(model: nn.Module) -> Held:
    """raises  Unsupported, if a tensor is not dense"""
    found = Held({}, {}, {})
    first: dict[int, str] = {}
    for raw, value in plain_model(model).state_dict(keep_vars=True).items():
        name = raw.replace(f"{COMPILED}.", "")
        if not isinstance(value, Tensor):
            found.states[name] = value
        elif id(value) in first:
            found.aliases[name] = first[id(value)]
        else:
            check_dense(value, f"{name!r} of the model")
            first[id(value)] = name
            found.tensors[name] = value
    return found


def plain_model(model: nn.Module) -> nn.Module:
    """The model itself, if `model` is what `torch.compile` made of it."""
    inner = getattr(model, COMPILED, model)
    return inner if isinstance(inner, nn.Module) else model


def fact_of(tensor: Tensor) -> Fact:
    return Fact(tensor.dtype, tuple(tensor.size()))


def read_back(source: StateSource, facts: Mapping[str, Fact], name: str, on: str) -> Tensor:
    """A kept tensor on the device where it was, if there is one here, else on the CPU."""
    fact = facts[name]
    device = torch.device("cpu" if on == "tiered" else on)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        device = torch.device("cpu")
    target = torch.empty(fact.size, dtype=fact.dtype, device=device)
    source.fill(name, target)
    return target


def set_module_state(model: nn.Module, name: str, state: object) -> None:
    """name  of a `get_extra_state`, as in `state_dict`: ends with "_extra_state" """
    for path, module in plain_model(model).named_modules():
        path = f"{path}.".replace(f"{COMPILED}.", "").lstrip(".")
        if f"{path}_extra_state" == name:
            module.set_extra_state(state)
