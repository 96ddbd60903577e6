"""Gathers, uses and gives back weights in tiles where the device cannot hold them whole."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import erase_unread, output_of, phase_of, positions
from zcompile.ir.plan import GraphPlan, Note, Rounding, layout_of_fetch
from zcompile.ir.rewrite import GraphBuilder, shape
from zcompile.ir.torch_compat import gradient_of, handle_input
from zcompile.ir.types import NodeName, Phase
from zcompile.passes.base import Fact, Pass
from zcompile.passes.tile_matmuls.gradients import Tiles, send_in_tiles
from zcompile.passes.tile_matmuls.sizes import GatheredValue, choose_tiles
from zcompile.passes.tile_matmuls.uses import (
    ADDED_UP,
    Reader,
    Result,
    Weight,
    rounding_of,
    rule_of,
    same_layout,
    weights_of,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class TileMatmuls(Pass):
    """Cut the uses of a weight, and its gradient, along the weight's first dimension.

        %w  = zinf.gather(%h)                    %w0 = zinf.gather(%h, rows 0 to 2)
        %t  = aten.t(%w)                         %y0 = aten.mm(%x, aten.t(%w0))
        %y  = aten.mm(%x, %t)                    %w1 = zinf.gather(%h, rows 2 to 4)
        ...                               ->     %y1 = aten.mm(%x, aten.t(%w1))
        %dw = aten.mm(%dyt, %x)                  %y  = aten.cat([%y0, %y1], 1)
        ...                                      ...
        return (%y, %dw)                         %s0 = zinf.reduce_tile(aten.mm(%dyt0, %x), %h, 0)
                                                 %s1 = zinf.reduce_tile(aten.mm(%dyt1, %x), %h, 2K)

    Tiles are ranges of rows, which are contiguous at home. The result of a use is that of the whole
    weight where the tiled dimension is one of the result's, and so is the gradient of the weight;
    where the use sums over the tiled dimension, the sum rounds otherwise (`uses.py`). Weights that
    fit are left alone.

    Which weights, and how finely, stands in `GraphPlan.cuts`.

    tile_bytes  a weight of more that cannot be cut is noted
    """

    tile_bytes: int | None = None

    name: ClassVar[str] = "tile-matmuls"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.TILES_CHOSEN})
    gives: ClassVar[frozenset[Fact]] = frozenset({Fact.WEIGHTS_TILED})

    def rewrite(self, graph: fx.Graph, plan: GraphPlan) -> GraphPlan:
        cuts = plan.cuts or {}
        weights = {w.handle.name: w for w in weights_of(graph, plan)}
        notes = [
            Note(self.name, NodeName(n), w.whole)
            for n, w in weights.items()
            if w.whole and self._is_too_large(w, plan)
        ]
        roundings = [
            Rounding(self.name, weights[name].name, why)
            for name, most in cuts.items()
            if (why := _rounding(weights[name], most))
        ]
        for name, most in cuts.items():
            notes += [
                Note(self.name, NodeName(name), text)
                for text in _cut(graph, plan, weights[name], most)
            ]
        roundings = [*plan.roundings, *roundings]
        return replace(plan, notes=(*plan.notes, *notes), roundings=tuple(roundings))

    def _is_too_large(self, weight: Weight, plan: GraphPlan) -> bool:
        limits = [n for n in (plan.budget_bytes, self.tile_bytes) if n is not None]
        return any(weight.nbytes > limit for limit in limits)


def gathered_values(graph: fx.Graph, plan: GraphPlan) -> list[GatheredValue]:
    """The weights that are gathered, and where they are read."""
    where, weights = positions(graph), list(weights_of(graph, plan))
    return [
        value
        for number, weight in enumerate(weights)
        for value in weight.gathered_values(where, number, len(weights))
    ]


def _rounding(weight: Weight, most: int) -> str:
    """Why uses of a weight round otherwise once it is cut, for people; "": they do not."""
    found = [
        rounding_of(reader.use)
        for reader in weight.readers
        if reader.row is None and len(_tiles_read(reader, most)) > 1
    ]
    return ADDED_UP if ADDED_UP in found else max(found, default="")


def _tiles_read(reader: Reader, most: int) -> tuple[int, ...]:
    """Rows of each tile that a reader reads."""
    row_nbytes = layout_of_fetch(reader.gather).nbytes // shape(reader.gather)[0]
    return choose_tiles(reader.rows[1], row_nbytes, most)


def _cut(graph: fx.Graph, plan: GraphPlan, weight: Weight, most: int) -> Iterator[str]:
    """Rewrite the uses of a weight, and its gradient; yields sentences on what was not done.

    A single tile is the whole weight, gathered for each use by itself instead of from the first use
    to the last.
    """
    sizes = choose_tiles(weight.rows, weight.nbytes // weight.rows, most)
    known: dict[fx.Node, tuple[fx.Node, ...]] = {}
    unread: list[fx.Node] = []
    for reader in sorted(weight.readers, key=lambda r: r.use.node):
        node = reader.use.node
        unread += [*node.users, node]
        if not _rewritten(graph, reader, most, known):
            yield f"{weight.name!r} is gathered whole for %{node.name}: tiles of it lie otherwise"
    if len(sizes) > 1 and plan.params[NodeName(weight.handle.name)].sink:
        tiles = Tiles(weight.handle, sizes, weight.name.replace(".", "_"))
        yield from _gradient(graph, weight, tiles, known, unread)
    for node, parts in known.items():
        if node.users:
            build = GraphBuilder(graph, min(node.users), node, phase_of(node))
            whole = parts[0] if len(parts) == 1 else build(aten.cat.default, list(parts), 0)
            node.replace_all_uses_with(whole)
    erase_unread(graph, *unread)


def _rewritten(
    graph: fx.Graph,
    reader: Reader,
    most: int,
    known: dict[fx.Node, tuple[fx.Node, ...]],
) -> bool:
    """Replace a use by its tiles; returns whether that was possible.

    known  value that is left in tiles -> its tiles; extended
    """
    node = reader.use.node
    build = GraphBuilder(graph, node, node, phase_of(node))
    first, _ = reader.rows
    # Write the tiles: one row for a select, else what the rule of the use says.
    if reader.row is not None:
        operand = _operand(build, reader, first + reader.row, 1)
        result = Result(build(aten.select.int, operand, reader.use.dim, 0))
    else:
        sizes = _tiles_read(reader, most)
        use = replace(reader.use, sizes=sizes)
        rule = rule_of(use)
        assert rule is not None
        begins = [first + sum(sizes[:n]) for n in range(len(sizes))]
        made = rule(use, build, lambda n: _operand(build, reader, begins[n], sizes[n]))
        if made is None:
            return False
        result = made
    # They replace the node, if they have the layout of its results.
    if not _takes_the_place(node, result):
        build.undo()
        return False
    if result.value is not None:
        node.replace_all_uses_with(result.value)
        return True
    # Several results: each is replaced, or is known by its tiles.
    for item in list(node.users):
        number = item.args[1]
        assert isinstance(number, int)
        if (value := result.items[number]) is not None:
            item.replace_all_uses_with(value)
        for n, parts in result.tiles:
            if n == number:
                known[item] = parts
    return True


def _operand(build: GraphBuilder, reader: Reader, begin: int, rows: int) -> fx.Node:
    """The operand [.., rows, ..] of a reader, from a gather of rows [begin, begin + rows) of the
    weight."""
    node = build.gather_rows(reader.gather, begin, rows)
    for view, dim in reader.chain:
        node = build.repeat_view(view, node, dim, rows)
    return node


def _takes_the_place(node: fx.Node, result: Result) -> bool:
    """Whether `result` has the layout of the node it replaces."""
    if result.value is not None:
        return same_layout([result.value], [node])
    return all(
        same_layout([result.items[item.args[1]]], [item])  # type: ignore[index]  # of getitem
        for item in node.users
    )


def _gradient(
    graph: fx.Graph,
    weight: Weight,
    tiles: Tiles,
    known: Mapping[fx.Node, tuple[fx.Node, ...]],
    unread: list[fx.Node],
) -> Iterator[str]:
    """Send the gradient of a weight in tiles; the last tile is what the graph returns in its
    place."""
    output = output_of(graph)
    results = list(output.args[0]) if isinstance(output.args[0], list | tuple) else []
    for position, desc in enumerate(output.meta.get("desc") or ()):
        grad = results[position]
        if gradient_of(desc) is None or gradient_of(desc) != handle_input(weight.handle):
            continue
        if not isinstance(grad, fx.Node) or grad.target in ops.SINKS:
            continue
        if phase_of(grad) is not Phase.BACKWARD or grad.op == "placeholder":
            yield f"the gradient of {weight.name!r} leaves whole: backward does not compute it"
            continue
        results[position], whole = send_in_tiles(graph, grad, tiles, known)
        output.args = (tuple(results),)
        unread.append(grad)
        if whole:
            yield f"the gradient of {weight.name!r} is made whole before it leaves in tiles"
