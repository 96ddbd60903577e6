"""Buffers of a model that was offloaded on `meta`: they get memory when a value comes for them.

A parameter on `meta` becomes tiered, and says that it has no value if it is read. A buffer stays
plain, and on `meta`, until `load_state_dict` or `zcompile.load` brings a value for it.
"""

from collections.abc import Collection, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from zcompile.checkpoint.state import COMPILED


def take_memory(model: nn.Module, names: Collection[str], device: torch.device) -> None:
    """Put those of these buffers of `model` that are on `meta` on `device`, without a value.

    Modules that share a buffer share it afterwards.
    """
    taken: dict[int, Tensor] = {}
    wanted = {name.replace(f"{COMPILED}.", "") for name in names}
    for raw, buffer in model.named_buffers(remove_duplicate=False):
        name = raw.replace(f"{COMPILED}.", "")
        if buffer.is_meta and name in wanted and id(buffer) not in taken:
            taken[id(buffer)] = torch.empty_like(buffer, device=device)
    for module in model.modules() if taken else ():
        for name, shared in module._buffers.items():
            if shared is not None:
                module._buffers[name] = taken.get(id(shared), shared)


def take_memory_when_loaded(model: nn.Module, device: torch.device) -> None:
    """Let `load_state_dict` find memory on `device` where it has values for buffers on `meta`."""
    if any(buffer.is_meta for buffer in model.buffers()):
        model.register_load_state_dict_pre_hook(partial(_before_load, device))


def _before_load(
    device: torch.device,
    model: nn.Module,
    state_dict: Mapping[str, object],
    prefix: str,
    *_: object,
) -> None:
    given = {key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)}
    take_memory(model, given, device)
