"""Saved values kept, made again or moved: whatever is decided, the graph gives the same bits."""

from dataclasses import replace

import pytest
from dry_runs import SMALL
from joint import assert_same, captured, results
from moved import WAYS, Forced
from sampled import sampled
from small_models import SMALL_MODELS, UNALIKE

import zcompile
from zcompile.ir import ops, saved_values
from zcompile.ir.graph import find, phase_of
from zcompile.ir.saved_values import SavedValues, storage_bytes
from zcompile.ir.types import Phase
from zcompile.ir.work import work_of
from zcompile.passes.pipeline import pipeline
from zcompile.passes.plan_activations.graph import ActivationBudget, ProblemReader

PASSES = pipeline(zcompile.Config(device="cpu"))


def decided(model: str, how: str):
    return captured(model).through(Forced(how), *PASSES)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("model", sampled(SMALL_MODELS, *UNALIKE))
def test_results_are_the_same_to_the_bit(model, how):
    assert_same(results(decided(model, how)), results(captured(model).through(*PASSES)))


def test_a_moved_value_is_read_back_as_a_parameter_is(golden):
    assert decided("mlp", "host").text == golden


def test_a_value_made_again_is_made_before_its_first_reader(golden):
    assert decided("mlp", "again").text == golden


@pytest.mark.parametrize("model", ["transformer block", "view in two places", "bf16 autocast"])
def test_values_that_share_storage_are_moved_once(model):
    joint = decided(model, "host")
    away = [node.args[0] for node in find(joint.graph, ops.offload)]
    assert away
    assert len(away) == len(set(away))
    values = SavedValues(joint.graph)
    assert all(values.root(node) is node for node in away)
    left = [node.args[0] for node in find(joint.graph, ops.left)]
    assert sorted(left, key=str) == sorted(away, key=str), "each is given back once"


def test_nothing_but_what_cannot_be_moved_crosses_to_backward():
    joint = decided("transformer block", "host")
    for saved in SavedValues(joint.graph).saved:
        if saved.root.target is not ops.offload:
            assert not storage_bytes(saved.root)


def test_random_ops_are_never_repeated():
    joint = decided("dropout", "again")
    random = [n for n in joint.graph.nodes if "dropout" in n.name or "bernoulli" in n.name]
    forward = [n for n in random if phase_of(n) is Phase.FORWARD]
    backward = [n for n in random if phase_of(n) is Phase.BACKWARD and "backward" not in n.name]
    assert forward
    assert not backward


def test_what_reads_a_running_statistic_is_not_repeated():
    values = SavedValues(captured("batch norm").graph)
    assert values.mutated
    for saved in values.saved:
        reads = {values.root(n) for n in values.maker(saved.root).all_input_nodes}
        assert not (reads & values.mutated and values.may_repeat(saved.root))


def test_the_work_of_a_graph_is_counted_once_for_all_machines(monkeypatch):
    counted = []

    def noted(nodes):
        counted.extend(nodes)
        return work_of(nodes)

    monkeypatch.setattr(saved_values, "work_of", noted)
    joint = captured("mlp")
    fast = replace(SMALL.compute, memory_bytes_per_s=1e15)
    reader = ProblemReader(SavedValues(joint.graph), joint.plan)
    slow, quick = (
        reader.read(ActivationBudget(replace(SMALL, compute=compute), {}))
        for compute in (SMALL.compute, fast)
    )
    assert len(counted) == len(set(counted)) > 0
    assert slow.clock[-1] > quick.clock[-1] > 0, "what it takes is another matter"
