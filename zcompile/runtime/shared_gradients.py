"""Gradients of a pass over memory that others hold too: of whom, shows when autograd is through.

Autograd gives the parts of one memory to several parameters (`torch.cat`), and holds what it has
not given away yet: such gradients go home when nobody but their parameters holds them. Or it passes
on what `backward(g)` was called with, as through a view: that memory is the user's, and stays.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from zcompile.handles import Leaf
from zcompile.runtime.leaves import owner_of
from zcompile.runtime.store import Entry
from zcompile.specs import Layout
from zcompile.torch_private import (
    after_backward,
    holders_of_memory,
    is_gradient_named,
    memory_of,
)


class SharedGradients:
    """What is not decided yet, by pass."""

    def __init__(self, take_home: Callable[[Tensor], None]) -> None:
        self._take_home = take_home
        self._waiting: dict[int, list[Leaf]] = {}

    def clear(self) -> None:
        """No pass is running: one that left something here has failed."""
        self._waiting.clear()

    def put(self, number: int, leaf: Leaf) -> None:
        """The pass of this number made a gradient over memory that others hold as well."""
        if number not in self._waiting:
            self._waiting[number] = []
            after_backward(partial(self._end, number))
        self._waiting[number].append(leaf)
        self._decide(number)

    def _end(self, number: int) -> None:
        if number in self._waiting:
            self._decide(number)
            del self._waiting[number]

    def _decide(self, number: int) -> None:
        """Those go home whose memory nobody holds but parameters that wait here."""
        alike: dict[int, list[tuple[Leaf, Tensor]]] = {}
        for leaf in self._waiting[number]:
            param = owner_of(leaf)
            if param is not None and _is_plain(param.grad) and not is_gradient_named(param):
                alike.setdefault(memory_of(_gradient(param)), []).append((leaf, param))
        for found in alike.values():
            if not _are_all_there_is([param for _, param in found]):
                continue
            for leaf, param in found:
                self._waiting[number].remove(leaf)
                self._take_home(param)


def _is_plain(grad: Tensor | None) -> bool:
    return (
        grad is not None
        and grad.layout is torch.strided
        and not isinstance(getattr(grad, "entry", None), Entry)
    )


def _gradient(param: Tensor) -> Tensor:
    assert param.grad is not None, "the caller saw one"
    return param.grad


def _are_all_there_is(params: Sequence[Tensor]) -> bool:
    """Whether the gradients of `params` lie apart in one memory that nobody else holds."""
    if holders_of_memory(_gradient(params[0])) != len(params):
        return False
    lying = sorted(_range_of(_gradient(param)) for param in params)
    return all(before[1] <= after[0] for before, after in pairwise(lying))


def _range_of(grad: Tensor) -> tuple[int, int]:
    """Of bytes, in its memory."""
    begin = int(grad.storage_offset()) * grad.element_size()
    return begin, begin + Layout.of(grad).nbytes
