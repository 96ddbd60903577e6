"""A step over throttled links as one model is shared by more ranks: each brings its own shares.

    python -m benchmarks.ranks --ranks 1 2 4 --link 4MB/s
    python -m benchmarks.ranks --ranks 2 --stages
    python -m benchmarks.ranks --ranks 1 2 4 --saves DIR
    python -m benchmarks.ranks --ranks 1 2 --planned
    python -m benchmarks.ranks --ranks 2 --lanes DIR
    python -m benchmarks.ranks --ranks 2 --beside
    python -m benchmarks.ranks --ranks 2 --beside --blocks 2 --width 128
    python -m benchmarks.ranks --ranks 2 4 --owner --link 10MB/s

Each rank takes one sequence, so that every rank computes as much however many there are. Host to
device and back are paced; what crosses between ranks (gloo, on this machine) is not. A real fabric
and real links are other figures: these show that every rank moves its part, and nothing else.
With `--stages` nothing is paced and the device has room for all, so that what crosses between ranks
decides: the stages of ZeRO beside each other, with two micro-batches in a step. With `--saves`
weights are saved to a directory: by zcompile, and by torch.distributed.checkpoint from FSDP2. With
`--planned` steps are planned, and stand beside their prediction. With `--lanes` a model of which
little is trained rests on disk, and disk, bus and the link between ranks are paced so that each
takes as long: so does the step, if they work at once. With
`--beside` FSDP2 (gloo) trains the same model in the same processes, step by step in turn, and what
of a step is processor's time of rank 0 is told too, which other work beside it changes less. With
`--owner` each weight of a stack is sliced over all ranks, or all of it is with one: the buses of
all bring it, or that of one, and how many weights the device has room for decides what that costs.
"""

import argparse
import os
import shutil
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch import multiprocessing as mp
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

import zcompile
from examples.train_gpt import GPT, Shape
from zcompile.frontend.offload import session_behind
from zcompile.frontend.replan import PREDICTED_FOR
from zcompile.ir.units import parse_rate

STACKED, BROAD = 6, 512
"""Weights of a stack, of 1 MiB each, and their width."""
ROUNDS = 3
"""Of which the best counts, and the first, which compiles, does not."""
WINDOWS: dict[str, dict[str, Any]] = {
    "max_lead=0": {"device_memory": "2304KiB", "max_lead": 0},
    "two weights": {"device_memory": "2304KiB"},
    "four weights": {"device_memory": "4352KiB"},
}
"""Of the device, and how far ahead of their readers weights come."""
SAVED, WIDTH = 8, 4096
"""Weights of a model that is saved, 64 MiB each, and their width."""
SAVES = 4
"""The first of which does not count."""
SHAPE = Shape(layers=4, width=192, heads=4, context=32, vocabulary=512)
STEPS, PLANNED = 4, 12
"""Steps, and of runs in which only planned ones count."""
DEEP = Shape(layers=8, width=256, heads=4, context=32, vocabulary=512)
WIDE = Shape(layers=12, width=512, heads=8, context=128, vocabulary=512)
BESIDE_DISK = "1536KiB"
"""Host memory of a run whose weights are to rest on disk: for staging, and little else."""
SEEN, COUNTED = 4, PREDICTED_FOR + 1
"""Steps before a plan has settled, and those of it that count: more than a prediction is kept for,
so that the one that is told knows them, and not those in which schedules were still being made."""


def measured(
    rank: int, ranks: int, port: int, fields: dict[str, Any], skipped: int, passes: int, told: Any
) -> None:
    """Train on one rank; rank 0 tells the seconds of its steps, and the bytes.

    skipped  of the steps, that do not count: the first compiles
    """
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = zcompile.offload(
        GPT(SHAPE),
        device="cpu",
        mesh=DeviceMesh("cpu", list(range(ranks))),
        host_memory="128MiB",
        **fields,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    run = torch.compile(model, backend="zinf")
    ids = torch.randint(512, (1, 33), generator=torch.Generator().manual_seed(rank))
    seconds = []
    steps = PLANNED if skipped > 1 else STEPS
    for step in range(steps):
        if step == skipped:
            zcompile.stats(model, reset=True)
        seconds.append(timed_step(run, ids, optimizer, passes))
    stats = zcompile.stats(model)
    if rank == 0:
        moved = (stats["bytes"]["h2d"] + stats["bytes"]["d2h"]) / (steps - skipped)
        fabric = sum(stats["fabric"]["bytes"].values()) / (steps - skipped)
        whole = stats["plan"]["whole_bytes"]
        told.put((min(seconds[skipped:]), moved, fabric, whole, stats["peak"]["device"]))
    dist.barrier()
    dist.destroy_process_group()


def timed_step(
    run: Callable[..., Any], ids: Tensor, optimizer: torch.optim.Optimizer, passes: int = 1
) -> float:
    """Seconds of a step of so many micro-batches, which are all the same tokens."""
    begin = time.perf_counter()
    for _ in range(passes):
        run(ids[:, :-1], ids[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - begin


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def trained(ranks: int, fields: dict[str, Any], skipped: int, passes: int) -> Any:
    """What rank 0 of so many tells."""
    told = mp.get_context("spawn").SimpleQueue()
    mp.spawn(measured, (ranks, free_port(), fields, skipped, passes, told), nprocs=ranks)
    return told.get()


def compare_stages(ranks: int) -> None:
    """A table of the stages of ZeRO, over so many ranks."""
    print(f"{ranks} ranks, two micro-batches in a step")
    print("| stage | step, s | of stage 3's | sent to ranks, MiB | kept whole, MiB | device, MiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    third = 0.0
    for stage in (3, 2, "auto"):
        fields = {"device_memory": "48MiB", "stage": stage}
        seconds, _, fabric, whole, device = trained(ranks, fields, PLANNED // 2, 2)
        third = third or seconds
        row = f"{stage} | {seconds:.3f} | {seconds / third:.2f} | {fabric / 2**20:.1f}"
        print(f"| {row} | {whole / 2**20:.1f} | {device / 2**20:.1f} |", flush=True)


def planned(
    rank: int, ranks: int, port: int, cases: dict[str, tuple[Shape, dict[str, Any]]], told: Any
) -> None:
    """Train by plans on one rank, case after case; rank 0 tells the seconds of their steps, and
    what was predicted.

    cases  name -> a shape, and fields of the config; with a disk only norms and biases train
    """
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = DeviceMesh("cpu", list(range(ranks)))
    for name, (shape, fields) in cases.items():
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = GPT(shape)
        for param in model.parameters():
            param.requires_grad_("disk" not in fields or param.dim() == 1)
        model = zcompile.offload(model, device="cpu", mesh=mesh, **fields)
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
        run = torch.compile(model, backend="zinf")
        ids = torch.randint(512, (1, 33), generator=torch.Generator().manual_seed(rank))
        seconds = []
        dist.barrier()
        for step in range(SEEN + COUNTED):  # without a barrier: that is no part of a step
            if step == SEEN:
                zcompile.stats(model, reset=True)
            seconds.append(timed_step(run, ids, optimizer))
        stats = zcompile.stats(model)
        if rank == 0:
            moved = {link: nbytes / COUNTED for link, nbytes in stats["bytes"].items()}
            told.put((name, statistics.median(seconds[SEEN:]), moved, stats["predicted"]))
        zcompile.close(model)
    dist.barrier()
    dist.destroy_process_group()


def by_plans(
    ranks: int, cases: dict[str, tuple[Shape, dict[str, Any]]]
) -> Iterator[tuple[str, float, dict[str, float], Any]]:
    """What rank 0 of so many tells of each case: name, seconds, bytes of each link, prediction."""
    told = mp.get_context("spawn").SimpleQueue()
    running = mp.spawn(planned, (ranks, free_port(), cases, told), nprocs=ranks, join=False)
    while not running.join(1.0):
        while not told.empty():
            yield told.get()
    while not told.empty():
        yield told.get()


def compare_planned(ranks: list[int], link: str) -> None:
    """A table of planned steps, beside what was predicted of them."""
    print(f"planned steps, h2d and d2h of {link}, one sequence per rank")
    print("| ranks | step, s | of one rank's | predicted, s | of that | least, s |")
    print("| --- | --- | --- | --- | --- | --- |")
    alone = 0.0
    for count in ranks:
        fields = {
            "device_memory": "6MiB",
            "host_memory": "128MiB",
            "throttle": {"h2d": link, "d2h": link},
            "stage": 3,
        }
        ((_, seconds, _, predicted),) = by_plans(count, {"planned": (SHAPE, fields)})
        alone = alone or seconds
        step_s, least_s = predicted["step_s"], predicted["least_s"]
        row = f"{count} | {seconds:.3f} | {seconds / alone:.2f} | {step_s:.3f}"
        print(f"| {row} | {seconds / step_s:.2f} | {least_s:.3f} |", flush=True)


def compare_lanes(ranks: int, link: str, disk: str) -> None:
    """A table of steps over three lanes that take equally long, with prefetch and without.

    link  rate of the one between ranks; the others are as slow for the bytes that they move then
    """
    lanes, rate = ("disk_read", "h2d", "rank_to_rank"), float(parse_rate(link))
    fields = {
        "device_memory": "6MiB",
        "host_memory": BESIDE_DISK,
        "disk": disk,
        "throttle": dict.fromkeys(lanes, rate),
        "stage": 3,
    }
    ((_, _, moved, _),) = by_plans(ranks, {"first": (DEEP, fields)})
    slow = {lane: max(1.0, rate * moved[lane] / moved["rank_to_rank"]) for lane in lanes}
    fields["throttle"] = slow
    cases = {"on": (DEEP, fields), "off": (DEEP, {**fields, "max_lead": 0})}
    told = ", ".join(f"{lane} {at / 1e6:.1f}" for lane, at in slow.items())
    print(f"{ranks} ranks, weights frozen; MB/s: {told}")
    print("| prefetch | step, s | of the longest lane | predicted, s | least, s | each lane, s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, seconds, moved, predicted in by_plans(ranks, cases):
        busy = [moved[lane] / slow[lane] for lane in lanes]
        least, step_s = predicted["least_s"], predicted["step_s"]
        row = f"{name} | {seconds:.3f} | {seconds / max(busy):.2f} | {step_s:.3f} | {least:.3f}"
        print(f"| {row} | {', '.join(f'{s:.3f}' for s in busy)} |", flush=True)


def beside(rank: int, ranks: int, port: int, shape: Shape, offloads: bool, told: Any) -> None:
    """Train a model by FSDP2 and by zcompile on one rank, a step of each in turn; rank 0 tells the
    seconds of their steps.

    offloads  FSDP2 keeps shares in host memory by its policy, zcompile beside a small device
    """
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = DeviceMesh("cpu", list(range(ranks)))
    ids = torch.randint(512, (1, 129), generator=torch.Generator().manual_seed(rank))
    torch.manual_seed(0)
    peer = GPT(shape)
    policy = CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy()
    for block in peer.blocks:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(peer, mesh=mesh, offload_policy=policy)
    torch.manual_seed(0)
    memory = "64MiB" if offloads else "1GiB"
    model = zcompile.offload(
        GPT(shape), device="cpu", mesh=mesh, device_memory=memory, host_memory="1GiB"
    )
    seconds: dict[str, list[float]] = {"FSDP2": [], "zcompile": []}
    busy: dict[str, list[float]] = {name: [] for name in seconds}
    steps: dict[str, Callable[[], Tensor]] = {}

    def step_of(params: Any, run: Callable[..., Tensor]) -> Callable[[], Tensor]:
        optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)

        def step() -> Tensor:
            loss = run(ids[:, :-1], ids[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    steps["FSDP2"] = step_of(peer.parameters(), peer)
    steps["zcompile"] = step_of(model.parameters(), torch.compile(model, backend="zinf"))
    losses: dict[str, Tensor] = {}
    for _ in range(SEEN + COUNTED):
        for name, step in steps.items():
            dist.barrier()
            begin, busy_before = time.perf_counter(), time.process_time()
            losses[name] = step()
            seconds[name].append(time.perf_counter() - begin)
            busy[name].append(time.process_time() - busy_before)
    if rank == 0:
        medians, of_processor = (
            {name: statistics.median(all_[SEEN:]) for name, all_ in taken.items()}
            for taken in (seconds, busy)
        )
        same = bool(losses["FSDP2"] == losses["zcompile"])
        told.put((medians, of_processor, same, zcompile.stats(model)["plan"]["stage"]))
    dist.barrier()
    dist.destroy_process_group()


def compare_with_fsdp(ranks: int, shape: Shape) -> None:
    """A table of steps of FSDP2 and of zcompile, in the same processes."""
    blocks = f"{shape.layers} blocks of width {shape.width}"
    print(f"{ranks} ranks, {blocks}, one sequence of 128 tokens per rank, AdamW")
    columns = "FSDP2, s | zcompile, s | ratio | processor: FSDP2, s | zcompile, s | ratio"
    print(f"| in host memory | stage | {columns} | same loss |")
    print(f"|{' --- |' * 9}")
    for offloads in (False, True):
        told = mp.get_context("spawn").SimpleQueue()
        mp.spawn(beside, (ranks, free_port(), shape, offloads, told), nprocs=ranks)
        *both, same, stage = told.get()
        where = "by CPU offload" if offloads else "all, no offload"
        cells = [
            f"{taken['FSDP2']:.3f} | {taken['zcompile']:.3f} | "
            f"{taken['zcompile'] / taken['FSDP2']:.2f}"
            for taken in both
        ]
        print(f"| {where} | {stage} | {' | '.join(cells)} | {same} |", flush=True)


class Stack(nn.Module):
    """Square matrices one after the other, and nothing else that is large."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(BROAD, BROAD, bias=False) for _ in range(STACKED))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def _go_through(run: Callable[..., Tensor], x: Tensor) -> None:
    run(x).square().mean().backward()


def with_owners(rank: int, ranks: int, port: int, link: str, told: Any) -> None:
    """Go through a stack of weights that are sliced, and that each have an owner, in each window;
    rank 0 tells the seconds of an evaluation, of forward and backward, and of a step of SGD, and
    whether the weights after that are the same.
    """
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = DeviceMesh("cpu", list(range(ranks)))
    x = torch.randn(4, BROAD, generator=torch.Generator().manual_seed(rank))
    for window, more in WINDOWS.items():
        ends = []
        for partition in ("slices", "owner"):
            torch.manual_seed(0)
            torch._dynamo.reset()
            model = zcompile.offload(
                Stack(),
                device="cpu",
                mesh=mesh,
                host_memory="256MiB",
                throttle={"h2d": link, "d2h": link},
                stage=3,
                residency=False,
                partition=partition,
                **more,
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            run = torch.compile(model, backend="zinf")

            parts: dict[str, Callable[[], object]] = {
                "evaluation": torch.no_grad()(partial(run, x)),
                "forward, backward": partial(_go_through, run, x),
                "optimizer": optimizer.step,
            }
            seconds: dict[str, list[float]] = {name: [] for name in parts}
            for _ in range(ROUNDS):
                for name, part in parts.items():
                    dist.barrier()
                    begin = time.perf_counter()
                    part()
                    session_behind(model).drain()  # what is under way belongs to it
                    dist.barrier()
                    seconds[name].append(time.perf_counter() - begin)
                optimizer.zero_grad()
            ends.append(torch.cat([param.detach().flatten()[:9] for param in model.parameters()]))
            zcompile.close(model)
            if rank == 0:
                same = all(torch.equal(ends[0], end) for end in ends)
                best = {name: min(found[1:]) for name, found in seconds.items()}
                told.put((window, partition, best, same))
    dist.barrier()
    dist.destroy_process_group()


def compare_owners(ranks: int, link: str) -> None:
    """A table of weights that are sliced over so many ranks, and of such as one of them holds."""
    nbytes = BROAD * BROAD * 4 / 2**20
    print(
        f"{ranks} ranks, {STACKED} weights of {nbytes:.0f} MiB, h2d and d2h of {link} on each rank"
    )
    columns = ("evaluation, s", "forward and backward, s", "optimizer, s")
    print(f"| window | partition | {' | '.join(f'{c} | of slices' for c in columns)} | same bits |")
    print(f"|{' --- |' * 9}")
    told = mp.get_context("spawn").SimpleQueue()
    mp.spawn(with_owners, (ranks, free_port(), link, told), nprocs=ranks)
    sliced: dict[str, float] = {}
    while not told.empty():
        window, partition, seconds, same = told.get()
        sliced = seconds if partition == "slices" else sliced
        cells = [f"{s:.3f} | {s / sliced[name]:.2f}" for name, s in seconds.items()]
        print(f"| {window} | {partition} | {' | '.join(cells)} | {same} |", flush=True)


def saving(rank: int, ranks: int, port: int, kind: str, given: str, told: Any) -> None:
    """Save on one rank; each tells the seconds of all, the bytes and by how much memory grew."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = DeviceMesh("cpu", list(range(ranks)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(SAVED)))
    nbytes = sum(param.nbytes for param in model.parameters())
    if kind == "zcompile":
        memory = {"device_memory": "256MiB", "host_memory": f"{nbytes + 2**28}B"}
        zcompile.offload(model, device="cpu", mesh=mesh, **memory)
    else:
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    seconds = []
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    for number in range(SAVES):
        path = Path(given) / f"{kind}-{number}"
        dist.barrier()
        begin = time.perf_counter()
        if kind == "zcompile":
            zcompile.save(path, model)
        else:
            dcp.save(model.state_dict(), checkpoint_id=path)
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
        if rank == 0:
            shutil.rmtree(path)
    told.put((rank, min(seconds[1:]), nbytes, _memory("VmHWM") - before))
    dist.barrier()
    dist.destroy_process_group()


def _memory(field: str) -> int:
    """Bytes of this process, as Linux counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def compare_saves(ranks: list[int], path: str) -> None:
    """A table of saves."""
    print("| ranks | saved by | s | GB/s | memory grew, MiB by rank |")
    print("| --- | --- | --- | --- | --- |")
    for count in ranks:
        for kind in ("zcompile", "FSDP2"):
            told = mp.get_context("spawn").SimpleQueue()
            mp.spawn(saving, (count, free_port(), kind, path, told), nprocs=count)
            rows = sorted(told.get() for _ in range(count))
            _, seconds, nbytes, _ = rows[0]
            grown = ", ".join(f"{row[3] / 2**20:.0f}" for row in rows)
            row = f"{count} | {kind} | {seconds:.2f} | {nbytes / seconds / 1e9:.2f}"
            print(f"| {row} | {grown} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--link", default="4MB/s", help="of host to device, and back")
    parser.add_argument("--stages", action="store_true", help="compare the stages of ZeRO")
    parser.add_argument("--saves", metavar="DIR", help="compare saves to a directory")
    parser.add_argument("--planned", action="store_true", help="compare with predictions")
    parser.add_argument("--lanes", metavar="DIR", help="pace three lanes alike, weights in there")
    parser.add_argument("--beside", action="store_true", help="compare with FSDP2")
    parser.add_argument("--blocks", type=int, default=WIDE.layers, help="of --beside")
    parser.add_argument("--width", type=int, default=WIDE.width, help="of --beside")
    parser.add_argument("--owner", action="store_true", help="compare slices with one owner each")
    asked = parser.parse_args()
    if asked.planned:
        compare_planned(asked.ranks, asked.link)
        return
    if asked.owner:
        for ranks in asked.ranks:
            compare_owners(ranks, asked.link)
        return
    for ranks in asked.ranks if asked.lanes or asked.beside else ():
        if asked.lanes:
            compare_lanes(ranks, asked.link, asked.lanes)
        else:
            heads = max(1, asked.width // 64)
            shape = replace(WIDE, layers=asked.blocks, width=asked.width, heads=heads)
            compare_with_fsdp(ranks, shape)
    if asked.lanes or asked.beside:
        return
    if asked.saves:
        compare_saves(asked.ranks, asked.saves)
        return
    if asked.stages:
        for ranks in asked.ranks:
            compare_stages(ranks)
        return
    count = sum(p.numel() for p in GPT(SHAPE).parameters())
    print(f"{count / 1e6:.2f} M parameters, links of {asked.link}; one sequence per rank")
    print("| ranks | step, s | of one rank's | moved per rank and step, MiB | sent to ranks, MiB |")
    print("| --- | --- | --- | --- | --- |")
    alone = 0.0
    for ranks in asked.ranks:
        throttle = {"h2d": asked.link, "d2h": asked.link}
        fields = {"device_memory": "6MiB", "throttle": throttle, "stage": 3}
        seconds, moved, fabric, _, _ = trained(ranks, fields, 1, 1)
        alone = alone or seconds
        row = f"{ranks} | {seconds:.2f} | {seconds / alone:.2f}"
        print(f"| {row} | {moved / 2**20:.1f} | {fabric / 2**20:.1f} |", flush=True)


if __name__ == "__main__":
    main()
