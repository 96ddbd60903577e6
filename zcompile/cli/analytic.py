"""Prints scale on paper, from shapes alone: `zinf plan transformer:...` and `zinf plan --paper
NAME`."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from zcompile.cli.chart import Bar, Chart, drawn
from zcompile.cli.format import Answer, Point, read_sweep, sized
from zcompile.cli.sweep import swept
from zcompile.errors import ConfigInvalid, UnknownOption
from zcompile.ir.tables import columns
from zcompile.ir.units import show_size
from zcompile.machine.files import find, names
from zcompile.machine.model import Machine, with_tier
from zcompile.planner.analytic.model import STRATEGIES, RankBytes, Transformer, read_shape, use_of
from zcompile.planner.analytic.paper import ASSUMED, FIGURES, TOLERANCE, Row
from zcompile.planner.analytic.step import (
    Assumptions,
    Group,
    Job,
    StepTime,
    fastest,
    group_of,
    step_time,
    use_of_job,
)

PREFIX = "transformer:"
PLACED = ("weights", "optimizer", "checkpoints")


@dataclass(frozen=True)
class Compared:
    """A row of the paper, with our number beside it."""

    name: str
    unit: str
    ours: float
    paper: str | None
    ratio: float | None
    agrees: bool
    why: str


@dataclass(frozen=True)
class StrategyFit:
    """Whether one rank can hold its part of a model by a strategy."""

    strategy: str
    fits: bool
    missing_bytes: int


@dataclass(frozen=True)
class Scaled:
    """A transformer on a machine. *_bytes are of the whole model, `use` is of one rank.

    group  the fewest ranks whose devices hold the model states (MiCS); None if all are too few
    """

    shape: Transformer
    machine: str
    ranks: int
    parameters: int
    model_state_bytes: int
    checkpoint_bytes: int
    model_working_bytes: int
    activation_working_bytes: int
    strategies: tuple[StrategyFit, ...]
    job: Job
    use: RankBytes
    fits: bool
    step: StepTime
    step_seconds: float
    group: Group | None
    assumed: Assumptions


def scale_answer(args: argparse.Namespace) -> Answer:
    """The answer to `zinf plan`, for a shape (`args.model`) or a figure of the paper
    (`args.paper`).

    `args.model` is "transformer:layers=...,hidden=...,heads=...", with `args.machine`;
    `args.device`, `host` and `disk_bytes`, where given, are capacities of one rank, `batch` and
    `seq` those of the shape where its text has none; `sweep` and `plot` as of a model.

    raises  ConfigInvalid, UnknownOption, and what finding a machine raises
    """
    sweep = getattr(args, "sweep", None)
    if args.paper is not None:
        if sweep is not None:
            raise ConfigInvalid("sweep", sweep, "means nothing to --paper; leave it out")
        return paper_answer(args.paper, getattr(args, "plot", None))
    for option, usual in (("optimizer", "adamw"), ("micro_batches", 1), ("no_sync", False)):
        if (given := getattr(args, option, usual)) != usual:
            why = "means nothing to transformer:..., planned from its shape alone; leave it out"
            raise ConfigInvalid(option.replace("_", "-"), given, why)
    if args.machine is None:
        raise ConfigInvalid(
            "machine",
            None,
            "says nothing: a shape alone needs a machine; give "
            f"--machine a file or one of {', '.join(names())}",
        )
    machine = sized(find(args.machine), args)
    asked = {key: getattr(args, key, None) for key in ("batch", "seq")}
    beside = {key: str(value) for key, value in asked.items() if value is not None}
    if sweep is not None:
        tier, sizes = read_sweep(sweep)
        points = tuple(_points(args.model, machine, beside, tier, sizes))
        return swept(points, args.plot, capacity=machine.tiers.get(tier))
    return transformer_answer(args.model, machine, beside, getattr(args, "plot", None))


def dgx2(nodes: int) -> Machine:
    """DGX-2 nodes; between 4 and 96 nodes every rank sees the same machine."""
    if nodes == 1:
        return find("dgx2-v100-1node")
    return replace(find("dgx2-v100-4nodes"), name=f"dgx2-v100-{nodes}nodes", ranks=16 * nodes)


def paper_answer(name: str, plot: Path | None = None) -> Answer:
    """A figure of the paper beside our numbers; exit code 1, if a row neither agrees nor says
    why."""
    key = name if name in FIGURES else f"figure-{name}"
    if key not in FIGURES:
        raise UnknownOption(name, FIGURES, "--paper")
    rows = list(FIGURES[key](dgx2))
    found = [Compared(r.name, r.unit, r.ours, r.paper, r.ratio, r.agrees, r.why) for r in rows]
    notes = [f"  {row.name}: {row.why}" for row in rows if row.why]
    assumed = [f"  {text}" for text in ASSUMED.get(key, ())]
    title = f"{key} of ZeRO-Infinity (arXiv:2104.07857). {FIGURES[key].__doc__}"
    head = ("", "", "ours", "paper", "ours/paper", "")
    table = columns((head, *(_compared(row) for row in rows)), "<<>>><")
    parts = (("where they differ:", notes), ("assumed:", assumed))
    lines = [line for head, told in parts if told for line in (head, *told)]
    code = 0 if all(row.agrees or row.why for row in rows) else 1
    bars = (
        Bar(f"{row.name} {row.unit}".strip(), row.ratio, f"{row.ratio:.2f}", 1.0)
        for row in rows
        if row.ratio is not None
    )
    chart = Chart(f"{key}: ours beside the paper's", "ours / paper", tuple(bars), "the paper's")
    return drawn(Answer("\n".join((title, *table, *lines)), found, code), chart, plot)


def _compared(row: Row) -> tuple[str, ...]:
    paper = "-" if row.paper is None else f"{float(row.paper):g}"
    paper = f"over {paper}" if row.kind == "at least" else paper
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    return row.name, row.unit, f"{row.ours:.4g}", paper, ratio, _verdict(row)


def _verdict(row: Row) -> str:
    if row.ratio is None:
        return ""
    if not row.agrees:
        return "differs"
    if row.kind == "formula":
        return "equal as printed"
    return "met" if row.kind == "at least" and row.ratio >= 1 else f"within {TOLERANCE:.0%}"


def transformer_answer(
    model: str,
    machine: Machine,
    beside: Mapping[str, str] = MappingProxyType({}),
    plot: Path | None = None,
) -> Answer:
    """A shape on a machine; exit code 1, if it does not fit.

    beside  options that hold where the text does not say them
    """
    scaled = _scaled(model, machine, beside)
    answer = Answer("\n".join(_text(scaled)), scaled, 0 if scaled.fits else 1)
    bars = (
        Bar(tier, used / capacity, f"{show_size(used)} of {show_size(capacity)}", 1.0)
        for tier, used in scaled.use.bytes_by_tier.items()
        if (capacity := machine.tiers.get(tier))
    )
    title = f"what one rank of {machine.name} holds"
    return drawn(answer, Chart(title, "part of the tier", tuple(bars), "all of it"), plot)


def _points(
    model: str, machine: Machine, beside: Mapping[str, str], tier: str, sizes: Sequence[int]
) -> Iterator[Point]:
    for nbytes in sizes:
        found = _scaled(model, with_tier(machine, tier, nbytes), beside)
        busy = found.step.busy_s
        most = max(busy, key=lambda lane: busy[lane], default="")
        yield Point(tier, nbytes, found.fits, found.step_seconds, None, most)


def _scaled(model: str, machine: Machine, beside: Mapping[str, str]) -> Scaled:
    asked, placed = _read(model, beside)
    assumed = _assumed(machine)
    job = asked if placed else fastest(asked, machine, assumed)
    step, use, shape = step_time(job, machine, assumed), use_of_job(job, machine), job.shape
    held = []
    for strategy in STRATEGIES:
        found = use_of(strategy, shape, machine)
        held.append(StrategyFit(strategy.name, found.fits, found.missing_bytes))
    return Scaled(
        shape,
        machine.name,
        machine.ranks,
        shape.parameters,
        shape.model_state_bytes,
        round(shape.checkpoint_bytes * machine.ranks),
        shape.model_working_bytes,
        shape.activation_working_bytes,
        tuple(held),
        job,
        use,
        use.fits,
        step,
        step.seconds,
        group_of(shape, machine),
        assumed,
    )


def _read(model: str, beside: Mapping[str, str]) -> tuple[Job, bool]:
    """The job that a text asks for, and whether it says where something rests."""
    options = dict(beside)
    for item in model.removeprefix(PREFIX).split(","):
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigInvalid("transformer", item, "is not written like layers=128")
        options[key.strip()] = value.strip()
    tiers = {key: options.pop(key) for key in PLACED if key in options}
    overlap = options.pop("overlap", "on")
    if overlap not in ("on", "off"):
        raise ConfigInvalid("transformer:overlap", overlap, "is neither on nor off")
    mp = options.pop("mp", "1")
    if not mp.isdecimal():
        raise ConfigInvalid("transformer:mp", mp, "is not a number of ranks")
    return Job(
        read_shape(options, (*PLACED, "mp", "overlap")), int(mp), **tiers, overlap=overlap == "on"
    ), bool(tiers)


def _assumed(machine: Machine) -> Assumptions:
    rates = machine.compute.flops_per_s
    return Assumptions(dtype="float16" if "float16" in rates else "bfloat16")


def _text(scaled: Scaled) -> list[str]:
    shape, step, job = scaled.shape, scaled.step, scaled.job
    kept = f"batch {shape.batch:g} of {shape.seq} tokens per rank"
    verdict = "fits" if scaled.fits else f"lacks {show_size(scaled.use.missing_bytes)} per rank"
    return [
        f"{scaled.parameters / 1e9:,.1f}B parameters: {shape.layers} layers, "
        f"hidden {shape.hidden}, {shape.heads} heads; {kept}",
        *columns(
            (
                ("  model states", show_size(scaled.model_state_bytes)),
                ("  activation checkpoints, all ranks", show_size(scaled.checkpoint_bytes)),
                ("  working memory: model", show_size(scaled.model_working_bytes)),
                ("  working memory: activations", show_size(scaled.activation_working_bytes)),
            ),
            "<>",
        ),
        f"on {scaled.machine}, {scaled.ranks} rank{'s' * (scaled.ranks > 1)}, by strategy:",
        *columns(
            [
                (
                    f"  {held.strategy}",
                    "fits" if held.fits else f"lacks {show_size(held.missing_bytes)} per rank",
                )
                for held in scaled.strategies
            ],
            "<<",
        ),
        *([_mics(scaled.group)] if scaled.group else []),
        f"simulated: weights on {job.weights}, gradients on {job.gradients}, optimizer state on "
        f"{job.optimizer}, checkpoints on {job.checkpoints}, mp {job.mp}, overlap "
        f"{'on' if job.overlap else 'off'}: {verdict}",
        *columns(
            [
                (f"  {tier} of one rank", show_size(nbytes))
                for tier, nbytes in scaled.use.bytes_by_tier.items()
            ],
            "<>",
        ),
        f"  step {step.seconds:,.4g} s: passes {step.passes_s:,.4g} s (compute "
        f"{step.compute_s:,.4g} s), update {step.update_s:,.4g} s",
        f"  assumed: matmuls at {scaled.assumed.sustained:.2f} of the machine's "
        f"{scaled.assumed.dtype} rate, updates on the CPU at "
        f"{scaled.assumed.host_bytes_per_s / 1e9:.0f} GB/s per node, as on a DGX-2",
        f"  {step.flops_per_s / 1e12:.1f} TFLOP/s per rank, "
        f"{shape.token_count * scaled.ranks / step.seconds:,.4g} tokens/s in all",
        "  busy: "
        + ", ".join(
            f"{lane} {seconds / step.seconds:.0%}" for lane, seconds in step.busy_s.items()
        ),
    ]


def _mics(group: Group) -> str:
    return (
        f"  MiCS: {group.ranks} ranks hold it on their devices; gathering a parameter, each gets "
        f"{group.hierarchical.inter_node:.2f} of it from other nodes in "
        f"{group.hierarchical.hops:g} hops (flat: {group.flat.inter_node:.2f} in "
        f"{group.flat.hops:g})"
    )
