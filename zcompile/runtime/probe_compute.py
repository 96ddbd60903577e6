"""What the device computes at: matmuls by dtype, elementwise bytes, the least an op costs."""

import time
from collections.abc import Callable

import torch

from zcompile.ir.units import MiB
from zcompile.machine.model import Compute
from zcompile.runtime.probe_lanes import best_of, rounded

DTYPES = {"cpu": (torch.float32, torch.bfloat16),
          "cuda": (torch.float32, torch.bfloat16, torch.float16)}  # fmt: skip
SIDES = {"cpu": (1024, 512, 256), "cuda": (8192, 4096, 1024)}
"""Of square matmuls, as large as memory and MOST_ONCE_S allow."""
MOST_ONCE_S = 0.1
SPAN_S = 0.04
ELEMENTWISE_BYTES = 32 * MiB
"""Per operand: beyond what the caches of a core hold, which would answer instead of memory."""
LAUNCHES = 500


@torch.no_grad()
def compute_of(device: torch.device) -> Compute:
    """Takes about a second; leaves random numbers alone and gives its memory back."""
    flops = {str(dtype).removeprefix("torch."): rounded(_matmul(device, dtype))
             for dtype in DTYPES[device.type]}  # fmt: skip
    compute = Compute(flops, rounded(_elementwise(device)), rounded(_launch(device)))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # else the allocator would keep it from arenas
    return compute


def _matmul(device: torch.device, dtype: torch.dtype) -> float:
    sides = SIDES[device.type]
    small = sides[-1]
    cubic = _once(_multiply(device, dtype, small), device) / small**3
    for side in sides:
        fits = device.type == "cpu" or side**2 * 16 < torch.cuda.mem_get_info(device)[0]
        if fits and (cubic * side**3 < MOST_ONCE_S or side == small):
            return 2.0 * side**3 / _best(_multiply(device, dtype, side), device)
    return 2.0 / cubic


def _multiply(device: torch.device, dtype: torch.dtype, side: int) -> Callable[[], object]:
    a, b, c = (torch.full((side, side), 0.5, device=device, dtype=dtype) for _ in range(3))
    return lambda: torch.mm(a, b, out=c)


def _elementwise(device: torch.device) -> float:
    n = ELEMENTWISE_BYTES // 4
    a, b, c = (torch.full((n,), 0.5, device=device, dtype=torch.float32) for _ in range(3))
    return 3 * ELEMENTWISE_BYTES / _best(lambda: torch.add(a, b, out=c), device)


def _launch(device: torch.device) -> float:
    x = torch.zeros(1, device=device)

    def many() -> None:
        for _ in range(LAUNCHES):
            x.add_(1)

    return _best(many, device) / LAUNCHES


def _once(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one of a few runs; the first one, which also looks for kernels, does not count."""
    run()
    return min(_seconds(run, 1, device) for _ in range(3))


def _best(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, from the best of some batches."""
    times = max(1, round(SPAN_S / _once(run, device)))
    return best_of(lambda: _seconds(run, times, device)) / times


def _seconds(run: Callable[[], object], times: int, device: torch.device) -> float:
    _synchronize(device)
    since = time.perf_counter()
    for _ in range(times):
        run()
    _synchronize(device)
    return time.perf_counter() - since


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
