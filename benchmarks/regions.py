"""What Inductor's regions are worth: a step of eager, both kinds of regions, and torch.compile.

    python -m benchmarks.regions --widths 256 512
    python -m benchmarks.regions --compiling 4 24

A GPT on the emulated device, nothing throttled, every state on the device, so that all that differs
is how compute is run. A step of each variant in turn. `--amp` computes under torch.autocast in
bf16. On a machine that is busy with other things, `--clock process` takes the processor's time of
this process instead of the wall's: with one thread (OMP_NUM_THREADS=1) it is all of a step in which
nothing moves.

`--compiling` takes numbers of layers and tells what the first forward and backward of a model take
of the processor, compilers included, each in a process of its own with empty caches of torch's.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable

import torch
from torch import Tensor, nn

import zcompile
from benchmarks.host_time import CLOCKS, WARM_UP, built, data, line, stepper
from zcompile.ir.units import MiB

VARIANTS = ("eager", "regions eager", "regions inductor", "torch.compile")
Run = Callable[..., Tensor]


def run_of(variant: str, args: argparse.Namespace, width: int) -> tuple[nn.Module, Run]:
    torch._dynamo.reset()
    model = built(args, width)
    if variant == "eager":
        return model, model
    if variant == "torch.compile":
        return model, torch.compile(model)
    nbytes = 16 * sum(p.numel() for p in model.parameters())
    kept = 3 * args.batch * args.sequence * width * 34 * 4 * args.layers
    zcompile.offload(
        model,
        device="cpu",
        host_memory="8GiB",
        device_memory=int(2.04 * nbytes) + kept + 64 * MiB,
        regions=variant.removeprefix("regions "),
    )
    return model, torch.compile(model, backend="zinf")


def with_autocast(run: Run, args: argparse.Namespace) -> Run:
    def call(*given: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=args.amp):
            return run(*given)

    return call


def steps(args: argparse.Namespace, width: int) -> None:
    made = {name: run_of(name, args, width) for name in VARIANTS}
    steps = {
        name: stepper(model, with_autocast(run, args), CLOCKS[args.clock])
        for name, (model, run) in made.items()
    }
    taken: dict[str, list[tuple[float, ...]]] = {name: [] for name in VARIANTS}
    for number in range(WARM_UP + args.steps):
        for name, step in steps.items():
            taken[name].append(step(*data(args, number)))
    for name, times in taken.items():
        times, base = times[WARM_UP:], taken["eager"][WARM_UP:]
        ratio = statistics.median(sum(b) / sum(a) for a, b in zip(base, times, strict=True))
        parts = tuple(statistics.median(part) for part in zip(*times, strict=True))
        print(line(width, name, parts, statistics.median(map(sum, times)), ratio), flush=True)
    for name, (model, _) in made.items():
        if name.startswith("regions"):
            zcompile.close(model)


def processor_seconds() -> float:
    """Of this process and of those that it has started and that have ended."""
    told = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in told)


def first(args: argparse.Namespace) -> None:
    """Compile one variant, and print what that took."""
    model, run = run_of(args.variant, args, args.widths[0])
    began = processor_seconds()
    with_autocast(run, args)(*data(args, 0)).backward()
    found = zcompile.stats(model)["fusions"] if args.variant.startswith("regions") else None
    print(processor_seconds() - began, (found or {}).get("distinct", ""))


def compiling(args: argparse.Namespace, argv: list[str]) -> None:
    print("| layers | variant | processor s | distinct fusions |")
    print("|---|---|---|---|")
    for layers in args.compiling:
        for variant in VARIANTS[1:]:
            with tempfile.TemporaryDirectory() as caches:
                # The compiler keeps no process waiting: one that has not ended is not counted.
                environment = {
                    "TORCHINDUCTOR_CACHE_DIR": caches,
                    "TORCHINDUCTOR_COMPILE_THREADS": "1",
                }
                given = ["--variant", variant, "--layers", str(layers)]
                ran = subprocess.run(
                    [sys.executable, "-m", "benchmarks.regions", *argv, *given],
                    env={**os.environ, **environment, "ZINF_PROGRESS": "0"},
                    capture_output=True,
                    text=True,
                    check=True,
                )
            seconds, _, distinct = ran.stdout.strip().splitlines()[-1].partition(" ")
            print(f"| {layers} | {variant} | {float(seconds):.1f} | {distinct} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--widths", type=int, nargs="+", default=[256])
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--compiling", type=int, nargs="+")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        first(args)
        return
    shape = f"batch {args.batch} x {args.sequence}{', bf16' if args.amp else ''}"
    if args.compiling:
        print(f"width {args.widths[0]}, {shape}\n")
        cut = sys.argv.index("--compiling")
        compiling(args, [*sys.argv[1:cut], *sys.argv[cut + 1 + len(args.compiling) :]])
        return
    print(f"{args.layers} layers, {shape}, {args.steps} steps, {args.clock} time\n")
    print("| width | variant | forward ms | backward ms | optimizer ms | step ms | of eager |")
    print("|---|---|---|---|---|---|---|")
    for width in args.widths:
        steps(args, width)


if __name__ == "__main__":
    main()
