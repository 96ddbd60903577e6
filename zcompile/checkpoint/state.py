"""Describes the state of a training by name (`describe`), and puts it back (`restore`).

A parameter or persistent buffer is "model.<its name in state_dict()>", a state of an optimizer is
"optimizer.<parameter>.<key>", the states of torch's random generators are "rng.<device>", tensors
among what the caller adds are "extra.<where they stood>". What is not a tensor stands in `meta`,
which is JSON. A tied parameter has its first name; the others are its aliases. Not part of the
state are gradients, and the random states of Python's `random` and of numpy.

The groups of an optimizer go through `Optimizer.load_state_dict`, whoever wrote the class; its
states follow one by one, since that method would cast them to the dtype of their parameter and want
them whole.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zcompile.checkpoint.meta_buffers import buffers_of, memory_for, why_without_value
from zcompile.checkpoint.plain_values import Packer, check_dense, check_packed, unpack
from zcompile.errors import CheckpointMismatch, Unsupported
from zcompile.ir.types import EntryKind, Layout
from zcompile.ir.version import VERSION
from zcompile.runtime.eager.tensor import TieredTensor
from zcompile.runtime.progress import Work, working
from zcompile.runtime.ranks.fabric import Fabric
from zcompile.runtime.session import Session, session_of
from zcompile.runtime.transfer.interrupts import uninterrupted

COMPILED = "_orig_mod"
"""Name under which `torch.compile(module)` keeps the module itself; no part of a name here."""


@dataclass(frozen=True)
class Fact:
    """What is known of a stored tensor before it is read."""

    dtype: torch.dtype
    size: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.size)}"


class StateSource(Protocol):
    """A stored state: a checkpoint, or the last commit of a durable directory.

    where  for people, "/data/checkpoint"
    """

    where: str

    @property
    def meta(self) -> Mapping[str, Any]:
        """As `TrainingState.meta`."""

    def facts(self) -> Mapping[str, Fact]:
        """Dtype and size of every stored tensor, by name."""

    def fill(self, name: str, target: Tensor) -> None:
        """Give `target`, tiered or plain, of the same dtype and size, the value stored as
        `name`."""


@dataclass(frozen=True)
class ModelState:
    """The state of a model, by the names of its `state_dict`.

    tensors  parameters and persistent buffers, each once
    aliases  further names of a tensor -> its first
    states   results of `get_extra_state` of modules
    """

    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    states: dict[str, object]


def model_state(model: nn.Module) -> ModelState:
    """The state of a model.

    raises  Unsupported, if a tensor is not dense
    """
    found = ModelState({}, {}, {})
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


def read_back(
    source: StateSource, facts: Mapping[str, Fact], card: str | None, name: str, on: str
) -> Tensor:
    """A stored tensor on the device where it was, if there is one here, else on the CPU.

    card  that stands in for any other, whatever that of rank 0 is called; None: none does
    """
    fact = facts[name]
    device = torch.device("cpu" if on == "tiered" else on)
    if device.type == "cuda" and card is not None:
        device = torch.device(card)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        device = torch.device("cpu")
    target = torch.empty(fact.size, dtype=fact.dtype, device=device)
    source.fill(name, target)
    return target


def set_module_state(model: nn.Module, name: str, state: object) -> None:
    """Give a module the result of its `get_extra_state` back.

    name  of the state, as in `state_dict`: ends with "_extra_state"
    """
    for path, module in plain_model(model).named_modules():
        path = f"{path}.".replace(f"{COMPILED}.", "").lstrip(".")
        if f"{path}_extra_state" == name:
            module.set_extra_state(state)


Optimizer = torch.optim.Optimizer


def pack_optimizer(optimizer: Optimizer, held: ModelState, packer: Packer) -> Any:
    """Groups and states of an optimizer as JSON; tensors go to `packer`."""
    names = _names_of(optimizer, held)
    # Groups: options as values, parameters by name.
    groups = []
    for at, group in enumerate(optimizer.param_groups):
        packed = {
            key: packer.pack(value, f"optimizer.group {at}.{key}")
            for key, value in group.items()
            if key != "params"
        }
        packed["params"] = [names[id(param)] for param in group["params"]]
        groups.append(packed)
    # States: by the name of their parameter, or shared by all.
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


def _names_of(optimizer: Optimizer, held: ModelState) -> dict[int, str]:
    """id of a parameter -> its name.

    raises  Unsupported, if one is not of the model
    """
    names = {id(tensor): name for name, tensor in held.tensors.items()}
    for at, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise _stranger(optimizer, f"group {at}", param)
    return names


def _stranger(optimizer: Optimizer, where: str, param: Tensor) -> Unsupported:
    """The error about a parameter that the model does not have."""
    return Unsupported(
        f"{where} of {type(optimizer).__name__} holds a parameter of shape {list(param.shape)} "
        "that the model does not have, so it has no name",
        "give the model whose parameters the optimizer was made with",
    )


def unfitting_groups(saved: Any, held: ModelState, optimizer: Optimizer) -> list[str]:
    """Sentences on how the stored groups differ from those of `optimizer`."""
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


def restore_optimizer(
    source: StateSource,
    held: ModelState,
    optimizer: Optimizer,
    work: Work,
    card: str | None = None,
) -> None:
    """Put the groups and states of an optimizer back.

    work  is told of each parameter
    card  as in `read_back`
    """
    saved, facts = source.meta["optimizer"], source.facts()
    read = partial(read_back, source, facts, card)
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
        work.add(step=f"states of {name}")
        home = _StateHome(source, facts, held.tensors[name], name in on_device)
        optimizer.state[held.tensors[name]] = {
            key: unpack(value, partial(home.read, key)) for key, value in values.items()
        }
    for key, value in saved["shared"].items():
        optimizer.state[key] = unpack(value, read)


@dataclass(frozen=True)
class _StateHome:
    """The destination of the states of one parameter.

    steps_on_device  the optimizer counts steps on the parameter's device
    """

    source: StateSource
    facts: Mapping[str, Fact]
    param: Tensor
    steps_on_device: bool

    def read(self, key: str, name: str, on: str) -> Tensor:
        """A stored state, in the store or in memory."""
        fact = self.facts[name]
        target = self._tiered(key, fact, on)
        if target is None:
            target = torch.empty(fact.size, dtype=fact.dtype, device=self._device(key, fact, on))
        self.source.fill(name, target)
        return target

    @uninterrupted
    def _tiered(self, key: str, fact: Fact, on: str) -> Tensor | None:
        """A blank tiered tensor, if the parameter is tiered and the state is as large, as
        `zeros_like`."""
        param = self.param
        if not isinstance(param, TieredTensor) or fact.size != tuple(param.size()):
            return None
        if not fact.size and on != "tiered":
            return None
        like = torch.empty_strided(
            param.entry_layout.size, param.entry_layout.stride, device="meta"
        )
        layout = Layout.of(torch.empty_like(like, dtype=fact.dtype))
        session = session_of(param.entry)
        entry = session.create_for(f"{param.entry.name}.{key}", EntryKind.STATE, layout, like=param)
        return TieredTensor.over(entry, layout)

    def _device(self, key: str, fact: Fact, on: str) -> torch.device:
        """The parameter's device if the state was there when it was stored, else the CPU."""
        if key == "step":
            there = self.steps_on_device
        else:
            kind = self.source.meta["device"]
            there = on == "tiered" or (bool(fact.size) and torch.device(on).type == kind)
        return self.param.device if there else torch.device("cpu")


FORMAT = 1

logger = logging.getLogger("zcompile.checkpoint.state")


@dataclass(frozen=True)
class TrainingState:
    """The live tensors of a training, not copies: they change with the next step.

    tiered, plain  together all tensors, by name
    meta           JSON: format, versions, aliases, optimizer, extra
    """

    tiered: Mapping[str, TieredTensor]
    plain: Mapping[str, Tensor]
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class Described:
    """What this process knows of a training without asking other ranks: all but random states."""

    held: ModelState
    packer: Packer
    meta: Mapping[str, Any]
    fabric: Fabric | None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """By name, of what was packed so far."""
        return self.packer.tensors


def describe(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> TrainingState:
    """The state of a training as it is now; all ranks call it.

    extra   JSON-able values, tensors, and dicts, lists and tuples of them
    raises  Unsupported, for what cannot be kept, naming it
    """
    return with_random_states(describe_here(model, optimizer, extra))


def describe_here(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Described:
    """As `describe`, without what other ranks are asked for: it raises all that `describe`
    refuses."""
    held = model_state(model)
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
    }
    return Described(held, packer, meta, fabric_behind(model))


def with_random_states(here: Described) -> TrainingState:
    """The whole state; all ranks tell each other their random states."""
    rng = here.packer.pack(_random_states(here.held, here.fabric), "rng")
    tensors, meta = here.tensors, {**here.meta, "rng": rng}
    tiered = {name: t for name, t in tensors.items() if isinstance(t, TieredTensor)}
    plain = {name: t for name, t in tensors.items() if name not in tiered}
    return TrainingState(tiered, plain, meta)


def restore(
    source: StateSource,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    ready: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Put a stored state back, random states included; returns what `extra` was.

    Nothing is changed before all of it is known to fit. The values of a model on `meta` that was
    offloaded come from here. Without `optimizer`, the stored state of one is left alone.

    ready   is called when it is known to fit, before anything changes
    raises  CheckpointMismatch, which lists everything that does not fit
    """
    held = model_state(model)
    _check_said(source)
    buffers = frozenset[int]() if session_behind(model) is None else buffers_of(model)
    _check_fits(source, held, optimizer, buffers)
    states = source.meta["optimizer"]["states"] if optimizer is not None else {}
    done: list[str] = []
    with (
        memory_for(model, held.tensors, device_behind(model), lambda: done),
        working(f"resuming {source.where}", len(held.tensors) + len(states)) as work,
    ):
        held = model_state(model)
        ready()
        for name, tensor in held.tensors.items():
            work.begin(name)
            source.fill(f"model.{name}", tensor.detach())
            work.add(step=name)
            done.append(name)
        fabric, cards = fabric_behind(model), _cards(held)
        # Each of several ranks has a card of its own, whatever that of rank 0 is called.
        card = cards[0] if fabric is not None and len(cards) == 1 else None
        read = partial(read_back, source, source.facts(), card)
        for name, value in source.meta["modules"].items():
            set_module_state(model, name, unpack(value, read))
        if optimizer is not None:
            restore_optimizer(source, held, optimizer, work, card)
    extra: dict[str, Any] = unpack(source.meta["extra"], read)
    states = unpack(source.meta["rng"], read)
    ranks = {name: states.pop(name) for name in list(states) if name.startswith(OF_RANK)}
    for device, state in states.items():
        mine = card if torch.device(device).type == "cuda" else None
        _set_random_state(mine or device, state)
    if fabric is not None and fabric.rank > 0:
        _set_state_of_rank(fabric, ranks, cards)
    return extra


def _check_said(source: StateSource) -> None:
    """Check that the meta of a checkpoint is such as `describe` makes, before any of it is used.

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
    """Check what a checkpoint says of an optimizer.

    raises  ValueError
    """
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


def _check_fits(
    source: StateSource,
    held: ModelState,
    optimizer: torch.optim.Optimizer | None,
    buffers: frozenset[int],
) -> None:
    """buffers  that are given memory, by `id`"""
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
        f"{name}: has no value, {why}"
        for name, tensor in held.tensors.items()
        if (why := why_without_value(tensor, buffers)) is not None
    ]
    if optimizer is not None:
        rows += unfitting_groups(saved["optimizer"], held, optimizer)
    if rows:
        raise CheckpointMismatch(source.where, sorted(rows))


def _device_of(held: ModelState) -> torch.device:
    return next((tensor.device for tensor in held.tensors.values()), torch.device("cpu"))


OF_RANK = "cpu of rank "
"""Begins the names of random states of all ranks but the first."""


def session_behind(model: nn.Module) -> Session | None:
    """The session of an offloaded model; None for a plain one."""
    tiered = (p for p in model.parameters() if isinstance(p, TieredTensor))
    first = next(tiered, None)
    return None if first is None else session_of(first.entry)


def device_behind(model: nn.Module) -> torch.device:
    """Where an offloaded model computes, and its buffers are; of a plain one the CPU."""
    session = session_behind(model)
    return torch.device("cpu") if session is None else session.device.torch_device


def fabric_behind(model: nn.Module) -> Fabric | None:
    """The ranks that train a model together; None, if this process alone does."""
    session = session_behind(model)
    return None if session is None else session.fabric


def _set_state_of_rank(fabric: Fabric, stored: Mapping[str, Tensor], cards: Sequence[str]) -> None:
    """Restore the random states of a rank but the first; derive others, if others were saved.

    cards  that the model is on here
    """
    own = stored.get(f"{OF_RANK}{fabric.rank}")
    if own is not None and len(stored) == fabric.size - 1:
        length = torch.get_rng_state().numel()
        torch.set_rng_state(own[:length])
        if cards and own.numel() > length:
            torch.cuda.set_rng_state(own[length:], cards[0])
        elif cards:
            torch.cuda.manual_seed(torch.initial_seed() + fabric.rank)
        return
    drawn = int(torch.randint(1 << 62, ()))
    torch.manual_seed(drawn + fabric.rank)
    logger.info(
        "the checkpoint has random states of %d ranks, this is one of %d: it draws others from "
        "here on, by its number",
        len(stored) + 1,
        fabric.size,
    )


def _random_states(held: ModelState, fabric: Fabric | None) -> dict[str, Tensor]:
    """Random states of the CPU, of all ranks, and of the CUDA devices that the model is on.

    That of another rank is one row: of its CPU, then of its card, if it has one.
    """
    states, cards = {"cpu": torch.get_rng_state()}, _cards(held)
    if fabric is not None:
        own, length = states["cpu"], states["cpu"].numel()
        if cards:
            own = torch.cat([own, torch.cuda.get_rng_state(cards[0])])
        rows = fabric.rows(own)
        states = {"cpu": rows[0][:length]}
        states |= {f"{OF_RANK}{rank}": row for rank, row in enumerate(rows) if rank}
    return states | {card: torch.cuda.get_rng_state(card) for card in cards}


def _cards(held: ModelState) -> list[str]:
    """The CUDA devices that a model is on."""
    return sorted({str(t.device) for t in held.tensors.values() if t.device.type == "cuda"})


def _set_random_state(device: str, state: Tensor) -> None:
    if device == "cpu":
        torch.set_rng_state(state)
    elif (
        torch.cuda.is_available() and (torch.device(device).index or 0) < torch.cuda.device_count()
    ):
        torch.cuda.set_rng_state(state, device)
    else:
        logger.warning("there is no %s here, so its random state is not restored", device)
