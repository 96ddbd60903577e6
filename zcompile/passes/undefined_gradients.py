"""Leaves out of a backward what it would compute from results that the caller does not
differentiate.

A backward is traced for a gradient of every result. In eager PyTorch that of a result which is not
differentiated is undefined: nothing is computed from it, and a sum with it is the other operand.
Zeros in its place differ in three ways. A sum takes the memory format of its first operand, so that
kernels behind it add up elements in another order; zero times infinity is not a number; and they
take time and memory.
"""

from collections.abc import Collection
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from zcompile.ir import ops
from zcompile.ir.copies import copy_graph
from zcompile.ir.fusions import fusion_of
from zcompile.ir.graph import (
    bases_of,
    insert,
    is_compute,
    output_of,
    phase_of,
    region_of,
    root_of,
    set_region,
)
from zcompile.ir.rewrite import is_op, traced
from zcompile.ir.torch_compat import Dispatched
from zcompile.ir.types import NodeName

aten = torch.ops.aten

LINEAR = {
    aten.mul.Tensor: (0, 1),
    aten.mul.Scalar: (0,),
    aten.div.Tensor: (0,),
    aten.div.Scalar: (0,),
    aten.neg.default: (0,),
    aten.sum.default: (0,),
    aten.sum.dim_IntList: (0,),
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten._to_copy.default: (0,),
    aten.clone.default: (0,),
    aten.index.Tensor: (0,),
    aten.gather.default: (0,),
}
"""Op -> positions of operands of which any, being zeros, makes the result zeros. Views are too, and
the backward of an op, by its gradients."""


def without_undefined(graph: fx.Graph, tangents: Collection[NodeName]) -> fx.Graph | None:
    """A copy of the graph of a backward that computes nothing from these tangents, if there is one.

        %s = aten.add(%tangents_2, %g)
        %b = aten.sum(%s, [0])             ->     %b = aten.sum(%g, [0])
        zinf.reduce_grad(%b, %w)                  zinf.reduce_grad(%b, %w)

    Parameters get the gradients that they did: zeros, where all of one is undefined. What is moved
    stays as it is. A tangent that is still read, by an op that is not known to be linear, is to be
    zeros; the others are no inputs of the copy. Compiled fusions are left as they are.
    """
    if any(fusion_of(node) is not None for node in graph.nodes):
        return None
    made, _ = copy_graph(graph)
    try:
        _Rewriting(made, tangents).run()
    except _UnlikeLayout:
        return None
    return made


class _UnlikeLayout(Exception):
    """An op does not take an operand as it lies in memory where gradients are undefined."""


class _Rewriting:
    """Walks a graph in its order.

    undefined  nodes whose values are computed from undefined gradients alone
    laid_out   nodes whose values lie in memory otherwise than they were traced
    """

    def __init__(self, graph: fx.Graph, tangents: Collection[NodeName]) -> None:
        self.graph = graph
        places = graph.find_nodes(op="placeholder")
        self.undefined = {node for node in places if node.name in tangents}
        self.laid_out: set[fx.Node] = set()

    def run(self) -> None:
        for node in list(self.graph.nodes):
            missing = any(n in self.undefined for n in node.all_input_nodes)
            if not missing:
                if is_compute(node) and not self.laid_out.isdisjoint(node.all_input_nodes):
                    self._lay_out(node)
            elif node.target in ops.SINKS:
                self._send_zeros(node)
            elif is_compute(node) and self._is_undefined(node):
                self.undefined.add(node)
            elif is_compute(node) and (other := self._defined_summand(node)) is not None:
                if _strides(other.meta["val"]) != _strides(node.meta["val"]):
                    self.laid_out.add(other)
                node.replace_all_uses_with(other)
        output = output_of(self.graph)
        (results,) = output.args
        assert isinstance(results, list | tuple)
        output.args = (tuple(None if r in self.undefined else r for r in results),)
        for node in reversed(list(self.graph.nodes)):
            if not node.users and self._goes(node):
                self.graph.erase_node(node)

    def _goes(self, node: fx.Node) -> bool:
        """Whether a node that nothing reads is left out."""
        if is_compute(node):
            return not node.is_impure()
        return node.op == "placeholder" and node in self.undefined

    def _is_undefined(self, node: fx.Node) -> bool:
        """Whether a node that reads undefined gradients computes nothing but zeros from them."""
        op = node.target
        if op is getitem:
            return node.args[0] in self.undefined
        if not isinstance(op, Dispatched) or op._schema.is_mutable:
            return False
        if bases := bases_of(node):
            return all(base in self.undefined for base in bases)
        if op in (aten.add.Tensor, aten.sub.Tensor):
            return all(n in self.undefined for n in node.args[:2])
        if op is aten.where.self:
            return all(n in self.undefined or _is_zero(n) for n in node.args[1:])
        if op in LINEAR:
            return any(node.args[at] in self.undefined for at in LINEAR[op])
        if op in (aten.cat.default, aten.stack.default):
            return all(n in self.undefined for n in node.all_input_nodes)
        gradients = [
            value
            for argument, value in zip(op._schema.arguments, node.args, strict=False)
            if argument.name.startswith("grad") and isinstance(value, fx.Node)
        ]
        is_backward = op._schema.name.endswith(("_backward", "_backward_data"))
        return is_backward and bool(gradients) and all(g in self.undefined for g in gradients)

    def _defined_summand(self, node: fx.Node) -> fx.Node | None:
        """The one operand of a sum that is defined, if the sum has its value.

        It has a storage of its own that compute made, and no tier gives back.
        """
        if not is_op(node, aten.add.Tensor, aten.sub.Tensor) or node.kwargs.get("alpha", 1) != 1:
            return None
        first, second = node.args
        if second in self.undefined:
            other = first
        elif is_op(node, aten.add.Tensor):
            other = second
        else:
            return None
        if not isinstance(other, fx.Node) or not is_compute(root_of(other)):
            return None
        mine, of_sum = other.meta["val"], node.meta["val"]
        same = mine.dtype == of_sum.dtype and tuple(mine.size()) == tuple(of_sum.size())
        return other if same else None

    def _lay_out(self, node: fx.Node) -> None:
        """Trace a node anew, one of whose operands lies otherwise in memory."""
        old = node.meta["val"]
        try:
            new = self._traced(node)
        except (RuntimeError, ValueError) as error:  # of kernels, and of their formulas in Python
            if node.target is not aten.view.default:
                raise _UnlikeLayout from error
            source = node.args[0]  # such strides have no such view: of a copy, as `reshape`
            assert isinstance(source, fx.Node)
            with self.graph.inserting_before(node):
                copy = insert(
                    self.graph,
                    aten.clone.default,
                    source,
                    like=node,
                    phase=phase_of(node),
                    val=source.meta["val"].clone(memory_format=torch.contiguous_format),
                )
                copy.kwargs = {"memory_format": torch.contiguous_format}
            self._into_region_of(copy, node)
            node.replace_input_with(source, copy)
            new = self._traced(node)
        node.meta["val"] = new
        if _strides(new) != _strides(old):
            self.laid_out.add(node)

    def _traced(self, node: fx.Node) -> Any:
        def value(argument: fx.Node) -> Any:
            return argument.meta["val"]

        args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
        with torch.no_grad():
            return traced(self.graph, node.target, args, kwargs)

    def _send_zeros(self, sink: fx.Node) -> None:
        """Let a gradient that is all undefined leave as zeros, which nothing is computed for."""
        gradient = sink.args[0]
        assert isinstance(gradient, fx.Node)
        value = gradient.meta["val"]
        if gradient.op != "call_function" or not all(isinstance(n, int) for n in value.size()):
            return
        with self.graph.inserting_before(gradient):
            zeros = insert(
                self.graph,
                aten.full.default,
                list(value.size()),
                0.0,
                like=gradient,
                phase=phase_of(gradient),
                val=value.new_empty(value.size()),
            )
            zeros.kwargs = {"dtype": value.dtype, "device": value.device}
        self._into_region_of(zeros, gradient)
        sink.replace_input_with(gradient, zeros)

    def _into_region_of(self, node: fx.Node, other: fx.Node) -> None:
        region = region_of(other)
        assert region is not None, "compute that was cut into regions"
        set_region(node, region)


def _is_zero(node: object) -> bool:
    """Whether a node is a constant zero."""
    if not isinstance(node, fx.Node):
        return False
    if node.target is aten.scalar_tensor.default:
        return bool(node.args[0] == 0)
    return node.target is aten.full.default and bool(node.args[1] == 0)


def _strides(value: object) -> object:
    """Strides of the tensors in the value of a node."""
    if isinstance(value, Tensor):
        return tuple(value.stride())
    return [_strides(v) for v in value] if isinstance(value, list | tuple) else None
