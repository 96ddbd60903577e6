"""Tiles of a loss by kernels: the same graph but for what follows the products, the same numbers.

The kernels' ops are their formulas on the CPU; that the kernels compute these is tested in
`tests/kernels`.
"""

from typing import Any

import pytest
import torch
from joint import Joint, assert_same, catch, results
from passes.test_tile_loss import SMALL, assert_close, per_token_and_class, tolerance_of
from sampled import sampled
from vocabularies import TILED

import zcompile
from zcompile.config import Config
from zcompile.ir.graph import find
from zcompile.passes import pipeline as pipelines
from zcompile.passes.pipeline import pipeline
from zcompile.passes.tile_loss import TileLoss

ops = torch.ops.triton_kernels
SEE = (ops.see_tile.default, ops.see_tile_and_sum.default)
MAKE = ops.tile_gradient_.default


@pytest.fixture(scope="module")
def caught():
    """The joint graph of a pattern, traced once, and what it gives."""
    found: dict[str, tuple[Joint, dict[str, Any]]] = {}

    def of(name: str) -> tuple[Joint, dict[str, Any]]:
        if name not in found:
            joint = catch(TILED[name].build(), *TILED[name].inputs())
            found[name] = joint, results(joint)
        return found[name]

    return of


FEW = [
    "ignored class",
    "smoothed none",
    "tied with bias",
    "sliced, two calls",
    "bf16 autocast, smoothed",
]


@pytest.mark.parametrize("name", sampled(TILED, *FEW))
def test_every_form_keeps_its_numbers(name, caught):
    joint, expected = caught(name)
    plain, fused = (joint.through(TileLoss(SMALL, fused)) for fused in (False, True))
    mm = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    assert len(find(fused.graph, *mm)) == len(find(plain.graph, *mm))
    tiles = len(find(fused.graph, MAKE))
    assert tiles > 1
    assert tiles == len(find(fused.graph, *SEE))
    assert len(fused.graph.nodes) < len(plain.graph.nodes) - 8 * tiles
    assert not per_token_and_class(fused.graph)
    assert_close(results(fused), expected, tolerance_of(TILED[name]))


@pytest.mark.parametrize("name", sampled(["bias", "bf16 autocast", "tied"], "tied"))
def test_the_rest_of_the_pipeline_keeps_the_numbers_of_the_kernels(name, caught):
    joint, _ = caught(name)
    fused = joint.through(TileLoss(SMALL, True))
    later = [pass_ for pass_ in pipeline(Config(device="cpu")) if pass_.name != TileLoss.name]
    made = joint.through(TileLoss(SMALL, True), *later)
    assert_same(results(made), results(fused))
    assert find(made.graph, MAKE)


def test_what_writes_in_place_is_read_by_what_it_returns(caught):
    """So that every pass sees who comes first: no reader of the logits but the op."""
    joint, _ = caught("bf16 autocast")
    for node in find(joint.through(TileLoss(SMALL, True)).graph, MAKE):
        assert list(node.args[0].users) == [node]
        assert node.users


def test_on_the_cpu_device_torchs_ops_compute_tiles():
    (first, *_) = pipeline(Config(device="cpu"))
    assert first == TileLoss(None, fused=False)


@pytest.mark.parametrize(("kernels", "fused"), [("auto", True), ("stock", False), ("triton", True)])
def test_kernels_compute_tiles_where_they_run_unless_stock_is_asked_for(
    kernels, fused, monkeypatch
):
    monkeypatch.setattr("zcompile.config.missing", lambda device: "")
    (first, *_) = pipelines.pipeline(Config(device="cpu", kernels=kernels))
    assert first == TileLoss(None, fused=fused)


def test_a_model_trains_by_the_ops_of_kernels(monkeypatch, tmp_path):
    """Through the real door: schedules, proofs and the executor take ops of ours as any other."""
    monkeypatch.setattr("zcompile.config.missing", lambda device: "")
    pattern, losses = TILED["bf16 autocast"], []
    inputs = pattern.inputs()
    for offloads in (False, True):
        torch.manual_seed(0)
        model = call = pattern.build()
        if offloads:
            zcompile.offload(
                model, device="cpu", tile_bytes=2 * SMALL, dump=tmp_path, kernels="triton"
            )
            torch._dynamo.reset()
            call = torch.compile(model, backend="zinf")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss = call(*inputs)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses, rtol=2**-7, atol=0)
    told = [text.read_text() for text in tmp_path.rglob("*.txt")]
    assert any("triton_kernels.tile_gradient_" in text for text in told)
