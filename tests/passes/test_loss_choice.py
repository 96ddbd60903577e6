"""How a loss is cut: a table of cases, and what holds of every cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcompile.ir.units import GiB, MiB
from zcompile.passes.tile_loss.tiled import ALIGNED, NARROWEST, Cut, choose_cut, even

F32 = 4
BF16_AND_F32 = 8


def cut(tokens: int, classes: int, width: int, tile_bytes: int, logit: int = F32) -> Cut | None:
    return choose_cut(F32 * tokens * classes, tokens, classes, logit, F32 * width, tile_bytes)


@pytest.mark.parametrize(
    ("tokens", "classes", "width", "tile_bytes", "logit", "chosen"),
    [
        (8, 100, 16, 3200, F32, None),  # the logits just fit
        (8, 100, 16, 3199, F32, Cut(20, 8)),  # they do not: five tiles, of 24 classes at most
        (8, 100, 16, 1600, F32, Cut(12, 8)),  # two rows of the weight count too: 12 classes at most
        (800, 100, 16, 1600, F32, Cut(12, 32)),  # then tokens are cut as well
        (800, 100, 16, 1, F32, Cut(1, 1)),  # no room at all: the least there is
        (4096, 131072, 512, 256 * MiB, F32, Cut(16384, 4096)),
        (4096, 131072, 512, 64 * MiB, F32, Cut(4096, 4096)),
        (4096, 131072, 512, 64 * MiB, BF16_AND_F32, Cut(2048, 4096)),  # as bf16, f32 and bf16 again
        (
            4096,
            131072,
            512,
            2 * MiB,
            F32,
            Cut(NARROWEST, 2048),
        ),  # rather fewer tokens than narrower
        (
            4096,
            131072,
            16384,
            64 * MiB,
            F32,
            Cut(512, 4096),
        ),  # rows so wide that two tiles just fit
        (0, 131072, 512, 1 * MiB, F32, None),  # no token at all
        (4096, 131072, 512, 2 * GiB, F32, None),
    ],
)
def test_cuts(tokens, classes, width, tile_bytes, logit, chosen):
    assert cut(tokens, classes, width, tile_bytes, logit) == chosen


SIZES = st.integers(1, 300_000)


@given(SIZES, SIZES, st.integers(1, 20_000), st.integers(1, 1 << 30), st.sampled_from([4, 8, 12]))
def test_a_cut_fits_wherever_the_least_does(tokens, classes, width, tile_bytes, logit):
    chosen = cut(tokens, classes, width, tile_bytes, logit)
    if chosen is None:
        assert F32 * tokens * classes <= tile_bytes
        return
    assert 1 <= chosen.classes <= classes
    assert 1 <= chosen.tokens <= tokens
    assert chosen.classes * chosen.tokens * logit <= tile_bytes or chosen.tokens == 1
    assert 2 * chosen.classes * F32 * width <= tile_bytes or chosen.classes == 1


@given(SIZES, SIZES)
def test_pieces_are_even(whole, most):
    size = even(whole, most)
    pieces = -(-whole // size)
    assert 1 <= size <= min(whole, most)
    assert size == whole or most < ALIGNED or size % ALIGNED == 0
    assert pieces == -(-whole // (most if most < ALIGNED or most >= whole else most // 64 * 64))
