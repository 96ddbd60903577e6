"""Tells what a model needs on machines one may own or buy: `zinf plan config.json --fit`.

For each machine: the largest batch, the seconds of its step, what binds it, and the cheapest change
that would lift that. Estimated from the shape in the config (`planner/analytic/fit.py`), in
milliseconds; the dry run of `zinf plan` without `--fit` is the more exact answer for one of them.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zcompile.cli.chart import Bar, Chart, drawn
from zcompile.cli.format import Answer, sized
from zcompile.errors import ConfigInvalid
from zcompile.ir.tables import columns
from zcompile.ir.units import show_count, show_seconds, show_size
from zcompile.machine.files import find, names
from zcompile.machine.model import Machine, nearest
from zcompile.planner.analytic.decoder import Decoder, read_decoder
from zcompile.planner.analytic.fit import (
    STATES,
    Change,
    Estimate,
    Training,
    Way,
    alone,
    cheapest_change,
    estimate,
    fastest,
    largest_batch,
)

SEQUENCE = 1024
"""Tokens of a sample, if neither the options nor the config say less."""


@dataclass(frozen=True)
class Fitted:
    """A model on one machine.

    batch         the largest that fits; 0: none does
    step          of that batch, or what one sample would need
    binds         the busiest lane of that step, or the tiers that lack room
    saved_batch   the largest whose activations are all saved, and so not recomputed; 0: none
    """

    machine: str
    batch: int
    step: Estimate
    step_seconds: float
    tokens_per_s: float
    binds: str
    change: Change | None
    saved_batch: int
    saved_tokens_per_s: float | None
    note: str


def fit_answer(args: argparse.Namespace) -> Answer:
    """The answer to `zinf plan config.json --fit`; exit code 1, if it fits no machine.

    `args.machine` is a list of names and files, or None: all machines of one rank that come along.

    raises  ConfigInvalid, and what finding a machine raises
    """
    _check(args)
    decoder = read_decoder(Path(args.model))
    training = Training(decoder, _seq(decoder, args.seq), STATES[args.optimizer])
    found = [fitted(training, machine) for machine in _machines(args)]
    code = 0 if any(row.batch for row in found) else 1
    answer = Answer("\n".join(_lines(training, args.optimizer, found)), found, code)
    bars = (
        Bar(row.machine, row.tokens_per_s if row.batch else None, f"{row.tokens_per_s:,.0f}")
        for row in found
    )
    return drawn(answer, Chart("speed at the largest batch", "tokens/s", tuple(bars)), args.plot)


def _check(args: argparse.Namespace) -> None:
    if args.model is None or ":" in args.model:
        raise ConfigInvalid(
            "MODEL", args.model, "is no config.json, and --fit reads the shape from one"
        )
    if args.optimizer not in STATES:
        raise ConfigInvalid("optimizer", args.optimizer, nearest(args.optimizer, STATES))
    usually = {"batch": 1, "micro_batches": 1, "no_sync": False, "shape": None, "sweep": None}
    for option, usual in usually.items():
        if (given := getattr(args, option)) != usual:
            why = "means nothing to --fit, which looks for the largest batch; leave it out"
            raise ConfigInvalid(option.replace("_", "-"), given, why)


def _seq(decoder: Decoder, given: int | None) -> int:
    most = decoder.context
    if given is not None and not 0 < given <= (most or given):
        raise ConfigInvalid("seq", given, f"is not within the {most} tokens that the model takes")
    return given or min(most or SEQUENCE, SEQUENCE)


def _machines(args: argparse.Namespace) -> Iterator[Machine]:
    for machine in map(alone, map(find, args.machine)) if args.machine else single():
        machine = sized(machine, args)
        for tier in ("device", "host"):
            if tier not in machine.tiers:
                raise ConfigInvalid("machine", machine.name, f"has no tier {tier!r}; add it")
        yield machine


def single() -> list[Machine]:
    """The machines of one rank that come along, those with the smallest device first."""
    found = [machine for machine in map(find, names()) if machine.ranks == 1]
    return sorted(found, key=lambda machine: (machine.tiers["device"], machine.name))


def fitted(training: Training, machine: Machine) -> Fitted:
    """A model on one machine, at the largest batch that fits."""
    batch = largest_batch(training, machine)
    step = fastest(training, machine, max(1, batch))
    lacks = [f"{show_size(nbytes)} of {tier}" for tier, nbytes in step.lacks.items()]
    binds = step.binds if step.fits else f"lacks {', '.join(lacks)}"
    saved = largest_batch(training, machine, (Way.SAVED,))
    return Fitted(
        machine.name,
        batch,
        step,
        step.seconds,
        step.tokens_per_s,
        binds,
        cheapest_change(training, machine, step),
        saved,
        estimate(training, machine, saved, Way.SAVED).tokens_per_s if saved else None,
        machine.note,
    )


def _lines(training: Training, optimizer: str, found: Sequence[Fitted]) -> Iterator[str]:
    decoder = training.decoder
    states = training.weight_bytes * (2 + training.states)
    yield (
        f"{show_count(decoder.parameters)} parameters of a {decoder.kind} in {decoder.dtype}, "
        f"{optimizer}, samples of {training.seq} tokens"
    )
    yield f"weights, gradients and states: {show_size(states)}"
    yield ""
    head = ("machine", "batch", "step", "tokens/s", "saved", "tokens/s", "binds", "cheapest change")
    yield from columns((head, *map(_row, found)), "<>>>>><<")
    yield ""
    yield "batch: the largest that fits without cutting operations into tiles; of it the step"
    yield "saved: the largest whose activations are saved, where a larger one recomputes them"
    yield "cheapest change: of host memory, disk, device memory, links, the first that helps"
    yield (
        "estimated from the shape; a plan often takes a little longer: `zinf plan` without --fit "
        "walks the model itself"
    )
    if decoder.dtype == "float32":
        yield 'the config says float32, or no dtype; "dtype": "bfloat16" in it plans for that'
    yield from (f"{row.machine}: {row.note}" for row in found if row.note)


def _row(row: Fitted) -> tuple[str, ...]:
    saved = f"{row.saved_tokens_per_s:,.0f}" if row.saved_tokens_per_s else "-"
    rest = (str(row.saved_batch) if row.batch else "-", saved, row.binds, _change(row))
    if not row.batch:
        return row.machine, "none", "-", "-", *rest
    speed = f"{row.tokens_per_s:,.0f}"
    return row.machine, str(row.batch), show_seconds(row.step_seconds), speed, *rest


def _change(row: Fitted) -> str:
    if row.change is None:
        return "a faster card" if row.binds == "compute" else "none found"
    batch = "" if row.batch else f"batch {row.change.batch} in "
    return f"{row.change.what}: {batch}{show_seconds(row.change.seconds)}"
