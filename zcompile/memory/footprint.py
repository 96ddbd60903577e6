"""Counts the bytes that calls of a graph have live outside the arena, node by node.

A value takes bytes from the node that makes it to its last reader, views of it included, as in the
executor: a region that reads a value last owns it, and drops it right after that reader. Storages
count, not tensors: views, in-place results and the parts of a tuple share one. While a node runs,
its operands, its results and all values that are read later are live at once.

    %a = aten.mm(%x, %w)       a                        x: the caller's, w: a slot of the arena
    %b = aten.relu(%a)         a b
    %c = aten.neg(%b)            b c                    %a died in %b
    return (%c)                    c

Counted are values that the graph makes, and the gradients that backward is called with. Not counted
are inputs of the model, buffers and constants, slots of the arena, tensors on another device than
gathered parameters, and the workspace of a kernel. A value that forward makes and backward reads is
live in between; a value that forward returns and backward does not read is the caller's once
forward has ended.

A gradient that is sent to its entry is live until its transfer is joined (waited for). That happens
at a planned point, not when the transfer happens to end: before a gradient is sent, the oldest are
joined until all in flight take no more than `Footprint.departing` bytes. Gradients in flight at the
end belong to the footprint of the step (`step_footprint.py`).

Times are node indices, sizes are bytes; a dynamic size counts as it was when the graph was traced,
or as `size` says: a call is counted at its own sizes before it is carried out (`sized.py`).
Aliasing is read from the schemas of ops, bytes from the fake tensors of tracing.

The bytes beside each line of a dump are counted in the same way, with the slots of gathered
parameters (`footprint(..., slots=True)`).

A fusion (`ir/fusions.py`) is one call: what it reads lives until it is over. Once it is compiled,
its results begin to live with it, and what it takes at its peak beyond them is a storage of its
own; as long as it is not, its nodes count one by one.

The file has four parts: when gradients in flight are joined (`plan_joins`), who keeps which storage
alive (`StorageWalk`), the footprint of a graph, and the live bytes of a schedule, instruction by
instruction (`memory_profile`).
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import getitem
from types import MappingProxyType

import torch
from torch import Tensor, fx

from zcompile.errors import quoted
from zcompile.ir import ops
from zcompile.ir.fusions import fused_of, fusion_of, fusions_of, made_by
from zcompile.ir.graph import (
    KEEP_STRIDES,
    is_compute,
    module_of,
    output_of,
    phase_of,
    region_of,
    storage_sources,
)
from zcompile.ir.memory_curve import MemoryCurve
from zcompile.ir.schedule import Register, Schedule
from zcompile.ir.torch_compat import hint, is_tangent, keeps_tangents
from zcompile.ir.types import LiveBytes, MemoryProfile, NodeName, ParamSpec, Phase
from zcompile.memory.live_bytes import live_bytes


@dataclass(frozen=True)
class Departure:
    """A gradient that is sent to its entry.

    at      index of the node that sends it
    nbytes  that travel
    holds   storages that it keeps alive: key -> (bytes, index of the last node that needs them
            anyway)
    """

    at: int
    nbytes: int
    holds: Mapping[Hashable, tuple[int, int]]


@dataclass(frozen=True)
class JoinPlan:
    """The planned points at which gradients in flight are joined.

    most   per gradient, bytes that may be in flight once it is sent, its own included
    until  storage -> index of the node before which it is joined, or of the last of all
    left   storages that are in flight when the last node is over
    """

    most: tuple[int, ...]
    until: Mapping[Hashable, int]
    left: frozenset[Hashable]


def plan_joins(leaving: Sequence[Departure], held: Sequence[int], fills: bool) -> JoinPlan:
    """When gradients in flight are joined. Pure.

    Before a gradient is sent, the oldest in flight are joined until the bytes in flight are within
    the plan. Twice the largest gradient is always within: one is in flight while the next is made.
    More is where a call has fewer bytes live than at its peak: live bytes are highest where
    backward begins, and fall as it goes on, so that a slow link may fall behind compute ever
    further.

        live beside them    9 8 6 4 2      of a peak of 11, at the nodes after each gradient
        may be in flight    2 3 5 7 9

    held   bytes per node, without storages that only a gradient in flight keeps alive
    fills  whether the room below the peak may be filled
    """
    end = len(held) - 1
    nexts = [*(gradient.at for gradient in leaving), end][1:]
    tight = _joined(leaving, None, nexts, [0] * len(leaving), end)
    if not fills or not leaving:
        return tight
    peak = max(_with(held, leaving, tight.until))
    room = [
        peak - max(held[gradient.at + 1 : then + 1], default=peak)
        for gradient, then in zip(leaving, nexts, strict=True)
    ]
    return _joined(leaving, tight.most, nexts, room, end)


def _joined(
    leaving: Sequence[Departure],
    allowed: Sequence[int] | None,
    nexts: Sequence[int],
    room: Sequence[int],
    end: int,
) -> JoinPlan:
    """Simulate sending and joining.

    allowed  per gradient, bytes that may be in flight in any case; None: twice the largest in
             flight
    nexts    per gradient, index of the node that sends the next, or of the last node
    room     per gradient, bytes free until the next is sent
    """
    under_way: deque[Departure] = deque()
    most: list[int] = []
    until: dict[Hashable, int] = {}
    largest, joined = 2 * max((g.nbytes for g in leaving), default=0), False
    for number, (gradient, then, free) in enumerate(zip(leaving, nexts, room, strict=True)):
        under_way.append(gradient)
        while len(under_way) > 1:
            sizes = [g.nbytes for g in under_way]
            least = 2 * max(sizes) if allowed is None else allowed[number]
            if sum(sizes) <= least or _only_held_by(under_way, then) <= free:
                break
            until |= dict.fromkeys(under_way.popleft().holds, gradient.at)
            joined = True
        sizes = [g.nbytes for g in under_way]
        # As long as none had to be joined, what is left of calls before may be under way as well.
        most.append(sum(sizes) if joined else max(sum(sizes), largest))
    left = frozenset(key for gradient in under_way for key in gradient.holds)
    return JoinPlan(tuple(most), until | dict.fromkeys(left, end), left)


def _only_held_by(under_way: Iterable[Departure], then: int) -> int:
    """Bytes of storages that only gradients in flight keep alive at node `then`."""
    held = {key: row for gradient in under_way for key, row in gradient.holds.items()}
    return sum(nbytes for nbytes, last in held.values() if last < then)


def _with(
    held: Sequence[int], leaving: Sequence[Departure], until: Mapping[Hashable, int]
) -> list[int]:
    """Bytes per node, with storages that gradients in flight keep alive."""
    rows = {key: row for gradient in leaving for key, row in gradient.holds.items()}
    lives = ((last + 1, until[key], nbytes) for key, (nbytes, last) in rows.items())
    return [n + more for n, more in zip(held, live_bytes(lives, len(held)), strict=True)]


DEPARTURES = ops.SINKS
"""Ops that send their first argument to the entry of the parameter behind the second."""


Given = Mapping[NodeName, tuple[tuple[str, int], ...]]
"""Placeholder of a backward graph -> the storages of its value: a key for each, and its bytes."""

Size = Callable[[int | torch.SymInt], int]
"""Evaluates a size as an int: `hint`, as it was when the graph was traced, or as it is in a
call."""


@dataclass(eq=False)
class Storage:
    """The lifetime of a storage.

    maker  the node that makes it; its placeholder, if a call is given it
    part   number of the result, of a node that has several
    first  index of the maker
    last   index of the last node that it is alive in, that one included; grows while it is found
    """

    maker: fx.Node
    part: int
    nbytes: int
    first: int
    last: int


SLOTTED = (ops.gather, ops.fetch, ops.wait)
"""Ops whose results lie in slots of the arena."""


class StorageWalk:
    """Finds the lifetimes of the storages of a graph, node after node.

    slots     whether gathered parameters count too
    boundary  index of the first node of backward that computes; number of nodes, if there is one
              phase
    parts     node -> storages of each of its results
    """

    def __init__(
        self,
        graph: fx.Graph,
        params: Mapping[NodeName, ParamSpec],
        given: Given,
        size: Size = hint,
        slots: bool = False,
    ) -> None:
        self.nodes: tuple[fx.Node, ...] = tuple(graph.nodes)
        self.params, self.given, self.size, self.slots = params, given, size, slots
        gathered = (n.meta["val"] for n in self.nodes if n.target in (ops.fetch, ops.gather))
        self.device = next((value.device for value in gathered), None)
        self.where = {node: index for index, node in enumerate(self.nodes)}
        self.boundary = next(
            (
                i
                for i, n in enumerate(self.nodes)
                if n.op == "call_function" and phase_of(n) is Phase.BACKWARD
            ),
            len(self.nodes),
        )
        if all(n.op != "call_function" or i >= self.boundary for i, n in enumerate(self.nodes)):
            self.boundary = len(self.nodes)
        self.results = set(output_of(graph).all_input_nodes)
        fusions = fusions_of(self.nodes)
        self.ends = {number: self.where[members[-1]] for number, members in fusions.items()}
        self.begins = {number: self.where[members[0]] for number, members in fusions.items()}
        self.made = {_maker(n) for members in fusions.values() for n in made_by(members)}
        self.storages: list[Storage] = []
        self.keyed: dict[str, Storage] = {}
        self.parts: dict[fx.Node, list[list[Storage]]] = {}

    def walk(
        self,
    ) -> tuple[dict[fx.Node, int], int, frozenset[fx.Node], dict[fx.Node, int]]:
        """Find the lifetimes.

        Returns, per departure, the bytes that may be in flight once it is sent; the bytes in flight
        at the end; the departures that are `LiveBytes.alone`; and, per departure, its
        `LiveBytes.carried`.
        """
        for index, node in enumerate(self.nodes):
            if node.op == "placeholder":
                self.parts[node] = [self._placed(index, node)]
            elif is_compute(node) or (self.slots and node.target in SLOTTED):
                self.parts[node] = self._made(index, node)
                if (number := fusion_of(node)) is not None and index == self.ends[number]:
                    self._work_within(index, node)
        for node in self.parts:
            self._read(node)
        return self._depart()

    def _placed(self, index: int, node: fx.Node) -> list[Storage]:
        """Storages of a placeholder that only the call keeps alive."""
        if is_tangent(node):
            joint = self.boundary < len(self.nodes)
            return self._fresh(self.boundary if joint else 0, node, 0, node.meta.get("val"))
        found = []
        for key, nbytes in self.given.get(NodeName(node.name), ()):
            if key not in self.keyed:
                self.keyed[key] = Storage(node, 0, nbytes, 0, index)
                self.storages.append(self.keyed[key])
            found.append(self.keyed[key])
        return found

    def _made(self, index: int, node: fx.Node) -> list[list[Storage]]:
        """Storages of each result of a call: fresh ones, or those of the arguments that it is a
        view of."""
        if node.target is getitem:
            parent, part = node.args
            parts = self.parts.get(parent, [[]]) if isinstance(parent, fx.Node) else [[]]
            chosen = parts[part] if isinstance(part, int) and len(parts) > 1 else parts[0]
            return [chosen]
        value = node.meta.get("val")
        values = list(value) if isinstance(value, list | tuple) else [value]
        made = []
        number = fusion_of(node)
        fused = fused_of(node) is not None
        for part, (result, sources) in enumerate(
            zip(values, storage_sources(node, len(values)), strict=True)
        ):
            shared = unique(p for s in sources for p in self.parts.get(s, ()))
            if sources:
                made.append(shared)
            elif fused and number is not None:
                outlives = (node, part) in self.made
                first = self.begins[number]
                made.append(self._fresh(first, node, part, result) if outlives else [])
            else:
                made.append(self._fresh(index, node, part, result))
        return made

    def _work_within(self, index: int, node: fx.Node) -> None:
        """Add what a compiled fusion takes at its peak beyond its results. `node`: its last."""
        fused, number = fused_of(node), fusion_of(node)
        if fused is None or number is None:
            return
        first = self.begins[number]
        made = unique(p for n in self.nodes[first : index + 1] for p in self.parts[n])
        made = [s for s in made if (s.maker, s.part) in self.made and s.first == first]
        nbytes = fused.nbytes - sum(s.nbytes for s in made)
        if nbytes > 0:
            self.storages.append(Storage(self.nodes[first], 0, nbytes, first, index))

    def _until(self, reader: fx.Node) -> int:
        """Index of the node at which a reader is over: the last of its fusion, if it is in one."""
        number = fusion_of(reader)
        return self.where[reader] if number is None else self.ends[number]

    def _fresh(self, index: int, node: fx.Node, part: int, value: object) -> list[Storage]:
        """The new storage of one result; none for an empty value, or one on another device."""
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return []
        size = self.size
        nbytes = size(value.untyped_storage().nbytes())
        if node.target in KEEP_STRIDES and isinstance(node.args[0], fx.Node):
            source: Tensor = node.args[0].meta["val"]
            shown = zip(source.size(), source.stride(), strict=True)
            if not any(size(step) == 0 and size(n) > 1 for n, step in shown):
                nbytes = size(source.untyped_storage().nbytes())
        if not nbytes or (self.device is not None and value.device != self.device):
            return []
        self.storages.append(Storage(node, part, nbytes, index, index))
        return [self.storages[-1]]

    def _read(self, node: fx.Node) -> None:
        """Prolong the storages of a node to its readers; those of a result, and of what torch
        keeps, to the end of its phase."""
        held = unique(self.parts[node])
        if not held:
            return
        last = self._until(node)
        readers = {self._until(user) for user in node.users if user.op != "output"}
        kept = is_tangent(node) and keeps_tangents()
        if node in self.results or kept or (node.op == "placeholder" and not readers):
            last = len(self.nodes) - 1 if self._ends_last(node) else self.boundary - 1
        for storage in held:
            storage.last = max(storage.last, last, *readers, storage.first)

    def _ends_last(self, node: fx.Node) -> bool:
        """Whether `node`, a result, is returned at the very end, and not at the end of forward."""
        joint = self.boundary < len(self.nodes)
        return not joint or phase_of(node) is Phase.BACKWARD or node.op == "placeholder"

    def _depart(
        self,
    ) -> tuple[dict[fx.Node, int], int, frozenset[fx.Node], dict[fx.Node, int]]:
        """Prolong storages of gradients to the nodes before which they are joined.

        In a joint graph, in which saved values are still to be chosen, no more are in flight than
        must be.
        """
        nodes = [n for n in self.nodes if n.op == "call_function" and n.target in DEPARTURES]
        carried = [self._carried(node) for node in nodes]
        leaving = [
            Departure(
                self.where[node],
                departing_bytes(node, self.params),
                {id(s): (s.nbytes, s.last) for s in storages},
            )
            for node, storages in zip(nodes, carried, strict=True)
        ]
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
        """The whole gradients that are one storage of just their size, made by compute and not
        needed once sent."""
        times = Counter(id(s) for storages in carried for s in storages)
        return frozenset(
            node
            for node, storages in zip(nodes, carried, strict=True)
            if node.target is ops.reduce_grad and len(storages) == 1
            for storage in storages
            if storage.nbytes == departing_bytes(node, self.params)
            and storage.maker.op == "call_function"
            and storage.maker is not node
            and storage.last <= self.where[node]
            and times[id(storage)] == 1
        )

    def _curve(self) -> list[int]:
        """Bytes live while each node runs, without storages that only a gradient in flight keeps
        alive."""
        return live_bytes(((s.first, s.last, s.nbytes) for s in self.storages), len(self.nodes))

    def _carried(self, node: fx.Node) -> list[Storage]:
        """Storages that a departure keeps alive: the gradient's, or that of a copy in the
        parameter's layout."""
        grad, handle = node.args[0], node.args[1]
        assert isinstance(grad, fx.Node)
        assert isinstance(handle, fx.Node)
        value: Tensor = grad.meta["val"]
        layout = self.params[NodeName(handle.name)].layout
        whole = node.target is ops.reduce_grad and layout.dense  # a tile is contiguous
        stride = layout.stride if whole else value.contiguous().stride()
        narrow = whole and value.dtype.itemsize < layout.dtype.itemsize
        as_it_is = value.stride() == tuple(stride) and (narrow or value.dtype is layout.dtype)
        if narrow:  # widened for a moment, to be measured, or to be added to what is there
            index = self.where[node]
            self.storages.append(Storage(node, 0, layout.nbytes, index, index))
        if as_it_is or not any(self.parts.get(grad, ())):
            return unique(self.parts.get(grad, ()))
        index = self.where[node]
        self.storages.append(Storage(node, 0, _dense_bytes(value), index, index))
        return [self.storages[-1]]


def _maker(node: fx.Node) -> tuple[fx.Node, int]:
    """The op that makes a fresh value, and the number of its result that this is."""
    if node.target is not getitem:
        return node, 0
    parent, part = node.args
    assert isinstance(parent, fx.Node)
    assert isinstance(part, int)
    return parent, part


def departing_bytes(node: fx.Node, params: Mapping[NodeName, ParamSpec]) -> int:
    """Bytes that a departure counts for while it is in flight.

    Of a whole gradient as many as its parameter takes, gaps included; of a tile, or of one in a
    narrower dtype, its own.
    """
    grad, handle, *tile = node.args
    assert isinstance(grad, fx.Node)
    assert isinstance(handle, fx.Node)
    value: Tensor = grad.meta["val"]
    layout = params[NodeName(handle.name)].layout
    if tile or value.dtype.itemsize < layout.dtype.itemsize:
        return _dense_bytes(value)
    return layout.nbytes


def _dense_bytes(value: Tensor) -> int:
    """Bytes of the elements of a tensor, without gaps."""
    return hint(value.numel()) * value.dtype.itemsize


def unique(parts: Iterable[Sequence[Storage]]) -> list[Storage]:
    """The storages of `parts`, each once."""
    return list({id(s): s for part in parts for s in part}.values())


MOST_HOLDERS = 8
"""Most values that a curve names at its peak."""


@dataclass(frozen=True)
class Footprint:
    """Bytes that calls of a graph have live outside the arena.

    nodes       of the graph, in order
    boundary    index of the first node of backward that computes; of a graph of one phase, the
                number of its nodes
    values      lifetimes of storages, by `first`
    of          node -> its storages
    departing   gradient that is sent -> bytes that may be in flight once it is
    left_bytes  of gradients in flight when the graph has ended
    alone       the departures that are `LiveBytes.alone`
    carried     departure -> `LiveBytes.carried`
    """

    nodes: tuple[fx.Node, ...]
    boundary: int
    values: tuple[Storage, ...]
    of: Mapping[fx.Node, tuple[Storage, ...]]
    departing: Mapping[fx.Node, int] = field(default_factory=dict)
    left_bytes: int = 0
    alone: frozenset[fx.Node] = frozenset()
    carried: Mapping[fx.Node, int] = field(default_factory=dict)

    @cached_property
    def curve(self) -> list[int]:
        """Bytes live while each node runs."""
        return live_bytes(((v.first, v.last, v.nbytes) for v in self.values), len(self.nodes))

    @cached_property
    def peak(self) -> int:
        """Largest number of bytes live at one node."""
        return max(self.curve, default=0)

    @cached_property
    def peak_at(self) -> int:
        """Index of the first node at the peak."""
        return self.curve.index(self.peak)

    def describe(self, index: int) -> list[tuple[str, int]]:
        """Storages alive at node `index`, the largest first, for people: name with module,
        bytes."""
        alive = [v for v in self.values if v.first <= index <= v.last]
        return [(self.title(v), v.nbytes) for v in sorted(alive, key=lambda v: -v.nbytes)]

    @staticmethod
    def title(value: Storage) -> str:
        """A storage for people: its maker, and the module of that."""
        module = module_of(value.maker)
        return f"{value.maker.name} ({module})" if module else value.maker.name

    @property
    def where(self) -> str:
        """Place of the peak, for people."""
        node = self.nodes[self.peak_at]
        module = module_of(node)
        return f"{phase_of(node).value} pass of {quoted(module) if module else 'the model'}"

    def as_curve(self) -> MemoryCurve:
        """The curve as data that outlives the graph."""
        return MemoryCurve(
            tuple(node.name for node in self.nodes),
            self.boundary,
            tuple(self.curve),
            self.where,
            dict(self.describe(self.peak_at)[:MOST_HOLDERS]),
        )

    def handed_over(self, names: Iterable[str]) -> Given:
        """Storages behind nodes that another graph has as placeholders; `given` of its
        `footprint`."""
        wanted = set(names)
        return {
            NodeName(node.name): tuple((f"{v.maker.name}.{v.part}", v.nbytes) for v in held)
            for node, held in self.of.items()
            if node.name in wanted and node.op != "placeholder"
        }


def footprint(
    graph: fx.Graph,
    params: Mapping[NodeName, ParamSpec],
    given: Given | None = None,
    size: Size = hint,
    slots: bool = False,
) -> Footprint:
    """The footprint of a joint graph, or of one phase of it.

    params  handle placeholder -> the parameter behind it
    given   of a backward graph: what its forward saved for it (`Footprint.handed_over`)
    size    evaluates dynamic sizes
    slots   whether gathered parameters, which lie in slots of the arena, count too
    """
    walk = StorageWalk(graph, params, given or {}, size, slots)
    departing, left, alone, carried = walk.walk()
    of = {node: tuple(unique(parts)) for node, parts in walk.parts.items() if any(parts)}
    values = tuple(sorted(walk.storages, key=lambda s: s.first))
    return Footprint(walk.nodes, walk.boundary, values, of, departing, left, alone, carried)


NOTHING_KEPT: Given = MappingProxyType({})


def memory_profile(
    schedule: Schedule, held: Footprint, kept: Given = NOTHING_KEPT
) -> MemoryProfile:
    """Live bytes of calls of `schedule`, instruction by instruction, from the footprint of its
    graph.

    The instructions whose effects change them keep their order in every arrangement of the
    schedule, so each finds its level by its number among them.

    kept  of a forward: what it saves for its backward
    """
    levels = tuple(_levels(held))
    counted = [x for x in schedule.effects if x.changes_live]
    assert len(levels) == len(counted), "a level for every instruction that changes what is held"
    names = {node.name for node in held.of}
    places = [n for n in held.nodes if n.op == "placeholder"]
    given = frozenset(Register(i) for i, n in enumerate(places) if n.name in names)
    lent = frozenset(r for r in given if keeps_tangents() and is_tangent(places[r]))
    named = [
        (name, register) for x in counted for name, register in zip(x.nodes, x.defines, strict=True)
    ]
    made = frozenset(register for name, register in named if name in names)
    left = frozenset(register for name, register in named if name in names and name in kept)
    ends = levels[-1].after if levels else 0
    stays = dict(storage for storages in kept.values() for storage in storages)
    saved = sum(
        v.nbytes for v in held.values if v.maker.op == "placeholder" and not is_tangent(v.maker)
    )
    return MemoryProfile(
        levels, given | made, given, lent, left, held.left_bytes, ends, sum(stays.values()), saved
    )


def _levels(held: Footprint) -> Iterator[LiveBytes]:
    """One level for each region, each gradient that is sent, and each value whose offload is waited
    for."""
    curve = held.curve
    after = live_bytes(((v.first, v.last - 1, v.nbytes) for v in held.values), len(curve))

    def level(first: int, last: int) -> LiveBytes:
        before = after[first - 1] if first else 0
        node = held.nodes[last]
        departing, alone = held.departing.get(node, 0), node in held.alone
        peak, carried = max(curve[first : last + 1]), held.carried.get(node)
        return LiveBytes(before, peak, after[last], departing, alone, carried)

    # A region is a run of compute nodes with one number.
    begun: int | None = None
    region: int | None = None
    for index, node in enumerate(held.nodes):
        inside = is_compute(node)
        if begun is not None and not (inside and region_of(node) == region):
            yield level(begun, index - 1)
            begun = None
        if inside and begun is None:
            begun, region = index, region_of(node)
        if _lets_go(node):
            yield level(index, index)
    assert begun is None, "a graph ends with its results"


def _lets_go(node: fx.Node) -> bool:
    """Whether a node sends a gradient, or ends the life of an offloaded value."""
    return node.op == "call_function" and (node.target in DEPARTURES or node.target is ops.left)
