"""Updates that the host computes where they rest, against updates on the device, behind a slow bus.

    python -m benchmarks.host_updates [--rates 50MB/s 100MB/s]
    python -m benchmarks.host_updates --seven-billion [--layers 8] [--batch 4]

Without options: a GPT whose weights, gradients and states rest on the host, behind links that are
throttled to some rates, trained with updates="device" and updates="auto" in turn, in one process;
"predicted" is what the plans in force foretell before that, each after steps of its own, "ratio" is
of the medians of a step, "foretold" of what is predicted, "host": whether it computed updates. The
bits of all parameters are compared in the end.

With --seven-billion nothing is run: the figures are those of `zcompile.plan` for a Llama of 7 B
parameters under bfloat16 autocast, AdamW, 4 samples of 2048 tokens a step, on "h100-pcie-80gb"
behind PCI Express 3 and 4 (12 and 24 GB/s each way), with updates="device" and "fastest". Its host
updates at the default rate, 100 GB/s. With fewer than 32 layers the device is as much smaller. The
last column is seconds of CPU for planning, without tracing.
"""

import argparse
from dataclasses import replace
from statistics import median
from time import perf_counter, process_time

import torch
from torch import Tensor, nn

import zcompile
from benchmarks.seven_billion import Autocast
from examples.train_gpt import Shape
from examples.train_gpt import model as gpt
from zcompile.config import Config
from zcompile.frontend.dry_run.plan import on_cpu, report_of, terms_of, trace
from zcompile.machine.files import find
from zcompile.machine.model import Machine

SHAPE = Shape(layers=2, width=256, heads=4, context=64, vocabulary=1024)
RATES = ("25MB/s", "50MB/s", "100MB/s")
WAYS = ("device", "auto")
PLANNED, ROUNDS, BEFORE = 7, 5, 2
"""Steps until a plan is in force and reviewed once, rounds that are timed of each, and steps before
the one that is timed in a round."""
LAYERS = 32
"""Of the model of 7 B parameters."""
BUSES = {"PCI Express 3": 12e9, "PCI Express 4": 24e9}


class Run:
    """A model that trains in one way behind links of one rate."""

    def __init__(self, rate: str, updates: str) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = zcompile.offload(
            gpt(SHAPE),
            device="cpu",
            device_memory="14MiB",
            host_memory="256MiB",
            throttle={"h2d": rate, "d2h": rate},
            updates=updates,
        )
        self.forward = torch.compile(self.model, backend="zinf")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.ids: Tensor = torch.randint(0, SHAPE.vocabulary, (2, 2, SHAPE.context))

    def planned(self) -> float:
        """Train until a plan is in force; returns the seconds of a step that it foretells.

        It is asked at once: what is done between the steps of a run, as steps of another, counts
        to them.
        """
        for _ in range(PLANNED):
            self.step()
        seconds: float = zcompile.stats(self.model)["predicted"]["step_s"]
        return seconds

    def step(self) -> float:
        begin = perf_counter()
        self.forward(self.ids[0], self.ids[1]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return perf_counter() - begin


def measured(rate: str) -> str:
    """A row of the table."""
    torch._dynamo.reset()
    runs = {way: Run(rate, way) for way in WAYS}
    foretold = [run.planned() for run in runs.values()]
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way, run in runs.items():
            for _ in range(BEFORE):  # whose transfers go on in the next step of this one
                run.step()
            taken[way].append(run.step())
    seconds = [median(taken[way]) for way in WAYS]
    one, other = (run.model.state_dict() for run in runs.values())
    on_host = zcompile.stats(runs["auto"].model)["updates_on_host"] > 0
    same = all(torch.equal(one[name].on_host(), other[name].on_host()) for name in one)
    for run in runs.values():
        zcompile.close(run.model)
    times = " | ".join(f"{s:.3f}" for s in (*seconds, *foretold))
    ratio, said = seconds[0] / seconds[1], foretold[0] / foretold[1]
    return f"| {rate} | {times} | {ratio:.2f} | {said:.2f} | {on_host} | {same} |"


def behind(bus: float, layers: int) -> Machine:
    """The machine behind a bus of so many bytes per second, with the part of its device that these
    layers are of the model."""
    made = find("h100-pcie-80gb")
    links = {
        name: replace(link, bytes_per_s=bus) if name in ("h2d", "d2h") else link
        for name, link in made.links.items()
    }
    tiers = {**made.tiers, "device": made.tiers["device"] * layers // LAYERS}
    return replace(made, tiers=tiers, links=links)


def foretold(layers: int, batch: int) -> None:
    with torch.device("meta"):
        model, ids = Autocast(layers), torch.zeros(batch, 2048, dtype=torch.int64)
    traced = None
    print(
        "| bus | updates | step s | of which step | compute s | h2d GB | d2h GB | on the host | "
        "planning s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, bus in BUSES.items():
        for updates in ("device", "fastest"):
            terms = terms_of(Config(device="cpu", updates=updates), behind(bus, layers))
            if traced is None:  # nothing bounds the device: it is the same for all
                with on_cpu():
                    traced = trace(model, (ids,), terms)
            began = process_time()
            made = report_of(traced, terms, prices=False)
            planning_s = process_time() - began
            moved = {link.link: link.nbytes / 1e9 for link in made.links}
            print(
                f"| {name}, {bus / 1e9:.0f} GB/s | {updates} | {made.step_seconds:.3g} | "
                f"{made.phase_seconds.get('step', 0.0):.3g} | {made.compute_seconds:.3g} | "
                f"{moved['h2d']:.0f} | {moved['d2h']:.0f} | {made.host_parameters} | "
                f"{planning_s:.0f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seven-billion", action="store_true")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rates", nargs="+", default=RATES)
    args = parser.parse_args()
    if args.seven_billion:
        foretold(args.layers, args.batch)
        return
    print("| link | device s | auto s | predicted | predicted | ratio | foretold | host | same |")
    print("|---|---|---|---|---|---|---|---|---|")
    for rate in args.rates:
        print(measured(rate), flush=True)


if __name__ == "__main__":
    main()
