"""What an op on whole tensors makes in memory of its own: known before it runs, counted after.

Inside an optimizer's step such results take what is set aside for compiled graphs, which hold
next to nothing then (`Session.make_room_for_whole`). They count until they die.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from zcompile.ir.torch_compat import memory_of, storage_of, trees, without_modes
from zcompile.runtime.eager.rows import Application


def fresh_bytes(cls: type, app: Application) -> int:
    """Bytes of the results that lie in memory of their own, asked of stand-ins without bytes. Where
    values decide how many they are, as many as all operands have.

    cls  of the tiered tensors among the operands
    """
    returns = app.func._schema.returns
    if all(r.alias_info is not None or "Tensor" not in str(r.type) for r in returns):
        return 0

    def stand_in(value: Any) -> Any:
        if isinstance(value, cls):
            tiered: Any = value
            lies = tiered.lies
            return torch.empty_strided(lies.size, lies.stride, dtype=lies.dtype, device="meta")
        return value.to("meta") if isinstance(value, Tensor) else value

    args, kwargs = trees.tree_map(stand_in, (app.args, app.kwargs))
    try:
        with without_modes():
            results = app.func(*args, **kwargs)
    except (NotImplementedError, RuntimeError):  # it needs values; what is wrong is told by the op
        return sum(t.numel() * t.element_size() for t in app.tensors())
    return sum(storage_bytes for _, storage_bytes in _storages(results))


def fresh(results: object, operands: Iterable[Tensor]) -> list[Tensor]:
    """The results in memory that none of the operands lies in. Sparse ones have none to look at."""
    theirs = {memory_of(t) for t in operands if t.layout is torch.strided}
    return [t for t, _ in _storages(results) if memory_of(t) not in theirs]


def _storages(results: object) -> Iterator[tuple[Tensor, int]]:
    """A tensor over each storage of the results, and the bytes of that."""
    seen: set[int] = set()
    for value in trees.tree_leaves(results):
        if isinstance(value, Tensor) and value.layout is torch.strided:
            memory = memory_of(value)
            if memory not in seen:
                seen.add(memory)
                yield value, storage_of(value).nbytes()
