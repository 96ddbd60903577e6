"""Sends the gradient of a weight in tiles, each as soon as it is made.

A weight that is used several times gets as many contributions, and their sum is its gradient. Each
contribution is sent by itself, and the sum is formed at home, in the order in which autograd would
form it; so no tile waits for another use. Where that order would be another one, tiles are summed
in the graph.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import KEEP_DIMS, phase_of, root_of
from zcompile.ir.rewrite import GraphBuilder, came_from, is_op, shape
from zcompile.ir.types import Phase

aten = torch.ops.aten
Known = Mapping[fx.Node, Sequence[fx.Node]]
"""Value that is left in tiles -> its tiles."""
SCATTERS = (aten.select_backward.default, aten.slice_backward.default)
"""Gradients that are zeros but for a few rows."""


@dataclass(frozen=True)
class Tiles:
    """The tiles of a gradient: rows of the parameter behind `handle`, `sizes[i]` in tile i."""

    handle: fx.Node
    sizes: tuple[int, ...]
    name: str


def send_in_tiles(
    graph: fx.Graph, grad: fx.Node, tiles: Tiles, known: Known
) -> tuple[fx.Node, bool]:
    """Send `grad` [rows, ..] in tiles.

    Returns the last node that sends a tile, and whether any tile was cut out of a whole.
    """
    last, whole = grad, False
    for parts in contributions(grad, known):
        made = [_Contribution(graph, part, tiles, known) for part in parts]
        whole |= any(part.is_whole for part in made)
        begin, row = 0, _row(grad)
        for n, rows in enumerate(tiles.sizes):
            last = _send(made, tiles, n, begin * row)
            begin += rows
    return last, whole


def _row(grad: fx.Node) -> int:
    """Elements of a row of `grad`."""
    row = 1
    for n in shape(grad)[1:]:
        row *= int(n)
    return row


def _send(made: Sequence["_Contribution"], tiles: Tiles, n: int, offset: int) -> fx.Node:
    """Send tile `n` of the sum of `made`; offset in elements."""
    found = [(part.build, tile) for part in made if (tile := part.tile(n)) is not None]
    if not found:
        build = made[-1].build
        size = [tiles.sizes[n], *shape(made[-1].node)[1:]]
        return _reduce_tile(
            build, build.zeros(made[-1].leaf.all_input_nodes[0], size), tiles, offset
        )
    _, total = found[0]
    build = found[-1][0]
    for _, tile in found[1:]:
        total = build(aten.add.Tensor, total, tile)
    return _reduce_tile(build, total, tiles, offset)


def _reduce_tile(build: GraphBuilder, tile: fx.Node, tiles: Tiles, offset: int) -> fx.Node:
    """Send a tile, made contiguous, and copied if it is memory of the caller."""
    if not tile.meta["val"].is_contiguous() or root_of(tile).op == "placeholder":
        tile = build(aten.clone.default, tile, memory_format=torch.contiguous_format)
    return build(ops.reduce_tile, tile, tiles.handle, offset, name=f"{tiles.name}_tile_grad")


def contributions(grad: fx.Node, known: Known) -> list[list[fx.Node]]:
    """The terms of `grad`, in groups: each group is sent as one contribution."""
    parts = list(_summed(grad))
    scatters = [p for p in parts if is_op(_before_views(p, 0, known)[0], *SCATTERS)]
    leaving = [[p] for p in parts if p not in scatters] + ([scatters] if scatters else [])
    # a + b is b + a, and (a + b) + c is summed from the left.
    made = [max(part) for part in leaving]
    in_order = made[1:] == sorted(made[1:]) and all(made[0] < later for later in made[2:])
    backward = all(phase_of(part) is Phase.BACKWARD for part in parts)
    mixed = len(scatters) > 1 and len(leaving) > 1
    return leaving if in_order and backward and not mixed else [parts]


def _summed(grad: fx.Node) -> Iterator[fx.Node]:
    """The terms of a sum, as autograd adds them: the sum so far, and one more."""
    more = []
    node = grad
    while is_op(node, aten.add.Tensor) and not node.kwargs and len(node.args) == 2:
        left, right = node.args
        if not (isinstance(left, fx.Node) and isinstance(right, fx.Node)):
            break
        if len(node.users) > 1 or shape(left) != shape(node) or shape(right) != shape(node):
            break
        more.append(right)
        node = left
    yield node
    yield from reversed(more)


def _before_views(
    node: fx.Node, dim: int, known: Known
) -> tuple[fx.Node, int, list[tuple[fx.Node, int]]]:
    """The source of a chain of views and casts, the dimension of it that `dim` is, and the views
    with their dimensions, outermost first."""
    chain = []
    while node not in known and node.op == "call_function" and node.target in KEEP_DIMS:
        before = came_from(node, dim)
        if before is None:
            break
        chain.append((node, dim))
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node, dim = source, before
    return node, dim, chain


class _Contribution:
    """One term of a gradient, tile by tile."""

    def __init__(self, graph: fx.Graph, node: fx.Node, tiles: Tiles, known: Known) -> None:
        self.node = node
        self.leaf, self._dim, self._chain = _before_views(node, 0, known)
        self._sizes = tiles.sizes
        self._known = known.get(self.leaf)
        makers: dict[Any, Callable[[], Callable[[int], fx.Node | None] | None]] = {
            aten.mm.default: self._matmul,
            aten.bmm.default: self._matmul,
            aten.embedding_dense_backward.default: self._embedding,
            aten.select_backward.default: self._select,
            aten.slice_backward.default: self._slice,
        }
        phase = phase_of(node)
        self.build = GraphBuilder(graph, self.leaf, self.leaf, phase)
        make = makers.get(self.leaf.target)
        self._make = make() if make is not None and self._known is None else None
        self.is_whole = self._make is None and self._known is None
        if self.is_whole:
            after = self.leaf if self.leaf.op == "call_function" else node
            self.build.write_before(after.next if after is self.leaf else after)
            parts = self.build.split(self.leaf, self._sizes, self._dim)
            self._make = parts.__getitem__

    def tile(self, n: int) -> fx.Node | None:
        """Tile `n`: [sizes[n], ..]; None: nothing but zeros."""
        if self._known is not None:
            made: fx.Node | None = self._known[n]
            assert made is not None
            self.build.write_before(made.next)
        else:
            assert self._make is not None
            made = self._make(n)
        for view, dim in reversed(self._chain if made is not None else []):
            assert made is not None
            made = self.build.repeat_view(view, made, dim, self._sizes[n])
        return made

    def _matmul(self) -> Callable[[int], fx.Node]:
        """mm [n, m], bmm [b, n, m]: operands that have the tiled dimension are split."""
        left, right = self.leaf.args[:2]
        assert isinstance(left, fx.Node)
        assert isinstance(right, fx.Node)
        last = len(shape(self.leaf)) - 1
        whole = [left] * len(self._sizes), [right] * len(self._sizes)
        lefts = whole[0] if self._dim == last else self.build.split(left, self._sizes, self._dim)
        rights = whole[1]
        if self._dim == last or (last == 2 and self._dim == 0):
            rights = self.build.split(right, self._sizes, self._dim)
        target = self.leaf.target
        return lambda n: self.build(target, lefts[n], rights[n])

    def _embedding(self) -> Callable[[int], fx.Node] | None:
        """Ids outside of a tile are counted to an extra row, which is left out."""
        grad, ids, rows, padding, by_count = self.leaf.args
        if self._dim != 0 or by_count or not isinstance(ids, fx.Node):
            return None
        build = self.build
        if isinstance(padding, int) and 0 <= padding < int(rows):  # type: ignore[arg-type]  # schema
            ids = build(aten.masked_fill.Scalar, ids, build(aten.eq.Scalar, ids, padding), -1)
        here = [ids]

        def make(n: int) -> fx.Node:
            size, local = self._sizes[n], here[0]
            inside = build(
                aten.logical_and.default,
                build(aten.ge.Scalar, local, 0),
                build(aten.lt.Scalar, local, size),
            )
            outside = build(aten.logical_not.default, inside)
            row = build(aten.masked_fill.Scalar, local, outside, size)
            made = build(self.leaf.target, grad, row, size + 1, size, False)
            if n + 1 < len(self._sizes):
                here[0] = build(aten.sub.Tensor, local, size)
            return build(aten.slice.Tensor, made, 0, 0, size)

        return make

    def _begin(self, n: int) -> int:
        """First row of tile `n`."""
        return sum(self._sizes[:n])

    def _select(self) -> Callable[[int], fx.Node | None] | None:
        """Zeros but for row `index`: only one tile is not zero."""
        grad, sizes, dim, index = self.leaf.args
        if dim != self._dim:
            return None
        count = sum(self._sizes)
        at = int(index) % count  # type: ignore[arg-type]  # op schema

        def make(n: int) -> fx.Node | None:
            row, rows = at - self._begin(n), self._sizes[n]
            if not 0 <= row < rows:
                return None
            if rows == 1:
                return self.build(aten.unsqueeze.default, grad, dim)
            return self.build(self.leaf.target, grad, _with(sizes, dim, rows), dim, row)

        return make

    def _slice(self) -> Callable[[int], fx.Node | None] | None:
        """Zeros but for rows [start, end): a tile has those that it shares."""
        grad, sizes, dim, start, end, step = self.leaf.args
        if dim != self._dim or step != 1:
            return None
        count = sum(self._sizes)
        low, high, _ = slice(start, end).indices(count)

        def make(n: int) -> fx.Node | None:
            begin, rows = self._begin(n), self._sizes[n]
            first, last = max(low, begin), min(high, begin + rows)
            if first >= last:
                return None
            part = self.build(aten.slice.Tensor, grad, dim, first - low, last - low)
            if last - first == rows:
                return part
            size = _with(sizes, dim, rows)
            return self.build(self.leaf.target, part, size, dim, first - begin, last - begin, 1)

        return make


def _with(sizes: Any, dim: Any, rows: int) -> list[Any]:
    """`sizes` with `rows` at dimension `dim`."""
    return [rows if d == dim else n for d, n in enumerate(sizes)]
