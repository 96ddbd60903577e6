"""Builds the region program of one phase from its graph."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import is_compute, output_of, positions, region_of
from zcompile.ir.partition import SharedRange, range_of_fetch, shared_range
from zcompile.ir.plan import GraphPlan, layout_of_fetch
from zcompile.ir.regions import Compiled, compile_region, inputs_of, is_product, outputs_of
from zcompile.ir.schedule import (
    Cast,
    Departure,
    EntryIndex,
    GradientOf,
    Left,
    Literal,
    Offload,
    ReadValue,
    Reduce,
    RegionProgram,
    Register,
    Run,
    Schedule,
    Share,
    Ticket,
)
from zcompile.ir.types import Layout, NodeName, ParamSpec, Phase
from zcompile.memory.footprint import departing_bytes

NOTHING: Mapping[NodeName, int] = MappingProxyType({})
"""No handle whose gradient is sent home."""


def program_of(
    gm: fx.GraphModule,
    plan: GraphPlan,
    phase: Phase,
    name: str,
    compiled: Compiled,
    sinks: Mapping[NodeName, int] = NOTHING,
    trains: bool = False,
) -> RegionProgram:
    """The region program of a graph of one phase, in which every value is fetched.

        %a_pending = zinf.fetch(%a)               values   a: read by region 0
        %a_full = zinf.wait(%a_pending)           regions  0: mm
        %y = aten.mm(%x, %a_full)         ->      departs  after region 0: the gradient of b
        zinf.release(%a_full)
        zinf.reduce_grad(%g, %b)

    gm        holds zinf ops and compute nodes that carry their region
    compiled  regions by structure, extended by the new ones of this graph
    sinks     handle whose gradient the backward of this forward will send -> number of
              contributions
    trains    a forward that a backward follows
    """
    return _Builder(gm, plan, phase, name, compiled, sinks, trains).program()


@dataclass
class _Builder:
    """Walks a graph and collects regions, the values they read and what leaves between them.

    waited       fetch node -> the value that it brings, once it was waited for
    offloaded    offload node -> its departure
    last_reader  node -> its last reader
    """

    gm: fx.GraphModule
    plan: GraphPlan
    phase: Phase
    name: str
    compiled: Compiled
    sinks: Mapping[NodeName, int]
    trains: bool
    regions: list[Run] = field(default_factory=list)
    departures: list[list[Departure]] = field(default_factory=lambda: [[]])
    waited: dict[fx.Node, ReadValue] = field(default_factory=dict)
    offloaded: dict[fx.Node, Offload] = field(default_factory=dict)
    registers: dict[fx.Node, Register] = field(default_factory=dict)
    handles: dict[fx.Node, EntryIndex] = field(default_factory=dict)
    last_reader: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def program(self) -> RegionProgram:
        graph = self.gm.graph
        placeholders = graph.find_nodes(op="placeholder")
        constants = graph.find_nodes(op="get_attr")
        for node in (*placeholders, *constants):
            self._register(node)
        self.last_reader = _last_readers(graph)
        self.handles = {
            node: EntryIndex(index)
            for index, node in enumerate(n for n in placeholders if n.name in self.plan.params)
        }
        pending: list[fx.Node] = []
        for node in graph.nodes:
            if is_compute(node) and (not pending or region_of(node) == region_of(pending[0])):
                pending.append(node)
                continue
            if pending:
                self._region(pending)
            pending = [node] if is_compute(node) else []
            if not pending and node.op == "call_function":
                self._ours(node)
        fetches = [node for node in graph.nodes if node.target is ops.fetch]
        return RegionProgram(
            self._outline(constants),
            tuple(self.regions),
            tuple(self.waited[fetch] for fetch in fetches),
            tuple(map(tuple, self.departures)),
            self.plan.budget_bytes,
        )

    def _outline(self, constants: list[fx.Node]) -> Schedule:
        """The schedule without its instructions."""
        return Schedule(
            phase=self.phase,
            name=self.name,
            instructions=(),
            handles=tuple(self.registers[node] for node in self.handles),
            inputs=len(self.gm.graph.find_nodes(op="placeholder")),
            constants=tuple((self.registers[n], _attribute(self.gm, n)) for n in constants),
            outputs=tuple(self._result(r) for r in _results(self.gm.graph)),
            registers=len(self.registers),
            sinks=tuple(
                index
                for node, index in self.handles.items()
                for _ in range(self.sinks.get(NodeName(node.name), 0))
            ),
            serial=-1,
            arena_bytes=0,
            peak_bytes=0,
            budget_bytes=self.plan.budget_bytes,
            names={
                i: str(self.plan.params[NodeName(n.name)].name) for n, i in self.handles.items()
            },
            trains=self.trains,
            traced_work=self.plan.traced_work.get(self.phase),
            least_bytes=self.plan.least_bytes,
            read_back=self._read_back(),
        )

    def _read_back(self) -> tuple[tuple[EntryIndex, Layout], ...]:
        """Parameters that a backward fetches, with their layouts."""
        if self.phase is not Phase.BACKWARD:
            return ()
        read = {value.entry for value in self.waited.values()}
        rows = ((index, self.plan.params[NodeName(n.name)]) for n, index in self.handles.items())
        return tuple((index, spec.layout) for index, spec in rows if spec.sink and index in read)

    def _register(self, node: fx.Node) -> Register:
        return self.registers.setdefault(node, Register(len(self.registers)))

    def _result(self, result: object) -> Register | Literal:
        if not isinstance(result, fx.Node):
            return Literal(result)
        if result.target not in ops.SINKS:
            return self.registers[result]
        handle = result.args[1]
        assert isinstance(handle, fx.Node)
        return GradientOf(None, self.handles[handle])

    def _region(self, nodes: list[fx.Node]) -> None:
        """Add the region that these compute nodes form."""
        inputs, outputs = inputs_of(nodes), outputs_of(nodes)
        inside = set(nodes)
        drops = [
            n
            for n in inputs
            if self.last_reader[n] in inside and n.op != "get_attr" and n.target is not ops.wait
        ]
        into = self._into(outputs)
        self.regions.append(
            Run(
                compile_region(nodes, self.compiled, tuple(into)),
                tuple(self.registers[n] for n in inputs),
                tuple(self._register(n) for n in outputs),
                tuple(self.registers[n] for n in drops),
                names=tuple(n.name for n in outputs),
                into=tuple(into.values()),
            )
        )
        self.departures.append([])

    def _into(self, outputs: list[fx.Node]) -> dict[int, EntryIndex]:
        """Position of each output that can be computed into a gradient's entry -> that entry.

        Such an output is a matrix product, a whole gradient and nothing else.
        """
        found: dict[int, EntryIndex] = {}
        for position, node in enumerate(outputs):
            (user, *others) = node.users
            if others or user.target is not ops.reduce_grad or not is_product(node):
                continue
            handle = user.args[1]
            assert isinstance(handle, fx.Node)
            spec = self.plan.params[NodeName(handle.name)]
            made = Layout.of(node.meta["val"])
            narrow = _narrower(spec, made.dtype) is not None
            if not spec.shared and (
                spec.layout == made
                or (narrow and spec.layout == replace(made, dtype=spec.layout.dtype))
            ):
                found[position] = self.handles[handle]
        return found

    def _ours(self, node: fx.Node) -> None:
        """Take note of a zinf op."""
        if node.target is ops.wait:
            self._wait(node)
        elif node.target is ops.release:
            (full,) = node.all_input_nodes
            (fetch,) = full.all_input_nodes
            value = self.waited[fetch]
            last = max(value.first, len(self.regions) - 1)
            self.waited[fetch] = value._replace(last=last)
        elif node.target is ops.offload:
            self._offload(node)
        elif node.target is ops.left:
            _, handle = node.args
            offload = self.offloaded[handle]  # type: ignore[index]  # op schema
            left = Left(offload.ticket, offload.value, offload.nbytes, offload.name)
            self.departures[-1].append(left)
        elif node.target is not ops.fetch:  # whose wait says all
            self._reduce(node)

    def _wait(self, node: fx.Node) -> None:
        (fetch,) = node.all_input_nodes
        handle = fetch.args[0]
        assert isinstance(handle, fx.Node)
        spec = self.plan.params[NodeName(handle.name)]
        brings, first = layout_of_fetch(fetch), len(self.regions)
        # Of a tensor whose shares ranks gather, all bytes come, whatever is read of them; of a tile
        # those of it, of which some may rest here. What one rank holds is a tile that is all of it.
        tile = range_of_fetch(spec, brings)
        gathered = spec.share is not None and (tile is None or tile.nbytes == spec.nbytes)
        begin = 0 if gathered else brings.offset * brings.dtype.itemsize
        self.waited[fetch] = ReadValue(
            self.handles[handle],
            str(spec.name),
            self._register(node),
            brings if gathered else replace(brings, offset=0),
            begin if tile is None else tile.home[0],
            self.plan.fetched_bytes(fetch),
            first,
            first,
            lasting=not spec.activation,
            cast=_cast(spec, brings),
            start=first,
            share=_share(spec, brings, len(self.waited), tile),
            gather=first,
        )

    def _reduce(self, node: fx.Node) -> None:
        """A gradient, or a tile of one, goes to its entry."""
        assert node.target in ops.SINKS, node
        grad, handle, *at = node.args
        assert isinstance(grad, fx.Node)
        assert isinstance(handle, fx.Node)
        spec, value = self.plan.params[NodeName(handle.name)], grad.meta["val"]
        reduce = Reduce(
            self.registers[grad],
            self.handles[handle],
            (),
            self.last_reader.get(grad) is node,
            str(spec.name),
            departing_bytes(node, self.plan.params),
            shared=spec.shared,
            cast=None if at else _narrower(spec, value.dtype),
            share_nbytes=0 if spec.share is None else spec.share[1] - spec.share[0],
            shares=shared_range(spec, 0, spec.layout.numel, value.dtype.itemsize),
        )
        if at:
            (offset,) = at
            assert isinstance(offset, int)
            itemsize = value.dtype.itemsize
            whole = spec.layout.numel * itemsize
            tile = shared_range(spec, offset, value.numel(), itemsize)
            reduce = replace(
                reduce, begin=offset * itemsize, of_nbytes=whole, tile=tile, shares=tile
            )
        self.departures[-1].append(reduce)

    def _offload(self, node: fx.Node) -> None:
        value, _, tier, _ = node.args
        assert isinstance(value, fx.Node)
        spec = self.plan.params[NodeName(node.name)]
        number = len(self.offloaded)
        offload = Offload(
            self.registers[value],
            str(tier),
            spec.layout,
            self._register(node),
            number,
            Ticket(number),
            (),
            str(spec.name),
        )
        self.offloaded[node] = offload
        self.departures[-1].append(offload)


def _share(spec: ParamSpec, brings: Layout, order: int, tile: SharedRange | None) -> Share | None:
    """The bytes of what a fetch brings that rest on this rank, in the dtype that it brings; None:
    all do."""
    if spec.share is None:
        return None
    if tile is not None:
        return Share(*tile.own, order, tile=tile)
    begin, end = (at // spec.layout.dtype.itemsize * brings.dtype.itemsize for at in spec.share)
    return Share(begin, end, order)


def _narrower(spec: ParamSpec, made: torch.dtype) -> Cast | None:
    """How a gradient of a narrower dtype than its parameter is to be read."""
    dtype = spec.layout.dtype
    return Cast(dtype, made) if made.itemsize < dtype.itemsize else None


def _cast(spec: ParamSpec, brings: Layout) -> Cast | None:
    """The cast from the dtype of a parameter to that of the copy a fetch brings; None, if it brings
    the parameter itself."""
    dtype = spec.layout.dtype
    return None if brings.dtype is dtype else Cast(dtype, brings.dtype)


def _last_readers(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    where = positions(graph)
    return {n: max(n.users, key=where.__getitem__) for n in graph.nodes if n.users}


def _results(graph: fx.Graph) -> tuple[object, ...]:
    (results,) = output_of(graph).args
    return tuple(results) if isinstance(results, list | tuple) else (results,)


def _attribute(gm: fx.GraphModule, node: fx.Node) -> Any:
    value: Any = gm
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value
