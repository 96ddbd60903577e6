"""Finds the weights of a graph and who reads them, and writes each use tile by tile.

    out of the tile's dimension    y = x @ w.T                y = cat(x @ w_i.T)         as it was
    over the tile's dimension      dx = dy @ w                dx = sum(dy_i @ w_i)       rounds anew
    rows by number                 e = w[ids]                 each id in its tile        as it was

The rounding of a sum over tiles is that of adding up partial products in the order of the tiles,
instead of in the order that the library's kernel has. In float16 and bfloat16 each partial product
is rounded to that dtype, and their sum, kept in float32, once more.

The first part has the rules by op (`RULES`), the second the search for readers (`weights_of`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import CASTS, KEEP_DIMS, find, phase_of, use_of
from zcompile.ir.plan import GraphPlan, layout_of_fetch
from zcompile.ir.rewrite import SUM_DTYPE, GraphBuilder, is_op, moved, shape
from zcompile.ir.types import NodeName, ParamSpec, Phase, row_major
from zcompile.passes.tile_matmuls.sizes import GatheredValue

aten = torch.ops.aten
Tile = Callable[[int], fx.Node]
"""Number of a tile -> the operand made of it, written where the builder stands."""


@dataclass(frozen=True)
class Use:
    """A node that reads a weight, or a view of it, as one of its operands.

    at     position of the operand among the node's arguments
    dim    the dimension of the operand that is tiled
    sizes  of the tiles along it
    """

    node: fx.Node
    at: int
    dim: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """What replaces a node.

    value  of a node with one result
    items  of a node with several results, one for each
    tiles  (number of a result, its tiles), of results that are left in tiles
    """

    value: fx.Node | None = None
    items: tuple[fx.Node | None, ...] = ()
    tiles: tuple[tuple[int, tuple[fx.Node, ...]], ...] = ()


Rule = Callable[[Use, GraphBuilder, Tile], Result | None]
"""Writes a use over tiles; None, if that cannot be."""


def rule_of(use: Use) -> Rule | None:
    """How the use is written over tiles; None if it cannot be."""
    found = RULES.get((use.node.target, use.at, use.dim))
    return found if found is not None and _plain(use) else None


def _plain(use: Use) -> bool:
    """Whether the rules know all arguments, and the operand is read once."""
    node, args = use.node, use.node.args
    if node.kwargs or sum(argument is args[use.at] for argument in args) > 1:
        return False
    if is_op(node, aten.convolution.default):
        return args[6:9:2] == (False, 1)
    if is_op(node, aten.convolution_backward.default):
        return args[7:10:2] == (False, 1)
    return not (is_op(node, aten.embedding.default) and any(args[3:]))  # by count, or sparse


def _joined(use: Use, build: GraphBuilder, part: Callable[[int], fx.Node], dim: int) -> Result:
    """The results of all tiles side by side along `dim`."""
    parts = [part(n) for n in range(len(use.sizes))]
    return Result(parts[0] if len(parts) == 1 else build(aten.cat.default, parts, dim))


def _matmul_out(other: int, dim: int) -> Rule:
    """mm, bmm whose result has the tiled dimension: y[.., t] = cat of x @ w_i.

    other  position of the other operand
    dim    the tiled dimension of the result
    """

    def rule(use: Use, build: GraphBuilder, tile: Tile) -> Result:
        held = _node(use.node.args[other])
        batch = len(shape(held)) == 3 and use.dim == 0
        others = build.split(held, use.sizes, 0) if batch else [held] * len(use.sizes)

        def part(n: int) -> fx.Node:
            operand = tile(n)
            pair = (others[n], operand) if other == 0 else (operand, others[n])
            return build(use.node.target, *pair)

        return _joined(use, build, part, dim)

    return rule


def _matmul_over(other: int, other_dim: int) -> Rule:
    """mm, bmm that sum over the tiled dimension: y = sum of x_i @ w_i.

    other      position of the other operand
    other_dim  its dimension that is summed over
    """

    def rule(use: Use, build: GraphBuilder, tile: Tile) -> Result:
        others = build.split(_node(use.node.args[other]), use.sizes, other_dim)
        pairs = (
            (others[n], tile(n)) if other == 0 else (tile(n), others[n])
            for n in range(len(use.sizes))
        )
        return Result(_total(use.node, build, pairs))

    return rule


def _total(node: fx.Node, build: GraphBuilder, pairs: Any, first: fx.Node | None = None) -> fx.Node:
    """The sum of the products of `pairs`, and of `first`."""
    batch = is_op(node, aten.bmm.default)
    product, fused = (
        (aten.bmm.default, aten.baddbmm.default) if batch else (aten.mm.default, aten.addmm.default)
    )
    dtype = node.meta["val"].dtype
    wide, total = SUM_DTYPE.get(dtype), first
    for pair in pairs:
        if wide is None:
            total = build(product, *pair) if total is None else build(fused, total, *pair)
            continue
        part = build(aten._to_copy.default, build(product, *pair), dtype=wide)
        total = part if total is None else build(aten.add.Tensor, total, part)
    assert total is not None
    return total if wide is None else build(aten._to_copy.default, total, dtype=dtype)


def _addmm_out(use: Use, build: GraphBuilder, tile: Tile) -> Result:
    """y [n, m] = bias [m] + x [n, k] @ w [k, m], over columns of w."""
    bias, x = _node(use.node.args[0]), _node(use.node.args[1])
    along = len(shape(bias)) - 1
    wide = shape(bias)[along] != 1
    biases = [bias] * len(use.sizes)
    if wide:
        biases = build.split(bias, use.sizes, along, copied=True)
    return _joined(use, build, lambda n: build(use.node.target, biases[n], x, tile(n)), 1)


def _addmm_over(use: Use, build: GraphBuilder, tile: Tile) -> Result:
    """y [n, m] = bias [m] + x [n, k] @ w [k, m], over rows of w."""
    bias = _node(use.node.args[0])
    others = build.split(_node(use.node.args[1]), use.sizes, 1)
    pairs = ((others[n], tile(n)) for n in range(len(use.sizes)))
    return Result(_total(use.node, build, pairs, bias))


def _embedding(use: Use, build: GraphBuilder, tile: Tile) -> Result | None:
    """Look each id up in the tile that has its row: [ids.., width] from tiles [rows, width].

    An id that no row has is asked of the first or the last tile, which refuses it.
    """
    ids = _node(use.node.args[1])
    last, out = len(use.sizes) - 1, None
    for n, rows in enumerate(use.sizes):
        local = ids
        if n:
            local = build(aten.clamp.default, local, 0, None)
        if n < last:
            local = build(aten.clamp.default, local, None, rows - 1)
        found = build(aten.embedding.default, tile(n), local)
        if out is None:
            out = found
        else:
            inside = build(aten.unsqueeze.default, build(aten.ge.Scalar, ids, 0), -1)
            out = build(aten.where.self, inside, found, out)
        if n < last:
            ids = build(aten.sub.Tensor, ids, rows)
    return Result(out)


def _convolution(use: Use, build: GraphBuilder, tile: Tile) -> Result:
    """Over output channels: w [out, in, ..], y [n, out, ..]."""
    x, _, bias, *rest = use.node.args
    biases: Sequence[fx.Node | None] = [None] * len(use.sizes)
    if isinstance(bias, fx.Node):
        biases = build.split(bias, use.sizes, 0, copied=True)
    return _joined(use, build, lambda n: build(use.node.target, x, tile(n), biases[n], *rest), 1)


def _convolution_backward(use: Use, build: GraphBuilder, tile: Tile) -> Result:
    """Over output channels: input gradients of all tiles add up; each tile has its own weight and
    bias gradient."""
    grad, x, _, bias_sizes, *rest = use.node.args
    grads = build.split(_node(grad), use.sizes, 1)
    mask: Any = rest[-1]
    total: fx.Node | None = None
    weights: list[fx.Node] = []
    biases: list[fx.Node] = []
    for n, rows in enumerate(use.sizes):
        sizes = [rows] if bias_sizes and mask[2] else bias_sizes
        made = build(use.node.target, grads[n], x, tile(n), sizes, *rest)
        if mask[0]:
            part = build.item(made, 0)
            total = part if total is None else build(aten.add.Tensor, total, part)
        if mask[1]:
            weights.append(build.item(made, 1))
        if mask[2]:
            biases.append(build.item(made, 2))
    bias = build(aten.cat.default, biases, 0) if biases else None
    return Result(None, (total, None, bias), ((1, tuple(weights)),) if weights else ())


def _node(argument: object) -> fx.Node:
    assert isinstance(argument, fx.Node), argument
    return argument


RULES: dict[tuple[Any, int, int], Rule] = {
    (aten.mm.default, 1, 1): _matmul_out(0, 1),
    (aten.mm.default, 1, 0): _matmul_over(0, 1),
    (aten.mm.default, 0, 0): _matmul_out(1, 0),
    (aten.mm.default, 0, 1): _matmul_over(1, 0),
    (aten.bmm.default, 1, 0): _matmul_out(0, 0),
    (aten.bmm.default, 1, 2): _matmul_out(0, 2),
    (aten.bmm.default, 1, 1): _matmul_over(0, 2),
    (aten.bmm.default, 0, 0): _matmul_out(1, 0),
    (aten.bmm.default, 0, 1): _matmul_out(1, 1),
    (aten.bmm.default, 0, 2): _matmul_over(1, 1),
    (aten.addmm.default, 2, 1): _addmm_out,
    (aten.addmm.default, 2, 0): _addmm_over,
    (aten.embedding.default, 0, 0): _embedding,
    (aten.convolution.default, 1, 0): _convolution,
    (aten.convolution_backward.default, 2, 0): _convolution_backward,
}
"""(op, position of the weight, its tiled dimension) -> how it is written over tiles."""


SUMMED = frozenset(
    {
        (aten.mm.default, 1, 0),
        (aten.mm.default, 0, 1),
        (aten.bmm.default, 1, 1),
        (aten.bmm.default, 0, 2),
        (aten.addmm.default, 2, 0),
        (aten.convolution_backward.default, 2, 0),
    }
)
"""Those of `RULES` that sum over tiles: input gradients, where the op makes some."""


ADDED_UP = "products with its tiles are added up one after the other"
"""Why a use rounds otherwise, for people: sums over tiles."""
OTHER_KERNEL = (
    "products with its tiles have eager's bits only where the library computes them alike"
)
"""Why a use may round otherwise, for people: the library may take another kernel for a tile."""


def rounding_of(use: Use) -> str:
    """Why the use may round otherwise over several tiles, for people; "": it does not."""
    if (use.node.target, use.at, use.dim) in SUMMED:
        return ADDED_UP
    return "" if is_op(use.node, aten.embedding.default) else OTHER_KERNEL


def same_layout(made: Sequence[fx.Node | None], instead: Sequence[fx.Node | None]) -> bool:
    """Whether each new value has dtype, sizes and strides of the one it replaces."""
    return all(
        new is None or old is None or _layout(new) == _layout(old)
        for new, old in zip(made, instead, strict=True)
    )


def _layout(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return value.dtype, tuple(value.size()), tuple(value.stride())


Chain = tuple[tuple[fx.Node, int], ...]
"""Views and casts, each with its dimension that is tiled."""


@dataclass(frozen=True)
class Reader:
    """A node that reads a gathered weight, through views.

    gather  whose value is read
    use     node and operand; its `sizes` are not known yet
    chain   views and casts from the gather to the operand, each with its dimension that is tiled
    rows    first row of the weight that the operand has, and number of rows
    row     that a select takes; None: all are read
    """

    gather: fx.Node
    use: Use
    chain: Chain
    rows: tuple[int, int]
    row: int | None = None


@dataclass(frozen=True)
class Weight:
    """A parameter that is gathered, and its readers.

    name     for people
    readers  of its gathers, in no order
    others   nodes that read it and cannot be written over tiles, each with the cast it reads
             through
    whole    why it cannot be cut; "": it can
    """

    handle: fx.Node
    name: str
    rows: int
    nbytes: int
    readers: tuple[Reader, ...]
    others: tuple[tuple[fx.Node, fx.Node | None], ...]
    whole: str

    def gathered_values(
        self, where: Mapping[fx.Node, int], number: int, count: int
    ) -> Iterator[GatheredValue]:
        """The values in the arena, by phase: a weight that is read in both is gathered in each.

        number  of this weight, of `count`: tells positions apart that are before the same node
        """
        row = 0 if self.whole or self.rows < 2 else self.nbytes // self.rows
        nodes = [*((r.use.node, _cast_of(r.chain)) for r in self.readers), *self.others]
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            reads = set()
            for node, cast in nodes:
                if node.op == "output" or phase_of(node) is not phase:
                    continue
                if cast is None:
                    reads.add(where[node] * (count + 1))
                elif phase_of(cast) is phase:
                    reads.add(where[cast] * (count + 1))
                else:  # the cast is made again, right before
                    reads.add(where[node] * (count + 1) - 1 - number)
            if reads:
                yield GatheredValue(self.handle.name, tuple(sorted(reads)), self.nbytes, row)


def _cast_of(chain: Chain) -> fx.Node | None:
    """The first cast on the way from a gather: nodes after it do not read the gathered bytes."""
    return next((view for view, _ in chain if view.target in CASTS), None)


def weights_of(graph: fx.Graph, plan: GraphPlan) -> Iterator[Weight]:
    """The weights of a graph, without gathers for one use alone: those were cut already."""
    gathers: dict[fx.Node, list[fx.Node]] = {}
    for gather in find(graph, ops.gather):
        if not use_of(gather):
            handle = gather.args[0]
            assert isinstance(handle, fx.Node)
            gathers.setdefault(handle, []).append(gather)
    for handle, made in gathers.items():
        spec = plan.params[NodeName(handle.name)]
        readers: list[Reader] = []
        others: list[tuple[fx.Node, fx.Node | None]] = []
        for gather in made:
            found, rest = _readers(gather)
            readers += found
            others += rest
        rows = spec.layout.size[0] if spec.layout.size else 1
        whole = "" if all(_is_row_major(g, spec) for g in made) else "it is not row-major"
        if others and not whole:
            whole = f"%{others[0][0].name} cannot be computed over tiles of it"
        why = f"{str(spec.name)!r} is gathered whole: {whole}" if whole else ""
        nbytes = max(layout_of_fetch(g).nbytes for g in made)
        yield Weight(handle, str(spec.name), rows, nbytes, tuple(readers), tuple(others), why)


def _is_row_major(gather: fx.Node, spec: ParamSpec) -> bool:
    brings = layout_of_fetch(gather)
    plain = brings.offset == 0 and brings.stride == row_major(brings.size)
    return plain and brings == spec.layout


def _readers(gather: fx.Node) -> tuple[list[Reader], list[tuple[fx.Node, fx.Node | None]]]:
    """Readers of a gather, or a view of it: those that can be written over tiles, and others."""
    seen = {gather: _Member((), (0, shape(gather)[0] if shape(gather) else 1))}
    queue = [gather]
    found: list[Reader] = []
    others: list[tuple[fx.Node, fx.Node | None]] = []
    while queue:
        node = queue.pop()
        for user in node.users:
            if (view := _carried(user, node, seen[node])) is not None:
                seen[user] = view
                queue.append(user)
            elif (reader := _reader(gather, user, node, seen[node])) is not None:
                found.append(reader)
            else:
                others.append((user, _cast_of(seen[node].chain)))
    return found, others


@dataclass(frozen=True)
class _Member:
    """A view of a weight; chain, rows as in `Reader`."""

    chain: Chain
    rows: tuple[int, int]

    @property
    def dim(self) -> int:
        """Its dimension that counts rows of the weight."""
        return self.chain[-1][1] if self.chain else 0


def _carried(user: fx.Node, node: fx.Node, member: _Member) -> _Member | None:
    """`user` as a view of the weight, if it is one that tiles carry along; else None."""
    if user.op != "call_function" or user.args[0] is not node:
        return None
    if user.target is aten.slice.Tensor and len(user.args) > 1 and user.args[1] == member.dim:
        low, high, step = _range(user, member.rows[1])
        fits = step == 1 and high > low
        return replace(member, rows=(member.rows[0] + low, high - low)) if fits else None
    if user.target not in KEEP_DIMS:
        return None
    now = moved(user, member.dim)
    if now is None or shape(user)[now] != shape(node)[member.dim]:
        return None
    return replace(member, chain=(*member.chain, (user, now)))


def _range(user: fx.Node, count: int) -> tuple[int, int, int]:
    """First row, one past the last, and step of a slice; no rows, if only a call knows them."""
    given: list[object] = [*user.args[2:], None, None, None]
    known = [n for n in given if n is None or isinstance(n, int)]
    if len(known) < len(given):
        return 0, 0, 1
    start, end, step, *_ = known
    return slice(start, end, step).indices(count)


def _reader(gather: fx.Node, user: fx.Node, node: fx.Node, member: _Member) -> Reader | None:
    """`user` as a reader that can be written over tiles; else None."""
    if user.op != "call_function" or node not in user.args:
        return None
    use = Use(user, user.args.index(node), member.dim, ())
    if user.target is aten.select.int and user.args[1] == member.dim:
        index = user.args[2]
        if not isinstance(index, int):
            return None
        return Reader(gather, use, member.chain, member.rows, index % member.rows[1])
    known = rule_of(use) is not None
    return Reader(gather, use, member.chain, member.rows) if known else None
