"""A training step of a GPT: eager, tiered, tiered without prefetch; one process, interleaved.

    python -m benchmarks.step_time --layers 8 --width 512 --device-memory 24MiB --host-memory 16MiB

Nothing is kept on the device between its uses (`residency=False`): what is measured is streaming;
`planner/step_plan.py` measures planned steps. Every round runs one step of every variant, so a slow
moment of the machine hits all of them. What counts are the ratios to eager, and the bytes, which
the meters of each variant report.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zcompile
from examples.train_gpt import Shape
from examples.train_gpt import model as gpt
from zcompile.ir.units import show_size

Step = Callable[[Tensor, Tensor], None]


@dataclass
class Variant:
    """A model with its step, and the seconds each step took."""

    name: str
    model: nn.Module
    step: Step
    seconds: list[float]


def variant(name: str, args: argparse.Namespace, options: dict[str, Any] | None) -> Variant:
    """options: those of torch.compile; None trains in eager with everything on the device."""
    torch.manual_seed(0)
    shape = Shape(args.layers, args.width, args.width // 64, args.sequence)
    model: nn.Module = gpt(shape)
    run = model
    if options is None:
        model.to(args.device)
    else:
        disk = tempfile.mkdtemp(dir=args.disk)
        throttle = dict(pair.split("=") for pair in args.throttle)
        zcompile.offload(
            model,
            device=args.device,
            device_memory=args.device_memory,
            host_memory=args.host_memory,
            disk=disk,
            throttle=throttle,
            residency=False,
        )
        run = torch.compile(model, backend="zinf", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(ids: Tensor, targets: Tensor) -> None:
        run(ids, targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Variant(name, model, step, [])


def measure(variants: list[Variant], args: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(1)
    for round_ in range(args.warmup + args.rounds):
        ids = torch.randint(0, 256, (args.batch, args.sequence + 1), generator=generator)
        ids = ids.to(args.device)
        for one in variants:
            begin = time.perf_counter()
            one.step(ids[:, :-1], ids[:, 1:])
            if args.device != "cpu":
                torch.cuda.synchronize()
            if round_ >= args.warmup:
                one.seconds.append(time.perf_counter() - begin)
            elif one.name != "eager":
                zcompile.stats(one.model, reset=True)


def report(variants: list[Variant], args: argparse.Namespace) -> str:
    weights = sum(p.numel() * p.element_size() for p in variants[0].model.parameters())
    rows = [
        f"{args.layers} layers x {args.width}, weights {show_size(weights)}, device "
        f"{args.device_memory}, host {args.host_memory}, batch {args.batch} x {args.sequence}, "
        f"{args.rounds} rounds; throttle {' '.join(args.throttle) or 'none'}",
        "",
        "| variant | median s | ratio to eager | stall s | optimizer s | disk read | disk write |",
        "|---|---|---|---|---|---|---|",
    ]
    base = statistics.median(variants[0].seconds)
    for one in variants:
        median = statistics.median(one.seconds)
        ratio = statistics.median(
            a / b for a, b in zip(one.seconds, variants[0].seconds, strict=True)
        )
        cells = [one.name, f"{median:.3f}", f"{ratio:.2f}"]
        if one.name == "eager":
            cells += [""] * 4
        else:
            found = zcompile.stats(one.model)
            steps = max(1, found["steps"])
            cells += [f"{found['seconds'][key] / steps:.3f}" for key in ("stall", "optimizer")]
            cells += [show_size(found["bytes"][k] / steps) for k in ("disk_read", "disk_write")]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) if base else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    for name, default in (
        ("layers", 8),
        ("width", 512),
        ("batch", 2),
        ("sequence", 128),
        ("rounds", 7),
        ("warmup", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--device-memory", default="24MiB")
    parser.add_argument("--host-memory", default="16MiB")
    parser.add_argument("--disk", default=None, help="directory for the disk tiers")
    parser.add_argument("--throttle", nargs="*", default=[], metavar="LINK=RATE")
    args = parser.parse_args()
    variants = [
        variant("eager", args, None),
        variant("zinf", args, {}),
        variant("zinf, no prefetch", args, {"max_lead": 0}),
    ]
    measure(variants, args)
    print(report(variants, args))


if __name__ == "__main__":
    main()
