"""A meter of memory that knows nothing of graphs: it counts storages, from op to death."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):
    """Counts the storages that ops make, until they die; whatever an op made, by its nature.

    live   bytes alive that were made while it was `on`
    least  smaller ones do not count
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.least = 0
        self.on = False
        self._known: set[int] = set()
        self.after_op: Callable[[], None] = lambda: None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {id(t.untyped_storage()) for t in tensors((args, kwargs))}
        out = func(*args, **kwargs)
        if self.on:
            for storage in {id(s): s for s in (t.untyped_storage() for t in tensors(out))}.values():
                if id(storage) not in given and storage.nbytes() > self.least:
                    self._count(storage)
            self.after_op()
        return out

    def adopt(self, made: Tensor) -> None:
        """Count what something else made; until it dies."""
        self._count(made.untyped_storage())

    def forget(self, tensor: Any) -> None:
        """It is somebody else's from here on."""
        if not isinstance(tensor, Tensor):
            return
        storage = tensor.untyped_storage()
        if id(storage) in self._known:
            self._died(id(storage), storage.nbytes())

    def _count(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self._known:
            self._known.add(id(storage))
            self.live += storage.nbytes()
            weakref.finalize(storage, self._died, id(storage), storage.nbytes())

    def _died(self, key: int, nbytes: int) -> None:
        if key in self._known:
            self._known.discard(key)
            self.live -= nbytes


def tensors(values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if type(t) in (Tensor, nn.Parameter)]
