"""Lines rows of text up as columns."""

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], aligned: str) -> list[str]:
    """Lines of columns, each as wide as its widest cell. aligned: "<" or ">" for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{side}{width}" for side, width in zip(aligned, widths, strict=True)]
    return [
        "  ".join(map(format, row, forms)).rstrip()  # the last column ends where its text does
        for row in rows
    ]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns below a head: the first to the left, numbers to the right."""
    return columns([head, *rows], "<".ljust(len(head), ">"))
