"""Tells whether two graphs compute the same, whatever their nodes are called."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zcompile.ir.torch_compat import is_tangent, without_modes


def needed(results: Iterable[object]) -> list[fx.Node]:
    """The nodes that values of a graph are computed by, in graph order, and all of its inputs but
    gradients."""
    ahead = [result for result in results if isinstance(result, fx.Node)]
    if not ahead:
        return []
    graph, found = ahead[0].graph, set[fx.Node]()
    ahead.extend(place for place in graph.find_nodes(op="placeholder") if not is_tangent(place))
    while ahead:
        node = ahead.pop()
        if node not in found:
            found.add(node)
            ahead.extend(node.all_input_nodes)
    return [node for node in graph.nodes if node in found]


def digests(
    gm: fx.GraphModule, nodes: Sequence[fx.Node], key: Callable[[int, str], str]
) -> list[str]:
    """A digest of each node: what it calls, with which arguments, and its value as it was traced;
    inputs by their names.

    nodes  each behind those that it reads
    key    position and digest of a node that is read -> what stands for it
    """
    known: dict[fx.Node, _Read] = {}
    found: list[str] = []
    for position, node in enumerate(nodes):
        read: Any = known.__getitem__  # no argument of a graph, but of a text
        given = repr(fx.map_arg((node.args, node.kwargs), read))
        name = node.name if node.op == "placeholder" else ""
        parts = (node.op, name, _target(gm, node), given, _value(node.meta.get("val")))
        found.append(hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24])
        known[node] = _Read(key(position, found[-1]))
    return found


def by_position(position: int, digest: str) -> str:
    """For `digests`: nodes of two graphs are alike that stand, and read what stands, at equal
    positions."""
    return f"%{position}"


def by_digest(position: int, digest: str) -> str:
    """For `digests`: nodes of two graphs are alike that read what is alike."""
    return f"%{digest}"


@dataclass(frozen=True)
class _Read:
    """Stands for a node among arguments."""

    text: str

    def __repr__(self) -> str:
        return self.text


def _target(gm: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "placeholder":
        return ""
    if node.op != "get_attr":
        return str(node.target)
    found: object = gm
    for name in str(node.target).split("."):
        found = getattr(found, name)
    if isinstance(found, fx.GraphModule):  # that an op is given
        return "\n".join(digests(found, list(found.graph.nodes), by_position))
    if isinstance(found, Tensor):
        with without_modes():  # torch traces, and would take it for a value of the graph
            raw = found.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
            return hashlib.sha256(raw.view(torch.uint8).numpy().data).hexdigest()
    return repr(found)


def _value(value: object) -> str:
    """A value as it was traced. Adds no guard."""
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
