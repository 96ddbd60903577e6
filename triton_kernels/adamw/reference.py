"""What the kernel of AdamW computes, in torch.

The formula is that of torch's fused CUDA kernel, as torch 2.13 ships it in
`ATen/native/cuda/fused_adam_utils.cuh`: f32 throughout, multiplications and additions that round
once where it says `fma`. (Releases before computed in f64 and rounded to f32.)

    g = scale * g
    p = p - lr * decay * p
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    p = p - lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    narrow: Sequence[Tensor],
    steps: Sequence[Tensor],
    scale: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """Update parameters and states in place; see `op.py::adamw` for what each is."""
    if found_inf is not None and found_inf.item():
        return
    rates = (_rounded(x) for x in (lr, beta1, beta2, eps, weight_decay))
    lr, beta1, beta2, eps, weight_decay = rates
    for n, (p, g, m, v) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        size, root = _corrections(steps[n], lr, beta1, beta2)
        g = g.float()
        if scale is not None:
            g = g * scale.to(g.device)
        if maximize:
            g = -g
        made = p if weight_decay == 0 else _fma(p, -_rounded(lr * weight_decay), p)
        m.copy_(_fma(m, beta1, _fma(g, -beta1, g)))
        square = g * g
        v.copy_(_fma(v, beta2, _fma(square, -beta2, square)))
        p.copy_(made - size * m / (v.sqrt() / root + eps))
        if narrow:
            narrow[n].copy_(p)


def _corrections(step: Tensor, lr: float, beta1: float, beta2: float) -> tuple[float, float]:
    """Length of a step, and the root that the second moment is divided by: f32 numbers."""
    count = float(step)
    size = _rounded(lr / _rounded(1 - _rounded(beta1**count)))
    return size, _rounded(_rounded(1 - _rounded(beta2**count)) ** 0.5)


def _rounded(x: float) -> float:
    """The f32 number nearest to x."""
    return float(torch.tensor(x, dtype=torch.float32))


def _fma(x: Tensor, factor: float, added: Tensor) -> Tensor:
    """x * factor + added, rounded once to f32 (but where f64 rounds to a tie first)."""
    return (x.double() * factor + added.double()).float()
