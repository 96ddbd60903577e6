"""Tells a step for several sizes of a tier (`zinf plan --sweep`): a table, bars, a picture."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from zcompile.cli.chart import Bar, Chart, chart_lines
from zcompile.cli.format import TERMINAL, Answer, Point, svg, write_plot
from zcompile.ir.tables import table
from zcompile.ir.units import show_seconds, show_size


def swept(
    points: Sequence[Point], plot: Path | None, note: str = "", capacity: int | None = None
) -> Answer:
    """The answer of a sweep; exit code 1, if nothing fits.

    note      a line that says what all points have in common
    capacity  bytes of the tier that the machine has; they are marked among the sizes
    raises    ConfigInvalid, if the picture cannot be written
    """
    if plot is not None and plot != TERMINAL:
        write_plot(plot, _picture(points, capacity))
    lines = (*_lines(points, capacity), *((note,) if note else ()))
    return Answer("\n".join(lines), points, 0 if any(p.fits for p in points) else 1)


def _lines(points: Sequence[Point], capacity: int | None) -> Iterator[str]:
    yield from table(
        (points[0].tier, "fits", "step", "least", "bottleneck"),
        [
            (
                show_size(p.nbytes),
                "yes" if p.fits else "no",
                _told(p.step_seconds),
                _told(p.bound_seconds),
                p.bottleneck,
            )
            for p in points
        ],
    )
    yield ""
    bars = tuple(Bar(show_size(p.nbytes), p.step_seconds, _told(p.step_seconds)) for p in points)
    title = f"step by bytes of {points[0].tier}"
    yield from chart_lines(Chart(title, "seconds", bars))
    if capacity is not None:
        yield f"the machine has {show_size(capacity)} of {points[0].tier}"


def _told(seconds: float | None) -> str:
    return "-" if seconds is None else show_seconds(seconds)


def _picture(points: Sequence[Point], capacity: int | None) -> str:
    lines = {
        "step": [p.step_seconds for p in points],
        "least": [p.bound_seconds for p in points],
    }
    has = "" if capacity is None else f" (the machine has {show_size(capacity)})"
    return svg(
        f"seconds of a step by bytes of {points[0].tier}{has}",
        [show_size(p.nbytes) for p in points],
        {name: line for name, line in lines.items() if any(v is not None for v in line)},
    )
