"""Buffers of a model that was offloaded on `meta`: who brings their values takes memory for them.

A parameter on `meta` becomes tiered, and says that it has no value if it is read. A buffer stays
plain, and on `meta`, until `zcompile.load` or `zcompile.resume` has a value for it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zcompile.runtime.eager.tensor import TieredTensor


def buffers_of(model: nn.Module) -> frozenset[int]:
    """The ids of the buffers of a model, which `memory_for` has memory for."""
    return frozenset(
        id(buffer)
        for module in model.modules()
        for buffer in module._buffers.values()
        if buffer is not None
    )


def why_without_value(tensor: Tensor, buffers: Collection[int]) -> str | None:
    """Why a tensor of `state_dict` is on `meta` and stays there, and what to do, as a clause; None:
    it can take a value.

    buffers  ids of those that `memory_for` has memory for; none, if the model is not offloaded
    """
    if not tensor.is_meta or isinstance(tensor, TieredTensor) or id(tensor) in buffers:
        return None
    if not buffers:
        return "it is on meta; call zcompile.offload(model) or to_empty first"
    return (
        "it is on meta, and is no buffer of a module: one that state_dict, or a hook of it, makes "
        "cannot be given memory; call to_empty first, or register it as a buffer"
    )


@contextmanager
def memory_for(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    filled: Callable[[], Collection[str]],
) -> Iterator[None]:
    """Have those of these tensors of `model` that are buffers on `meta` on `device`, to be filled.

    Modules that share a buffer share it afterwards. After an error those are on `meta` again whose
    values have not come.

    filled  names, among those of `tensors`, of what has its value
    """
    taken = {
        id(tensor): (name, torch.empty_like(tensor, device=device))
        for name, tensor in tensors.items()
        if tensor.is_meta and not isinstance(tensor, TieredTensor | nn.Parameter)
    }
    before = [
        (module, name, buffer)
        for module in (model.modules() if taken else ())
        for name, buffer in module._buffers.items()
        if buffer is not None and id(buffer) in taken
    ]
    for module, name, buffer in before:
        module._buffers[name] = taken[id(buffer)][1]
    try:
        yield
    except BaseException:
        done = set(filled())
        for module, name, buffer in before:
            if taken[id(buffer)][0] not in done:
                module._buffers[name] = buffer
        raise
