"""A Llama of 7 B parameters whose states do not fit on the card: what a step takes, from the first.

Under bfloat16 autocast with a fused AdamW, at 32 samples of 2048 tokens a step. The model is built
by `zcompile.init`, with random numbers of the card. TFLOP/s are 6 x parameters x tokens a step over
its seconds: attention is not counted, nor what is computed again. Beside it stands what a step
takes where all rests on the card: measured with few layers and samples, by eager and by torch's
compiler, and extended linearly in layers and samples (of forward and backward) and in layers (of
the optimizer).
"""

import argparse
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import zcompile
from benchmarks.gpu.llama import Llama, LlamaShape
from benchmarks.gpu.record import Cell, Part, Row, digits
from benchmarks.gpu.timing import synchronize
from zcompile.ir.units import parse_size, show_size
from zcompile.runtime.probe import probed

WARM_UP = 3
"""Steps that do not count: the first makes the states, two are seen before the third is planned."""
RESIDENT_STEPS = 5

COLUMNS: list[Cell] = [
    ("name", "layers", str),
    ("parameters", "G parameters", lambda n: f"{n / 1e9:.2f}"),
    ("init_s", "init s", digits(1)),
    ("first_s", "first step s", digits(1)),
    ("third_s", "third, with planning", digits(1)),
    ("step_s", "step s", digits(2)),
    ("flops", "TFLOP/s", lambda rate: f"{rate / 1e12:.1f}"),
    ("predicted_s", "predicted s", digits(2)),
    ("predicted_compute_s", "of it compute s", digits(2)),
    ("stall_s", "stall s", digits(2)),
    ("optimizer_s", "optimizer s", digits(2)),
    ("h2d", "h2d a step", show_size),
    ("d2h", "d2h a step", show_size),
    ("disk", "disk a step", show_size),
    ("planning_s", "zcompile.plan s", digits(1)),
    ("ahead_s", "planned ahead: step s", digits(2)),
    ("took_s", "took s", digits(1)),
]


def shape_of(args: argparse.Namespace, layers: int) -> LlamaShape:
    return LlamaShape(
        layers, args.hidden, args.intermediate, args.heads, args.vocabulary, args.context
    )


class Loss(nn.Module):
    """The model under autocast, which thus is a part of what is compiled and planned."""

    def __init__(self, shape: LlamaShape, device: str) -> None:
        super().__init__()
        self.inner, self._device = Llama(shape), device

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self._device, torch.bfloat16):
            loss: Tensor = self.inner(ids, targets)
        return loss


def batch(args: argparse.Namespace, samples: int, number: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(number)
    ids = torch.randint(0, args.vocabulary, (samples, args.context + 1), generator=made)
    ids = ids.to(args.device)
    return ids[:, :-1], ids[:, 1:]


def offloaded(part: Part, args: argparse.Namespace, layers: int, row: Row) -> None:
    """Train a model whose states are off the device: all that is known of it into the row."""
    device = torch.device(args.device)
    budgets = {"device_memory": args.card, "host_memory": args.host, "disk": args.disk_tier}
    fields = {name: given for name, given in budgets.items() if given is not None}
    torch._dynamo.reset()
    torch.manual_seed(0)
    began = time.perf_counter()
    with zcompile.init(device=args.device, **fields), torch.device(args.born or device):
        model = Loss(shape_of(args, layers), device.type)
    synchronize(device)
    try:
        count = sum(p.numel() for p in model.parameters())
        row |= {"init_s": time.perf_counter() - began, "parameters": count}
        part.note(f"{layers} layers: {count / 1e9:.2f} G parameters made in {row['init_s']:.1f} s")
        run = torch.compile(model, backend="zinf")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        seconds = row["all_s"] = []
        for number in range(WARM_UP + args.steps):
            if part.left() < min(seconds[1:], default=0.0):
                part.note(f"no time for step {number + 1}")
                break
            if number == WARM_UP:
                row["predicted"] = zcompile.stats(model, reset=True)["predicted"]
            loss, taken = timed_step(run, optimizer, batch(args, args.samples, number), device)
            seconds.append(taken)
            part.note(f"{layers} layers: step {number + 1} took {taken:.2f} s, loss {loss:.4f}")
        settled(row, args, zcompile.stats(model))
    finally:
        zcompile.close(model)


def timed_step(
    run: Callable[..., Any], optimizer: Any, data: tuple[Tensor, Tensor], device: torch.device
) -> tuple[float, float]:
    synchronize(device)
    began = time.perf_counter()
    loss = run(*data)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value = float(loss.detach())
    synchronize(device)
    return value, time.perf_counter() - began


def settled(row: Row, args: argparse.Namespace, stats: Mapping[str, Any]) -> None:
    """What the steps that were made tell. Where time ran out before they were all made, the name of
    the row says so: what it tells is then of fewer steps, or of those that do not count."""
    made, wanted = len(row["all_s"]), WARM_UP + args.steps
    if made < wanted:
        counted = f"{max(made - WARM_UP, 0)} of {args.steps} counted"
        row["name"] += f", out of time after {made} of {wanted} steps, {counted}"
    if not made:
        return
    row["first_s"] = row["all_s"][0]
    row["third_s"] = row["all_s"][2] if len(row["all_s"]) > 2 else None
    predicted = row.setdefault("predicted", stats["predicted"])
    counted = row["all_s"][WARM_UP:] or row["all_s"][-1:]
    steps, tokens = max(1, stats["steps"]), args.samples * args.context
    row["step_s"] = sorted(counted)[len(counted) // 2]
    row["flops"] = 6 * row["parameters"] * tokens / row["step_s"]
    moved = {link: nbytes / steps for link, nbytes in stats["bytes"].items()}
    row |= {"bytes": moved, "peak": stats["peak"], "inexact": stats["inexact"]}
    row |= {"h2d": moved["h2d"], "d2h": moved["d2h"]}
    row["disk"] = moved["disk_read"] + moved["disk_write"]
    row |= {f"{key}_s": stats["seconds"][key] / steps for key in ("stall", "optimizer")}
    if predicted:
        row["predicted_s"] = predicted["step_s"]
        row["predicted_compute_s"] = predicted["seconds"]["compute"]


def planned_ahead(part: Part, args: argparse.Namespace, layers: int, row: Row) -> None:
    """What `zcompile.plan` says of such a step, at the rates of this machine."""
    device = torch.device(args.device)
    tiers = {"device": parse_size(args.card), "host": parse_size(args.host)}
    machine = replace(probed(device, ()), tiers=tiers)
    with torch.device("meta"):
        sketch = Loss(shape_of(args, layers), "cpu")  # where a plan is traced, on any machine
        ids = torch.zeros(args.samples, args.context, dtype=torch.int64)
    began = time.perf_counter()
    # Without budgets all activations are kept, as if there were room for them.
    given = {"device_memory": args.card, "host_memory": args.host}
    report = zcompile.plan(sketch, ids, ids, machine=machine, **given)
    row["planning_s"] = time.perf_counter() - began
    row |= {"ahead_s": report.step_seconds, "ahead": str(report)}
    part.note(f"{layers} layers, planned ahead in {row['planning_s']:.1f} s:\n{report}")


# Where all rests on the card


def resident(args: argparse.Namespace, layers: int, compiled: bool, row: Row) -> None:
    """Seconds of forward and backward, and of the optimizer, of a model that is on the card."""
    device = torch.device(args.device)
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.device(device):
        model = Loss(shape_of(args, layers), device.type)
    run: Callable[..., Any] = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    passes, updates = list[float](), list[float]()
    for number in range(2 + RESIDENT_STEPS):
        data = batch(args, args.resident_samples, number)
        synchronize(device)
        began = time.perf_counter()
        run(*data).backward()
        synchronize(device)
        passes.append(time.perf_counter() - began)
        began = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        updates.append(time.perf_counter() - began)
    count = sum(p.numel() for p in model.parameters())
    tokens = args.resident_samples * args.context
    row |= {"parameters": count, "first_s": passes[0] + updates[0], "all_s": passes}
    row["passes_s"] = sorted(passes[2:])[RESIDENT_STEPS // 2]
    row["optimizer_s"] = sorted(updates[2:])[RESIDENT_STEPS // 2]
    row["step_s"] = row["passes_s"] + row["optimizer_s"]
    row["flops"] = 6 * count * tokens / row["step_s"]


def extended(
    few: Row, more: Row, layers: tuple[int, int], wanted: int, samples: float
) -> dict[str, float]:
    """Seconds of a step with `wanted` layers, on the line through two counts of them.

    samples  times those that were measured: of forward and backward
    """

    def line(key: str) -> float:
        a, b = float(few[key]), float(more[key])
        return a + (b - a) * (wanted - layers[0]) / (layers[1] - layers[0])

    passes, updates = samples * line("passes_s"), line("optimizer_s")
    return {"passes_s": passes, "optimizer_s": updates, "step_s": passes + updates}


def measure_resident(part: Part, args: argparse.Namespace, kind: str) -> None:
    """By eager or by torch's compiler; and extended to the layers and samples that are trained."""
    layers = max(1, args.resident // 2), args.resident
    rows: list[Row] = []
    for count in layers:
        name = f"{count}, all on the card, {kind}, {args.resident_samples} samples"
        if not part.has_time(name, kind):
            return
        with part.row(name, kind) as row:
            resident(args, count, kind == "compiled", row)
        free()
        rows.append(row)
    if any("error" in row for row in rows) or layers[0] == layers[1]:
        return
    for wanted in args.blocks:
        times = args.samples / args.resident_samples
        made = extended(rows[0], rows[1], layers, wanted, times)
        count = parameters(shape_of(args, wanted))
        row = {
            "name": f"{wanted}, all on a card, {kind}: extended from {layers[0]} and {layers[1]}",
            "parameters": count,
            **made,
            "flops": 6 * count * args.samples * args.context / made["step_s"],
        }
        part.rows.append(row)
        part.show(row)


def parameters(shape: LlamaShape) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Llama(shape).parameters())


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(part: Part, args: argparse.Namespace) -> None:
    """In the order of what it is worth: what takes torch's compiler comes last but for plans."""
    part.note(f"{args.samples} samples of {args.context} tokens a step, bfloat16 autocast")
    if args.resident:
        measure_resident(part, args, "eager")
    for layers in args.blocks:
        if part.has_time(f"{layers} layers"):
            with part.row(str(layers)) as row:
                offloaded(part, args, layers, row)
            free()
    if args.resident:
        measure_resident(part, args, "compiled")
    for layers in args.plan:
        if part.has_time(f"a plan of {layers} layers", "plan"):
            with part.row(f"{layers}, planned alone", "plan") as row:
                planned_ahead(part, args, layers, row)
