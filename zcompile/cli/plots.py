"""Pictures of a few numbers: bars of text for a terminal, lines in SVG for a file."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

WIDTH = 50
"""Characters of the longest bar."""
SIZE = (720, 400)
MARGIN = 60
COLORS = ("#1f5fa8", "#c0562b", "#3c8d40")


def bars(rows: Sequence[tuple[str, float | None]], title: str) -> Iterator[str]:
    """A bar per row, from zero; None has none."""
    most = max((value for _, value in rows if value is not None), default=0.0)
    names = max(len(name) for name, _ in rows)
    yield f"{title}, from 0 to {most:.3g}"
    for name, value in rows:
        filled = 0 if value is None or not most else round(WIDTH * value / most)
        yield f"{name.rjust(names)} |{'#' * filled}" + ("  (cannot run)" if value is None else "")


def svg(title: str, names: Sequence[str], lines: Mapping[str, Sequence[float | None]]) -> str:
    """Lines over equally spaced names, from zero up; what is None is left out."""
    width, height = SIZE
    most = max((v for line in lines.values() for v in line if v is not None), default=0.0) or 1.0

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
    for part in range(5):
        value = most * part / 4
        parts.append(f'<line x1="{MARGIN}" x2="{width - MARGIN}" y1="{y(value):.1f}" '
                     f'y2="{y(value):.1f}" stroke="#ddd"/>')  # fmt: skip
        parts.append(f'<text x="{MARGIN - 6}" y="{y(value) + 4:.1f}" text-anchor="end">'
                     f"{value:.3g}</text>")  # fmt: skip
    for index, name in enumerate(names):
        parts.append(f'<text x="{x(index):.1f}" y="{height - MARGIN + 18}" text-anchor="middle">'
                     f"{escape(name)}</text>")  # fmt: skip
    for number, (label, line) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        points = [(x(i), y(v)) for i, v in enumerate(line) if v is not None]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{color}"/>' for a, b in points]
        parts.append(f'<text x="{width - MARGIN}" y="{24 + 16 * number}" text-anchor="end" '
                     f'fill="{color}">{escape(label)}</text>')  # fmt: skip
    return "\n".join((*parts, "</svg>", ""))
