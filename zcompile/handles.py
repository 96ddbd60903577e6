"""Which entry a handle names.

A handle is a 0-dim int64 CPU tensor: the one inner tensor of a tiered tensor, and an input of
every compiled graph that touches it. Its value is a key of the table below. The graph says which
handle; the call says which entry. The table is the only thing that two models in one process
share, and it holds entries weakly: an entry lives as long as its store keeps it.
"""

import ctypes
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from zcompile.errors import ParameterChanged


class Held(Protocol):
    """What the ops need of an entry; `runtime.store.Entry` is the one that exists."""

    key: int
    name: str
    store: Any
    """Has `offload(value, tier, name)`: a new entry that holds `value`, by its handle."""

    def gather(
        self, size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype
    ) -> Tensor:
        """The full value on the compute device, gathered now; blocks."""

    def reduce_grad(self, grad: Tensor, offset: int | None = None) -> None:
        """`grad` becomes, or is added to, the gradient of the parameter this entry holds; or, with
        an offset, that part of it (`ops.reduce_tile`)."""


ANEW = "build the model anew, offload that, and load what was saved"
"""What to do where entries are gone: their values went with the store."""

_KEYS = itertools.count(1)
_ENTRIES: WeakValueDictionary[int, Held] = WeakValueDictionary()


def new_key() -> int:
    return next(_KEYS)


def bind(entry: Held) -> None:
    """From here on `entry.key` names `entry`."""
    _ENTRIES[entry.key] = entry


def handle_of(key: int, over: Callable[[int], None]) -> Tensor:
    """A 0-dim tensor that holds `key`; when its storage dies, `over(key)` is called.

    The storage is what counts: autograd may keep the handle for backward after whoever held it is
    gone. `over`, a method, may be called at any time, by a finalizer, so it must take no lock. It
    is held weakly: a handle that torch still remembers keeps no store alive.
    """
    memory = (ctypes.c_int64 * 1)(key)
    weakref.finalize(memory, _tell, weakref.WeakMethod(over), key).atexit = False
    return torch.frombuffer(memory, dtype=torch.int64).reshape(())


def _tell(method: weakref.WeakMethod[Callable[[int], None]], key: int) -> None:
    if (over := method()) is not None:
        over(key)


def entry_of(handle: Tensor) -> Held:
    """The entry behind a handle.

    handle  [] int64, on the CPU
    raises  ParameterChanged if the entry is gone
    """
    key = int(handle)
    entry = _ENTRIES.get(key)
    if entry is None:
        raise ParameterChanged(f"handle {key}", "names no entry: its store was closed", ANEW)
    return entry
