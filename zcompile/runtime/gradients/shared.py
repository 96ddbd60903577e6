"""Gradients in memory that others hold too are decided on when the backward pass is through.

Autograd may hold the memory for a while: such gradients go to the store when nobody but their
parameters holds them. Or autograd passes on what `backward(g)` was called with, as through a view:
that memory is the user's, and stays.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from zcompile.ir.handles import Leaf
from zcompile.ir.torch_compat import after_backward, holders_of_memory, is_gradient_named, memory_of
from zcompile.ir.types import Layout
from zcompile.runtime.gradients.leaves import owner_of
from zcompile.runtime.store.store import Entry


class SharedGradients:
    """The gradients of which it is not decided yet whether they go to the store."""

    def __init__(self, move_to_store: Callable[[Tensor], None]) -> None:
        self._move_to_store = move_to_store
        self._waiting: dict[int, dict[int, list[Leaf]]] = {}
        """A pass -> a memory -> whose gradients lie in it."""

    def clear(self) -> None:
        """No pass is running: one that left something here has failed."""
        self._waiting.clear()

    def put(self, number: int, leaf: Leaf, param: Tensor) -> None:
        """Note that a pass made the gradient of `param`, the owner of `leaf`, over memory that
        others hold too."""
        if number not in self._waiting:
            self._waiting[number] = {}
            after_backward(partial(self._end, number))
        memory = memory_of(_gradient(param))
        leaves = self._waiting[number].setdefault(memory, [])
        leaves.append(leaf)
        if holders_of_memory(_gradient(param)) == len(leaves):
            self._decide(memory, leaves)

    def _end(self, number: int) -> None:
        """The pass is over: decide on all of its gradients."""
        for memory, leaves in self._waiting.pop(number, {}).items():
            self._decide(memory, leaves)

    def _decide(self, memory: int, leaves: list[Leaf]) -> None:
        """Move gradients to the store, if nobody holds their memory but they."""
        params = [
            p
            for leaf in leaves
            if (p := owner_of(leaf)) is not None and _is_shared_gradient(memory, p)
        ]
        if params and _own_memory_together(params):
            leaves.clear()
            for param in params:
                self._move_to_store(param)


def _is_shared_gradient(memory: int, param: Tensor) -> bool:
    """Whether the gradient of `param` still lies in `memory`, and nobody has it by name."""
    return (
        _is_plain(param.grad)
        and not is_gradient_named(param)
        and memory_of(_gradient(param)) == memory
    )


def _is_plain(grad: Tensor | None) -> bool:
    """Whether a gradient is a plain strided tensor."""
    return (
        grad is not None
        and grad.layout is torch.strided
        and not isinstance(getattr(grad, "entry", None), Entry)
    )


def _gradient(param: Tensor) -> Tensor:
    assert param.grad is not None, "the caller saw one"
    return param.grad


def _own_memory_together(params: Sequence[Tensor]) -> bool:
    """Whether the gradients of `params` lie apart in one memory that nobody else holds."""
    if holders_of_memory(_gradient(params[0])) != len(params):
        return False
    lying = sorted(_byte_range(_gradient(param)) for param in params)
    return all(before[1] <= after[0] for before, after in pairwise(lying))


def _byte_range(grad: Tensor) -> tuple[int, int]:
    """The bytes (begin, end) of a gradient in its memory."""
    begin = int(grad.storage_offset()) * grad.element_size()
    return begin, begin + Layout.of(grad).nbytes
