"""A step over throttled links as one model is shared by more ranks: each brings its own shares.

    python -m benchmarks.ranks --ranks 1 2 4 --link 4MB/s
    python -m benchmarks.ranks --ranks 2 --stages

Each rank takes one sequence, so that every rank computes as much however many there are. Host to
device and back are paced; what crosses between ranks (gloo, on this machine) is not. A real fabric
and real links are other figures: these show that every rank moves its part, and nothing else.
With `--stages` nothing is paced and the device has room for all, so that what crosses between ranks
decides: the stages of ZeRO beside each other, with two micro-batches in a step.
"""

import argparse
import os
import socket
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh

import zcompile
from examples.train_gpt import GPT, Shape

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--link", default="4MB/s", help="of host to device, and back")
    parser.add_argument("--stages", action="store_true", help="compare the stages of ZeRO")
    asked = parser.parse_args()
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
