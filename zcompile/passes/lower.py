"""The last graph becomes a schedule: a flat list of instructions with registers and tickets."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import is_compute, output_of, positions, region_of
from zcompile.ir.plan import Plan, fetched
from zcompile.ir.regions import Compiled, compile_region, inputs_of, is_product, outputs_of
from zcompile.ir.schedule import (
    SERIALS,
    Cast,
    EntryIndex,
    Fetch,
    Free,
    GradientOf,
    Instruction,
    Left,
    Literal,
    Offload,
    Reduce,
    Register,
    Run,
    Schedule,
    Slot,
    Ticket,
    Wait,
)
from zcompile.ir.types import Layout, NodeName, ParamSpec, Phase
from zcompile.memory.device_peaks import peak_of
from zcompile.memory.storages import departing_bytes

NOTHING: Mapping[NodeName, int] = MappingProxyType({})


def lower(
    gm: fx.GraphModule,
    plan: Plan,
    phase: Phase,
    name: str,
    compiled: Compiled,
    sinks: Mapping[NodeName, int] = NOTHING,
) -> Schedule:
    """Walk a graph of one phase and write down what the executor is to do.

    gm        holds zinf ops and compute nodes that carry their region
    compiled  regions by structure, extended by the new ones of this graph
    sinks     handles whose gradient the backward of this forward will send home -> in how many
              contributions
    """
    return _Lowering(gm, plan, phase, name, compiled, sinks).schedule()


@dataclass
class _Lowering:
    gm: fx.GraphModule
    plan: Plan
    phase: Phase
    name: str
    compiled: Compiled
    sinks: Mapping[NodeName, int]
    instructions: list[Instruction] = field(default_factory=list)
    registers: dict[fx.Node, Register] = field(default_factory=dict)
    tickets: int = 0
    last_run: int | None = None
    freed: list[tuple[Slot, Ticket | None]] = field(default_factory=list)
    started: dict[fx.Node, Fetch] = field(default_factory=dict)
    offloaded: dict[fx.Node, Offload] = field(default_factory=dict)
    handles: dict[fx.Node, EntryIndex] = field(default_factory=dict)
    last_reader: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def schedule(self) -> Schedule:
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
                self._run(pending)
            pending = [node] if is_compute(node) else []
            if not pending and node.op == "call_function":
                self._ours(node)
        return self._finish(constants)

    def _finish(self, constants: list[fx.Node]) -> Schedule:
        slots = [i.slot for i in self.instructions if isinstance(i, Fetch)]
        return Schedule(
            phase=self.phase,
            name=self.name,
            instructions=tuple(self.instructions),
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
            serial=next(SERIALS),
            arena_bytes=max((slot.end for slot in slots), default=0),
            peak_bytes=peak_of(self.instructions),
            budget_bytes=self.plan.budget_bytes,
            traced_work=self.plan.traced_work.get(self.phase),
            least_bytes=self.plan.least_bytes,
            read_back=self._read_back(),
            names={
                i: str(self.plan.params[NodeName(n.name)].name) for n, i in self.handles.items()
            },
        )

    def _read_back(self) -> tuple[tuple[EntryIndex, Layout], ...]:
        if self.phase is not Phase.BACKWARD:
            return ()
        read = {fetch.entry for fetch in self.started.values()}
        rows = ((index, self.plan.params[NodeName(n.name)]) for n, index in self.handles.items())
        return tuple((index, spec.layout) for index, spec in rows if spec.sink and index in read)

    def _register(self, node: fx.Node) -> Register:
        return self.registers.setdefault(node, Register(len(self.registers)))

    def _ticket(self) -> Ticket:
        self.tickets += 1
        return Ticket(self.tickets - 1)

    def _result(self, result: object) -> Register | Literal:
        if not isinstance(result, fx.Node):
            return Literal(result)
        if result.target not in ops.SINKS:
            return self.registers[result]
        handle = result.args[1]
        assert isinstance(handle, fx.Node)
        return GradientOf(None, self.handles[handle])

    def _run(self, nodes: list[fx.Node]) -> None:
        inputs, outputs = inputs_of(nodes), outputs_of(nodes)
        inside = set(nodes)
        drops = [
            n
            for n in inputs
            if self.last_reader[n] in inside and n.op != "get_attr" and n.target is not ops.wait
        ]
        self.last_run = len(self.instructions)
        into = self._into(outputs)
        self.instructions.append(
            Run(
                compile_region(nodes, self.compiled, tuple(into)),
                tuple(self.registers[n] for n in inputs),
                tuple(self._register(n) for n in outputs),
                tuple(self.registers[n] for n in drops),
                names=tuple(n.name for n in outputs),
                into=tuple(into.values()),
            )
        )

    def _into(self, outputs: list[fx.Node]) -> dict[int, EntryIndex]:
        """The outputs that are products, and whole gradients and nothing else: of which entries."""
        found: dict[int, EntryIndex] = {}
        for position, node in enumerate(outputs):
            (user, *others) = node.users
            if others or user.target is not ops.reduce_grad or not is_product(node):
                continue
            handle = user.args[1]
            assert isinstance(handle, fx.Node)
            if self.plan.params[NodeName(handle.name)].layout == Layout.of(node.meta["val"]):
                found[position] = self.handles[handle]
        return found

    def _mark(self) -> tuple[Ticket, ...]:
        """A ticket for "compute has come this far": of the last run so far, if there is one."""
        if self.last_run is None:
            return ()
        run = self.instructions[self.last_run]
        assert isinstance(run, Run)
        if run.ticket is None:
            run = replace(run, ticket=self._ticket())
            self.instructions[self.last_run] = run
        assert run.ticket is not None
        return (run.ticket,)

    def _ours(self, node: fx.Node) -> None:
        if node.target is ops.fetch:
            self._fetch(node)
        elif node.target is ops.wait:
            (fetch,) = node.all_input_nodes
            started = self.started[fetch]
            self.instructions.append(
                Wait(
                    started.ticket,
                    started.slot,
                    replace(fetched(fetch), offset=0),
                    self._register(node),
                    started.name,
                )
            )
        elif node.target is ops.release:
            (full,) = node.all_input_nodes
            (fetch,) = full.all_input_nodes
            started = self.started[fetch]
            marks = self._mark()
            self.freed.append((started.slot, marks[0] if marks else None))
            self.instructions.append(Free(started.slot, self.registers[full], started.name))
        elif node.target is ops.offload:
            self._offload(node)
        elif node.target is ops.left:
            _, handle = node.args
            offload = self.offloaded[handle]  # type: ignore[index]  # op schema
            self.instructions.append(
                Left(offload.ticket, offload.value, offload.nbytes, offload.name)
            )
        else:
            self._leaves(node)

    def _leaves(self, node: fx.Node) -> None:
        """A gradient, or a tile of one, goes home."""
        assert node.target in ops.SINKS, node
        grad, handle, *at = node.args
        assert isinstance(grad, fx.Node)
        assert isinstance(handle, fx.Node)
        spec = self.plan.params[NodeName(handle.name)]
        leaves = Reduce(
            self.registers[grad],
            self.handles[handle],
            self._mark(),
            self.last_reader.get(grad) is node,
            str(spec.name),
            departing_bytes(node, self.plan.params),
        )
        if at:
            (offset,) = at
            assert isinstance(offset, int)
            itemsize = grad.meta["val"].dtype.itemsize
            leaves = replace(
                leaves, begin=offset * itemsize, of_nbytes=spec.layout.numel * itemsize
            )
        self.instructions.append(leaves)

    def _offload(self, node: fx.Node) -> None:
        value, _, tier, _ = node.args
        assert isinstance(value, fx.Node)
        spec = self.plan.params[NodeName(node.name)]
        offload = Offload(
            self.registers[value],
            str(tier),
            spec.layout,
            self._register(node),
            len(self.offloaded),
            self._ticket(),
            self._mark(),
            str(spec.name),
        )
        self.offloaded[node] = offload
        self.instructions.append(offload)

    def _fetch(self, node: fx.Node) -> None:
        handle = node.args[0]
        assert isinstance(handle, fx.Node)
        spec = self.plan.params[NodeName(handle.name)]
        slot = self.plan.slots[NodeName(node.name)]
        brings = fetched(node)
        marks = [mark for old, mark in self.freed if old.overlaps(slot) and mark is not None]
        fetch = Fetch(
            self.handles[handle],
            brings.offset * brings.dtype.itemsize,
            brings.nbytes,
            slot,
            self._ticket(),
            tuple(marks[-1:]),
            str(spec.name),
            lasting=not spec.activation,
            cast=_cast(spec, brings),
        )
        self.started[node] = fetch
        self.instructions.append(fetch)


def _cast(spec: ParamSpec, brings: Layout) -> Cast | None:
    wide = spec.layout.dtype
    return None if brings.dtype is wide else Cast(wide, brings.dtype)


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
