"""Copies a graph, to try something out on."""

from collections.abc import Mapping

from torch import fx

from zcompile.ir.rewrite import share_traced


def copy_graph(
    graph: fx.Graph, names: Mapping[fx.Node, str] | None = None
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of the graph with the metadata of its nodes, to try something out on; old node -> new
    one.

    names  of some nodes, that they have in the copy; a later node that has one of them gets another

    What is worked out of calls that are written into either is known in both: one copy after the
    other is cut, and at last the graph, and many of their calls are the same.
    """
    copy, mapping = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        # `Graph.node_copy` looks through all arguments for sizes that nobody may write there, which
        # takes as long as all else.
        name = node.name if names is None else names.get(node, node.name)
        made = copy.create_node(node.op, node.target, name=name, type_expr=node.type)
        made.args = fx.map_arg(node.args, mapping.__getitem__)
        if node.kwargs:
            made.kwargs = fx.map_arg(dict(node.kwargs), mapping.__getitem__)
        made.meta = dict(node.meta)
        mapping[node] = made
    share_traced(graph, copy)
    return copy, mapping
