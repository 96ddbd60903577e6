"""What the state of a training is, by name, and how it is put back.

A parameter or persistent buffer is "model.<its name in state_dict()>", a state of an optimizer is
"optimizer.<parameter>.<key>", the states of torch's random generators are "rng.<device>", tensors
among what the caller adds are "extra.<where they stood>". What is not a tensor stands in `meta`,
which is JSON. A tied parameter has its first name; the others are its aliases.

Not part of it: gradients, and the random states of Python's `random` and of numpy.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zcompile.checkpoint.model_state import (
    Held,
    StateSource,
    fact_of,
    held_by,
    read_back,
    set_module_state,
)
from zcompile.checkpoint.optimizer_state import pack_optimizer, restore_optimizer, unfitting_groups
from zcompile.checkpoint.plain_values import Packer, check_packed, unpack
from zcompile.errors import CheckpointMismatch
from zcompile.ir.types import VERSION
from zcompile.runtime.eager.tensor import TieredTensor

FORMAT = 1

logger = logging.getLogger("zcompile.checkpoint.training_state")


@dataclass(frozen=True)
class TrainingState:
    """The live tensors, not copies: they change with the next step.

    tiered, plain  together all tensors, by name; where they lie tells which
    meta           JSON: format, versions, aliases, optimizer, extra
    """

    tiered: Mapping[str, TieredTensor]
    plain: Mapping[str, Tensor]
    meta: Mapping[str, Any]


def describe(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> TrainingState:
    """The state of a training as it is now.

    extra   JSON-able values, tensors, and dicts, lists and tuples of them
    raises  Unsupported, for what cannot be kept, naming it
    """
    held = held_by(model)
    tensors = {
        # Detaching a tiered tensor is an op, and this runs at each step of a durable training.
        f"model.{name}": value if isinstance(value, TieredTensor) else value.detach()
        for name, value in held.tensors.items()
    }
    packer = Packer(tensors)
    meta = {
        "format": FORMAT,
        "zcompile": VERSION,
        "torch": torch.__version__,
        "device": _device_of(held).type,
        "aliases": held.aliases,
        "modules": {
            name: packer.pack(value, f"modules.{name}") for name, value in held.states.items()
        },
        "optimizer": None if optimizer is None else pack_optimizer(optimizer, held, packer),
        "extra": packer.pack(dict(extra or {}), "extra"),
        "rng": packer.pack(_random_states(held), "rng"),
    }
    tiered = {name: t for name, t in tensors.items() if isinstance(t, TieredTensor)}
    plain = {name: t for name, t in tensors.items() if name not in tiered}
    return TrainingState(tiered, plain, meta)


def restore(
    source: StateSource, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Put a kept state back, random states included; returns what `extra` was.

    Nothing is changed before all of it is known to fit. The values of a model on `meta` that was
    offloaded come from here. Without `optimizer`, what was kept of one is left alone.

    raises  CheckpointMismatch, which lists everything that does not fit
    """
    held = held_by(model)
    _check_said(source)
    _check_fits(source, held, optimizer)
    for name, tensor in held.tensors.items():
        source.fill(f"model.{name}", tensor.detach())
    read = partial(read_back, source, source.facts())
    for name, value in source.meta["modules"].items():
        set_module_state(model, name, unpack(value, read))
    if optimizer is not None:
        restore_optimizer(source, held, optimizer)
    extra: dict[str, Any] = unpack(source.meta["extra"], read)
    for device, state in unpack(source.meta["rng"], read).items():
        _set_random_state(device, state)
    return extra


def _check_said(source: StateSource) -> None:
    """Whether the meta of a checkpoint is such as `describe` makes, before any of it is used.

    raises  CheckpointMismatch
    """
    saved: Mapping[str, Any] = source.meta
    if saved.get("format") != FORMAT:
        return  # told as such
    names = source.facts()
    try:
        for key in ("aliases", "modules", "optimizer", "extra", "rng"):
            if key not in saved:
                raise ValueError(f"it lacks {key!r}")
        if not _texts(saved["aliases"]):
            raise ValueError("'aliases' are not names")
        for key in ("modules", "rng", "extra"):
            if not isinstance(saved[key], dict):
                raise ValueError(f"{key!r} is not a mapping")
            check_packed(saved[key], names, key)
        if saved["optimizer"] is not None:
            _check_optimizer_said(saved["optimizer"], names)
    except ValueError as error:
        raise CheckpointMismatch(source.where, [str(error)]) from None


def _check_optimizer_said(saved: Any, names: Mapping[str, object]) -> None:
    """raises  ValueError"""
    sound = (
        isinstance(saved, dict)
        and isinstance(saved.get("class"), str)
        and isinstance(saved.get("shared"), dict)
        and isinstance(saved.get("states"), dict)
        and isinstance(saved.get("groups"), list)
        and all(isinstance(group, dict) for group in saved["groups"])
        and all(isinstance(group.get("params"), list) for group in saved["groups"])
        and all(isinstance(state, dict) for state in saved["states"].values())
    )
    if not sound:
        raise ValueError("what it says of an optimizer is not of a checkpoint's making")
    strangers = [name for name in saved["states"] if f"model.{name}" not in names]
    if strangers:
        raise ValueError(f"it holds states of {strangers[0]!r:.80}, which it does not hold")
    check_packed([saved["shared"], saved["states"], saved["groups"]], names, "optimizer")


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _check_fits(source: StateSource, held: Held, optimizer: torch.optim.Optimizer | None) -> None:
    saved: Mapping[str, Any] = source.meta
    if saved.get("format") != FORMAT:
        raise CheckpointMismatch(
            source.where,
            [f"it is of format {saved.get('format')}, this zcompile reads format {FORMAT}"],
        )
    facts = {name: f for name, f in source.facts().items() if name.startswith("model.")}
    wanted = {f"model.{name}": fact_of(tensor) for name, tensor in held.tensors.items()}
    rows = [f"{name[6:]}: missing, the model has {wanted[name]}" for name in wanted.keys() - facts]
    rows += [f"{name[6:]}: {facts[name]}, the model has none" for name in facts.keys() - wanted]
    rows += [
        f"{name[6:]}: {facts[name]}, the model has {fact}"
        for name, fact in wanted.items()
        if name in facts and facts[name] != fact
    ]
    rows += [
        f"{alias}: tied to {first}, in the model it is not"
        for alias, first in saved["aliases"].items()
        if held.aliases.get(alias) != first and alias not in held.tensors
    ]
    rows += [
        f"{name}: has no value, it is on meta; call zcompile.offload(model) or to_empty first"
        for name, tensor in held.tensors.items()
        if tensor.is_meta and not isinstance(tensor, TieredTensor)
    ]
    if optimizer is not None:
        rows += unfitting_groups(saved["optimizer"], held, optimizer)
    if rows:
        raise CheckpointMismatch(source.where, sorted(rows))


def _device_of(held: Held) -> torch.device:
    return next((tensor.device for tensor in held.tensors.values()), torch.device("cpu"))


def _random_states(held: Held) -> dict[str, Tensor]:
    """Of the CPU, and of the CUDA devices that the model is on."""
    states = {"cpu": torch.get_rng_state()}
    for device in {t.device for t in held.tensors.values() if t.device.type == "cuda"}:
        states[str(device)] = torch.cuda.get_rng_state(device)
    return states


def _set_random_state(device: str, state: Tensor) -> None:
    if device == "cpu":
        torch.set_rng_state(state)
    elif (
        torch.cuda.is_available() and (torch.device(device).index or 0) < torch.cuda.device_count()
    ):
        torch.cuda.set_rng_state(state, device)
    else:
        logger.warning("there is no %s here, so its random state is not restored", device)
