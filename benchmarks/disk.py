"""The disk tier's engine against fio: read, write, both at once, CPU time, and a matmul beside.

    python -m benchmarks.disk --directory /mnt/nvme --rounds 7

Every round runs every variant once in turn, so a slow moment of the machine hits all of them; what
counts are ratios to fio. fio runs as `--direct=1 --ioengine=io_uring --bs=4M --iodepth=16`, once as
it is and once with its buffers in huge pages, which our buffers always are. Both work on files that
were written before. CPU time is what the kernel charged to the process while bytes moved.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from zcompile.ir.units import MiB, show_size
from zcompile.runtime.device.pages import host_pages
from zcompile.runtime.meter import Meter
from zcompile.runtime.tiers.base import Buffer
from zcompile.runtime.tiers.disk import DiskTier

MODES = ("read", "write", "mixed")
WINDOW_BYTES = 256 * MiB
FIO = (
    "fio",
    "--name=disk",
    "--direct=1",
    "--ioengine=io_uring",
    "--bs=4M",
    "--iodepth=16",
    "--output-format=json",
)
HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Makes malloc ask for transparent huge pages (glibc 2.35)."""


@dataclass
class Sample:
    bytes_per_s: float
    cpu_s_per_gb: float


@dataclass
class Variant:
    """run(mode, seconds)  moves the whole file once, or as much as that takes"""

    name: str
    run: Callable[[str, float | None], Sample]
    samples: dict[str, list[Sample]] = field(default_factory=lambda: {m: [] for m in MODES})
    beside: dict[str, list[tuple[float, float]]] = field(
        default_factory=lambda: {m: [] for m in MODES[:2]}
    )


def fio(file: Path, nbytes: int, environment: dict[str, str]) -> Callable[..., Sample]:
    def run(mode: str, seconds: float | None) -> Sample:
        command = [
            *FIO,
            f"--filename={file}",
            f"--size={nbytes}",
            f"--rw={'rw' if mode == 'mixed' else mode}",
        ]
        if seconds is not None:
            command += ["--time_based", f"--runtime={seconds:.0f}"]
        done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, check=True
        )
        (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
        elapsed = max(job["read"]["runtime"], job["write"]["runtime"]) / 1e3
        cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        return Sample(moved / elapsed, cpu / moved * 1e9)

    return run


class Stream:
    """Transfers of `part` bytes over one entry, `WINDOW_BYTES` of them under way at any time.

    Driven by the completions themselves, as the runtime is: nothing here waits in a thread.
    """

    def __init__(self, tier: DiskTier, nbytes: int, part: int) -> None:
        self._tier, self._nbytes, self._part = tier, nbytes, part
        self._extent = tier.reserve(nbytes, "stream")
        self._window = Buffer.over(host_pages(WINDOW_BYTES).random_(0, 255))

    def __call__(self, mode: str, seconds: float | None) -> Sample:
        self._begin(mode, seconds)
        cpu, began = time.process_time(), time.perf_counter()
        for at in range(0, WINDOW_BYTES, self._part):
            self._next(at, None)
        self._over.wait()
        elapsed = time.perf_counter() - began
        if self._error is not None:
            raise self._error
        return Sample(self._moved / elapsed, (time.process_time() - cpu) / self._moved * 1e9)

    def _begin(self, mode: str, seconds: float | None) -> None:
        self._mode, self._over = mode, threading.Event()
        self._until = None if seconds is None else time.perf_counter() + seconds
        self._lock, self._error = threading.Lock(), None
        self._at = self._moved = 0
        self._under_way = WINDOW_BYTES // self._part

    def _next(self, slot: int, error: BaseException | None) -> None:
        with self._lock:
            self._error = self._error or error
            ended = (
                self._at == self._nbytes
                if self._until is None
                else time.perf_counter() >= self._until
            )
            if ended or self._error:
                self._under_way -= 1
                if not self._under_way:
                    self._over.set()
                return
            at, self._at = self._at % self._nbytes, self._at + self._part
            self._moved += self._part
        write = self._mode == "write" or (self._mode == "mixed" and at // self._part % 2 == 1)
        move = self._tier.write if write else self._tier.read
        move(self._extent, at, self._window.part(slot, slot + self._part)).then(
            lambda error: self._next(slot, error)
        )


def matmuls_per_s(seconds: float) -> float:
    a = torch.randn(1024, 1024)
    count, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds:
        torch.mm(a, a)
        count += 1
    return count / elapsed


def nothing(mode: str, seconds: float | None) -> Sample:
    """What a matmul is alone with; takes as long as the others, so that it begins as rested."""
    time.sleep(seconds or 0.0)
    return Sample(0.0, 0.0)


def beside(variant: Variant, mode: str, seconds: float) -> tuple[float, float]:
    """Matmuls per second, and bytes per second, while both go on."""
    found: list[Sample] = []
    thread = threading.Thread(target=lambda: found.append(variant.run(mode, seconds + 2)))
    thread.start()
    time.sleep(1)
    rate = matmuls_per_s(seconds)
    thread.join()
    return rate, found[0].bytes_per_s


def median(rows: Iterator[float]) -> float:
    return statistics.median(rows)


def report(variants: list[Variant], free: Variant, args: argparse.Namespace) -> str:
    base = variants[0]
    heads = [f"{mode} GB/s, of fio, CPU ms/GB" for mode in MODES]
    if args.beside:
        heads += [f"matmul beside {mode}, GB/s then" for mode in MODES[:2]]
    rows = [
        f"{machine()}; {show_size(args.size * MiB)} file, {args.rounds} rounds, medians; "
        f"matmul alone, threads: {args.threads}, is 1",
        "",
        "| variant | " + " | ".join(heads) + " |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for one in variants:
        cells = [one.name]
        for mode in MODES:
            mine, fios = one.samples[mode], base.samples[mode]
            ratio = median(a.bytes_per_s / b.bytes_per_s for a, b in zip(mine, fios, strict=True))
            cells.append(
                f"{median(s.bytes_per_s for s in mine) / 1e9:.2f}, {ratio:.2f}, "
                f"{median(s.cpu_s_per_gb for s in mine) * 1e3:.0f}"
            )
        for mode in MODES[:2] if args.beside else ():
            ratio = median(
                rate / alone
                for (rate, _), (alone, _) in zip(one.beside[mode], free.beside[mode], strict=True)
            )
            cells.append(f"{ratio:.2f}, {median(b for _, b in one.beside[mode]) / 1e9:.2f}")
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def machine() -> str:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (
        f"{len(os.sched_getaffinity(0))} cores, {show_size(memory)}, Linux "
        f"{platform.release()}, torch {torch.__version__}"
    )


def measure(directory: Path, args: argparse.Namespace) -> str:
    nbytes = args.size * MiB
    file = directory / "fio"
    variants = [
        Variant("fio", fio(file, nbytes, {})),
        Variant("fio, huge pages", fio(file, nbytes, HUGE)),
    ]
    tiers = []
    for ring in args.rings:
        home = directory / ring
        home.mkdir()
        tiers.append(DiskTier([home], {}, Meter(), report_crash, rings=(ring,)))
        variants.append(Variant(ring, Stream(tiers[-1], nbytes, args.part * MiB)))
    for one in variants:
        one.run("write", None)
    free = Variant("alone", nothing)
    for round_ in range(args.rounds):
        turn = round_ % len(variants)  # a disk that is lent in bursts favours some place in a round
        order = variants[turn:] + variants[:turn]
        for mode in MODES:
            for one in order:
                one.samples[mode].append(one.run(mode, None))
        if args.beside:
            for mode in MODES[:2]:
                for one in (free, *order) if round_ % 2 else (*order, free):
                    one.beside[mode].append(beside(one, mode, args.beside))
    for tier in tiers:
        tier.close()
    return report(variants, free, args)


def report_crash(error: BaseException) -> None:
    raise error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--directory", default=None, help="where files are made, and removed")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int, default=1024, help="MiB of each file")
    parser.add_argument("--part", type=int, default=64, help="MiB of one transfer of the engine")
    parser.add_argument("--beside", type=float, default=2, help="seconds of matmul; 0 for none")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of matmul")
    parser.add_argument("--rings", nargs="*", default=["aio", "threads"])
    args = parser.parse_args()
    if shutil.which("fio") is None:
        parser.error("fio is not installed")
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        print(measure(Path(directory), args))


if __name__ == "__main__":
    main()
