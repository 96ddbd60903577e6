"""Aliases and live bytes against oracles that look at which storages are the same."""

from operator import getitem

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from joint import captured
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from zcompile.config import Config
from zcompile.ir import ops
from zcompile.ir.graph import (
    aliases_of,
    assign_phases,
    bases_of,
    find,
    positions,
    readers_of,
    set_phase,
)
from zcompile.ir.types import Phase
from zcompile.memory.footprint import footprint
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


@settings(deadline=None, derandomize=True, max_examples=80)
@given(graphs())
def test_aliases_are_the_nodes_that_share_the_storage(graph):
    values = filled_in(graph)
    for node in graph.nodes:
        if node.op == "output" or bases_of(node):
            continue
        (storage,) = storages(values[node])
        sharing = {n for n in graph.nodes if n.op != "output" and storage in storages(values[n])}
        assert set(aliases_of(node)) == sharing
        assert readers_of(node) == {user for n in sharing for user in n.users}


@settings(deadline=None, derandomize=True, max_examples=150)
@given(graphs())
def test_what_a_graph_makes_is_live_while_its_storage_is_read(graph):
    values = filled_in(graph)
    for node in graph.nodes:
        set_phase(node, Phase.FORWARD)
    where = positions(graph)
    given = {s for n in graph.nodes if n.op == "placeholder" for s in storages(values[n])}
    lives: dict[int, tuple[int, int]] = {}
    for node in (n for n in graph.nodes if n.op == "call_function"):
        last = max((where[user] for user in node.users), default=where[node])
        for storage in storages(values[node]) - given:
            first, until = lives.get(storage, (where[node], last))
            lives[storage] = min(first, where[node]), max(until, last)
    held = footprint(graph, {})
    assert sorted((s.first, s.last) for s in held.values) == sorted(lives.values())
    assert held.curve == [
        sum(64 for first, last in lives.values() if first <= at <= last) for at in where.values()
    ]


def test_handles_waits_and_sinks_make_nothing_and_a_fetch_lives_until_its_release():
    joint = captured("mlp").through(*pipeline(Config(device="cpu")))
    held = footprint(joint.graph, joint.plan.params, slots=True)
    made = {s.maker: s for s in held.values}
    handles = [n for n in joint.graph.nodes if n.name in joint.plan.params]
    waits_and_sinks = (n for op in (ops.wait, ops.reduce_grad) for n in find(joint.graph, op))
    assert made.keys().isdisjoint([*handles, *waits_and_sinks])
    where = positions(joint.graph)
    for release in find(joint.graph, ops.release):
        fetch = release.args[0].args[0]
        assert (made[fetch].first, made[fetch].last) == (where[fetch], where[release])
    without = footprint(joint.graph, joint.plan.params)
    assert {s.maker for s in held.values} - {s.maker for s in without.values} == {
        *find(joint.graph, ops.fetch)
    }


def normalized(x: torch.Tensor) -> torch.Tensor:
    y = (x.t() + 1).exp()
    return (y - y.mean(0)) / y.std(0, correction=0)


def gated(x: torch.Tensor) -> torch.Tensor:
    a, b = (x @ x).chunk(2)
    return torch.cat(
        [a.sigmoid() * b, b.view(2, -1, 3).flatten(0, 1).mul(2)[:3, :3].t().repeat(1, 2)]
    )


def in_place(x: torch.Tensor) -> torch.Tensor:
    return ((x * 2).mul_(3).t().add_(1).exp() @ x).sum()


@pytest.mark.parametrize("build", [normalized, gated, in_place])
def test_torch_estimates_the_same_live_bytes(build, monkeypatch):
    """Torch's estimator tells storages by identity of fake tensors, we by the schemas of ops. What
    it cannot be asked: a value that nobody reads (it stays), and where forward ends."""
    estimator = pytest.importorskip("torch._inductor.fx_passes.memory_estimator")
    monkeypatch.setattr(estimator, "device_filter", lambda device: True)
    graph = make_fx(build, tracing_mode="fake")(torch.randn(6, 6)).graph
    assign_phases(graph, None)
    given, *pairs = estimator.build_memory_profile(graph, lambda node: node.op != "placeholder")
    theirs = [nbytes - given for nbytes in pairs[::2]]
    held = footprint(graph, {})
    ours = [n for node, n in zip(held.nodes, held.curve, strict=True) if node.op == "call_function"]
    assert ours == theirs
