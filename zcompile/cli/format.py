"""Defines the answer of a command; reads sizes among its arguments, and draws lines.

An `Answer` has the same facts for a person and for a program, and an exit code. Lines are a memory
curve over the nodes of a graph (`zinf explain`), or a step for several sizes of a tier
(`--sweep`): as text for a terminal, or as SVG for a file. Bars are drawn by `chart.py`.
"""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from zcompile.errors import ConfigInvalid
from zcompile.ir.memory_curve import Memory, MemoryCurve
from zcompile.ir.serialize import encode
from zcompile.ir.units import MiB, parse_size, show_size
from zcompile.machine.model import TIERS, Machine, with_tier


@dataclass(frozen=True)
class Answer:
    """The answer of a command. text: for a person; data: records, or containers of them, for
    `--json`; shown: it was, as it came."""

    text: str
    data: object
    code: int = 0
    shown: bool = False

    def json(self) -> str:
        return encode(self.data)


def read_size(option: str, text: str) -> int:
    """Bytes of a tier, from the text of an option.

    No tier is as small as a few bytes, so a small bare number lacks its unit.

    raises  ConfigInvalid
    """
    try:
        nbytes = parse_size(text)
    except ValueError as error:
        raise ConfigInvalid(option, text, f"cannot be used: {error}") from error
    if nbytes < MiB and text.strip()[-1].isdigit():
        raise ConfigInvalid(
            option,
            text,
            f"has no unit, and so means {nbytes} bytes; write it with one, as {text.strip()}GiB",
        )
    return nbytes


def sized(machine: Machine, args: argparse.Namespace) -> Machine:
    """`machine` with the capacities that `--device`, `--host` and `--disk-bytes` give.

    raises  ConfigInvalid
    """
    for option, tier in (("device", "device"), ("host", "host"), ("disk_bytes", "disk")):
        if text := getattr(args, option, None):
            machine = with_tier(machine, tier, read_size(option.replace("_", "-"), text))
    return machine


SIZE = (720, 400)
MARGIN = 60
COLORS = ("#1f5fa8", "#c0562b", "#3c8d40")


def svg(
    title: str,
    names: Sequence[str],
    lines: Mapping[str, Sequence[float | None]],
    limit: tuple[str, float] | None = None,
) -> str:
    """A picture of lines over equally spaced names, from zero up; None is left out.

    limit  name and height of a line across; one that is far above the others is named, not drawn
    """
    width, height = SIZE
    top = max((v for line in lines.values() for v in line if v is not None), default=0.0) or 1.0
    drawn = limit is not None and limit[1] <= FAR * top
    most = max(top, limit[1]) if limit is not None and drawn else top

    def x(index: int) -> float:
        return MARGIN + index * (width - 2 * MARGIN) / max(1, len(names) - 1)

    def y(value: float) -> float:
        return height - MARGIN - value / most * (height - 2 * MARGIN)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{MARGIN}" y="24" font-size="14">{escape(title)}</text>',
    ]
    # The axis of values.
    for part in range(5):
        value = most * part / 4
        parts.append(
            f'<line x1="{MARGIN}" x2="{width - MARGIN}" y1="{y(value):.1f}" '
            f'y2="{y(value):.1f}" stroke="#ddd"/>'
        )
        parts.append(
            f'<text x="{MARGIN - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>'
        )
    # The axis of names.
    for index, name in enumerate(names):
        parts.append(
            f'<text x="{x(index):.1f}" y="{height - MARGIN + 18}" text-anchor="middle">'
            f"{escape(name)}</text>"
        )
    # Lines, each with its label.
    for number, (label, line) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        points = [(x(i), y(v)) for i, v in enumerate(line) if v is not None]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{color}"/>' for a, b in points]
        parts.append(
            f'<text x="{width - MARGIN}" y="{24 + 16 * number}" text-anchor="end" '
            f'fill="{color}">{escape(label)}</text>'
        )
    # The limit, and the highest point of the first line.
    if limit is not None:
        name, value = limit
        if drawn:
            parts.append(
                f'<line x1="{MARGIN}" x2="{width - MARGIN}" y1="{y(value):.1f}" '
                f'y2="{y(value):.1f}" stroke="#b00020" stroke-dasharray="6 4"/>'
            )
        place = y(value) - 4 if drawn else MARGIN - 8
        parts.append(f'<text x="{MARGIN}" y="{place:.1f}" fill="#b00020">{escape(name)}</text>')
    first = next(iter(lines.values()), ())
    at, peak = max(enumerate(v or 0.0 for v in first), key=lambda p: p[1], default=(0, 0.0))
    parts.append(
        f'<text x="{x(at):.1f}" y="{y(peak) - 8:.1f}" text-anchor="middle">most {peak:.3g}</text>'
    )
    return "\n".join((*parts, "</svg>", ""))


FAR = 4
"""A limit so many times as high as a curve is named beside it; drawn, it would flatten that."""
CURVE_WIDTH, CURVE_HEIGHT = 68, 9
LABELLED = (CURVE_HEIGHT, (CURVE_HEIGHT + 1) // 2, 1)
"""Rows, counted from the lowest, whose bytes are written beside them."""
CHOSEN, SAVED, ADDED = "#", ".", "+"
LEGEND = {CHOSEN: "held", SAVED: "were everything kept", ADDED: "more than if it were"}
MOST_HOLDERS = 4


def curve_lines(memory: Memory, budget: int | None = None) -> Iterator[str]:
    """The peaks, the largest values there, and both curves in one picture.

    budget  bytes of the device, drawn as a line across; with it axes are named, the peak is marked
    """
    before, after = memory.before, memory.after
    if before == after:
        yield f"  everything is kept: at most {after.describe()}"
    else:
        yield f"  were everything kept: at most {before.describe()}"
        yield f"  as it was chosen:     at most {after.describe()}"
    yield f"  of which {_holders(after)}"
    most = max(before.peak, after.peak)
    if most and budget is None:
        yield from _curve_lines(memory, most)
    elif most and budget is not None:
        yield "  bytes that values of the graph hold of the device, node by node:"
        near = budget <= FAR * most
        yield from _curve_lines(memory, max(most, budget) if near else most, budget)
        size = show_size(budget)
        told = f"= is the {size} of the device" if near else f"the device has {size}, far above"
        yield " " * 12 + told


def _curve_lines(memory: Memory, most: int, budget: int | None = None) -> Iterator[str]:
    after = memory.after
    spans = _spans(len(after.nodes), after.backward)
    chosen = _columns(after.nbytes, spans)
    kept = _columns(memory.before.laid_over(after), spans)
    drawn = ""
    for row in range(CURVE_HEIGHT, 0, -1):
        label = show_size(most * row // CURVE_HEIGHT) if row in LABELLED else ""
        cells = (
            _cell(a, b, most * (row - 1) / CURVE_HEIGHT) for a, b in zip(chosen, kept, strict=True)
        )
        line = "".join(cells).rstrip()
        drawn += line
        if budget is not None and most * (row - 1) < budget * CURVE_HEIGHT <= most * row:
            line = line.ljust(len(spans)).replace(" ", "=")
        yield f"{label:>10} |{line}"
    if budget is not None:
        at = chosen.index(max(chosen))
        yield " " * (12 + at) + f"^ {show_size(after.peak)} at %{after.peak_node}"
    forward = sum(first < after.backward for first, _ in spans)
    late = len(spans) - forward
    yield " " * 11 + "+" + "-" * forward + ("+" + "-" * (late - 1) if late else "")
    names = ("forward".ljust(forward)[:forward], "backward" if late else "")
    yield " " * 12 + "".join(names)
    legend = "   ".join(f"{sign} {said}" for sign, said in LEGEND.items() if sign in drawn)
    yield " " * 12 + legend


def curve_svg(memory: Memory, budget: int | None = None) -> str:
    """Both curves as lines, and the `budget` of the device as another."""
    after = memory.after
    spans = _spans(len(after.nodes), after.backward)
    begins = {0: "forward", after.backward: "backward"}
    rows = {"as chosen": after.nbytes}
    if memory.before != after:
        rows["were everything kept"] = memory.before.laid_over(after)
    return svg(
        "MiB that the values of a graph hold of the device, node by node",
        [begins.get(first, "") for first, _ in spans],
        {name: [n / MiB for n in _columns(nbytes, spans)] for name, nbytes in rows.items()},
        None if budget is None else (f"device: {budget / MiB:,.0f} MiB", budget / MiB),
    )


def _holders(curve: MemoryCurve) -> str:
    rows = list(curve.holders.items())[:MOST_HOLDERS]
    said = [f"{show_size(nbytes)} {name}" for name, nbytes in rows]
    rest = curve.peak - sum(nbytes for _, nbytes in rows)
    return ", ".join([*said, *([f"{show_size(rest)} others"] if rest else [])]) or "nothing"


def _spans(nodes: int, backward: int) -> list[tuple[int, int]]:
    """First node and the one after the last of each column; no column has nodes of two phases."""
    columns = min(CURVE_WIDTH, nodes)
    spans: list[tuple[int, int]] = []
    for begin, end in ((0, backward), (backward, nodes)):
        count = min(end - begin, max(1, round(columns * (end - begin) / max(1, nodes))))
        spans += [
            (begin + (end - begin) * n // count, begin + (end - begin) * (n + 1) // count)
            for n in range(count)
        ]
    return spans


def _columns(nbytes: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[int]:
    return [max(nbytes[first:end]) for first, end in spans]


def _cell(chosen: int, kept: int, floor: float) -> str:
    """The mark of a cell, which is filled if more bytes than its floor are live."""
    if chosen > floor:
        return CHOSEN if kept > floor else ADDED
    return SAVED if kept > floor else " "


MOST_STEPS = 64
STEPS = 8
"""Points of a sweep, if it does not say."""


@dataclass(frozen=True)
class Point:
    """One size of the tier that is swept.

    Seconds are None where the step cannot run at all, and those of the bound where no bound is
    known.
    """

    tier: str
    nbytes: int
    fits: bool
    step_seconds: float | None
    bound_seconds: float | None
    bottleneck: str


def read_sweep(text: str) -> tuple[str, tuple[int, ...]]:
    """The tier and the sizes of "device=8GiB..80GiB:10".

    raises  ConfigInvalid
    """
    tier, equals, span = text.partition("=")
    low, dots, rest = span.partition("..")
    high, _, count = rest.partition(":")
    if not equals or not dots or tier not in TIERS:
        raise ConfigInvalid(
            "sweep",
            text,
            "is not written like device=8GiB..80GiB, device=8GiB.."
            f"80GiB:10; tiers are {', '.join(TIERS)}",
        )
    if count and not (count.isdecimal() and 2 <= int(count) <= MOST_STEPS):
        raise ConfigInvalid("sweep", text, f"asks for {count!r} steps; give 2 to {MOST_STEPS}")
    first, last = read_size("sweep", low), read_size("sweep", high)
    if first >= last:
        raise ConfigInvalid("sweep", text, "begins where it should end; write FROM..TO")
    n = int(count or STEPS)
    return tier, tuple(first + (last - first) * i // (n - 1) for i in range(n))


TERMINAL = Path("-")
"""The file that `--plot` without a name stands for: the answer itself."""


def check_plot(plot: Path | None) -> None:
    """Refuse a picture that cannot be written: planning may take minutes before.

    raises  ConfigInvalid
    """
    if plot is None or plot == TERMINAL:
        return
    if plot.is_dir():
        raise ConfigInvalid("plot", str(plot), "is a directory; name a file in it, as sweep.svg")
    if not plot.parent.is_dir():
        raise ConfigInvalid(
            "plot",
            str(plot),
            f"cannot be written: {plot.parent} is no directory; make it, or name another",
        )
    if plot.suffix != ".svg":
        raise ConfigInvalid(
            "plot",
            str(plot),
            "is no name of a picture, as sweep.svg; without a name it is drawn below the answer, "
            "and --plot stands last",
        )
    if not os.access(plot if plot.exists() else plot.parent, os.W_OK):
        raise ConfigInvalid(
            "plot", str(plot), "cannot be written: it is not ours to write; name another file"
        )


def write_plot(path: Path, text: str) -> None:
    """Write a picture.

    raises  ConfigInvalid, if it cannot be written
    """
    write_file("plot", path, text)


def write_file(option: str, path: Path, text: str) -> None:
    """Write what an option names a file for.

    raises  ConfigInvalid, if it cannot be written
    """
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # a NUL in a name is no error of the system
        why = f"cannot be written: {getattr(error, 'strerror', None) or error}"
        raise ConfigInvalid(option, str(path), why) from error
