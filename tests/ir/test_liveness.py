"""Live ranges against an oracle that runs the graph and looks at which storages are the same."""

from operator import getitem

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from joint import captured
from torch import fx

from zcompile.config import Config
from zcompile.ir import ops
from zcompile.ir.graph import (
    aliases_of,
    find,
    live_ranges,
    nbytes_of,
    positions,
    profile,
    readers_of,
)
from zcompile.passes.pipeline import pipeline

aten = torch.ops.aten

FRESH = (aten.neg.default, aten.exp.default, aten.clone.default)
VIEWS = (aten.t.default, aten.detach.default, aten.alias.default)


@st.composite
def graphs(draw) -> fx.Graph:
    """Square matrices through fresh ops, views, views of views and lists of views."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(draw(st.integers(1, 2)))]
    for _ in range(draw(st.integers(0, 14))):
        kind = draw(st.sampled_from(("fresh", "view", "add", "split", "inside")))
        source = draw(st.sampled_from(nodes))
        if kind == "fresh":
            node = graph.call_function(draw(st.sampled_from(FRESH)), (source,))
        elif kind == "view":
            node = graph.call_function(draw(st.sampled_from(VIEWS)), (source,))
        elif kind == "add":
            node = graph.call_function(aten.add.Tensor, (source, draw(st.sampled_from(nodes))))
        elif kind == "inside":
            node = graph.call_function(aten._unsafe_view.default, (source, [4, 4]))
        else:
            parts = graph.call_function(aten.split.Tensor, (source, 4))
            node = graph.call_function(getitem, (parts, 0))
        nodes.append(node)
    results = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3))
    graph.output(tuple(results))
    return graph


class Recorder(fx.Interpreter):
    """Runs a graph and keeps every value, so that no storage is used twice."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(fx.GraphModule({}, graph), garbage_collect_values=False)
        self.kept: dict[str, object] = {}

    def run_node(self, n: fx.Node) -> object:
        self.kept[n.name] = value = super().run_node(n)
        return value


def filled_in(graph: fx.Graph) -> dict[fx.Node, object]:
    """Each node's value; the same as meta["val"]."""
    inputs = [torch.ones(4, 4) for n in graph.nodes if n.op == "placeholder"]
    recorder = Recorder(graph)
    recorder.run(*inputs)
    found = {n: recorder.kept[n.name] for n in graph.nodes}
    for node, value in found.items():
        node.meta["val"] = value
    return found


def storages(value: object) -> set[int]:
    values = value if isinstance(value, list | tuple) else [value]
    return {v.untyped_storage()._cdata for v in values}


@settings(deadline=None, derandomize=True, max_examples=150)
@given(graphs())
def test_live_ranges_are_those_of_the_storages(graph):
    values = filled_in(graph)
    where = positions(graph)
    expected: dict[int, tuple[int, int]] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        last = max((where[user] for user in node.users), default=where[node])
        for storage in storages(values[node]):
            first, until = expected.get(storage, (where[node], last))
            expected[storage] = (first, max(until, last, where[node]))
    found = {next(iter(storages(values[r.value]))): (r.first, r.last) for r in live_ranges(graph)}
    assert found == expected
    assert all(r.nbytes == 64 for r in live_ranges(graph))
    alive = [sum(64 for a, b in expected.values() if a <= i <= b) for i in range(len(graph.nodes))]
    assert profile(graph) == alive


@settings(deadline=None, derandomize=True, max_examples=80)
@given(graphs())
def test_aliases_are_the_nodes_that_share_the_storage(graph):
    values = filled_in(graph)
    for node in graph.nodes:
        if node.op == "output" or not nbytes_of(node):
            continue
        (storage,) = storages(values[node])
        sharing = {n for n in graph.nodes if n.op != "output" and storage in storages(values[n])}
        assert set(aliases_of(node)) == sharing
        assert readers_of(node) == {user for n in sharing for user in n.users}


def test_a_value_that_nobody_reads_lives_for_one_node():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(aten.neg.default, (x,))
    graph.output((x,))
    filled_in(graph)
    assert [(r.first, r.last) for r in live_ranges(graph)] == [(0, 2), (1, 1)]
    assert profile(graph) == [64, 128, 64]


def test_a_handle_and_a_sink_weigh_nothing():
    graph = captured("mlp").through(*pipeline(Config(device="cpu"))).graph
    for node in graph.nodes:
        handle = node.op == "placeholder" and node.name in captured("mlp").plan.params
        if handle or node.target in (ops.wait, ops.release, ops.reduce_grad):
            assert nbytes_of(node) == 0


def test_a_pending_parameter_is_alive_from_its_fetch_to_its_release():
    graph = captured("mlp").through(*pipeline(Config(device="cpu"))).graph
    where = positions(graph)
    ranges = {r.value: r for r in live_ranges(graph) if r.value.target is ops.fetch}
    assert list(ranges) == find(graph, ops.fetch)
    for release in find(graph, ops.release):
        fetch = release.args[0].args[0]
        assert (ranges[fetch].first, ranges[fetch].last) == (where[fetch], where[release])


def test_a_strided_value_weighs_its_span():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty_strided((3, 2), (10, 1))
    graph.output((x,))
    assert nbytes_of(x) == 22 * 4
