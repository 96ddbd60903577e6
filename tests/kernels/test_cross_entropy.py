"""Cross-entropy over tiles: kernels against formulas, formulas against torch, and the ops."""

from typing import Any

import pytest
import torch
from fences import DEVICE, Fenced
from kernels.mutants import changed, mutants
from sampled import crossed
from torch import Tensor, library
from torch.nn.functional import cross_entropy

from triton_kernels.cross_entropy import op, reference

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14}
"""Of sums of exponentials, in units of the largest: the order of a sum is another."""
STEP = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Of gradients, in units of the largest: one rounding to their dtype, which may fall otherwise."""
TOKENS, CLASSES = 7, 1000
TILES = [(0, 300), (300, 301), (301, 700), (700, 1000)]
IGNORED = -100


def drawn(dtype: torch.dtype = torch.float32, classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    logits = (torch.randn(TOKENS, classes, generator=source, dtype=torch.float64) * 3).to(dtype)
    target = torch.randint(0, classes, (TOKENS, 1), generator=source)
    target[2], target[4], target[5] = IGNORED, 0, classes - 1
    return logits, target


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def start(target: Tensor, dtype: torch.dtype) -> list[Tensor]:
    zero = torch.zeros(target.shape, dtype=dtype)
    return [torch.full_like(zero, torch.finfo(dtype).min), zero, zero, zero]


def seen(see: Any, logits: Tensor, target: Tensor, bounds: Any = TILES) -> list[Tensor]:
    """Greatest, total, picked and sum after all tiles."""
    state = start(target, wide(logits.dtype))
    for a, b in bounds:
        state = list(see(logits[:, a:b].contiguous(), target - a, *state))
    return state


def by_kernel(module: Any = None, with_sum: bool = True, columns: int = 0) -> Any:
    """`see_tile_and_sum` of the kernel, of operands between canaries."""
    from triton_kernels.cross_entropy import kernel

    def see(logits: Tensor, target: Tensor, *state: Tensor) -> list[Tensor]:
        fenced = Fenced()
        given = [fenced(logits, columns=columns), fenced(target), *map(fenced, state)]
        before = [x.clone() for x in given]
        *known, sum_before = given
        with fenced.around("empty_like"):
            made = (module or kernel).launch_see_tile(*known, sum_before if with_sum else None)
        fenced.hold()
        for x, y in zip(given, before, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
        return [x.cpu() for x in (*made, sum_before)[:4]]

    return see


def assert_same_sums(found: list[Tensor], wanted: list[Tensor], with_sum: bool = True) -> None:
    for n, (x, y) in enumerate(zip(found, wanted, strict=True)):
        if n < 3 or with_sum:
            most = float(y.nan_to_num(posinf=0, neginf=0).abs().max())
            step = TOLERANCE[y.dtype]
            torch.testing.assert_close(x, y, rtol=step, atol=step * most, equal_nan=True)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize(("dtype", "with_sum"), crossed(DTYPES, [True, False]))
def test_the_kernel_sees_what_its_formula_sees(dtype, with_sum):
    logits, target = drawn(dtype)
    wanted = seen(reference.see_tile_and_sum, logits, target)
    assert_same_sums(seen(by_kernel(None, with_sum), logits, target), wanted, with_sum)


@pytest.mark.parametrize("classes", [1, 2, 4095, 4096, 4097, 9000])
def test_tiles_of_any_width_are_seen(classes):
    logits, target = drawn(torch.float32, max(2, classes))
    logits, target = logits[:, :classes].contiguous(), target.clamp(max=classes - 1)
    bounds = [(0, classes)]
    wanted = seen(reference.see_tile_and_sum, logits, target, bounds)
    assert_same_sums(seen(by_kernel(), logits, target, bounds), wanted)


def test_rows_may_have_gaps_between_them():
    logits, target = drawn()
    wanted = seen(reference.see_tile_and_sum, logits, target)
    assert_same_sums(seen(by_kernel(columns=3), logits, target), wanted)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_no_number_is_seen_as_such(value):
    logits, target = drawn()
    logits[0, 5], logits[1, :301], logits[3, 299:] = value, value, value
    target[0], target[1] = 5, 400
    made = seen(by_kernel(), logits, target)
    wanted = seen(reference.see_tile_and_sum, logits, target)
    log_norm, right = (x[0] + x[1].log() for x in (made, wanted))
    torch.testing.assert_close(log_norm, right, equal_nan=True)
    # What cannot be told apart in torch either: the greatest of a row with nan in it.
    assert (
        log_norm.isnan().tolist()
        == [[value != -torch.inf]] * 2 + [[False]] + [[value != -torch.inf]] + [[False]] * 3
    )


def test_the_formulas_are_torchs_cross_entropy():
    logits, target = drawn(torch.float64)
    most, total, picked, everything = seen(reference.see_tile_and_sum, logits, target)
    log_norm = most + total.log()
    torch.testing.assert_close(log_norm, logits.logsumexp(1, keepdim=True))
    torch.testing.assert_close(everything, logits.sum(1, keepdim=True))
    valid = target != IGNORED
    torch.testing.assert_close(picked[valid], logits.gather(1, target.clamp(0))[valid])
    leaf = logits.clone().requires_grad_()
    smoothing = 0.1
    cross_entropy(leaf, target[:, 0], label_smoothing=smoothing).backward()
    share = valid.double() / valid.sum()
    up, spread = -(1 - smoothing) * share, -smoothing / CLASSES * share
    made = logits.clone()
    for a, b in TILES:
        tile = made[:, a:b]
        op.tile_gradient_(tile, target - a, log_norm, share, up, spread)
    torch.testing.assert_close(made, leaf.grad)


def gradients(
    make: Any, dtype: torch.dtype, picks: bool, spreads: bool, columns: int = 0
) -> tuple[Tensor, float]:
    """The gradient of all tiles, and its largest number."""
    logits, target = drawn(dtype)
    inner = wide(dtype)
    log_norm = logits.to(inner).logsumexp(1, keepdim=True)
    share = torch.full(target.shape, 0.25, dtype=inner).masked_fill(target == IGNORED, 0)
    given = [share, -share if picks else None, share / 64 if spreads else None]
    tiles = [make(logits[:, a:b].contiguous(), target - a, log_norm, *given) for a, b in TILES]
    return torch.cat(tiles, 1), 0.25


def made_by_kernel(module: Any = None, columns: int = 0) -> Any:
    from triton_kernels.cross_entropy import kernel

    def make(logits: Tensor, *others: Tensor | None) -> Tensor:
        fenced = Fenced()
        given = [x if x is None else fenced(x) for x in others]
        tile = fenced(logits, columns=columns)
        (module or kernel).launch_tile_gradient(tile, *given)
        fenced.hold()
        return tile.cpu()

    return make


def made_by_formula(logits: Tensor, *others: Tensor | None) -> Tensor:
    return reference.tile_gradient_(logits.clone(), *others)


@pytest.mark.parametrize(
    ("dtype", "made"), crossed(DTYPES, [(True, False), (True, True), (False, True)])
)
def test_the_kernel_makes_the_gradient_of_its_formula(dtype, made):
    picks, spreads = made
    wanted, largest = gradients(made_by_formula, dtype, picks, spreads)
    found, _ = gradients(made_by_kernel(), dtype, picks, spreads)
    torch.testing.assert_close(found, wanted, rtol=STEP[dtype], atol=STEP[dtype] * largest / 64)
    assert not found[2].any() or spreads, "an ignored token has no gradient"


def test_gradients_of_rows_with_gaps():
    wanted, _ = gradients(made_by_formula, torch.bfloat16, True, True)
    found, _ = gradients(made_by_kernel(columns=3), torch.bfloat16, True, True)
    torch.testing.assert_close(found, wanted)


def test_no_token_and_no_class():
    from triton_kernels.cross_entropy import kernel

    for tokens, classes in ((0, 5), (3, 0)):
        logits = torch.zeros(tokens, classes, device=DEVICE)
        target = torch.zeros(tokens, 1, dtype=torch.int64, device=DEVICE)
        zero = torch.zeros(tokens, 1, device=DEVICE)
        for x in kernel.launch_see_tile(logits, target, zero, zero, zero, zero):
            assert not x.any()
        kernel.launch_tile_gradient(logits, target, zero, zero, zero, zero)


def test_classes_that_are_not_side_by_side_are_refused():
    from triton_kernels.cross_entropy import kernel

    logits, zero = torch.zeros(5, 3, device=DEVICE).t(), torch.zeros(3, 1, device=DEVICE)
    with pytest.raises(ValueError, match=r"size \[3, 5\] and strides \[1, 3\]"):
        kernel.launch_tile_gradient(logits, zero.long(), zero, zero, None, None)


@pytest.mark.parametrize(("old", "new"), mutants("cross_entropy"))
def test_a_kernel_that_is_wrong_is_noticed(old, new, tmp_path):
    module = changed("cross_entropy", old, new, tmp_path)
    logits, target = drawn()
    logits = torch.cat([logits, logits - 5], 1)[:, : 2 * CLASSES]
    module.SEEN = 256

    def compare() -> None:
        for bounds in ([(0, 300)], [(0, 300), (300, 2 * CLASSES)]):
            wanted = seen(reference.see_tile_and_sum, logits, target, bounds)
            assert_same_sums(seen(by_kernel(module, columns=3), logits, target, bounds), wanted)
        for dtype in (torch.float32, torch.bfloat16):
            wanted, _ = gradients(made_by_formula, dtype, True, True)
            found, _ = gradients(made_by_kernel(module, columns=3), dtype, True, True)
            torch.testing.assert_close(found, wanted)

    with pytest.raises(AssertionError):
        compare()


def test_the_ops_keep_their_contracts():
    logits, target = (x.to(DEVICE) for x in drawn(torch.bfloat16, 40))
    state = [x.to(DEVICE) for x in start(target, torch.float32)]
    ops = torch.ops.triton_kernels
    library.opcheck(ops.see_tile.default, (logits, target, *state[:3]))
    library.opcheck(ops.see_tile_and_sum.default, (logits, target, *state))
    # Not as a part of what is traced: an op that returns what it writes has no functional form. It
    # is written into graphs that have been traced.
    kept = ("test_schema", "test_faketensor", "test_autograd_registration")
    given = (logits, target, *state[:2], state[0], None)
    library.opcheck(ops.tile_gradient_.default, given, test_utils=kept)


def test_an_op_returns_what_it_writes():
    logits, target = (x.to(DEVICE) for x in drawn(torch.bfloat16, 40))
    zero = torch.zeros(TOKENS, 1, device=DEVICE)
    made = op.tile_gradient_(logits, target, zero, zero, None, zero)
    assert made is logits
    assert not made.any()


def test_the_ops_are_what_their_formulas_are():
    logits, target = (x.to(DEVICE) for x in drawn())
    state = [x.to(DEVICE) for x in start(target, torch.float32)]
    found = op.see_tile(logits, target, *state[:3])
    wanted = reference.see_tile(logits, target, *state[:3])
    torch.testing.assert_close(list(found), list(wanted))
    torch.testing.assert_close(op.see_tile_and_sum(logits, target, *state)[3], logits.sum(1, True))
