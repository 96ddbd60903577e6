"""A memory curve as a picture over the nodes of a graph: columns of text, or lines in SVG."""

from collections.abc import Iterator, Sequence

from zcompile.cli.plots import svg
from zcompile.ir.plan import Curve, Memory
from zcompile.ir.units import MiB, show_size

WIDTH, HEIGHT = 68, 9
LABELLED = (HEIGHT, (HEIGHT + 1) // 2, 1)
"""Rows, from the lowest, whose bytes are told."""
CHOSEN, SAVED, ADDED = "#", ".", "+"
LEGEND = {CHOSEN: "held", SAVED: "were everything kept", ADDED: "more than if it were"}
MOST_HOLDERS = 4


def curve_lines(memory: Memory) -> Iterator[str]:
    """Where the peaks are, who holds most there, and both curves in one picture."""
    before, after = memory.before, memory.after
    if before == after:
        yield f"  everything is kept: at most {after.told()}"
    else:
        yield f"  were everything kept: at most {before.told()}"
        yield f"  as it was chosen:     at most {after.told()}"
    yield f"  of which {_holders(after)}"
    most = max(before.peak, after.peak)
    if most:
        yield from _picture(memory, most)


def _picture(memory: Memory, most: int) -> Iterator[str]:
    after = memory.after
    spans = _spans(len(after.nodes), after.backward)
    chosen = _columns(after.nbytes, spans)
    kept = _columns(memory.before.laid_over(after), spans)
    drawn = ""
    for row in range(HEIGHT, 0, -1):
        label = show_size(most * row // HEIGHT) if row in LABELLED else ""
        cells = (_cell(a, b, most * (row - 1) / HEIGHT) for a, b in zip(chosen, kept, strict=True))
        line = "".join(cells).rstrip()
        drawn += line
        yield f"{label:>10} |{line}"
    forward = sum(first < after.backward for first, _ in spans)
    late = len(spans) - forward
    yield " " * 11 + "+" + "-" * forward + ("+" + "-" * (late - 1) if late else "")
    names = ("forward".ljust(forward)[:forward], "backward" if late else "")
    yield " " * 12 + "".join(names)
    legend = "   ".join(f"{sign} {said}" for sign, said in LEGEND.items() if sign in drawn)
    yield " " * 12 + legend


def curve_svg(memory: Memory) -> str:
    """Both curves as lines."""
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
    )


def _holders(curve: Curve) -> str:
    rows = list(curve.holders.items())[:MOST_HOLDERS]
    said = [f"{show_size(nbytes)} {name}" for name, nbytes in rows]
    rest = curve.peak - sum(nbytes for _, nbytes in rows)
    return ", ".join([*said, *([f"{show_size(rest)} others"] if rest else [])]) or "nothing"


def _spans(nodes: int, backward: int) -> list[tuple[int, int]]:
    """First node and the one after the last of each column; none is of two phases."""
    columns = min(WIDTH, nodes)
    spans: list[tuple[int, int]] = []
    for begin, end in ((0, backward), (backward, nodes)):
        count = min(end - begin, max(1, round(columns * (end - begin) / max(1, nodes))))
        spans += [(begin + (end - begin) * n // count, begin + (end - begin) * (n + 1) // count)
                  for n in range(count)]  # fmt: skip
    return spans


def _columns(nbytes: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[int]:
    return [max(nbytes[first:end]) for first, end in spans]


def _cell(chosen: int, kept: int, floor: float) -> str:
    """A cell is filled if more than its floor is held."""
    if chosen > floor:
        return CHOSEN if kept > floor else ADDED
    return SAVED if kept > floor else " "
