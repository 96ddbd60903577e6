"""Who holds which storage, from where to where in a graph: the walk that `footprint.py` stands on.

Aliasing is read from the schemas of ops, bytes from the stand-ins of tracing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import getitem

import torch
from torch import Tensor, fx

from zcompile.ir import ops
from zcompile.ir.graph import KEEP_STRIDES, is_ours, output_of, phase_of, storage_sources
from zcompile.ir.torch_compat import hint, is_tangent
from zcompile.ir.types import NodeName, ParamSpec, Phase
from zcompile.memory.under_way import Leaving, plan_joins

DEPARTURES = ops.SINKS
"""Ops whose first argument leaves for the home of the parameter behind the second."""


Given = Mapping[NodeName, tuple[tuple[str, int], ...]]
"""Placeholder of a backward graph -> the storages it holds: a key for each, and its bytes."""

Size = Callable[[int | torch.SymInt], int]
"""A size as an int: `hint`, as it was when the graph was traced, or as it is in a call."""


@dataclass
class Storage:
    """As `footprint.Held`, while it is being found."""

    maker: fx.Node
    part: int
    nbytes: int
    first: int
    last: int
    readers: set[int]


class StorageWalk:
    """The nodes of a graph, one after the other; who holds which storage."""

    def __init__(
        self,
        graph: fx.Graph,
        params: Mapping[NodeName, ParamSpec],
        given: Given,
        size: Size = hint,
    ) -> None:
        self.nodes: tuple[fx.Node, ...] = tuple(graph.nodes)
        self.params, self.given, self.size = params, given, size
        gathered = (n.meta["val"] for n in self.nodes if n.target in (ops.fetch, ops.gather))
        self.device = next((value.device for value in gathered), None)
        self.where = {node: index for index, node in enumerate(self.nodes)}
        self.boundary = next(
            (i for i, n in enumerate(self.nodes)
             if n.op == "call_function" and phase_of(n) is Phase.BACKWARD),
            len(self.nodes),
        )  # fmt: skip
        if all(n.op != "call_function" or i >= self.boundary for i, n in enumerate(self.nodes)):
            self.boundary = len(self.nodes)
        self.results = set(output_of(graph).all_input_nodes)
        self.storages: list[Storage] = []
        self.keyed: dict[str, Storage] = {}
        self.parts: dict[fx.Node, list[list[Storage]]] = {}

    def walk(
        self,
    ) -> tuple[dict[fx.Node, int], int, frozenset[fx.Node], dict[fx.Node, int]]:
        """Per departure the bytes that may be under way with it, those that are held at the end,
        the departures that are `Level.alone`, and per departure its `Level.carried`."""
        for index, node in enumerate(self.nodes):
            if node.op == "placeholder":
                self.parts[node] = [self._placed(index, node)]
            elif node.op == "call_function" and not is_ours(node):
                self.parts[node] = self._made(index, node)
        for node in self.parts:
            self._read(node)
        return self._depart()

    def _placed(self, index: int, node: fx.Node) -> list[Storage]:
        """What a call is given and holds alone."""
        if is_tangent(node):
            joint = self.boundary < len(self.nodes)
            return self._fresh(self.boundary if joint else 0, node, 0, node.meta.get("val"))
        found = []
        for key, nbytes in self.given.get(NodeName(node.name), ()):
            if key not in self.keyed:
                self.keyed[key] = Storage(node, 0, nbytes, 0, index, set())
                self.storages.append(self.keyed[key])
            found.append(self.keyed[key])
        return found

    def _made(self, index: int, node: fx.Node) -> list[list[Storage]]:
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
            shared = unique(p for s in sources for p in self.parts.get(s, ()))
            made.append(shared if sources else self._fresh(index, node, part, result))
        return made

    def _fresh(self, index: int, node: fx.Node, part: int, value: object) -> list[Storage]:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return []
        size = self.size
        nbytes = size(value.untyped_storage().nbytes())
        if node.target in KEEP_STRIDES and isinstance(node.args[0], fx.Node):
            lies: Tensor = node.args[0].meta["val"]
            steps = zip(lies.size(), lies.stride(), strict=True)
            span = 1 + sum((size(n) - 1) * size(step) for n, step in steps)
            nbytes = (size(lies.storage_offset()) + span) * value.dtype.itemsize
        if not nbytes or (self.device is not None and value.device != self.device):
            return []
        self.storages.append(Storage(node, part, nbytes, index, index, set()))
        return [self.storages[-1]]

    def _read(self, node: fx.Node) -> None:
        """Every reader of a node holds what the node holds; a result is held until the end."""
        held = unique(self.parts[node])
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

    def _depart(
        self,
    ) -> tuple[dict[fx.Node, int], int, frozenset[fx.Node], dict[fx.Node, int]]:
        """Gradients on their way are held until they are joined. In a joint graph, in which it is
        still to be chosen what is held, no more are than must be."""
        nodes = [n for n in self.nodes if n.op == "call_function" and n.target in DEPARTURES]
        carried = [self._carried(node) for node in nodes]
        leaving = [
            Leaving(self.where[node], departing_bytes(node, self.params),
                    {id(s): (s.nbytes, s.last) for s in storages})
            for node, storages in zip(nodes, carried, strict=True)
        ]  # fmt: skip
        alone = self._alone(nodes, carried)
        joins = plan_joins(leaving, self._curve(), fills=self.boundary == len(self.nodes))
        for storage in unique(carried):
            storage.last = max(storage.last, joins.until[id(storage)])
        left = sum(s.nbytes for s in unique(carried) if id(s) in joins.left)
        lasts = {id(s): node for node, found in zip(nodes, carried, strict=True) for s in found}
        freed = dict.fromkeys(nodes, 0)
        for storage in unique(carried):
            freed[lasts[id(storage)]] += storage.nbytes
        return dict(zip(nodes, joins.most, strict=True)), left, alone, freed

    def _alone(
        self, nodes: Sequence[fx.Node], carried: Sequence[Sequence[Storage]]
    ) -> frozenset[fx.Node]:
        """The whole gradients that are one storage each, as large as they are, made by compute and
        held by nobody once they have left."""
        times = Counter(id(s) for storages in carried for s in storages)
        return frozenset(
            node
            for node, storages in zip(nodes, carried, strict=True)
            if node.target is ops.reduce_grad and len(storages) == 1
            for storage in storages
            if storage.nbytes == departing_bytes(node, self.params)
            and storage.maker.op == "call_function" and storage.maker is not node
            and storage.last <= self.where[node] and times[id(storage)] == 1
        )  # fmt: skip

    def _curve(self) -> list[int]:
        """Bytes held while each node runs, without what is only on its way."""
        change = [0] * (len(self.nodes) + 1)
        for storage in self.storages:
            change[storage.first] += storage.nbytes
            change[storage.last + 1] -= storage.nbytes
        return list(accumulate(change[:-1]))

    def _carried(self, node: fx.Node) -> list[Storage]:
        """What a departure holds: the gradient, or a copy of it that lies as the parameter does."""
        grad, handle = node.args[0], node.args[1]
        assert isinstance(grad, fx.Node)
        assert isinstance(handle, fx.Node)
        value: Tensor = grad.meta["val"]
        layout = self.params[NodeName(handle.name)].layout
        whole = node.target is ops.reduce_grad and layout.dense  # a tile is contiguous
        stride = layout.stride if whole else value.contiguous().stride()
        as_it_is = value.stride() == tuple(stride) and value.dtype is layout.dtype
        if as_it_is or not any(self.parts.get(grad, ())):
            return unique(self.parts.get(grad, ()))
        index = self.where[node]
        self.storages.append(Storage(node, 0, _dense_bytes(value), index, index, {index}))
        return [self.storages[-1]]


def departing_bytes(node: fx.Node, params: Mapping[NodeName, ParamSpec]) -> int:
    """That count for a departure as long as it is under way: of a whole gradient what its parameter
    takes, gaps included; of a tile its own."""
    grad, handle, *tile = node.args
    assert isinstance(grad, fx.Node)
    assert isinstance(handle, fx.Node)
    value: Tensor = grad.meta["val"]
    if tile:
        return _dense_bytes(value)
    return params[NodeName(handle.name)].layout.nbytes


def _dense_bytes(value: Tensor) -> int:
    """Of its elements, without gaps."""
    return hint(value.numel()) * value.dtype.itemsize


def unique(parts: Iterable[Sequence[Storage]]) -> list[Storage]:
    return list({id(s): s for part in parts for s in part}.values())
