"""Kernels of our own in the place of torch's ops, in the rows of an optimizer's step.

They are asked for (`Config(kernels="triton")`), since they round otherwise than some releases of
torch do. A row is given to one op of ours wherever torch's op would have been called: on a chunk of
it, or on many whole rows at once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triton_kernels.adamw.op import GRADS, adamw
from zcompile.runtime.eager.rows import Application

FUSED_ADAMW = torch.ops.aten._fused_adamw_.default


def computes(app: Application, by_kernels: bool) -> Callable[..., Any]:
    """What computes a row: the op itself, or a function of the same arguments.

    by_kernels  whether kernels of our own were asked for, and run here
    """
    return fused_adamw if by_kernels and _is_plain_adamw(app) else app.func


def _is_plain_adamw(app: Application) -> bool:
    """Whether a row is a step of AdamW in f32 that the kernel knows: without amsgrad, with a
    learning rate that is a number, of gradients that are scaled already."""
    if app.func is not FUSED_ADAMW or app.kwargs.get("grad_scale") is not None:
        return False
    params, grads, exp_avgs, exp_avg_sqs, most, _ = app.args
    states = {tensor.dtype for tensor in (*params, *exp_avgs, *exp_avg_sqs)}
    known = states == {torch.float32} and all(grad.dtype in GRADS for grad in grads)
    return known and not most and isinstance(app.kwargs["lr"], float)


def fused_adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    state_steps: list[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """`aten::_fused_adamw_` by the kernel of AdamW; `_is_plain_adamw` says of what."""
    columns = params, grads, exp_avgs, exp_avg_sqs
    rates = lr, beta1, beta2, eps, weight_decay
    adamw(*columns, [], state_steps, None, found_inf, *rates, maximize)
