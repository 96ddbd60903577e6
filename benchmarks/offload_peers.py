"""States off the device, beside others that take them off: torchao's optimizer, FSDP2's policy.

    python -m benchmarks.offload_peers [--only compiled torchao zinf] [--out peers.json]

The case is torchao's own: a ViT-giant of 1.1 B parameters (timm), all in bfloat16, 32 images a
step, AdamW. "eager" and "compiled" have everything on the device; "torchao" is its
`CPUOffloadOptimizer` with gradients offloaded, over the compiled model; "FSDP2" one rank of
`fully_shard` with `CPUOffloadPolicy`, block by block, over the compiled blocks. zinf is given as
device memory what torchao's step held at its peak (or `--device-memory`), and keeps the rest on the
host: "zinf" with eager regions, "zinf, Inductor" with `regions="inductor"`. One after the other in
one process, each with batches and a start of its own from the same seed; medians, as ratios to
"compiled". What is not installed is said and left out.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zcompile
from zcompile.ir.units import show_size

WARM_UP = 8
"""Two steps as the passes planned them, four under the first plan, and what its review compiles."""
CLASSES = 1000
Step = Callable[[Tensor, Tensor], Tensor]


def vision_model(args: argparse.Namespace) -> nn.Module:
    import timm

    torch.manual_seed(0)
    with torch.device(args.device):
        made = timm.create_model(
            args.model, img_size=args.image, num_classes=CLASSES, depth=args.depth
        )
    moved: nn.Module = made.to(torch.bfloat16)
    return moved


def step_of(run: Callable[..., Tensor], optimizer: Any) -> Step:
    def step(images: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(run(images).float(), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@contextmanager
def eager(args: argparse.Namespace) -> Iterator[Step]:
    model = vision_model(args)
    yield step_of(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


@contextmanager
def compiled(args: argparse.Namespace) -> Iterator[Step]:
    model = vision_model(args)
    run = torch.compile(model, dynamic=False)
    yield step_of(run, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


@contextmanager
def torchao(args: argparse.Namespace) -> Iterator[Step]:
    from torchao.optim import CPUOffloadOptimizer

    model = vision_model(args)
    made = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=1e-4
    )
    yield step_of(torch.compile(model, dynamic=False), made)


@contextmanager
def fsdp(args: argparse.Namespace) -> Iterator[Step]:
    """One rank, whose weights, gradients and states rest on the host, where they are updated."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    backend = "cuda:nccl,cpu:gloo" if args.device == "cuda" else "gloo"
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        model: Any = vision_model(args)
        policy = CPUOffloadPolicy(pin_memory=args.device == "cuda")
        for block in model.blocks:
            block.compile(dynamic=False)
            fully_shard(block, offload_policy=policy)
        fully_shard(model, offload_policy=policy)
        yield step_of(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def zinf(args: argparse.Namespace, regions: str = "eager") -> Iterator[Step]:
    model = vision_model(args).cpu()
    zcompile.offload(
        model,
        device=args.device,
        device_memory=args.device_memory,
        host_memory=args.host_memory,
        regions=regions,
    )
    run = torch.compile(model, backend="zinf", dynamic=False)
    try:
        yield step_of(run, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
        found = zcompile.stats(model)
        told = {key: found.get(key) for key in ("predicted", "seconds", "peak", "bytes", "steps")}
        print(f"zinf told: {json.dumps(told, default=str)}", file=sys.stderr, flush=True)
    finally:
        zcompile.close(model)


@contextmanager
def zinf_inductor(args: argparse.Namespace) -> Iterator[Step]:
    with zinf(args, "inductor") as step:
        yield step


VARIANTS = {
    "eager": eager,
    "compiled": compiled,
    "torchao": torchao,
    "FSDP2": fsdp,
    "zinf": zinf,
    "zinf, Inductor": zinf_inductor,
}


def measured(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A row: seconds of the steps that were timed, and what the device held at its peak."""
    cuda = args.device == "cuda"
    generator = torch.Generator().manual_seed(1)
    shape = (args.batch, 3, args.image, args.image)
    found: dict[str, Any] = {"variant": name, "seconds": []}
    begin = time.perf_counter()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with VARIANTS[name](args) as step:
        for round_ in range(args.warm_up + args.rounds):
            images = torch.randn(shape, generator=generator).to(args.device, torch.bfloat16)
            labels = torch.randint(CLASSES, (args.batch,), generator=generator).to(args.device)
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            loss = step(images, labels)
            if cuda:
                torch.cuda.synchronize()
            now = time.perf_counter()
            if round_ == 0:
                found["first step"] = now - begin
            if round_ >= args.warm_up:
                found["seconds"].append(now - start)
        found["loss"] = float(loss)
    if cuda:
        found["peak"] = torch.cuda.max_memory_allocated()
        found["reserved"] = torch.cuda.max_memory_reserved()
    found["median"] = statistics.median(found["seconds"])
    return found


def line(row: dict[str, Any], compiled_s: float | None) -> str:
    ratio = f"{row['median'] / compiled_s:.2f}" if compiled_s else ""
    peak = show_size(row["peak"]) if "peak" in row else ""
    return (
        f"| {row['variant']} | {row['median']:.4f} | {ratio} | {peak} | {row['first step']:.1f} | "
        f"{row['loss']:.4f} |"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="vit_giant_patch14_dinov2", help="a name of timm's")
    parser.add_argument("--depth", type=int, default=40)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=WARM_UP)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--device-memory", help="of zinf; default: torchao's peak")
    parser.add_argument("--host-memory", default="24GiB")
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--out", type=Path, help="a file for the rows, as JSON")
    args = parser.parse_args(argv)
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU device"
    print(f"{where}, torch {torch.__version__}: {args.model}, {args.depth} blocks, batch ", end="")
    print(f"{args.batch} of {args.image} x {args.image}, bfloat16\n")
    print("| variant | s | of compiled | peak | first step s | loss |")
    print("|---|---|---|---|---|---|", flush=True)
    rows: list[dict[str, Any]] = []
    compiled_s = None
    for name in args.only:
        try:
            row = measured(name, args)
        except (
            ImportError,
            AssertionError,
        ) as error:  # on purpose: it is told; torchao asserts a card
            print(f"{name} is left out: {error}", file=sys.stderr, flush=True)
            continue
        if name == "compiled":
            compiled_s = row["median"]
        if name == "torchao" and args.device_memory is None:
            args.device_memory = row["peak"]
        rows.append(row)
        print(line(row, compiled_s), flush=True)
        if args.out:
            told = {"on": where, "torch": torch.__version__, "rows": rows}
            args.out.write_text(json.dumps(told, indent=1))
        torch._dynamo.reset()
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
