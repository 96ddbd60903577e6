"""What does not fit is cut into tiles: the same numbers, and nothing else of the graph changes."""

import functools
import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from joint import (
    Joint,
    assert_same,
    captured,
    catch,
    refused_after_trials,
    results,
)
from sampled import sampled, sampled_rows
from small_models import SMALL_MODELS, UNALIKE, Tied
from torch import fx, nn

import zcompile
from zcompile.ir import ops, printer
from zcompile.ir.graph import KEEP_DIMS, find, output_of, phase_of
from zcompile.ir.plan import GraphPlan, layout_of_fetch
from zcompile.ir.types import Phase
from zcompile.memory.footprint import footprint
from zcompile.passes.base import Fact, Pass
from zcompile.passes.choose_tiles import ChooseTiles
from zcompile.passes.pipeline import pipeline
from zcompile.passes.split_budget import SplitBudget
from zcompile.passes.tile_matmuls import TileMatmuls

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""Of the largest value, or of 1, since what it is a sum of is near that. A sum over tiles rounds
once per tile, here some tens of times; bfloat16 keeps 8 bits, so that each value is off by 2^-9."""


def in_tiles(tile_bytes: int | None = None) -> tuple[Pass, ...]:
    """Cut what is larger than `tile_bytes`, or than the budget; nothing is tried out."""
    return ChooseTiles(tile_bytes), TileMatmuls(tile_bytes)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.last = nn.Conv2d(8, 6, 3, bias=False)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


class Experts(nn.Module):
    """Batched weights: all at once, transposed, and one of them."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(6, 4, 8))
        self.down = nn.Parameter(torch.randn(6, 4, 8))

    def forward(self, x):
        hidden = torch.bmm(x, self.up)
        return torch.bmm(hidden, self.down.transpose(1, 2)), x[0] @ self.up[1], x[1] @ self.up[4]


class Transposed(nn.Module):
    """As GPT-2's Conv1D: the weight is [in, out]."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 12))
        self.bias = nn.Parameter(torch.randn(12))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


class Pieces(nn.Module):
    """One parameter for three, as fused projections are."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 8))

    def forward(self, x):
        q, k, v = self.weight[:8], self.weight[8:16], self.weight[16:]
        return x @ q.t(), x @ k.t(), x @ v.t()


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


MODELS = {
    "tied": lambda: (Tied(24, padding_idx=3), torch.randint(0, 24, (2, 7), generator=generator())),
    "convolutions": lambda: (
        Convolutions(),
        torch.randn(2, 3, 6, 6, generator=generator(), requires_grad=True),
    ),
    "experts": lambda: (
        Experts(),
        torch.randn(6, 5, 4, generator=generator(), requires_grad=True),
    ),
    "transposed": lambda: (Transposed(), torch.randn(5, 16, requires_grad=True)),
    "pieces": lambda: (Pieces(), torch.randn(5, 8, requires_grad=True)),
}


@functools.cache
def joint_of(name: str) -> Joint:
    """Traced once; rewrite copies of it."""
    if name in SMALL_MODELS:
        return captured(name)
    torch.manual_seed(0)
    return catch(*MODELS[name]())


def weight_tiles(joint: Joint) -> dict[str, list[int]]:
    """Rows of each gather of a part of a parameter, by its name."""
    found: dict[str, list[int]] = {}
    for gather in find(joint.graph, ops.gather):
        spec, brings = joint.plan.spec_of(gather), layout_of_fetch(gather)
        if brings.size != spec.layout.size:
            found.setdefault(spec.name, []).append(brings.size[0])
    return found


def assert_close(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            limit = TOLERANCE[value.dtype] * max(1.0, float(value.abs().max()))
            if any(v.dtype is torch.bfloat16 for v in expected.values() if torch.is_tensor(v)):
                limit *= TOLERANCE[torch.bfloat16] / TOLERANCE[value.dtype]
            assert float((found[key] - value).abs().max()) <= limit, key
        else:
            assert_same({key: found[key]}, {key: value})


def test_a_linear_layer_is_cut_along_its_outputs(golden):
    joint = captured("mlp").through(*in_tiles(512))
    assert joint.text == golden


def test_tiles_go_through_all_passes(golden):
    joint = captured("mlp").through(*pipeline(zcompile.Config(device="cpu", tile_bytes=512)))
    assert joint.text == golden


TILE_BYTES = (64, 200, 512)


@pytest.mark.parametrize(
    ("name", "tile_bytes"),
    sampled_rows(
        itertools.product([*SMALL_MODELS, *MODELS], TILE_BYTES),
        *(
            (name, TILE_BYTES[at % len(TILE_BYTES)])
            for at, name in enumerate([*SMALL_MODELS, *MODELS])
            if name != "gpt"  # as a transformer block is
        ),
    ),
)
def test_tiles_mean_what_the_whole_means(name, tile_bytes):
    joint = joint_of(name)
    assert_close(results(joint.through(*in_tiles(tile_bytes))), results(joint))


@pytest.mark.parametrize("name", sampled([*SMALL_MODELS, *MODELS], *UNALIKE, *MODELS))
def test_what_follows_changes_no_bit_of_it(name):
    joint = joint_of(name)
    whole = joint.through(*pipeline(zcompile.Config(device="cpu", tile_bytes=200)))
    assert_same(results(whole), results(joint.through(*in_tiles(200))))


@pytest.mark.parametrize("name", ["experts", "pieces", "tied", "convolutions", "transposed"])
def test_every_weight_over_the_limit_is_cut_and_every_tile_keeps_it(name):
    joint = joint_of(name)
    tiled = joint.through(*in_tiles(200))
    large = {s.name for s in joint.plan.params.values() if s.nbytes > 200}
    assert set(weight_tiles(tiled)) == large
    assert not tiled.plan.notes
    for gather in find(tiled.graph, ops.gather):
        brings = layout_of_fetch(gather)
        if brings.size != joint.plan.spec_of(gather).layout.size:
            assert brings.nbytes <= max(100, brings.nbytes // brings.size[0])


@pytest.mark.parametrize("name", sampled([*SMALL_MODELS, *MODELS], *UNALIKE, *MODELS))
def test_with_room_for_everything_nothing_changes(name):
    joint = joint_of(name)
    roomy = joint.copy(budget_bytes=2**30)
    assert printer.text(roomy.through(*in_tiles()).graph) == printer.text(joint.graph)


def test_only_what_the_budget_cannot_hold_is_cut():
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 4))
    joint = catch(model, torch.randn(3, 8))
    tiled = joint.copy(budget_bytes=1536).through(*in_tiles())
    assert set(weight_tiles(tiled)) == {"0.weight", "2.weight"}


@dataclass(frozen=True)
class RoomForValues(Pass):
    """What the graph holds is given to it on top of the budget, which is all for weights then."""

    name: ClassVar[str] = "room-for-values"
    needs: ClassVar[frozenset[Fact]] = frozenset()
    gives: ClassVar[frozenset[Fact]] = frozenset()

    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        held = footprint(graph, plan.params).peak
        return replace(plan, budget_bytes=plan.budget_bytes + held)


@pytest.mark.parametrize("name", ["mlp", "gpt", "tied", "experts", "transposed", "convolutions"])
def test_a_quarter_of_what_a_model_needed_will_do(name):
    joint = joint_of(name)
    passes = [
        replace(p, trial=None) if isinstance(p, ChooseTiles) else p
        for p in pipeline(zcompile.Config(device="cpu"))
    ]
    split = next(n for n, p in enumerate(passes) if isinstance(p, SplitBudget))
    largest = max(s.nbytes for s in joint.plan.params.values())
    budget = max(2048, largest // 4)
    tiled = joint.copy(budget_bytes=budget).through(
        *passes[:split], RoomForValues(), *passes[split:]
    )
    assert tiled.plan.budget_bytes == budget, "what weights have, beside what the graph holds"
    assert_close(results(tiled), results(joint))


@pytest.mark.parametrize(
    "name",
    sampled(
        ["mlp", "gpt", "tied", "experts", "transposed", "convolutions"], "tied", "convolutions"
    ),
)
def test_what_is_computed_is_given_room_by_finer_tiles(name):
    joint = joint_of(name)
    passes = pipeline(zcompile.Config(device="cpu"))
    refused = refused_after_trials(lambda n: joint.copy(budget_bytes=n).through(*passes), 1024)
    tiled = joint.copy(budget_bytes=refused.needed_bytes).through(*passes)
    taken = footprint(tiled.graph, tiled.plan.params).peak + tiled.plan.least_bytes
    assert taken <= refused.needed_bytes
    assert_close(results(tiled), results(joint))


def test_a_tile_of_the_gradient_leaves_before_the_next_is_made():
    joint = captured("mlp").through(*pipeline(zcompile.Config(device="cpu", tile_bytes=512)))
    sinks = find(joint.graph, ops.reduce_tile)
    assert len(sinks) > 2
    for first, second in itertools.pairwise(sinks):
        if first.args[1] is second.args[1]:
            assert first < second.args[0]


def test_the_last_tile_stands_for_the_gradient():
    joint = captured("mlp").through(*in_tiles(512))
    (returned,) = output_of(joint.graph).args
    tiles = [n for n in returned if getattr(n, "target", None) is ops.reduce_tile]
    assert len(tiles) == 2
    assert {phase_of(n) for n in find(joint.graph, ops.reduce_tile)} == {Phase.BACKWARD}


def test_each_use_of_a_weight_is_a_contribution_of_its_own():
    joint = joint_of("tied").through(*in_tiles(200))
    offsets = [n.args[2] for n in find(joint.graph, ops.reduce_tile)]
    assert offsets == sorted(set(offsets)) * 2


@pytest.mark.parametrize("name", ["experts", "pieces"])
def test_what_is_a_few_rows_of_a_gradient_is_put_together_in_the_graph(name):
    joint = joint_of(name).through(*in_tiles(200))
    for handle in {n.args[1] for n in find(joint.graph, ops.reduce_tile)}:
        tiles = [n for n in find(joint.graph, ops.reduce_tile) if n.args[1] is handle]
        elements = sum(n.args[0].meta["val"].numel() for n in tiles)
        size = joint.plan.params[handle.name].layout.numel
        assert elements == size


def test_what_cannot_be_tiled_stays_whole_and_a_note_says_so():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16))

        def forward(self, x):
            return x * self.weight

    joint = catch(Norm(), torch.randn(16, 16))
    tiled = joint.through(*in_tiles(512))
    assert printer.text(tiled.graph) == printer.text(joint.graph)
    (note,) = tiled.plan.notes
    assert "'weight' is gathered whole: %mul cannot be computed over tiles of it" in note.text


def test_ids_that_no_row_has_are_refused():
    joint = joint_of("tied").through(*in_tiles(200))
    for wrong in (-1, 24):
        values = [
            v.fill_(wrong) if torch.is_tensor(v) and v.dtype is torch.int64 and v.dim() else v
            for v in joint.copy().values
        ]
        broken = joint.copy()
        broken.values = values
        with pytest.raises(IndexError, match="out of range"):
            results(broken)


def test_no_constant_tells_tiles_apart_inside_of_a_region():
    joint = captured("mlp").through(*pipeline(zcompile.Config(device="cpu", tile_bytes=512)))
    for node in joint.graph.nodes:
        if node.op == "call_function" and node.target in KEEP_DIMS:
            assert "slice" not in str(node.target)
