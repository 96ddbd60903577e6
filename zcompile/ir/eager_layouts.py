"""Keeps the layouts of eager PyTorch where torch tells of others while it traces.

Of some ops torch's fake tensors have other strides than the results of the kernels: the gradient
of `mse_loss` is told to be laid out as the input, and what the kernel writes is contiguous.
Formulas of autograd that are traced behind it ask for strides, and leave out a copy which they make
in eager PyTorch; a kernel that takes its argument for contiguous then reads it in a wrong order.
Where what is told is not what the kernel gives, a copy of the result is traced that is laid out as
what the kernel gives: the strides that follow it are true, whatever the kernel did.
"""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zcompile.ir.torch_compat import Dispatched, elementwise_order, surely, without_modes

aten = torch.ops.aten

Order = Sequence[int]
"""Dimensions, the one with the largest stride first; the result is dense."""

_within: ContextVar[Dispatched | None] = ContextVar("_within", default=None)
"""The op that is being traced as it is."""


def _contiguous(result: Tensor, args: Sequence[Any]) -> Order:
    return range(result.dim())


def _as(*positions: int) -> Callable[[Tensor, Sequence[Any]], Order]:
    """As what is computed of each element of some arguments, of which the first matters most;
    numbers among them do not."""

    def order(result: Tensor, args: Sequence[Any]) -> Order:
        values = (args[position] for position in positions)
        tensors = [value.expand(result.shape) for value in values if isinstance(value, Tensor)]
        return elementwise_order(*tensors)

    return order


def _by_format(position: int) -> Callable[[Tensor, Sequence[Any]], Order]:
    """Contiguous, or in the memory format channels_last if an argument is."""

    def order(result: Tensor, args: Sequence[Any]) -> Order:
        last = [0, *range(2, result.dim()), 1]
        has_format = result.dim() in (4, 5) and is_laid_out(args[position], last)
        return last if has_format else range(result.dim())

    return order


def _rolled(result: Tensor, args: Sequence[Any]) -> Order:
    """Contiguous where no dimensions are named, since all are flattened then."""
    return _by_format(0)(result, args) if args[2:] and args[2] else _contiguous(result, args)


def dense_strides(sizes: Sequence[Any], order: Order) -> list[Any]:
    """The strides of a dense tensor in this order."""
    strides, stride = [1] * len(sizes), 1
    for dim in reversed(order):
        strides[dim] = stride
        stride = stride * sizes[dim]
    return strides


def is_laid_out(value: Tensor, order: Order) -> bool:
    """Whether a value is surely dense and in this order; dimensions of one element say nothing."""
    rows = zip(value.shape, value.stride(), dense_strides(value.shape, order), strict=True)
    return all(surely(size == 1) or surely(stride == dense) for size, stride, dense in rows)


def as_ordered(value: Tensor, order: Order) -> Tensor:
    """A copy of a value that is dense and in this order."""
    if list(order) == sorted(order):
        return value.clone(memory_format=torch.contiguous_format)
    dense = value.permute(*order).clone(memory_format=torch.contiguous_format)
    return dense.permute(*sorted(range(len(order)), key=list(order).__getitem__))


@dataclass(frozen=True)
class Layout:
    """How a kernel lays its results out.

    order    of the result and the arguments of a call
    results  which of the results
    cpu      whether it is a kernel for CPUs, and those for other devices do as is told
    masked   whether the last argument says which of the results are made
    """

    order: Callable[[Tensor, Sequence[Any]], Order]
    results: tuple[int, ...] = (0,)
    cpu: bool = False
    masked: bool = False


LAYOUTS: Mapping[Dispatched, Layout] = {
    aten.mse_loss_backward.default: Layout(_contiguous),
    aten.smooth_l1_loss_backward.default: Layout(_contiguous),
    aten.huber_loss_backward.default: Layout(_contiguous),
    aten._log_softmax_backward_data.default: Layout(_contiguous),
    aten.native_layer_norm_backward.default: Layout(_contiguous, (0, 1, 2), masked=True),
    aten.glu_backward.default: Layout(_contiguous, cpu=True),
    aten.log_sigmoid_forward.default: Layout(_contiguous, (0, 1), cpu=True),
    aten.log_sigmoid_backward.default: Layout(_as(0), cpu=True),
    aten.im2col.default: Layout(_contiguous, cpu=True),
    aten.binary_cross_entropy.default: Layout(_as(0)),
    aten.binary_cross_entropy_backward.default: Layout(_as(1)),
    aten.elu_backward.default: Layout(_as(0, 5)),
    aten.hardsigmoid_backward.default: Layout(_as(0, 1)),
    aten.hardswish_backward.default: Layout(_as(0, 1)),
    aten.hardtanh_backward.default: Layout(_as(0, 1)),
    aten.softplus_backward.default: Layout(_as(0, 1)),
    aten.xlogy.Tensor: Layout(_as(0, 1)),
    aten.special_xlog1py.default: Layout(_as(0, 1)),
    aten.copysign.Tensor: Layout(_as(0, 1)),
    aten.div.Tensor_mode: Layout(_as(0, 1)),
    aten.floor_divide.default: Layout(_as(0, 1)),
    aten.logit_backward.default: Layout(_as(0, 1)),
    aten.pow.Scalar: Layout(_contiguous),
    aten.nll_loss2d_forward.default: Layout(_contiguous),
    aten.native_dropout_backward.default: Layout(_as(0, 1), cpu=True),
    aten.reflection_pad2d_backward.default: Layout(_by_format(1), cpu=True),
    aten.replication_pad2d_backward.default: Layout(_by_format(1), cpu=True),
    aten.reflection_pad3d.default: Layout(_by_format(0), cpu=True),
    aten.reflection_pad3d_backward.default: Layout(_by_format(1), cpu=True),
    aten.replication_pad3d.default: Layout(_by_format(0), cpu=True),
    aten.replication_pad3d_backward.default: Layout(_by_format(1), cpu=True),
    aten.max_unpool2d.default: Layout(_by_format(0), cpu=True),
    aten._native_batch_norm_legit_functional.default: Layout(_by_format(0), cpu=True),
    aten._native_batch_norm_legit_no_training.default: Layout(_by_format(0), cpu=True),
    aten._native_batch_norm_legit.no_stats: Layout(_by_format(0), cpu=True),
    aten.native_batch_norm_backward.default: Layout(_by_format(1), cpu=True, masked=True),
    aten.channel_shuffle.default: Layout(_by_format(0), cpu=True),
    aten.roll.default: Layout(_rolled, cpu=True),
}
"""Ops of which torch's fake tensors are laid out otherwise than what their kernels give."""


def _laying_out(op: Dispatched, layout: Layout) -> Callable[..., Any]:
    def formula(*args: Any, **kwargs: Any) -> Any:
        if _within.get() is op:
            return NotImplemented
        outside = _within.set(op)
        try:
            results = op(*args, **kwargs)
        finally:
            _within.reset(outside)
        several = isinstance(results, tuple)
        laid = list(results) if several else [results]
        for position in layout.results:
            if layout.masked and not args[-1][position]:
                continue  # torch may tell of a tensor there
            value = laid[position]
            if (
                isinstance(value, Tensor)
                and value.dim() > 1
                and (value.device.type == "cpu" or not layout.cpu)
            ):
                with without_modes():  # no part of what is traced
                    order = layout.order(value, args)
                    differs = not is_laid_out(value, order)
                if differs:
                    laid[position] = as_ordered(value, order)
        return tuple(laid) if several else laid[0]

    return formula


LAID_OUT: Mapping[Dispatched, Callable[..., Any]] = {
    op: _laying_out(op, layout) for op, layout in LAYOUTS.items()
}
"""Op -> what is traced in its place: the op, and a copy of what is laid out otherwise than told."""
