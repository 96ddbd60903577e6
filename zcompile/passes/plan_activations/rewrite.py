"""Writes the choice of saved values into a joint graph: recomputed, or offloaded and read back."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import (
    bases_of,
    find,
    insert,
    module_of,
    output_of,
    positions,
    readers_of,
    set_phase,
    sink,
    writes,
)
from zcompile.ir.plan import GraphPlan
from zcompile.ir.saved_values import SavedValues, layout_of
from zcompile.ir.types import NodeName, ParamName, ParamSpec, Phase


@dataclass(frozen=True)
class PlannedOffload:
    """An offload to write into the graph.

    tier    "host" or "disk"
    starts  the node of forward before which it starts
    left    the node before which the memory of the value is given back
    """

    tier: str
    starts: fx.Node
    left: fx.Node


class Rewriting:
    """Writes decisions about saved storages into a joint graph.

    values      of a graph whose views were sunk (`sink_views`)
    recomputed  the storages, by root, that backward computes again
    offloaded   those that it reads back
    """

    def __init__(
        self,
        values: SavedValues,
        plan: GraphPlan,
        recomputed: frozenset[fx.Node],
        offloaded: Mapping[fx.Node, PlannedOffload],
    ) -> None:
        self._graph, self._values, self._plan = values.graph, values, plan
        self._recomputed = recomputed | {values.maker(root) for root in recomputed}
        self._offloaded = offloaded
        self._params = dict(plan.params)
        self._copies: dict[fx.Node, fx.Node] = {}

    def rewrite(self) -> GraphPlan:
        readers = [n for n in self._graph.nodes if self._values.is_backward(n)]
        handles = {root: self._offload(root, move) for root, move in self._offloaded.items()}
        for root, move in self._offloaded.items():
            with self._graph.inserting_before(move.left):
                insert(
                    self._graph,
                    ops.left,
                    root,
                    handles[root],
                    like=root,
                    phase=Phase.FORWARD,
                    val=None,
                )
        for reader in readers:
            for source in reader.all_input_nodes:
                if (other := self._in_backward(source, reader, handles)) is not source:
                    reader.replace_input_with(source, other)
        return replace(self._plan, params=self._params)

    def _offload(self, root: fx.Node, move: PlannedOffload) -> fx.Node:
        name, layout = name_of(root), layout_of(root)
        near = next(n for n in self._graph.nodes if n.name in self._plan.params)
        with self._graph.inserting_before(move.starts):
            handle = insert(
                self._graph,
                ops.offload,
                root,
                near,
                move.tier,
                name,
                like=root,
                phase=Phase.FORWARD,
                val=torch.empty((), dtype=torch.int64),
                name=f"{root.name}_away",
            )
        self._params[NodeName(handle.name)] = ParamSpec(
            ParamName(name), layout, layout.nbytes, False, home=move.tier, activation=True
        )
        return handle

    def _in_backward(
        self, node: fx.Node, before: fx.Node, handles: Mapping[fx.Node, fx.Node]
    ) -> fx.Node:
        """The node that stands for a forward value in backward; written before `before`, if it is
        not yet."""
        if not self._values.is_forward(node) or node.op != "call_function":
            return node
        root = self._values.root(node)
        if root not in self._recomputed and root not in self._offloaded:
            return node
        if node not in self._copies:
            if node in handles:
                self._copies[node] = self._read_back(node, handles[node], before)
            else:
                sources = {n: self._in_backward(n, before, handles) for n in node.all_input_nodes}
                with self._graph.inserting_before(before):
                    copy = self._graph.node_copy(node, sources.__getitem__)
                set_phase(copy, Phase.BACKWARD)
                self._copies[node] = copy
        return self._copies[node]

    def _read_back(self, root: fx.Node, handle: fx.Node, before: fx.Node) -> fx.Node:
        lies, value = layout_of(root), root.meta["val"]
        with self._graph.inserting_before(before):
            return insert(
                self._graph,
                ops.gather,
                handle,
                lies.size,
                lies.stride,
                0,
                lies.dtype,
                value.device,
                like=root,
                phase=Phase.BACKWARD,
                val=value,
            )


def sink_views(graph: fx.Graph) -> None:
    """Move views that backward takes of forward's values right before their first reader.

    Tracing leaves some at the head of backward, where they would keep their base alive.
    """
    output = output_of(graph)
    for node in reversed(list(graph.nodes)):
        if not SavedValues.is_backward(node) or not bases_of(node) or writes(node):
            continue
        if output not in node.users:
            sink(node)


def name_of(root: fx.Node) -> str:
    """Name of a value, for people."""
    module = module_of(root)
    return f"{root.name} of {module}" if module else root.name


class Borders:
    """Points at which the forward half of a graph is cut into regions anyway.

    These are before the first and after the last reader of a gathered parameter; offloads that
    start or end there cut nothing more.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._where = positions(graph)
        self._nodes = list(graph.nodes)
        calls = [n for n in self._nodes if n.op == "call_function"]
        backward = (n for n in calls if SavedValues.is_backward(n))
        self.end = self._where[next(backward, output_of(graph))]
        """Index of the first node of backward, or of the output."""
        cuts = {self.end}
        for gather in find(graph, ops.gather):
            read = [self._where[n] for n in readers_of(gather) if n.op != "output"]
            read = [at for at in read if at < self.end]
            if read:
                cuts |= {min(read), max(read) + 1}
        self._cuts = sorted(at for at in cuts if at <= self.end)

    def at(self, node: fx.Node) -> int:
        return self._where[node]

    def after(self, index: int) -> int:
        """Index of the first border behind a node; the end of forward, if there is none before."""
        found = bisect_right(self._cuts, index)
        return self._cuts[found] if found < len(self._cuts) else self.end

    def node(self, index: int) -> fx.Node:
        found: fx.Node = self._nodes[index]
        return found

    def last_read(self, root: fx.Node) -> int:
        """Index of the last node of forward that reads a storage."""
        read = (self._where[n] for n in (root, *readers_of(root)) if n.op != "output")
        return max(at for at in read if at < self.end)


def plan_offload(borders: Borders, root: fx.Node, tier: str, at_least: int = 0) -> PlannedOffload:
    """An offload from the first border after a value is made.

    Its memory is given back at the first border after its last reader in forward, and not before
    node `at_least`.
    """
    starts = borders.after(borders.at(root))
    left = borders.after(max(borders.last_read(root), at_least - 1, borders.at(root)))
    return PlannedOffload(tier, borders.node(starts), borders.node(max(left, starts)))
