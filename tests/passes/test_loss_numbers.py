"""Tiles of a loss give stock code's numbers: over shapes, targets, reductions, and at the edges."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from joint import Joint, catch, results
from passes.test_tile_loss import TOLERANCE, assert_close
from sampled import sampled
from torch import Tensor, nn
from vocabularies import Head, Pattern, flat

from zcompile.ir.graph import find
from zcompile.passes.tile_loss import TileLoss
from zcompile.passes.tile_loss.match import SOFTMAX

CLASSES = 37


def tiled(joint: Joint, tile_bytes: int = 300) -> Joint:
    made = joint.through(TileLoss(tile_bytes))
    assert not find(made.graph, SOFTMAX)
    return made


def caught(targets: Tensor, model: nn.Module | None = None, **options: Any) -> Joint:
    torch.manual_seed(0)
    made = model or Head(flat(**options), bias=True, tied=False, classes=CLASSES)
    return catch(made, torch.randint(CLASSES, targets.shape), targets)


@pytest.mark.slow  # tests/passes/test_tile_loss.py has each form
@settings(max_examples=8, deadline=None)
@given(
    tokens=st.integers(1, 12),
    classes=st.integers(1, 45),  # of 12 tokens 2000 bytes hold 41
    seed=st.integers(0, 99),
    ignored=st.sampled_from([-100, -1, 0, 2]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    tile_bytes=st.sampled_from([0, 64, 200, 600, 2000]),
)
def test_numbers_are_those_of_stock_code(
    tokens, classes, seed, ignored, smoothing, reduction, tile_bytes
):
    source = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (1, tokens), generator=source)
    targets[torch.rand((1, tokens), generator=source) < 0.3] = ignored
    loss = flat(reduction=reduction, ignore_index=ignored, label_smoothing=smoothing)
    torch.manual_seed(seed)
    model = Head(loss, bias=bool(seed % 2), tied=bool(seed % 3), classes=classes)
    joint = catch(model, torch.randint(classes, (1, tokens), generator=source), targets)
    made = joint.through(TileLoss(tile_bytes))
    # Of one class, or two, the gradient is what is left of numbers around 1 that cancel.
    assert_close(results(made), results(joint), TOLERANCE[torch.float32], least=1.0)


def loss_of(found: dict[str, Any]) -> Tensor:
    return found["output 0"]


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}])
def test_without_a_valid_target_the_mean_is_nan_and_gradients_are_zero(options):
    joint = caught(torch.full((2, 4), -100), **options)
    found = results(tiled(joint))
    assert loss_of(found).isnan()
    assert_close(found, results(joint), 0.0)
    assert all(not value.any() for key, value in found.items() if key.startswith("grad"))


def test_classes_of_logit_minus_infinity_take_no_part():
    joint = caught(torch.randint(5, 15, (2, 4)))
    model = joint.model
    with torch.no_grad():
        bias = model.head.bias + 0
        bias[:5], bias[20:] = -torch.inf, -torch.inf  # whole tiles, the first among them
        model.head.bias.copy_(bias)
    found = results(tiled(joint))
    assert loss_of(found).isfinite()
    assert_close(found, results(joint), TOLERANCE[torch.float32])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_stays_none(value):
    joint = caught(torch.randint(CLASSES, (2, 4)))
    with torch.no_grad():
        bias = joint.model.head.bias + 0
        bias[7] = value
        joint.model.head.bias.copy_(bias)
    found = results(tiled(joint))
    assert loss_of(found).isnan()
    assert_close(found, results(joint), TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    "wrong", sampled([CLASSES, CLASSES + 1, -1, -CLASSES, 1 << 40], CLASSES, -1)
)
def test_a_target_that_is_no_class_is_refused_by_its_number(wrong):
    joint = caught(torch.zeros(2, 4, dtype=torch.int64))
    (given,) = [v for v in joint.values if _is_targets(v)]
    given[1, 2] = wrong
    for made in (joint, tiled(joint)):
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            results(made)


def _is_targets(value: object) -> bool:
    """The ids are random numbers, the targets zeros."""
    whole = isinstance(value, Tensor) and value.dtype is torch.int64 and value.dim() == 2
    return whole and not value.any()


@pytest.mark.parametrize(("scale", "times"), [(1e-3, 1), (1.0, 1), (300.0, 16)])
def test_large_and_small_logits_keep_their_numbers(scale, times):
    """Logits of 100 are rounded 16 times as coarsely as those of 6."""
    torch.manual_seed(0)
    model = Head(flat(), bias=True, tied=False, classes=CLASSES)
    with torch.no_grad():
        model.head.weight.mul_(scale)
    joint = caught(torch.randint(CLASSES, (2, 4)), model)
    assert_close(results(tiled(joint)), results(joint), times * TOLERANCE[torch.float32])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_tiles_are_as_near_to_the_truth_as_stock_code(smoothing):
    """The truth is f64; stock code is f32, and so are tiles. Wide enough that both round."""
    found = {}
    for dtype in (torch.float64, torch.float32):
        pattern = Pattern(flat(label_smoothing=smoothing), dtype=dtype)
        joint = catch(pattern.build(1000), *pattern.inputs(1000, 21))
        found[dtype] = results(joint)
    ours = results(tiled(joint, 32 * 1024))
    for key, exact in found[torch.float64].items():
        if isinstance(exact, Tensor) and exact.is_floating_point():
            stock, tiles = (
                (made[key].double() - exact).abs().max() for made in (found[torch.float32], ours)
            )
            assert tiles <= 4 * stock + 1e-7 * exact.abs().max(), key
