"""One call with the whole batch beside the stock loop over its micro-batches, where the disk binds.

    python -m benchmarks.whole_batch --rounds 3

A GPT whose entries rest on a throttled disk, trained on 8 samples a step by two loops under the
same budgets: `backward` of each micro-batch of one sample, which brings every weight twice for
each, and one forward and `backward` of all 8, which brings it twice in all. What a forward keeps
for all samples does not fit, so passes run parts of the model over slices of the batch, compute
again or send values off. Every run is a process of its own, and they take turns. Beside the times
stands how far the gradient of a first step is from that of plain torch in one call, as the largest
difference of a parameter over its largest entry.
"""

import argparse
import copy
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zcompile
from examples.train_gpt import GPT, Shape

SAMPLES = 8
WARM_UP = 5
"""Two steps that are watched, and some for the reviews of the plan."""
Loop = Callable[[Callable[..., Tensor], Tensor, Tensor], None]


def micro_batches(run: Callable[..., Tensor], inputs: Tensor, targets: Tensor) -> None:
    """The stock loop: gradients of the mean over all samples."""
    for one, wanted in zip(inputs.split(1), targets.split(1), strict=True):
        (run(one, wanted) / SAMPLES).backward()


def whole_batch(run: Callable[..., Tensor], inputs: Tensor, targets: Tensor) -> None:
    run(inputs, targets).backward()


LOOPS: dict[str, Loop] = {"micro-batches": micro_batches, "whole batch": whole_batch}


def gradient_error(model: nn.Module, twin: nn.Module) -> float:
    """The largest relative difference of a parameter's gradient."""
    found = 0.0
    for (name, param), (other, expected) in zip(
        model.named_parameters(), twin.named_parameters(), strict=True
    ):
        assert name == other
        assert param.grad is not None, name
        assert expected.grad is not None, name
        difference = (param.grad.clone() - expected.grad).abs().max()
        found = max(found, float(difference / expected.grad.abs().max()))
    return found


def measured(args: argparse.Namespace, loop: Loop) -> dict[str, Any]:
    """Seconds a step, medians; what the disk moved in one; the peak; the error of gradients."""
    torch.manual_seed(0)
    model = GPT(Shape(args.layers, args.width, args.width // 64, args.tokens, args.vocabulary))
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    shape = (SAMPLES, args.tokens + 1)

    def batch() -> tuple[Tensor, Tensor]:
        ids = torch.randint(args.vocabulary, shape, generator=generator)
        return ids[:, :-1], ids[:, 1:]

    with tempfile.TemporaryDirectory(dir=args.disk) as disk:
        zcompile.offload(
            model,
            device="cpu",
            device_memory=args.device_memory,
            host_memory=args.host_memory,
            disk=disk,
            throttle=dict.fromkeys(("disk_read", "disk_write"), args.disk_rate),
        )
        run = torch.compile(model, backend="zinf")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        seconds, error = [], 0.0
        for number in range(WARM_UP + args.steps):
            data = batch()
            begin = time.perf_counter()
            loop(run, *data)
            if number == 0:
                whole_batch(twin, *data)
                error = gradient_error(model, twin)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - begin)
            if number == WARM_UP - 1:
                before = zcompile.stats(model)["bytes"]
        stats = zcompile.stats(model)
        moved = stats["bytes"]
        zcompile.close(model)
    links = ("disk_read", "disk_write")
    return {
        "seconds": statistics.median(seconds[WARM_UP:]),
        "moved": sum(moved[link] - before[link] for link in links) / args.steps,
        "peak": stats["peak"]["together"],
        "error": error,
        "inexact": sorted({row["by"] for row in stats["inexact"]}),
    }


def alone(name: str) -> dict[str, Any]:
    """What `measured` finds of one loop, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.whole_batch", *sys.argv[1:], "--one", name]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(made.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--device-memory", default="12MiB")
    parser.add_argument("--host-memory", default="32MiB")
    parser.add_argument("--disk-rate", default="50MB/s")
    parser.add_argument("--disk", default=None, help="a directory; else that of temporary files")
    parser.add_argument("--one", choices=LOOPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(args, LOOPS[args.one])))
        return
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in LOOPS}
    for _ in range(args.rounds):
        for name in LOOPS:
            rows[name].append(alone(name))
    print(
        f"{args.layers} layers x {args.width}, {SAMPLES} x {args.tokens} tokens a step, device "
        f"{args.device_memory}, host {args.host_memory}, disk {args.disk_rate} each way\n"
    )
    heads = ("loop", "s a step", "of the loop's", "disk MB", "peak MiB", "gradient", "inexact by")
    print("| " + " | ".join(heads) + " |")
    print("|" + "---|" * len(heads))
    slowest = statistics.median(row["seconds"] for row in rows["micro-batches"])
    for name, found in rows.items():
        seconds = statistics.median(row["seconds"] for row in found)
        last = found[-1]
        print(
            f"| {name} | {seconds:.2f} | {seconds / slowest:.2f} | {last['moved'] / 1e6:.0f} | "
            f"{last['peak'] / 2**20:.1f} | {last['error']:.1e} | {', '.join(last['inexact'])} |"
        )


if __name__ == "__main__":
    main()
