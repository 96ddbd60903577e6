"""What a planned step costs the host, where everything fits: beside eager, and where it goes.

    python -m benchmarks.host_time --widths 128 256 512 768
    python -m benchmarks.host_time --model vision --widths 128
    python -m benchmarks.host_time --clip --widths 128

A GPT of 12 layers, or an encoder of images with as many, on the emulated device, nothing throttled,
every state on the device. A step of each variant in turn: eager; the same ops without zcompile, on
a plain model under torch's backend "aot_eager_default_partitioner"; planned. `alone` is eager
before a device was opened in the process: from then on malloc gives freed blocks of 1 MiB and more
back to the system, which eager pays for as well. On a machine that is busy with other things,
`--clock process` takes the processor's time of this process instead: with one thread
(OMP_NUM_THREADS=1) it is all of a step in which nothing moves. What instructions take is told in
wall time only.
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zcompile
from examples.train_gpt import Shape
from examples.train_gpt import model as gpt
from zcompile.frontend.offload import session_behind
from zcompile.ir.units import MiB

WARM_UP = 12
"""Two steps as the passes planned them, some under the first plan, some after its review; walks
that are timed by instruction are over by then, but for one in sixteen."""
PARTS = ("forward", "backward", "optimizer")
Step = Callable[[Tensor, Tensor], tuple[float, ...]]


class Vision(nn.Module):
    """A vision transformer of torch's own layers: no run-time code was written with it in mind.

    Calls take images, [batch, 3, size, size], and the class of each, [batch].
    """

    def __init__(self, layers: int, width: int, patches: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 8, 8)
        self.where = nn.Parameter(torch.randn(1, patches, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        tokens = self.cut(images).flatten(2).transpose(1, 2) + self.where
        return nn.functional.cross_entropy(self.head(self.layers(tokens).mean(1)), classes)


CLASSES = 100


def built(args: argparse.Namespace, width: int) -> nn.Module:
    torch.manual_seed(0)
    if args.model == "vision":
        return Vision(args.layers, width, (side(args) // 8) ** 2)
    return gpt(Shape(args.layers, width, width // 64, args.sequence))


def side(args: argparse.Namespace) -> int:
    """Pixels in a row of an image that has `sequence` patches."""
    return 8 * math.isqrt(args.sequence)


def data(args: argparse.Namespace, number: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(number)
    if args.model == "vision":
        images = torch.randn(args.batch, 3, side(args), side(args), generator=made)
        return images, torch.randint(0, CLASSES, (args.batch,), generator=made)
    ids = torch.randint(0, 256, (args.batch, args.sequence + 1), generator=made)
    return ids[:, :-1], ids[:, 1:]


CLOCKS = {"wall": time.perf_counter, "process": time.process_time}


def stepper(
    model: nn.Module,
    run: Callable[..., Tensor],
    clock: Callable[[], float] = time.perf_counter,
    clip: bool = False,
) -> Step:
    """Seconds of forward, backward, and the optimizer with what it leaves to be cleared.

    clip  gradients are clipped by the norm of all, before the optimizer, with which it counts
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(ids: Tensor, targets: Tensor) -> tuple[float, ...]:
        times = [clock()]
        loss = run(ids, targets)
        times.append(clock())
        loss.backward()
        times.append(clock())
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(clock())
        return tuple(b - a for a, b in itertools.pairwise(times))

    return step


def causes(model: nn.Module, step: Step, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of one step by kind of instruction; what is in none of them is torch's own and ours
    between two schedules."""
    clocks = session_behind(model).executor.clocks
    session_behind(model).executor.keep_timeline()
    seen: list[dict[str, float]] = []
    for number in range(6):
        seconds: dict[str, float] = {"step": sum(step(*data(args, number)))}
        for walk in clocks.timeline():
            for x, begin, end in zip(
                walk.schedule.instructions, walk.begins, walk.ends, strict=True
            ):
                kind = type(x).__name__
                seconds[kind] = seconds.get(kind, 0.0) + end - begin
        seen.append(seconds)
    session_behind(model).executor.drop_timeline()
    kinds = seen[-1].keys()
    return {kind: statistics.median(row[kind] for row in seen[2:]) for kind in kinds}


def rows(args: argparse.Namespace, width: int) -> None:
    torch._dynamo.reset()
    plain, same = built(args, width), built(args, width)
    nbytes = 16 * sum(p.numel() for p in plain.parameters())
    clock = CLOCKS[args.clock]
    eager = stepper(plain, plain, clock, args.clip)
    alone = [sum(eager(*data(args, n))) for n in range(3 + args.steps)][3:]
    same_ops = torch.compile(same, backend="aot_eager_default_partitioner")
    regions = stepper(same, same_ops, clock, args.clip)
    model = zcompile.offload(
        built(args, width),
        device="cpu",
        host_memory="8GiB",
        device_memory=int(2.04 * nbytes) + 4 * MiB,
    )
    planned = stepper(model, torch.compile(model, backend="zinf"), clock, args.clip)
    taken: dict[str, list[tuple[float, ...]]] = {"eager": [], "same ops": [], "planned": []}
    variants = dict(zip(taken, (eager, regions, planned), strict=True))
    for number in range(WARM_UP + args.steps):
        for name, step in variants.items():
            taken[name].append(step(*data(args, number)))
        if number == WARM_UP - 1:
            zcompile.stats(model, reset=True)
            taken = {name: [] for name in taken}
    moved = sum(zcompile.stats(model)["bytes"].values())
    print(line(width, "eager, alone", (), statistics.median(alone), 0.0))
    for name, times in taken.items():
        ratio = statistics.median(
            sum(b) / sum(a) for a, b in zip(taken["eager"], times, strict=True)
        )
        parts = tuple(statistics.median(part) for part in zip(*times, strict=True))
        print(line(width, name, parts, statistics.median(map(sum, times)), ratio), flush=True)
    if args.clock != "wall":
        zcompile.close(model)
        return
    by = causes(model, planned, args)
    whole = by.pop("step")
    by["else"] = whole - sum(by.values())
    told = ", ".join(f"{kind} {1e3 * seconds:.1f}" for kind, seconds in by.items())
    print(f"| {width} | by cause, ms | {told}; {moved} bytes moved ||||")
    zcompile.close(model)


def line(width: int, name: str, parts: tuple[float, ...], whole: float, ratio: float) -> str:
    shown: list[Any] = [f"{1e3 * part:.1f}" for part in parts] or [""] * len(PARTS)
    last = f"{ratio:.3f}" if ratio else ""
    return f"| {width} | {name} | {' | '.join(shown)} | {1e3 * whole:.1f} | {last} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["gpt", "vision"], default="gpt")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 512, 768])
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--clip", action="store_true", help="clip gradients before each step")
    args = parser.parse_args()
    print(f"{args.layers} layers, batch {args.batch} x {args.sequence}, {args.steps} steps\n")
    print(f"| width | variant | {' ms | '.join(PARTS)} ms | step ms | of eager |")
    print("|---|---|---|---|---|---|---|")
    for width in args.widths:
        rows(args, width)


if __name__ == "__main__":
    main()
