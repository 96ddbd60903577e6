"""The rows of `benchmarks/kernels.py`, one after the other while there is time."""

import argparse
import gc
from dataclasses import asdict

import torch

from benchmarks import kernels
from benchmarks.gpu.record import Cell, Part, digits
from triton_kernels import missing

COLUMNS: list[Cell] = [
    ("name", "kernel", str),
    ("seconds", "ms", lambda s: f"{s * 1e3:.3f}"),
    ("share", "of the floor", digits(2)),
    ("stock", "stock", str),
    ("stock_seconds", "ms", lambda s: f"{s * 1e3:.3f}"),
    ("gain", "gain", digits(2)),
    ("agrees", "agrees", str),
    ("stays", "", lambda stays: "stays" if stays else "goes"),
]


def measure(part: Part, args: argparse.Namespace) -> None:
    if why := missing(args.device):
        part.note(f"nothing to measure: {why}")
        return
    device = torch.device(args.device)
    rates = kernels.rates(device)
    part.written["rates"] = rates
    part.note(", ".join(f"{link} {rate / 1e9:.1f} GB/s" for link, rate in rates.items()))
    for cases in kernels.PARTS.values():
        for case in cases(device):
            if not part.has_time(case.name):
                return
            with part.row(case.name) as row:
                found = kernels.measured(case, rates[case.link])
                row |= {**asdict(found), "stays": found.stays}
        gc.collect()
        torch.cuda.empty_cache()
