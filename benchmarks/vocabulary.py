"""A loss over a large vocabulary: stock code against tiles; time, and peak of working memory.

    python -m benchmarks.vocabulary --tokens 4096 --width 512 --vocabulary 131072

One product with the weight, cross-entropy, and backward; no optimizer. Every round runs every
variant in turn. The peak is the operating system's: the high-water mark of resident memory during
the step (`VmHWM`, set back before it), less what was resident before. It sees whatever is there,
whoever asked for it; the gradient of the weight is part of it, the weight is not.
"""

import argparse
import gc
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import zcompile
from zcompile.ir.units import show_size

Loss = Callable[[Tensor, Tensor], Tensor]
Result = tuple[Tensor, Tensor, Tensor]


class Head(nn.Module):
    """What stands at the end of a language model."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(hidden), targets)


@dataclass
class Variant:
    """A loss, what its steps took, and what it gave: loss, gradients of input and weight."""

    name: str
    model: Head
    loss: Loss
    seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    result: Result | None = None


def stock(args: argparse.Namespace) -> Variant:
    model = built(args)
    return Variant("stock", model, model)


def resident(args: argparse.Namespace, tile_bytes: str) -> Variant:
    """The weight stays where it is; only the loss is tiled."""
    model = built(args)
    options = {"tile_bytes": tile_bytes}
    compiled = torch.compile(model, backend="zinf", dynamic=False, options=options)
    return Variant(f"zinf, weight in memory, tiles of {tile_bytes}", model, compiled)


def offloaded(args: argparse.Namespace, device_memory: str) -> Variant:
    """The weight rests on the host, its gradient goes there; tiles follow from the budget."""
    model = built(args)
    zcompile.offload(
        model, device="cpu", device_memory=device_memory, host_memory="4GiB", residency=False
    )
    compiled = torch.compile(model, backend="zinf", dynamic=False)
    return Variant(f"zinf, offloaded, device {device_memory}", model, compiled)


def built(args: argparse.Namespace) -> Head:
    torch.manual_seed(0)
    return Head(args.width, args.vocabulary)


def step(one: Variant, hidden: Tensor, targets: Tensor) -> None:
    leaf = hidden.clone().requires_grad_()
    one.model.zero_grad()
    gc.collect()
    resident = forget_peak()
    begin = time.perf_counter()
    loss = one.loss(leaf, targets)
    loss.backward()
    seconds, peak = time.perf_counter() - begin, status("VmHWM")
    assert leaf.grad is not None
    assert one.model.head.weight.grad is not None
    one.seconds.append(seconds)
    one.peak_bytes.append(peak - resident)
    one.result = loss.detach(), leaf.grad, one.model.head.weight.grad


def forget_peak() -> int:
    """Set the high-water mark back to what is resident now; those bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return status("VmRSS")


def status(key: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{key}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def apart(one: Variant, base: Variant) -> str:
    """Largest differences of loss and gradients, in units of the largest number."""
    assert one.result is not None
    assert base.result is not None
    found = [
        ((ours.detach() + 0) - stock).abs().max() / stock.abs().max()
        for ours, stock in zip(one.result, base.result, strict=True)
    ]
    return " ".join(f"{float(each):.0e}" for each in found)


def report(variants: list[Variant], args: argparse.Namespace) -> str:
    logits = 4 * args.tokens * args.vocabulary
    rows = [
        f"{args.tokens} tokens, width {args.width}, vocabulary {args.vocabulary}: logits of "
        f"{show_size(logits)}, a weight of {show_size(4 * args.width * args.vocabulary)}; "
        f"{torch.get_num_threads()} threads, {args.rounds} rounds",
        "",
        "| variant | median s | ratio | peak of working memory | in logits | differences |",
        "|---|---|---|---|---|---|",
    ]
    base = variants[0]
    for one in variants:
        ratio = statistics.median(a / b for a, b in zip(one.seconds, base.seconds, strict=True))
        peak = max(one.peak_bytes)
        rows.append(
            f"| {one.name} | {statistics.median(one.seconds):.2f} | {ratio:.2f} | "
            f"{show_size(peak)} | {peak / logits:.2f} | {apart(one, base)} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    for name, default in (
        ("tokens", 512),
        ("width", 128),
        ("vocabulary", 16384),
        ("rounds", 3),
        ("warmup", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device-memory", nargs="*", default=["64MiB"])
    parser.add_argument("--tile-bytes", nargs="*", default=["8MiB"])
    args = parser.parse_args()
    variants = [
        stock(args),
        *(resident(args, size) for size in args.tile_bytes),
        *(offloaded(args, size) for size in args.device_memory),
    ]
    generator = torch.Generator().manual_seed(1)
    for round_ in range(args.warmup + args.rounds):
        hidden = torch.randn(args.tokens, args.width, generator=generator)
        targets = torch.randint(0, args.vocabulary, (args.tokens,), generator=generator)
        for one in variants:
            one.result = None
            step(one, hidden, targets)
            if round_ < args.warmup:
                one.seconds.clear()
                one.peak_bytes.clear()
    print(report(variants, args))


if __name__ == "__main__":
    main()
