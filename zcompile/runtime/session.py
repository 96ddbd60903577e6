"""A session is a store with everything that runs on it: gradients, executor, compiled regions,
steps.

One offloaded model has one session. Two sessions in one process share nothing but the table of
handles. A session shares the device between the arena and what compiled graphs hold outside it:

    device_memory = arena + what graphs hold at most

The device is split when graphs are compiled, by what they will hold. Where a call would hold more,
the arena shrinks before the call: entries that rest there are evicted, and a step is planned anew.
While no graph holds values, an optimizer's step may stream through the arena's step scratch.
"""

import gc
import logging
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from zcompile.config import Config
from zcompile.errors import BudgetExceeded, DeviceTooSmall, Unsupported, more_device_memory
from zcompile.ir.handles import Leaf, entry_of, owners_of
from zcompile.ir.memory_curve import Memory
from zcompile.ir.optimizer_step import DEPTH, NO_ROOM, StepRoom
from zcompile.ir.schedule import Schedule
from zcompile.ir.torch_compat import current_pass
from zcompile.ir.types import ALIGNMENT, Layout, Region, aligned
from zcompile.ir.units import show_size
from zcompile.machine.cost import TransferModes
from zcompile.runtime import executor
from zcompile.runtime.durable.commit import CommitLog
from zcompile.runtime.executor import Executor, StepPolicy
from zcompile.runtime.gradients.gradients import Gradients, Wrap
from zcompile.runtime.host_updates import HostUpdates
from zcompile.runtime.late import LateUpdates
from zcompile.runtime.live_memory import InFlightGradients, LiveMemory, LiveStorages, PendingReads
from zcompile.runtime.norms import Norms
from zcompile.runtime.open import Opening, open_resources
from zcompile.runtime.ranks.fabric import Fabric
from zcompile.runtime.store import resident
from zcompile.runtime.store.resident import MakeCopy
from zcompile.runtime.store.store import Entry, Store
from zcompile.runtime.transfer.interrupts import deferred_interrupts
from zcompile.runtime.transfer.ticket import Ticket
from zcompile.runtime.transfer.transfer import InFlight, source_released
from zcompile.verify.schedule import verify_schedule

log = logging.getLogger(__name__)


# --- The device, split ---

GRAPH_VALUES = "values of compiled graphs"


class Fusions(Protocol):
    """Compiles what lies between library calls, and remembers it."""

    def as_stats(self) -> dict[str, Any]:
        """What became of them."""


@dataclass(frozen=True)
class WholeTensorOp:
    """An op of an optimizer that gathers whole tensors.

    gathers  into the arena: name, bytes
    beside   what it takes outside the arena
    """

    name: str
    gathers: Sequence[tuple[str, int]]
    beside: Sequence[tuple[str, int]]


class DeviceSplit:
    """How the device of one store is split between the arena and compiled graphs.

    empty           evicts what rests on the device, with nothing in flight and no schedule
                    remembered that was made for the arena; returns what could not be evicted
    held_bytes      set aside for what graphs hold; the arena has the rest
    expected_bytes  that compiled graphs will hold, once they are run
    """

    def __init__(self, store: Store, empty: Callable[[], Sequence[Entry]]) -> None:
        self._store, self._empty = store, empty
        self.held_bytes = self.expected_bytes = 0

    def expect(self, nbytes: int) -> None:
        """A graph was compiled that will hold so much: the arena shrinks before it is run."""
        self.expected_bytes = max(self.expected_bytes, nbytes)

    def hold_whole(self, op: WholeTensorOp, held_bytes: int) -> None:
        """Make room for an op on whole tensors, while graphs hold so much.

        raises  BudgetExceeded, as `hold`
        """
        gathered, beside = (sum(n for _, n in rows) for rows in (op.gathers, op.beside))
        needed = held_bytes + beside + gathered
        if needed > self._store.device_budget:
            raise self._refusal(
                needed,
                f"{op.name}, which takes whole tensors,",
                [*op.gathers, *op.beside, (GRAPH_VALUES, held_bytes)],
                f"{more_device_memory(needed)}, or take an optimizer "
                "whose ops are elementwise (AdamW, Adam, SGD; foreach or fused): they stream",
            )
        self.hold(held_bytes + beside, gathered)

    def hold(self, nbytes: int, least_arena: int = 0) -> None:
        """Set `nbytes` of the device aside for compiled graphs, and leave the arena at least
        `least_arena`.

        What was held once, or was expected, stays set aside, so that the arena need not change from
        call to call; only where a call needs that for what it fetches, the arena has it back.

        raises  BudgetExceeded, if the device has less, or what rests on it finds no room elsewhere.
                No value is lost then, and the arena stays as it is; what could be evicted is
        """
        store = self._store
        if nbytes + least_arena > store.device_budget:
            raise self._refusal(
                nbytes + least_arena,
                "a call, with what compiled graphs keep for backward,",
                [(GRAPH_VALUES, nbytes), ("parameters that are read together", least_arena)],
                f"{more_device_memory(nbytes + least_arena)}, or a smaller "
                "batch, or let go of results whose backward never comes; or call torch._dynamo."
                "reset() and begin with the largest batch: what is compiled first for small ones "
                "may keep what it would else make again",
            )
        # What was held once or is expected stays aside, unless the call needs that for the arena.
        aside = max(nbytes, self.expected_bytes, self.held_bytes)
        if aside + least_arena > store.device_budget:
            aside = nbytes
        if aside == self.held_bytes:
            return
        # The arena changes its size: entries leave it, and what eager code gathered must fit.
        if resident := self._empty():
            raise self._refusal(
                store.device_budget + aside - self.held_bytes,
                "a compiled graph, beside what rests there,",
                [(GRAPH_VALUES, aside), *((entry.name, entry.nbytes) for entry in resident)],
                "give zcompile.offload more device_memory, or more host_memory or a disk: what "
                "rests on the device has to leave for what the graph holds, and finds no room",
            )
        used = store.arena.used_bytes
        if used and (aside < self.held_bytes or aside + least_arena + used > store.device_budget):
            raise self._refusal(
                nbytes + least_arena + used,
                "a call, beside values that eager code gathered and keeps,",
                [(GRAPH_VALUES, nbytes), ("gathered values", used)],
                "drop references to what eager code gathered, or give zcompile.offload more "
                "device_memory",
            )
        with deferred_interrupts():
            store.arena.set_outside_bytes(aside)
            store.homes.device.resized()
            self.held_bytes = aside
        log.info(
            "compiled graphs hold %s of the device; the arena has the other %s",
            show_size(aside),
            show_size(store.arena.budget_bytes),
        )

    def too_small(self, error: BudgetExceeded, where: str, what: str) -> BudgetExceeded:
        """The error where `where` needs more of the arena than there is, in terms of the whole
        device.

        what  names what lies in the arena
        """
        if not self.held_bytes:
            return error
        needed = error.needed_bytes + self.held_bytes
        return self._refusal(
            needed,
            where,
            [(what, error.needed_bytes), (GRAPH_VALUES, self.held_bytes)],
            f"{more_device_memory(needed)}, or a smaller batch",
        )

    def too_small_for_plan(self, error: BudgetExceeded, otherwise: str) -> BudgetExceeded:
        """The error of a plan, which had no more of the device than other entries and compiled
        graphs leave, in terms of the whole device.

        otherwise  what else to do than to give it more
        """
        rest = self._store.device_budget - error.budget_bytes
        needed, others = error.needed_bytes + rest, rest - self.held_bytes
        rows = [(GRAPH_VALUES, self.held_bytes), ("what the step does not use", others)]
        alive = [*error.alive, *(row for row in rows if row[1] >= ALIGNMENT)]
        todo = f"{more_device_memory(needed)}, or {otherwise}"
        return self._refusal(needed, error.where, alive, todo)

    def _refusal(
        self, needed: int, where: str, alive: Sequence[tuple[str, int]], todo: str
    ) -> BudgetExceeded:
        budget = self._store.device_budget
        return BudgetExceeded("device", budget, needed, where, alive, todo)


class StepScratchUse:
    """Decides who may use the step scratch of one store's arena, and when."""

    def __init__(
        self, store: Store, split: DeviceSplit, executor: Executor, pending_reads: PendingReads
    ) -> None:
        self._store, self._split, self._executor = store, split, executor
        self._pending_reads = pending_reads
        self._scratch = store.arena.scratch

    @property
    def free_bytes(self) -> int:
        """Bytes set aside for compiled graphs that none of them holds now."""
        return max(0, self._split.held_bytes - self._executor.live_memory.nbytes)

    def room(self, window: StepRoom) -> StepRoom:
        """The room that a step streams through now, the step scratch or the streaming buffer.

        The scratch, if one is planned, is larger than the buffer, and is held by nobody.
        """
        scratch = self._scratch.room
        if scratch.nbytes <= window.nbytes or self._executor.is_running:
            return window
        return scratch if scratch.nbytes <= self.free_bytes else window

    def plan(self, room: StepRoom) -> None:
        """Let steps use this room from here on."""
        self.leave()
        self._scratch.plan(room)

    def need(self, schedule: Schedule) -> None:
        """Note a step schedule that was lowered for the scratch."""
        slots = {(f.slot.address, f.slot.nbytes) for f in schedule.fetches()}
        if schedule.scratch_at and not self._scratch.need(slots):
            self.leave()

    def open(self, schedule: Schedule) -> bool:
        """Whether the slots of a step are there; allocates the scratch if need be.

        Called before a step is walked, so that compute that went before is done with the memory. If
        not, `room` says what there is instead.
        """
        if not schedule.scratch_at:
            return True
        if self._scratch.room.nbytes > self.free_bytes:
            return False
        try:
            self._scratch.open()
        except DeviceTooSmall as error:
            log.warning("the optimizer streams through the arena's window: %s", error)
            self.plan(NO_ROOM)
            return False
        return True

    def leave(self) -> None:
        """Give the memory back to the device: the host waits until nothing reads it."""
        pieces, begin = self._scratch.pieces, perf_counter()
        if not pieces:
            return
        for _, memory in pieces:
            for ticket in self._pending_reads.of(memory):
                cast(InFlight, ticket).memory_heard().wait_finished()
        self._scratch.close()
        seconds = perf_counter() - begin
        self._store.meter.add("stall", seconds)
        self._executor.clocks.waited_between(seconds)


# --- The session ---


class Controller(StepPolicy, Protocol):
    """Decides what rests on the device, and what calls walk; see `zcompile/frontend/replan.py`.

    records  whether it wants to hear of steps
    """

    records: bool

    @property
    def arranges(self) -> bool:
        """Whether graphs are arranged for a plan before they are walked."""

    def arena_resizes(self) -> None:
        """The arena is about to have another size: nothing may rest there."""

    def reclaim(self, needed_bytes: int) -> bool:
        """Make room in the arena for so many bytes; whether there is more of it now."""

    def evict_staying(self) -> None:
        """Send gradients home that stay where backward made them: their room is needed."""

    def updates_in_the_way(self) -> None:
        """Step after step, late updates are asked for before the next forward."""

    def prediction(self) -> dict[str, Any] | None:
        """Times of a step under the plan in force, with bound and floor; None without a plan."""


@dataclass(frozen=True)
class Collaborators:
    """What a session works with and cannot make itself, since it stands above it.

    wrap            makes a tiered tensor over an entry
    make_copy       casts the bytes of an entry into those of its copy
    apply_deferred  applies what is deferred of an entry
    controller      makes the controller of a session, which it must not keep alive
    """

    wrap: Wrap
    make_copy: MakeCopy
    apply_deferred: Callable[[Entry], None]
    controller: Callable[["Session"], Controller]
    norms: Callable[[], Norms] = Norms
    executor: type[Executor] = Executor


class Place(NamedTuple):
    """Where a call of a list op names an entry.

    at    position of the operand
    copy  number among the copies in other dtypes of that operand's entry; None: it is the operand's
    """

    at: int
    copy: int | None = None


@dataclass
class Repeat:
    """One call of a list op as it was: what its rows depend on, and what became of it.

    entries, inputs  which operands they are, in the order in which `schedule` counts them
    written          the entries it writes, among the operands
    operands         what the next call is compared with first (`eager/repeats.py`)
    """

    known: tuple[object, ...]
    schedule: Schedule
    entries: tuple[Place, ...]
    inputs: tuple[int, ...]
    written: tuple[int, ...]
    operands: Any = None

    def keep(self, operands: Any) -> None:
        """Compare the next call with these."""
        self.operands = operands


class Session(Store):
    """The store and the runtime of one model.

    computes  regions are run; in a dry run they are not
    """

    computes = True

    def __init__(
        self,
        config: Config,
        others: Collaborators,
        opening: Opening = open_resources,
        fabric: Fabric | None = None,
    ) -> None:
        super().__init__(config, opening, others.apply_deferred, fabric)
        self.wrap = others.wrap
        self._pending_reads = PendingReads()
        self.norms = others.norms()
        self.gradients = Gradients(self, self.wrap, self.norms)
        self.live_memory = LiveMemory(self.meter.activations)
        self.in_flight = InFlightGradients(self.live_memory)
        self.controller = others.controller(self)
        self.late = LateUpdates(self)
        self.host_updates = HostUpdates()
        self.executor = others.executor(
            self,
            self.gradients,
            self.in_flight,
            self.live_memory,
            self.controller,
            self._make_room,
            others.make_copy,
            self.late,
            self.host_updates,
        )
        if self.controller.records:
            self.executor.recorder.start()
        self.split = DeviceSplit(self, self._empty_device)
        self.scratch_use = StepScratchUse(self, self.split, self.executor, self._pending_reads)
        self.stepping: str | None = None
        """The class of the optimizer whose step is running, or broke off."""
        self._in_closure = False
        self.noted_ops: Any = None
        """Elementwise ops of a step that wait to run as one (`runtime/eager/joined.py`, above)."""
        self._warned: set[str] = set()
        self.regions: dict[str, Region] = {}
        self.fusions: Fusions | None = None
        """What compiles them; None until a graph asks for it."""
        self.steps: dict[Hashable, Schedule] = {}
        self.repeats: dict[Hashable, list[Repeat]] = {}
        """List ops of late, by what sort of call they are (`runtime/eager/streaming.py`, above)."""
        self._reading: dict[int, Callable[[], Schedule | None]] = {}
        self._summing: dict[int, Callable[[], Schedule]] = {}
        self.inexact: dict[tuple[str, str], str] = {}
        """(weight or module, pass) -> why its results may round otherwise than eager's."""
        self.births: dict[int, torch.device] = {}
        self.unlike: set[int] = set()
        """Entries of a model being built that hold rank 0's values, since the ranks had others."""
        self.dumps: dict[Path, Any] = {}
        self.numbers = count()
        self._depth = DEPTH
        """Most chunks of a step on the device at once."""
        self.root: weakref.ref[torch.nn.Module] | None = None
        """The model, for what commits by itself."""
        disk, ring = self.durable, self._context.staging
        self.commit_log = None if disk is None else CommitLog(self, disk, ring)

    def compile_with(self, fusions: Fusions) -> None:
        """Let `fusions` compile for all graphs of the model."""
        self.fusions = fusions

    def belong_to(self, model: torch.nn.Module) -> None:
        """Let `model` be the one that is committed."""
        self.root = weakref.ref(model)

    def may_read_copies(self, serial: int, make: Callable[[], Schedule | None]) -> None:
        """Let `make` say what reads low-precision copies in place of a schedule, if anything
        does."""
        self._reading[serial] = make

    def offers_copies(self, serial: int) -> bool:
        """Whether a schedule reads parameters after a cast, so that copies may be read in its place
        if there is room, or could be on another rank: so it is on all ranks, or on none."""
        return serial in self._reading

    def reading_copies(self, serial: int) -> Schedule | None:
        """The schedule that reads low-precision copies in place of another; None: there is none."""
        make = self._reading.get(serial)
        return None if make is None else make()

    def may_exchange_later(self, serial: int, make: Callable[[], Schedule]) -> None:
        """Let `make` say what a backward walks within `no_sync` in place of a schedule."""
        self._summing[serial] = make

    def summing_alone(self, serial: int) -> Schedule:
        """The schedule that a backward walks within `no_sync` in place of another, which exchanges
        gradients."""
        return self._summing[serial]()

    def step(self, key: Hashable, build: Callable[[], Schedule]) -> Schedule:
        """The step schedule of `key`, which says all that `build` depends on; built once."""
        if key not in self.steps:
            made = build()
            verify_schedule(made)
            self.homes.plan_device(made.peak_bytes)
            self.scratch_use.need(made)
            self.steps[key] = made
        return self.steps[key]

    def forget_steps(self) -> None:
        """Where entries rest will change: step schedules are built anew."""
        self.steps.clear()
        self.repeats.clear()
        self.arena.lent.clear()
        self.executor.entries_moved()

    def entries(self) -> list[Entry]:
        """All that are alive."""
        self.enter("")
        return list(self._entries.values())

    def begin_step(self, optimizer: str) -> None:
        """A step of an optimizer of this class begins.

        raises  Unsupported, if the model is durable and a step broke off in the middle
        """
        if self.stepping is not None and self.commit_log is not None:
            raise Unsupported(
                f"a step of {self.stepping} broke off, so that some parameters are updated and "
                "others are not, and a commit would keep that",
                "build both again and call zcompile.resume: the last commit is whole",
            )
        self.run_noted_ops()  # of a step that broke off
        self.stepping = optimizer

    @contextmanager
    def in_closure(self) -> Iterator[None]:
        """Within, the step runs the user's closure, whose ops are not the optimizer's."""
        self.run_noted_ops()
        self._in_closure = True
        try:
            yield
        finally:
            self._in_closure = False

    @property
    def is_walking(self) -> bool:
        """Whether a schedule is being walked."""
        return self.executor.is_running

    def can_open(self, schedule: Schedule) -> bool:
        """Whether the slots of a step are there."""
        return self.scratch_use.open(schedule)

    def walk(
        self, schedule: Schedule, inputs: list[Any], entries: Sequence[Entry], of: Schedule | None
    ) -> None:
        """Walk a part of the call `of` of an optimizer, which is recorded in its place; None:
        nothing is."""
        self.executor.run(schedule, inputs, entries, of)
        if self.host_updates.wanted:
            self.meter.count("updates_on_host", sum(row.on_host for row in schedule.rows))

    def note_call(self, schedule: Schedule, entries: Sequence[Entry]) -> None:
        """Record a call of an optimizer of which nothing is walked yet."""
        self.executor.note_waiting(schedule, entries)

    def updates_in_the_way(self) -> None:
        """Step after step, late updates are asked for before the next forward."""
        self.controller.updates_in_the_way()

    def cancel_step(self) -> None:
        """The step that has begun does not come; it has changed nothing yet."""
        self.stepping = None

    def note_ops_by(self, ops: Any) -> Any:
        """Let elementwise ops of steps wait in `ops`; returned."""
        self.noted_ops = ops
        return ops

    def run_noted_ops(self) -> None:
        """Run the ops of a step that wait. raises  what a transfer raises"""
        if self.noted_ops is not None:
            self.noted_ops.settle()

    def end_step(self) -> None:
        if self.noted_ops is not None:
            self.noted_ops.end_step()
        self.stepping = None
        self.executor.wait_for_in_flight()
        self.executor.recorder.stepped()
        self.executor.clocks.stepped()
        self.late.step_ended()
        self.gradients.end_step()

    def settle(self) -> None:
        """Run the ops of a step that wait, and compute the late updates that do."""
        self.run_noted_ops()
        self.late.settle()

    def reclaim(self, needed_bytes: int) -> bool:
        """Make room in the arena; whether there is more of it now."""
        return self.controller.reclaim(needed_bytes)

    def take_gradient(self, leaf: Leaf, grad: Tensor, offset: int | None) -> None:
        self.gradients.take(leaf, grad, offset)

    @property
    def budgets(self) -> dict[str, int]:
        """Bytes that each tier may take; of the disk, what is its own or free."""
        capacities = self.homes.capacities()
        return {**capacities, "device": self.device_budget, "host": self.host_budget}

    def free_bytes(self) -> dict[str, int]:
        """Free bytes of each tier but the device."""
        return self.homes.free()

    def compiled(self, memory: Memory) -> None:
        """A graph was compiled that holds so much of the device; a run has no use for the curve."""

    def _empty_device(self) -> list[Entry]:
        """Evict what rests on the device; returns what could not be evicted."""
        self.executor.foresight.clear()
        self.drain()
        self.controller.arena_resizes()
        self.forget_steps()
        return [entry for entry in self.entries() if entry.on_device]

    @property
    def window_bytes(self) -> int:
        """Bytes of the arena for what streams through: all but what rests there."""
        return self.homes.device.streamed_bytes

    @property
    def step_room(self) -> StepRoom:
        """The room that an optimizer's step streams through now."""
        return self.scratch_use.room(self.window_room)

    def stream_through(self, depth: int, scratch: StepRoom) -> None:
        """Let steps of an optimizer keep `depth` chunks on the device at once, and stream through
        `scratch` while graphs hold nothing."""
        self._depth = depth
        self.scratch_use.plan(scratch)

    def write_behind(self, nbytes: int) -> None:
        """Let slots of at most so many bytes pass the ring on their way to the disk."""
        self._context.staging.write_behind(nbytes)

    @property
    def window_room(self) -> StepRoom:
        """The arena's streaming buffer, in chunks."""
        return StepRoom(0, self.window_bytes, self.device.chunk_bytes, self._depth)

    def _make_room(self, nbytes: int, schedule: Schedule) -> None:
        """Compiled graphs are about to hold so much, in a call of `schedule`, or of its
        backward."""
        self.scratch_use.leave()
        if nbytes > self.split.held_bytes:
            before = self.live_memory.nbytes
            self.controller.evict_staying()
            nbytes -= before - self.live_memory.nbytes
        if nbytes + schedule.least_bytes > self.device_budget:
            before = self.live_memory.nbytes
            gc.collect()  # before giving up: dead reference cycles may hold values
            nbytes -= before - self.live_memory.nbytes
        self.split.hold(nbytes, schedule.least_bytes)

    def tiles_by_kernels(self) -> bool:
        """Whether kernels of our own compute tiles of a loss."""
        return self.config.tiles_by_kernels

    def ways(self) -> TransferModes:
        """How bytes travel here, for who predicts it."""
        device, ring = self.device, self._context.staging
        emulated = device.torch_device.type == "cpu"
        return TransferModes(
            asynchronous=not emulated,
            straight_read=emulated and device.can_bypass_staging("h2d"),
            straight_write=emulated and device.can_bypass_staging("d2h"),
            behind_bytes=ring.behind_bytes,
            chunk_bytes=ring.chunk_bytes,
            ring_bytes=ring.nbytes,
            backlog_bytes=self._backlog.most_bytes,
            updates_end_steps=self.commit_log is not None,
        )

    def any_on_device(self, operands: Sequence[Any]) -> bool:
        """Whether any of the plain operands of a row is a tensor on a device beside the host, which
        may have yet to make it."""
        streams = self.device.streams
        tensors = (value for value in operands if isinstance(value, Tensor))
        return streams is not None and not all(map(streams.is_on_host, tensors))

    @property
    def in_step(self) -> bool:
        """Whether what runs now belongs to an optimizer's step."""
        return self.is_updating and current_pass() < 0

    @property
    def is_updating(self) -> bool:
        """Whether an optimizer makes its step now, as a hook may that runs in backward; no forward
        or backward of the model is on its way."""
        if self.stepping is None or self._in_closure or torch.is_grad_enabled():
            return False
        return not self.executor.is_running

    @property
    def is_trained_through(self) -> bool:
        """Whether backward has run since the last step ended, and no parameter here is trained."""
        if not self.executor.recorder.has_backward:
            return False
        owners = (owner for entry in self.entries() for owner in owners_of(entry))
        return not any(owner.requires_grad for owner in owners)

    def begin_whole(
        self, op: str, entries: Sequence[Entry], plain: Sequence[Tensor], nbytes: int
    ) -> list[LiveStorages]:
        """Make room for an op of an optimizer, and count its operands until `end_whole`.

        op       for people, who are told of which optimizer
        entries  that it gathers
        plain    tensors that it reads or writes
        nbytes   that it makes
        raises   BudgetExceeded, before anything is gathered
        """
        self.scratch_use.leave()
        here = [t for t in plain if self._counts(t)]
        beside = self.live_memory.more(here)
        whole = WholeTensorOp(
            f"{op} of {self.stepping or 'an optimizer'}",
            [(e.name, aligned(e.whole_bytes)) for e in entries],
            [("plain tensors it is called with", beside), ("what it makes", nbytes)],
        )
        if self.live_memory.nbytes + beside + nbytes > self.split.held_bytes:
            self.executor.wait_for_in_flight()  # gradients on their way home, and those that stayed
            self.controller.evict_staying()
        self.split.hold_whole(whole, self.live_memory.nbytes)
        return self.live_memory.exchange((), here)

    def end_whole(self, rows: Sequence[LiveStorages]) -> None:
        """The op is over: its operands count no more."""
        self.live_memory.exchange(rows, ())

    def _counts(self, value: Tensor) -> bool:
        """Whether a tensor lies on the device, outside the arena."""
        here = value.device == self.device.torch_device and value.layout is torch.strided
        return here and not self.arena.holds(value)

    def count_until_dead(self, values: Sequence[Tensor]) -> None:
        """Count results of an op outside the arena until they die."""
        here = [v for v in values if self._counts(v)]
        rows = self.live_memory.exchange((), here)
        self.live_memory.keep(here)
        self.live_memory.exchange(rows, ())

    def note_whole(self, op: str) -> None:
        """Warn once per optimizer of an op that gathers whole tensors inside an optimizer's step.

        A step runs without gradients and outside of backward; what follows one that broke off does
        not.
        """
        if self.in_step and self.stepping is not None and self.stepping not in self._warned:
            self._warned.add(self.stepping)
            log.warning(
                "%s uses %s, which is not streamed: its operands are gathered whole, one tensor "
                "after the other, which is right but slower",
                self.stepping,
                op,
            )

    def fetch(
        self,
        entry: Entry,
        target: Tensor,
        *,
        begin: int = 0,
        after: Sequence[Ticket] = (),
        ahead: bool = False,
    ) -> Ticket:
        """As `Store.fetch`, after transfers that still read the bytes of `target`."""
        after = [*after, *self._pending_reads.of(target)]
        if not ahead:
            entry.settle()  # which may move it
        if entry.on_device:
            return resident.fetch(self, entry, target, begin, after, ahead)
        return super().fetch(entry, target, begin=begin, after=after, ahead=ahead)

    def offload(self, value: Tensor, tier: str, name: str) -> Tensor:
        """Move `value` to a new entry on `tier`; returns its handle. raises TierFull"""
        source = executor.bytes_of(value, Layout.of(value))
        after = [self.device.mark()]  # behind a copy, too, if that is one
        _, handle, ticket = executor.offload(self, source, tier, name, after)
        ticket.join_compute()
        return handle

    def readers(self, target: Tensor) -> Sequence[Ticket]:
        """The transfers that still read the bytes of `target`."""
        return self._pending_reads.of(target)

    def wait_for_readers(self, target: Tensor) -> None:
        """Compute may write to `target` from here on: no transfer reads it any more."""
        for ticket in self._pending_reads.of(target):
            ticket.join_compute()

    def put(
        self, entry: Entry, source: Tensor, *, begin: int = 0, after: Sequence[Ticket] = ()
    ) -> Ticket:
        """As `Store.put`; a fetch over the bytes of `source` will wait for it."""
        entry.settle()  # which may move it
        if entry.on_device:
            ticket = resident.put(self, entry, source, begin, after)
        else:
            ticket = super().put(entry, source, begin=begin, after=after)
            self._pending_reads.add(source, ticket)
        self.in_flight.note(source, source_released(ticket))
        return ticket

    def will_join(self) -> bool:
        # A walk joins what leaves memory beside the arena, and so do gradients in flight.
        return self.executor.walks_here or self.in_flight.expects

    def add(
        self, entry: Entry, source: Tensor, *, begin: int = 0, after: Sequence[Ticket] = ()
    ) -> Ticket:
        """As `Store.add`; a fetch over the bytes of `source` will wait for it."""
        entry.settle()  # which may move it
        if entry.on_device:
            ticket = resident.add(self, entry, source, begin, after)
        else:
            ticket = super().add(entry, source, begin=begin, after=after)
            self._pending_reads.add(source, ticket)
        self.in_flight.note(source, source_released(ticket))
        return ticket

    def read(self, entry: Entry, target: Tensor, *, begin: int = 0) -> Ticket:
        """As `Store.read`, also from the device."""
        entry.settle()  # which may move it
        if entry.on_device:
            return resident.read(self, entry, target, begin)
        return super().read(entry, target, begin=begin)


def entry_behind(handle: torch.Tensor) -> Entry:
    """The entry a handle names. raises  ParameterChanged, if it is gone"""
    return cast(Entry, entry_of(handle))


def session_of(entry: Entry) -> Session:
    """The session whose store holds `entry`."""
    return cast(Session, entry.store)
