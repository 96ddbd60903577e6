"""A torch function spliced into a graph: its ops become nodes, which compute what it computes."""

import gc
import weakref

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from zcompile.ir.graph import phase_of, set_phase
from zcompile.ir.rewrite import GraphBuilder
from zcompile.ir.types import Phase

aten = torch.ops.aten


def written(function, *values):
    """Splices `function` of `values` into an empty graph: the graph, and the nodes in it."""
    graph, nodes = fx.Graph(), []
    with FakeTensorMode() as mode:
        for n, value in enumerate(values):
            nodes.append(graph.placeholder(f"x{n}"))
            nodes[-1].meta["val"] = mode.from_tensor(value)
            set_phase(nodes[-1], Phase.FORWARD)
    end = graph.output(())
    build = GraphBuilder(graph, end, nodes[0], Phase.BACKWARD)
    result = build.splice(function, *nodes)
    end.args = (result,)
    return graph, build.made


def targets(nodes):
    return [node.target for node in nodes]


def check(function, *values):
    """Asserts that the graph gives what the function gives, and says so before it runs."""
    graph, made = written(function, *values)
    module = fx.GraphModule({}, graph)
    found = module(*(value.clone() for value in values))
    expected = function(*(value.clone() for value in values))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    (results,) = graph.output_node().args
    for node, value in zip(results, expected, strict=True):
        said = node.meta["val"]
        assert (said.shape, said.stride(), said.dtype) == (
            value.shape,
            value.stride(),
            value.dtype,
        )
    return made


X, Y = torch.randn(3, 4), torch.randn(4, 5)


def test_each_op_is_a_node_in_the_phase_of_the_builder():
    made = check(lambda x, y: (x @ y, (x.t() * 2).to(torch.float64)), X, Y)
    product, turned, twice, cast = made
    ops = [aten.mm.default, aten.t.default, aten.mul.Tensor, aten._to_copy.default]
    assert targets([product, turned, twice, cast]) == ops
    assert {phase_of(node) for node in made} == {Phase.BACKWARD}


def test_what_is_written_in_place_is_read_after_it():
    def function(x):
        twice = x * 2
        twice.add_(1)
        return twice.exp(), twice

    made = check(function, X)
    doubled, added, exp = made
    assert exp.args == (added,)
    assert added.args == (doubled, 1)


def test_equal_calls_stay_two_values():
    """Their traced values are one object, which must not make them one node."""

    def function(x):
        one, other = x.neg(), x.neg()
        return one.mul_(2), other

    check(function, X)


def test_results_of_an_op_with_several_are_told_apart():
    check(lambda x: tuple(x.split([1, 3], 1)), X)


def test_arguments_that_are_handed_through_are_their_own_nodes():
    graph, made = written(lambda x, y: {"same": x, "none": None, "to": y.to(torch.float32)}, X, Y)
    x, y = graph.find_nodes(op="placeholder")
    assert not made
    assert graph.output_node().args[0] == {"same": x, "none": None, "to": y}


def test_a_function_runs_once_for_arguments_that_are_alike():
    """What is written is as if it ran each time: also where one node is given twice."""
    ran = []

    def add(x, y):
        ran.append(1)
        return x + y

    def sums(build, x, other, narrow):
        pairs = [(x, other), (other, x), (x, x), (other, other), (narrow, narrow), (x, other)]
        return [build.splice(add, *pair).args for pair in pairs], pairs

    graph, _ = written(lambda x, y, z: (), X, X.clone(), Y)
    build = GraphBuilder(graph, graph.output_node(), next(iter(graph.nodes)), Phase.FORWARD)
    found, expected = sums(build, *graph.find_nodes(op="placeholder"))
    assert found == expected
    assert len(ran) == 3, "of two, of one twice, of another size"


def test_constants_are_refused():
    """No node stands for them."""
    with pytest.raises(AssertionError, match="no node stands for"):
        written(lambda x: x + torch.ones(3, 4), X)


def test_what_is_recorded_goes_with_its_graph():
    graph, _ = written(lambda x: x.exp(), X)
    known = weakref.ref(graph)
    del graph, _
    gc.collect()
    assert known() is None
