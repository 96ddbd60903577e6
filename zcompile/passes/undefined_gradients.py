"""Leaves out of a backward what it would compute from results that the caller does not
differentiate.

A backward is traced for a gradient of every result. In eager PyTorch that of a result which is not
differentiated is undefined: nothing is computed from it, and a sum with it is the other operand.
Zeros in its place differ in three ways. A sum takes the memory format of its first operand, so that
kernels behind it add up elements in another order; zero times infinity is not a number; and they
take time and memory.
"""

from collections.abc import Collection, Mapping, Sequence
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
    readers_of,
    region_of,
    root_of,
    set_region,
    writes,
)
from zcompile.ir.rewrite import is_op, traced
from zcompile.ir.torch_compat import Dispatched
from zcompile.ir.types import NodeName

aten = torch.ops.aten

ZEROS: Mapping[object, Sequence[Sequence[int]]] = {
    aten.add.Tensor: ((0, 1),),
    aten.sub.Tensor: ((0, 1),),
    aten.mul.Tensor: ((0,), (1,)),
    aten.mul.Scalar: ((0,),),
    aten.div.Tensor: ((0,),),
    aten.div.Scalar: ((0,),),
    aten.neg.default: ((0,),),
    aten.sum.default: ((0,),),
    aten.sum.dim_IntList: ((0,),),
    aten.cumsum.default: ((0,),),
    aten.mm.default: ((0,), (1,)),
    aten.bmm.default: ((0,), (1,)),
    aten.mv.default: ((0,), (1,)),
    aten._to_copy.default: ((0,),),
    aten.clone.default: ((0,),),
    aten.copy.default: ((1,),),
    aten.where.self: ((1, 2),),
    aten.masked_fill.Scalar: ((0, 2),),
    aten.tril.default: ((0,),),
    aten.triu.default: ((0,),),
    aten.flip.default: ((0,),),
    aten.roll.default: ((0,),),
    aten.cat.default: ((0,),),
    aten.stack.default: ((0,),),
    aten.repeat.default: ((0,),),
    aten.constant_pad_nd.default: ((0, 2),),
    aten.index.Tensor: ((0,),),
    aten.index_select.default: ((0,),),
    aten.gather.default: ((0,),),
    aten.index_put.default: ((0, 2),),
    aten._unsafe_index_put.default: ((0, 2),),
    aten.index_add.default: ((0, 3),),
    aten.index_fill.int_Scalar: ((0, 3),),
    aten.scatter.src: ((0, 3),),
    aten.scatter.value: ((0, 3),),
    aten.scatter_add.default: ((0, 3),),
    aten.slice_scatter.default: ((0, 1),),
    aten.select_scatter.default: ((0, 1),),
    aten.diagonal_scatter.default: ((0, 1),),
    aten.zeros_like.default: ((),),
    aten.new_zeros.default: ((),),
}
"""Op -> positions of operands that make the result zeros if all of one of these groups are zeros.
Views of zeros are zeros too, and so is what the backward of an op makes of them."""


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
    written    nodes whose memory is written to after they were computed
    """

    def __init__(self, graph: fx.Graph, tangents: Collection[NodeName]) -> None:
        self.graph = graph
        places = graph.find_nodes(op="placeholder")
        self.undefined = {node for node in places if node.name in tangents}
        self.laid_out: set[fx.Node] = set()
        writing = [node for node in graph.nodes if is_compute(node) and writes(node)]
        self.written = {root_of(value) for node in writing for value in node.all_input_nodes}

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
                self._take_summand(node, other)
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
        if not isinstance(op, Dispatched) or writes(node) or root_of(node) in self.written:
            return False
        if bases := bases_of(node):
            return all(base in self.undefined for base in bases)
        for operands in ZEROS.get(op, ()):
            if all(self._are_zeros(_argument(node, at)) for at in operands):
                return True
        gradients = [
            value
            for argument, value in zip(op._schema.arguments, node.args, strict=False)
            if argument.name.startswith("grad") and isinstance(value, fx.Node)
        ]
        is_backward = op._schema.name.endswith(("_backward", "_backward_data"))
        return is_backward and bool(gradients) and all(g in self.undefined for g in gradients)

    def _are_zeros(self, value: object) -> bool:
        """Whether an argument is undefined, or a constant zero; of a list, whether all of it is."""
        if isinstance(value, fx.Node):
            constant = _is_zero(value) and root_of(value) not in self.written
            return value in self.undefined or constant
        if isinstance(value, list | tuple):
            return all(map(self._are_zeros, value))
        return isinstance(value, int | float) and value == 0

    def _defined_summand(self, node: fx.Node) -> fx.Node | None:
        """The one operand of a sum that is defined, if the sum has its value."""
        if not is_op(node, aten.add.Tensor, aten.sub.Tensor) or node.kwargs.get("alpha", 1) != 1:
            return None
        first, second = node.args
        if second in self.undefined:
            other = first
        elif is_op(node, aten.add.Tensor):
            other = second
        else:
            return None
        if not isinstance(other, fx.Node):
            return None
        mine, of_sum = other.meta["val"], node.meta["val"]
        same = mine.dtype == of_sum.dtype and tuple(mine.size()) == tuple(of_sum.size())
        return other if same else None

    def _take_summand(self, node: fx.Node, other: fx.Node) -> None:
        """Let what reads a sum read its one operand; or a copy of that, where it needs memory of
        its own: the operand is no result of compute, either is written to, or one is sent home, and
        the other is returned."""
        root = root_of(other)
        sent, returned = _leaves(node)
        other_sent, other_returned = _leaves(root)
        if (
            not is_compute(root)
            or not self.written.isdisjoint((node, root))
            or (sent and other_returned)
            or (returned and other_sent)
        ):
            with self.graph.inserting_before(node), torch.no_grad():
                val = traced(self.graph, aten.clone.default, (other.meta["val"],), {})
                other = self._insert(aten.clone.default, other, like=node, val=val)
        if _strides(other.meta["val"]) != _strides(node.meta["val"]):
            self.laid_out.add(other)
        node.replace_all_uses_with(other)

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
                val = source.meta["val"].clone(memory_format=torch.contiguous_format)
                copy = self._insert(aten.clone.default, source, like=node, val=val)
                copy.kwargs = {"memory_format": torch.contiguous_format}
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
            val = value.new_empty(value.size())
            zeros = self._insert(aten.full.default, [*value.size()], 0.0, like=gradient, val=val)
            zeros.kwargs = {"dtype": value.dtype, "device": value.device}
        sink.replace_input_with(gradient, zeros)

    def _insert(self, op: Dispatched, *args: Any, like: fx.Node, val: object) -> fx.Node:
        """Add a call to the region of `like`, at the graph's insertion point."""
        node = insert(self.graph, op, *args, like=like, phase=phase_of(like), val=val)
        region = region_of(like)
        assert region is not None, "compute that was cut into regions"
        set_region(node, region)
        return node


def _leaves(node: fx.Node) -> tuple[bool, bool]:
    """Whether the memory of a node is sent home as a gradient, and whether it is returned."""
    readers = readers_of(node)
    return any(n.target in ops.SINKS for n in readers), any(n.op == "output" for n in readers)


def _argument(node: fx.Node, position: int) -> object:
    """An argument of a call, which may be left to its default."""
    if position < len(node.args):
        return node.args[position]
    assert isinstance(node.target, Dispatched)
    given = node.target._schema.arguments[position]
    return node.kwargs.get(given.name, given.default_value)


def _is_zero(node: fx.Node) -> bool:
    """Whether a node is a constant zero."""
    if node.target in (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default):
        return True
    if node.target is aten.scalar_tensor.default:
        return bool(node.args[0] == 0)
    return node.target is aten.full.default and bool(node.args[1] == 0)


def _strides(value: object) -> object:
    """Strides of the tensors in the value of a node."""
    if isinstance(value, Tensor):
        return tuple(value.stride())
    return [_strides(v) for v in value] if isinstance(value, list | tuple) else None
