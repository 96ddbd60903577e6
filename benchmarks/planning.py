"""Planning: how the first call, and the plan after the second step, grow with the layers.

    python -m benchmarks.planning --model gpt
    python -m benchmarks.planning --model llama
    python -m benchmarks.planning --model convolutions --width 64 --layers 8 --clock process
    python -m benchmarks.planning --model t5 --width 64 --layers 8 --clock process

A model of one width under a budget that binds, beside torch's backend "aot_eager" for the same
model in memory, each in a process of its own, so that nothing is cached; the two take turns. The
first call is a forward with its compilation. "Re-plan" is what the step controller takes to plan
the whole step once two were seen, without the moves that follow. What counts are the ratios of one
run. `--clock process` counts the processor's seconds, which hang less on what else the machine
does.

GPT and Llama are what planning was tuned on. The others are models of another kind: a residual
network of convolutions and batch norms over images, and an encoder with a decoder, T5 of
transformers. Their budgets bind too, at 8 layers alone.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from unittest import mock

import torch
from torch import Tensor, nn

import zcompile
from benchmarks import activations
from zcompile.frontend import replan
from zcompile.ir.units import MiB

LAYERS = (8, 16, 32, 48)
BUDGETS: Mapping[str, tuple[int, ...]] = {
    "gpt": (6, 11, 21, 31),
    "llama": (6, 11, 21, 31),
    "convolutions": (4,),
    "t5": (2,),
}
"""Budgets in MiB at each of the first numbers of layers: they bind."""
STEPS = 3
"""The step is planned when the third begins."""
IMAGE = 32
"""Rows and columns of an image."""
CLOCKS: Mapping[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "process": time.process_time,
}


class Residual(nn.Module):
    """x [batch, width, rows, columns]: x and what two convolutions make of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.inner(x))


class Convolutions(nn.Module):
    """images [batch, 3, rows, columns]: the loss of a residual network."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, args.width, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(args.width) for _ in range(args.layers)))
        self.head = nn.Linear(args.width, args.vocabulary)

    def forward(self, images: Tensor) -> Tensor:
        pooled = self.blocks(self.stem(images)).mean((2, 3))
        loss: Tensor = self.head(pooled).square().mean()
        return loss


class T5(nn.Module):
    """ids [batch, tokens]: the loss of an encoder and a decoder, each of `layers`."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        import transformers

        config = transformers.T5Config(
            vocab_size=args.vocabulary,
            d_model=args.width,
            d_ff=4 * args.width,
            d_kv=args.width // args.heads,
            num_heads=args.heads,
            num_layers=args.layers,
            decoder_start_token_id=0,
        )
        self.model = transformers.T5ForConditionalGeneration(config)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


MODELS: Mapping[str, Callable[[argparse.Namespace], nn.Module]] = {
    **activations.MODELS,
    "convolutions": Convolutions,
    "t5": T5,
}


def built(args: argparse.Namespace, layers: int) -> nn.Module:
    torch.manual_seed(0)
    shape = argparse.Namespace(**{**vars(args), "layers": layers})
    return MODELS[args.model](shape)


def data(args: argparse.Namespace) -> Tensor:
    if args.model == "convolutions":
        return torch.randn(args.batch, 3, IMAGE, IMAGE)
    return torch.randint(0, args.vocabulary, (args.batch, args.tokens))


def compiled(args: argparse.Namespace, layers: int) -> float:
    """Seconds of the first call under "aot_eager"."""
    run, ids = torch.compile(built(args, layers), backend="aot_eager"), data(args)
    now = CLOCKS[args.clock]
    begin = now()
    run(ids)
    return now() - begin


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
    now = CLOCKS[args.clock]
    took: list[float] = []
    plan = replan.StepController.planned

    def timed(*given: object) -> object:
        begin = now()
        made = plan(*given)  # type: ignore[arg-type]  # as it was called
        took.append(now() - begin)
        return made

    first = 0.0
    with mock.patch.object(replan.StepController, "planned", timed):
        for number in range(STEPS):
            begin = now()
            loss = run(ids)
            first = first if number else now() - begin
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
    for layers, budget in zip(LAYERS, BUDGETS[args.model], strict=False):
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
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--activations", default="auto")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
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
