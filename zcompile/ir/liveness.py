"""Live ranges: from which node to which node a value's bytes are needed.

A view keeps its base alive; a pending value is alive from its start, since the destination is
taken there. A tiered parameter weighs nothing. Times are node indices, sizes are bytes; a dynamic
size counts as it was when the graph was traced.
"""

from dataclasses import dataclass

import torch
from torch import fx

from zcompile.ir.graph import aliases_of, bases_of, positions
from zcompile.ir.torch_private import handle_input, hint


@dataclass(frozen=True)
class LiveRange:
    """value  the node that allocates
    first     index of that node
    last      index of its last reader, views included; a graph output lives to the end
    nbytes    bytes of its storage
    """

    value: fx.Node
    first: int
    last: int
    nbytes: int


def nbytes_of(node: fx.Node) -> int:
    """Bytes a node's own value takes; 0 for views, handles, symbols and empties."""
    value = node.meta.get("val")
    if bases_of(node) or handle_input(node) is not None or not isinstance(value, torch.Tensor):
        return 0
    span = 1
    for size, stride in zip(value.size(), value.stride(), strict=True):
        if hint(size) == 0:
            return 0
        span += (hint(size) - 1) * hint(stride)
    return span * value.dtype.itemsize


def live_ranges(graph: fx.Graph) -> list[LiveRange]:
    """One range per value that takes bytes, in graph order. Released values end at the release."""
    where = positions(graph)
    ranges = []
    for node, first in where.items():
        if not (nbytes := nbytes_of(node)):
            continue
        last = max(
            (where[user] for alias in aliases_of(node) for user in (alias, *alias.users)),
            default=first,
        )
        ranges.append(LiveRange(node, first, last, nbytes))
    return ranges


def profile(graph: fx.Graph) -> list[int]:
    """Bytes alive while each node runs, in graph order."""
    ranges = live_ranges(graph)
    change = [0] * (len(graph.nodes) + 1)
    for r in ranges:
        change[r.first] += r.nbytes
        change[r.last + 1] -= r.nbytes
    alive, now = [], 0
    for index in range(len(graph.nodes)):
        now += change[index]
        alive.append(now)
    return alive
