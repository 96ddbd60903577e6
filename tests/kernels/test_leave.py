"""Many gradients packed into one buffer: the kernel against its formula, and the op."""

from typing import Any

import pytest
import torch
from fences import DEVICE, Fenced
from kernels.mutants import changed, mutants
from torch import Tensor, library

from triton_kernels.leave import reference
from triton_kernels.leave.op import SIDE, leave, places

SIZES = (1, 5, 64, 2045, 2048, 0, 5000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEFT = 55.0
"""What stands in the buffer before, and between gradients after."""


def drawn(dtype: torch.dtype, sizes: Any = SIZES) -> list[Tensor]:
    source = torch.Generator().manual_seed(0)
    made = [torch.randn(n, generator=source).to(dtype) for n in sizes]
    made[0][0] = torch.inf
    made[1][2] = torch.nan
    return made


def launched(
    grads: list[Tensor], dtype: torch.dtype, offsets: list[int], module: Any = None
) -> Tensor:
    """What the kernel packs, between canaries."""
    from triton_kernels.leave import kernel

    fenced = Fenced()
    packed = fenced(torch.full((offsets[-1],), LEFT, dtype=dtype))
    (module or kernel).launch([fenced(g) for g in grads], packed, offsets[:-1])
    fenced.hold()
    return packed.cpu()


def expected(grads: list[Tensor], dtype: torch.dtype, offsets: list[int]) -> Tensor:
    packed = torch.full((offsets[-1],), LEFT, dtype=dtype)
    reference.leave(grads, packed, offsets[:-1])
    return packed


def assert_same(made: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(made, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad", DTYPES)
def test_every_gradient_is_at_its_place_to_the_last_bit(grad, dtype):
    offsets = places(SIZES)
    given = drawn(grad)
    assert_same(launched(given, dtype, offsets), expected(given, dtype, offsets))


def test_places_may_be_anywhere():
    given, offsets = drawn(torch.float32, (5, 3000)), [7, 13, 4000]
    assert_same(launched(given, torch.float32, offsets), expected(given, torch.float32, offsets))


def test_nothing_is_launched_for_no_elements():
    assert not len(launched([torch.zeros(0)], torch.float32, [0, 0]))


def test_places_share_no_line_of_a_cache():
    assert places([5, 64, 65]) == [0, 64, 128, 256]
    assert SIDE * 2 >= 128


def test_pieces_are_all_of_every_row():
    from triton_kernels.table import pieces_of  # imports triton

    assert pieces_of([5, 0, 2], 4).tolist() == [[0, 0], [0, 4], [2, 0]]
    assert pieces_of([], 4).tolist() == []


@pytest.mark.parametrize(("old", "new"), mutants("leave"))
def test_a_kernel_that_is_wrong_is_noticed(old, new, tmp_path):
    module, given = changed("leave", old, new, tmp_path), drawn(torch.bfloat16)
    offsets = places(SIZES)

    def compare() -> None:
        made = launched(given, torch.float32, offsets, module)
        assert_same(made, expected(given, torch.float32, offsets))

    with pytest.raises(AssertionError):
        compare()


def test_the_op_keeps_its_contract():
    given = [g.to(DEVICE) for g in drawn(torch.float32, (5, 70))]
    packed = torch.zeros(192, device=DEVICE)
    library.opcheck(torch.ops.triton_kernels.leave.default, (given, packed, [0, 64]))
    assert packed[134:].eq(0).all()


@pytest.mark.parametrize(
    ("grads", "packed", "offsets", "error", "told"),
    [
        (
            [torch.ones(2), torch.ones(2).half()],
            torch.ones(9),
            [0, 2],
            TypeError,
            "float16, torch.fl",
        ),
        ([torch.ones(2).double()], torch.ones(9), [0], TypeError, "of torch.float64 into"),
        ([torch.ones(2)], torch.ones(9).long(), [0], TypeError, "into torch.int64"),
        ([torch.ones(2)], torch.ones(9), [], ValueError, "1 gradients at 0 offsets"),
        ([torch.ones(2)], torch.ones(3, 3), [0], ValueError, r"size \[3, 3\]"),
        ([torch.ones(2)], torch.ones(9), [8], ValueError, "at 8 of 9 elements"),
        ([torch.ones(2, 2).t()], torch.ones(9), [0], ValueError, r"strides \[1, 2\]"),
    ],
)
def test_operands_that_it_cannot_take_are_refused(grads, packed, offsets, error, told):
    with pytest.raises(error, match=told):
        leave(grads, packed, offsets)
