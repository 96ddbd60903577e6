"""The editing verbs: aliasing read from schemas, phases, and what an inserted node brings along."""

from operator import getitem

import pytest
import torch
from joint import captured, catch
from sampled import sampled
from small_models import SMALL_MODELS, UNALIKE, dropout, small
from torch import fx, nn

from zcompile.ir import ops
from zcompile.ir.graph import (
    aliases_of,
    assign_phases,
    bases_of,
    find,
    insert,
    is_compute,
    is_ours,
    module_of,
    output_of,
    phase_of,
    positions,
    readers_of,
)
from zcompile.ir.types import Phase

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("target", "args", "shares"),
    [
        (aten.t.default, (), True),
        (aten.view.default, ([4],), True),
        (aten.slice.Tensor, (0, 0, 1), True),
        (aten._unsafe_view.default, ([4],), True),  # its schema does not say so
        (aten.detach.default, (), True),
        (ops.wait, (), True),
        (aten.clone.default, (), False),
        (aten.neg.default, (), False),
        (aten._to_copy.default, (), False),
    ],
)
def test_what_shares_storage_is_read_from_the_schema(target, args, shares):
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(target, (x, *args))
    assert bases_of(made) == ((x,) if shares else ())
    assert bases_of(x) == ()


def test_an_item_of_a_list_of_views_is_a_view_and_an_item_of_fresh_values_is_not():
    graph = fx.Graph()
    x = graph.placeholder("x")
    views = graph.call_function(aten.split.Tensor, (x, 1))
    view = graph.call_function(getitem, (views, 0))
    fresh = graph.call_function(aten.max.dim, (x, 0))
    value = graph.call_function(getitem, (fresh, 0))
    assert bases_of(view) == (views,)
    assert bases_of(value) == ()
    assert list(aliases_of(x)) == [x, views, view]


def test_readers_of_a_view_are_readers_of_its_base():
    graph = fx.Graph()
    x = graph.placeholder("x")
    view = graph.call_function(aten.t.default, (graph.call_function(aten.t.default, (x,)),))
    reader = graph.call_function(aten.neg.default, (view,))
    graph.output((reader,))
    assert reader in readers_of(x)
    assert output_of(graph) not in readers_of(x)


@pytest.mark.parametrize("name", sampled(SMALL_MODELS, *UNALIKE))
def test_forward_comes_first_and_depends_on_nothing_backward(name):
    graph = captured(name).graph
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    phases = [phase_of(n) for n in nodes]
    assert phases == sorted(phases, key=(Phase.FORWARD, Phase.BACKWARD).index)
    for node in nodes:
        if phase_of(node) is Phase.FORWARD:
            assert all(phase_of(source) is Phase.FORWARD for source in node.all_input_nodes)


def test_all_of_inference_is_forward():
    model, inputs = small("mlp")
    graph = catch(model, *inputs, grad=False).graph
    assert {phase_of(n) for n in graph.nodes} == {Phase.FORWARD}


def test_random_numbers_are_drawn_in_forward_and_in_order():
    torch.manual_seed(0)
    graph = catch(dropout(), torch.randn(4, 8)).graph
    drawn = [
        n
        for n in graph.nodes
        if n.op == "call_function"
        and torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
    ]
    assert len(drawn) == 2
    assert {phase_of(n) for n in drawn} == {Phase.FORWARD}


def test_a_value_that_only_backward_reads_is_computed_in_backward():
    graph = captured("mlp").copy().graph
    relu = find(graph, aten.relu.default)[0]
    mm = find(graph, aten.mm.default)[0]
    with graph.inserting_after(relu):
        extra = graph.call_function(aten.neg.default, (relu,))
    extra.meta["val"] = relu.meta["val"]
    mm.args = (extra, mm.args[1])
    assign_phases(graph, 1)
    assert phase_of(extra) is Phase.BACKWARD
    assert positions(graph)[extra] < positions(graph)[mm]


def test_an_inserted_node_knows_where_it_came_from():
    graph = captured("mlp").copy().graph
    relu = find(graph, aten.relu.default)[0]
    with graph.inserting_after(relu):
        made = insert(
            graph,
            aten.neg.default,
            relu,
            like=relu,
            phase=Phase.FORWARD,
            val=relu.meta["val"],
            name="negated",
        )
    assert made.name == "negated"
    assert made.meta["val"] is relu.meta["val"]
    assert module_of(made) == module_of(relu)
    assert made.meta["nn_module_stack"] is relu.meta["nn_module_stack"]


def test_a_node_knows_its_module():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    graph = catch(Net(), torch.randn(2, 8)).graph
    first, second = find(graph, aten.addmm.default)
    assert "layers" in module_of(first)
    assert module_of(first) != module_of(second)
    assert module_of(graph.find_nodes(op="placeholder")[0]) == ""


def test_ours_and_compute_are_told_apart():
    graph = captured("mlp").graph
    for node in graph.nodes:
        assert is_ours(node) + is_compute(node) == (node.op == "call_function")
