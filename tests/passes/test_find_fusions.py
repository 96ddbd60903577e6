"""What Inductor is to compile: what lies between library calls, whatever moves meanwhile."""

from itertools import takewhile

import pytest
import torch
from fusion_models import MODELS, WithLoss, ids
from joint import assert_same, captured, catch, least_budget, results
from sampled import sampled
from small_models import SMALL_MODELS, UNALIKE
from torch import Tensor, nn
from torch.nn import functional

from zcompile.config import Config
from zcompile.ir import ops, printer
from zcompile.ir.fusions import (
    computes,
    copied,
    fusion_of,
    fusions_of,
    is_worth_compiling,
    made_by,
    read_by,
)
from zcompile.ir.graph import find, is_compute, region_of
from zcompile.ir.torch_compat import is_random
from zcompile.passes import find_fusions
from zcompile.passes.find_fusions import FindFusions
from zcompile.passes.pipeline import pipeline

PASSES = pipeline(Config(device="cpu", regions="inductor"))
BEFORE = tuple(takewhile(lambda p: not isinstance(p, FindFusions), PASSES))
FOUND = (*BEFORE, FindFusions(enabled=True))

aten = torch.ops.aten


def numbered(graph):
    rows = []
    for node in graph.nodes:
        number = fusion_of(node) if is_compute(node) else None
        rows.append(f"{'.' if number is None else number:>3}  {printer.line(node)}")
    return "\n".join(rows) + "\n"


def test_a_fusion_lies_between_two_library_calls(golden):
    assert numbered(captured("transformer block").through(*FOUND).graph) == golden


def test_eager_regions_are_left_alone():
    joint = captured("transformer block")
    plain = joint.through(*BEFORE, FindFusions())
    assert numbered(plain.graph) == numbered(joint.through(*BEFORE).graph)


@pytest.mark.parametrize("model", sampled(SMALL_MODELS, *UNALIKE))
def test_finding_them_keeps_the_meaning(model):
    joint = captured(model)
    wanted = results(joint)
    for name, found in joint.through_each(*PASSES):
        assert_same(found, wanted), name


@pytest.mark.parametrize("model", sampled(SMALL_MODELS, *UNALIKE))
def test_each_is_in_one_piece_and_can_be_compiled_by_itself(model):
    graph = captured(model).through(*PASSES).graph
    nodes = list(graph.nodes)
    for members in fusions_of(nodes).values():
        at = nodes.index(members[0])
        assert nodes[at : at + len(members)] == members
        assert len({region_of(node) for node in members}) == 1
        assert is_worth_compiling(members)
        assert not any(
            is_random(node) for node in members if isinstance(node.target, type(aten.mm.default))
        )
        made = made_by(members)
        assert all(isinstance(node.meta["val"], Tensor) for node in read_by(members, made))
        copied(members, made, read_by(members, made)).graph.lint()


def said(graph):
    """The ops of each fusion."""
    return [
        [str(node.target).removeprefix("aten.") for node in members if computes(node)]
        for members in fusions_of(graph.nodes).values()
    ]


@pytest.mark.slow  # within any budget they are, below
def test_they_are_the_same_whatever_is_offloaded():
    """Budgets decide what leaves and what comes back, and not what is one kernel."""
    found = []
    for activations in ("keep", "offload"):
        passes = pipeline(
            Config(device="cpu", regions="inductor", activations=activations, host_memory="16MiB"),
            around=None,
        )
        joint = catch(WithLoss(2), ids(), activations=activations, host_memory="16MiB")
        tight = joint.copy(budget_bytes=joint.plan.budget_bytes)
        tight.plan = tight.through(*passes).plan
        found.append(said(joint.through(*passes).graph))
    assert found[0] == found[1]


@pytest.mark.slow
def test_they_are_the_same_within_any_budget_that_cuts_nothing():
    joint = catch(WithLoss(1), ids())
    least = least_budget(joint)
    roomy = said(joint.through(*PASSES).graph)
    assert said(joint.copy(budget_bytes=4 * least).through(*PASSES).graph) == roomy


class Reads(nn.Module):
    """A large parameter and a small one that pointwise ops read, and dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Parameter(torch.ones(64, 64)), nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.exp(x) * self.small
        x = functional.dropout(x, 0.5)
        x = torch.exp(x) * self.large
        return torch.exp(x).sum()


def test_random_numbers_and_large_parameters_end_one(monkeypatch):
    monkeypatch.setattr(find_fusions, "MOST_READ", 1024)
    graph = catch(Reads(), torch.randn(64, 64)).through(*FOUND).graph
    forward = said(graph)[:3]
    assert forward[0] == ["exp.default", "mul.Tensor"]
    assert forward[1] == ["exp.default"], "dropout before it, and the large one behind it"
    assert forward[2] == ["exp.default", "sum.default"]
    for node in find(graph, aten.native_dropout.default, aten.bernoulli.p):
        assert fusion_of(node) is None


@pytest.mark.slow
def test_casts_of_parameters_and_of_their_gradients_are_no_members():
    with torch.autocast("cpu", torch.bfloat16):
        graph = catch(WithLoss(1), ids()).through(*FOUND).graph
    members = {node for nodes in fusions_of(graph.nodes).values() for node in nodes}
    for wait in find(graph, ops.wait):
        for reader in wait.users:
            if reader.target is aten._to_copy.default:
                assert reader not in members
    for sink in find(graph, *ops.SINKS):
        grad = sink.args[0]
        if grad.target is aten._to_copy.default and len(grad.users) == 1:
            assert grad not in members
    assert members


def test_a_long_run_is_cut(monkeypatch):
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(20):
                x = torch.sin(x * self.weight)
            return x.sum()

    monkeypatch.setattr(find_fusions, "MOST_NODES", 10)
    found = said(catch(Long(), torch.randn(4, 8)).through(*FOUND).graph)
    assert len(found) > 4
    assert max(map(len, found)) <= 10


@pytest.mark.parametrize(
    ("targets", "worth"),
    [
        ([aten.add.Tensor], False),  # one kernel either way, of the same bits
        ([aten._to_copy.default], False),
        ([aten.gelu.default], True),  # Inductor has bits of its own
        ([aten.sum.default], True),
        ([aten.add.Tensor, aten.mul.Tensor], True),
        ([aten.add.Tensor, aten.view.default], False),  # a view is no work
    ],
)
def test_what_is_worth_compiling(targets, worth):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    args = {
        aten.add.Tensor: (x, x),
        aten.mul.Tensor: (x, x),
        aten.view.default: (x, [-1]),
    }
    nodes = [graph.call_function(target, args.get(target, (x,))) for target in targets]
    assert is_worth_compiling(nodes) is worth


@pytest.mark.slow  # whoever trains with fusions in tests/frontend has some
def test_models_have_some():
    for build, given in MODELS.values():
        assert len(said(catch(build(), given(0)).through(*FOUND).graph)) > 5
