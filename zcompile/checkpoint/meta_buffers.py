"""Buffers of a model that was offloaded on `meta`: `zcompile.load` takes memory for their values.

A parameter on `meta` becomes tiered, and says that it has no value if it is read. A buffer stays
plain, and on `meta`, until a value comes for it.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zcompile.checkpoint.state import COMPILED


@contextmanager
def memory_for(
    model: nn.Module,
    names: Collection[str],
    device: torch.device,
    filled: Callable[[], Collection[str]],
) -> Iterator[None]:
    """Have those of these buffers of `model` that are on `meta` on `device`, to be filled.

    Modules that share a buffer share it afterwards. After an error those are on `meta` again whose
    values have not come.

    filled  names of what has its value, of a shared buffer any
    """
    taken: dict[int, Tensor] = {}
    wanted = {_plain(name) for name in names}
    for raw, buffer in model.named_buffers(remove_duplicate=False):
        if buffer.is_meta and _plain(raw) in wanted and id(buffer) not in taken:
            taken[id(buffer)] = torch.empty_like(buffer, device=device)
    before = [
        (module, name, shared)
        for module in (model.modules() if taken else ())
        for name, shared in module._buffers.items()
        if shared is not None and id(shared) in taken
    ]
    for module, name, shared in before:
        module._buffers[name] = taken[id(shared)]
    try:
        yield
    except BaseException:
        done = {_plain(name) for name in filled()}
        with_values = {
            id(buffer)
            for raw, buffer in model.named_buffers(remove_duplicate=False)
            if _plain(raw) in done
        }
        for module, name, shared in before:
            if id(module._buffers[name]) not in with_values:
                module._buffers[name] = shared
        raise


def _plain(name: str) -> str:
    """A name without what `torch.compile` puts into it."""
    return name.replace(f"{COMPILED}.", "")
