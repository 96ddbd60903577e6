"""`--sweep` and `--plot`: a step for several sizes of a tier, as table, bars and picture."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zcompile.cli.answer import Answer
from zcompile.cli.plots import bars, svg
from zcompile.cli.sizes import read_size
from zcompile.errors import ConfigInvalid
from zcompile.ir.printer import table
from zcompile.ir.units import show_seconds, show_size
from zcompile.machine.model import TIERS

MOST_STEPS = 64
STEPS = 8
"""Points of a sweep, if it does not say."""


@dataclass(frozen=True)
class Point:
    """One size of the tier that is swept. Seconds are None where the step cannot run at all, and
    those of the bound where no bound is known."""

    tier: str
    nbytes: int
    fits: bool
    step_seconds: float | None
    bound_seconds: float | None
    bottleneck: str


def read_sweep(text: str) -> tuple[str, tuple[int, ...]]:
    """The tier and the sizes of "device=8GiB..80GiB:10". raises  ConfigInvalid"""
    tier, equals, span = text.partition("=")
    low, dots, rest = span.partition("..")
    high, _, count = rest.partition(":")
    if not equals or not dots or tier not in TIERS:
        raise ConfigInvalid("sweep", text, "is not written like device=8GiB..80GiB, device=8GiB.."
                            f"80GiB:10; tiers are {', '.join(TIERS)}")  # fmt: skip
    if count and not (count.isdecimal() and 2 <= int(count) <= MOST_STEPS):
        raise ConfigInvalid("sweep", text, f"asks for {count!r} steps; give 2 to {MOST_STEPS}")
    first, last = read_size("sweep", low), read_size("sweep", high)
    if first >= last:
        raise ConfigInvalid("sweep", text, "begins where it should end; write FROM..TO")
    n = int(count or STEPS)
    return tier, tuple(first + (last - first) * i // (n - 1) for i in range(n))


def check_plot(plot: Path | None, sweep: str | None, needs_sweep: bool) -> None:
    """Whether there will be a picture, and room for it: planning may take minutes before.

    needs_sweep  without one there is nothing to show
    raises  ConfigInvalid
    """
    if plot is None:
        return
    if sweep is None and needs_sweep:
        raise ConfigInvalid("plot", str(plot), "shows a sweep; give --sweep too")
    if plot.is_dir():
        raise ConfigInvalid("plot", str(plot), "is a directory; name a file in it, as sweep.svg")
    if not plot.parent.is_dir():
        raise ConfigInvalid("plot", str(plot), f"cannot be written: {plot.parent} is no directory; "
                            "make it, or name another")  # fmt: skip
    if not os.access(plot if plot.exists() else plot.parent, os.W_OK):
        raise ConfigInvalid("plot", str(plot), "cannot be written: it is not ours to write; name "
                            "another file")  # fmt: skip


def swept(points: Sequence[Point], plot: Path | None, note: str = "") -> Answer:
    """Exit code 1, if nothing fits. raises  ConfigInvalid, if the picture cannot be written

    note  a line that says what all points have in common
    """
    if plot is not None:
        write_plot(plot, _picture(points))
    lines = (*_lines(points), *((note,) if note else ()))
    return Answer("\n".join(lines), points, 0 if any(p.fits for p in points) else 1)


def _lines(points: Sequence[Point]) -> Iterator[str]:
    def told(seconds: float | None) -> str:
        return "-" if seconds is None else show_seconds(seconds)

    yield from table((points[0].tier, "fits", "step", "least", "bottleneck"), [
        (show_size(p.nbytes), "yes" if p.fits else "no", told(p.step_seconds),
         told(p.bound_seconds), p.bottleneck) for p in points])  # fmt: skip
    yield ""
    yield from bars([(show_size(p.nbytes), p.step_seconds) for p in points], "seconds of a step")


def write_plot(path: Path, text: str) -> None:
    """raises  ConfigInvalid, if it cannot be written"""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        why = f"cannot be written: {error.strerror}"
        raise ConfigInvalid("plot", str(path), why) from error


def _picture(points: Sequence[Point]) -> str:
    lines = {
        "step": [p.step_seconds for p in points],
        "least": [p.bound_seconds for p in points],
    }
    return svg(
        f"seconds of a step by bytes of {points[0].tier}",
        [show_size(p.nbytes) for p in points],
        {name: line for name, line in lines.items() if any(v is not None for v in line)},
    )
