"""Follows the batch through a joint graph: which dimension of which value it is, op by op.

A dimension is the batch because it came from there, and not because of its size: inputs say where
their batch is, each op says where its operands' batch is in its results, and the gradient of a
result has it where the result has. A view may put other dimensions beside it:

    [batch, length, width]           the batch is dimension 0
    [batch * length, width]          dimension 0, with `length` elements of each sample   (inner)
    [length * batch, width]          dimension 0, `length` times                          (outer)

An op that computes each sample by itself has a `Rule`; an op without one (unknown, random, over the
batch) runs for the whole batch. Where the results of such an op have the batch is known of some
(dropout, batch normalisation), so that what follows is sliced again.

The file has three parts: what a rule is, the walk over a graph, and the rules of ops.
"""

import enum
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import SIZED_VIEWS, UNTAGGED, output_of, phase_of
from zcompile.ir.rewrite import shape
from zcompile.ir.saved_values import REPEATABLE, SavedValues, is_value, storage_bytes
from zcompile.ir.torch_compat import Dispatched, handle_input, is_random, is_tangent, tangent_of
from zcompile.ir.types import Phase

aten = torch.ops.aten


class Kind(enum.Enum):
    """A result that has no batch dimension.

    SUM  over the batch: those of slices add up
    OWN  of each slice, and of use to its own backward alone: the state of a kernel
    """

    SUM = "sum"
    OWN = "own"


@dataclass(frozen=True)
class Axis:
    """Where the batch is in a value: the elements of dimension `dim` are [outer, batch, inner]."""

    dim: int
    inner: int = 1


Result = Axis | Kind | None
"""What an op gives in one of its results; None: nothing."""


@dataclass(frozen=True)
class Sized:
    """An argument that is a size: so many elements per sample.

    position  of the argument
    at        place in its list; None: it is a number
    """

    position: int
    at: int | None
    each: int


@dataclass(frozen=True)
class Rule:
    """How a call runs over slices of the batch.

    reads    operands that are read in slices, and where their batch is; others are read whole
    results  of each result; of one that gives a list of like results, one
    sized    arguments that follow the size of a slice
    """

    reads: Mapping[fx.Node, Axis | Kind]
    results: tuple[Result, ...]
    sized: tuple[Sized, ...] = ()


class BatchAxes:
    """The batch of the values of a graph.

    count    samples in the batch
    first    whether it is the first dimension of the inputs
    axes     value -> where its batch is; values without a batch are not there
    rules    call -> how it runs over slices; for those that treat every sample by itself
    refused  calls that read the batch and run whole, in graph order
    clashes  calls that read several batches at different places
    """

    def __init__(
        self,
        values: SavedValues,
        count: int,
        seeds: Mapping[fx.Node, Axis],
        banned: frozenset[fx.Node] = frozenset(),
    ) -> None:
        self.values, self.count = values, count
        self.first = all(axis.dim == 0 for axis in seeds.values())
        self.axes: dict[fx.Node, Axis | Kind] = dict(seeds)
        self.rules: dict[fx.Node, Rule] = {}
        self.refused: list[fx.Node] = []
        self.clashes = 0
        self._banned = banned
        self._results: dict[fx.Node, tuple[Result, ...]] = {}
        self._reduced: dict[tuple[int, ...], Axis | Kind] = {}
        calls = [n for n in values.graph.nodes if n.op == "call_function"]
        for node in calls:
            if phase_of(node) is Phase.FORWARD:
                self._visit(node)
        self.axes |= self._tangents()
        for node in calls:
            if phase_of(node) is Phase.BACKWARD:
                self._visit(node)

    def axis(self, node: object) -> Axis | None:
        """Where the batch of a value is; None, if it has none."""
        found = self.axes.get(node) if isinstance(node, fx.Node) else None
        return found if isinstance(found, Axis) else None

    def is_sum(self, node: fx.Node) -> bool:
        return self.axes.get(node) is Kind.SUM

    def makes_slices(self) -> dict[fx.Node, bool]:
        """Calls that run over slices -> whether a result of theirs has a batch."""
        return {
            node: any(isinstance(result, Axis) for result in rule.results)
            for node, rule in self.rules.items()
        }

    def outer(self, node: fx.Node, axis: Axis) -> int:
        """How often the batch comes in the dimension of `axis`."""
        return int(shape(node)[axis.dim]) // (self.count * axis.inner)

    def _tangents(self) -> dict[fx.Node, Axis]:
        """The gradient of a result has its batch where the result has it."""
        output = output_of(self.values.graph)
        given = output.args[0] if isinstance(output.args[0], list | tuple) else ()
        descs = output.meta.get("desc") or ()
        where = [
            (desc, self.axes[node])
            for node, desc in zip(given, descs, strict=False)
            if isinstance(node, fx.Node) and isinstance(self.axes.get(node), Axis)
        ]
        found = {}
        for node in self.values.graph.find_nodes(op="placeholder"):
            if is_tangent(node) and is_value(node):
                mine = [axis for desc, axis in where if desc == tangent_of(node)]
                if mine and isinstance(mine[0], Axis):
                    found[node] = mine[0]
        return found

    def _visit(self, node: fx.Node) -> None:
        if node in self.values.gathered or node.target in ops.OURS:
            return
        if node.target is operator.getitem:
            self._pick(node)
            return
        batched = [n for n in node.all_input_nodes if self.axes.get(n) not in (None, Kind.SUM)]
        if not batched:
            if node.target is aten.expand.default and phase_of(node) is Phase.BACKWARD:
                self._spread(node)
            return
        rule = self._rule(node)
        if rule is None or not self._holds(node, rule, batched):
            self.refused.append(node)
            return
        whole = OVER_BATCH | (MEANS if Kind.SUM in rule.results else frozenset())
        separable = node not in self._banned and _is_pure(node) and node.target not in whole
        if Kind.SUM in rule.results and phase_of(node) is Phase.FORWARD:
            separable = False
            self._reduced |= {shape(n): axis for n, axis in rule.reads.items()}
        if not separable:
            self.refused.append(node)
            rule = Rule({}, tuple(r if isinstance(r, Axis) else None for r in rule.results))
        else:
            self.rules[node] = rule
        self._results[node] = rule.results
        if is_value(node) and rule.results[0] is not None:
            self.axes[node] = rule.results[0]

    def _spread(self, node: fx.Node) -> None:
        """The gradient of a sum over the batch has its batch where what was summed has it."""
        if not is_value(node) or not _is_static(node):
            return
        if (axis := self._reduced.get(shape(node))) is not None:
            self.axes[node] = axis

    def _pick(self, node: fx.Node) -> None:
        """One of several results."""
        several, number = node.args
        results = self._results.get(several)  # type: ignore[arg-type]  # a node, in such a call
        if results is None or not isinstance(several, fx.Node):
            return
        found = results[number if len(results) > 1 else 0]  # type: ignore[index]  # a number
        if found is not None:
            self.axes[node] = found
        if several in self.rules and found is not None:
            self.rules[node] = Rule({several: Kind.OWN}, (found,))

    def _rule(self, node: fx.Node) -> Rule | None:
        if not isinstance(node.target, Dispatched) or node.target.namespace not in REPEATABLE:
            return None
        if any(not _is_static(n) for n in (node, *node.all_input_nodes)):
            return None
        call = Call(node, self)
        if (special := RULES.get(node.target)) is not None:
            return special(call)
        if torch.Tag.pointwise in node.target.tags or node.target in ELEMENTWISE:
            return elementwise(call)
        return None

    def _holds(self, node: fx.Node, rule: Rule, batched: Iterable[fx.Node]) -> bool:
        """Whether operands have their batch where the rule reads it, and no other has one."""
        for operand in batched:
            if rule.reads.get(operand) != self.axes[operand]:
                self.clashes += 1
                return False
        for operand, axis in rule.reads.items():
            if operand in self.axes and self.axes[operand] is not Kind.SUM:
                continue
            # A value without a batch, of which a slice reads its part.
            if not isinstance(axis, Axis):
                return False
            size = shape(operand)
            if axis.dim >= len(size) or size[axis.dim] % (self.count * axis.inner):
                return False
        return True


def _is_pure(node: fx.Node) -> bool:
    """Whether a call gives the same for a sample whatever is computed before and beside it."""
    assert isinstance(node.target, Dispatched)
    return not node.target._schema.is_mutable and not is_random(node)


def _is_static(node: fx.Node) -> bool:
    """Whether the sizes of the values of a node are known."""
    value = node.meta.get("val")
    many = value if isinstance(value, list | tuple) else (value,)
    return all(isinstance(n, int) for v in many if isinstance(v, torch.Tensor) for n in v.shape)


MORE = 1.25
"""How much more bytes have to be made in slices of the second dimension of inputs."""
AGREEING = 8
"""Inputs, the largest, that are asked whether they have the same batch."""


def batch_axes(values: SavedValues) -> BatchAxes | None:
    """The batch of a graph, found from its inputs; None, if they have none.

    The batch is the first dimension of inputs, or the second where more follows from that, as of
    sequences that come [length, batch, width].
    """
    found: list[BatchAxes] = []
    for dim in (0, 1):
        given = _inputs(values.graph, dim)
        for count in dict.fromkeys(shape(node)[dim] for node in given):
            seeds = {n: Axis(dim) for n in given if shape(n)[dim] == count}
            found.append(_agreeing(values, count, seeds))
    if not found:
        return None
    best = max(found, key=lambda batch: _covered(batch) * (MORE if batch.first else 1.0))
    return best if best.rules else None


def _inputs(graph: fx.Graph, dim: int) -> list[fx.Node]:
    """Inputs of the model, and of the module its buffers, that may have a batch."""
    return [
        node
        for node in graph.find_nodes(op="placeholder")
        if is_value(node)
        and handle_input(node) is None
        and not is_tangent(node)
        and len(shape(node)) > dim
        and all(isinstance(n, int) and n > 1 for n in shape(node)[: dim + 1])
    ]


def _agreeing(values: SavedValues, count: int, seeds: Mapping[fx.Node, Axis]) -> BatchAxes:
    """The batch from as many of the inputs as agree: a buffer may have as many rows by chance."""
    found = _with_bans(values, count, seeds)
    if not found.clashes:
        return found
    largest = sorted(seeds, key=lambda node: -storage_bytes(node))[:AGREEING]
    alone = {node: _with_bans(values, count, {node: seeds[node]}) for node in largest}
    first = max(largest, key=lambda node: _covered(alone[node]))
    found, agreed = alone[first], {first: seeds[first]}
    for node in largest:
        tried = _with_bans(values, count, {**agreed, node: seeds[node]})
        if not tried.clashes or _covered(tried) > _covered(found):
            found, agreed = tried, {**agreed, node: seeds[node]}
    return found


def _with_bans(values: SavedValues, count: int, seeds: Mapping[fx.Node, Axis]) -> BatchAxes:
    """The batch, where nothing that is of use in slices alone is read whole."""
    banned: frozenset[fx.Node] = frozenset()
    while True:
        found = BatchAxes(values, count, seeds, banned)
        more = {
            node.all_input_nodes[0] if node.target is operator.getitem else node
            for node in found.rules
            if not (is_value(node) and found.axes.get(node) is not Kind.OWN)
            and any(user not in found.rules for user in node.users)
        }
        if not more:
            return found
        banned |= more


def _covered(found: BatchAxes) -> int:
    """Bytes of values that are made in slices."""
    return sum(storage_bytes(n) for n in found.rules if found.values.root(n) is n)


# Rules


class Call:
    """A call as its rule reads it."""

    def __init__(self, node: fx.Node, batch: BatchAxes) -> None:
        self.node, self.batch = node, batch
        assert isinstance(node.target, Dispatched)
        self.names = [a.name for a in node.target._schema.arguments]
        self._defaults = {
            a.name: a.default_value for a in node.target._schema.arguments if a.has_default_value()
        }

    def __getitem__(self, name: str) -> Any:
        """The argument of this name."""
        at = self.names.index(name)
        if at < len(self.node.args):
            return self.node.args[at]
        return self.node.kwargs.get(name, self._defaults.get(name))

    def node_of(self, name: str) -> fx.Node | None:
        """The operand of this name; None, if none is given."""
        given = self[name]
        return given if isinstance(given, fx.Node) else None

    def axis(self, name: str) -> Axis | None:
        return self.batch.axis(self[name])

    def dims(self, name: str, count: int) -> set[int]:
        """The dimensions that an argument names, of `count`; all, if it names none."""
        given = self[name]
        if given is None or given == []:
            return set(range(count))
        return {d % count for d in (given if isinstance(given, list | tuple) else [given])}


Special = Callable[[Call], Rule | None]


def _dims(node: fx.Node) -> int:
    return len(shape(node))


def _result_dims(node: fx.Node) -> int:
    value = node.meta["val"]
    return int((value[0] if isinstance(value, list | tuple) else value).dim())


def aligned(
    call: Call, operands: Sequence[fx.Node], out: Sequence[int], axis: Axis
) -> dict[fx.Node, Axis | Kind] | None:
    """What broadcast operands of a result of sizes `out` are read in slices; None, if not."""
    reads: dict[fx.Node, Axis | Kind] = {}
    for operand in operands:
        size = shape(operand)
        dim = axis.dim - (len(out) - len(size))
        if dim < 0 or size[dim] == 1:
            continue
        if size[dim] != out[axis.dim]:
            return None
        reads[operand] = Axis(dim, axis.inner)
    return reads


def elementwise(call: Call) -> Rule | None:
    """Any op of broadcast operands."""
    node = call.node
    if not is_value(node):
        return None
    operands, out = node.all_input_nodes, shape(node)
    if any(not is_value(n) for n in operands):
        return None
    for operand in operands:
        if (axis := call.batch.axis(operand)) is not None:
            mine = Axis(axis.dim + len(out) - _dims(operand), axis.inner)
            reads = aligned(call, operands, out, mine)
            return None if reads is None else Rule(reads, (mine,))
    return None


def view(call: Call) -> Rule | None:
    """Sizes of the result are given, and the order of elements stays."""
    source = call.node.args[0]
    axis = call.batch.axis(source)
    if axis is None or not isinstance(source, fx.Node):
        return None
    out, node = shape(call.node), call.node
    if node.target is aten.expand.default:
        dim = axis.dim + len(out) - _dims(source)
        found = Axis(dim, axis.inner)
    else:
        # The batch is a digit of the index of an element: it counts in steps of `step`.
        step = axis.inner * _product(shape(source)[axis.dim + 1 :])
        tails = [_product(out[d + 1 :]) for d in range(len(out))]
        places = [
            d
            for d, tail in enumerate(tails)
            if 0 < tail <= step
            and not step % tail
            and not out[d] % (step // tail * call.batch.count)
        ]
        if not places:
            return None
        dim = places[-1]
        found = Axis(dim, step // tails[dim])
    sizes = node.args[1]
    assert isinstance(sizes, list | tuple)
    each = () if sizes[dim] == -1 else (Sized(1, dim, out[dim] // call.batch.count),)
    return Rule({source: axis}, (found,), each)


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for n in sizes:
        result *= n
    return result


def moves(where: Callable[[Call, int, int], int | None]) -> Special:
    """A view, or copy, of one operand, whose batch dimension goes `where(call, dim, dims)`."""

    def rule(call: Call) -> Rule | None:
        source = call.node.args[0]
        axis = call.batch.axis(source)
        if axis is None or not isinstance(source, fx.Node):
            return None
        dim = where(call, axis.dim, _dims(source))
        return None if dim is None else Rule({source: axis}, (Axis(dim, axis.inner),))

    return rule


def _transposed(call: Call, dim: int, dims: int) -> int:
    a, b = int(call["dim0"]) % dims, int(call["dim1"]) % dims
    return {a: b, b: a}.get(dim, dim)


def _permuted(call: Call, dim: int, dims: int) -> int:
    return [int(d) % dims for d in call["dims"]].index(dim)


SQUEEZES = frozenset({aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims})


def gone_dims(squeeze: fx.Node) -> list[int]:
    """The dimensions that a squeeze takes away: those that it may, and that have one element."""
    source, *given = squeeze.args
    assert isinstance(source, fx.Node)
    size = shape(source)
    over: Any = given[0] if given else range(len(size))
    may = {d % len(size) for d in (over if isinstance(over, Iterable) else (over,))}
    return sorted(d for d in may if size[d] == 1)


def _squeezed(call: Call, dim: int, dims: int) -> int:
    return dim - sum(gone < dim for gone in gone_dims(call.node))


def _unsqueezed(call: Call, dim: int, dims: int) -> int:
    return dim + int(call["dim"] % (dims + 1) <= dim)


def _selected(call: Call, dim: int, dims: int) -> int | None:
    at = call["dim"] % dims
    return None if at == dim else dim - int(at < dim)


def _beside(call: Call, dim: int, dims: int) -> int | None:
    """Something happens along another dimension."""
    return None if call["dim"] % dims == dim else dim


def _ranged(call: Call, dim: int, dims: int) -> int | None:
    """A range of another dimension; or of all samples."""
    source = call.node.args[0]
    assert isinstance(source, fx.Node)
    if call["dim"] % dims != dim:
        return dim
    same = shape(source)[dim] == shape(call.node)[dim]
    return dim if same and call["step"] == 1 else None


def _padded(call: Call, dim: int, dims: int) -> int | None:
    pads = call["pad"]
    at = 2 * (dims - 1 - dim)
    return None if any(pads[at : at + 2]) else dim


def _many(special: Special, results: int) -> Special:
    """The same of each of several results."""

    def rule(call: Call) -> Rule | None:
        found = special(call)
        return None if found is None else Rule(found.reads, found.results * results)

    return rule


SUMS = frozenset({aten.sum.default, aten.sum.dim_IntList})
MEANS = frozenset({aten.mean.default, aten.mean.dim})
"""Reductions whose gradient is the same for all samples."""


def reduced(call: Call) -> Rule | None:
    """A reduction over given dimensions: of each sample, or a sum over the batch."""
    source = call.node.args[0]
    axis = call.batch.axis(source)
    if axis is None or not isinstance(source, fx.Node):
        return None
    dims = _dims(source)
    over = call.dims("dim", dims) if "dim" in call.names else set(range(dims))
    if axis.dim in over:
        return Rule({source: axis}, (Kind.SUM,)) if call.node.target in SUMS | MEANS else None
    kept = _result_dims(call.node) == dims
    dim = axis.dim if kept else axis.dim - sum(d < axis.dim for d in over)
    value = call.node.meta["val"]
    count = len(value) if isinstance(value, list | tuple) else 1
    return Rule({source: axis}, (Axis(dim, axis.inner),) * count)


def cat(call: Call) -> Rule | None:
    """Side by side along another dimension."""
    # Torch leaves out tensors of size [0], whatever the others are, as of a cache without keys.
    nodes = [n for n in call["tensors"] if isinstance(n, fx.Node)]
    parts = [n for n in nodes if list(shape(n)) != [0]]
    axes = [axis for n in parts if (axis := call.batch.axis(n)) is not None]
    if not axes:
        return None
    if call["dim"] % _dims(call.node) == axes[0].dim:
        return None
    return Rule(dict.fromkeys(parts, axes[0]), (axes[0],))


def padded_gradient(call: Call) -> Rule | None:
    """The gradient of a range, or of one element, of another dimension: zeros around it."""
    source, sizes = call["grad_output"], call["input_sizes"]
    axis, dims = call.batch.axis(source), len(call["input_sizes"])
    if axis is None:
        return None
    at = call["dim"] % dims
    whole = "start" in call.names and list(sizes) == list(shape(source))
    if "start" in call.names:
        dim = axis.dim
        if at == dim and not whole:
            return None
    else:
        dim = axis.dim + (at <= axis.dim)
    sized = (Sized(1, dim, sizes[dim] // call.batch.count),)
    return Rule({source: axis}, (Axis(dim, axis.inner),), sized)


def product(left: str, right: str) -> Special:
    """[.., m, k] @ [.., k, n]: by rows, by columns, by matrices; or a sum over the batch."""

    def rule(call: Call) -> Rule | None:
        a, b = call.node_of(left), call.node_of(right)
        if a is None or b is None or a is b:
            return None
        first, second, rows = call.axis(left), call.axis(right), _dims(a) - 2
        axis = first or second
        if axis is None:
            return None
        inner = axis.inner
        if rows and axis.dim == 0:
            return Rule({a: Axis(0, inner), b: Axis(0, inner)}, (Axis(0, inner),))
        if first is not None and first.dim == rows and second is None:
            return Rule({a: first}, (first,))
        if second is not None and second.dim == rows + 1 and first is None:
            return Rule({b: second}, (second,))
        if first in (None, Axis(rows + 1, inner)) and second in (None, Axis(rows, inner)):
            return Rule({a: Axis(rows + 1, inner), b: Axis(rows, inner)}, (Kind.SUM,))
        return None

    return rule


def added_product(left: str, right: str) -> Special:
    """A product, with a bias that is broadcast."""
    plain = product(left, right)

    def rule(call: Call) -> Rule | None:
        found, bias = plain(call), call.node_of("self")
        if found is None or bias is None or not isinstance(found.results[0], Axis):
            return None
        more = aligned(call, [bias], shape(call.node), found.results[0])
        if more is None or not more.keys().isdisjoint(found.reads):
            return None
        return Rule({**found.reads, **more}, found.results)

    return rule


def embedding(call: Call) -> Rule | None:
    indices = call.node_of("indices")
    axis = call.batch.axis(indices)
    return None if axis is None or indices is None else Rule({indices: axis}, (axis,))


def embedding_backward(call: Call) -> Rule | None:
    indices, grad = call.node_of("indices"), call.node_of("grad_output")
    axis = call.batch.axis(indices) or call.batch.axis(grad)
    if axis is None or indices is None or grad is None or call["scale_grad_by_freq"]:
        return None
    return Rule({indices: axis, grad: axis}, (Kind.SUM,))


def over_features(names: Sequence[str], sizes: str, *results: Kind | None) -> Special:
    """A norm over the last dimensions.

    names    operands with a batch
    results  None: with a batch, as the operands
    """

    def rule(call: Call) -> Rule | None:
        given = [n for name in names if (n := call.node_of(name)) is not None]
        axis = next((axis for n in given if (axis := call.batch.axis(n)) is not None), None)
        if axis is None or axis.dim >= _dims(given[0]) - len(call[sizes]):
            return None
        found = tuple(axis if result is None else result for result in results)
        return Rule(dict.fromkeys(given, axis), found)

    return rule


def along(names: Sequence[str], dim: str = "dim", results: int = 1) -> Special:
    """Something happens along another dimension of all of the operands."""

    def rule(call: Call) -> Rule | None:
        given = [n for name in names if (n := call.node_of(name)) is not None]
        axis = next((axis for n in given if (axis := call.batch.axis(n)) is not None), None)
        if axis is None or axis.dim in call.dims(dim, _dims(given[0])):
            return None
        return Rule(dict.fromkeys(given, axis), (axis,) * results)

    return rule


def triangle(call: Call) -> Rule | None:
    source = call.node_of("self")
    axis = call.batch.axis(source)
    if axis is None or source is None or axis.dim >= _dims(source) - 2:
        return None
    return Rule({source: axis}, (axis,))


def samples(
    names: Sequence[str],
    results: Sequence[Kind | bool | None],
    sized: str = "",
    broadcast: Sequence[str] = (),
) -> Special:
    """An op whose operands and results have the batch first, as convolutions and attention have.

    names      operands with a batch
    results    True: with the batch first; None: nothing
    sized      argument that is the number of samples, or a size that begins with it
    broadcast  operands that may have a batch of one, or fewer dimensions and so no batch: the mask
               of an attention may be [length, length]
    """

    def rule(call: Call) -> Rule | None:
        given = [n for name in (*names, *broadcast) if (n := call.node_of(name)) is not None]
        axis = next((axis for n in given if (axis := call.batch.axis(n)) is not None), None)
        if axis is None or axis.dim:
            return None
        reads: dict[fx.Node, Axis | Kind] = {}
        for name in (*names, *broadcast):
            node = call.node_of(name)
            if node is None:
                continue
            if name in broadcast and (_dims(node) < _dims(given[0]) or shape(node)[0] == 1):
                continue
            reads[node] = axis
        for name in call.names:  # what a kernel keeps for its own backward
            node = call.node_of(name)
            if node is not None and call.batch.axes.get(node) is Kind.OWN:
                reads[node] = Kind.OWN
        found = tuple(axis if r is True else r for r in results)
        each: tuple[Sized, ...] = ()
        if sized:
            size = call[sized]
            at, count = (0, size[0]) if isinstance(size, list | tuple) else (None, size)
            each = (Sized(call.names.index(sized), at, count // call.batch.count),)
        return Rule(reads, found, each)  # type: ignore[arg-type]  # False is given by nobody

    return rule


def _with_mask_gradient(special: Special) -> Special:
    """Of an attention whose mask has a gradient: none is asked for, or it is not sliced."""

    def rule(call: Call) -> Rule | None:
        return None if call["grad_input_mask"][3] else special(call)

    return rule


def nll_backward(call: Call) -> Rule | None:
    """[samples, classes]; the gradient of a mean is one number, divided by the weight of all."""
    if call["reduction"] == 0:
        return samples(("grad_output", "self", "target"), (True,))(call)
    return samples(("self", "target"), (True,))(call)


def nll(call: Call) -> Rule | None:
    """Of each sample; a mean is over the batch."""
    return samples(("self", "target"), (True, None))(call) if call["reduction"] == 0 else None


_QKV = ("query", "key", "value")
_OWN = Kind.OWN
ELEMENTWISE = UNTAGGED | {
    aten.alias.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.bernoulli.p,
    aten.rand_like.default,
    aten.randn_like.default,
}
"""Elementwise ops that torch does not tag as pointwise; random ones say where their batch is."""
OVER_BATCH = frozenset(
    {
        aten.native_batch_norm_backward.default,
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit_functional.default,
        aten._batch_norm_with_update_functional.default,
        aten.cudnn_batch_norm.default,
    }
)
"""Ops that compute something of the whole batch, in results with a batch first."""
RESIZES = (
    aten.upsample_nearest2d.default,
    aten._upsample_nearest_exact2d.default,
    aten.upsample_linear1d.default,
    aten.upsample_bilinear2d.default,
    aten.upsample_bicubic2d.default,
    aten.upsample_trilinear3d.default,
)
"""Ops that make images larger or smaller."""
RESIZES_BACKWARD = (
    aten.upsample_nearest2d_backward.default,
    aten._upsample_nearest_exact2d_backward.default,
    aten.upsample_linear1d_backward.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_bicubic2d_backward.default,
    aten.upsample_trilinear3d_backward.default,
)
RULES: dict[object, Special] = {
    **dict.fromkeys(SIZED_VIEWS, view),
    aten.t.default: moves(lambda call, dim, dims: dim if dims < 2 else 1 - dim),
    aten.transpose.int: moves(_transposed),
    aten.permute.default: moves(_permuted),
    aten.unsqueeze.default: moves(_unsqueezed),
    **dict.fromkeys(SQUEEZES, moves(_squeezed)),
    aten.select.int: moves(_selected),
    aten.slice.Tensor: moves(_ranged),
    aten.constant_pad_nd.default: moves(_padded),
    aten.unbind.int: moves(_selected),
    aten.split.Tensor: moves(_beside),
    aten.split_with_sizes.default: moves(_beside),
    aten.cat.default: cat,
    aten.slice_backward.default: padded_gradient,
    aten.select_backward.default: padded_gradient,
    **dict.fromkeys(
        (
            aten.sum.default,
            aten.sum.dim_IntList,
            aten.mean.default,
            aten.mean.dim,
            aten.amax.default,
            aten.amin.default,
            aten.any.dim,
            aten.all.dim,
            aten.argmax.default,
            aten.argmin.default,
            aten.max.dim,
            aten.min.dim,
            aten.prod.dim_int,
            aten.logsumexp.default,
            aten.var.correction,
            aten.std.correction,
            aten.var_mean.correction,
            aten.linalg_vector_norm.default,
        ),
        reduced,
    ),
    aten.mm.default: product("self", "mat2"),
    aten.bmm.default: product("self", "mat2"),
    aten.addmm.default: added_product("mat1", "mat2"),
    aten.baddbmm.default: added_product("batch1", "batch2"),
    aten.embedding.default: embedding,
    aten.embedding_dense_backward.default: embedding_backward,
    aten.native_layer_norm.default: over_features(("input",), "normalized_shape", None, None, None),
    aten.native_layer_norm_backward.default: over_features(
        ("grad_out", "input", "mean", "rstd"), "normalized_shape", None, Kind.SUM, Kind.SUM
    ),
    aten._fused_rms_norm.default: over_features(("input",), "normalized_shape", None, None),
    aten._fused_rms_norm_backward.default: over_features(
        ("grad_out", "input", "rstd"), "normalized_shape", None, Kind.SUM
    ),
    aten._softmax.default: along(("self",)),
    aten._log_softmax.default: along(("self",)),
    aten._softmax_backward_data.default: along(("grad_output", "output")),
    aten._log_softmax_backward_data.default: along(("grad_output", "output")),
    aten.cumsum.default: along(("self",)),
    aten.flip.default: along(("self",), "dims"),
    aten.gather.default: along(("self", "index")),
    aten.topk.default: along(("self",), results=2),
    aten.sort.default: along(("self",), results=2),
    aten.tril.default: triangle,
    aten.triu.default: triangle,
    aten.native_dropout.default: _many(moves(lambda call, dim, dims: dim), 2),
    **dict.fromkeys(OVER_BATCH, samples(("input",), (True, None, None, None, None, None))),
    aten.native_batch_norm_backward.default: samples(("grad_out", "input"), (True, None, None)),
    aten.convolution.default: samples(("input",), (True,)),
    aten.convolution_backward.default: samples(
        ("grad_output", "input"), (True, Kind.SUM, Kind.SUM)
    ),
    aten.native_group_norm.default: samples(("input",), (True, True, True), "N"),
    aten.native_group_norm_backward.default: samples(
        ("grad_out", "input", "mean", "rstd"), (True, Kind.SUM, Kind.SUM), "N"
    ),
    aten.max_pool2d_with_indices.default: samples(("self",), (True, True)),
    aten.max_pool2d_with_indices_backward.default: samples(
        ("grad_output", "self", "indices"), (True,)
    ),
    aten.avg_pool2d.default: samples(("self",), (True,)),
    aten.avg_pool2d_backward.default: samples(("grad_output", "self"), (True,)),
    aten._adaptive_avg_pool2d.default: samples(("self",), (True,)),
    aten._adaptive_avg_pool2d_backward.default: samples(("grad_output", "self"), (True,)),
    **dict.fromkeys(RESIZES, samples(("self",), (True,))),
    **dict.fromkeys(RESIZES_BACKWARD, samples(("grad_output",), (True,), "input_size")),
    aten.nll_loss_forward.default: nll,
    aten.nll_loss_backward.default: nll_backward,
    aten.nll_loss2d_forward.default: nll,
    aten.nll_loss2d_backward.default: nll_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: samples(
        _QKV, (True, True), broadcast=("attn_mask",)
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: samples(
        ("grad_out", *_QKV, "out", "logsumexp"), (True, True, True), broadcast=("attn_mask",)
    ),
    aten._scaled_dot_product_efficient_attention.default: samples(
        _QKV, (True, True, _OWN, _OWN), broadcast=("attn_bias",)
    ),
    aten._scaled_dot_product_efficient_attention_backward.default: _with_mask_gradient(
        samples(
            ("grad_out_", *_QKV, "out", "logsumexp"),
            (True, True, True, None),
            broadcast=("attn_bias",),
        )
    ),
    aten._scaled_dot_product_flash_attention.default: samples(
        _QKV, (True, True, _OWN, _OWN, _OWN, _OWN, _OWN, _OWN, _OWN)
    ),
    aten._scaled_dot_product_flash_attention_backward.default: samples(
        ("grad_out", *_QKV, "out", "logsumexp"), (True, True, True)
    ),
    aten._scaled_dot_product_cudnn_attention.default: samples(
        _QKV, (True, True, _OWN, _OWN, _OWN, _OWN, _OWN, _OWN, _OWN), broadcast=("attn_bias",)
    ),
    aten._scaled_dot_product_cudnn_attention_backward.default: samples(
        ("grad_out", *_QKV, "out", "logsumexp"), (True, True, True), broadcast=("attn_bias",)
    ),
}
"""Op -> how it runs over slices of the batch, where it is not elementwise."""
