"""What one waits for before training: the first step, the plan, and the answer of `zinf plan`.

    python -m benchmarks.first_step --rounds 3

A GPT of 12 layers and width 256 with GPT-2's vocabulary, entries on disk and 96 MiB of device: from
the moment that the model is there, with random values, to the end of its first step, and to the
moment that the plan of a whole step is in force, when the third begins. Beside it stands the first
step of the same model in memory under torch's backend "aot_eager". Then `zinf plan` of a Llama, of
941 M parameters with 16 layers, from the start of the process to its end, and beside it the least
that such an answer takes with this torch: a process that imports torch and transformers and runs a
step of the same model on the meta device under "aot_eager". Every run is a process of its own, and
they take turns. "of CPU" is what the process computed, all its threads together, and
hangs less on what else the machine does; the first steps' is without the start of the process.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

import zcompile
from examples.train_gpt import Shape
from examples.train_gpt import model as gpt
from zcompile.frontend import replan

STEPS = 3
"""The step is planned when the third begins."""
LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "dtype": "float32",
}
"""941 M parameters."""
Timed = tuple[float, float]
"""Seconds on the clock, and of CPU."""


def now() -> Timed:
    return time.perf_counter(), time.process_time()


def since(begin: Timed, end: Timed | None = None) -> Timed:
    end = end or now()
    return end[0] - begin[0], end[1] - begin[1]


def data(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, args.vocabulary, (args.batch, args.sequence + 1))
    return ids[:, :-1], ids[:, 1:]


def trained(
    model: nn.Module, run: Callable[..., Tensor], args: argparse.Namespace, steps: int
) -> Timed:
    """The end of the first step; the last of them ends with its forward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = data(args)
    first: Timed | None = None
    for number in range(steps):
        loss = run(*batch)
        if number == STEPS - 1:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        first = first or now()
    assert first is not None
    return first


def stock(model: nn.Module, args: argparse.Namespace) -> Sequence[Timed]:
    """The first step under "aot_eager"."""
    begin = now()
    return [since(begin, trained(model, torch.compile(model, backend="aot_eager"), args, 1))]


def ours(model: nn.Module, args: argparse.Namespace) -> Sequence[Timed]:
    """The first step, and the moment that the plan is in force."""
    in_force: list[Timed] = []
    apply = replan.StepController.apply

    def noted(*given: object) -> None:
        apply(*given)  # type: ignore[arg-type]  # as it was called
        in_force.append(now())

    with (
        tempfile.TemporaryDirectory(dir=args.disk) as disk,
        mock.patch.object(replan.StepController, "apply", noted),
    ):
        begin = now()
        zcompile.offload(
            model, device="cpu", device_memory=args.device_memory, host_memory="64MiB", disk=disk
        )
        first = trained(model, torch.compile(model, backend="zinf"), args, STEPS)
        zcompile.close(model)
    return [since(begin, first), since(begin, in_force[0])]


ONE = {"ours": ours, "stock": stock}


def alone(name: str) -> Sequence[Timed]:
    """What `ONE[name]` measures, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.first_step", *sys.argv[1:], "--one", name]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [(row[0], row[1]) for row in json.loads(made.stdout.splitlines()[-1])]


def plan_process(folder: Path, layers: int) -> Timed:
    """`zinf plan config.json`, a process from beginning to end."""
    config = {**LLAMA, "num_hidden_layers": layers}
    (path := folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "zcompile.cli", "plan", str(path)]
    return _process([*command, "--machine", "desktop-24gb"])


def traced_by_torch(_: Path, layers: int) -> Timed:
    """Import, build and trace a step of the same Llama without bytes and without zcompile."""
    config = {**LLAMA, "num_hidden_layers": layers}
    lines = (
        "import torch, transformers",
        f"config = transformers.AutoConfig.for_model(**{config!r})",
        "with torch.device('meta'): model = transformers.AutoModelForCausalLM.from_config(config)",
        f"shape = 1, {LLAMA['max_position_embeddings']}",
        "ids = torch.zeros(shape, dtype=torch.int64, device='meta')",
        "run = torch.compile(model, backend='aot_eager')",
        "run(input_ids=ids, labels=ids, use_cache=False).loss.backward()",
    )
    return _process([sys.executable, "-W", "ignore", "-c", "\n".join(lines)])


def _process(command: Sequence[str]) -> Timed:
    """How long a process takes, and what it computes."""
    before, begin = os.times(), time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    children = after.children_user - before.children_user
    return time.perf_counter() - begin, children + after.children_system - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--plan-layers", type=int, nargs="+", default=[16], help="of the Llama")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--device-memory", default="96MiB")
    parser.add_argument("--disk", default=None, help="a directory; else that of temporary files")
    parser.add_argument("--one", choices=ONE, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        torch.manual_seed(0)
        heads = args.width // 64
        model = gpt(Shape(args.layers, args.width, heads, args.sequence, args.vocabulary))
        print(json.dumps(ONE[args.one](model, args)))
        return
    rows: dict[str, list[Timed]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            first, in_force = alone("ours")
            (other,) = alone("stock")
            asked = [
                (f"{name}, {layers} layers", measured(Path(folder), layers))
                for layers in args.plan_layers
                for name, measured in (
                    ("`zinf plan`", plan_process),
                    ("torch alone", traced_by_torch),
                )
            ]
            for name, took in (
                ("first step", first),
                ("plan in force", in_force),
                ('first step, "aot_eager" in memory', other),
                *asked,
            ):
                rows.setdefault(name, []).append(took)
    print(f"{args.layers} layers x {args.width}, vocabulary {args.vocabulary}, ", end="")
    print(f"device {args.device_memory}, batch {args.batch} x {args.sequence}\n")
    print(f"| median of {args.rounds} | s | s of CPU |\n|---|---|---|")
    for name, times in rows.items():
        seconds, cpu = (statistics.median(part) for part in zip(*times, strict=True))
        print(f"| {name} | {seconds:.1f} | {cpu:.1f} |")


if __name__ == "__main__":
    main()
