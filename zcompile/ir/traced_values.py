"""What ops make of values that are only traced, worked out once for those that are alike.

Tiles of a weight, and what is computed of each, are alike in all but their place; to trace every
one of them anew is slow. A value that is found again is the same object, so nobody may ask whose
its storage is: which nodes share one, their ops say (`memory/storages.py`).
"""

from collections.abc import Hashable, Mapping, Sequence
from operator import getitem
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx

from zcompile.ir.graph import KEEP_STRIDES, UNANNOTATED_VIEWS

UNTOLD = UNANNOTATED_VIEWS | KEEP_STRIDES
"""What they make lies as what they are given does, and their schemas do not say so."""
_PLAIN = (int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout,
          torch.memory_format)  # fmt: skip
"""Equal ones of one type mean the same to an op."""
_KNOWN: WeakKeyDictionary[fx.Graph, dict[Hashable, object]] = WeakKeyDictionary()
"""The one name here that changes after import: what is known of a graph goes with it."""


class _Unlike(Exception):
    """Nothing is known to be alike: a dynamic size, for one."""


def traced(graph: fx.Graph, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """`op(*args, **kwargs)`, of values that nodes of `graph` have."""
    if op is getitem:  # is no work, and to compare what it is given would be
        return op(*args)
    shares = op in UNTOLD or any(result.alias_info for result in op._schema.returns)
    try:
        given = ((name, _alike(value, shares)) for name, value in kwargs.items())
        key = (op, _alike(args, shares), *given)
    except _Unlike:
        return op(*args, **kwargs)
    known = _KNOWN.setdefault(graph, {})
    if key not in known:
        known[key] = op(*args, **kwargs)
    return known[key]


def _alike(x: object, shares: bool) -> Hashable:
    """Equal for those of which an op makes the same.

    shares  whether what it makes may lie where `x` does
    """
    if isinstance(x, Tensor):
        if x.layout is not torch.strided:
            raise _Unlike
        lies = (*x.size(), *x.stride())
        if shares:
            lies += (x.storage_offset(), x.untyped_storage().nbytes())
        if any(type(n) is not int for n in lies):
            raise _Unlike
        return (type(x), x.dim(), lies, x.dtype, x.device, x.requires_grad)
    if isinstance(x, list | tuple):
        return tuple(_alike(each, shares) for each in x)
    if not isinstance(x, _PLAIN):
        raise _Unlike
    return (type(x), x)
