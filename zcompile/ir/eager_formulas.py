"""Keeps the bits of eager PyTorch where torch traces another formula than it computes by.

While it traces, torch takes some ops apart by formulas in Python that round otherwise than the
kernels which run in eager PyTorch: such an op is left whole. Of dropout on a CPU, eager PyTorch
multiplies with what it has divided and rounded to the dtype of the input; what is traced in its
place, `native_dropout`, multiplies with the quotient of Python's floats.
"""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from zcompile.ir.eager_layouts import LAID_OUT
from zcompile.ir.torch_compat import (
    Dispatched,
    give_meta_kernel,
    suggested_memory_format,
    without_modes,
)

aten = torch.ops.aten

RESIZES: Mapping[Dispatched, Dispatched] = {
    aten.upsample_nearest2d.vec: aten.upsample_nearest2d.default,
    aten._upsample_nearest_exact2d.vec: aten._upsample_nearest_exact2d.default,
    aten.upsample_linear1d.vec: aten.upsample_linear1d.default,
    aten.upsample_bilinear2d.vec: aten.upsample_bilinear2d.default,
    aten.upsample_trilinear3d.vec: aten.upsample_trilinear3d.default,
    aten.upsample_bicubic2d.vec: aten.upsample_bicubic2d.default,
}
"""What resizes images, of a size or of factors -> of a size alone. Of lines and volumes that take
the nearest value, the formulas have the bits of the kernels, which take no dynamic sizes in
backward."""
LEFT_WHOLE: tuple[Dispatched, ...] = (
    *RESIZES.values(),
    aten.multi_margin_loss.default,
    aten.multilabel_margin_loss_forward.default,
)
"""Ops whose formulas in Python have other bits than their kernels; or, of those that take the
nearest value, a gradient that lies otherwise in memory, so that sums of it have other bits."""


def _resized(by_size: Dispatched, x: Tensor, size: Sequence[int] | None, *given: Any) -> Any:
    """As the kernel of C++ does, which takes no size that is dynamic.

    x      [batch, channels, ...]
    size   of each dimension of `...`, that it is to have; None: `x` grows
    given  by which factors, or None, last; before it whether corners are aligned, of modes that ask
    """
    *aligned, factors = given
    if size is None:
        assert factors is not None, "one of them is given"
        size = [
            n * int(factor) if factor == int(factor) else torch.sym_int(n * factor)
            for n, factor in zip(x.shape[2:], factors, strict=True)
        ]
    return by_size(x, size, *aligned, *(factors or ()))


INSTEAD: Mapping[Dispatched, Callable[..., Any]] = {
    op: partial(_resized, by_size) for op, by_size in RESIZES.items()
}
"""Op -> what tracing meets in place of its function in Python: an op that is left whole."""


def _contiguous_gradient(
    gradient: Tensor, size: Sequence[int], input_size: Sequence[int], *given: Any
) -> Tensor:
    return gradient.new_empty(input_size)


def _gradient_of_same_format(
    gradient: Tensor, size: Sequence[int], input_size: Sequence[int], *given: Any
) -> Tensor:
    made = gradient.new_empty(input_size)
    return made.to(memory_format=suggested_memory_format(gradient))


IMAGE_GRADIENTS: Mapping[Dispatched, Callable[..., Tensor]] = {
    aten.upsample_linear1d_backward.default: _contiguous_gradient,
    aten.upsample_bilinear2d_backward.default: _gradient_of_same_format,
    aten.upsample_bicubic2d_backward.default: _contiguous_gradient,
    aten.upsample_trilinear3d_backward.default: _gradient_of_same_format,
    aten._upsample_bicubic2d_aa_backward.default: _contiguous_gradient,
}
"""Ops of gradients of resized images -> what they make in tracing, where sizes may be dynamic."""
for _op, _meta in IMAGE_GRADIENTS.items():
    give_meta_kernel(_op, _meta)

_within = ContextVar("_within", default=False)
"""Whether a formula of dropout is being traced, which has dropout in it."""


@cache
def _factors(keep: float, dtype: torch.dtype) -> tuple[float, float, float]:
    """What dropout multiplies with: in eager PyTorch, in `native_dropout`, and in the backward of
    that, which does not round it to `dtype`."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    with without_modes():  # numbers, while others are being traced
        one = torch.ones((), dtype=dtype)
        return (
            one.div(keep).double().item(),
            one.mul(1 / keep).double().item(),
            torch.tensor(1 / keep, dtype=wide).double().item(),
        )


def _kept(mask: Tensor, dtype: torch.dtype, keep: float) -> Tensor:
    """What eager PyTorch multiplies with, of the shape of `mask`."""
    return mask.to(dtype).div(keep)


def _dropout(x: Tensor, p: float, train: bool | None) -> Any:
    keep = 1 - p
    on_cpu = x.device.type == "cpu" and x.is_floating_point()
    if _within.get() or not on_cpu or train is False or not 0 < keep < 1:
        return NotImplemented
    eager, traced, _ = _factors(keep, x.dtype)
    if eager == traced:
        return NotImplemented
    outside = _within.set(True)
    try:
        # By the op itself: whatever knows of random numbers knows this op.
        _, mask = aten.native_dropout.default(x, p, train)
    finally:
        _within.reset(outside)
    return x * _kept(mask, x.dtype, keep), mask


def _dropout_backward(gradient: Tensor, mask: Tensor, scale: float) -> Any:
    laid_out = LAID_OUT[aten.native_dropout_backward.default]
    if gradient.device.type != "cpu" or not gradient.is_floating_point() or not scale > 1:
        return laid_out(gradient, mask, scale)
    # 1 - p within the last bit of a double: the same once it is a float32, which divides.
    keep = 1 / scale
    eager, _, traced = _factors(keep, gradient.dtype)
    if eager == traced:
        return laid_out(gradient, mask, scale)
    return gradient * _kept(mask, gradient.dtype, keep)


FORMULAS: Mapping[Dispatched, Callable[..., Any]] = {
    **LAID_OUT,
    aten.native_dropout.default: _dropout,
    aten.native_dropout_backward.default: _dropout_backward,
}
"""Op -> the formula that is traced in its place; it returns NotImplemented where the op has the
bits and the layout of eager PyTorch."""
