"""Writes a loss over a vocabulary tile by tile: no value has one number per token and class.

Forward keeps three numbers per token: the greatest logit so far (m), the sum of exponentials
relative to it (s), and the logit of the target once its tile has come:

    l = x @ W[a:b].T;  n = max(m, max l);  s = s * exp(m - n) + sum exp(l - n);  m = n
    log p(target) = l[target] - (m + log s)

The likelihood itself is the op that was there, over one class: of the targets' log-probabilities
[T, 1], with targets that say 0 where they are valid. So reductions, ignored tokens and errors of
targets out of range stay what they were.

Backward recomputes each tile of logits and turns it into gradients:

    g = spread + onehot * picked - exp(l - log_norm) * total
    dx += g @ W[a:b];  dW[a:b] = g.T @ x;  db[a:b] = sum g

`picked` is the gradient of the target's log-probability, by the likelihood's own backward; `spread`
the gradient that label smoothing gives to all classes; `total` their sum over the classes.

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
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import CASTS, RESHAPES, TRANSPOSES, output_of, phase_of
from zcompile.ir.rewrite import GraphBuilder
from zcompile.ir.torch_compat import gradient_of, handle_input
from zcompile.ir.types import NodeName, ParamSpec
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
    """

    loss: Loss
    cut: Cut
    dtype: torch.dtype

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


def product(build: GraphBuilder, rows: fx.Node, weight: fx.Node, bias: fx.Node | None) -> fx.Node:
    """A tile of logits: [tokens, width] @ [classes, width].T + [classes]."""
    transposed = build(aten.t.default, weight)
    if bias is None:
        return build(aten.mm.default, rows, transposed)
    return build(aten.addmm.default, bias, rows, transposed)


def one_hot(build: GraphBuilder, target: fx.Node, classes: int) -> tuple[fx.Node, fx.Node]:
    """For every token a class of this tile, and whether its target is another one: [tokens, 1]
    each.

    target  less the number of classes in the tiles before, so that equal tiles are equal code
    """
    index = build(aten.clamp.default, target, 0, classes - 1)
    return index, build(aten.ne.Tensor, index, target)


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
        ones = build(aten.new_ones.default, tiles.loss.rows, [first], dtype=torch.int64)
        self._index = build(aten.sub.Tensor, build(aten.cumsum.default, ones, 0), 1)

    def add(self, tile: fx.Node) -> None:
        """Write the next tile."""
        if self._alone:
            self._made = tile
            return
        build, index = self._build, self._build.rows(self._index, 0, tile.meta["val"].shape[0])
        self._made = build(aten.index_copy_.default, self._made, 0, index, tile)
        self._index = build(aten.add.Tensor, self._index, self._index.meta["val"].shape[0])

    def finish(self) -> None:
        self._old.replace_all_uses_with(self._made)


IGNORED = torch.iinfo(torch.int64).min
"""Target of a token that is ignored: no class of any vocabulary."""


@dataclass(frozen=True)
class Facts:
    """Values that forward leaves for backward: rows [tokens, width], the others per token.

    column    the targets [tokens, 1]
    log_norm  log of the sum of exponentials of a token's logits [tokens, 1]
    log_prob  of the targets [tokens, 1], in the dtype that the log-softmax had
    targets   [tokens]: 0 where valid, `IGNORED` where ignored
    """

    rows: fx.Node
    column: fx.Node
    log_norm: fx.Node
    log_prob: fx.Node
    targets: fx.Node


@dataclass
class _BackwardSlice:
    """A slice of the tokens in backward: [tokens, 1] each, but for the rows and their gradient.

    target  less the number of classes in the tiles before
    loses   -`total`: the factor of every exponential
    """

    rows: fx.Node
    target: fx.Node
    log_norm: fx.Node
    picked: fx.Node | None
    spread: fx.Node | None
    loses: fx.Node
    gradient: fx.Node | None = None


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
    slices = _slices(build, tiles, gradients, facts)
    of_weight: GradientSink | None = SendTiles(build, direct) if direct is not None else None
    if of_weight is None and gradients.weight is not None:
        of_weight = JoinTiles(build, gradients.weight, tiles)
    of_bias = []
    for a, b in tiles.classes:
        weight, bias = tiles.weight(build, a, b), tiles.bias(build, a, b)
        tile = [_gradient(build, tiles, piece, weight, bias, b - a) for piece in slices]
        if gradients.rows is not None:
            for piece, gradient in zip(slices, tile, strict=True):
                piece.gradient = _add_product(build, tiles, piece.gradient, gradient, weight)
        if of_weight is not None:
            of_weight.add(_of_weight(build, tiles, tile, slices))
        if gradients.bias is not None:
            of_bias.append(_of_bias(build, tiles, tile))
    if gradients.rows is not None:
        parts = [piece.gradient for piece in slices if piece.gradient is not None]
        _finish_rows(build, gradients, gradients.rows, build.join_rows(parts))
    if of_weight is not None:
        of_weight.finish()
    if gradients.bias is not None:
        gradients.bias.replace_all_uses_with(build(aten.cat.default, of_bias, 1))


def _slices(
    build: GraphBuilder, tiles: Tiles, gradients: Gradients, facts: Facts
) -> list[_BackwardSlice]:
    """The slices of the tokens."""
    picked, spread, loses = _starts(build, tiles, gradients, facts)

    def part(node: fx.Node | None, a: int, b: int) -> fx.Node | None:
        return None if node is None else build.rows(node, a, b)

    return [
        _BackwardSlice(
            build.rows(facts.rows, a, b),
            build.rows(facts.column, a, b),
            build.rows(facts.log_norm, a, b),
            part(picked, a, b),
            part(spread, a, b),
            build.rows(loses, a, b),
        )
        for a, b in tiles.tokens
    ]


def _starts(
    build: GraphBuilder, tiles: Tiles, gradients: Gradients, facts: Facts
) -> tuple[fx.Node | None, fx.Node | None, fx.Node]:
    """`picked`, `spread` and -`total`, [tokens, 1] each."""
    picked = spread = None
    if (likelihood := gradients.likelihood) is not None:
        start, _, _, weight, reduction, _, weights = likelihood.args
        picked = build(
            likelihood.target,
            start,
            facts.log_prob,
            facts.targets,
            weight,
            reduction,
            IGNORED,
            weights,
        )
        picked = build.cast(picked, tiles.dtype)
    for more in gradients.spreads:
        more = build.cast(more, tiles.dtype)
        spread = more if spread is None else build(aten.add.Tensor, spread, more)
    loses = None if picked is None else build(aten.neg.default, picked)
    if spread is not None:
        all_classes = build(aten.mul.Scalar, spread, -tiles.loss.classes)
        loses = all_classes if loses is None else build(aten.add.Tensor, loses, all_classes)
    assert loses is not None, "a gradient begins somewhere"
    return picked, spread, loses


def _gradient(
    build: GraphBuilder,
    tiles: Tiles,
    piece: _BackwardSlice,
    weight: fx.Node,
    bias: fx.Node | None,
    classes: int,
) -> fx.Node:
    """Gradient of one tile of logits [tokens, classes], in the memory of its exponentials."""
    logits = product(build, piece.rows, weight, bias)
    made = build(aten.sub_.Tensor, build.cast(logits, tiles.dtype), piece.log_norm)
    made = build(aten.mul_.Tensor, build(aten.exp_.default, made), piece.loses)
    if piece.spread is not None:
        made = build(aten.add_.Tensor, made, piece.spread)
    if piece.picked is not None:
        index, other = one_hot(build, piece.target, classes)
        added = build(aten.masked_fill.Scalar, piece.picked, other, 0)
        made = build(aten.scatter_add_.default, made, 1, index, added)
        piece.target = build(aten.sub.Tensor, piece.target, classes)
    return build.cast(made, logits.meta["val"].dtype)


def _of_weight(
    build: GraphBuilder, tiles: Tiles, tile: list[fx.Node], slices: list[_BackwardSlice]
) -> fx.Node:
    """Gradient [classes, width] of one tile of the weight."""
    made = None
    for gradient, piece in zip(tile, slices, strict=True):
        made = _add_product(build, tiles, made, build(aten.t.default, gradient), piece.rows)
    assert made is not None, "there are tokens"
    return build.cast(made, tile[0].meta["val"].dtype)


def _of_bias(build: GraphBuilder, tiles: Tiles, tile: list[fx.Node]) -> fx.Node:
    """Gradient [1, classes] of one tile of the bias."""
    first, *others = (build(aten.sum.dim_IntList, gradient, [0], True) for gradient in tile)
    for other in others:
        sums = (build.cast(part, tiles.dtype) for part in (first, other))
        first = build(aten.add.Tensor, *sums)
    return build.cast(first, tile[0].meta["val"].dtype)


def _add_product(
    build: GraphBuilder, tiles: Tiles, so_far: fx.Node | None, left: fx.Node, right: fx.Node
) -> fx.Node:
    """so_far + left @ right; sums of several are kept in the dtype of the tiles."""
    if so_far is None:
        return build(aten.mm.default, left, right)
    if left.meta["val"].dtype is tiles.dtype:
        return build(aten.addmm.default, so_far, left, right)
    more = build.cast(build(aten.mm.default, left, right), tiles.dtype)
    return build(aten.add.Tensor, build.cast(so_far, tiles.dtype), more)


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


@dataclass
class _ForwardSlice:
    """A slice of the tokens in forward, and what is known of them so far: [tokens, 1] each, but for
    the rows.

    target  less the number of classes in the tiles before
    total   sum of exponentials, relative to the greatest
    sum     of the logits, if somebody asks
    """

    rows: fx.Node
    target: fx.Node
    greatest: fx.Node
    total: fx.Node
    picked: fx.Node
    sum: fx.Node | None


def _forward(build: GraphBuilder, tiles: Tiles, rows: fx.Node, column: fx.Node) -> Facts:
    """Write forward, and return what backward needs of it."""
    loss, loss_dtype = tiles.loss, tiles.loss.softmax.meta["val"].dtype
    slices = [_start_slice(build, tiles, rows, column, *bounds) for bounds in tiles.tokens]
    for a, b in tiles.classes:
        weight, bias = tiles.weight(build, a, b), tiles.bias(build, a, b)
        for piece in slices:
            logits = build.cast(product(build, piece.rows, weight, bias), tiles.dtype)
            _forward_tile(build, logits, piece, b - a)
    norms = [build(aten.add.Tensor, s.greatest, build(aten.log.default, s.total)) for s in slices]
    log_norm, picked = build.join_rows(norms), build.join_rows([s.picked for s in slices])
    log_prob = build.cast(build(aten.sub.Tensor, picked, log_norm), loss_dtype)
    for total in loss.sums:
        logits_sum = build.join_rows([s.sum for s in slices if s.sum is not None])
        norm = build(aten.mul.Scalar, log_norm, loss.classes)
        summed = build(aten.squeeze.dim, build(aten.sub.Tensor, logits_sum, norm), 1)
        total.replace_all_uses_with(build.cast(summed, loss_dtype))
    return Facts(rows, column, log_norm, log_prob, _one_class(build, loss))


def _start_slice(
    build: GraphBuilder, tiles: Tiles, rows: fx.Node, column: fx.Node, a: int, b: int
) -> _ForwardSlice:
    # The least finite number, not -inf: over a tile of -inf alone, -inf - -inf would be nan.
    """The slice of tokens [a, b) before the first tile."""
    least, target = torch.finfo(tiles.dtype).min, build.rows(column, a, b)
    zero = build(aten.zeros_like.default, target, dtype=tiles.dtype)
    greatest = build(aten.full_like.default, zero, least)
    wanted = zero if tiles.loss.sums else None
    return _ForwardSlice(build.rows(rows, a, b), target, greatest, zero, zero, wanted)


def _forward_tile(build: GraphBuilder, logits: fx.Node, piece: _ForwardSlice, classes: int) -> None:
    """Update a slice with one tile of logits, which its exponentials overwrite."""
    tile_max = build(aten.amax.default, logits, [1], True)
    greatest = build(aten.maximum.default, piece.greatest, tile_max)
    index, other = one_hot(build, piece.target, classes)
    picked = build(aten.gather.default, logits, 1, index)
    if piece.sum is not None:
        tile_sum = build(aten.sum.dim_IntList, logits, [1], True)
        piece.sum = build(aten.add.Tensor, piece.sum, tile_sum)
    exponentials = build(aten.exp_.default, build(aten.sub_.Tensor, logits, greatest))
    tile_total = build(aten.sum.dim_IntList, exponentials, [1], True)
    shrunk = build(aten.exp.default, build(aten.sub.Tensor, piece.greatest, greatest))
    piece.total = build(aten.addcmul.default, tile_total, piece.total, shrunk)
    piece.picked = build(aten.where.self, other, piece.picked, picked)
    piece.greatest = greatest
    piece.target = build(aten.sub.Tensor, piece.target, classes)


def _one_class(build: GraphBuilder, loss: Loss) -> fx.Node:
    """Targets over one class: 0 if valid, `IGNORED` if ignored; all others stay, and are out of
    range."""
    _, targets, _, _, ignored = loss.likelihood.args
    low = build(aten.ge.Scalar, targets, 0)
    inside = build(aten.logical_and.default, low, build(aten.lt.Scalar, targets, loss.classes))
    valid = build(aten.masked_fill.Scalar, targets, inside, 0)
    return build(aten.masked_fill.Scalar, valid, build(aten.eq.Scalar, targets, ignored), IGNORED)
