"""Lowers the last graph to a schedule, and schedules it anew once a placement is known.

The passes plan a graph as if every parameter came from afar, since a graph does not know which
entries a call will be about. `lower` writes that plan down as instructions. Once a placement says
what rests on the device, `arrange` makes the schedule for it: resident parameters are viewed in
place, and the fetches that are left start as early as the arena's window allows.

    fetch a -> [0, 4K)                        fetch b -> [0, 8K)
    fetch b -> [4K, 12K)                      borrow a
    wait a                                    run 0
    run 0                           ->        wait b
    free a                                    run 1
    wait b                                    free b
    run 1
    free b
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import fx

from zcompile.ir import ops
from zcompile.ir.graph import is_compute, output_of, positions, region_of
from zcompile.ir.optimizer_step import DEPTH, NO_ROOM, Column, StepRoom, lower_step
from zcompile.ir.plan import GraphPlan, layout_of_fetch
from zcompile.ir.program import RegionProgram, Value, program_of
from zcompile.ir.regions import Compiled, compile_region, inputs_of, is_product, outputs_of
from zcompile.ir.schedule import (
    SERIALS,
    Borrow,
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
from zcompile.ir.step import StepTrace
from zcompile.ir.types import HELD, ON_DEVICE, EntryRef, Layout, NodeName, ParamSpec, Phase, aligned
from zcompile.memory.allocator import Block, fits, live_peak, pack_quickly, packed_bytes
from zcompile.memory.footprint import departing_bytes
from zcompile.memory.step_footprint import peak_of
from zcompile.memory.window import Need
from zcompile.passes.schedule_prefetch import choose_starts

NOTHING: Mapping[NodeName, int] = MappingProxyType({})
"""No handle whose gradient is sent home."""


def lower(
    gm: fx.GraphModule,
    plan: GraphPlan,
    phase: Phase,
    name: str,
    compiled: Compiled,
    sinks: Mapping[NodeName, int] = NOTHING,
) -> Schedule:
    """The schedule of a graph of one phase.

    gm        holds zinf ops and compute nodes that carry their region
    compiled  regions by structure, extended by the new ones of this graph
    sinks     handle whose gradient the backward of this forward will send -> number of
              contributions
    """
    return _Lowering(gm, plan, phase, name, compiled, sinks).schedule()


@dataclass
class _Lowering:
    """Walks a graph and emits instructions.

    last_run     index of the last `Run` so far
    freed        slots given back, each with the ticket of the last run before
    started      fetch node -> its instruction
    last_reader  node -> its last reader
    """

    gm: fx.GraphModule
    plan: GraphPlan
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
        """Parameters that a backward fetches, with their layouts."""
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
        """Emit the region that these compute nodes form."""
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
            if self.plan.params[NodeName(handle.name)].layout == Layout.of(node.meta["val"]):
                found[position] = self.handles[handle]
        return found

    def _mark(self) -> tuple[Ticket, ...]:
        """The ticket of the last run so far; none, if nothing has run."""
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
        """Emit the instruction of a zinf op."""
        if node.target is ops.fetch:
            self._fetch(node)
        elif node.target is ops.wait:
            (fetch,) = node.all_input_nodes
            started = self.started[fetch]
            self.instructions.append(
                Wait(
                    started.ticket,
                    started.slot,
                    replace(layout_of_fetch(fetch), offset=0),
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
        """Emit the transfer of a gradient, or a tile of one, to its entry."""
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
        brings = layout_of_fetch(node)
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


def arrange(
    schedule: Schedule,
    resident: frozenset[EntryIndex],
    budget_bytes: int | None,
    max_lead: int,
    stay: frozenset[EntryIndex] = frozenset(),
) -> Schedule:
    """`schedule` (forward or backward) for a call whose `resident` entries rest on the device.

    budget_bytes  of the arena, for what is fetched
    max_lead      runs that a fetch may start ahead of its first reader
    stay          entries whose gradients stay where they are made
    raises        BudgetExceeded, if what one run reads does not fit
    """
    # What still moves, and when each fetch may start.
    stages = program_of(schedule.with_staying(stay))
    moved = [v for v in stages.values if v.fetch.entry not in resident or v.fetch.cast is not None]
    needs = [Need(v.fetch.name, v.first, v.last, v.fetch.nbytes) for v in moved]
    starts = choose_starts(needs, budget_bytes, max_lead, schedule.phase.value)
    # Addresses in the window; a search only where the quick way needs too much.
    blocks = [Block(s, v.last, v.fetch.nbytes) for s, v in zip(starts, moved, strict=True)]
    addresses = pack_quickly(blocks)
    if budget_bytes is not None and packed_bytes(blocks, addresses) > budget_bytes:
        found = fits(blocks, budget_bytes)
        assert found is not None, "`choose_starts` let them pass"
        addresses = found
    slots = [
        Slot(address, aligned(block.nbytes))
        for address, block in zip(addresses, blocks, strict=True)
    ]
    # The instructions, with resident values viewed in place.
    placed = [_placed(*each) for each in zip(moved, slots, strict=True)]
    arriving = {v.wait.register for v in moved}
    still = [v for v in stages.values if v.wait.register not in arriving]
    instructions = tuple(_Assembly(stages, placed, starts, still).instructions())
    return replace(
        schedule,
        instructions=instructions,
        serial=next(SERIALS),
        arena_bytes=max((slot.end for slot in slots), default=0),
        peak_bytes=peak_of(instructions),
        budget_bytes=budget_bytes,
    )


@dataclass(frozen=True)
class ArenaShare:
    """How the schedules of a step share the arena with entries that rest there.

    window_bytes  for what is fetched
    max_lead      runs that a fetch may start ahead
    chunk_bytes   most bytes per operand and chunk of the optimizer's step
    reach         whether the optimizer's step computes with entries on the host in place
    depth         most chunks of that step in the arena at once
    scratch       memory outside the arena that no graph holds during that step; used if it is
                  larger
    """

    window_bytes: int
    max_lead: int
    chunk_bytes: int
    reach: bool = False
    depth: int = DEPTH
    scratch: StepRoom = NO_ROOM

    @property
    def step_room(self) -> StepRoom:
        """Memory that the optimizer's step streams through."""
        window = StepRoom(0, self.window_bytes, self.chunk_bytes, self.depth)
        return self.scratch if self.scratch.nbytes > window.nbytes else window


def arranged(step: StepTrace, homes: Mapping[EntryRef, str], arena: ArenaShare) -> StepTrace:
    """A whole step under a placement, as the runtime will walk it.

    homes   key of an entry -> the tier that it rests on
    raises  BudgetExceeded, if what one run reads does not fit the window
    """
    made: dict[tuple[object, ...], Schedule] = {}
    calls, held = [], {ref for ref, home in homes.items() if home == HELD}
    for call in step.calls:
        at = tuple(homes.get(ref, step.facts[ref].home) for ref in call.entries)
        stay = call.making(held)
        known = call.schedule.serial, at, stay
        if known not in made:
            made[known] = _arranged(call.schedule, at, stay, arena)
        as_held = replace(made[known], holds=call.schedule.holds)
        calls.append(replace(call, schedule=as_held))
    facts = {ref: replace(f, home=homes.get(ref, f.home)) for ref, f in step.facts.items()}
    return replace(step, calls=tuple(calls), facts=facts)


def _arranged(
    schedule: Schedule, homes: Sequence[str], stay: frozenset[EntryIndex], arena: ArenaShare
) -> Schedule:
    if schedule.budget_bytes is None:
        return schedule
    if schedule.phase is not Phase.STEP:
        resident = frozenset(EntryIndex(n) for n, home in enumerate(homes) if home in ON_DEVICE)
        return arrange(schedule, resident, arena.window_bytes, arena.max_lead, stay)
    still = ON_DEVICE | {"host"} if arena.reach else ON_DEVICE
    rows = [
        replace(row, columns=tuple(_rests(c, homes[c.entry], still) for c in row.columns))
        for row in schedule.rows
    ]
    return lower_step(schedule.name, rows, schedule.inputs, len(schedule.names), arena.step_room)


def _rests(column: Column, home: str, still: frozenset[str]) -> Column:
    """`column` with its operand on tier `home`."""
    resident = home in ON_DEVICE if column.eased else home in still
    return replace(column, resident=resident, far=home == "disk")


def window_bytes(schedule: Schedule, resident: frozenset[EntryIndex], lead: int) -> int:
    """Bytes of the arena in which each fetch of a graph could start `lead` runs ahead."""
    moved = [v for v in program_of(schedule).values if v.fetch.entry not in resident]
    return live_peak([Block(max(0, v.first - lead), v.last, v.fetch.nbytes) for v in moved])


def _placed(value: Value, slot: Slot) -> Value:
    """`value` in another slot."""
    return replace(
        value,
        fetch=replace(value.fetch, slot=slot),
        wait=replace(value.wait, slot=slot),
        free=replace(value.free, slot=slot),
    )


class _Assembly:
    """Writes the instructions of an arranged schedule.

    moved, starts  values that are fetched, and the run before which each fetch starts
    still          values that are viewed in place
    """

    def __init__(
        self,
        stages: RegionProgram,
        moved: Sequence[Value],
        starts: Sequence[int],
        still: Sequence[Value],
    ) -> None:
        self._stages = stages
        self._starting: dict[int, list[Value]] = {}
        self._arriving: dict[int, list[Value]] = {}
        self._leaving: dict[int, list[Value]] = {}
        self._borrowed: dict[int, list[Value]] = {}
        for value, start in zip(moved, starts, strict=True):
            self._starting.setdefault(start, []).append(value)
            self._arriving.setdefault(value.first, []).append(value)
            self._leaving.setdefault(value.last, []).append(value)
        for value in still:
            self._borrowed.setdefault(value.first, []).append(value)
        given = [r.ticket for r in stages.runs if r.ticket is not None]
        given += [v.fetch.ticket for v in stages.values]
        given += [x.ticket for rows in stages.leaving for x in rows if isinstance(x, Offload)]
        self._next = max(given, default=-1) + 1
        self._tickets = [run.ticket for run in stages.runs]
        self._busy: list[tuple[Slot, int]] = []

    def instructions(self) -> Iterator[Instruction]:
        after = self._afters()
        yield from self._stages.leaving[0]
        for n, run in enumerate(self._stages.runs):
            yield from (
                replace(v.fetch, after=after[v.fetch.ticket]) for v in self._starting.get(n, ())
            )
            yield from (v.wait for v in self._arriving.get(n, ()))
            yield from (_borrow(v) for v in self._borrowed.get(n, ()))
            yield replace(run, ticket=self._tickets[n])
            yield from (v.free for v in self._leaving.get(n, ()))
            yield from self._stages.leaving[n + 1]

    def _afters(self) -> dict[Ticket, tuple[Ticket, ...]]:
        """Ticket of each fetch -> tickets that it must wait for: of the last run that read its
        bytes."""
        after: dict[Ticket, tuple[Ticket, ...]] = {}
        for n in range(len(self._stages.runs)):
            for value in self._starting.get(n, ()):
                slot = value.fetch.slot
                last = max((r for old, r in self._busy if old.overlaps(slot)), default=None)
                after[value.fetch.ticket] = () if last is None else (self._ticket(last),)
                self._busy = [
                    (old, r)
                    for old, r in self._busy
                    if not (slot.address <= old.address and old.end <= slot.end)
                ]
            self._busy += [(v.free.slot, n) for v in self._leaving.get(n, ())]
        return after

    def _ticket(self, run: int) -> Ticket:
        """The ticket of a run, given out if it has none."""
        found = self._tickets[run]
        if found is None:
            found = self._tickets[run] = Ticket(self._next)
            self._next += 1
        return found


def _borrow(value: Value) -> Borrow:
    wait = value.wait
    return Borrow(
        value.fetch.entry, value.fetch.begin, wait.layout, wait.register, False, wait.name
    )
