"""Planned steps over throttled links: measured beside predicted, beside the least that is possible.

    python -m benchmarks.step_plan --disk /mnt/nvme

A GPT of 12 layers on the emulated device. Links are throttled to the bytes per FLOP of one H200
with one NVMe drive (its machine file; fp32 on both), and to three harsher ratios. Budgets go from
where everything fits down to a twelfth of it. The least, and what is predicted, are worked out
twice: before the steps that count, and of each of them by itself, at what its regions took in it;
the speed of a shared machine changes in between. Beside what a step stalls stands what the least
must: an optimizer that is called after backward has nothing to hide its transfers behind. Beside
the least, which takes for granted what plans of this kind have in common
(`zcompile/planner/bounds.py`), stands the floor, which does not (`zcompile/planner/floor.py`). A
second table turns off, at one budget, prefetch, residency, and the plan's choice of what stays (an
LRU in its place, counted, not run). A third runs beside eager what fits, step by step, interleaved.
"""

import argparse
import statistics
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zcompile
from benchmarks.own_costs import at_own_costs, walks_of
from examples.train_gpt import Shape
from examples.train_gpt import model as gpt
from zcompile.frontend.offload import session_behind
from zcompile.ir.step import StepTrace
from zcompile.ir.types import EntryRef
from zcompile.ir.units import GiB, MiB, show_rate, show_size
from zcompile.machine.files import find
from zcompile.machine.model import Machine
from zcompile.runtime.probe import probed

FRACTIONS = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 12)
SHARES: Mapping[str, Mapping[str, float]] = {
    "H200 and one NVMe drive": {},
    "disk at a half": {"disk_read": 0.5, "disk_write": 0.5},
    "all at a half": {"disk_read": 0.5, "disk_write": 0.5, "h2d": 0.5, "d2h": 0.5},
    "bus at a quarter": {"h2d": 0.25, "d2h": 0.25},
}
WARM_UP = 7
"""Two steps as the passes planned them, four under the first plan, one after its review."""
MOST_HELD_BYTES = 8 * GiB
"""Of values of graphs, while they are counted."""
HOST_SHARE = 0.45
"""Of weights, gradients and optimizer states: the host holds so much. Gradients, a quarter of them,
stay beside the arena, so with more of it little or nothing would be left for the disk."""


@dataclass(frozen=True)
class Run:
    """One model under one plan. Seconds of a step; bytes of the arena.

    over_least, over_floor, of_measured  medians over steps: seconds over the least, over the floor,
        and predicted over seconds, at what regions took in that very step; no figure without a plan
    """

    over_least: float
    over_floor: float
    of_measured: float
    measured_s: float
    predicted_s: float
    least_s: float
    stall_s: float
    link_s: float
    compute_s: float
    least_stall: float
    peak_bytes: int
    predicted_peak_bytes: int
    moved_bytes: float
    predicted_bytes: float


NOT_PLANNED: Mapping[str, Any] = {
    "step_s": 0.0,
    "least_s": 1.0,
    "least_compute_s": 1.0,
    "floor_s": 1.0,
    "busy": {},
    "bytes": {},
    "peak": {"device": 0},
    "seconds": {"compute": 0.0, "optimizer": 0.0},
}


def throttle_of(mine: Machine, like: Machine, share: Mapping[str, float]) -> dict[str, float]:
    """Rates at which this machine has the bytes per FLOP of `like`."""
    ratio = mine.compute.flops_per_s["float32"] / like.compute.flops_per_s["float32"]
    links = ("disk_read", "disk_write", "h2d", "d2h")
    return {name: like.links[name].bytes_per_s * ratio * share.get(name, 1.0) for name in links}


def built(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return gpt(Shape(args.layers, args.width, args.width // 64, args.sequence))


def data(args: argparse.Namespace, number: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 256, (args.batch, args.sequence + 1), generator=made)
    return ids[:, :-1], ids[:, 1:]


def stepper(model: nn.Module, run: Callable[..., Tensor]) -> Callable[..., float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(ids: Tensor, targets: Tensor) -> float:
        began = time.perf_counter()
        run(ids, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    return step


def offloaded(args: argparse.Namespace, device: int, **fields: Any) -> tuple[nn.Module, Any]:
    torch._dynamo.reset()
    # Budgets here are parts of the states; what backward needs is kept beside them in every run.
    model = zcompile.offload(
        built(args),
        device="cpu",
        device_memory=device + args.held_bytes,
        activations="keep",
        **fields,
    )
    return model, stepper(model, torch.compile(model, backend="zinf"))


def held_bytes(args: argparse.Namespace, whole: int) -> int:
    """What the graphs of a step hold of the device beside the arena."""
    model, step = offloaded(args, whole + MOST_HELD_BYTES, host_memory="4GiB")
    step(*data(args, 0))
    held = session_behind(model).split.held_bytes
    zcompile.close(model)
    return held


def measured(args: argparse.Namespace, device: int, **fields: Any) -> tuple[Run, StepTrace | None]:
    """Train for some steps, the first of which count for nothing; and the record of the last. What
    is predicted is so before the steps that it is compared with."""
    with tempfile.TemporaryDirectory(dir=args.disk) as disk:
        model, step = offloaded(args, device, disk=disk, **fields)
        for number in range(WARM_UP):
            step(*data(args, number))
        told = zcompile.stats(model, reset=True)["predicted"] or NOT_PLANNED
        walked = walks_of(session_behind(model))
        seconds = [step(*data(args, number)) for number in range(args.steps)]
        stats = zcompile.stats(model)
        recorded = session_behind(model).executor.recorder.end()
        step(*data(args, args.steps))  # the one before is known to be over
        then = [at_own_costs(session_behind(model), walks) or told for walks in walked]
        zcompile.close(model)
    moved = {link: n / args.steps for link, n in stats["bytes"].items()}
    pairs = list(zip(seconds, then, strict=True))
    return Run(
        over_least=statistics.median(s / row["least_s"] for s, row in pairs),
        over_floor=statistics.median(s / row["floor_s"] for s, row in pairs),
        of_measured=statistics.median(row["step_s"] / s for s, row in pairs),
        measured_s=statistics.median(seconds),
        predicted_s=told["step_s"],
        least_s=told["least_s"],
        stall_s=stats["seconds"]["stall"] / args.steps,
        link_s=max(told["busy"].values(), default=0.0),
        compute_s=statistics.median(
            row["seconds"]["compute"] + row["seconds"]["optimizer"] for row in then
        ),
        least_stall=statistics.median(1 - row["least_compute_s"] / row["least_s"] for row in then),
        peak_bytes=stats["peak"]["device"],
        predicted_peak_bytes=told["peak"]["device"],
        moved_bytes=sum(moved.values()),
        predicted_bytes=sum(told["bytes"].values()),
    ), recorded


def lru_bytes(step: StepTrace, device: int) -> int:
    """Bytes over the bus if the device were a cache of entries that forgets the least recently
    used: counted over the second of two steps, in which it is warm."""
    held: OrderedDict[EntryRef, bool] = OrderedDict()  # entry -> whether it must be written back
    moved = used = 0
    for _ in range(2):
        moved = 0
        for call in step.calls:
            for use in call.uses():
                nbytes = step.facts[use.ref].nbytes
                if use.ref not in held:
                    moved += nbytes if use.read_bytes else 0
                    used += nbytes
                held[use.ref] = held.get(use.ref, False) or use.written_bytes > 0
                held.move_to_end(use.ref)
                while used > device and len(held) > 1:
                    gone, dirty = held.popitem(last=False)
                    used -= step.facts[gone].nbytes
                    moved += step.facts[gone].nbytes if dirty else 0
    return moved


def show(name: str, share: float, run: Run) -> str:
    peak = (
        "equal"
        if run.peak_bytes == run.predicted_peak_bytes
        else (f"{run.peak_bytes} / {run.predicted_peak_bytes}")
    )
    return (
        f"| {name} | {share:.3g} | {run.measured_s:.3f} "
        f"| {run.over_least:.2f} | {run.over_floor:.2f} | {run.of_measured:.2f} "
        f"| {run.measured_s / run.least_s:.2f} | {run.predicted_s / run.measured_s:.2f} "
        f"| {run.link_s:.3f} | {run.compute_s:.3f} "
        f"| {run.stall_s / run.measured_s:.1%} / {max(0.0, run.least_stall):.1%} | {peak} "
        f"| {run.moved_bytes / MiB:.1f} / {run.predicted_bytes / MiB:.1f} |"
    )


HEAD = (
    "| links | budget | step s | / least | / floor | predicted / | / least, before "
    "| predicted /, before | busiest link s | compute s | stall / least stall | peak "
    "| MiB a step / predicted |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def sweep(args: argparse.Namespace, whole: int, throttles: dict[str, dict[str, float]]) -> None:
    print(HEAD)
    for name, throttle in throttles.items():
        for share in FRACTIONS:
            run, _ = measured(
                args, int(whole * share), throttle=throttle, host_memory=args.host_memory
            )
            print(show(name, share, run), flush=True)


def ablations(args: argparse.Namespace, whole: int, throttle: dict[str, float]) -> None:
    """At a quarter, everything else on the host."""
    device = whole // 4
    print("\n| at a quarter, nothing on disk | step s | / planned | MiB a step over the bus |")
    print("|---|---|---|---|")
    variants: dict[str, dict[str, Any]] = {
        "planned": {},
        "no prefetch": {"max_lead": 0},
        "no residency": {"residency": False},
    }
    base: Run | None = None
    seen: StepTrace | None = None
    for name, how in variants.items():
        run, step = measured(args, device, throttle=throttle, host_memory="4GiB", **how)
        base, seen = base or run, seen or step
        print(
            f"| {name} | {run.measured_s:.3f} | {run.measured_s / base.measured_s:.2f} "
            f"| {run.moved_bytes / MiB:.1f} |",
            flush=True,
        )
    assert seen is not None
    print(f"| LRU in place of the plan (counted) | - | - | {lru_bytes(seen, device) / MiB:.1f} |")


def beside_eager(args: argparse.Namespace, whole: int) -> None:
    """What fits, beside eager; a step of each in turn."""
    plain = built(args)
    eager = stepper(plain, plain)
    model, ours = offloaded(args, 2 * whole, host_memory="4GiB")
    rows: dict[str, list[float]] = {"eager": [], "planned": []}
    for number in range(WARM_UP + 4 * args.steps):
        if number == WARM_UP:
            zcompile.stats(model, reset=True)
            rows = {"eager": [], "planned": []}
        rows["eager"].append(eager(*data(args, number)))
        rows["planned"].append(ours(*data(args, number)))
    stats = zcompile.stats(model)
    ratio = statistics.median(b / a for a, b in zip(rows["eager"], rows["planned"], strict=True))
    same = all(
        torch.equal(p.on_host(), q)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )
    print(
        f"\nEverything fits: {statistics.median(rows['planned']):.3f} s a step, eager "
        f"{statistics.median(rows['eager']):.3f} s, ratio (median of pairs) {ratio:.3f}; "
        f"{sum(stats['bytes'].values())} bytes moved; parameters equal: {same}"
    )
    zcompile.close(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--disk", default=None)
    parser.add_argument(
        "--host-share",
        type=float,
        default=HOST_SHARE,
        help="part of all states that the host holds, in the sweep",
    )
    parser.add_argument("--only", choices=["sweep", "ablations", "eager"])
    parser.add_argument("--links", choices=list(SHARES), help="of the sweep, one ratio")
    args = parser.parse_args()
    states = 16 * sum(p.numel() for p in built(args).parameters())
    whole = int(states * 1.02) + 2 * MiB
    args.held_bytes = 0
    args.held_bytes = held_bytes(args, whole)
    args.host_memory = int(states * args.host_share) + 8 * MiB
    mine, like = probed(torch.device("cpu"), ()), find("h200-node")
    throttles = {name: throttle_of(mine, like, share) for name, share in SHARES.items()}
    first = next(iter(throttles.values()))
    print(
        f"{show_size(states)} of states; all budgets are parts of {show_size(whole)}; host "
        f"{show_size(args.host_memory)}; "
        + ", ".join(f"{link} {show_rate(rate)}" for link, rate in first.items())
        + "\n"
    )
    if args.only in (None, "sweep"):
        some = {name: throttles[name] for name in ([args.links] if args.links else throttles)}
        sweep(args, whole, some)
    if args.only in (None, "ablations"):
        ablations(args, whole, first)
    if args.only in (None, "eager"):
        beside_eager(args, whole)


if __name__ == "__main__":
    main()
