"""The kernels of cross-entropy: forward reads a tile of logits once, backward reads and writes it.

Forward has a program for every token, which walks over the classes of the tile; backward has one
for every token and block of classes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SEEN, SEEN_WARPS = 4096, 8
"""Classes that forward reads at once: 16 for each thread, two accesses of 128 bits in bf16."""
MADE, MADE_WARPS = 2048, 4
"""Classes that a program of backward makes: 16 for each thread too."""


@triton.jit
def see_tile(
    logits,
    target,
    greatest,
    total,
    picked,
    sum,
    greatest_made,
    total_made,
    picked_made,
    sum_made,
    n_classes,
    row_stride,
    WITH_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * row_stride
    DTYPE: tl.constexpr = greatest.dtype.element_ty
    most, exponentials = tl.load(greatest + token), tl.load(total + token)
    everything = tl.zeros([], DTYPE)
    for first in range(0, n_classes, BLOCK):
        i = first + tl.arange(0, BLOCK)
        found = tl.load(row + i, mask=i < n_classes, other=float("-inf")).to(DTYPE)
        more = tl.maximum(most, tl.max(found, 0))
        exponentials = exponentials * tl.exp(most - more) + tl.sum(tl.exp(found - more), 0)
        most = more
        if WITH_SUM:
            everything += tl.sum(tl.where(i < n_classes, found, 0.0), 0)
    tl.store(greatest_made + token, most)
    tl.store(total_made + token, exponentials)
    if WITH_SUM:
        tl.store(sum_made + token, tl.load(sum + token) + everything)
    at = tl.load(target + token)
    here = (at >= 0) & (at < n_classes)
    before = tl.load(picked + token)
    now = tl.load(row + tl.where(here, at, 0), mask=here, other=0.0).to(DTYPE)
    tl.store(picked_made + token, tl.where(here, now, before))


@triton.jit
def tile_gradient(
    logits,
    target,
    log_norm,
    loses,
    picked,
    spread,
    n_classes,
    row_stride,
    PICKS: tl.constexpr,
    SPREADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * row_stride
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    DTYPE: tl.constexpr = log_norm.dtype.element_ty
    found = tl.load(row + i, mask=i < n_classes, other=0.0).to(DTYPE)
    made = tl.exp(found - tl.load(log_norm + token)) * tl.load(loses + token)
    if SPREADS:
        made += tl.load(spread + token)
    if PICKS:
        made += tl.where(i == tl.load(target + token), tl.load(picked + token), 0.0)
    tl.store(row + i, made.to(logits.dtype.element_ty), mask=i < n_classes)


def launch_see_tile(
    logits: Tensor,
    target: Tensor,
    greatest: Tensor,
    total: Tensor,
    picked: Tensor,
    sum: Tensor | None,
) -> tuple[Tensor, ...]:
    """Greatest, total and picked with one tile more, and the sum, if one is given."""
    _check(logits)
    tokens, classes = logits.shape
    given = (greatest, total, picked, *(() if sum is None else (sum,)))
    made = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in given)
    if tokens:
        see_tile[(tokens,)](
            logits,
            target.contiguous(),
            *(x.contiguous() for x in (*given, greatest)[:4]),
            *(*made, greatest)[:4],
            classes,
            logits.stride(0),
            WITH_SUM=sum is not None,
            BLOCK=SEEN,
            num_warps=SEEN_WARPS,
        )
    return made


def launch_tile_gradient(
    logits: Tensor,
    target: Tensor,
    log_norm: Tensor,
    loses: Tensor,
    picked: Tensor | None,
    spread: Tensor | None,
) -> None:
    """Turn logits into their gradient, in place."""
    _check(logits)
    tokens, classes = logits.shape
    if tokens and classes:
        given = (log_norm, loses, *(log_norm if x is None else x for x in (picked, spread)))
        tile_gradient[(tokens, triton.cdiv(classes, MADE))](
            logits,
            target.contiguous(),
            *(x.contiguous() for x in given),
            classes,
            logits.stride(0),
            PICKS=picked is not None,
            SPREADS=spread is not None,
            BLOCK=MADE,
            num_warps=MADE_WARPS,
        )


def _check(logits: Tensor) -> None:
    """raises  ValueError for a layout that the kernels do not read"""
    if logits.dim() != 2 or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise ValueError(
            f"a tile of logits of size {list(logits.shape)} and strides {list(logits.stride())} "
            "is given to a kernel; it reads [tokens, classes] with the classes of a token side by "
            "side: pass logits.contiguous()"
        )
