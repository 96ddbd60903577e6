"""A training step from disk against plain torch in memory, and against the disk's own speed.

    python -m benchmarks.train_disk --disk /mnt/nvme --rounds 7

GPT-2's shape, 162 M parameters untied, one sequence of 128 tokens, fp32, fused AdamW, clipping.
Every variant is a process of its own that makes steps when it is told to. In every round each
makes a few in a row, and fio measures the disk; so a slow moment of the machine hits all. The first
of a row is not counted: while the others had their turn, the system may have taken memory from a
process that rested. Bytes are what the kernel counts for the process (`/proc/self/io`), memory is
its peak resident set.
"""

import argparse
import json
import math
import multiprocessing as mp
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import zcompile
from examples.train_gpt import GPT, Shape
from zcompile.planner import step_plan

SHAPE = Shape(layers=12, width=768, heads=12, context=128, vocabulary=50257)
WARM_UP = 3
PLANNED_WARM_UP = 8
"""Two steps that are watched, and those after which the plan is reviewed."""
COUNTED = 2
"""Steps of a variant in each round, after one that is not counted."""
FIO = (
    "fio",
    "--name=disk",
    "--direct=1",
    "--ioengine=io_uring",
    "--bs=4M",
    "--iodepth=16",
    "--output-format=json",
    "--size=512M",
)


class Moment(NamedTuple):
    seconds: float
    read_bytes: int
    written_bytes: int

    @classmethod
    def now(cls) -> "Moment":
        rows = dict(row.split(": ") for row in Path("/proc/self/io").read_text().splitlines())
        return cls(time.perf_counter(), int(rows["read_bytes"]), int(rows["write_bytes"]))

    def since(self, before: "Moment") -> "Moment":
        return Moment(*(b - a for a, b in zip(before, self, strict=True)))


@dataclass(frozen=True)
class Variant:
    """fields    of `zcompile.offload`; None trains plainly, in memory
    autocast  whether forward runs under torch.autocast in bf16
    on_disk   built in memory and offloaded then, so that all room on the host is kept for
              gradients, and weights and states rest on disk; else the host fills as it is built
    planned   steps are planned once two were seen; else entries rest where they were put first
    late      such a plan may let updates wait for the next forward
    """

    name: str
    fields: dict[str, Any] | None
    autocast: bool = False
    on_disk: bool = False
    planned: bool = False
    late: bool = True


@dataclass
class Series:
    """What one variant's steps took: up to the end of backward, and the rest of the step."""

    variant: Variant
    passes: list[Moment] = field(default_factory=list)
    updates: list[Moment] = field(default_factory=list)
    peak_bytes: int = 0
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        rows = zip(self.passes, self.updates, strict=True)
        return statistics.median(a.seconds + b.seconds for a, b in rows)

    def per_parameter(self, which: str) -> float:
        rows = zip(self.passes, self.updates, strict=True)
        total = statistics.median(getattr(a, which) + getattr(b, which) for a, b in rows)
        return total / parameters()


def parameters() -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(SHAPE).parameters())


def child(pipe: Connection, variant: Variant, disk: str) -> None:
    """Makes as many steps as a message says and sends what each took, until None comes."""
    torch.manual_seed(0)
    model, run = built(variant, disk)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(1)

    def step() -> tuple[Moment, Moment]:
        ids = torch.randint(SHAPE.vocabulary, (2, 1, SHAPE.context), generator=generator)
        begin = Moment.now()
        with torch.autocast("cpu", torch.bfloat16, enabled=variant.autocast):
            loss = run(ids[0], ids[1])
        loss.backward()
        middle = Moment.now()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return middle.since(begin), Moment.now().since(middle)

    while (steps := pipe.recv()) is not None:
        pipe.send([step() for _ in range(steps)])
    stats = {} if variant.fields is None else zcompile.stats(model)
    pipe.send((peak_resident_bytes(), stats))


def built(variant: Variant, disk: str) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    if variant.fields is None:
        model: nn.Module = GPT(SHAPE)
        return model, model
    if variant.on_disk:
        model = zcompile.offload(
            GPT(SHAPE), device="cpu", disk=disk, residency=False, **variant.fields
        )
        return model, torch.compile(model, backend="zinf")
    if not variant.late:
        step_plan.LATE_PAYS = math.inf
    with zcompile.init(device="cpu", disk=disk, residency=variant.planned, **variant.fields):
        model = GPT(SHAPE)
    return model, torch.compile(model, backend="zinf")


def peak_resident_bytes() -> int:
    (row,) = [r for r in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in r]
    return int(row.split()[1]) * 1024


@dataclass
class Disk:
    """fio's bytes per second, by what it was asked to do."""

    file: Path
    rates: dict[str, list[float]] = field(
        default_factory=lambda: {"read": [], "write": [], "rw": []}
    )

    def measure(self) -> None:
        for mode, rates in self.rates.items():
            done = subprocess.run(
                [*FIO, f"--filename={self.file}", f"--rw={mode}"],
                capture_output=True,
                text=True,
                check=True,
            )
            (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
            moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
            rates.append(moved / max(job["read"]["runtime"], job["write"]["runtime"]) * 1e3)

    def rate(self, mode: str) -> float:
        return statistics.median(self.rates[mode])


def bound_seconds(disk: Disk, eager: Series, ours: Series) -> float:
    """The least a step can take: disk beside torch's passes, then the disk for the update."""

    def time_of(moments: list[Moment]) -> float:
        reads = statistics.median(m.read_bytes for m in moments)
        writes = statistics.median(m.written_bytes for m in moments)
        if min(reads, writes) > max(reads, writes) / 10:
            return (reads + writes) / disk.rate("rw")
        return reads / disk.rate("read") + writes / disk.rate("write")

    passes = statistics.median(m.seconds for m in eager.passes)
    return max(time_of(ours.passes), passes) + time_of(ours.updates)


def row(disk: Disk, eager: Series, one: Series) -> str:
    ratio = one.seconds / eager.seconds
    memory = one.peak_bytes / eager.peak_bytes
    cells = [one.variant.name, f"{one.seconds:.2f}", f"{ratio:.2f}"]
    if one is eager:
        cells += ["", "", "", f"{memory:.2f}"]
    else:
        bound = bound_seconds(disk, eager, one)
        cells += [f"{one.seconds / bound:.2f} of {bound:.2f}"]
        cells += [f"{one.per_parameter(w):.1f}" for w in ("read_bytes", "written_bytes")]
        cells += [f"{memory:.2f}"]
    return "| " + " | ".join(cells) + " |"


def measured(variants: list[Variant], where: Path, rounds: int) -> tuple[Disk, list[Series]]:
    context = mp.get_context("spawn")
    disk, running = Disk(where / "fio"), []
    for index, variant in enumerate(variants):
        here, there = context.Pipe()
        directory = where / str(index)
        directory.mkdir()
        process = context.Process(target=child, args=(there, variant, str(directory)))
        process.start()
        there.close()
        running.append((process, here, Series(variant)))
    warm_up = PLANNED_WARM_UP if any(v.planned for v in variants) else WARM_UP
    for _, pipe, _ in running:
        pipe.send(warm_up)
        pipe.recv()
    for _ in range(rounds):
        for _, pipe, series in running:
            pipe.send(1 + COUNTED)
            for passes, update in pipe.recv()[1:]:
                series.passes.append(passes)
                series.updates.append(update)
        disk.measure()
    for process, pipe, series in running:
        pipe.send(None)
        series.peak_bytes, series.stats = pipe.recv()
        process.join()
    return disk, [series for _, _, series in running]


def variants_of(args: argparse.Namespace) -> list[Variant]:
    found = [Variant("torch, in memory", None)]
    if args.planned:
        for host in args.host_memory:
            fields = {"device_memory": args.device_memory, "host_memory": host}
            if args.disk_rate:
                fields["throttle"] = dict.fromkeys(("disk_read", "disk_write"), args.disk_rate)
            name = f"zinf, planned, host {host}"
            found.append(Variant(name, fields, planned=True))
            found.append(Variant(f"{name}, no late updates", fields, planned=True, late=False))
        return found
    for host in args.host_memory:
        fields = {"device_memory": args.device_memory, "host_memory": host}
        found.append(Variant(f"zinf, host {host}", fields))
        if host == args.host_memory[0]:
            found.append(Variant(f"zinf, host {host}, weights on disk", fields, on_disk=True))
    if args.autocast:
        fields = {"device_memory": args.device_memory, "host_memory": args.host_memory[0]}
        narrow = fields | {"param_dtype": torch.bfloat16}
        found.append(Variant("torch, autocast", None, autocast=True))
        found.append(Variant("zinf, autocast", fields, autocast=True))
        found.append(Variant("zinf, autocast, bf16 weights", narrow, autocast=True))
    if args.durable:
        fields = {"device_memory": args.device_memory, "host_memory": args.host_memory[0]}
        found.append(Variant("zinf, durable", fields | {"durable": True}))
    return found


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--disk", help="a directory on the disk to use")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device-memory", default="400MiB")
    parser.add_argument("--host-memory", nargs="+", default=["800MiB", "400MiB", "1400MiB"])
    parser.add_argument("--autocast", action="store_true", help="bf16 autocast as well")
    parser.add_argument("--durable", action="store_true", help="a durable run as well")
    parser.add_argument("--planned", action="store_true", help="planned steps, and nothing else")
    parser.add_argument("--disk-rate", help="throttle the disk, as in 600MB/s; of planned steps")
    parser.add_argument("--stats", action="store_true", help="print zcompile.stats as well")
    args = parser.parse_args()
    where = Path(tempfile.mkdtemp(dir=args.disk))
    try:
        disk, series = measured(variants_of(args), where, args.rounds)
    finally:
        shutil.rmtree(where)
    eager = series[0]
    print(
        f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, "
        f"{parameters() / 1e6:.0f} M parameters, device {args.device_memory}, "
        f"{args.rounds} rounds; fio reads {disk.rate('read') / 1e9:.2f}, writes "
        f"{disk.rate('write') / 1e9:.2f}, both {disk.rate('rw') / 1e9:.2f} GB/s; torch needs "
        f"{eager.peak_bytes / 2**20:.0f} MiB\n"
    )
    heads = (
        "variant",
        "median s",
        "of torch's",
        "of the bound, s",
        "B read",
        "B written",
        "of torch's memory",
    )
    print("| " + " | ".join(heads) + " |")
    print("|---|---|---|---|---|---|---|")
    plain = {s.variant.autocast: s for s in series if s.variant.fields is None}
    for one in series:
        print(row(disk, plain[one.variant.autocast], one))
        if args.stats and one.stats:
            print(json.dumps(one.stats))


if __name__ == "__main__":
    main()
