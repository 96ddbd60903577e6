"""What the card and its host do without us: memory, products, links, pinning, the disk.

Last stands what a run measures by itself (`zcompile/runtime/probe.py`), from which it plans.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.record import Cell, Part, digits
from benchmarks.gpu.timing import WINDOW_BYTES, Copies, seconds_of
from zcompile.ir.units import GiB, KiB, MiB, show_size
from zcompile.runtime.device.cpu import CpuDevice
from zcompile.runtime.device.cuda import CudaDevice
from zcompile.runtime.meter import Meter
from zcompile.runtime.probe import disk_links, probed

Rate = Callable[[], float]

COLUMNS: list[Cell] = [
    ("name", "what", str),
    ("value", "rate", digits(1)),
    ("unit", "", str),
    ("took_s", "took s", digits(1)),
]
SIZES = tuple(256 * KiB * 4**n for n in range(6))
"""Of copies over a link: 256 KiB to 256 MiB."""
WAYS = (("h2d",), ("d2h",), ("h2d", "d2h"))
PIN_BLOCKS = 8
"""Of 256 MiB, as the host tier makes them."""


def measure(part: Part, args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    with LinkRates(device) as links:
        for name, (found, unit, shown) in rows_of(device, links).items():
            if part.has_time(name):
                with part.row(name) as row:
                    row |= {"value": found() / unit, "unit": shown}
    if device.type == "cpu":
        part.note("no links, and nothing is pinned: the device is the host")
    if part.has_time("disk", "disk"):
        disk(part, args.disk)
    if part.has_time("probe", "probe"):
        as_probed(part, device)


def rows_of(device: torch.device, links: "LinkRates") -> dict[str, tuple[Rate, float, str]]:
    """Name -> what measures it, and the unit that it is told in."""
    rows = dict[str, tuple[Rate, float, str]]()
    for kind in ("float32", "tf32", "bfloat16"):
        rows[f"matmul, {kind}"] = partial(flops, device, kind), 1e12, "TFLOP/s"
    rows["copy on the device, read and written"] = partial(device_copy, device), 1e9, "GB/s"
    for nbytes in SIZES if device.type == "cuda" else ():
        for ways in WAYS:
            name = f"{' and '.join(ways)} of {show_size(nbytes)}{', each way' * (len(ways) - 1)}"
            rows[name] = partial(links.rate, nbytes, ways), 1e9, "GB/s"
    rows["pages of the host tier, made and pinned"] = partial(pinning, device), 1e9, "GB/s"
    for threads in sorted({1, torch.get_num_threads()}):
        name = f"copy on the host, {threads} threads, read and written"
        rows[name] = partial(host_copy, threads), 1e9, "GB/s"
    return rows


class LinkRates:
    """Rates of copies, over memory that is taken when the first is asked for, and given back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: Copies | None = None

    def __enter__(self) -> "LinkRates":
        return self

    def __exit__(self, *error: object) -> None:
        self._copies = None

    def rate(self, nbytes: int, ways: Sequence[str]) -> float:
        """Bytes per second each way."""
        if self._copies is None:
            self._copies = Copies(self._device)
        return self._copies.rate(nbytes, ways)


def side_of(device: torch.device) -> int:
    return 8192 if device.type == "cuda" else 512


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if on else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def flops(device: torch.device, kind: str) -> float:
    """Of a square product of random numbers: zeros take less power, and run faster."""
    side = side_of(device)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    a, b, c = (torch.randn(side, side, device=device).to(dtype) for _ in range(3))
    with tf32(kind == "tf32"):
        return 2 * side**3 / seconds_of(lambda: torch.mm(a, b, out=c), device)


def device_copy(device: torch.device) -> float:
    nbytes = GiB if device.type == "cuda" else 64 * MiB
    a, b = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * nbytes / seconds_of(lambda: a.copy_(b), device)


def pinning(device: torch.device) -> float:
    def crashed(error: BaseException) -> None:
        raise error

    made = (
        CudaDevice(device, Meter(), crashed)
        if device.type == "cuda"
        else CpuDevice({}, Meter(), crashed)
    )
    with closing(made):
        began = time.perf_counter()
        blocks = [made.host_block(WINDOW_BYTES) for _ in range(PIN_BLOCKS)]
        seconds = time.perf_counter() - began
        return sum(block.numel() for block in blocks) / seconds


def host_copy(threads: int) -> float:
    a, b = (torch.ones(WINDOW_BYTES, dtype=torch.uint8) for _ in range(2))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return 2 * a.numel() / seconds_of(lambda: a.copy_(b), torch.device("cpu"))
    finally:
        torch.set_num_threads(before)


def disk(part: Part, directory: str | None) -> None:
    """As the probe of a run measures it, through the engine of the disk tier."""
    with (
        tempfile.TemporaryDirectory(dir=directory) as made,
        part.row("disk, seconds", "disk") as row,
    ):
        began = time.perf_counter()
        links = disk_links([Path(made)])
        row |= {"value": time.perf_counter() - began, "unit": "s"}
    if "error" not in row:
        show(part, {name: (link.bytes_per_s / 1e9, "GB/s") for name, link in links.items()})


def as_probed(part: Part, device: torch.device) -> None:
    """Rates that runs on this machine plan with; kept, so that no later part measures them."""
    with part.row("probe, seconds", "probe") as row:
        began = time.perf_counter()
        found = probed(device, (), again=True)
        row |= {"value": time.perf_counter() - began, "unit": "s"}
    if "error" in row:
        return
    compute, updates = found.compute, found.host_update_bytes_per_s
    rates = {link.name: (link.bytes_per_s / 1e9, "GB/s") for link in found.links.values()}
    rates |= {kind: (rate / 1e12, "TFLOP/s") for kind, rate in compute.flops_per_s.items()}
    rates["memory"] = compute.memory_bytes_per_s / 1e9, "GB/s"
    rates["a launch"] = compute.launch_s * 1e6, "us"
    if updates is not None:
        rates["updates on the host"] = updates / 1e9, "GB/s"
    show(part, {f"probe: {name}": rate for name, rate in rates.items()})


def show(part: Part, rates: Mapping[str, tuple[float, str]]) -> None:
    """Rows of what was measured together."""
    for name, (value, unit) in rates.items():
        part.rows.append({"name": name, "value": value, "unit": unit})
        part.show(part.rows[-1])
