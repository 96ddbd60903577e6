"""What an optimizer holds, by the names of its parameters, and how it is put back.

Its groups go through `Optimizer.load_state_dict`, whoever wrote the class; its states follow one by
one, since that method would cast them to the dtype of their parameter and want them whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zcompile.checkpoint.model_state import Fact, Held, StateSource, read_back
from zcompile.checkpoint.plain_values import Packer, unpack
from zcompile.errors import Unsupported
from zcompile.ir.types import Kind, Layout
from zcompile.runtime.eager.tensor import TieredTensor
from zcompile.runtime.session import session_of
from zcompile.runtime.transfer.interrupts import uninterrupted

Optimizer = torch.optim.Optimizer


def pack_optimizer(optimizer: Optimizer, held: Held, packer: Packer) -> Any:
    names = _names_of(optimizer, held)
    groups = []
    for at, group in enumerate(optimizer.param_groups):
        packed = {
            key: packer.pack(value, f"optimizer.group {at}.{key}")
            for key, value in group.items()
            if key != "params"
        }
        packed["params"] = [names[id(param)] for param in group["params"]]
        groups.append(packed)
    states: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    for key, value in optimizer.state.items():
        if isinstance(key, Tensor):
            if id(key) not in names:
                raise _stranger(optimizer, "a state", key)
            name = names[id(key)]
            states[name] = packer.pack(value, f"optimizer.{name}")
        else:
            shared[str(key)] = packer.pack(value, f"optimizer.{key}")
    return {
        "class": type(optimizer).__name__,
        "groups": groups,
        "states": states,
        "shared": shared,
    }


def _names_of(optimizer: Optimizer, held: Held) -> dict[int, str]:
    """id of a parameter -> its name. raises  Unsupported, if one is not of the model"""
    names = {id(tensor): name for name, tensor in held.tensors.items()}
    for at, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise _stranger(optimizer, f"group {at}", param)
    return names


def _stranger(optimizer: Optimizer, where: str, param: Tensor) -> Unsupported:
    return Unsupported(
        f"{where} of {type(optimizer).__name__} holds a parameter of shape {list(param.shape)} "
        "that the model does not have, so it has no name",
        "give the model whose parameters the optimizer was made with",
    )


def unfitting_groups(saved: Any, held: Held, optimizer: Optimizer) -> list[str]:
    if saved is None:
        return ["it holds no optimizer; resume without one"]
    kind = type(optimizer).__name__
    if saved["class"] != kind:
        return [f"it is of the optimizer {saved['class']}, this one is {kind}"]
    names = _names_of(optimizer, held)
    ours = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    theirs = [group["params"] for group in saved["groups"]]
    if len(ours) != len(theirs):
        return [f"its optimizer has {len(theirs)} groups of parameters, this one has {len(ours)}"]
    return [
        f"group {at} of its optimizer trains {_differing(b, a)}, this one {_differing(a, b)}"
        for at, (a, b) in enumerate(zip(ours, theirs, strict=True))
        if a != b
    ]


def _differing(these: list[str], those: list[str]) -> str:
    if set(these) == set(those):
        return f"{', '.join(these[:3])}, ... in this order"
    return ", ".join(sorted(set(these) - set(those))[:5]) or "nothing more"


def restore_optimizer(source: StateSource, held: Held, optimizer: Optimizer) -> None:
    saved, facts = source.meta["optimizer"], source.facts()
    read = partial(read_back, source, facts)
    groups, count = [], 0
    for group in saved["groups"]:
        options = {key: unpack(value, read) for key, value in group.items() if key != "params"}
        options["params"] = list(range(count, count + len(group["params"])))
        count += len(group["params"])
        groups.append(options)
    optimizer.load_state_dict({"state": {}, "param_groups": groups})
    on_device = {
        held_name
        for group in saved["groups"]
        if group.get("fused") or group.get("capturable")
        for held_name in group["params"]
    }
    for name, values in saved["states"].items():
        home = _StateHome(source, facts, held.tensors[name], name in on_device)
        optimizer.state[held.tensors[name]] = {
            key: unpack(value, partial(home.read, key)) for key, value in values.items()
        }
    for key, value in saved["shared"].items():
        optimizer.state[key] = unpack(value, read)


@dataclass(frozen=True)
class _StateHome:
    """Where the states of one parameter go.

    steps_on_device  the optimizer counts steps on the parameter's device
    """

    source: StateSource
    facts: Mapping[str, Fact]
    param: Tensor
    steps_on_device: bool

    def read(self, key: str, name: str, on: str) -> Tensor:
        fact = self.facts[name]
        target = self._tiered(key, fact, on)
        if target is None:
            target = torch.empty(fact.size, dtype=fact.dtype, device=self._device(key, fact, on))
        self.source.fill(name, target)
        return target

    @uninterrupted
    def _tiered(self, key: str, fact: Fact, on: str) -> Tensor | None:
        """A blank one if the parameter is tiered and the state is as large, as `zeros_like`."""
        param = self.param
        if not isinstance(param, TieredTensor) or fact.size != tuple(param.size()):
            return None
        if not fact.size and on != "tiered":
            return None
        like = torch.empty_strided(param.lies.size, param.lies.stride, device="meta")
        layout = Layout.of(torch.empty_like(like, dtype=fact.dtype))
        session = session_of(param.entry)
        entry = session.create(f"{param.entry.name}.{key}", Kind.STATE, layout.nbytes)
        return TieredTensor.over(entry, layout)

    def _device(self, key: str, fact: Fact, on: str) -> torch.device:
        """That of the parameter if it was so when the state was kept, else the CPU."""
        if key == "step":
            there = self.steps_on_device
        else:
            kind = self.source.meta["device"]
            there = on == "tiered" or (bool(fact.size) and torch.device(on).type == kind)
        return self.param.device if there else torch.device("cpu")
