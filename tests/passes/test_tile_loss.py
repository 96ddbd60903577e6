"""A loss over a vocabulary runs over tiles of it: same numbers within a tolerance, no logits."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from joint import Joint, assert_same, catch, results
from sampled import crossed, sampled, sampled_rows
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from vocabularies import (
    BATCH,
    CLASSES,
    KEPT,
    LENGTH,
    PARTS,
    TILED,
    WIDTH,
    Pattern,
    as_autocast_on_cuda,
    flat,
    of_part,
)

from zcompile.config import Config
from zcompile.ir import ops, printer
from zcompile.ir.graph import CASTS, find
from zcompile.memory.footprint import footprint
from zcompile.passes.pipeline import pipeline
from zcompile.passes.tile_loss import TileLoss
from zcompile.passes.tile_loss.match import LIKELIHOOD, SOFTMAX, SOFTMAX_BACKWARD

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 2**-7}
"""Largest difference, in units of the largest number of a result.

In f32 the exponentials of a row are summed in another order, which moves the log of their sum by
some units of 6e-8, and gradients of rows are summed over tiles. Products in bf16 round to 2^-9;
where stock code also rounds log-probabilities to bf16 and exponentiates them, a tile does not, so
the two are apart by two such roundings, of gradients of up to the largest."""
SMOOTHED_TOLERANCE = 3 * 2**-8
"""Where log-probabilities in bf16 are smoothed, the sum of their gradients is rounded too; a test
below holds how far both are from float64."""
functional = torch.nn.functional

MEDIUM, SMALL, TINY = 1600, 500, 150
"""Bytes of a piece of logits: some tiles; slices of tokens too; a few numbers at a time."""


@pytest.fixture(scope="module")
def caught():
    """The joint graph of a pattern, traced once, and what it gives."""
    found: dict[Any, tuple[Joint, dict[str, Any]]] = {}

    def of(pattern: Pattern, grad: bool) -> tuple[Joint, dict[str, Any]]:
        key = id(pattern), grad
        if key not in found:
            joint = catch(pattern.build(), *pattern.inputs(), grad=grad)
            found[key] = joint, results(joint)
        return found[key]

    return of


def assert_close(
    found: dict[str, Any], expected: dict[str, Any], tolerance: float, least: float = 0.0
) -> None:
    """least  what counts as the largest number of a result in which all are smaller"""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        other = found[key]
        assert (other.dtype, other.shape) == (value.dtype, value.shape), key
        assert torch.equal(value.isnan(), other.isnan()), key
        apart = (other.double() - value.double()).nan_to_num().abs().max()
        largest = max(least, float(value.double().nan_to_num().abs().max()))
        assert apart <= tolerance * largest, key


@pytest.mark.parametrize(
    ("name", "cast", "grad"),
    sampled_rows(
        product(PARTS, (False, True), (True, False)),
        *((name, at % 2 == 1, at % 4 < 3) for at, name in enumerate(PARTS)),
    ),
)
def test_what_reads_a_part_of_the_log_probabilities_keeps_them_all(name, cast, grad):
    """Nothing of it need be seen in backward."""
    pattern = Pattern(of_part(PARTS[name], cast), autocast=cast)
    joint = catch(pattern.build(), *pattern.inputs(), grad=grad)
    kept = joint.through(TileLoss(SMALL))
    assert len(kept.plan.notes) == 1
    assert_same(results(kept), results(joint))


@pytest.mark.parametrize("cast", [False, True])
def test_the_likelihood_of_some_tokens_keeps_the_log_probabilities_of_all(cast):
    """As the log-likelihood of a continuation is computed."""

    def continued(logits: Tensor, targets: Tensor) -> Tensor:
        rows = functional.log_softmax(logits, -1)
        rows = rows.float() if cast else rows
        return functional.nll_loss(rows[0, 2:], targets[0, 2:], reduction="sum")

    pattern = Pattern(continued, autocast=cast)
    joint = catch(pattern.build(), *pattern.inputs(), grad=False)
    kept = joint.through(TileLoss(SMALL))
    assert len(kept.plan.notes) == 1
    assert_same(results(kept), results(joint))


class SumWithItsOwnGradient(torch.autograd.Function):
    """Sums over the classes, of which every number gets the mean of their gradients."""

    @staticmethod
    def forward(context: Any, rows: Tensor) -> Tensor:
        context.shape = rows.shape
        return rows.sum(1)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:
        return grad.mean().view(1, 1).expand(context.shape)


def test_a_gradient_that_all_tokens_share_is_not_one_for_each_token():
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        rows = functional.log_softmax(logits.view(-1, logits.shape[-1]), -1)
        likelihood = functional.nll_loss(rows, targets.view(-1))
        return likelihood - 1e-3 * SumWithItsOwnGradient.apply(rows).square().mean()

    pattern = Pattern(loss)
    joint = catch(pattern.build(), *pattern.inputs())
    kept = joint.through(TileLoss(SMALL))
    assert len(kept.plan.notes) == 1
    assert_same(results(kept), results(joint))


def tolerance_of(pattern: Pattern) -> float:
    if pattern is TILED["autocast of CUDA, smoothed"]:
        return SMOOTHED_TOLERANCE
    return TOLERANCE[torch.bfloat16 if pattern.autocast else pattern.dtype]


@pytest.mark.parametrize(
    ("name", "grad", "tile_bytes"), crossed(TILED, (True, False), (SMALL, MEDIUM, TINY))
)
def test_every_form_is_tiled_and_keeps_its_numbers(name, grad, tile_bytes, caught):
    joint, expected = caught(TILED[name], grad)
    tiled = joint.through(TileLoss(tile_bytes))
    logits = find(tiled.graph, SOFTMAX, SOFTMAX_BACKWARD)
    assert not tiled.plan.notes
    assert not logits or all(kept.meta["val"].nbytes <= tile_bytes for kept in logits)
    assert_close(results(tiled), expected, tolerance_of(TILED[name]))


@pytest.mark.parametrize(
    "name", sampled(["autocast of CUDA", "autocast of CUDA, smoothed"], "autocast of CUDA")
)
def test_tiles_of_narrow_log_probabilities_are_as_near_to_float64_as_stock_code(name, caught):
    pattern = TILED[name]
    joint, stock = caught(pattern, True)
    exact = results(catch(replace(pattern, autocast=False).build().double(), *pattern.inputs()))
    tiled = results(joint.through(TileLoss(TINY)))

    def apart(found: dict[str, Any], key: str) -> float:
        whole = exact[key].double()
        return float((found[key].double() - whole).abs().max() / whole.abs().max())

    for key in exact:
        if key.startswith("grad"):
            assert apart(tiled, key) <= apart(stock, key) + 2**-9, key


FEW = ["smoothed", "tied with bias", "sliced, two calls", "bf16 autocast, smoothed"]


@pytest.mark.parametrize("name", sampled(TILED, *FEW[1:3]))
def test_the_rest_of_the_pipeline_keeps_the_numbers_of_the_tiles(name, caught):
    joint, _ = caught(TILED[name], True)
    tiled = joint.through(TileLoss(SMALL))
    later = [pass_ for pass_ in pipeline(Config(device="cpu")) if pass_.name != TileLoss.name]
    assert_same(results(joint.through(TileLoss(SMALL), *later)), results(tiled))


def per_token_and_class(graph: fx.Graph) -> list[str]:
    """Values as large as the logits of all tokens but the last, or larger."""
    return [
        node.name
        for node in graph.nodes
        for value in [node.meta.get("val")]
        if isinstance(value, Tensor) and value.numel() >= BATCH * (LENGTH - 1) * CLASSES
    ]


@pytest.mark.parametrize(
    ("name", "grad"),
    sampled_rows(
        product(TILED, (True, False)), *((name, True) for name in FEW[:2]), ("mean", False)
    ),
)
def test_no_value_has_a_number_per_token_and_class(name, grad, caught):
    joint, _ = caught(TILED[name], grad)
    assert CLASSES * WIDTH < BATCH * (LENGTH - 1) * CLASSES, "a weight is smaller than logits"
    assert per_token_and_class(joint.graph)
    assert not per_token_and_class(joint.through(TileLoss(SMALL)).graph)
    assert not per_token_and_class(
        joint.through(TileLoss(SMALL), *pipeline(Config(device="cpu"))).graph
    )


def test_the_peak_falls_by_the_logits_but_for_one_piece_of_them():
    classes, length, tile_bytes = 4096, 64, 64 * 1024
    pattern = TILED["mean"]
    joint = catch(pattern.build(classes), *pattern.inputs(classes, length))
    logits = BATCH * length * classes * 4
    tiled = joint.through(TileLoss(tile_bytes))
    before, after = (
        footprint(made.graph, made.plan.params, slots=True).peak for made in (joint, tiled)
    )
    weights_and_gradients = 4 * classes * WIDTH * 4
    assert before > 2 * logits
    assert after < weights_and_gradients + 3 * tile_bytes


@pytest.mark.parametrize("name", KEPT)
def test_what_cannot_be_tiled_is_kept_bit_by_bit_and_a_note_says_why(name, caught):
    pattern, why = KEPT[name]
    joint, expected = caught(pattern, True)
    kept = joint.through(TileLoss(SMALL))
    (note,) = kept.plan.notes
    assert why in note.text
    assert "2220 bytes" in note.text
    assert note.node in [node.name for node in kept.graph.nodes]
    assert_same(results(kept), expected)


@pytest.mark.parametrize("name", ["bias", "bf16 autocast", "tied", "smoothed, tied"])
def test_each_tile_of_the_weights_gradient_leaves_at_once(name, caught):
    pattern = Pattern(flat(label_smoothing=0.1), tied=True) if name not in TILED else TILED[name]
    joint, expected = caught(pattern, True)
    tiled = joint.through(TileLoss(SMALL))
    tiles = find(tiled.graph, ops.reduce_tile)
    (handle,) = {tile.args[1] for tile in tiles}
    sizes = [tile.args[0].meta["val"].numel() for tile in tiles]
    assert tiled.plan.params[handle.name].name in ("head.weight", "embedding.weight")
    assert [tile.args[2] for tile in tiles] == [sum(sizes[:n]) for n in range(len(sizes))]
    assert sum(sizes) == CLASSES * WIDTH
    assert len(sizes) > 1
    assert all(tile.args[0].meta["val"].dtype is torch.float32 for tile in tiles)
    for tile, following in pairwise(tiles):
        assert tile.args[0] < tile < following.args[0], "it leaves before the next is made"
    assert_close(results(tiled), expected, tolerance_of(pattern))


def test_small_logits_are_left_alone_to_the_last_bit(caught):
    joint, _ = caught(TILED["mean"], True)
    for pass_ in (TileLoss(4 * BATCH * LENGTH * CLASSES), TileLoss()):
        left = joint.through(pass_)
        assert printer.text(left.graph) == printer.text(joint.graph)
        assert not left.plan.notes


def test_without_tile_bytes_the_budget_decides(caught):
    joint, _ = caught(TILED["mean"], True)
    nbytes = 4 * BATCH * LENGTH * CLASSES
    for budget, softmaxes in ((8 * nbytes, 1), (8 * nbytes - 8, 0)):
        made = joint.copy(budget_bytes=budget).through(TileLoss())
        assert len(find(made.graph, SOFTMAX)) == softmaxes


def test_forward_and_backward_of_a_loss_in_two_tiles(golden):
    pattern = TILED["mean"]
    joint = catch(pattern.build(), *pattern.inputs())
    assert joint.through(TileLoss(1300)).text == golden


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_what_autocast_on_cuda_makes_of_cross_entropy_is_among_the_forms(smoothing):
    def loss(rows: Tensor, targets: Tensor) -> Tensor:
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_enabled("cuda", True)  # the context manager asks for a card
        try:
            with torch.no_grad():  # a tensor without memory on a card that is not there has no grad
                return flat(label_smoothing=smoothing)(rows, targets)
        finally:
            torch.set_autocast_enabled("cuda", False)

    def forward_of(model: Callable[..., Any], dtype: torch.dtype, device: str) -> list[Any]:
        with FakeTensorMode():
            logits = torch.empty(BATCH * LENGTH, CLASSES, dtype=dtype, device=device)
            targets = torch.zeros(BATCH * LENGTH, dtype=torch.int64, device=device)
            traced = make_fx(model)(logits, targets)
        return [
            (node.target, node.kwargs)
            for node in traced.graph.nodes
            if node.target in {SOFTMAX, LIKELIHOOD, *CASTS}
            or (node.target is torch.ops.aten.sum.dim_IntList)
        ]

    ours = forward_of(as_autocast_on_cuda(smoothing), torch.bfloat16, "cpu")
    assert [target for target, _ in ours][:3] == [SOFTMAX, *CASTS, LIKELIHOOD]
    assert forward_of(loss, torch.bfloat16, "cuda") == ours
