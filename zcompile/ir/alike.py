"""Tells whether two graphs compute the same, node by node and under the same names.

A graph that was traced twice has the same nodes where the same was traced: what was decided about
one by the names of its nodes then holds for the other.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from zcompile.ir.torch_compat import is_tangent


class Description(NamedTuple):
    """All that a node computes by, but for what it is given.

    target    what it calls; the description of a graph, or a constant tensor, that an op is given
    given     names of what it reads, among its other arguments
    value     sizes, strides and dtypes of its value as it was traced
    """

    op: str
    target: object
    given: str
    value: str


Descriptions = dict[str, Description]
"""Name of each node -> its description."""


def described(gm: fx.GraphModule, nodes: Iterable[fx.Node]) -> Descriptions:
    """The descriptions of some nodes of a graph, which hold on to no node; gradients that backward
    is called with are described as any other."""
    return {
        node.name: Description(
            node.op, _target(gm, node), repr((node.args, node.kwargs)), _value(node.meta.get("val"))
        )
        for node in nodes
    }


def needed(results: Iterable[object]) -> list[fx.Node]:
    """The nodes that results of a graph are computed by, without gradients that it is called with,
    and all other inputs."""
    found: dict[fx.Node, None] = {}
    ahead = [result for result in results if isinstance(result, fx.Node)]
    if ahead:
        places = ahead[0].graph.find_nodes(op="placeholder")
        ahead.extend(place for place in places if not is_tangent(place))
    while ahead:
        node = ahead.pop()
        if node not in found:
            found[node] = None
            ahead.extend(node.all_input_nodes)
    return list(found)


def unlike(some: Descriptions, others: Descriptions) -> str | None:
    """The name of a node of `some` that `others` has not, or has otherwise; None, if there is
    none."""
    for name, mine in some.items():
        other = others.get(name)
        if other is None or not _are_alike(mine, other):
            return name
    return None


def _are_alike(x: Description, y: Description) -> bool:
    return (x.op, x.given, x.value) == (y.op, y.given, y.value) and _is_same(x.target, y.target)


def _is_same(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x is y or (x.dtype == y.dtype and x.device == y.device and torch.equal(x, y))
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and unlike(x, y) is None
    return bool(x is y or (type(x) is type(y) and x == y and not isinstance(x, Tensor)))


def _target(gm: fx.GraphModule, node: fx.Node) -> object:
    if node.op != "get_attr":
        return node.target
    found: Any = gm
    for name in str(node.target).split("."):
        found = getattr(found, name)
    if isinstance(found, fx.GraphModule):
        return described(found, found.graph.nodes)
    return found


def _value(value: object) -> str:
    """A value as it was traced, for comparing. Adds no guard."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return f"{value.layout} {value.dtype} {value.device}"
        size, stride = _numbers(value.size()), _numbers(value.stride())
        return f"{value.dtype} {value.device} {size} {stride} {value.storage_offset()}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return str(value)


def _numbers(values: Sequence[object]) -> str:
    return ",".join(map(str, values))
