"""`zinf plan MODEL`: what training a model would take, on a machine one need not have."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zcompile.cli.analytic import PREFIX, scale_answer
from zcompile.cli.answer import Answer
from zcompile.cli.curves import curve_svg
from zcompile.cli.model_source import example_inputs, find_model
from zcompile.cli.sizes import read_size
from zcompile.cli.sweeps import Point, check_plot, read_sweep, swept, write_plot
from zcompile.errors import BudgetExceeded, ConfigInvalid
from zcompile.machine.model import with_tier

_TIERS = {
    "device": "bytes of the device, for entries and for what graphs hold, as 24GiB; what becomes "
    "of activations is chosen for it. By default what the machine has, with all of them kept",
    "host": "bytes of the host, staging within",
    "disk-bytes": "bytes of the disk",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `zinf plan`."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help=(
        "module:name of a torch module or of a function that makes one (examples.train_gpt:model); "
        "a config.json of Hugging Face, or a directory with one; or transformer:layers=...,hidden="
        "...,heads=..."))  # fmt: skip
    parser.add_argument("--paper", metavar="NAME", help="a table or figure of ZeRO-Infinity beside "
                        "ours: figure-2a, table-3, figure-3, figure-5a, ...")  # fmt: skip
    parser.add_argument("--machine", metavar="NAME", help="a machine by name or file (`zinf doctor "
                        "--machine` lists them); by default this one")  # fmt: skip
    for tier in ("device", "host", "disk-bytes"):
        parser.add_argument(f"--{tier}", metavar="SIZE",
                            help=_TIERS[tier])  # fmt: skip
    parser.add_argument("--batch", type=int, default=1, help="samples of a micro-batch; default 1")
    parser.add_argument("--seq", type=int, help="tokens of a sample; default: what the model takes")
    parser.add_argument("--shape", metavar="N,N", help="of the input of a model that takes floats, "
                        "without the batch: 3,224,224")  # fmt: skip
    parser.add_argument("--optimizer", default="adamw", help="adamw (default) or sgd")
    parser.add_argument("--micro-batches", type=int, default=1, metavar="N",
                        help="passes per optimizer step; default 1")  # fmt: skip
    parser.add_argument("--sweep", metavar="TIER=FROM..TO[:STEPS]",
                        help="the step for sizes of a tier, as device=8GiB..80GiB:10")  # fmt: skip
    parser.add_argument(
        "--plot",
        metavar="FILE.svg",
        type=Path,
        help="the sweep as a picture; without one, what the graph holds that holds most, by node",
    )


def plan(args: argparse.Namespace) -> Answer:
    """Exit code 1, if the model does not fit.

    raises  ConfigInvalid (usage), and what `zcompile.plan` raises
    """
    on_paper = args.paper is not None or (args.model or "").startswith(PREFIX)
    check_plot(args.plot, args.sweep, on_paper)
    if on_paper:
        return scale_answer(args)
    if args.model is None:
        raise ConfigInvalid("MODEL", None, "is missing; name a model, or a figure by --paper")
    sweep = None if args.sweep is None else read_sweep(args.sweep)
    if args.batch < 1:
        raise ConfigInvalid("batch", args.batch, "must be at least 1")
    from zcompile.config import Config
    from zcompile.frontend.dry_run import plan  # torch takes seconds; usage errors do without
    from zcompile.planner.report import note_of_ranks

    terms = plan.terms_of(Config(**_budgets(args)), args.machine)
    if args.disk_bytes is not None:
        terms = terms.on(with_tier(terms.machine, "disk", read_size("disk-bytes", args.disk_bytes)))
    model = find_model(args.model)
    inputs = example_inputs(model, args.batch, args.seq, args.shape)

    def trace(at: Any) -> Any:
        return plan.trace(model, inputs, at, args.optimizer, args.micro_batches)

    if sweep is not None:
        points = tuple(_points(trace, terms, *sweep))
        return swept(points, args.plot, note_of_ranks(terms.machine.ranks))
    report = plan.report_of(trace(terms), terms)
    if args.plot is not None and report.fullest is not None:
        write_plot(args.plot, curve_svg(report.fullest))
    return Answer(str(report), report.to_dict(), 0 if report.fits else 1)


def _budgets(args: argparse.Namespace) -> dict[str, Any]:
    given = {"device_memory": ("device", args.device), "host_memory": ("host", args.host)}
    return {name: read_size(option, text) for name, (option, text) in given.items()
            if text is not None}  # fmt: skip


def _points(
    trace: Callable[[Any], Any], terms: Any, tier: str, sizes: Sequence[int]
) -> Iterator[Point]:
    """The step planned for each size; traced once, unless what graphs hold depends on the size."""
    from zcompile.frontend.dry_run import plan

    traced = None if terms.bounded else trace(terms)
    for nbytes in sizes:
        at = terms.on(with_tier(terms.machine, tier, nbytes))
        try:
            report = plan.report_of(traced or trace(at), at, prices=False)
        except BudgetExceeded as error:
            why = f"{error.tier} too small for {error.where}"
            yield Point(tier, nbytes, False, None, None, why)
        else:
            yield Point(tier, nbytes, report.fits, report.step_seconds, report.bound_seconds,
                        report.bottleneck)  # fmt: skip
