"""Where the gradient of a tiled loss's weight goes: home, tile by tile, or into one tensor.

    %s0 = zinf.reduce_tile(%dw[0:a], %w, 0)        the parameter is tiered: each tile leaves at once
    %s1 = zinf.reduce_tile(%dw[a:b], %w, a * H)

The tiles of one loss are one contribution. If the weight has other uses (an embedding that is tied
to the head), what those give is another one, and the sum is formed at home.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import CASTS, TURNS, output_of
from zcompile.ir.rewrite import Pen
from zcompile.ir.torch_compat import gradient_of, handle_input
from zcompile.ir.types import NodeName, ParamSpec
from zcompile.passes.tile_loss.loss_tiles import Tiles, gather_of
from zcompile.passes.tile_loss.match import Loss

aten = torch.ops.aten


class Taker(Protocol):
    """Takes the tiles of a gradient in order."""

    def take(self, tile: fx.Node) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True)
class Way:
    """How the gradient of a tiered weight leaves the graph.

    handle    of the parameter
    position  of the gradient among the graph's results
    last      the gradient as it is added to others, or returned: in its final dtype
    total     the sum with what other uses of the weight give; None: there are none
    """

    handle: fx.Node
    position: int
    last: fx.Node
    total: fx.Node | None


def way_home(graph: fx.Graph, params: Mapping[NodeName, ParamSpec], loss: Loss) -> Way | None:
    """None: the weight is no tiered leaf as a whole, or more is done with its gradient."""
    gather = gather_of(loss.weight)
    if gather is None or loss.gradients is None or loss.gradients.weight is None:
        return None
    handle, size, _, offset, *_ = gather.args
    assert isinstance(handle, fx.Node)
    spec = params[NodeName(handle.name)]
    if not spec.sink or (tuple(size), offset) != (spec.layout.size, 0):  # type: ignore[arg-type]  # a list, by the op schema
        return None
    last = _last_of_its_own(loss.gradients.weight)
    end, total = last, None
    while (user := _only_user(end)) is not None and _is_sum(user):
        end, total = user, total or user
    output = output_of(graph)
    results = _results(output)
    places = [n for n, result in enumerate(results) if result is end]
    if set(end.users) != {output} or len(places) != 1 or last.meta["val"].shape != spec.layout.size:
        return None
    wanted = gradient_of(output.meta["desc"][places[0]])
    if wanted is None or wanted != handle_input(handle):
        return None
    return Way(handle, places[0], last, total)


def _last_of_its_own(gradient: fx.Node) -> fx.Node:
    """Behind casts, and pairs of transpositions, that only this gradient goes through."""
    node = last = gradient
    turned = False
    while (user := _only_user(node)) is not None and user.target in TURNS | CASTS:
        node, turned = user, turned ^ (user.target in TURNS)
        last = last if turned else node
    return last


def _results(output: fx.Node) -> list[Any]:
    (results,) = output.args
    return list(results) if isinstance(results, list | tuple) else [results]


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_sum(node: fx.Node) -> bool:
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    values = [a.meta["val"] for a in node.args if isinstance(a, fx.Node)]
    return len(set(node.args)) == 2 and all(v.shape == node.meta["val"].shape for v in values)


class Leaving:
    """Tiles go home one by one; the last takes the gradient's place among the results."""

    def __init__(self, pen: Pen, way: Way) -> None:
        self._pen, self._way = pen, way
        self._offset = 0
        self._sent: fx.Node | None = None

    def take(self, tile: fx.Node) -> None:
        """The next tile."""
        tile = self._pen.cast(tile, self._way.last.meta["val"].dtype)
        self._sent = self._pen(ops.reduce_tile, tile, self._way.handle, self._offset)
        self._offset += tile.meta["val"].numel()

    def finish(self) -> None:
        """What other uses of the weight give, if there are any, leaves by itself."""
        way, output = self._way, output_of(self._pen.graph)
        if way.total is not None:
            (rest,) = [a for a in way.total.args if a is not way.last]
            assert isinstance(rest, fx.Node), "a term of a sum of gradients"
            way.total.replace_all_uses_with(rest)
            return
        results = _results(output)
        results[way.position] = self._sent
        output.args = (tuple(results),)


class Whole:
    """Tiles are put together in the place of the old gradient.

    Every write reads what the one before returns, so that no pass can take one from the other.
    """

    def __init__(self, pen: Pen, old: fx.Node, tiles: Tiles) -> None:
        self._pen, self._old = pen, old
        self._alone = len(tiles.classes) == 1
        if self._alone:
            return
        val, (_, first) = old.meta["val"], tiles.classes[0]
        self._made = pen(aten.new_empty.default, tiles.loss.rows, list(val.shape), dtype=val.dtype)
        ones = pen(aten.new_ones.default, tiles.loss.rows, [first], dtype=torch.int64)
        self._index = pen(aten.sub.Tensor, pen(aten.cumsum.default, ones, 0), 1)

    def take(self, tile: fx.Node) -> None:
        """The next tile."""
        if self._alone:
            self._made = tile
            return
        pen, index = self._pen, self._pen.rows(self._index, 0, tile.meta["val"].shape[0])
        self._made = pen(aten.index_copy_.default, self._made, 0, index, tile)
        self._index = pen(aten.add.Tensor, self._index, self._index.meta["val"].shape[0])

    def finish(self) -> None:
        self._old.replace_all_uses_with(self._made)
