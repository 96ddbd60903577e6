"""Writing a graph over tiles: nodes at one point of it, slices of values, tiles of weights.

A tile is a range of one dimension. Views and casts carry that dimension along, so a chain from a
weight to its reader, or from an op to a weight's gradient, is made again for each tile. Constants
that tell tiles apart (offsets) stand outside of what is computed between our ops: values are split
once, and each tile's compute is given its part, so that equal tiles are one structure.

Writes calls into a graph at its insertion point, with the values that they give.

What ops make of values that are only traced, worked out once for those that are alike.

Tiles of a weight, and what is computed of each, are alike in all but their place; to trace every
one of them anew is slow. A value that is found again is the same object, so nobody may ask whose
its storage is: which nodes share one, their ops say (`memory/footprint.py`).
"""

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx

from zcompile.ir import ops
from zcompile.ir.graph import CASTS, KEEP_STRIDES, UNANNOTATED_VIEWS, insert, mark_use
from zcompile.ir.torch_compat import Dispatched
from zcompile.ir.types import Phase, row_major

UNTOLD = UNANNOTATED_VIEWS | KEEP_STRIDES
"""What they make lies as what they are given does, and their schemas do not say so."""
_PLAIN = (
    int,
    float,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
"""Equal ones of one type mean the same to an op."""
_KNOWN: WeakKeyDictionary[fx.Graph, dict[Hashable, object]] = WeakKeyDictionary()
"""The one name here that changes after import: what is known of a graph goes with it."""


class _Unlike(Exception):
    """Nothing is known to be alike: a dynamic size, for one."""


def traced(graph: fx.Graph, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """`op(*args, **kwargs)`, of values that nodes of `graph` have."""
    if op is getitem:  # is no work, and to compare what it is given would be
        return op(*args)
    shares = op in UNTOLD or any(result.alias_info for result in op._schema.returns)
    try:
        given = ((name, _alike(value, shares)) for name, value in kwargs.items())
        key = (op, _alike(args, shares), *given)
    except _Unlike:
        return op(*args, **kwargs)
    known = _KNOWN.setdefault(graph, {})
    if key not in known:
        known[key] = op(*args, **kwargs)
    return known[key]


def _alike(x: object, shares: bool) -> Hashable:
    """Equal for those of which an op makes the same.

    shares  whether what it makes may lie where `x` does
    """
    if isinstance(x, Tensor):
        if x.layout is not torch.strided:
            raise _Unlike
        lies = (*x.size(), *x.stride())
        if shares:
            lies += (x.storage_offset(), x.untyped_storage().nbytes())
        if any(type(n) is not int for n in lies):
            raise _Unlike
        return (type(x), x.dim(), lies, x.dtype, x.device, x.requires_grad)
    if isinstance(x, list | tuple):
        return tuple(_alike(each, shares) for each in x)
    if not isinstance(x, _PLAIN):
        raise _Unlike
    return (type(x), x)


@dataclass(frozen=True)
class Pen:
    """Writes calls at the graph's insertion point, with their values for reasoning."""

    graph: fx.Graph
    phase: Phase
    like: fx.Node

    def __call__(self, op: Dispatched, *args: fx.node.Argument, **kwargs: object) -> fx.Node:
        with torch.no_grad():
            val = op(*_values(args), **_values(kwargs))
        node = insert(self.graph, op, *args, like=self.like, phase=self.phase, val=val)
        node.kwargs = kwargs  # type: ignore[assignment]  # as create_node takes them
        return node

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        if node.meta["val"].dtype is dtype:
            return node
        return self(aten._to_copy.default, node, dtype=dtype)

    def rows(self, node: fx.Node, a: int, b: int) -> fx.Node:
        count = node.meta["val"].shape[0]
        whole = a == 0 and (not isinstance(count, int) or b >= count)
        return node if whole else self(aten.slice.Tensor, node, 0, a, b)

    def joined(self, parts: Sequence[fx.Node]) -> fx.Node:
        """Rows of all parts."""
        return parts[0] if len(parts) == 1 else self(aten.cat.default, list(parts), 0)

    def row_major(self, node: fx.Node) -> fx.Node:
        if node.meta["val"].is_contiguous():
            return node
        return self(aten.clone.default, node, memory_format=torch.contiguous_format)


def _values(args: Any) -> Any:
    return fx.node.map_arg(args, lambda node: node.meta["val"])


aten = torch.ops.aten

SAME = frozenset({aten.detach.default, aten.alias.default, aten.clone.default, *CASTS})
"""One input, and a result of the same dimensions."""
RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})
VIEWS = frozenset(
    {
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.expand.default,
        *RESHAPES,
        *SAME,
    }
)
"""What carries the dimension of a tile along."""
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""In which dtype the sums over tiles of narrow values are kept."""


def shape(node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.meta["val"].size())


def moved(node: fx.Node, dim: int) -> int | None:
    """Which dimension of a view, or cast, dimension `dim` of its input has become; None if it is
    not there as it was."""
    source, *rest = node.args
    assert isinstance(source, fx.Node)
    size, n = shape(source), len(shape(source))
    match node.target:
        case aten.t.default:
            return dim if n < 2 else 1 - dim
        case aten.transpose.int:
            a, b = (int(d) % n for d in rest)  # type: ignore[arg-type]  # op schema
            return {a: b, b: a}.get(dim, dim)
        case aten.permute.default:
            order = [int(d) % n for d in rest[0]]  # type: ignore[union-attr, arg-type]  # op schema
            return order.index(dim)
        case aten.unsqueeze.default:
            at = int(rest[0]) % (n + 1)  # type: ignore[arg-type]  # op schema
            return dim + (at <= dim)
        case aten.squeeze.dim:
            at = int(rest[0]) % n  # type: ignore[arg-type]  # op schema
            return None if at == dim else dim - (at < dim and size[at] == 1)
        case aten.expand.default:
            return dim + len(shape(node)) - n
    if node.target in SAME:
        return dim
    return _same_place(size, dim, shape(node)) if node.target in RESHAPES else None


def _same_place(size: Sequence[Any], dim: int, new: Sequence[Any]) -> int | None:
    """The dimension of a reshaped value that counts what `dim` counted."""
    for at, n in enumerate(new):
        if n == size[dim] and _product(new[:at]) == _product(size[:dim]):
            return at
    return None


def _product(sizes: Sequence[Any]) -> Any:
    result = 1
    for n in sizes:
        result = result * n
    return result


def came_from(node: fx.Node, dim: int) -> int | None:
    """The reverse of `moved`: which dimension of its input dimension `dim` of a view was."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    found = [d for d in range(len(shape(source))) if moved(node, d) == dim]
    return found[-1] if found and shape(source)[found[-1]] == shape(node)[dim] else None


@dataclass
class Writer:
    """Nodes before one point of a graph, in one phase.

    like  the node that they take the place of: its module and stack trace
    """

    graph: fx.Graph
    point: fx.Node
    like: fx.Node
    phase: Phase
    made: list[fx.Node] = field(default_factory=list)

    def call(self, op: Any, *args: Any, name: str = "", **kwargs: Any) -> fx.Node:
        """`op(*args)`, with the value it has."""
        values, named = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        val = traced(self.graph, op, values, named)
        with self.graph.inserting_before(self.point):
            node = insert(
                self.graph, op, *args, like=self.like, phase=self.phase, val=val, name=name or None
            )
        node.kwargs = kwargs
        self.made.append(node)
        return node

    def split(
        self, value: fx.Node, sizes: Sequence[int], dim: int, *, copied: bool = False
    ) -> list[fx.Node]:
        """Parts of `value`, of so many elements along `dim` each: views.

        copied  if there are several, each in memory of its own: views of what is gathered are taken
                again by each that reads them, which then is no equal of the others
        """
        if len(sizes) == 1:
            return [value]
        op = aten.split_with_sizes_copy if copied else aten.split_with_sizes
        parts = self.call(op.default, value, list(sizes), dim)
        return [self.item(parts, n) for n in range(len(sizes))]

    def item(self, several: fx.Node, n: int) -> fx.Node:
        """One result of an op that has several."""
        return self.call(operator.getitem, several, n)

    def tile(self, gather: fx.Node, begin: int, rows: int) -> fx.Node:
        """The gather of some rows of what `gather` brings, which is row-major from offset 0."""
        handle, size, _, offset, dtype, device = gather.args
        assert isinstance(size, list | tuple)
        part = [rows, *size[1:]]
        row = row_major(part)[0]
        assert isinstance(offset, int)
        at = offset + begin * row
        stride = list(row_major(part))
        node = self.call(ops.gather, handle, part, stride, at, dtype, device)
        mark_use(node, self.like.name)
        return node

    def again(self, view: fx.Node, source: fx.Node, dim: int, rows: int) -> fx.Node:
        """A view, or cast, made of a tile: dimension `dim` of it has `rows`."""
        args = list(view.args)
        args[0] = source
        if view.target in RESHAPES or view.target is aten.expand.default:
            size = list(shape(view))
            size[dim] = rows
            args[1] = size
        return self.call(view.target, *args, **_named(view))

    def zeros(self, like: fx.Node, size: Sequence[Any]) -> fx.Node:
        val = like.meta["val"]
        return self.call(aten.new_zeros.default, like, list(size), dtype=val.dtype)

    def undo(self) -> None:
        """Take out what was written."""
        for node in reversed(self.made):
            self.graph.erase_node(node)
        self.made.clear()


def _named(node: fx.Node) -> dict[str, Any]:
    return dict(node.kwargs)


def is_op(node: object, *targets: Dispatched) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def erase_unread(graph: fx.Graph, *nodes: fx.Node) -> None:
    """Take out those of `nodes` that nothing reads, and what only they read."""
    queue, gone = list(nodes), set[fx.Node]()
    while queue:
        node = queue.pop()
        pure = node.op == "call_function" and not node.is_impure()
        if pure and not node.users and node not in gone:
            queue.extend(node.all_input_nodes)
            gone.add(node)
            graph.erase_node(node)
