"""Kernels of our own on a card: time, share of what its memory allows, and stock's time beside it.

    python -m benchmarks.kernels [--minutes 9] [--only cross_entropy] [--out kernels.json]

Each row is timed by triton's `do_bench`, caches flushed in between, medians; stock is timed right
after, in the same process. The floor of a row is the bytes that it must move over the rate at which
this card copies its own memory, measured first; of rows over host memory, over the link's rate,
both ways at once. Before anything is timed the results are compared with stock's. A kernel that is
not 5 % faster than the fastest stock is not worth having, and the last column says so. After each
row the JSON is written anew, so that what was measured stands if the time is up.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triton_kernels import missing
from triton_kernels.adamw.op import adamw
from triton_kernels.cross_entropy import op as ce
from triton_kernels.cross_entropy import reference as formulas
from triton_kernels.leave.op import leave, places

GAIN = 1.05
"""Times stock's speed that a kernel must reach to stay."""
MiB = 1 << 20
RATES = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
WAYS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}


@dataclass(frozen=True)
class Case:
    """A kernel, what it is compared with, and what it must move.

    nbytes    that the kernel must read and write, on the link with the lower rate
    link      whose rate counts: "device", "h2d and d2h" or "d2h"
    stock     name -> the same by others
    agree     whether the results agree with stock's; says how, for people
    """

    name: str
    nbytes: int
    link: str
    ours: Callable[[], Any]
    stock: dict[str, Callable[[], Any]]
    agree: Callable[[], str]


@dataclass(frozen=True)
class Row:
    """share  of the floor: 1.0 is as fast as memory, or the link, allows
    gain      stock's seconds over ours; the fastest stock
    agrees    how the results compare with stock's
    """

    name: str
    seconds: float
    share: float
    stock: str
    stock_seconds: float
    gain: float
    agrees: str

    @property
    def stays(self) -> bool:
        return self.gain >= GAIN


def seconds_of(call: Callable[[], Any], ms: int = 200) -> float:
    """Median of device time, caches flushed between runs."""
    import triton.testing

    found = triton.testing.do_bench(call, warmup=ms // 4, rep=ms, quantiles=[0.5])
    return float(found) / 1e3


def rates(device: torch.device) -> dict[str, float]:
    """Bytes per second of each link, measured by copies of 256 MiB."""
    n = 256 * MiB
    a, b = (torch.empty(n, dtype=torch.uint8, device=device) for _ in range(2))
    up, down = (torch.empty(n, dtype=torch.uint8).pin_memory() for _ in range(2))
    other = torch.cuda.Stream(device)

    def both() -> None:
        main = torch.cuda.current_stream(device)
        other.wait_stream(main)
        with torch.cuda.stream(other):
            down.copy_(b, non_blocking=True)
        a.copy_(up, non_blocking=True)
        main.wait_stream(other)

    return {
        "device": 2 * n / seconds_of(lambda: a.copy_(b)),
        "d2h": n / seconds_of(lambda: down.copy_(b, non_blocking=True)),
        "h2d and d2h": n / seconds_of(both),  # each way, while the other is busy
    }


def measured(case: Case, rate: float) -> Row:
    agrees = case.agree()
    ours = seconds_of(case.ours)
    stock = {name: seconds_of(call) for name, call in case.stock.items()}
    fastest = min(stock, key=lambda name: stock[name])
    share = case.nbytes / rate / ours
    return Row(case.name, ours, share, fastest, stock[fastest], stock[fastest] / ours, agrees)


# AdamW


def _rows(sizes: list[int], device: torch.device, pinned: bool = False) -> dict[str, list[Tensor]]:
    source = torch.Generator(device=device).manual_seed(0)

    def drawn(scale: float, here: bool) -> list[Tensor]:
        made = [torch.randn(n, generator=source, device=device) * scale for n in sizes]
        return made if here else [t.cpu().pin_memory() for t in made]

    return {
        "params": drawn(1.0, not pinned),
        "grads": drawn(1.0, True),
        "exp_avgs": drawn(0.01, not pinned),
        "exp_avg_sqs": [v.abs() for v in drawn(1e-3, True)]
        if not pinned
        else [v.abs_() for v in drawn(1e-3, False)],
        "steps": [torch.tensor(5.0, device=device) for _ in sizes],
    }


def _stock_adamw(given: dict[str, list[Tensor]]) -> None:
    lists = (given["params"], given["grads"], given["exp_avgs"], given["exp_avg_sqs"])
    options: dict[str, Any] = {**WAYS, "amsgrad": False, "maximize": False}
    torch._fused_adamw_(*lists, [], given["steps"], **options)


def _our_adamw(
    given: dict[str, list[Tensor]], narrow: list[Tensor], scale: Tensor | None, programs: int = 0
) -> None:
    lists = (given["params"], given["grads"], given["exp_avgs"], given["exp_avg_sqs"])
    adamw(*lists, narrow, given["steps"], scale, None, *RATES.values(), False, programs)


def _compared(pairs: list[tuple[Tensor, Tensor]]) -> str:
    """How two lists of tensors compare. raises  AssertionError if they are far apart"""
    if all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs):
        return "bit-equal"
    far = [float((a.double().cpu() - b.double().cpu()).abs().max()) for a, b in pairs if len(a)]
    sizes = [float(b.double().abs().max()) for _, b in pairs if len(b)]
    apart = max(x / max(y, 1e-30) for x, y in zip(far, sizes, strict=True))
    assert apart < 2e-5, f"apart by {apart:.1e} of the largest number"
    return f"{apart:.0e} of the largest"


def adamw_cases(device: torch.device, elements: int) -> Iterator[Case]:
    """Rows as of a transformer: some large ones, and as many small ones."""
    sizes = [elements // 16 - 1024 + n for n in range(16)] + [1024] * 16
    total = sum(sizes)
    ours, stock = _rows(sizes, device), _rows(sizes, device)

    def equal() -> str:
        _our_adamw(ours, [], None)
        _stock_adamw(stock)
        names = ("params", "exp_avgs", "exp_avg_sqs")
        return _compared([p for k in names for p in zip(ours[k], stock[k], strict=True)])

    yield Case(
        "adamw, f32",
        28 * total,
        "device",
        lambda: _our_adamw(ours, [], None),
        {"_fused_adamw_": lambda: _stock_adamw(stock)},
        equal,
    )

    narrow = {**ours, "grads": [g.bfloat16() for g in ours["grads"]]}
    copies, theirs = ([p.bfloat16() for p in ours["params"]] for _ in range(2))
    scale, wide = torch.full((1,), 0.5, device=device), [g.clone() for g in stock["grads"]]

    def stock_narrow() -> None:
        torch._foreach_copy_(wide, narrow["grads"])
        torch._foreach_mul_(wide, scale[0])
        _stock_adamw({**stock, "grads": wide})
        torch._foreach_copy_(theirs, stock["params"])

    def equal_narrow() -> str:
        for name in ("params", "exp_avgs", "exp_avg_sqs"):
            torch._foreach_copy_(ours[name], stock[name])
        _our_adamw(narrow, copies, scale)
        stock_narrow()
        return _compared(list(zip(ours["params"], stock["params"], strict=True)))

    yield Case(
        "adamw, clipped bf16 gradients, bf16 copy",
        28 * total,
        "device",
        lambda: _our_adamw(narrow, copies, scale),
        {"_foreach_copy_, _foreach_mul_, _fused_adamw_, _foreach_copy_": stock_narrow},
        equal_narrow,
    )


def adamw_host_cases(device: torch.device, elements: int) -> Iterator[Case]:
    """States in pinned host memory: by programs, so that one sees how few fill the link."""
    sizes = [elements // 8] * 8
    host, there = _rows(sizes, device, pinned=True), _rows(sizes, device)
    names = ("params", "exp_avgs", "exp_avg_sqs")
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def stock() -> None:
        """Chunks in, computed, out: on streams of their own, as the runtime does."""
        main = torch.cuda.current_stream(device)
        for stream in streams:
            stream.wait_stream(main)
        for n in range(len(sizes)):
            with torch.cuda.stream(streams[0]):
                for name in names:
                    there[name][n].copy_(host[name][n], non_blocking=True)
            main.wait_stream(streams[0])
            _stock_adamw({k: [column[n]] for k, column in there.items()})
            streams[1].wait_stream(main)
            with torch.cuda.stream(streams[1]):
                for name in names:
                    host[name][n].copy_(there[name][n], non_blocking=True)
        main.wait_stream(streams[1])

    def agree() -> str:
        for name in names:
            torch._foreach_copy_(there[name], host[name])
        _our_adamw(host, [], None)
        _stock_adamw(there)
        torch.cuda.synchronize(device)
        return _compared([p for k in names for p in zip(host[k], there[k], strict=True)])

    for programs in (8, 16, 32, 0):
        yield Case(
            f"adamw over host memory, {programs or 'all'} programs",
            12 * sum(sizes),
            "h2d and d2h",
            lambda programs=programs: _our_adamw(host, [], None, programs),  # type: ignore[misc]
            {"copies, _fused_adamw_, copies": stock},
            agree,
        )


# Cross-entropy


def cross_entropy_cases(
    device: torch.device, tokens: int, classes: int, dtype: torch.dtype
) -> Iterator[Case]:
    """One tile of logits; the product that makes it and those that follow are nobody's here."""
    source = torch.Generator(device=device).manual_seed(0)
    logits = torch.randn(tokens, classes, generator=source, device=device).to(dtype)
    target = torch.randint(0, 2 * classes, (tokens, 1), generator=source, device=device)
    zero = torch.zeros(tokens, 1, device=device)
    least = torch.full_like(zero, torch.finfo(torch.float32).min)
    log_norm = logits.float().logsumexp(1, keepdim=True)
    size = f"{tokens} x {classes} {str(dtype).removeprefix('torch.')}"
    nbytes = logits.numel() * dtype.itemsize
    compiled = torch.compile(formulas.see_tile, dynamic=False)
    given = (logits, target, least, zero, zero)
    yield Case(
        f"see_tile, {size}",
        nbytes,
        "device",
        lambda: ce.see_tile(*given),
        {
            "torch": lambda: formulas.see_tile(*given),
            "Inductor": lambda: compiled(*given),
        },
        lambda: _compared(list(zip(ce.see_tile(*given), formulas.see_tile(*given), strict=True))),
    )

    written = logits.clone()  # of which the numbers do not matter to the time
    backward = torch.compile(formulas.tile_gradient_, dynamic=False)
    share = torch.full_like(zero, 1 / tokens)
    numbers = (target, log_norm, share, -share, None)

    def agree() -> str:
        made, wanted = logits.clone(), logits.clone()
        ce.tile_gradient_(made, *numbers)
        formulas.tile_gradient_(wanted, *numbers)
        far = float((made.double() - wanted.double()).abs().max()) * tokens
        assert far < 2 * torch.finfo(dtype).eps, f"apart by {far:.1e} of the largest"
        return "bit-equal" if torch.equal(made, wanted) else f"{far:.0e} of the largest"

    yield Case(
        f"tile_gradient_, {size}",
        2 * nbytes,
        "device",
        lambda: ce.tile_gradient_(written, *numbers),
        {
            "torch": lambda: formulas.tile_gradient_(written, *numbers),
            "Inductor": lambda: backward(written, *numbers),
        },
        agree,
    )


# Leave


def leave_cases(device: torch.device, count: int) -> Iterator[Case]:
    """Gradients of biases and norms, into pinned host memory."""
    sizes = [1024 * (1 + n % 16) for n in range(count)]
    grads = [torch.randn(n, device=device) for n in sizes]
    *offsets, end = places(sizes)
    packed, theirs = (torch.zeros(end).pin_memory() for _ in range(2))
    views = [theirs[a : a + n] for a, n in zip(offsets, sizes, strict=True)]

    def stock() -> None:
        for view, grad in zip(views, grads, strict=True):
            view.copy_(grad, non_blocking=True)

    def agree() -> str:
        leave(grads, packed, offsets)
        stock()
        torch.cuda.synchronize(device)
        assert torch.equal(packed, theirs)
        return "bit-equal"

    yield Case(
        f"leave, {count} gradients of 4 to 64 KiB",
        4 * sum(sizes),
        "d2h",
        lambda: leave(grads, packed, offsets),
        {"a copy each": stock, "_foreach_copy_": lambda: torch._foreach_copy_(views, grads)},
        agree,
    )


PARTS: dict[str, Callable[[torch.device], Iterator[Case]]] = {
    "adamw": lambda device: adamw_cases(device, 256 * MiB),
    "adamw_host": lambda device: adamw_host_cases(device, 64 * MiB),
    "cross_entropy": lambda device: cross_entropy_cases(device, 8192, 16384, torch.bfloat16),
    "cross_entropy_f32": lambda device: cross_entropy_cases(device, 4096, 16384, torch.float32),
    "leave": lambda device: leave_cases(device, 400),
}


def table(rows: list[Row]) -> Iterator[str]:
    yield "| kernel | ms | of the floor | stock | ms | gain | agrees | |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        times = f"{row.seconds * 1e3:.3f} | {row.share:.2f} | {row.stock}"
        gain = f"{row.stock_seconds * 1e3:.3f} | {row.gain:.2f} | {row.agrees}"
        yield f"| {row.name} | {times} | {gain} | {'stays' if row.stays else 'goes'} |"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=9.0, help="no case begins after these")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path, help="a file for the rows, as JSON")
    args = parser.parse_args(argv)
    if why := missing(args.device):
        print(f"nothing to measure: {why}", file=sys.stderr)
        return 1
    device, ends = torch.device(args.device), time.monotonic() + 60 * args.minutes
    card = torch.cuda.get_device_name(device)
    found = rates(device)
    told = ", ".join(f"{link} {rate / 1e9:.1f} GB/s" for link, rate in found.items())
    print(f"{card}, torch {torch.__version__}; {told}\n")
    rows: list[Row] = []
    for part in args.only:
        for case in PARTS[part](device):
            if time.monotonic() > ends:
                print(f"the time was up before {case.name}", file=sys.stderr)
                return 1
            rows.append(measured(case, found[case.link]))
            if args.out:
                kept = {"card": card, "torch": torch.__version__, "rates": found}
                args.out.write_text(
                    json.dumps({**kept, "rows": [asdict(row) for row in rows]}, indent=1)
                )
        torch.cuda.empty_cache()
    print("\n".join(table(rows)))
    print(f"\nmedian share of the floor {statistics.median(row.share for row in rows):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
