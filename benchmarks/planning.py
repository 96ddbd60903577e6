"""Planning: how the first call, and the plan after the second step, grow with the layers.

    python -m benchmarks.planning --model gpt
    python -m benchmarks.planning --model llama

A model of one width under a budget that binds, beside torch's backend "aot_eager" for the same
model in memory, each in a process of its own, so that nothing is cached; the two take turns. The
first call is a forward with its compilation. "Re-plan" is what the step controller takes to plan
the whole step once two were seen, without the moves that follow. What counts are the ratios of one
run.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from unittest import mock

import torch
from torch import Tensor, nn

import zcompile
from benchmarks import activations
from zcompile.frontend import replan
from zcompile.ir.units import MiB

LAYERS = (8, 16, 32, 48)
BUDGETS: Mapping[str, tuple[int, ...]] = {"gpt": (6, 11, 21, 31), "llama": (6, 11, 21, 31)}
"""Budgets in MiB at each number of layers: they bind."""
STEPS = 3
"""The step is planned when the third begins."""


def built(args: argparse.Namespace, layers: int) -> nn.Module:
    torch.manual_seed(0)
    shape = argparse.Namespace(**{**vars(args), "layers": layers})
    return activations.MODELS[args.model](shape)


def data(args: argparse.Namespace) -> Tensor:
    return torch.randint(0, args.vocabulary, (args.batch, args.tokens))


def compiled(args: argparse.Namespace, layers: int) -> float:
    """Seconds of the first call under "aot_eager"."""
    run, ids = torch.compile(built(args, layers), backend="aot_eager"), data(args)
    begin = time.perf_counter()
    run(ids)
    return time.perf_counter() - begin


def planned(args: argparse.Namespace, layers: int, mebibytes: int) -> tuple[float, float]:
    """Seconds of the first call under a budget, and of the plan after two steps."""
    model = zcompile.offload(
        built(args, layers),
        device="cpu",
        device_memory=mebibytes * MiB,
        activations=args.activations,
    )
    run, ids = torch.compile(model, backend="zinf"), data(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    took: list[float] = []
    plan = replan.StepController.planned

    def timed(*given: object) -> object:
        begin = time.perf_counter()
        made = plan(*given)  # type: ignore[arg-type]  # as it was called
        took.append(time.perf_counter() - begin)
        return made

    first = 0.0
    with mock.patch.object(replan.StepController, "planned", timed):
        for number in range(STEPS):
            begin = time.perf_counter()
            loss = run(ids)
            first = first if number else time.perf_counter() - begin
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return first, took[0] if took else float("nan")


def alone(args: argparse.Namespace, *more: str) -> tuple[float, ...]:
    """What `one` prints in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.planning", *sys.argv[1:], *more]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    return tuple(json.loads(made.stdout.splitlines()[-1]))


def one(args: argparse.Namespace) -> tuple[float, ...]:
    if args.budget:
        return planned(args, args.one, args.budget)
    return (compiled(args, args.one),)


def rows(args: argparse.Namespace) -> None:
    print(f"{args.model}, width {args.width}, {args.batch} x {args.tokens} tokens\n")
    print("| layers | budget MiB | first call s | aot_eager s | ratio | re-plan s |")
    print("|---|---|---|---|---|---|", flush=True)
    for layers, budget in zip(LAYERS, BUDGETS[args.model], strict=True):
        if layers not in args.layers:
            continue
        ours: list[tuple[float, ...]] = []
        stock: list[float] = []
        for _ in range(args.rounds):
            ours.append(alone(args, "--one", str(layers), "--budget", str(budget)))
            stock += alone(args, "--one", str(layers))
        first, again = (statistics.median(row[n] for row in ours) for n in (0, 1))
        other = statistics.median(stock)
        texts = [f"{first:.1f}", f"{other:.1f}", f"{first / other:.2f}", f"{again:.2f}"]
        print("|", " | ".join([str(layers), str(budget), *texts]), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=activations.MODELS, default="gpt")
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--activations", default="auto")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--one", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args)))
    else:
        rows(args)


if __name__ == "__main__":
    main()
