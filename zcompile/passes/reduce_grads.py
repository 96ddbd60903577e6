"""Sends each gradient of a tiered parameter home as soon as it is made."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import ClassVar

import torch
from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import (
    CASTS,
    TRANSPOSES,
    erase_unread,
    insert,
    output_of,
    phase_of,
    root_of,
)
from zcompile.ir.plan import GraphPlan
from zcompile.ir.torch_compat import gradient_of, handle_input
from zcompile.ir.types import SMALL_BYTES, Layout, NodeName, ParamSpec, Phase
from zcompile.passes.base import Fact, Pass

NARROW = frozenset({torch.bfloat16, torch.float16})
WIDE = frozenset({torch.float32, torch.float64})
"""Each value of a dtype of the first is one of each of the second, and comes back as it was."""


@dataclass(frozen=True)
class ReduceGrads(Pass):
    """Consume the gradient of a tiered parameter inside the graph.

        %dw = aten.t(%mm)                         %dw = aten.t(%mm)
        ...                               ->      %s  = zinf.reduce_grad(%dw, %w)
        return (%y, %dw)                          ...
                                                  return (%y, %s)

    A gradient that is transposed twice is sent as the product that it was, so that product and
    transfer are in one region. A gradient whose bytes somebody outside the call holds too is copied
    first. The sink stays an output until the graph is cut, so that autograd keeps the parameter in
    its books; backward then returns None in its place.

    narrow  a gradient that is a widening cast is sent as it was before; one that ranks exchange is
            so in any case, since it is widened before it rests
    """

    narrow: bool = True

    name: ClassVar[str] = "reduce-grads"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_GATHERED})
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADS_REDUCED})

    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        handles = sinks(graph, plan)
        output = output_of(graph)
        results = list(output.args[0]) if isinstance(output.args[0], list | tuple) else []
        descs = list(output.meta.get("desc") or ())
        kept = {
            root_of(result)
            for result, desc in zip(results, descs, strict=False)
            if isinstance(result, fx.Node) and gradient_of(desc) not in handles
        }
        transposed: list[fx.Node] = []
        for position, desc in enumerate(descs):
            source = gradient_of(desc)
            grad = results[position]
            if source in handles and isinstance(grad, fx.Node) and grad.target not in ops.SINKS:
                transposed.append(grad)
                grad = _transposed_back(grad)
                spec = plan.params[NodeName(handles[source].name)]
                if self.narrow or spec.share is not None:
                    grad = _before_widening(grad, kept, spec)
                grad = _own(graph, grad, kept)
                results[position] = _sink(graph, grad, handles[source], plan)
        output.args = (tuple(results),)
        erase_unread(graph, *transposed)
        return plan


def sinks(graph: fx.Graph, plan: GraphPlan) -> Mapping[int | None, fx.Node]:
    """Position of each input whose gradient is consumed -> the placeholder of its handle."""
    return {
        handle_input(node): node
        for node in graph.find_nodes(op="placeholder")
        if node.name in plan.params and plan.params[NodeName(node.name)].sink
    }


def _transposed_back(grad: fx.Node) -> fx.Node:
    """The value that `grad` is a transpose of a transpose of, if it has the same layout."""
    node = grad
    while node.target in TRANSPOSES:
        (node,) = node.all_input_nodes
        if Layout.of(node.meta["val"]) == Layout.of(grad.meta["val"]):
            return node
    return grad


def _before_widening(grad: fx.Node, kept: Container[fx.Node], spec: ParamSpec) -> fx.Node:
    """The value that `grad` is a cast of to the dtype of its parameter, if that loses nothing: it
    is sent as it was made, and widened where it is used, or where ranks add it up. Under autocast
    gradients are such casts.

        %w  = aten.mm(%a, %b)           bf16          %w = aten.mm(%a, %b)
        %dw = aten._to_copy(%w, f32)            ->    %s = zinf.reduce_grad(%w, %p)
        %s  = zinf.reduce_grad(%dw, %p)
    """
    small = spec.nbytes <= SMALL_BYTES
    bucketed = spec.shared and spec.share is None  # with others, in the dtype of the parameter
    if grad.target not in CASTS or len(grad.users) > 1 or small or bucketed:
        return grad
    (source,) = grad.all_input_nodes
    source = _transposed_back(source)
    made, value = source.meta["val"], grad.meta["val"]
    exact = made.dtype in NARROW and value.dtype in WIDE and value.dtype is spec.layout.dtype
    same = made.stride() == value.stride() == spec.layout.stride and spec.layout.dense
    if not (exact and same and made.device == value.device) or phase_of(source) is Phase.FORWARD:
        return grad
    root = root_of(source)
    return grad if root.op == "placeholder" or root in kept else source


def _own(graph: fx.Graph, grad: fx.Node, kept: Container[fx.Node]) -> fx.Node:
    """`grad`, or a copy of it, if somebody outside the call holds its bytes.

    The gradient is still in flight when the call has ended, and a caller who gave those bytes, or
    is given them, may change them.
    """
    root = root_of(grad)
    if root.op != "placeholder" and root not in kept:
        return grad
    backward = phase_of(grad) is Phase.BACKWARD and grad.op != "placeholder"
    calls = (n for n in graph.nodes if n.op == "call_function")
    first = next((n for n in calls if phase_of(n) is Phase.BACKWARD), output_of(graph))
    with graph.inserting_after(grad) if backward else graph.inserting_before(first):
        return insert(
            graph,
            torch.ops.aten.clone.default,
            grad,
            like=grad,
            phase=Phase.BACKWARD,
            val=grad.meta["val"],
        )


def _behind(grad: fx.Node) -> fx.Node:
    """The node behind which `grad` is sent: itself; of a part of a tuple, the last part that is
    taken right behind it, or what was sent of those.

    Sent before the others are taken, it would leave a tuple of all of them in memory.
    """
    last = grad
    while grad.target is getitem and last.next.target is getitem:
        if last.next.args[0] is not grad.args[0]:
            break
        last = last.next
    while last is not grad and last.next.target in ops.SINKS:
        last = last.next
    return last


def _sink(graph: fx.Graph, grad: fx.Node, handle: fx.Node, plan: GraphPlan) -> fx.Node:
    """Send `grad` to the entry of `handle`."""
    stem = str(plan.params[NodeName(handle.name)].name).replace(".", "_")
    backward = phase_of(grad) is Phase.BACKWARD
    with (
        graph.inserting_after(_behind(grad))
        if backward
        else graph.inserting_before(output_of(graph))
    ):
        return insert(
            graph,
            ops.reduce_grad,
            grad,
            handle,
            like=grad,
            phase=Phase.BACKWARD,
            val=torch.empty(0),
            name=f"{stem}_grad",
        )
