"""Fits a joint graph that was traced for the gradients of some results to a forward that runs.

A joint graph is traced for a gradient of every result. In eager PyTorch that of a result which
nobody differentiates is undefined: nothing is computed from it, and a sum with it is its other
operand. Zeros in its place differ in three ways: a sum takes the memory format of its first
operand, so that kernels behind it add up elements in another order; zero times infinity is not a
number; and zeros take time and memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from zcompile.ir.alike import Descriptions, described, needed, unlike
from zcompile.ir.graph import insert, output_of
from zcompile.ir.torch_compat import gradient_of, is_tangent
from zcompile.ir.types import NodeName, ParamSpec, Phase


class Unfit(Exception):
    """A graph that was traced anew does not fit the forward that runs; it says why."""


@dataclass(frozen=True)
class TracedJoint:
    """What is remembered of a joint graph as it was traced, before any pass.

    forward         what its results are computed by
    results         their names
    differentiated  positions of the inputs that have gradients
    """

    forward: Descriptions
    results: tuple[str, ...]
    differentiated: frozenset[int]

    @classmethod
    def of(cls, joint: fx.GraphModule, forward_outputs: int) -> "TracedJoint":
        results = _results(joint.graph)
        forward = described(joint, needed(results[:forward_outputs]))
        names = tuple(map(str, results[:forward_outputs]))
        descs = output_of(joint.graph).meta["desc"]
        found = {gradient_of(d) for r, d in zip(results, descs, strict=True) if r is not None}
        return cls(forward, names, frozenset(n for n in found if n is not None))


def fit(
    joint: fx.GraphModule,
    traced: TracedJoint,
    forward_outputs: int,
    handles: Mapping[int | None, fx.Node],
    params: Mapping[NodeName, ParamSpec],
) -> None:
    """Let a joint graph have no input that it does not read for the gradient of a result, and send
    a gradient to each parameter that `traced` had one for: of zeros, if nothing is computed for it.

        return (%loss, %h, %dw, None)     ->      %z = aten.full([8], 0.0)
                                                  return (%loss, %h, %dw, %z)

    handles  position of each input whose gradient is sent home -> the placeholder of its handle
    raises   Unfit, if it does not compute its results as `traced` did
    """
    found = TracedJoint.of(joint, forward_outputs)
    if found.results != traced.results:
        raise Unfit("it returns other values")
    for some, others in ((found, traced), (traced, found)):
        if (name := unlike(some.forward, others.forward)) is not None:
            raise Unfit(f"%{name} of its forward is computed otherwise")
    if not found.differentiated <= traced.differentiated:
        raise Unfit("it differentiates other inputs")
    for place in joint.graph.find_nodes(op="placeholder"):
        if is_tangent(place) and not place.users:
            joint.graph.erase_node(place)
    output = output_of(joint.graph)
    results = _results(joint.graph)
    for position, desc in enumerate(output.meta["desc"]):
        source = gradient_of(desc)
        if results[position] is None and source in handles and source in traced.differentiated:
            results[position] = _zeros(joint.graph, handles[source], params)
    output.args = (tuple(results),)


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
    made = [
        described(joint.owning_module, needed([n for n in joint.nodes if n.name in crossing]))
        for joint in (fewer, whole)
    ]
    if (name := unlike(*made)) is not None:
        raise Unfit(f"%{name} is computed otherwise after the passes")


def _results(graph: fx.Graph) -> list[fx.node.Argument]:
    (results,) = output_of(graph).args
    assert isinstance(results, list | tuple)
    return list(results)


def _zeros(graph: fx.Graph, handle: fx.Node, params: Mapping[NodeName, ParamSpec]) -> fx.Node:
    layout = params[NodeName(handle.name)].layout
    options = {"dtype": layout.dtype, "device": handle.meta["val"].device, "pin_memory": False}
    with graph.inserting_before(output_of(graph)):
        zeros = insert(
            graph,
            torch.ops.aten.full.default,
            list(layout.size),
            0.0,
            like=handle,
            phase=Phase.BACKWARD,
            val=handle.meta["val"].new_empty(layout.size, dtype=layout.dtype),
        )
    zeros.kwargs = options
    return zeros
