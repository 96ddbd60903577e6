"""Finds what forward saves for backward: storages, who reads them, and whether they can be
recomputed.

Values that share a storage are one `Saved`: the storage is what is saved, offloaded or recomputed,
and views of it are taken where they are read. A gathered parameter, its views and its casts are not
among them, since backward gathers again.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import find, output_of, phase_of, root_of, views_and_casts_of
from zcompile.ir.torch_compat import (
    Dispatched,
    arguments_of,
    hint,
    is_random,
    is_symbol,
    mutated_inputs,
)
from zcompile.ir.types import Layout, Phase, Work
from zcompile.ir.work import work_of

REPEATABLE = frozenset({"aten", "prims"})
"""Namespaces whose ops say whether they draw random numbers. Another op may draw some, or keep a
state, without a word; its values are saved or offloaded, and never recomputed."""


@dataclass(frozen=True)
class Saved:
    """A storage that forward makes and backward reads.

    root     the node that makes it
    members  the values over it that backward reads, the root or views, in graph order
    """

    root: fx.Node
    members: tuple[fx.Node, ...]


class SavedValues:
    """The forward values of a joint graph that backward reads, by storage."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.gathered = frozenset(n for g in find(graph, ops.gather) for n in views_and_casts_of(g))
        self._roots: dict[fx.Node, fx.Node] = {}
        self._work: dict[fx.Node, Work] = {}
        self.mutated = mutated_inputs(graph) | {self.root(n) for n in _written(graph)}
        """Storages that do not hold the same all the time."""

    def root(self, node: fx.Node) -> fx.Node:
        """As `graph.root_of`."""
        if node not in self._roots:
            self._roots[node] = root_of(node)
        return self._roots[node]

    def work(self, node: fx.Node) -> Work:
        """As `work.work_of` counts it, once: a choice is read off the same graph for one machine
        after the other."""
        if node not in self._work:
            self._work[node] = work_of([node])
        return self._work[node]

    @cached_property
    def saved(self) -> tuple[Saved, ...]:
        """Saved storages in graph order; without those that the caller gave, which are there
        anyway."""
        members: dict[fx.Node, list[fx.Node]] = {}
        for node in self.graph.nodes:
            if self.is_forward(node) and any(self.is_backward(user) for user in node.users):
                root = self.root(node)
                if is_value(node) and root.op == "call_function":
                    members.setdefault(root, []).append(node)
        return tuple(Saved(root, tuple(rows)) for root, rows in members.items())

    @cached_property
    def returned(self) -> frozenset[fx.Node]:
        """Storages that a result of the graph is in: its caller keeps them."""
        return frozenset(self.root(n) for n in output_of(self.graph).all_input_nodes)

    def is_forward(self, node: fx.Node) -> bool:
        return node.op != "output" and node not in self.gathered and phase_of(node) is Phase.FORWARD

    @staticmethod
    def is_backward(node: fx.Node) -> bool:
        return node.op == "call_function" and phase_of(node) is Phase.BACKWARD

    def maker(self, root: fx.Node) -> fx.Node:
        """The op that makes a storage; for one of several results, the op that makes all of
        them."""
        if root.target is operator.getitem:
            (several, _) = root.args
            assert isinstance(several, fx.Node)
            return several
        return root

    def may_repeat(self, root: fx.Node) -> bool:
        """Whether the op of a storage gives the same again, whenever it is called on the same
        operands."""
        maker = self.maker(root)
        return (
            maker.op == "call_function"
            and isinstance(maker.target, Dispatched)
            and maker.target.namespace in REPEATABLE
            and not maker.target._schema.is_mutable
            and not is_random(maker)
            and self.root(root) not in self.mutated
            and not any(self.root(n) in self.mutated for n in maker.all_input_nodes)
        )

    def may_move(self, root: fx.Node) -> bool:
        """Whether a storage can be offloaded: a plain tensor of a known size that nobody else
        holds."""
        value = root.meta["val"]
        if not isinstance(value, torch.Tensor) or root in self.returned or root in self.mutated:
            return False
        fixed = all(isinstance(n, int) for n in (*value.size(), *value.stride()))
        return fixed and value.layout is torch.strided and storage_bytes(root) > 0


def is_value(node: fx.Node) -> bool:
    """Whether the value of a node is a tensor, and not a size."""
    return isinstance(node.meta.get("val"), torch.Tensor) and not is_symbol(node)


def storage_bytes(root: fx.Node) -> int:
    """Bytes of the storage that a node makes, as torch's allocator is asked for it.

    A dynamic size counts as it was when traced.
    """
    value = root.meta["val"]
    return hint(value.untyped_storage().nbytes()) if isinstance(value, torch.Tensor) else 0


def layout_of(root: fx.Node) -> Layout:
    return Layout.of(root.meta["val"])


def _written(graph: fx.Graph) -> Iterator[fx.Node]:
    """The arguments that ops write to."""
    for node in graph.nodes:
        if not isinstance(node.target, Dispatched) or not node.target._schema.is_mutable:
            continue
        if node.target in ops.OURS:
            continue
        for position, argument in enumerate(arguments_of(node.target)):
            if argument.writes:
                given = (
                    node.args[position]
                    if position < len(node.args)
                    else node.kwargs.get(argument.name)
                )
                many = given if isinstance(given, list | tuple) else (given,)
                yield from (value for value in many if isinstance(value, fx.Node))
