"""A joint graph that was traced again for some results, and the forward that runs."""

import operator

import pytest
import torch
from offloaded import twins
from torch import fx, nn

from zcompile.frontend import backend
from zcompile.ir import ops
from zcompile.ir.copies import copy_graph
from zcompile.ir.graph import find, output_of
from zcompile.ir.torch_compat import is_tangent
from zcompile.passes.undefined_gradients import (
    TracedJoint,
    Unfit,
    check_saved,
    drop_unread,
    named_alike,
)

aten = torch.ops.aten
RESULTS = 3


class Heads(nn.Module):
    """A loss, another of a head of its own, and a value on the way."""

    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        h = self.trunk(x).tanh()
        return h.exp().mean(), self.head(h).square().mean(), h


class Given:
    """What the functions are given where the first result of `Heads` is differentiated."""

    def __init__(self, monkeypatch):
        self.again = self.traced = self.saved = None

        def named(joint, traced, forward_outputs):
            assert forward_outputs == RESULTS
            self.again, self.traced = copied(joint), traced
            return named_alike(joint, traced, forward_outputs)

        def checked(*graphs):
            self.saved = graphs
            check_saved(*graphs)

        monkeypatch.setattr(backend, "named_alike", named)
        monkeypatch.setattr(backend, "check_saved", checked)
        pair = twins(Heads())
        pair.call(torch.randn(4, 8))[0].backward()
        assert self.saved is not None
        assert not pair.session.inexact


@pytest.fixture
def given(monkeypatch):
    return Given(monkeypatch)


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    graph, _ = copy_graph(gm.graph)
    return fx.GraphModule(gm, graph)


def node_of(graph: fx.Graph, op) -> fx.Node:
    return find(graph, op)[0]


def test_a_graph_that_is_the_same_under_other_names_gets_the_names(given):
    renamed, _ = copy_graph(given.again.graph, {node_of(given.again.graph, aten.tanh.default): "x"})
    assert node_of(renamed, aten.tanh.default).name == "x"
    joint = named_alike(fx.GraphModule(given.again, renamed), given.traced, RESULTS)
    assert node_of(joint.graph, aten.tanh.default).name == "tanh"


def test_a_name_that_is_taken_by_a_node_of_backward_is_given_to_that_of_forward(given):
    """The one of backward gets another."""
    backwards = node_of(given.again.graph, aten.tanh_backward.default)
    taken, _ = copy_graph(
        given.again.graph, {node_of(given.again.graph, aten.tanh.default): "x", backwards: "tanh"}
    )
    joint = named_alike(fx.GraphModule(given.again, taken), given.traced, RESULTS)
    assert node_of(joint.graph, aten.tanh.default).name == "tanh"
    assert node_of(joint.graph, aten.tanh_backward.default).name != "tanh"


def scaled(graph):
    """Another op, of the same value in tracing."""
    node_of(graph, aten.exp.default).target = aten.sin.default


def otherwise_laid_out(graph):
    tanh = node_of(graph, aten.tanh.default)
    tanh.meta["val"] = tanh.meta["val"].t().contiguous().t()


def returned_otherwise(graph):
    output = output_of(graph)
    (results,) = output.args
    output.args = ((results[1], results[0], *results[2:]),)


def of_another_input(graph):
    """A weight that is read in place of another of the same shape would go unnoticed."""
    gather, *_ = find(graph, ops.gather)
    gather.args = (*gather.args[:4], torch.float64, gather.args[5])


@pytest.mark.parametrize(
    "change", [scaled, otherwise_laid_out, returned_otherwise, of_another_input]
)
def test_a_forward_that_is_computed_otherwise_is_refused(given, change):
    change(given.again.graph)
    with pytest.raises(Unfit, match="its forward is traced otherwise"):
        named_alike(given.again, given.traced, RESULTS)


def test_what_had_no_gradient_gets_none(given):
    traced = TracedJoint(
        given.traced.names, given.traced.forward, given.traced.results, frozenset()
    )
    with pytest.raises(Unfit, match="it differentiates other inputs"):
        named_alike(given.again, traced, RESULTS)


def fitted(given) -> fx.Graph:
    joint = named_alike(given.again, given.traced, RESULTS)
    drop_unread(joint)
    return joint.graph


def test_gradients_that_nothing_reads_are_no_inputs(given):
    tangents = [n for n in given.again.graph.find_nodes(op="placeholder") if is_tangent(n)]
    assert [bool(n.users) for n in tangents] == [True, False, False]
    left = [n for n in fitted(given).find_nodes(op="placeholder") if is_tangent(n)]
    assert [n.name for n in left] == [tangents[0].name]


def test_a_backward_that_reads_what_forward_does_not_save_is_refused(given):
    fewer, backward, whole, called = given.saved
    check_saved(fewer, backward, whole, called)
    saved = next(n for n in called.find_nodes(op="placeholder") if n.name == "tanh")
    without, _ = copy_graph(called, {saved: "other"})
    with pytest.raises(Unfit, match="it reads %tanh, which forward does not save"):
        check_saved(fewer, backward, whole, without)


def test_a_saved_value_that_is_computed_otherwise_after_the_passes_is_refused(given):
    fewer, backward, whole, called = given.saved
    node_of(fewer, aten.addmm.default).kwargs = {"beta": 2}
    with pytest.raises(Unfit, match="what it reads is computed otherwise"):
        check_saved(fewer, backward, whole, called)


def test_nothing_is_computed_from_undefined_gradients(given):
    _, backward, _, called = given.saved
    assert len([n for n in called.find_nodes(op="placeholder") if is_tangent(n)]) == RESULTS
    assert find(called, aten.add.Tensor)
    assert not find(backward, aten.add.Tensor)
    assert not find(backward, operator.getitem)
    sent, all_sent = ([n.args[1].name for n in find(g, *ops.SINKS)] for g in (backward, called))
    left_out = {*all_sent} - {*sent}
    assert len(sent) + len(left_out) == len(all_sent)
    assert len(left_out) == 2  # weight and bias of the head
