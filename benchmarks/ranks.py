"""A step over throttled links as one model is shared by more ranks: each brings its own shares.

    python -m benchmarks.ranks --ranks 1 2 4 --link 4MB/s

Each rank takes one sequence, so that every rank computes as much however many there are. Host to
device and back are paced; what crosses between ranks (gloo, on this machine) is not. A real fabric
and real links are other figures: these show that every rank moves its part, and nothing else.
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
STEPS = 4
"""The first compiles, and does not count."""


def measured(rank: int, ranks: int, port: int, link: str, told: Any) -> None:
    """Train on one rank; rank 0 tells the seconds of its steps, and the bytes."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = zcompile.offload(
        GPT(SHAPE),
        device="cpu",
        mesh=DeviceMesh("cpu", list(range(ranks))),
        device_memory="6MiB",
        host_memory="128MiB",
        throttle={"h2d": link, "d2h": link},
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    run = torch.compile(model, backend="zinf")
    ids = torch.randint(512, (1, 33), generator=torch.Generator().manual_seed(rank))
    seconds = []
    for step in range(STEPS):
        if step == 1:
            zcompile.stats(model, reset=True)
        begin = time.perf_counter()
        run(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    stats = zcompile.stats(model)
    if rank == 0:
        moved = (stats["bytes"]["h2d"] + stats["bytes"]["d2h"]) / (STEPS - 1)
        fabric = sum(stats["fabric"]["bytes"].values()) / (STEPS - 1)
        told.put((min(seconds[1:]), moved, fabric))
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--link", default="4MB/s", help="of host to device, and back")
    asked = parser.parse_args()
    count = sum(p.numel() for p in GPT(SHAPE).parameters())
    print(f"{count / 1e6:.2f} M parameters, links of {asked.link}; one sequence per rank")
    print("| ranks | step, s | of one rank's | moved per rank and step, MiB | sent to ranks, MiB |")
    print("| --- | --- | --- | --- | --- |")
    alone = 0.0
    for ranks in asked.ranks:
        told = mp.get_context("spawn").SimpleQueue()
        mp.spawn(measured, (ranks, free_port(), asked.link, told), nprocs=ranks)
        seconds, moved, fabric = told.get()
        alone = alone or seconds
        row = f"{ranks} | {seconds:.2f} | {seconds / alone:.2f}"
        print(f"| {row} | {moved / 2**20:.1f} | {fabric / 2**20:.1f} |", flush=True)


if __name__ == "__main__":
    main()
