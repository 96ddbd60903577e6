"""Lines rows of text up as columns, and writes them as tables of HTML."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape


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


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The same as a table of HTML, its texts escaped."""

    def line(cells: Sequence[str], tag: str) -> str:
        sides = ("left", *("right",) * (len(cells) - 1))
        texts = zip(sides, cells, strict=True)
        made = (f'<{tag} style="text-align: {side}">{escape(c)}</{tag}>' for side, c in texts)
        return f"<tr>{''.join(made)}</tr>"

    yield f"<table><thead>{line(head, 'th')}</thead><tbody>"
    yield from (line(row, "td") for row in rows)
    yield "</tbody></table>"


def html_list(lines: Iterable[str]) -> Iterator[str]:
    """Lines as a list of HTML, their texts escaped; nothing, if there are none."""
    items = [f"<li>{escape(line.strip())}</li>" for line in lines]
    if items:
        yield f"<ul>{''.join(items)}</ul>"
