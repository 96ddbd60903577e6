"""Which entry a handle names.

A handle is a 0-dim int64 CPU tensor: the one inner tensor of a tiered tensor, and an input of
every compiled graph that touches it. Its value is a key of the table below. The graph says which
handle; the call says which entry. The table is the only thing that two models in one process
share, and it holds entries weakly: an entry lives as long as its store keeps it.
"""

import itertools
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from zcompile.errors import ParameterChanged


class Held(Protocol):
    """What the ops need of an entry; `runtime.store.Entry` is the one that exists."""

    key: int
    name: str

    def gather(
        self, size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype
    ) -> Tensor:
        """The full value on the compute device, gathered now; blocks."""

    def reduce_grad(self, grad: Tensor) -> None:
        """`grad` becomes, or is added to, the gradient of the parameter this entry holds."""


_KEYS = itertools.count(1)
_ENTRIES: WeakValueDictionary[int, Held] = WeakValueDictionary()


def new_key() -> int:
    return next(_KEYS)


def bind(entry: Held) -> None:
    """From here on `entry.key` names `entry`."""
    _ENTRIES[entry.key] = entry


def entry_of(handle: Tensor) -> Held:
    """The entry behind a handle.

    handle  [] int64, on the CPU
    raises  ParameterChanged if the entry is gone
    """
    key = int(handle)
    entry = _ENTRIES.get(key)
    if entry is None:
        raise ParameterChanged(
            f"handle {key}", "names no entry: its store was closed", "offload the model again"
        )
    return entry
