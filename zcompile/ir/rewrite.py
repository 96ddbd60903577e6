"""Writes calls into a joint graph at one point, and follows a tiled dimension through views.

A tile is a range of one dimension of a tensor. Views and casts carry that dimension along, so the
chain from a weight to its reader, or from an op to the gradient of a weight, is written again for
each tile. Constants that tell tiles apart (offsets) stand outside of the compute between our ops:
values are split once, and the compute of each tile is given its part, so that equal tiles have one
structure and are compiled once.

What is computed of a tile is a torch function (`GraphBuilder.splice`): it runs on stand-ins for
nodes, and each op that torch dispatches becomes a node.

What an op makes of values that are only traced is worked out once for equal values: tiles are
alike in all but their place, and tracing each of them anew is slow. A value that is found again is
the same object, so nobody may ask which storage it has: the ops say which nodes share one
(`memory/footprint.py`).
"""

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx

from zcompile.ir import ops
from zcompile.ir.graph import (
    KEEP_STRIDES,
    RESHAPES,
    SAME_DIMS,
    SIZED_VIEWS,
    UNANNOTATED_VIEWS,
    insert,
    mark_use,
)
from zcompile.ir.torch_compat import Dispatched, no_torch_function, trees, without_modes, wrapper
from zcompile.ir.types import Phase, row_major

aten = torch.ops.aten

SUM_DTYPE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""Dtype of values -> dtype in which sums of them over tiles, or slices, are kept."""


# Values of traced calls


_KEEP_LAYOUT = UNANNOTATED_VIEWS | KEEP_STRIDES
"""Ops whose result takes layout or storage from an input, though their schemas do not say so."""
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
"""Types of arguments that mean the same to an op if they are equal."""
_KNOWN: WeakKeyDictionary[fx.Graph, dict[Hashable, object]] = WeakKeyDictionary()
"""Graph -> values of traced calls, the same of a graph and its copies."""
_RECORDED: WeakKeyDictionary[fx.Graph, dict[Hashable, "_Recording"]] = WeakKeyDictionary()
"""Graph -> recordings of functions that were spliced, the same of a graph and its copies; no other
name of this file than these two changes after import."""


class _Unlike(Exception):
    """An argument has no key that says what it is: a dynamic size, for one."""


def traced(graph: fx.Graph, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """The value of `op(*args, **kwargs)`, from an earlier equal call in `graph` if there was one.

    args, kwargs  the values of nodes, not the nodes
    """
    if op is getitem:  # is no work, and to compare what it is given would be
        return op(*args)
    shares = op in _KEEP_LAYOUT or any(result.alias_info for result in op._schema.returns)
    try:
        given = ((name, _key(value, shares)) for name, value in kwargs.items())
        key = (op, _key(args, shares), *given)
    except _Unlike:
        return op(*args, **kwargs)
    known = _KNOWN.setdefault(graph, {})
    if key not in known:
        known[key] = op(*args, **kwargs)
    return known[key]


def share_traced(graph: fx.Graph, copy: fx.Graph) -> None:
    """Let a graph and its copy know the same values and recordings, from now on too: their nodes
    have the same values, and what is worked out of those names no node."""
    _KNOWN[copy] = _KNOWN.setdefault(graph, {})
    _RECORDED[copy] = _RECORDED.setdefault(graph, {})


def _key(x: object, shares: bool) -> Hashable:
    """A key that is equal for arguments of which an op makes equal values.

    shares  whether the result of the op may share the storage of `x`
    """
    if isinstance(x, Tensor):
        if x.layout is not torch.strided:
            raise _Unlike
        layout = (*x.size(), *x.stride())
        if shares:
            layout += (x.storage_offset(), x.untyped_storage().nbytes())
        if any(type(n) is not int for n in layout):
            raise _Unlike
        return (type(x), x.dim(), layout, x.dtype, x.device, x.requires_grad)
    if isinstance(x, list | tuple):
        return tuple(_key(each, shares) for each in x)
    if not isinstance(x, _PLAIN):
        raise _Unlike
    return (type(x), x)


# Writing calls


@dataclass
class GraphBuilder:
    """Writes calls before one node of a graph, in one phase, each with its traced value.

        build = GraphBuilder(graph, point, like, Phase.BACKWARD)
        logits = build(aten.mm.default, rows, weight)             # an fx.Node before `point`

    point  the node before which calls are written
    like   the node that the calls take the place of: its module and stack trace
    made   the nodes that were written
    """

    graph: fx.Graph
    point: fx.Node
    like: fx.Node
    phase: Phase
    made: list[fx.Node] = field(default_factory=list)

    def __call__(self, op: Any, *args: Any, name: str = "", **kwargs: Any) -> fx.Node:
        """Write `op(*args, **kwargs)`."""
        values, named = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with torch.no_grad():
            val = traced(self.graph, op, values, named)
        with self.graph.inserting_before(self.point):
            node = insert(
                self.graph, op, *args, like=self.like, phase=self.phase, val=val, name=name or None
            )
        node.kwargs = kwargs
        self.made.append(node)
        return node

    def write_before(self, point: fx.Node) -> None:
        """Write calls before `point` from here on."""
        self.point = point

    def splice(self, function: Callable[..., Any], *args: Any) -> Any:
        """Write the ops of `function(*args)`; returns its result, with nodes in place of tensors.

            logits = build.splice(torch.mm, rows, weight)         # an fx.Node before `point`

        function  makes tensors of the tensors it is given alone: no constants, no dynamic sizes
        args      what it takes, with nodes in place of tensors
        """
        leaves, form = trees.tree_flatten(args)
        given = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
        key = (function, form, *(_leaf_key(leaf, given) for leaf in leaves))
        recordings = _RECORDED.setdefault(self.graph, {})
        if (known := recordings.get(key)) is not None:
            return known.repeat(self, given)
        before = len(self.made)
        stand_ins = trees.tree_map_only(fx.Node, lambda node: _StandIn(node, self), args)
        with torch.no_grad(), without_modes():
            made = function(*stand_ins)
        result = trees.tree_map_only(_StandIn, lambda value: value.node, made)
        recordings[key] = _Recording(given, self.made[before:], result)
        return result

    def undo(self) -> None:
        """Erase what was written."""
        for node in reversed(self.made):
            self.graph.erase_node(node)
        self.made.clear()

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """`node` in `dtype`; itself, if it has that."""
        if node.meta["val"].dtype is dtype:
            return node
        return self(aten._to_copy.default, node, dtype=dtype)

    def contiguous(self, node: fx.Node) -> fx.Node:
        """`node` without gaps, last dimension last; itself, if it is stored so."""
        if node.meta["val"].is_contiguous():
            return node
        return self(aten.clone.default, node, memory_format=torch.contiguous_format)

    def zeros(self, like: fx.Node, size: Sequence[Any]) -> fx.Node:
        """Zeros [*size], in the dtype and on the device of `like`."""
        return self(aten.new_zeros.default, like, list(size), dtype=like.meta["val"].dtype)

    def rows(self, node: fx.Node, begin: int, end: int) -> fx.Node:
        """Rows [begin, end) of `node` [n, ...]; itself, if those are all."""
        count = node.meta["val"].shape[0]
        whole = begin == 0 and (not isinstance(count, int) or end >= count)
        return node if whole else self(aten.slice.Tensor, node, 0, begin, end)

    def join_rows(self, parts: Sequence[fx.Node]) -> fx.Node:
        """The rows of all `parts` [n_i, ...]: [sum of n_i, ...]."""
        return parts[0] if len(parts) == 1 else self(aten.cat.default, list(parts), 0)

    def split(
        self, value: fx.Node, sizes: Sequence[int], dim: int, *, copied: bool = False
    ) -> list[fx.Node]:
        """Parts of `value`, the i-th with `sizes[i]` elements along `dim`; views, unless `copied`.

        copied  if there are several, each is in memory of its own: views of what is gathered are
                taken again by each reader, and readers of different views are no equals
        """
        if len(sizes) == 1:
            return [value]
        op = aten.split_with_sizes_copy if copied else aten.split_with_sizes
        parts = self(op.default, value, list(sizes), dim)
        return [self.item(parts, n) for n in range(len(sizes))]

    def item(self, several: fx.Node, n: int) -> fx.Node:
        """Result `n` of an op that has several."""
        return self(operator.getitem, several, n)

    def gather_rows(self, gather: fx.Node, begin: int, rows: int) -> fx.Node:
        """A gather of rows [begin, begin + rows) of what `gather` brings: [rows, ...].

        gather  of a row-major tensor [n, ...]
        """
        handle, size, _, offset, dtype, device = gather.args
        assert isinstance(size, list | tuple)
        part = [rows, *size[1:]]
        row = row_major(part)[0]
        assert isinstance(offset, int)
        at = offset + begin * row
        node = self(ops.gather, handle, part, list(row_major(part)), at, dtype, device)
        mark_use(node, self.like.name)
        return node

    def repeat_view(self, view: fx.Node, source: fx.Node, dim: int, rows: int) -> fx.Node:
        """What `view`, a view or cast, makes of the tile `source`.

        dim   the dimension of the result that is tiled
        rows  its size there
        """
        args = list(view.args)
        args[0] = source
        if view.target in SIZED_VIEWS:
            size = list(shape(view))
            size[dim] = rows
            args[1] = size
        named: dict[str, Any] = dict(view.kwargs)
        return self(view.target, *args, **named)


def _leaf_key(leaf: object, given: Sequence[fx.Node]) -> Hashable:
    """A key that is equal for arguments with which a torch function calls the same ops."""
    if not isinstance(leaf, fx.Node):
        return type(leaf), leaf
    val = leaf.meta["val"]
    sizes = (n if isinstance(n, int) else str(n) for n in (*val.size(), *val.stride()))
    return given.index(leaf), val.dtype, val.device, val.dim(), *sizes


class _Recording:
    """The calls that a function came to, to be written again for other nodes: a function runs once
    for tiles that are alike.

    It is a graph of its own, since what a graph is the key of must not hold that graph.
    """

    def __init__(self, given: Sequence[fx.Node], made: Sequence[fx.Node], result: Any) -> None:
        graph, there = fx.Graph(), dict[fx.Node, fx.Node]()
        self._inputs = [graph.placeholder(f"x{n}") for n in range(len(given))]
        for node, stands in reversed([*zip(given, self._inputs, strict=True)]):
            there[node] = stands  # the first, of a node that is given twice
        for node in made:
            there[node] = graph.node_copy(node, there.__getitem__)
            there[node].meta = {}
        self._calls = [there[node] for node in made]
        self._result = fx.node.map_arg(result, there.__getitem__)

    def repeat(self, build: GraphBuilder, given: Sequence[fx.Node]) -> Any:
        """Write the calls for `given`; returns the result."""
        there = dict(zip(self._inputs, given, strict=True))
        for call in self._calls:
            args: Any = fx.node.map_arg(call.args, there.__getitem__)
            named: Any = fx.node.map_arg(dict(call.kwargs), there.__getitem__)
            there[call] = build(call.target, *args, **named)
        return fx.node.map_arg(self._result, there.__getitem__)


class _StandIn(Tensor):
    """Stands for a node while a torch function runs; each op on it is written into the graph.

    What is written in place is what the op returns from then on.
    """

    node: fx.Node
    build: GraphBuilder

    def __new__(cls, node: fx.Node, build: GraphBuilder) -> "_StandIn":
        val = node.meta["val"]
        made = wrapper(
            cls, val.size(), val.stride(), val.storage_offset(), val.dtype, val.device, False
        )
        assert isinstance(made, _StandIn)
        made.node, made.build = node, build
        return made

    __torch_function__ = no_torch_function  # type: ignore[assignment]  # torch's own recipe

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the parent's is not declared a classmethod
        cls, op: Dispatched, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = trees.tree_leaves((args, kwargs))
        known = all(type(x) is cls or not isinstance(x, Tensor | torch.SymInt) for x in given)
        assert known, f"{op} is given a constant, or a dynamic size, which no node stands for"
        build = next(x.build for x in given if isinstance(x, cls))
        args_of_node, named = trees.tree_map_only(cls, lambda x: x.node, (args, kwargs or {}))
        if named.get("pin_memory") is False:  # which torch's Python says where nobody did
            del named["pin_memory"]
        node = build(op, *args_of_node, **named)
        if op._schema.is_mutable:
            args[0].node = node
            return args[0]
        value = node.meta["val"]
        if isinstance(value, Tensor):
            return cls(node, build)
        return [cls(build.item(node, n), build) for n in range(len(value))]


# Dimensions through views


def is_op(node: object, *targets: Dispatched) -> bool:
    """Whether `node` is a call of one of `targets`."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def shape(node: fx.Node) -> tuple[Any, ...]:
    """Sizes of the value of a node."""
    return tuple(node.meta["val"].size())


def moved(node: fx.Node, dim: int) -> int | None:
    """The dimension of a view, or cast, that dimension `dim` of its input has become.

    %v = aten.t(%w), w [4, 8]: moved(v, 0) is 1. None, if the dimension does not stay as it is.
    """
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
    if node.target in SAME_DIMS:
        return dim
    return _dim_after_reshape(size, dim, shape(node)) if node.target in RESHAPES else None


def _dim_after_reshape(size: Sequence[Any], dim: int, new: Sequence[Any]) -> int | None:
    """The dimension of sizes `new` that has the size and stride of dimension `dim` of `size`."""
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
    """The dimension of its input that dimension `dim` of a view was; the reverse of `moved`."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    found = [d for d in range(len(shape(source))) if moved(node, d) == dim]
    return found[-1] if found and shape(source)[found[-1]] == shape(node)[dim] else None
