"""Copies a graph, to try something out on."""

from torch import fx

from zcompile.ir.rewrite import share_traced


def copy_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of the graph with the metadata of its nodes, to try something out on; old node -> new
    one.

    What is worked out of calls that are written into either is known in both: one copy after the
    other is cut, and at last the graph, and many of their calls are the same.
    """
    copy, mapping = fx.Graph(), dict[fx.Node, fx.Node]()
    results = copy.graph_copy(graph, mapping, return_output_node=True)
    assert isinstance(results, tuple), "a graph ends with its results"
    values, old = results
    copy.output(values).meta = dict(old.meta)
    share_traced(graph, copy)
    return copy, mapping
