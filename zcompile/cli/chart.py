"""Draws rows of bars with an axis: as text for a terminal, or as SVG for a file (`--plot`).

The axis has its name, its unit and figures; a limit, such as the capacity of a tier, is a line
across the bar; the longest bar is labelled.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from zcompile.cli.format import TERMINAL, Answer, write_plot

WIDTH = 50
"""Characters of the axis."""
LIMIT, FILLED = "|", "#"
TICKS = 4
ROW, LEFT, AXIS = 22, 190, 420
"""Pixels: height of a row, where bars begin, length of the axis."""


@dataclass(frozen=True)
class Bar:
    """value  None: it cannot run
    told   the value for people
    limit  that the value should not pass; None: there is none
    """

    name: str
    value: float | None
    told: str
    limit: float | None = None


@dataclass(frozen=True)
class Chart:
    """axis  name and unit of the values; limit  of what the line across a bar is, "" without one"""

    title: str
    axis: str
    bars: tuple[Bar, ...]
    limit: str = ""

    @property
    def most(self) -> float:
        """The end of the axis."""
        found = [x for bar in self.bars for x in (bar.value, bar.limit) if x is not None]
        return max(found, default=0.0) or 1.0

    def label(self, bar: Bar) -> str:
        """What is written beside a bar."""
        longest = max((b for b in self.bars if b.value), key=lambda b: b.value or 0, default=None)
        most = " <- most" if len(self.bars) > 1 and bar is longest else ""
        return f"{bar.told if bar.value is not None else '(cannot run)'}{most}"


def drawn(answer: Answer, chart: Chart, plot: Path | None) -> Answer:
    """`answer` with a chart, where `--plot` asks for one: below its text, or in a file.

    raises  ConfigInvalid, if the file cannot be written
    """
    if plot is None:
        return answer
    if plot == TERMINAL:
        return replace(answer, text="\n".join((answer.text, "", *chart_lines(chart))))
    write_plot(plot, chart_svg(chart))
    return answer


def chart_lines(chart: Chart) -> Iterator[str]:
    """The chart as text."""
    names = max((len(bar.name) for bar in chart.bars), default=0)
    yield chart.title
    for bar in chart.bars:
        cells = [FILLED] * _cell(bar.value or 0.0, chart.most)
        if bar.limit is not None:
            at = max(0, _cell(bar.limit, chart.most) - 1)
            cells += " " * (at + 1 - len(cells))
            cells[at] = LIMIT
        yield f"{bar.name.rjust(names)} |{''.join(cells).ljust(WIDTH)} {chart.label(bar)}".rstrip()
    step = WIDTH // TICKS
    yield " " * names + " +" + ("-" * (step - 1) + "+") * TICKS
    figures = "".join(_figure(chart.most * n / TICKS).rjust(step) for n in range(1, TICKS + 1))
    yield " " * names + " 0" + figures + f"  {chart.axis}"
    if chart.limit:
        yield f"{' ' * names}  {FILLED} is so much, {LIMIT} is {chart.limit}"


def _cell(value: float, most: float) -> int:
    return round(WIDTH // TICKS * TICKS * value / most)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def chart_svg(chart: Chart) -> str:
    """The chart as SVG."""
    height = 110 + ROW * len(chart.bars)
    bottom = height - 50

    def x(value: float) -> float:
        return LEFT + AXIS * value / chart.most

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + AXIS + 190}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="20" y="26" font-size="14">{escape(chart.title)}</text>',
    ]
    for n in range(TICKS + 1):
        at = chart.most * n / TICKS
        parts.append(
            f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="44" y2="{bottom}" stroke="#ddd"/>'
            f'<text x="{x(at):.1f}" y="{bottom + 14}" text-anchor="middle">{_figure(at)}</text>'
        )
    for number, bar in enumerate(chart.bars):
        top = 48 + ROW * number
        parts.append(
            f'<text x="{LEFT - 8}" y="{top + 12}" text-anchor="end">{escape(bar.name)}</text>'
            f'<rect x="{LEFT}" y="{top}" width="{x(bar.value or 0.0) - LEFT:.1f}" '
            f'height="{ROW - 6}" fill="#1f5fa8"/>'
            f'<text x="{x(max(bar.value or 0.0, bar.limit or 0.0)) + 6:.1f}" y="{top + 12}">'
            f"{escape(chart.label(bar))}</text>"
        )
        if bar.limit is not None:
            parts.append(
                f'<line x1="{x(bar.limit):.1f}" x2="{x(bar.limit):.1f}" y1="{top - 2}" '
                f'y2="{top + ROW - 4}" stroke="#c0562b" stroke-width="2"/>'
            )
    said = f"{chart.axis}; the line is {chart.limit}" if chart.limit else chart.axis
    middle = LEFT + AXIS // 2
    parts.append(f'<text x="{middle}" y="{bottom + 34}" text-anchor="middle">{escape(said)}</text>')
    return "\n".join((*parts, "</svg>", ""))
