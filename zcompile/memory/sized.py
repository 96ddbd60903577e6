"""Counts the live bytes of calls whose sizes are dynamic, at the sizes of each call.

Live bytes outside the arena are counted on the graph (`footprint.py`), with a number for each size.
The first call with certain sizes counts anew with those; calls with the same sizes look the count
up.

    schedule       as the graph was traced           inputs      s0   tokens [s0, 64]
    .at([4, ...])  its live bytes with s0 = 4        s0 = 4      read off the inputs of a call
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from zcompile.ir.schedule import Schedule
from zcompile.ir.torch_compat import is_bare, size_at, symbols_of
from zcompile.ir.types import MemoryProfile
from zcompile.memory.footprint import Size

MOST_SIZES = 256
"""Most sizes of one graph that are remembered; those that no call had for longest are dropped."""

Sizes = Mapping[str, int]
"""Name of the symbol of a dynamic size -> the size."""


def sizes_as(sizes: Sizes) -> Size:
    """The function that evaluates a size with these dynamic sizes."""
    return lambda value: value if isinstance(value, int) else size_at(value, sizes)


class SizeReader:
    """Reads dynamic sizes off the inputs of a call.

    passed_over  which inputs a call may have without a value
    names        of the symbols that the inputs give, in the order in which `read` returns their
                 sizes
    """

    def __init__(
        self, graph: fx.Graph, passed_over: Callable[[fx.Node], bool] = lambda node: False
    ) -> None:
        places: dict[str, tuple[int, int | None]] = {}
        for register, node in enumerate(graph.find_nodes(op="placeholder")):
            if passed_over(node):
                continue
            for name, dim in _said(node.meta.get("val")):
                if dim is None or name not in places:
                    places[name] = register, dim
        self.names = tuple(places)
        self._places = tuple(places.values())

    def read(self, args: Sequence[Any]) -> tuple[int, ...]:
        return tuple([args[at] if dim is None else args[at].size(dim) for at, dim in self._places])


def _said(value: object) -> Iterator[tuple[str, int | None]]:
    """The symbols that an input is, or has as a size of a dimension: (name, dimension or None)."""
    dims: Sequence[object] = value.size() if isinstance(value, torch.Tensor) else ()
    for dim, size in ((None, value), *enumerate(dims)):
        if isinstance(size, torch.SymInt) and is_bare(size):
            (name,) = symbols_of(size)
            yield name, dim


class SizedSchedule:
    """A schedule whose live bytes are counted at the sizes of each call.

    count  dynamic sizes -> live bytes of a call
    """

    def __init__(
        self, schedule: Schedule, reader: SizeReader, count: Callable[[Sizes], MemoryProfile]
    ) -> None:
        self._schedule, self._reader, self._count = schedule, reader, count
        self._known: OrderedDict[tuple[int, ...], Schedule] = OrderedDict()

    def at(self, args: Sequence[Any]) -> Schedule:
        """The schedule for a call with these inputs."""
        sizes = self._reader.read(args)
        made = self._known.get(sizes)
        if made is None:
            counted = self._count(dict(zip(self._reader.names, sizes, strict=True)))
            made = replace(self._schedule, holds=replace(counted, sizes=sizes))
            if len(self._known) >= MOST_SIZES:
                self._known.popitem(last=False)
            self._known[sizes] = made
        self._known.move_to_end(sizes)
        return made
