"""Writes a loss over a vocabulary tile by tile: no value has one number per token and class.

What is computed of a tile stands in `formulas.py`, as torch functions, and for kernels in
`fused.py`; here each is written into the graph for every slice of tokens and tile of classes.

The gradient of the weight is sent home tile by tile if the parameter is tiered, or put together:

    %s0 = zinf.reduce_tile(%dw[0:a], %w, 0)
    %s1 = zinf.reduce_tile(%dw[a:b], %w, a * H)

The tiles of one loss are one contribution. If the weight has other uses (an embedding that is tied
to the head), those are another contribution, and the sum is formed at home.

Rows are numbered as the targets are: where the model takes some of the tokens' logits only, the
rows of those tokens are taken instead, before the product.

The parts: how a loss is cut, tiles and slices, where the gradient of the weight goes, backward, and
forward with `rewrite_loss`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any, Protocol

import torch
from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import CASTS, RESHAPES, TRANSPOSES, output_of, phase_of
from zcompile.ir.rewrite import GraphBuilder
from zcompile.ir.torch_compat import gradient_of, handle_input
from zcompile.ir.types import NodeName, ParamSpec
from zcompile.passes.tile_loss import formulas, fused
from zcompile.passes.tile_loss.formulas import IGNORED, Seen, Slice
from zcompile.passes.tile_loss.match import PICKS, UNPICKS, Gradients, Loss, picks

ALIGNED = 64
"""Tiles are multiples of so many classes where they can be: whole vectors of every kernel, and rows
that begin on disk where direct I/O may begin."""
NARROWEST = 256
"""Fewest classes of a tile where tokens can be cut instead: below, its products run far under the
peak of a device. (4096 tokens of width 512 times 256 rows take 5 % longer per row than times 4096
rows, on two cores of a Xeon; times 32 rows, twice as long.)"""


@dataclass(frozen=True)
class Cut:
    """How logits are cut.

    classes  rows of the weight per tile; the last tile may have fewer
    tokens   rows of the input per slice; the last slice may have fewer
    """

    classes: int
    tokens: int


def choose_cut(
    whole_nbytes: int,
    tokens: int,
    classes: int,
    logit_nbytes: int,
    row_nbytes: int,
    tile_bytes: int,
) -> Cut | None:
    """The cut of logits; None if they fit `tile_bytes` whole.

    A piece of logits fits `tile_bytes`, and so do two tiles of the weight: one in use, the next (or
    its gradient) beside it.

    whole_nbytes  of the logits as the model makes them, perhaps of more tokens than have targets
    logit_nbytes  working memory per logit of a piece, of all values that exist at once
    row_nbytes    of one row of the weight
    """
    if whole_nbytes <= tile_bytes:
        return None
    most = max(1, min(classes, tile_bytes // (2 * row_nbytes) if row_nbytes else classes))
    wide = tile_bytes // (max(tokens, 1) * logit_nbytes)
    per_tile = even(classes, max(min(most, wide), min(most, NARROWEST)))
    return Cut(per_tile, even(tokens, max(1, tile_bytes // (per_tile * logit_nbytes))))


def even(whole: int, most: int) -> int:
    """The size of equal pieces, none larger than `most`; only the last may be smaller."""
    if most >= whole:
        return whole
    unit = ALIGNED if most >= ALIGNED else 1
    most -= most % unit
    pieces = -(-whole // most)
    size = -(-whole // pieces)
    return min(most, -(-size // unit) * unit)


aten = torch.ops.aten


@dataclass(frozen=True)
class Tiles:
    """A loss and how it is cut.

    dtype  in which exponentials are summed, and gradients over tiles
    fused  kernels compute what follows the products of a tile (`fused.py`), else torch's ops do
           (`formulas.py`)
    """

    loss: Loss
    cut: Cut
    dtype: torch.dtype
    fused: bool = False

    @property
    def formulas(self) -> ModuleType:
        """What computes `see_tile` and `tile_gradient`."""
        return fused if self.fused else formulas

    @property
    def classes(self) -> list[tuple[int, int]]:
        """(first class, one past the last) of each tile."""
        return _bounds(self.loss.classes, self.cut.classes)

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """(first token, one past the last) of each slice; one slice if sizes are dynamic."""
        count = self.loss.likelihood.args[0].meta["val"].shape[0]  # type: ignore[union-attr]
        if not isinstance(count, int):
            return [(0, torch.iinfo(torch.int64).max)]
        return _bounds(count, self.cut.tokens)

    def weight(self, build: GraphBuilder, a: int, b: int) -> fx.Node:
        """Rows [b - a, width] of the weight."""
        return build.rows(self.loss.weight, a, b)

    def bias(self, build: GraphBuilder, a: int, b: int) -> fx.Node | None:
        """Elements [b - a] of the bias."""
        return None if self.loss.bias is None else build.rows(self.loss.bias, a, b)


def gather_of(weight: fx.Node) -> fx.Node | None:
    """The gather of all of a row-major parameter, itself or under a cast; else None."""
    node: object = weight
    if weight.target in CASTS:
        node = weight.args[0]
    if not isinstance(node, fx.Node) or node.target is not ops.gather:
        return None
    return node if node.meta["val"].is_contiguous() else None


def _bounds(count: int, step: int) -> list[tuple[int, int]]:
    return [(a, min(a + step, count)) for a in range(0, count, step)] or [(0, count)]


def rows_of_targets(build: GraphBuilder, loss: Loss) -> fx.Node:
    """The product's left factor with one row per target: [tokens, width]."""
    if not picks(loss.chain):
        return loss.rows
    rows = repeat_chain(build, loss.chain, build.contiguous(loss.rows), loss.width)
    if rows.meta["val"].dim() != 2:
        rows = build(aten.view.default, build.contiguous(rows), [-1, loss.width])
    return rows


def repeat_chain(
    build: GraphBuilder, chain: Sequence[fx.Node], source: fx.Node, width: int
) -> fx.Node:
    """`source` after the ops of `chain`, which were written for rows of another width."""
    for node in chain:
        source = _repeat(build, node, source, width)
    return source


def _repeat(build: GraphBuilder, node: fx.Node, source: fx.Node, width: int) -> fx.Node:
    """`source` after one op of a chain."""
    if node.target in CASTS:
        return source
    if node.target is aten.clone.default:
        return build.contiguous(source)
    _, *rest = node.args
    if node.target in RESHAPES | UNPICKS:
        rest[0] = [*rest[0][:-1], width]  # type: ignore[index,misc]  # sizes
    if node.target in RESHAPES:
        return build(aten.view.default, build.contiguous(source), *rest)
    assert node.target in PICKS | UNPICKS, node
    return build(node.target, source, *rest)


class GradientSink(Protocol):
    """Takes the tiles of a gradient in order."""

    def add(self, tile: fx.Node) -> None:
        """Take the next tile: [classes, width]."""

    def finish(self) -> None:
        """Put the result in the place of the old gradient."""


@dataclass(frozen=True)
class DirectStore:
    """The path of a tiered weight's gradient out of the graph.

    handle    of the parameter
    position  of the gradient among the graph's results
    last      the gradient as it is added to others, or returned: in its final dtype
    total     the sum with contributions of other uses of the weight; None: there are none
    """

    handle: fx.Node
    position: int
    last: fx.Node
    total: fx.Node | None


def direct_store(
    graph: fx.Graph, params: Mapping[NodeName, ParamSpec], loss: Loss
) -> DirectStore | None:
    """How tiles of the weight's gradient can be sent home.

    None: the weight is no tiered leaf as a whole, or more is done with its gradient.
    """
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
    return DirectStore(handle, places[0], last, total)


def _last_of_its_own(gradient: fx.Node) -> fx.Node:
    """The gradient behind casts, and pairs of transpositions, that only it goes through."""
    node = last = gradient
    transposed = False
    while (user := _only_user(node)) is not None and user.target in TRANSPOSES | CASTS:
        node, transposed = user, transposed ^ (user.target in TRANSPOSES)
        last = last if transposed else node
    return last


def _results(output: fx.Node) -> list[Any]:
    (results,) = output.args
    return list(results) if isinstance(results, list | tuple) else [results]


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_sum(node: fx.Node) -> bool:
    """Whether `node` adds two values of its own shape."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    values = [a.meta["val"] for a in node.args if isinstance(a, fx.Node)]
    return len(set(node.args)) == 2 and all(v.shape == node.meta["val"].shape for v in values)


class SendTiles:
    """Sends tiles one by one; the last takes the gradient's place among the results."""

    def __init__(self, build: GraphBuilder, direct: DirectStore) -> None:
        self._build, self._way = build, direct
        self._offset = 0
        self._sent: fx.Node | None = None

    def add(self, tile: fx.Node) -> None:
        """Send the next tile."""
        tile = self._build.cast(tile, self._way.last.meta["val"].dtype)
        self._sent = self._build(ops.reduce_tile, tile, self._way.handle, self._offset)
        self._offset += tile.meta["val"].numel()

    def finish(self) -> None:
        """Let contributions of other uses of the weight, if there are any, be sent by
        themselves."""
        direct, output = self._way, output_of(self._build.graph)
        if direct.total is not None:
            (rest,) = [a for a in direct.total.args if a is not direct.last]
            assert isinstance(rest, fx.Node), "a term of a sum of gradients"
            direct.total.replace_all_uses_with(rest)
            return
        results = _results(output)
        results[direct.position] = self._sent
        output.args = (tuple(results),)


class JoinTiles:
    """Puts tiles together in the place of the old gradient.

    Every write reads what the one before returns, so that no pass can take one from the other.
    """

    def __init__(self, build: GraphBuilder, old: fx.Node, tiles: Tiles) -> None:
        self._build, self._old = build, old
        self._alone = len(tiles.classes) == 1
        if self._alone:
            return
        val, (_, first) = old.meta["val"], tiles.classes[0]
        self._made = build(
            aten.new_empty.default, tiles.loss.rows, list(val.shape), dtype=val.dtype
        )
        self._at = build.splice(formulas.numbers, tiles.loss.rows, first)

    def add(self, tile: fx.Node) -> None:
        """Write the next tile."""
        if self._alone:
            self._made = tile
        else:
            self._made, self._at = self._build.splice(formulas.put_rows, self._made, self._at, tile)

    def finish(self) -> None:
        self._old.replace_all_uses_with(self._made)


@dataclass(frozen=True)
class Facts:
    """Values that forward leaves for backward: rows [tokens, width], the others per token.

    column    the targets [tokens, 1]
    log_norm  log of the sum of exponentials of a token's logits [tokens, 1]
    log_prob  of the targets [tokens, 1], in the dtype in which the likelihood reads it
    targets   [tokens]: 0 where valid, `IGNORED` where ignored
    """

    rows: fx.Node
    column: fx.Node
    log_norm: fx.Node
    log_prob: fx.Node
    targets: fx.Node


def write_backward(
    build: GraphBuilder,
    tiles: Tiles,
    gradients: Gradients,
    facts: Facts,
    direct: DirectStore | None,
) -> None:
    """Write the gradients of rows, weight and bias in the places of the old ones.

    direct  path of tiles of the weight's gradient; None: they are put together
    """
    dtype, slices = tiles.dtype, _slices(build, tiles, gradients, facts)
    of_rows: list[fx.Node | None] = [None] * len(slices)
    of_bias = []
    of_weight: GradientSink | None = SendTiles(build, direct) if direct is not None else None
    if of_weight is None and gradients.weight is not None:
        of_weight = JoinTiles(build, gradients.weight, tiles)
    for a, b in tiles.classes:
        weight, bias = tiles.weight(build, a, b), tiles.bias(build, a, b)
        tile = []
        for n, piece in enumerate(slices):
            made, target = build.splice(tiles.formulas.tile_gradient, piece, weight, bias, dtype)
            slices[n] = piece._replace(target=target)
            tile.append(made)
        if gradients.rows is not None:
            of_rows = [
                build.splice(formulas.add_product, so_far, made, weight, dtype)
                for so_far, made in zip(of_rows, tile, strict=True)
            ]
        if of_weight is not None:
            rows = [piece.rows for piece in slices]
            of_weight.add(build.splice(formulas.weight_gradient, tile, rows, dtype))
        if gradients.bias is not None:
            of_bias.append(build.splice(formulas.bias_gradient, tile, dtype))
    if gradients.rows is not None:
        parts = [part for part in of_rows if part is not None]
        _finish_rows(build, gradients, gradients.rows, build.join_rows(parts))
    if of_weight is not None:
        of_weight.finish()
    if gradients.bias is not None:
        gradients.bias.replace_all_uses_with(build(aten.cat.default, of_bias, 1))


def _slices(
    build: GraphBuilder, tiles: Tiles, gradients: Gradients, facts: Facts
) -> list[Slice[fx.Node]]:
    """The slices of the tokens."""
    picked = spread = None
    rounded = gradients.top.args[0].meta["val"].dtype  # type: ignore[union-attr]  # a node
    if (likelihood := gradients.likelihood) is not None:
        start, _, _, _, reduction, _, weights = likelihood.args
        given = (start, facts.log_prob, facts.targets, weights, reduction)
        picked = build.splice(formulas.picked_gradient, *given, rounded, tiles.dtype)
    for more in gradients.spreads:
        more = build.cast(build.cast(more, rounded), tiles.dtype)
        spread = more if spread is None else build(aten.add.Tensor, spread, more)
    if picked is not None and spread is not None and rounded is not tiles.dtype:
        picked = build.splice(formulas.rounded_beside, picked, spread, rounded)
    loses = build.splice(formulas.factor_of_exponentials, picked, spread, tiles.loss.classes)
    whole = Slice[fx.Node](facts.rows, facts.column, facts.log_norm, picked, spread, loses)
    return [
        Slice._make(None if value is None else build.rows(value, a, b) for value in whole)
        for a, b in tiles.tokens
    ]


def _finish_rows(
    build: GraphBuilder, gradients: Gradients, old: fx.Node, gradient: fx.Node
) -> None:
    """Turn gradients of the targets' rows into those of all rows of the product."""
    gradient = build.cast(gradient, old.meta["val"].dtype)
    if picks(gradients.chain):
        width, sizes = old.meta["val"].shape[1], gradients.top.meta["val"].shape
        if len(sizes) != 2:
            gradient = build(aten.view.default, gradient, [*sizes[:-1], width])
        gradient = repeat_chain(build, gradients.chain, gradient, width)
    old.replace_all_uses_with(gradient)


def rewrite_loss(
    graph: fx.Graph, tiles: Tiles, params: Mapping[NodeName, ParamSpec] = MappingProxyType({})
) -> None:
    """Rewrite both halves in place, and erase what is not read any more.

    params  the tiered parameters, to whose gradients tiles are sent
    """
    loss = tiles.loss
    first = min((loss.likelihood, *loss.sums))
    build = GraphBuilder(graph, first, loss.softmax, phase_of(first))
    rows = rows_of_targets(build, loss)
    column = build(aten.unsqueeze.default, loss.likelihood.args[1], 1)
    facts = _forward(build, tiles, rows, column)
    _, _, weight, reduction, _ = loss.likelihood.args
    loss.likelihood.args = (facts.log_prob, facts.targets, weight, reduction, IGNORED)
    if (gradients := loss.gradients) is not None:
        build = GraphBuilder(graph, gradients.top, gradients.top, phase_of(gradients.top))
        write_backward(build, tiles, gradients, facts, direct_store(graph, params, loss))
    graph.eliminate_dead_code()


def _forward(build: GraphBuilder, tiles: Tiles, rows: fx.Node, column: fx.Node) -> Facts:
    """Write forward, and return what backward needs of it."""
    loss, dtype, loss_dtype = tiles.loss, tiles.dtype, tiles.loss.softmax.meta["val"].dtype
    seen: list[Seen[fx.Node]] = []
    slices = []
    for a, b in tiles.tokens:
        target = build.rows(column, a, b)
        seen.append(build.splice(formulas.nothing_seen, target, dtype, bool(loss.sums)))
        slices.append(build.rows(rows, a, b))
    for a, b in tiles.classes:
        weight, bias = tiles.weight(build, a, b), tiles.bias(build, a, b)
        seen = [
            build.splice(tiles.formulas.see_tile, so_far, piece, weight, bias, dtype)
            for so_far, piece in zip(seen, slices, strict=True)
        ]
    log_norm = build.join_rows([build.splice(formulas.log_norm_of, part) for part in seen])
    picked = build.join_rows([part.picked for part in seen])
    log_prob = build.splice(formulas.log_prob_of, picked, log_norm, loss_dtype)
    log_prob = build.cast(log_prob, loss.likelihood.args[0].meta["val"].dtype)  # type: ignore[union-attr]  # a node
    for total in loss.sums:
        whole = build.join_rows([part.sum for part in seen if part.sum is not None])
        total.replace_all_uses_with(
            build.splice(
                formulas.summed_log_probs, whole, log_norm, loss.classes, total.meta["val"].dtype
            )
        )
    _, targets, _, _, ignored = loss.likelihood.args
    targets = build.splice(formulas.one_class, targets, loss.classes, ignored)
    return Facts(rows, column, log_norm, log_prob, targets)
