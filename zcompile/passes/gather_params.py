"""Fetches each parameter once per phase, right before its first reader."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import (
    KEEP_STRIDES,
    aliases_of,
    bases_of,
    find,
    insert,
    output_of,
    phase_of,
    set_phase,
    sink,
    use_of,
    views_and_casts_of,
)
from zcompile.ir.plan import GraphPlan
from zcompile.ir.types import Phase
from zcompile.passes.base import Fact, Pass


@dataclass(frozen=True)
class GatherParams(Pass):
    """Fetch a parameter where it is first read, and again in backward; views stay views.

        %g = zinf.gather(%w)                      forward:   %p = zinf.fetch(%w)
        %t = aten.t(%g)                                      %f = zinf.wait(%p)
        %y = aten.mm(%x, %t)               ->                %t = aten.t(%f)
        ...                                                  %y = aten.mm(%x, %t)
        %d = aten.mm(%dy, %t)   (backward)        backward:  fetch, wait, aten.t, aten.mm again

    Forward therefore saves the handle for backward, never the full value. Casts of a gathered
    parameter are computed again in backward too. A result that is a view of a gathered parameter is
    copied, since the bytes under it are given back; so is one that values are scattered into, since
    `slice_scatter` and its like copy all the storage that their operand lies in.
    """

    name: ClassVar[str] = "gather-params"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.PHASES_ASSIGNED})
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_GATHERED})

    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        _merge_equal(graph)
        for gather in find(graph, ops.gather):
            _gather_again_in_backward(graph, gather)
        for gather in find(graph, ops.gather):
            for view in reversed(list(aliases_of(gather))):  # elsewhere they would split a region
                if view is not gather:
                    sink(view)
        for gather in find(graph, ops.gather):
            _split(graph, gather, plan)
        for wait in find(graph, ops.wait):
            _copy_escapes(graph, wait)
            _copy_scattered_into(graph, wait)
        return plan


def _merge_equal(graph: fx.Graph) -> None:
    """Merge gathers of one handle and layout, but for those that are marked for one use alone."""
    seen: dict[object, fx.Node] = {}
    for gather in find(graph, ops.gather):
        key = (use_of(gather), *(str(argument) for argument in gather.args))
        first = seen.setdefault(key, gather)
        if first is not gather:
            gather.replace_all_uses_with(first)
            graph.erase_node(gather)


def _gather_again_in_backward(graph: fx.Graph, gather: fx.Node) -> None:
    """Give the readers in backward a gather of their own, with its views and casts."""
    copies: dict[fx.Node, fx.Node] = {}
    family = set(views_and_casts_of(gather))

    def again(node: fx.Node, before: fx.Node) -> fx.Node:
        if node not in family or phase_of(node) is Phase.BACKWARD:
            return node
        if node not in copies:
            sources = {n: again(n, before) for n in node.all_input_nodes if n in family}
            with graph.inserting_before(before):
                copies[node] = graph.node_copy(node, lambda n: sources.get(n, n))
            set_phase(copies[node], Phase.BACKWARD)
        return copies[node]

    readers = {
        user
        for member in family
        if phase_of(member) is Phase.FORWARD
        for user in member.users
        if user.op != "output" and phase_of(user) is Phase.BACKWARD
    }
    for reader in sorted(readers):
        for member in [n for n in reader.all_input_nodes if n in family]:
            reader.replace_input_with(member, again(member, reader))


def _split(graph: fx.Graph, gather: fx.Node, plan: GraphPlan) -> None:
    """Replace a gather by fetch and wait, right before its first reader, and before views of
    others."""
    if not gather.users:
        graph.erase_node(gather)
        return
    # The point: before the first reader, and before views of other values that precede it.
    first = min((user for user in gather.users if user.op != "output"), default=None)
    (handle,) = [n for n in gather.all_input_nodes if n.name in plan.params]
    stem = str(plan.params[handle.name].name).replace(".", "_")  # type: ignore[index]  # NodeName
    point = first if first is not None else output_of(graph)
    while bases_of(point.prev) and gather not in point.prev.all_input_nodes:
        point = point.prev
    # fetch and wait take the place of the gather.
    with graph.inserting_before(point):
        fetch = insert(
            graph,
            ops.fetch,
            *gather.args,
            like=gather,
            phase=phase_of(gather),
            val=gather.meta["val"],
            name=f"{stem}_pending",
        )
        wait = insert(
            graph,
            ops.wait,
            fetch,
            like=gather,
            phase=phase_of(gather),
            val=gather.meta["val"],
            name=f"{stem}_full",
        )
    gather.replace_all_uses_with(wait)
    graph.erase_node(gather)


def _copied(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """Insert a copy of a value, at the graph's insertion point."""
    clone = torch.ops.aten.clone.default
    phase, val = phase_of(value), value.meta["val"]
    return insert(graph, clone, value, like=value, phase=phase, val=val)


def _copy_escapes(graph: fx.Graph, wait: fx.Node) -> None:
    """Copy each graph output that shares the gathered bytes."""
    output = output_of(graph)
    for alias in list(aliases_of(wait)):
        if output not in alias.users or not isinstance(alias.meta.get("val"), torch.Tensor):
            continue
        with graph.inserting_after(alias):
            copy = _copied(graph, alias)
        output.replace_input_with(alias, copy)


def _copy_scattered_into(graph: fx.Graph, wait: fx.Node) -> None:
    """Let ops that copy the storage of their operand read a copy of the gathered bytes, whose
    storage is all that is on the device."""
    views = list(aliases_of(wait))

    def of_copy(node: fx.Node) -> fx.Node:
        """`node`, the gathered value or a view of it, in the copy."""
        if node is wait:
            return _copied(graph, wait)
        sources = {n: of_copy(n) for n in node.all_input_nodes if n in views}
        return graph.node_copy(node, lambda n: sources.get(n, n))

    for reader in [user for view in views for user in view.users if user.target in KEEP_STRIDES]:
        into = reader.args[0]
        if isinstance(into, fx.Node) and into in views:
            with graph.inserting_before(reader):
                reader.args = (of_copy(into), *reader.args[1:])
