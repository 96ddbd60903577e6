"""Compiles runs of compute nodes to regions, once per structure.

Two regions are the same if their ops, arguments, wiring, shapes, strides and dtypes are; names and
positions do not count. Dynamic sizes count by their expression. Each distinct region is compiled
once, so that compile time does not grow with depth.
"""

import hashlib
from collections import Counter
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import fx

from zcompile.ir.fusions import (
    fused_of,
    fusion_of,
    fusions_of,
    made_by,
    read_by,
    views_of_results,
)
from zcompile.ir.printer import target_of
from zcompile.ir.region_code import MAKER, RegionCode, maker_of
from zcompile.ir.types import Region
from zcompile.ir.work import total_work, work_of

aten = torch.ops.aten

Compiled = MutableMapping[str, Region]
"""Structure -> the region that was compiled for it."""


def inputs_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes outside a region that it reads, in the order of first use."""
    inside = set(nodes)
    return list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))


def outputs_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes of a region that others read, in order."""
    inside = set(nodes)
    return [node for node in nodes if any(user not in inside for user in node.users)]


def compile_region(
    nodes: Sequence[fx.Node], compiled: Compiled, placed: Sequence[int] = ()
) -> Region:
    """The region that `nodes` form, from `compiled` if one of equal structure is there.

    placed  positions of outputs that `Region.call_into` is to make in memory it is given; each a
            matrix product (`is_product`)
    """
    key = structure(nodes)
    if key not in compiled:
        call, work = RegionCode(body := _eager(nodes)), work_of(nodes)
        compiled[key] = Region(key, _summary(nodes), call, work, owns=True, body=body)
    plain = compiled[key]
    if not placed:
        return plain
    known = f"{key} {tuple(placed)}"
    if known not in compiled:
        outputs = outputs_of(nodes)
        into = RegionCode(_eager(nodes, [outputs[at] for at in placed]))
        compiled[known] = replace(plain, placed=tuple(placed), call_into=into)
    return compiled[known]


def is_product(node: fx.Node) -> bool:
    """Whether a node can be computed into given row-major memory."""
    value = node.meta.get("val")
    if node.target is not aten.mm.default or not isinstance(value, torch.Tensor):
        return False
    return value.is_contiguous()


def structure(nodes: Sequence[fx.Node]) -> str:
    """Digest of everything about a region but its names."""
    number = {node: index for index, node in enumerate((*inputs_of(nodes), *nodes))}
    parts = [_described(node.meta.get("val")) for node in inputs_of(nodes)]
    for node in nodes:
        args = _canonical((node.args, node.kwargs), number)
        look = "" if maker_of(node) else "*"
        parts.append(f"{node.target}{args}{_described(node.meta.get('val'))}{look}")
    parts.append(str([number[node] for node in outputs_of(nodes)]))
    for members in _fused_among(nodes).values():
        fused = fused_of(members[0])
        assert fused is not None, "those are fused"
        parts.append(f"{fused.key}{[number[node] for node in members]}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def structure_of_graph(graph: fx.Graph) -> str:
    """Digest of everything about a graph but its names. What it is given counts by its position."""
    number = {node: index for index, node in enumerate(graph.nodes)}
    parts = (f"{n.op}{_target(n)}{_canonical((n.args, n.kwargs), number)}" for n in graph.nodes)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _target(node: fx.Node) -> str:
    """What a node calls; "" for a name in its graph."""
    return str(node.target) if node.op == "call_function" else ""


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.size())}{tuple(value.stride())}{value.device}"
    if isinstance(value, list | tuple):
        return "(" + ",".join(_described(v) for v in value) + ")"
    return str(value)


def _canonical(value: object, number: dict[fx.Node, int]) -> str:
    if isinstance(value, fx.Node):
        return f"%{number[value]}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_canonical(v, number) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_canonical(v, number)}" for k, v in value.items()) + "}"
    return repr(value)


def _summary(nodes: Sequence[fx.Node]) -> str:
    """The ops of a region for people, as "mm*2 relu", or "mm fused(add native_layer_norm)"."""
    counts: Counter[str] = Counter()
    fused = _fused_among(nodes)
    for node in nodes:
        number = fusion_of(node) if fused_of(node) is not None else None
        if number is None:
            counts[_name(node)] += 1
        elif members := fused.pop(number, None):
            names = dict.fromkeys(_name(member) for member in members)
            counts[f"fused({' '.join(name for name in names if name != 'getitem')})"] += 1
    counts.pop("getitem", None)
    return " ".join(name if n == 1 else f"{name}*{n}" for name, n in counts.items()) or "getitem"


def _name(node: fx.Node) -> str:
    """The op of a node without its overload, and without the namespace of torch's own."""
    namespace, *name = target_of(node).split(".")
    return name[0] if namespace == "aten" else ".".join((namespace, *name[:1]))


def _eager(nodes: Sequence[fx.Node], products: Sequence[fx.Node] = ()) -> fx.Graph:
    """The code of these nodes, for eager execution.

    Takes a list of inputs, which it empties: each value, inputs included, is dropped after its last
    reader. `products` are computed into the tensors of a second list.
    """
    graph = fx.Graph()
    given = graph.placeholder("given")
    targets = graph.placeholder("targets") if products else None
    env = {
        node: graph.call_function(getitem, (given, position))
        for position, node in enumerate(inputs_of(nodes))
    }
    graph.call_method("clear", (given,))
    place = {
        node: graph.call_function(getitem, (targets, position))
        for position, node in enumerate(products)
    }
    fused = _fused_among(nodes)
    for node in nodes:
        number = fusion_of(node) if fused_of(node) is not None else None
        if number is not None:
            if members := fused.pop(number, None):
                _call_fused(graph, members, env)
            continue
        made = env[node] = graph.node_copy(node, env.__getitem__)
        if node in place:
            made.target = aten.mm.out
            made.kwargs = {**made.kwargs, "out": place[node]}
        elif maker := maker_of(node):
            made.meta[MAKER] = maker
    graph.output(tuple(env[node] for node in outputs_of(nodes)))
    return graph


def _fused_among(nodes: Sequence[fx.Node]) -> dict[int, list[fx.Node]]:
    """The compiled fusions of a region, each with its nodes."""
    return fusions_of(node for node in nodes if fused_of(node) is not None)


def _call_fused(graph: fx.Graph, members: Sequence[fx.Node], env: dict[fx.Node, fx.Node]) -> None:
    """Call what a fusion was compiled to, and take the views of its results that others read."""
    fused = fused_of(members[0])
    assert fused is not None, "those are fused"
    made = made_by(members)
    results = graph.call_function(fused.call, tuple(env[n] for n in read_by(members, made)))
    for position, node in enumerate(made):
        env[node] = graph.call_function(getitem, (results, position))
        env[node].meta["val"] = node.meta["val"]
        env[node].meta[MAKER] = target_of(node)
    for node in views_of_results(members):
        env[node] = graph.node_copy(node, env.__getitem__)


# --- Regions that run one after the other ---


class Link(NamedTuple):
    """A region within a joined one.

    reads   numbers of the values that it is called with
    makes   numbers of its results
    placed  those of its results that are computed into given memory, where there is any
    """

    region: Region
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    placed: tuple[int, ...] = ()


@lru_cache(maxsize=256)
def join(links: tuple[Link, ...], inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Region:
    """One region that computes what `links` do, one after the other: the same ops in the same
    order, so the same bits.

        links    mm: 0 1 -> 2, relu: 2 -> 3
        inputs   0 1                                ->      mm relu: 0 1 -> 3
        outputs  3

    Its code is made when it is first called: a planner compares many joined regions and runs none.

    links    each with a `body`
    inputs   numbers of the values that it is called with, in order
    outputs  numbers of the values that are still read afterwards, in order
    """
    wiring = [(x.region.key, x.reads, x.makes, x.placed) for x in links]
    digest = hashlib.sha256(repr((wiring, inputs, outputs)).encode()).hexdigest()[:16]
    into = [n for x in links for n in x.placed]
    placed = tuple(at for at, n in enumerate(outputs) if n in into)
    return Region(
        digest,
        f"{len(links)} regions joined",
        _JoinedCode(links, inputs, outputs),
        total_work([x.region.work for x in links]),
        owns=True,
        placed=placed,
        call_into=_JoinedCode(links, inputs, outputs, placed) if placed else None,
        parts=tuple(x.region for x in links),
    )


@dataclass(frozen=True)
class _JoinedCode:
    """The code of a joined region: the bodies of its links in one graph."""

    links: tuple[Link, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    placed: tuple[int, ...] = ()

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        return self.code(*given)

    @cached_property
    def code(self) -> RegionCode:
        graph = fx.Graph()
        given = graph.placeholder("given")
        targets = graph.placeholder("targets") if self.placed else None
        values = {n: graph.call_function(getitem, (given, at)) for at, n in enumerate(self.inputs)}
        graph.call_method("clear", (given,))
        place = {
            self.outputs[at]: graph.call_function(getitem, (targets, position))
            for position, at in enumerate(self.placed)
        }
        for link in self.links:
            results = _inlined(graph, link.region.body, [values[n] for n in link.reads])
            for number, result in zip(link.makes, results, strict=True):
                values[number] = result
                if number in place:
                    result.target = aten.mm.out
                    result.kwargs = {**result.kwargs, "out": place[number]}
        graph.output(tuple(values[n] for n in self.outputs))
        return RegionCode(graph)


def _inlined(graph: fx.Graph, body: fx.Graph, inputs: Sequence[fx.Node]) -> Sequence[fx.Node]:
    """Copy the code of a region (`_eager`) to the end of `graph`; returns its results there."""
    given, *nodes, output = body.nodes
    made: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node.all_input_nodes != [given]:
            made[node] = graph.node_copy(node, made.__getitem__)
        elif node.op == "call_function":  # an input of the region; else it empties the list
            made[node] = inputs[node.args[1]]
    (results,) = output.args
    return [made[result] for result in results]
