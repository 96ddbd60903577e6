"""Steps of a GPT: eager, compiled by torch, streaming, planned for less and less of the device.

All variants begin with the same weights and see the same batches. They run one after the other, in
one process, since two of them need not fit beside each other; eager runs first and last, which
tells how far the machine drifts, and whether eager's own bits come again.
"""

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zcompile
from benchmarks.gpu.record import Cell, Part, Row, digits
from benchmarks.gpu.timing import link_rates, synchronize
from examples.train_gpt import GPT, Shape
from zcompile.ir.units import MiB, parse_size, show_size

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
SETTLED = 3
"""Steps after which nothing should ask CUDA for memory any more."""
MOST_TRACE_BYTES = 16 * MiB

COLUMNS: list[Cell] = [
    ("name", "variant", str),
    ("step_s", "step s", digits(4)),
    ("of_eager", "/ eager", digits(2)),
    ("of_predicted", "/ predicted", digits(2)),
    ("of_least", "/ max(compute, link)", digits(2)),
    ("compute_s", "compute s", digits(4)),
    ("link_s", "link s", digits(4)),
    ("stall_s", "stall s", digits(4)),
    ("optimizer_s", "optimizer s", digits(4)),
    ("reserved_of_budget", "reserved / device_memory", digits(3)),
    ("device_allocs", "cudaMalloc after step 3", str),
    ("equal_losses", "losses equal to eager's", str),
    ("took_s", "took s", digits(1)),
]


@dataclass(frozen=True)
class Variant:
    """How the model is trained.

    share    of what eager holds at its peak: the device's budget. None: as `fields` say
    fields   of `zcompile.offload`; None: the model is on the device as a whole
    compiled by torch's own backend, where it is not ours
    """

    share: float | None = None
    fields: Mapping[str, Any] | None = None
    compiled: bool = False

    @property
    def kind(self) -> str:
        """Of variants that take as long as each other to begin."""
        if self.fields is None:
            return "compiled" if self.compiled else "eager"
        return str(self.fields.get("regions", "planned"))

    def device_memory(self, held: int) -> int:
        """Bytes of the device that an offloaded model has, where eager holds so many."""
        if self.share is not None:
            return int(self.share * held)
        assert self.fields is not None
        return parse_size(self.fields["device_memory"])


def variants(args: argparse.Namespace) -> dict[str, Variant]:
    """In the order in which they run."""
    host = {"host_memory": args.host_memory}
    streaming = {**host, "device_memory": args.device_memory, "residency": False}
    return {
        "eager": Variant(),
        "planned-1": Variant(1.0, host),
        "planned-half": Variant(0.5, host),
        "planned-quarter": Variant(0.25, host),
        "streaming": Variant(None, streaming),
        "compiled": Variant(compiled=True),
        "inductor-1": Variant(1.0, {**host, "regions": "inductor"}),
        "inductor-half": Variant(0.5, {**host, "regions": "inductor"}),
        "eager-again": Variant(),
    }


NAMES = (
    "eager",
    "planned-1",
    "planned-half",
    "planned-quarter",
    "streaming",
    "compiled",
    "inductor-1",
    "inductor-half",
    "eager-again",
)
PROFILED = "planned-half"


class Bench:
    """The variants of one dtype.

    weights  of the model before its first step, on the host
    held     bytes that eager holds at its peak
    found    name -> the row of a variant that has run
    """

    def __init__(
        self, args: argparse.Namespace, dtype: str, weights: GPT, rates: Mapping[str, float]
    ) -> None:
        self.args, self.dtype, self.rates = args, dtype, rates
        self.device = torch.device(args.device)
        self._weights = weights
        self.held = parse_size(args.held) if args.held else 0
        self.found: dict[str, Row] = {}
        self.losses: list[float] = []
        """Of eager, step by step."""

    def autocast(self) -> torch.autocast:
        on = self.dtype != "f32"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=on)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        args, made = self.args, torch.Generator().manual_seed(number)
        ids = torch.randint(0, 256, (args.batch, args.sequence + 1), generator=made)
        ids = ids.to(self.device)
        return ids[:, :-1], ids[:, 1:]

    @contextmanager
    def trained(self, variant: Variant) -> Iterator[tuple[nn.Module, Callable[[int], float]]]:
        """The model, and a function that makes a step of a number and gives its loss."""
        torch._dynamo.reset()
        model = copy.deepcopy(self._weights)
        if variant.fields is None:
            model.to(self.device)
            run: Callable[..., Any] = torch.compile(model) if variant.compiled else model
        else:
            fields = {**variant.fields, "device_memory": variant.device_memory(self.held)}
            zcompile.offload(model, device=str(self.device), **fields)
            run = torch.compile(model, backend="zinf")
        try:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

            def step(number: int) -> float:
                ids, targets = self.batch(number)
                with self.autocast():
                    loss = run(ids, targets)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                return float(loss.detach())

            yield model, step
        finally:
            if variant.fields is not None:
                zcompile.close(model)

    def measure(self, part: Part, name: str, variant: Variant, row: Row) -> None:
        args, on_card = self.args, self.device.type == "cuda"
        if on_card:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        began = time.perf_counter()
        with self.trained(variant) as (model, step):
            seconds, losses, allocs = list[float](), list[float](), 0
            row["built_s"] = time.perf_counter() - began
            for number in range(args.warmup + args.rounds):
                if number == SETTLED and on_card:
                    allocs = torch.cuda.memory_stats(self.device)["num_device_alloc"]
                if number == args.warmup and variant.fields is not None:
                    row["predicted"] = zcompile.stats(model, reset=True)["predicted"]
                synchronize(self.device)
                since = time.perf_counter()
                losses.append(step(number))
                synchronize(self.device)
                seconds.append(time.perf_counter() - since)
                row |= {"all_s": seconds, "losses": losses}
                part.write()
            row["step_s"] = statistics.median(seconds[args.warmup :])
            if on_card:
                row["reserved"] = torch.cuda.max_memory_reserved(self.device)
                row["allocated"] = torch.cuda.max_memory_allocated(self.device)
                after = torch.cuda.memory_stats(self.device)["num_device_alloc"]
                row["device_allocs"] = after - allocs
            if variant.fields is not None:
                self._compare_with_plan(row, zcompile.stats(model), variant)
            self._compare_with_others(name, row)
            if name == PROFILED and args.trace:
                profile(part, row, lambda: step(len(losses)), args.trace, self.dtype)

    def _compare_with_plan(self, row: Row, stats: Mapping[str, Any], variant: Variant) -> None:
        steps, predicted = max(1, stats["steps"]), row["predicted"]
        seconds = {key: value / steps for key, value in stats["seconds"].items()}
        moved = {link: nbytes / steps for link, nbytes in stats["bytes"].items()}
        budget = variant.device_memory(self.held)
        row |= {
            "device_memory": budget,
            "bytes": moved,
            "peak": stats["peak"],
            "stall_s": seconds["stall"],
            "optimizer_s": seconds["optimizer"],
            "compute_s": seconds["compute"] + seconds["optimizer"],
            "inexact": stats["inexact"],
            "fusions": str(stats["fusions"]),
        }
        if predicted:
            row["of_predicted"] = row["step_s"] / predicted["step_s"]
        if self.rates:
            row["link_s"] = max(moved[way] / rate for way, rate in self.rates.items())
            row["of_least"] = row["step_s"] / max(row["compute_s"], row["link_s"])
        if "reserved" in row:
            row["reserved_of_budget"] = row["reserved"] / budget

    def _compare_with_others(self, name: str, row: Row) -> None:
        if name == "eager":
            self.losses = row["losses"]
            self.held = row.get("allocated", self.held)
        self.found[name] = row
        if "eager" in self.found:
            row["of_eager"] = row["step_s"] / self.found["eager"]["step_s"]
        same = [a == b for a, b in zip(row["losses"], self.losses, strict=False)]
        row["equal_losses"] = f"{sum(same)} of {len(row['losses'])}"

    def tell_ratios(self, part: Part) -> None:
        """What each takes beside torch's compiler, which begins late, since it takes longest to."""
        if "compiled" not in self.found:
            return
        for row in self.found.values():
            row["of_compiled"] = row["step_s"] / self.found["compiled"]["step_s"]
        told = ", ".join(f"{name} {row['of_compiled']:.2f}" for name, row in self.found.items())
        part.note(f"{self.dtype}, over compiled: {told}")


def profile(part: Part, row: Row, step: Callable[[], object], directory: Path, dtype: str) -> None:
    """Write a trace of one step for chrome, packed."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        step()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"step-{dtype}.json.gz"
    profiler.export_chrome_trace(str(path))
    nbytes = path.stat().st_size
    row["trace"] = f"{path.name}, {nbytes} bytes"
    part.note(f"a trace of one step of {row['name']}: {path}, {show_size(nbytes)}")
    if nbytes > MOST_TRACE_BYTES:
        part.note(f"it is removed: more than {show_size(MOST_TRACE_BYTES)}")
        path.unlink()


def measure(part: Part, args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    torch.manual_seed(0)
    with torch.device(device):  # random numbers are made sooner there
        shape = Shape(args.layers, args.width, max(1, args.width // 64), args.sequence)
        weights = GPT(shape).cpu()
    count = sum(p.numel() for p in weights.parameters())
    rates = link_rates(device)
    part.written |= {"parameters": count, "rates": rates}
    told = ", ".join(f"{way} {rate / 1e9:.1f} GB/s" for way, rate in rates.items())
    part.note(
        f"{args.layers} layers x {args.width}, {count / 1e6:.1f} M parameters, batch "
        f"{args.batch} x {args.sequence}; {told or 'no links'}"
    )
    began, left = part.ends - part.left(), part.left()
    for number, dtype in enumerate(args.dtypes):
        bench = Bench(args, dtype, weights, rates)
        until = began + left * (number + 1) / len(args.dtypes)
        for name, variant in variants(args).items():
            if name not in (args.only or NAMES) and variant.kind != "eager":
                continue
            if variant.share is not None and not bench.held:
                part.note(f"not begun: {dtype} {name}, since eager was not measured; give --held")
                continue
            if part.has_time(f"{dtype} {name}", variant.kind, until):
                with part.row(f"{dtype} {name}", variant.kind) as row:
                    bench.measure(part, name, variant, row)
                gc.collect()
        bench.tell_ratios(part)
