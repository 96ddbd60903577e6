"""Fits a joint graph that was traced for the gradients of some results to a forward that runs.

A joint graph is traced for a gradient of every result. In eager PyTorch that of a result which
nobody differentiates is undefined: nothing is computed from it, and a sum with it is its other
operand. Zeros in its place differ in three ways: a sum takes the memory format of its first
operand, so that kernels behind it add up elements in another order; zero times infinity is not a
number; and zeros take time and memory.
"""

from collections.abc import Container
from dataclasses import dataclass

from torch import fx

from zcompile.ir.alike import by_digest, by_position, digests, needed
from zcompile.ir.copies import copy_graph
from zcompile.ir.graph import output_of
from zcompile.ir.torch_compat import gradient_of, is_tangent


class Unfit(Exception):
    """A graph that was traced anew does not fit the forward that runs; it says why."""


@dataclass(frozen=True)
class TracedJoint:
    """What is remembered of a joint graph as it was traced, before any pass.

    names           of the nodes that its results are computed by, in graph order
    forward         their digests
    results         positions of the results among them
    differentiated  positions of the inputs that have gradients
    """

    names: tuple[str, ...]
    forward: tuple[str, ...]
    results: tuple[int | None, ...]
    differentiated: frozenset[int]

    @classmethod
    def of(cls, joint: fx.GraphModule, forward_outputs: int) -> "TracedJoint":
        results = _results(joint.graph)
        nodes = needed(results[:forward_outputs])
        at = {node: position for position, node in enumerate(nodes)}
        descs = output_of(joint.graph).meta["desc"]
        found = {gradient_of(d) for r, d in zip(results, descs, strict=True) if r is not None}
        return cls(
            tuple(node.name for node in nodes),
            tuple(digests(joint, nodes, by_position)),
            tuple(at[r] if isinstance(r, fx.Node) else None for r in results[:forward_outputs]),
            frozenset(n for n in found if n is not None),
        )


def named_alike(joint: fx.GraphModule, traced: TracedJoint, forward_outputs: int) -> fx.GraphModule:
    """A copy of a joint graph in which what its results are computed by is named as in `traced`.

    raises  Unfit, if it is not the same
    """
    found = TracedJoint.of(joint, forward_outputs)
    if found.forward != traced.forward or found.results != traced.results:
        raise Unfit("its forward is traced otherwise")
    if not found.differentiated <= traced.differentiated:
        raise Unfit("it differentiates other inputs")
    nodes = needed(_results(joint.graph)[:forward_outputs])
    graph, copies = copy_graph(joint.graph, dict(zip(nodes, traced.names, strict=True)))
    if tuple(copies[node].name for node in nodes) != traced.names:
        raise Unfit("its backward takes names of its forward")
    return fx.GraphModule(joint, graph)


def drop_unread(joint: fx.GraphModule) -> None:
    """Let a joint graph have no input that it does not read for the gradient of a result."""
    for place in joint.graph.find_nodes(op="placeholder"):
        if is_tangent(place) and not place.users:
            joint.graph.erase_node(place)


def check_saved(fewer: fx.Graph, backward: fx.Graph, whole: fx.Graph, called: fx.Graph) -> None:
    """Check that a backward reads nothing but what the forward that runs saves.

    fewer, backward  a joint graph after the passes, and what was cut from it
    whole, called    the one that the forward which runs was cut from, and its backward

    raises  Unfit
    """
    given = {node.name for node in called.find_nodes(op="placeholder")}
    places = backward.find_nodes(op="placeholder")
    if not (names := {node.name for node in places}) <= given:
        raise Unfit(f"it reads %{min(names - given)}, which forward does not save")
    crossing = {node.name for node in places if not is_tangent(node)}
    if _computed(fewer, crossing) != _computed(whole, crossing):
        raise Unfit("what it reads is computed otherwise after the passes")


def _computed(joint: fx.Graph, names: Container[str]) -> dict[str, str]:
    """Digests of the values of these names; those of what they are computed by are in them."""
    assert joint.owning_module is not None
    nodes = needed([node for node in joint.nodes if node.name in names])
    found = digests(joint.owning_module, nodes, by_digest)
    pairs = zip(nodes, found, strict=True)
    return {node.name: digest for node, digest in pairs if node.name in names}


def _results(graph: fx.Graph) -> list[fx.node.Argument]:
    (results,) = output_of(graph).args
    assert isinstance(results, list | tuple)
    return list(results)
