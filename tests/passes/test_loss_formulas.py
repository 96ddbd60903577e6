"""The functions of one tile, run over all tiles in plain torch, give torch's cross-entropy."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from zcompile.passes.tile_loss import formulas
from zcompile.passes.tile_loss.formulas import IGNORED, Slice

TOKENS, WIDTH, CLASSES, TILE = 6, 5, 11, 4
BOUNDS = [(a, min(a + TILE, CLASSES)) for a in range(0, CLASSES, TILE)]
SOURCE = torch.Generator().manual_seed(0)


def random(*size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, generator=SOURCE, dtype=torch.float64).to(dtype)


ROWS, WEIGHT, BIAS = random(TOKENS, WIDTH), random(CLASSES, WIDTH), random(CLASSES)
TARGETS = torch.tensor([0, 10, -100, 4, 3, 7])


def part(bias, a, b):
    return None if bias is None else bias[a:b]


def seen_all(rows, weight, bias, dtype, with_sum=False):
    seen = formulas.nothing_seen(TARGETS.unsqueeze(1), dtype, with_sum)
    for a, b in BOUNDS:
        seen = formulas.see_tile(seen, rows, weight[a:b], part(bias, a, b), dtype)
    return seen


@pytest.mark.parametrize("bias", [None, BIAS])
def test_tiles_seen_one_after_the_other_give_the_log_softmax(bias):
    seen = seen_all(ROWS, WEIGHT, bias, torch.float64, with_sum=True)
    expected = formulas.logits_of(ROWS, WEIGHT, bias).log_softmax(1)
    log_norm = formulas.log_norm_of(seen)
    picked = formulas.log_prob_of(seen.picked, log_norm, torch.float32)
    valid = TARGETS >= 0
    wanted = expected.gather(1, TARGETS.clamp(0).unsqueeze(1))
    assert picked.dtype is torch.float32
    torch.testing.assert_close(picked[valid], wanted[valid].float())
    summed = formulas.summed_log_probs(seen.sum, log_norm, CLASSES, torch.float64)
    torch.testing.assert_close(summed, expected.sum(1))


def test_one_tile_is_seen_with_the_greatest_logit_of_the_log_softmax():
    """To the last bit: sums of one tile are the library's own."""
    seen = formulas.nothing_seen(TARGETS.unsqueeze(1), torch.float64, False)
    seen = formulas.see_tile(seen, ROWS, WEIGHT, None, torch.float64)
    logits = ROWS @ WEIGHT.t()
    assert torch.equal(seen.greatest, logits.amax(1, keepdim=True))
    assert torch.equal(seen.total, (logits - seen.greatest).exp().sum(1, keepdim=True))


def test_logits_of_minus_infinity_alone_make_no_nan_until_a_tile_has_others():
    bias = torch.where(torch.arange(CLASSES) < TILE, -torch.inf, BIAS)
    seen = seen_all(ROWS, WEIGHT, bias, torch.float64)
    expected = torch.logsumexp(formulas.logits_of(ROWS, WEIGHT, bias), 1, keepdim=True)
    torch.testing.assert_close(formulas.log_norm_of(seen), expected)


def test_exponentials_of_narrow_logits_are_summed_in_the_dtype_of_the_tiles():
    rows, weight = ROWS.bfloat16(), WEIGHT.bfloat16()
    seen = seen_all(rows, weight, None, torch.float32)
    expected = torch.logsumexp((rows @ weight.t()).float(), 1, keepdim=True)
    torch.testing.assert_close(formulas.log_norm_of(seen), expected)


def test_targets_over_one_class_say_which_are_valid_ignored_or_out_of_range():
    targets = torch.tensor([0, CLASSES - 1, CLASSES, -1, -100])
    made = formulas.one_class(targets, CLASSES, -100)
    assert made.tolist() == [0, 0, CLASSES, -1, IGNORED]
    assert formulas.one_class(torch.tensor([2]), CLASSES, 2).tolist() == [IGNORED]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [None, BIAS])
def test_gradients_of_all_tiles_are_those_of_cross_entropy(smoothing, bias):
    given = [x if x is None else x.clone().requires_grad_() for x in (ROWS, WEIGHT, bias)]
    logits = formulas.logits_of(*given)
    cross_entropy(logits, TARGETS, label_smoothing=smoothing).backward()
    valid = (TARGETS >= 0).unsqueeze(1).double()
    # Gradients of the log-probabilities, as torch's own backward hands them to the log-softmax.
    picked = -(1 - smoothing) / valid.sum() * valid
    spread = -smoothing / CLASSES / valid.sum() * valid if smoothing else None
    log_norm = formulas.log_norm_of(seen_all(ROWS, WEIGHT, bias, torch.float64))
    loses = formulas.factor_of_exponentials(picked, spread, CLASSES)
    pieces = [
        Slice._make(None if x is None else x[a:b] for x in whole)
        for whole in [(ROWS, TARGETS.unsqueeze(1), log_norm, picked, spread, loses)]
        for a, b in ((0, 4), (4, TOKENS))
    ]
    of_rows, of_weight, of_bias = [None, None], [], []
    for a, b in BOUNDS:
        tiles = []
        for n, piece in enumerate(pieces):
            made, target = formulas.tile_gradient(
                piece, WEIGHT[a:b], part(bias, a, b), torch.float64
            )
            pieces[n] = piece._replace(target=target)
            of_rows[n] = formulas.add_product(of_rows[n], made, WEIGHT[a:b], torch.float64)
            tiles.append(made)
        rows = [piece.rows for piece in pieces]
        of_weight.append(formulas.weight_gradient(tiles, rows, torch.float64))
        of_bias.append(formulas.bias_gradient(tiles, torch.float64))
    found = torch.cat(of_rows), torch.cat(of_weight), torch.cat(of_bias, 1)[0]
    for value, leaf in zip(found, given, strict=True):
        if leaf is not None:
            torch.testing.assert_close(value, leaf.grad)


def test_sums_of_narrow_products_are_kept_in_the_dtype_of_the_tiles():
    left, right = random(4, 3, dtype=torch.bfloat16), random(3, 2, dtype=torch.bfloat16)
    once = formulas.add_product(None, left, right, torch.float32)
    twice = formulas.add_product(once, left, right, torch.float32)
    assert torch.equal(twice, 2 * (left @ right).float())
