"""The kernel of AdamW: one launch for all rows of a step, wherever they lie.

Programs walk over pieces of rows. A row is a line of addresses, read at run time, of device or of
pinned host memory: neither sizes nor addresses are known when this is compiled. Whole blocks carry
no mask, since a mask whose bound is unknown forces accesses of 32 bits.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from triton_kernels.table import COALESCED, TYPES, aligned, on_device, pieces_of, programs_on

BLOCK = 1024
"""Elements at once: 4 for each of 256 threads, one access of 128 bits in f32. With 8 of them and a
bf16 copy a thread takes 168 registers on sm_90, with 4 it takes 64."""
PIECE = 32 * BLOCK
"""Elements of a row that one program takes: what it reads of its line and its piece is 1e-4 of its
traffic then."""
PER_CORE = 4
"""Programs per multiprocessor: 32 warps, with 64 registers for each of their threads."""
WARPS = 8


@triton.jit
def _number(x):
    return tl.full([], x, tl.float32)


@triton.jit
def _power(base, exponent, LIBRARY: tl.constexpr):
    """LIBRARY: by the function that torch's kernel calls, which the interpreter has not."""
    if LIBRARY:
        power = libdevice.pow(base, exponent)
    else:
        exact = tl.exp2(exponent.to(tl.float64) * tl.log2(base.to(tl.float64)))
        power = exact.to(tl.float32)
    return power


@triton.jit
def _update(
    at,
    lines,
    mask,
    rates,
    DECAYS: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    NARROW: tl.constexpr,
):
    """One block of a row, of the elements `at` [BLOCK]; `reference.py` has the formula."""
    p, g, m, v, c = lines
    scale, size, root, lr_decay, beta1, beta2, eps = rates
    grad = tl.load(g + at, mask=mask).to(tl.float32) * scale
    if MAXIMIZE:
        grad = -grad
    square = grad * grad
    first = tl.fma(tl.load(m + at, mask=mask), beta1, tl.fma(grad, -beta1, grad))
    second = tl.fma(tl.load(v + at, mask=mask), beta2, tl.fma(square, -beta2, square))
    old = tl.load(p + at, mask=mask)
    if DECAYS:
        old = tl.fma(old, -lr_decay, old)
    made = old - tl.div_rn(size * first, tl.div_rn(tl.sqrt_rn(second), root) + eps)
    tl.store(p + at, made, mask=mask)
    tl.store(m + at, first, mask=mask)
    tl.store(v + at, second, mask=mask)
    if NARROW is not None:
        tl.store(c + at, made.to(NARROW), mask=mask)


@triton.jit
def adamw_rows(
    rows,
    pieces,
    n_pieces,
    scale,
    found_inf,
    lr,
    beta1,
    beta2,
    eps,
    decay,
    GRAD: tl.constexpr,
    NARROW: tl.constexpr,
    SCALED: tl.constexpr,
    SKIPS: tl.constexpr,
    DECAYS: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    LIBRARY: tl.constexpr,
    ALIGNED: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row is 7 numbers: addresses of parameter, gradient, both moments, narrow copy and step, and
    how many elements. ALIGNED: bytes of which every address is a multiple."""
    skip = False
    if SKIPS:
        skip = tl.load(found_inf) != 0
    if not skip:
        # The interpreter is given numbers of Python, and a device numbers in f32.
        lr, beta1, beta2 = _number(lr), _number(beta1), _number(beta2)
        eps, lr_decay = _number(eps), lr * _number(decay)
        factor = _number(1.0)
        if SCALED:
            factor = tl.load(scale)
        for n in range(tl.program_id(0), n_pieces, tl.num_programs(0)):
            row = rows + tl.load(pieces + 2 * n) * 7
            begin = tl.multiple_of(tl.load(pieces + 2 * n + 1), BLOCK)
            p = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), ALIGNED)
            g = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(GRAD)), ALIGNED)
            m = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)), ALIGNED)
            v = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.float32)), ALIGNED)
            c = p
            if NARROW is not None:
                c = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(NARROW)), ALIGNED)
            step = tl.load(tl.load(row + 5).to(tl.pointer_type(tl.float32)))
            end = tl.minimum(begin + PIECE, tl.load(row + 6))
            size = tl.div_rn(lr, 1.0 - _power(beta1, step, LIBRARY))
            root = tl.sqrt_rn(1.0 - _power(beta2, step, LIBRARY))
            lines = (p, g, m, v, c)
            rates = (factor, size, root, lr_decay, beta1, beta2, eps)
            whole = begin + (end - begin) // BLOCK * BLOCK
            for first in range(begin, whole, BLOCK):
                at = first + tl.arange(0, BLOCK)
                _update(at, lines, None, rates, DECAYS, MAXIMIZE, NARROW)
            if whole < end:
                at = whole + tl.arange(0, BLOCK)
                _update(at, lines, at < end, rates, DECAYS, MAXIMIZE, NARROW)


def launch(
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
    programs: int,
) -> None:
    """Update what `op.py::adamw` was given, and has checked; there is at least one row."""
    device = steps[0].device
    columns = [params, grads, exp_avgs, exp_avg_sqs, narrow or params, steps]
    lines = [[*(t.data_ptr() for t in row), row[0].numel()] for row in zip(*columns, strict=True)]
    pieces = pieces_of([p.numel() for p in params], PIECE)
    n_pieces = len(pieces)
    if n_pieces == 0:
        return
    rows, pieces = on_device(lines, pieces, device)
    wide = aligned([t for column in columns[:5] for t in column])
    adamw_rows[(min(n_pieces, programs) if programs else programs_on(device, n_pieces, PER_CORE),)](
        rows,
        pieces,
        n_pieces,
        rows if scale is None else scale,
        rows if found_inf is None else found_inf,
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        GRAD=TYPES[grads[0].dtype],
        NARROW=TYPES[narrow[0].dtype] if narrow else None,
        SCALED=scale is not None,
        SKIPS=found_inf is not None,
        DECAYS=weight_decay != 0,
        MAXIMIZE=maximize,
        LIBRARY=device.type == "cuda",
        ALIGNED=COALESCED if wide else 1,
        PIECE=PIECE,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
