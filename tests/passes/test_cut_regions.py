"""Compute between zinf ops is numbered, run by run, and no node moves."""

from itertools import takewhile

import pytest
import torch
from joint import captured, catch
from sampled import sampled
from small_models import SMALL_MODELS, UNALIKE
from torch import Tensor, nn

from zcompile.config import Config
from zcompile.ir import ops, printer
from zcompile.ir.graph import aliases_of, find, is_compute, phase_of, region_of
from zcompile.passes.cut_regions import CutRegions
from zcompile.passes.pipeline import pipeline

BEFORE = tuple(takewhile(lambda p: not isinstance(p, CutRegions), pipeline(Config(device="cpu"))))
PASSES = (*BEFORE, CutRegions())


def numbered(graph):
    rows = [f"{region_of(n) if is_compute(n) else '.':>3}  {printer.line(n)}" for n in graph.nodes]
    return "\n".join(rows) + "\n"


def test_regions_end_where_a_zinf_op_stands(golden):
    assert numbered(captured("mlp").through(*PASSES).graph) == golden


def test_a_view_that_two_regions_read_is_made_in_both(golden):
    assert numbered(captured("view in two places").through(*PASSES).graph) == golden


class ViewOfView(nn.Module):
    """A view made between two layers, of a view that was made before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 8))
        self.inner, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.weight.t()
        x = self.inner(torch.relu(x @ wide[:, :8]))
        half = wide[:, 8:]
        return self.other(torch.relu(x @ half)) @ half


def test_a_view_of_a_view_is_made_in_each_region_that_reads_it():
    graph = catch(ViewOfView(), torch.randn(4, 8)).through(*PASSES).graph  # and verified
    for wait in find(graph, ops.wait):
        for view in set(aliases_of(wait)) - {wait}:
            readers = {region_of(user) for user in view.users} - {None}
            assert readers <= {region_of(view)}


@pytest.mark.parametrize(
    "model",
    sampled(
        [m for m in SMALL_MODELS if m != "view in two places"],
        "transformer block",
        "tied embeddings",
        "bf16 autocast",
    ),
)
def test_cutting_moves_nothing(model):
    before = captured(model).through(*BEFORE)
    after = captured(model).through(*PASSES)
    assert printer.text(before.graph) == printer.text(after.graph)


@pytest.mark.parametrize("model", sampled(SMALL_MODELS, *UNALIKE))
def test_a_region_is_one_run_of_compute_in_one_phase(model):
    graph = captured(model).through(*PASSES).graph
    seen: list[int] = []
    for node in graph.nodes:
        region = region_of(node)
        assert (region is not None) == is_compute(node)
        if region is not None and (not seen or seen[-1] != region):
            seen.append(region)
    assert seen == sorted(set(seen)), "a region that was left is never entered again"
    phases = {region_of(n): phase_of(n) for n in graph.nodes if is_compute(n)}
    assert all(phases[region_of(n)] is phase_of(n) for n in graph.nodes if is_compute(n))
