"""Calls the backward of a graph where gradients of some results are undefined.

autograd hands on that they are (`ir/torch_compat.py::hand_on_undefined`), and for each set of such
results a backward of its own is scheduled once, when it is first needed
(`passes/undefined_gradients.py`). That of all gradients is scheduled when the graph is compiled, so
that what has no room is refused before the first step: the others move what it moves.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from zcompile.ir.torch_compat import is_part_of_tangent, is_tangent, symbols_of
from zcompile.ir.types import NodeName
from zcompile.memory.sized import SizeReader, sizes_as
from zcompile.passes.undefined_gradients import without_undefined

Call = Callable[[list[Any]], Any]


def takes_undefined(backward: fx.Graph) -> bool:
    """Whether the backward may be called with None for the gradients of some results.

    Not that of results of a subclass, whose gradients come in parts; nor where zeros could not be
    made for such a result, since its size is dynamic and nothing else tells it.
    """
    places = backward.find_nodes(op="placeholder")
    tangents = [node for node in places if is_tangent(node)]
    if len(tangents) < 2 or any(is_part_of_tangent(node) for node in places):
        return False
    told = {*SizeReader(backward, passed_over=is_tangent).names}
    return all(
        symbols_of(n) <= told
        for node in tangents
        for n in (*node.meta["val"].size(), *node.meta["val"].stride())
    )


class _Scheduled(NamedTuple):
    """A backward for one set of undefined gradients.

    zeros  positions of those that it reads all the same
    left   positions of those that are no inputs of it
    """

    call: Call
    zeros: Sequence[int]
    left: Sequence[int]


class Backwards:
    """The backward of a graph, for each set of undefined gradients.

    whole     that of all gradients, in the boxed convention
    schedule  makes another such callable, of the graph of a backward
    told      a context whose failure the other ranks are told, which wait for the call by then
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        whole: Call,
        schedule: Callable[[fx.GraphModule], Call],
        told: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._gm, self._whole, self._schedule, self._told = gm, whole, schedule, told
        self._places = gm.graph.find_nodes(op="placeholder")
        self._tangents = [i for i, node in enumerate(self._places) if is_tangent(node)]
        self._sizes = SizeReader(gm.graph, passed_over=is_tangent)
        self._scheduled_for = cache(self._scheduled)

    def __call__(self, args: list[Any]) -> Any:
        """Run the backward for what is there; `args` is emptied."""
        undefined = tuple([i for i in self._tangents if args[i] is None])
        if not undefined:
            return self._whole(args)
        with self._told():
            scheduled = self._scheduled_for(undefined)
        for i in scheduled.zeros:
            args[i] = self._zeros(self._places[i].meta["val"], args)
        for i in reversed(scheduled.left):
            del args[i]
        return scheduled.call(args)

    def _zeros(self, traced: Tensor, args: Sequence[Any]) -> Tensor:
        """Zeros as autograd would hand on, as they were traced."""
        size = sizes_as(dict(zip(self._sizes.names, self._sizes.read(args), strict=True)))
        return torch.empty_strided(
            [size(n) for n in traced.size()],
            [size(n) for n in traced.stride()],
            dtype=traced.dtype,
            device=traced.device,
        ).zero_()

    def _scheduled(self, undefined: tuple[int, ...]) -> _Scheduled:
        names = {NodeName(self._places[i].name) for i in undefined}
        graph = without_undefined(self._gm.graph, names)
        if graph is None:
            return _Scheduled(self._whole, undefined, ())
        kept = {node.name for node in graph.find_nodes(op="placeholder")}
        zeros = [i for i in undefined if self._places[i].name in kept]
        left = [i for i in undefined if self._places[i].name not in kept]
        return _Scheduled(self._schedule(fx.GraphModule(self._gm, graph)), zeros, left)
