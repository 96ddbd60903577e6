"""The paper's tables and figures, computed: each row holds our figure and, where there is one, its.

A cluster is given as a function from the number of nodes to a machine; nothing is read here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Decimal

from zcompile.ir.units import GiB, TiB
from zcompile.machine.model import Machine
from zcompile.planner.analytic import article, bandwidth, strategies
from zcompile.planner.analytic.rates import Job
from zcompile.planner.analytic.step import StepTime, step_time

TOLERANCE = 0.15
"""Between a measurement of the paper and what is computed here; see DESIGN.md."""

Cluster = Callable[[int], Machine]


@dataclass(frozen=True)
class Row:
    """paper: as printed, or None. kind: how the two compare.

    "formula"   all printed digits are equal
    "measured"  within `TOLERANCE`
    "at least"  not below it by more than that
    why: where they do not agree, the reason
    """

    name: str
    unit: str
    ours: float
    paper: str | None = None
    kind: str = "measured"
    why: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.paper is None else self.ours / float(self.paper)

    @property
    def agrees(self) -> bool:
        if self.paper is None or self.ratio is None:
            return True
        if self.kind == "formula":
            printed = Decimal(self.paper)
            return Decimal(repr(self.ours)).quantize(printed, ROUND_HALF_UP) == printed
        return self.ratio >= 1 - TOLERANCE and (
            self.kind == "at least" or self.ratio <= 1 + TOLERANCE
        )


def figure_2a(_cluster: Cluster) -> Iterator[Row]:
    """Memory by shape."""
    for row in article.FIGURE_2A:
        shape, small = row.shape(32), row.shape(4)
        parameters, printed, why = article.ODDITY_2A
        yield Row(f"{row.parameters}T parameters", "T", shape.parameters / 1e12, row.parameters,
                  "formula")  # fmt: skip
        for name, unit, nbytes, text in (
            ("model states", "TiB", shape.model_state_bytes, row.states),
            ("all activations", "TiB", shape.activation_bytes, row.activations),
            ("checkpoints", "TiB", shape.checkpoint_bytes, row.checkpoints),
            ("model working memory", "GiB", shape.model_working_bytes, row.model_working),
            ("activation working memory", "GiB", small.activation_working_bytes,
             row.activation_working),
        ):  # fmt: skip
            odd = why if (row.parameters, text) == (parameters, printed) else ""
            ours = nbytes / (TiB if unit == "TiB" else GiB)
            yield Row(f"{row.parameters}T {name}", unit, ours, text, "formula", odd)


def figure_3(_cluster: Cluster) -> Iterator[Row]:
    """Efficiency without overlap: what the text says of the curves, then the curves."""
    weights = bandwidth.weights_intensity(1, 1024)
    states = bandwidth.optimizer_intensity(1, 1024)
    times = bandwidth.bandwidth_for(0.5, states) / bandwidth.bandwidth_for(0.5, weights)
    yield Row("weights and gradients, batch 1, 70 GB/s", "%",
              100 * bandwidth.efficiency(weights, 70e9), "50.6", "formula")  # fmt: skip
    yield Row("optimizer states, bandwidth over that of weights", "x", times, "4", "formula")
    for hidden_k, rate in ((2, 2e9), (8, 1e9)):
        intensity = bandwidth.checkpoint_intensity(hidden_k * article.KILO)
        yield Row(f"checkpoints, hidden {hidden_k}K, {rate / 1e9:.0f} GB/s", "%",
                  100 * bandwidth.efficiency(intensity, rate), "50", "at least")  # fmt: skip
    for name, of_batch, rates in (
        ("weights and gradients", bandwidth.weights_intensity, (1e9, 10e9, 70e9, 100e9, 1e12)),
        ("optimizer states", bandwidth.optimizer_intensity, (1e9, 10e9, 100e9, 1e12, 1.5e12)),
    ):
        for batch in (1, 2, 4, 8, 16):
            for rate in rates:
                share = bandwidth.efficiency(of_batch(batch, 1024), rate)
                yield Row(f"{name}, batch {batch}, {rate / 1e9:.0f} GB/s", "%", 100 * share)
    for hidden_k in (2, 8, 16, 32, 64):
        for rate in (1e9, 2e9, 4e9, 12e9):
            share = bandwidth.efficiency(bandwidth.checkpoint_intensity(hidden_k * 1024), rate)
            yield Row(f"checkpoints, hidden {hidden_k}K, {rate / 1e9:.0f} GB/s", "%", 100 * share)


def table_3(_cluster: Cluster) -> Iterator[Row]:
    """Bandwidth that faster devices need."""
    for times, peak, slow, total, peer in article.TABLE_3:
        need = bandwidth.needed(times)
        for name, unit, ours, text in (
            ("compute per device", "PFLOP/s", need.peak_flops_per_s / 1e15, peak),
            ("slow memory per device", "GB/s", need.slow_bytes_per_s / 1e9, slow),
            ("slow memory in all", "TB/s", need.slow_total_bytes_per_s / 1e12, total),
            ("between devices", "GB/s", need.peer_bytes_per_s / 1e9, peer),
        ):
            yield Row(f"{times}x: {name}", unit, ours, text, "formula")


def table_1(cluster: Cluster) -> Iterator[Row]:
    """All runs, in TFLOP/s per GPU."""
    return _trained(article.TABLE_1, cluster)


def figure_5a(cluster: Cluster) -> Iterator[Row]:
    """512 GPUs, 0.5T to 20T."""
    return _trained(tuple(run for run in article.TABLE_1 if run.nodes == 32), cluster)


def figure_5b(cluster: Cluster) -> Iterator[Row]:
    """1T on more and more nodes; better than linear is more per GPU."""
    return _trained(article.SCALED, cluster)


def figure_5c(cluster: Cluster) -> Iterator[Row]:
    """One node, 10B to 1T."""
    return _trained(tuple(run for run in article.TABLE_1 if run.nodes == 1), cluster)


def _trained(runs: tuple[article.Trained, ...], cluster: Cluster) -> Iterator[Row]:
    for run in runs:
        ours = step_time(run.job, cluster(run.nodes)).flops_per_s / 1e12
        printed = None if run.tflops is None else f"{run.tflops:g}"
        yield Row(f"{run.name} on {run.nodes} node{'s' * (run.nodes > 1)}", "TFLOP/s", ours,
                  printed, "at least" if run.at_least else "measured", run.why)  # fmt: skip


def figure_6a(cluster: Cluster) -> Iterator[Row]:
    """The largest model on one node, by strategy."""
    by_name = {strategy.name: strategy for strategy in strategies.STRATEGIES}
    for found in article.FIGURE_6A:
        shape = strategies.largest(by_name[found.strategy], cluster(1))
        billions = 0.0 if shape is None else shape.parameters / 1e9
        printed = None if found.billions is None else f"{found.billions:g}"
        yield Row(found.strategy, "B", billions, printed, why=found.why)


def figure_6d(cluster: Cluster) -> Iterator[Row]:
    """How many times as fast a step is with transfers ahead of and beside compute."""
    machine = cluster(article.OVERLAPPED_NODES)
    for job in article.OVERLAPPED:
        yield Row(f"batch {job.shape.batch:g}", "x", speedup(job, machine))


def speedup(job: Job, machine: Machine) -> float:
    """Of overlap, over the whole step."""
    times: list[StepTime] = [
        step_time(replace(job, overlap=overlap), machine) for overlap in (False, True)
    ]
    return times[0].seconds / times[1].seconds


FIGURES: dict[str, Callable[[Cluster], Iterator[Row]]] = {
    "figure-2a": figure_2a,
    "figure-3": figure_3,
    "table-1": table_1,
    "table-3": table_3,
    "figure-5a": figure_5a,
    "figure-5b": figure_5b,
    "figure-5c": figure_5c,
    "figure-6a": figure_6a,
    "figure-6d": figure_6d,
}
"""By the name that `zinf plan --paper` takes."""
