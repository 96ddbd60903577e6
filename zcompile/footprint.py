"""What the calls of a graph hold of the compute device beside the arena: bytes, node by node.

A value takes bytes from the node that makes it to its last reader, views of it included, as the
executor does: a region that reads a value last owns it, and lets go of it right after that reader.
The storages count, not the tensors: views, in-place results and the parts of a tuple share one.
While a node runs, what it reads, what it makes and all that is read later are held at once.

    %a = aten.mm(%x, %w)       a                        x: the caller's, w: a slot of the arena
    %b = aten.relu(%a)         a b
    %c = aten.neg(%b)            b c                    %a died in %b
    return (%c)                    c

A graph holds what it makes itself, and the gradients that backward is called with. Not counted:
inputs of the model, buffers and constants, slots of the arena, and what a kernel takes for itself
while it runs. A value that forward makes and backward reads is held in between; what forward
returns to its caller and backward does not read is the caller's once forward has ended.

A gradient that goes home is held until its departure is joined, which happens at a planned point
and not when the transfer happens to end: before one leaves, the oldest are joined until all that
are under way take no more than `Footprint.departing_bytes` together (twice the largest, so that
one leaves while the next is made). What is still under way at the end is held by what comes next.

Times are node indices, sizes are bytes; a dynamic size counts as it was when the graph was traced.

To ask what a decision would change, give `Footprint.curve` what it takes away or adds:

    held = footprint(graph, plan.params)
    value = max(held.saved, key=lambda v: v.nbytes)
    held.peak                                              # bytes
    max(held.curve([value.absent(held.boundary)]))         # were it not kept for backward
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import getitem

import torch
from torch import Tensor, fx

from zcompile import ops
from zcompile.graph import is_ours, module_of, output_of, phase_of, storage_sources
from zcompile.specs import NodeName, ParamSpec, Phase
from zcompile.torch_private import hint, is_tangent

KEEP_STRIDES = frozenset({
    torch.ops.aten.copy.default,
    torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select_scatter.default,
    torch.ops.aten.diagonal_scatter.default,
    torch.ops.aten.as_strided_scatter.default,
})  # fmt: skip
"""Their result lies as the first argument does, and its storage has room for the offset of that,
which the stand-ins of tracing may leave out."""

DEPARTURES = frozenset({ops.reduce_grad})
"""Ops whose first argument leaves for the home of the parameter behind the second."""


@dataclass(frozen=True)
class Change:
    """`nbytes` more (or, if negative, fewer) are held while the nodes `first` to `last` run."""

    first: int
    last: int
    nbytes: int


@dataclass(frozen=True)
class Held:
    """A storage that the calls of a graph hold.

    maker    the node that makes it; of what a call is given, its placeholder
    part     which result of a node that has several
    nbytes   of the whole storage
    first    index of the maker
    last     index of the last node that it is alive in, that one included
    readers  indices of all nodes that read it or a view of it, ascending
    """

    maker: fx.Node
    part: int
    nbytes: int
    first: int
    last: int
    readers: tuple[int, ...]

    def absent(self, boundary: int) -> Change:
        """Were it not kept from its last reader in forward to its first one in backward."""
        before = max((r for r in self.readers if r < boundary), default=self.first)
        after = min((r for r in self.readers if r >= boundary), default=self.last + 1)
        return Change(before + 1, after - 1, -self.nbytes)


@dataclass(frozen=True)
class Footprint:
    """nodes          of the graph, in order
    boundary         index of the first node of backward that computes; of a graph of one phase,
                     the number of its nodes
    values           what is held, in the order of `first`
    departing_bytes  that gradients under way may take before the oldest is joined
    left_bytes       of gradients that are still under way when the graph has ended
    """

    nodes: tuple[fx.Node, ...]
    boundary: int
    values: tuple[Held, ...]
    of: Mapping[fx.Node, tuple[Held, ...]]
    departing_bytes: int = 0
    left_bytes: int = 0

    def curve(self, changes: Iterable[Change] = ()) -> list[int]:
        """Bytes held while each node runs, were it not for `changes`."""
        change = [0] * (len(self.nodes) + 1)
        own = (Change(v.first, v.last, v.nbytes) for v in self.values)
        for c in (*own, *changes):
            if c.first <= c.last:
                change[c.first] += c.nbytes
                change[c.last + 1] -= c.nbytes
        return list(accumulate(change[:-1]))

    @cached_property
    def peak(self) -> int:
        """The most bytes held at once."""
        return max(self.curve(), default=0)

    @cached_property
    def peak_at(self) -> int:
        """Index of the first node at which the most is held."""
        return self.curve().index(self.peak)

    @cached_property
    def saved(self) -> tuple[Held, ...]:
        """Made in forward and read in backward."""
        return tuple(
            v for v in self.values if v.first < self.boundary <= v.last and not is_tangent(v.maker)
        )

    @property
    def saved_bytes(self) -> int:
        return sum(v.nbytes for v in self.saved)

    def holders(self, index: int) -> list[Held]:
        """Who holds what while node `index` runs, the largest first."""
        alive = [v for v in self.values if v.first <= index <= v.last]
        return sorted(alive, key=lambda v: -v.nbytes)

    def told(self, index: int) -> list[tuple[str, int]]:
        """The holders of node `index` for people: name with its module, bytes."""
        return [
            (f"{v.maker.name} ({module})" if (module := module_of(v.maker)) else v.maker.name,
             v.nbytes)
            for v in self.holders(index)
        ]  # fmt: skip

    def handed_over(self, names: Iterable[str]) -> "Given":
        """What a graph that has these nodes as placeholders is given; for `footprint` of it."""
        wanted = set(names)
        return {
            NodeName(node.name): tuple((f"{v.maker.name}.{v.part}", v.nbytes) for v in held)
            for node, held in self.of.items()
            if node.name in wanted and node.op != "placeholder"
        }


Given = Mapping[NodeName, tuple[tuple[str, int], ...]]
"""Placeholder of a backward graph -> the storages it holds: a key for each, and its bytes."""


def footprint(
    graph: fx.Graph,
    params: Mapping[NodeName, ParamSpec],
    given: Given | None = None,
    device: torch.device | None = None,
) -> Footprint:
    """What the calls of a graph hold: of a joint graph, or of one phase of it.

    params  handle placeholder -> what kind of parameter is behind it
    given   of a backward graph: what its forward kept for it (`Footprint.handed_over`)
    device  whose memory counts; None: of any
    """
    return _Walk(graph, params, given or {}, device).footprint()


@dataclass
class _Storage:
    maker: fx.Node
    part: int
    nbytes: int
    first: int
    last: int
    readers: set[int]


class _Walk:
    """The nodes of a graph, one after the other; who holds which storage."""

    def __init__(self, graph: fx.Graph, params: Mapping[NodeName, ParamSpec], given: Given,
                 device: torch.device | None) -> None:  # fmt: skip
        self.nodes: tuple[fx.Node, ...] = tuple(graph.nodes)
        self.params, self.given, self.device = params, given, device
        self.where = {node: index for index, node in enumerate(self.nodes)}
        self.boundary = next(
            (i for i, n in enumerate(self.nodes)
             if n.op == "call_function" and phase_of(n) is Phase.BACKWARD),
            len(self.nodes),
        )  # fmt: skip
        if all(n.op != "call_function" or i >= self.boundary for i, n in enumerate(self.nodes)):
            self.boundary = len(self.nodes)
        self.results = set(output_of(graph).all_input_nodes)
        self.storages: list[_Storage] = []
        self.keyed: dict[str, _Storage] = {}
        self.parts: dict[fx.Node, list[list[_Storage]]] = {}

    def footprint(self) -> Footprint:
        for index, node in enumerate(self.nodes):
            if node.op == "placeholder":
                self.parts[node] = [self._placed(index, node)]
            elif node.op == "call_function" and not is_ours(node):
                self.parts[node] = self._made(index, node)
        for node in self.parts:
            self._read(node)
        departing, left = self._depart()
        kept = {id(s): Held(s.maker, s.part, s.nbytes, s.first, s.last, tuple(sorted(s.readers)))
                for s in self.storages}  # fmt: skip
        of = {node: tuple(kept[id(s)] for s in _unique(parts))
              for node, parts in self.parts.items() if any(parts)}  # fmt: skip
        values = sorted(kept.values(), key=lambda v: v.first)
        return Footprint(self.nodes, self.boundary, tuple(values), of, departing, left)

    def _placed(self, index: int, node: fx.Node) -> list[_Storage]:
        """What a call is given and holds alone."""
        if is_tangent(node):
            joint = self.boundary < len(self.nodes)
            return self._fresh(self.boundary if joint else 0, node, 0, node.meta.get("val"))
        found = []
        for key, nbytes in self.given.get(NodeName(node.name), ()):
            if key not in self.keyed:
                self.keyed[key] = _Storage(node, 0, nbytes, 0, index, set())
                self.storages.append(self.keyed[key])
            found.append(self.keyed[key])
        return found

    def _made(self, index: int, node: fx.Node) -> list[list[_Storage]]:
        """The storages of each part of a result: fresh ones, or those of what it is a view of."""
        if node.target is getitem:
            parent, part = node.args
            parts = self.parts.get(parent, [[]]) if isinstance(parent, fx.Node) else [[]]
            chosen = parts[part] if isinstance(part, int) and len(parts) > 1 else parts[0]
            return [chosen]
        value = node.meta.get("val")
        values = list(value) if isinstance(value, list | tuple) else [value]
        made = []
        for part, (result, sources) in enumerate(zip(values, storage_sources(node, len(values)),
                                                     strict=True)):  # fmt: skip
            shared = _unique(p for s in sources for p in self.parts.get(s, ()))
            made.append(shared if sources else self._fresh(index, node, part, result))
        return made

    def _fresh(self, index: int, node: fx.Node, part: int, value: object) -> list[_Storage]:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return []
        nbytes = hint(value.untyped_storage().nbytes())
        if node.target in KEEP_STRIDES and isinstance(node.args[0], fx.Node):
            lies: Tensor = node.args[0].meta["val"]
            steps = zip(lies.size(), lies.stride(), strict=True)
            span = 1 + sum((hint(n) - 1) * hint(step) for n, step in steps)
            nbytes = (hint(lies.storage_offset()) + span) * value.dtype.itemsize
        if not nbytes or (self.device is not None and value.device != self.device):
            return []
        self.storages.append(_Storage(node, part, nbytes, index, index, set()))
        return [self.storages[-1]]

    def _read(self, node: fx.Node) -> None:
        """Every reader of a node holds what the node holds; a result is held until the end."""
        held = _unique(self.parts[node])
        if not held:
            return
        last = self.where[node]
        readers = {self.where[user] for user in node.users if user.op != "output"}
        if node in self.results or (node.op == "placeholder" and not readers):
            last = len(self.nodes) - 1 if self._ends_last(node) else self.boundary - 1
        for storage in held:
            storage.readers |= readers
            storage.last = max(storage.last, last, *readers, storage.first)

    def _ends_last(self, node: fx.Node) -> bool:
        """Whether what is returned with `node` is returned at the very end."""
        joint = self.boundary < len(self.nodes)
        return not joint or phase_of(node) is Phase.BACKWARD or node.op == "placeholder"

    def _depart(self) -> tuple[int, int]:
        """Gradients on their way are held until they are joined, oldest first."""
        leaving = [n for n in self.nodes if n.op == "call_function" and n.target in DEPARTURES]
        sizes = {node: self._travelling_bytes(node) for node in leaving}
        most = 2 * max(sizes.values(), default=0)
        under_way: list[tuple[fx.Node, list[_Storage]]] = []
        for node in leaving:
            index, carried = self.where[node], self._carried(node)
            while under_way and sum(sizes[n] for n, _ in under_way) + sizes[node] > most:
                self._hold(under_way.pop(0)[1], index)
            under_way.append((node, carried))
        end = len(self.nodes) - 1
        for _, storages in under_way:
            self._hold(storages, end)
        left = {id(s): s.nbytes for _, storages in under_way for s in storages}
        return most, sum(left.values())

    def _hold(self, storages: Sequence[_Storage], until: int) -> None:
        for storage in storages:
            storage.last = max(storage.last, until)

    def _travelling_bytes(self, node: fx.Node) -> int:
        grad, handle = node.args[0], node.args[1]
        assert isinstance(grad, fx.Node)
        assert isinstance(handle, fx.Node)
        value: Tensor = grad.meta["val"]
        return hint(value.numel()) * value.dtype.itemsize

    def _carried(self, node: fx.Node) -> list[_Storage]:
        """What a departure holds: the gradient, or a copy of it that lies as the parameter does."""
        grad, handle = node.args[0], node.args[1]
        assert isinstance(grad, fx.Node)
        assert isinstance(handle, fx.Node)
        value: Tensor = grad.meta["val"]
        layout = self.params[NodeName(handle.name)].layout
        stride = layout.stride if layout.dense else value.contiguous().stride()
        as_it_is = value.stride() == tuple(stride) and value.dtype is layout.dtype
        if as_it_is or not any(self.parts.get(grad, ())):
            return _unique(self.parts.get(grad, ()))
        index = self.where[node]
        self.storages.append(_Storage(node, 0, self._travelling_bytes(node), index, index, {index}))
        return [self.storages[-1]]


def _unique(parts: Iterable[Sequence[_Storage]]) -> list[_Storage]:
    return list({id(s): s for part in parts for s in part}.values())
