"""A step over throttled links as one model is shared by more ranks: each brings its own shares.

    python -m benchmarks.ranks --ranks 1 2 4 --link 4MB/s
    python -m benchmarks.ranks --ranks 2 --stages
    python -m benchmarks.ranks --ranks 1 2 4 --saves DIR

Each rank takes one sequence, so that every rank computes as much however many there are. Host to
device and back are paced; what crosses between ranks (gloo, on this machine) is not. A real fabric
and real links are other figures: these show that every rank moves its part, and nothing else.
With `--stages` nothing is paced and the device has room for all, so that what crosses between ranks
decides: the stages of ZeRO beside each other, with two micro-batches in a step. With `--saves`
weights are saved to a directory: by zcompile, and by torch.distributed.checkpoint from FSDP2.
"""

import argparse
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing as mp
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import zcompile
from examples.train_gpt import GPT, Shape

SAVED, WIDTH = 8, 4096
"""Weights of a model that is saved, 64 MiB each, and their width."""
SAVES = 4
"""The first of which does not count."""
SHAPE = Shape(layers=4, width=192, heads=4, context=32, vocabulary=512)
STEPS, PLANNED = 4, 12
"""Steps, and of runs in which only planned ones count."""


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
        begin = time.perf_counter()
        for _ in range(passes):
            run(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    stats = zcompile.stats(model)
    if rank == 0:
        moved = (stats["bytes"]["h2d"] + stats["bytes"]["d2h"]) / (steps - skipped)
        fabric = sum(stats["fabric"]["bytes"].values()) / (steps - skipped)
        whole = stats["plan"]["whole_bytes"]
        told.put((min(seconds[skipped:]), moved, fabric, whole, stats["peak"]["device"]))
    dist.barrier()
    dist.destroy_process_group()


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
    asked = parser.parse_args()
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
