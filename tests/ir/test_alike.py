"""What is told apart, and what is not, where graphs are compared."""

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from zcompile.ir.alike import by_digest, by_position, digests, needed


def of(function, *inputs, key=by_position):
    gm = make_fx(function)(*inputs)
    return digests(gm, list(gm.graph.nodes), key)


X = torch.ones(2, 3)
TURNED = torch.ones(3, 2).t()

OTHERS = {
    "an op": lambda x: (x.cos(), x * 2),
    "a number": lambda x: (x.sin(), x * 3),
    "the order of results": lambda x: (x * 2, x.sin()),
    "a dtype": lambda x: (x.sin(), x.double() * 2),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("key", [by_position, by_digest])
def test_graphs_that_compute_otherwise_are_unlike(other, key):
    mine = of(lambda x: (x.sin(), x * 2), X, key=key)
    assert mine == of(lambda x: (x.sin(), x * 2), X, key=key)
    assert mine != of(other, X, key=key)


def times(number):
    return lambda x: (x * number).sin()


def plus(number):
    return lambda x: x + torch.tensor([1.0, 2.0, number])


def test_a_digest_of_what_is_alike_tells_all_that_it_is_computed_by():
    found = [of(times(n), X, key=by_digest) for n in (2, 2, 3)]
    assert found[0][-1] == found[1][-1]
    assert found[0][-1] != found[2][-1]


def test_layouts_are_told_apart():
    assert of(torch.sin, X) != of(torch.sin, TURNED)


def test_constants_are_told_apart_by_their_values():
    found = [of(plus(number), X) for number in (3.0, 3.0, 4.0)]
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_graphs_that_ops_are_given_are_told_apart():
    def conditional(on):
        return of(lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), on, (x,)), X)

    assert conditional(lambda x: x.cos()) == conditional(lambda x: x.cos())
    assert conditional(lambda x: x.cos()) != conditional(lambda x: x.tanh())


def test_which_of_two_equal_nodes_is_read_is_told_by_positions():
    """Of two random numbers it matters which."""

    def one(picked):
        graph = fx.Graph()
        x = graph.placeholder("x")
        made = [graph.call_function(torch.ops.aten.rand_like.default, (x,)) for _ in range(2)]
        graph.output((made[picked],))
        gm = fx.GraphModule(torch.nn.Module(), graph)
        return digests(gm, list(graph.nodes), by_position)[-1]

    assert one(0) == one(0)
    assert one(0) != one(1)


def test_what_a_result_needs_is_in_graph_order_with_all_inputs():
    gm = make_fx(lambda x, y: (x.sin().cos(), y.exp()))(X, X)
    first, _ = gm.graph.find_nodes(op="output")[0].args[0]
    assert [n.name for n in needed([first, None])] == ["x_1", "y_1", "sin", "cos"]
