"""The executor walks schedules and decides nothing; where nothing moves, by a shorter loop.

Decided at run time is only what cannot be known before: which entry a handle names, and which call
comes next (`foresight.py`). Every fetch waits for the compute that was submitted before the call,
since the slots may have served an earlier schedule.

A value that backward needs and that is offloaded meanwhile becomes an entry of its own, in every
call anew. The entry lives as long as the storage of its handle, which autograd keeps for backward:
when backward is over, or never comes, the entry is freed.
"""

import gc
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import EllipsisType
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from zcompile.errors import CallChanged, ParameterChanged, TierFull, Unsupported
from zcompile.ir.handles import Leaf, entries_of, leaves_of, shown_as
from zcompile.ir.schedule import (
    Agree,
    Borrow,
    Drop,
    EntryIndex,
    Exchange,
    ExchangeBucket,
    Fetch,
    Free,
    Gather,
    GradientOf,
    Left,
    Literal,
    Offload,
    Reduce,
    Run,
    Schedule,
    Slot,
    Wait,
)
from zcompile.ir.schedule import Store as StoreHome
from zcompile.ir.step import StepTrace
from zcompile.ir.torch_compat import is_profiling, materialised, storage_of
from zcompile.ir.types import EntryKind, Layout, Phase
from zcompile.memory.step_footprint import device_peak, held_peak, most_inherited
from zcompile.runtime.device.cores import Cores
from zcompile.runtime.foresight import Foresight, wait_quietly
from zcompile.runtime.gradients.exchanged import Packed
from zcompile.runtime.gradients.gradients import Gradients
from zcompile.runtime.gradients.leaves import owner_of
from zcompile.runtime.host_updates import HostUpdates, HostWalk
from zcompile.runtime.late import JoiningRows, LateUpdates, Progress
from zcompile.runtime.live_memory import (
    NO_STORAGES,
    CallMemory,
    InFlightGradients,
    Lingering,
    LiveMemory,
)
from zcompile.runtime.meter import Walk
from zcompile.runtime.profile import Clocks, Noted, Recorder, Timer, nobody_looks
from zcompile.runtime.ranks.calls import CallDigests, MarkedGradients, marked_gradients
from zcompile.runtime.ranks.fabric import Fabric, Marked, digest_of, told_to_ranks
from zcompile.runtime.store import resident
from zcompile.runtime.store.resident import (
    MakeCopy,
    copies_of,
    refresh_copies,
    source_of,
    wholes_begin,
    wholes_made,
)
from zcompile.runtime.store.store import Entry, Store
from zcompile.runtime.transfer.interrupts import cleanup, deferred_interrupts, uninterrupted
from zcompile.runtime.transfer.ticket import Ready, Ticket
from zcompile.runtime.transfer.transfer import source_released

# --- Who is asked and told ---


class StepPolicy(Protocol):
    """Decides what a call walks, and hears of each recorded step."""

    def step_ended(self, step: StepTrace) -> None:
        """A step was recorded, and the next has not begun."""

    def narrowed(self, schedule: Schedule, entries: Sequence[Entry]) -> Schedule:
        """`schedule`, or the one that reads copies of these entries in its place: in low precision,
        or of the shares of all ranks."""

    def fit(self, schedule: Schedule, entries: Sequence[Entry]) -> Schedule:
        """The schedule for these very entries, where they rest now; of a forward, with the late
        updates that wait for it, unless these are settled on the way."""


class Listener(Protocol):
    """Hears of the schedules that calls of one graph walk."""

    def walked(self, schedule: Schedule, placement: int, homes: tuple[str, ...]) -> None:
        """A call walks `schedule`.

        placement  another number when entries rest elsewhere
        homes      tier of each of its entries
        """


# --- Registers ---


def compute_only(schedule: Schedule, args: list[Any]) -> list[Any]:
    """Run a schedule that moves nothing, of a graph without tiered parameters."""
    values = registers_of(schedule, args)
    for run in schedule.instructions:
        assert isinstance(run, Run)
        compute(run, values)
    return results_of(schedule, values)


def registers_of(schedule: Schedule, args: list[Any]) -> list[Any]:
    """The values a call begins with; `args` is emptied, so that they can die early."""
    values: list[Any] = [*args, *[None] * (schedule.registers - len(args))]
    args.clear()
    for register, constant in schedule.constants:
        values[register] = constant
    return values


def compute(run: Run, values: list[Any], targets: Sequence[Tensor] = ()) -> None:
    """Run a region; its results go into their registers, and into `targets` where it places
    them."""
    given = [values[r] for r in run.inputs]
    for register in run.drops:  # the region owns them: each dies after its last reader inside
        values[register] = None
    if targets:
        assert run.region.call_into is not None
        results = run.region.call_into(given, targets)
    else:
        results = run.region.call(given) if run.region.owns else run.region.call(*given)
    for register, result in zip(run.outputs, results, strict=True):
        values[register] = result


def results_of(schedule: Schedule, values: list[Any]) -> list[Any]:
    """The results of a call, from its registers."""
    return [r.value if isinstance(r, Literal) else values[r] for r in schedule.outputs]


@contextmanager
def uncollected() -> Iterator[None]:
    """A context in which Python looks for no garbage, if it did before.

    A backward makes thousands of objects that live until the optimizer has run. Python would look
    through them again and again while they are made, and through all objects of the process after
    some hundred such steps; afterwards it looks once.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


# --- Offloaded values ---

UNPLANNED = (
    "\n  values of one forward were planned for: call backward before the next forward, or give "
    "activations='recompute' or 'keep', with device_memory for what stays"
)


@uninterrupted
def offload(
    store: Store, source: Tensor, tier: str, name: str, after: Sequence[Ticket]
) -> tuple[Entry, Tensor, Ticket]:
    """Start moving a value to `tier`; returns its entry, the handle of that, and a ticket.

    source  its `bytes_of`, on the compute device; must not be changed before the ticket's
            `join_compute`
    after   complete once `source` is computed
    raises  TierFull
    """
    nbytes = source.numel()
    try:
        entry = store.create(name, EntryKind.ACTIVATION, nbytes, tier=tier)
    except TierFull as error:
        raise TierFull(name, nbytes, error.tiers, UNPLANNED, error.whole) from error
    handle = store.handle(entry)
    return entry, handle, store.put(entry, source, after=after)


def bytes_of(value: Tensor, layout: Layout) -> Tensor:
    """The bytes of `value` in `layout`: uint8 [layout.nbytes], over its own memory if it has that
    layout."""
    value = materialised(value)
    if Layout.of(value) != layout:
        wanted = torch.empty_strided(
            layout.size, layout.stride, dtype=layout.dtype, device=value.device
        )
        value = wanted.copy_(value)
    return value.as_strided((layout.span,), (1,)).view(torch.uint8)


# --- The walk ---


class Counted(NamedTuple):
    """What a backward of which every gradient rests on the device had live, when it was counted.

    most_more  at most, beyond what was live when it began
    lingering  the gradients that counted as in flight when it had ended
    """

    most_more: int
    lingering: Lingering


MOST_PEAKS = 4096
"""Schedules, at the sizes of their calls, of which the peaks are remembered."""


class Executor:
    """Runs the schedules of one store.

    policy     gives each call the schedule that it walks
    make_room  called before a call, with the bytes that will be live outside the arena then
    make_copy  casts the bytes of an entry into those of its copy
    late       the updates that wait for a forward
    on_host    those that the host computes
    """

    def __init__(
        self,
        store: Store,
        gradients: Gradients,
        in_flight: InFlightGradients,
        live_memory: LiveMemory,
        policy: StepPolicy,
        make_room: Callable[[int, Schedule], None],
        make_copy: MakeCopy,
        late: LateUpdates,
        on_host: HostUpdates,
    ) -> None:
        self.store = store
        self.late, self.on_host = late, on_host
        self.gradients = gradients
        self.in_flight, self.live_memory = in_flight, live_memory
        self._policy, self._make_room, self._make_copy = policy, make_room, make_copy
        self.foresight = Foresight(store)
        self.clocks = Clocks(
            store.device,
            lambda: store._backlog.waited_s + in_flight.waited_s + _waited_for(store.device.cores),
            store.meter.traffic,
            store.is_idle,
            store.meter.crests,
        )
        self._busy = threading.Lock()
        self._walker: int | None = None
        """The thread that walks a schedule."""
        self._walked: set[int] = set()
        self.counted: dict[tuple[int, tuple[int, ...]], Counted] = {}
        """By serial and sizes of a schedule; as many as there are `_peaks`, at most."""
        self._peaks: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        self.recorder = Recorder()
        self.call_digests = CallDigests()
        self._agreed_ahead: bytes | None = None
        """The digest of the call that is prepared, if all ranks have agreed on it."""
        self._listeners: dict[str, Listener] = {}
        self._placement = 0

    @property
    def is_running(self) -> bool:
        """Whether a schedule is being walked."""
        return self._busy.locked()

    @property
    def walks_here(self) -> bool:
        """Whether this thread walks a schedule."""
        return self._walker == threading.get_ident()

    def listen(self, graph: str, listener: Listener) -> None:
        """Let `listener` hear of each schedule that a call of `graph` walks."""
        self._listeners[graph] = listener

    def keep_timeline(self, step_ended: Callable[[], None] = nobody_looks) -> None:
        """Time every walk from here on, and record steps as they are walked.

        step_ended  called when a step is known to be over, since the next begins
        """
        self.recorder.start(walks=True)
        self.clocks.keep_timeline(step_ended)
        self.store.meter.keep_passages(True)

    def drop_timeline(self) -> None:
        """Time walks now and then again."""
        self.recorder.keep_walks(False)
        self.clocks.drop_timeline()
        self.store.meter.keep_passages(False)

    def run(
        self,
        schedule: Schedule,
        args: list[Any],
        entries: Sequence[Entry] | None = None,
        of: Schedule | EllipsisType | None = ...,
    ) -> list[Any]:
        """The results of one call; `args` is emptied, so that its values can die early.

        entries  what the handles name, if the caller knows; else it is read from the handles
        of       the call that it is a part of, which is recorded; None: nothing is recorded
        raises   what a transfer raised; Unsupported, if another call is running; what the ranks
                 have failed with before, also where nothing would cross
        """
        recorded = schedule if of is ... else of
        if self.store.fabric is None:
            self._end_step(schedule)
            with deferred_interrupts():
                return self._run(schedule, args, entries, recorded)
        self.store.fabric.check()
        self.store.fabric.check_together(f"run {schedule.call_kind}")
        # An interrupt waits until the call is over, since the others wait for what comes after.
        with deferred_interrupts(), told_to_ranks(self.store.fabric):
            self._end_step(schedule)
            return self._run(schedule, args, entries, recorded)

    def digest_of_call(self, schedule: Schedule, entries: Sequence[Entry]) -> bytes:
        """What ranks compare of a call: what crosses, and of a backward which of the gradients that
        cross are sums of several micro-batches."""
        made = self.call_digests.of(schedule, entries)
        if schedule.phase is not Phase.BACKWARD:
            return made
        summed = self.gradients.unexchanged.names_among(entries)
        return digest_of(made, summed) if summed else made

    def agreed_on(self, digest: bytes) -> None:
        """All ranks have told the same of the call that is prepared, as `digest_of_call` has it:
        it need not be agreed on once more."""
        self._agreed_ahead = digest

    def _end_step(self, schedule: Schedule) -> None:
        """Tell of the step that was recorded, if this call is the first of another."""
        if self.recorder.ends_with(schedule) and (step := self.recorder.end()) is not None:
            self.clocks.pause_ends(schedule)  # which a plan that is made now should know
            with self.clocks.set_aside():
                self._policy.step_ended(step)

    def note_waiting(self, schedule: Schedule, entries: Sequence[Entry]) -> None:
        """Record a call of an optimizer of which nothing is walked yet, since its updates are
        late."""
        self.foresight.stepped()
        if (noted := self.recorder.note(schedule, entries)) is not None:
            noted.walks(None)

    def _run(
        self,
        schedule: Schedule,
        args: list[Any],
        entries: Sequence[Entry] | None,
        recorded: Schedule | None,
    ) -> list[Any]:
        """Make room for a call, and record it, unless it fails."""
        values = registers_of(schedule, args)
        leaves: Sequence[Leaf] = entries or ()
        if entries is None:
            handles = [values[register] for register in schedule.handles]
            entries = cast("list[Entry]", entries_of(handles))
            leaves = leaves_of(handles, entries)
            _check_same_data(schedule, leaves)
        self.wait_for_in_flight(most_inherited(schedule))
        self._prepare_memory(schedule, entries)  # or refuse, before it is a call
        noted = None if recorded is None else self.recorder.note(recorded, entries)
        try:
            return self._carry_out(schedule, values, entries, leaves, noted)
        except BaseException:
            if noted is not None:
                self.recorder.take_back(noted)
            raise

    def _carry_out(
        self,
        schedule: Schedule,
        values: list[Any],
        entries: Sequence[Entry],
        leaves: Sequence[Leaf],
        noted: Noted | None,
    ) -> list[Any]:
        """Prepare a call that there is room for (copies, a schedule that fits), and walk it."""
        if self.late.rows and any(map(_is_tiered, values)):
            self.late.settle()  # a tiered tensor that is no parameter: its ops gather as they run
        self.late.prepare(schedule, entries)
        if schedule.phase is Phase.BACKWARD:
            # Sums are added to gradients as they are.
            self.store.deferrals.apply_all(self.store.holds)
        elif schedule.phase is Phase.FORWARD and self.store.deferrals.any_wait:
            # Schedules of their own, before this one walks.
            if any(map(_is_tiered, values)):  # a view of a gradient, perhaps: as of late updates
                self.store.deferrals.apply_all(self.store.holds)
            else:
                self.store.deferrals.apply_each(entries)
        self._agreed_ahead = None
        schedule = self._policy.narrowed(schedule, entries)
        # Taken now: what this call prepares may walk schedules of its own, on one rank alone.
        agreed_ahead, self._agreed_ahead = self._agreed_ahead, None
        copies: Sequence[Entry] = ()
        if schedule.casts or schedule.copies:
            refresh_copies(schedule, entries, self._make_copy)
            copies = copies_of(schedule, entries)
            entries, leaves = (*entries, *copies), (*leaves, *copies)
        self.store.enter(entries[0].name if entries else "")
        # Last, since what comes before may move entries.
        asked, schedule = schedule, self._policy.fit(schedule, entries)
        if self.late.rows and not schedule.updates_late and any(e.waits for e in entries):
            self.late.settle()
            schedule = self._policy.fit(asked, entries)
        joining, progress = None, None
        if schedule.updates_late:
            joining = self.late.joining(asked, entries)
            assert joining is not None, "a schedule computes what waits"
            entries, leaves = (*entries, *joining.entries), (*leaves, *joining.entries)
            values += [None] * (schedule.registers - len(values))
            for register, value in zip(schedule.operands, joining.inputs, strict=True):
                values[register] = value
            progress = Progress(schedule)
        if noted is not None:
            noted.walks(schedule, (*copies, *(() if joining is None else joining.entries)))
        others = self._plan_peaks(schedule)
        if schedule.serial not in self._walked:
            self._walked.add(schedule.serial)
            self.store.device.trim_after_compile()
        if not self._busy.acquire(blocking=False):
            raise Unsupported(
                "the model is called while a call of it is still running, from another thread or "
                "by a signal handler",
                "call it from one thread at a time, and let a handler set a flag for the loop",
            )
        try:
            self._walker = threading.get_ident()
            if self._listeners and (listener := self._listeners.get(schedule.name)) is not None:
                listener.walked(schedule, self._placement, tuple(e.home for e in entries))
            making = wholes_begin(schedule, entries)
            walk = _Call(self, schedule, values, entries, leaves, progress, joining, agreed_ahead)
            with uncollected(), self._computing(joining, progress):
                walk.run(others)
            wholes_made(making)
        finally:
            self._walker = None
            self._busy.release()
        self.gradients.finish()
        if walk.made and noted is not None:
            self.recorder.made(noted, walk.made)
        return walk.results()

    def _computing(
        self, joining: JoiningRows | None, progress: Progress | None
    ) -> AbstractContextManager[None]:
        """A context in which a forward computes the late updates that joined it, if any."""
        if joining is None or progress is None:
            return nullcontext()
        return self.late.computed(joining, progress)

    def _prepare_memory(self, schedule: Schedule, entries: Sequence[Entry]) -> None:
        """Make room for what will be live outside the arena in a call of `schedule`.

        raises  BudgetExceeded, before anything has changed
        """
        if schedule.phase is not Phase.STEP and not self.is_running:
            self.store.enter("")  # gradients that nobody has any more are gone
            holds, live = schedule.holds, self.live_memory.nbytes
            # Gradients for late updates are let go as values are made (`StepPolicy.fit` sees to it
            # that both fit).
            live -= self.late.held_bytes(schedule, entries)
            self._make_room(live - holds.saved_bytes + holds.needed_bytes, schedule)

    def entries_moved(self) -> None:
        """Entries rest elsewhere from here on: schedules may be arranged anew."""
        self._placement += 1

    @uninterrupted
    def wait_for_in_flight(self, most_bytes: int = 0) -> None:
        """Between two calls: wait until at most `most_bytes` of gradients are in flight.

        Waiting counts as a stall, and not as the host's own work between the calls.
        """
        before = self.in_flight.waited_s
        self.in_flight.wait_down_to(most_bytes)
        if seconds := self.in_flight.waited_s - before:
            self.store.meter.add("stall", seconds)
            self.clocks.waited_between(seconds)

    def _plan_peaks(self, schedule: Schedule) -> int:
        """Tell the meters the peaks that are planned for a call.

        Returns the live bytes outside the arena that are not of this call.
        """
        others = self.live_memory.nbytes - schedule.holds.saved_bytes - schedule.held_bytes
        key = schedule.serial, schedule.holds.sizes
        if key not in self._peaks:
            if len(self._peaks) >= MOST_PEAKS:
                self._peaks.clear()
                self.counted.clear()
            self._peaks[key] = device_peak(schedule), held_peak(schedule)
        together, beside = self._peaks[key]
        homes = self.store.homes
        results = homes.result_bytes if schedule.phase is Phase.STEP else 0
        homes.plan_together(others + together + results)
        self.store.meter.planned_activations.at_least(others + beside)
        return others


def _waited_for(cores: Cores | None) -> float:
    """Seconds that calls have waited for work of the host."""
    return 0.0 if cores is None else cores.waited_s


def _is_tiered(value: Any) -> bool:
    """Whether a value is a tiered tensor."""
    return type(value) is not Tensor and hasattr(value, "entry_layout")


def _check_same_data(schedule: Schedule, leaves: Sequence[Leaf]) -> None:
    """Check that a parameter that backward reads shows what it showed in forward.

    Eager torch reads in backward what a parameter shows then, or what it showed in forward,
    depending on how the op saved it; a graph cannot tell which.

    raises  ParameterChanged, if a parameter that backward reads shows something else than then
    """
    for index, layout in schedule.read_back:
        leaf = leaves[index]
        if leaf.shown is layout:
            continue
        if leaf.shown != layout:
            raise ParameterChanged(
                leaf.name,
                "got another .data between a compiled forward and its backward, which reads it",
                "assign .data before the forward or after the backward, or put back what it had",
            )
        shown_as(leaf, layout)  # the same object is told apart faster


class _Call:
    """One call: the values, tickets and taken slots of a schedule that is being walked."""

    def __init__(
        self,
        executor: Executor,
        schedule: Schedule,
        values: list[Any],
        entries: Sequence[Entry],
        leaves: Sequence[Leaf],
        progress: Progress | None = None,
        joining: JoiningRows | None = None,
        agreed_ahead: bytes | None = None,
    ) -> None:
        """agreed_ahead  digest of the call, if all ranks have agreed on it"""
        self.store = executor.store
        self.progress, self.joining = progress, joining
        self.gradients, self.in_flight = executor.gradients, executor.in_flight
        self.counted, self.live_memory = executor.counted, executor.live_memory
        self.held = CallMemory(executor.live_memory, schedule.holds, schedule.levels, values)
        self.schedule = schedule
        self.values = values
        self.entries = entries
        self.leaves = leaves
        """For each entry, the leaf that its gradient is for."""
        self.tickets: dict[int, Ticket] = {}
        self.foresight = executor.foresight
        self.call = self.foresight.call(schedule, entries)
        self.taken: set[Slot] = set()
        self.in_place: dict[int, Tensor] = {}
        """Tensors over entries where they rest, by id."""
        self.made: list[Entry] = []
        self.bucket: list[Packed] = []
        """Small gradients, until they are exchanged."""
        self.marked: Marked | None = None
        """Which of the gradients each rank has marked, as `marked_gradients` names them."""
        self.any_marked: MarkedGradients | None = None
        """Those of them that any rank has; None: that was not looked at yet."""
        took = executor.clocks.hears_of(schedule)
        self.host = HostWalk(executor.store, entries, executor.late, executor.on_host, took)
        self.cores = None
        """Those that compute shares with the host's updates, where there may be any."""
        if executor.on_host.wanted and not schedule.gathers_inside:
            self.cores = executor.store.device.cores
        self.digest_of_call, self.agreed_ahead = executor.digest_of_call, agreed_ahead
        self.given: dict[int, Ticket] = {}
        self.watch = executor.clocks.watch(schedule)
        # Reading the host's clock costs nothing; an event of a stream costs as much as a transfer.
        self.walk = Walk(schedule.serial, self.watch.timed or executor.store.device.streams is None)

    def results(self) -> list[Any]:
        """The results of the call: no tensor over memory of the store is handed out as it is."""
        values = results_of(self.schedule, self.values)
        if self.gradients.returned:
            self._give_gradients(values)
        if self.in_place.keys().isdisjoint(map(id, values)):
            return values
        return [v.detach() if id(v) in self.in_place else v for v in values]

    def _give_gradients(self, values: list[Any]) -> None:
        """Give autograd itself the gradients of parameters whose hooks only it can call."""
        for position, output in enumerate(self.schedule.outputs):
            if isinstance(output, GradientOf):
                param = owner_of(self.leaves[output.entry])
                values[position] = self.gradients.returned.pop(id(param), None)

    def run(self, others: int) -> None:
        """Walk the schedule; after an error, give everything back.

        others  live bytes outside the arena that are not of this call
        """
        device, meter = self.store.device, self.store.meter
        try:
            self.begun = device.mark()
            self.lap = device.stamp()
            self.given = self.foresight.begin(self.call, others)
            self.watch.hand_over(self.given)
            if self.given:
                self.taken |= {f.slot for f in self.schedule.fetches() if f.ticket in self.given}
            if self.schedule.phase is Phase.BACKWARD:
                self.gradients.count_contributions()
            self.gradients.expect(self.leaves[index] for index in self.schedule.sinks)
            serial = self.schedule.serial
            self.views = resident.resident_views(self.store, self.entries, serial)
            self.gradients.begin()
            self.gradients.on_device.begin(self.schedule, self.leaves)
            self._run_instructions()
            self.gradients.on_device.end()
        except BaseException as error:
            if self.store.fabric is not None:
                self.store.fabric.failed_here(error)  # before anything is waited for
            broken = None
            try:
                broken = self.host.broke_off(self.schedule, error)
                self._send_updates()
            finally:
                self.gradients.abandon()
                self._abandon()
                self.foresight.abandon()
                self.held.abandon()
                self.in_flight.abandon()
            if broken and isinstance(error, Exception):  # not an interrupt, which goes on
                raise broken from error
            raise
        self.held.end(self.values)
        self.walk.end()
        meter.span(self._account, self.lap, device.stamp(), self.walk)
        self.watch.over()

    def _run_instructions(self) -> None:
        """The loop; or the short one, where all rests on the device and such a call was counted."""
        watch, timed, ready = self.watch, self.watch.timed, self.foresight.ready
        at_rest, resting = self.schedule.at_rest, self.gradients.on_device
        sinks = len(self.schedule.lone_gradients)
        if at_rest and resting.to_come == sinks and self.in_flight.at_rest():
            key = self.schedule.serial, self.schedule.holds.sizes
            looks = timed or ready or is_profiling() or self.cores is not None
            if not looks and (counted := self.counted.get(key)) is not None:
                self._run_at_rest(at_rest, counted)
                return
            self._walk_instructions(watch, timed, ready)
            if resting.made == sinks:
                lingering = self.in_flight.lingering()
                self.counted[key] = Counted(self.held.most_more(), lingering)
            return
        self._walk_instructions(watch, timed, ready)

    def _run_at_rest(self, rows: Sequence[Run | Reduce], counted: Counted) -> None:
        """As `_walk_instructions`, of a call in which nothing moves. What it has live was counted
        in one like it: of hundreds of small instructions that takes longer than computing them."""
        values, leaves, resting = self.values, self.leaves, self.gradients.on_device
        self._borrow_each(self.schedule.borrows)
        self.live_memory.rise(counted.most_more)
        staying: list[Tensor] = []
        left = False
        for x in rows:
            if isinstance(x, Run):
                compute(x, values, resting.targets(x.into, leaves))
                continue
            grad, values[x.value] = values[x.value], None
            held = resting.receive(leaves[x.entry], grad)
            if held is None:  # it has another layout than those before it: it leaves by itself
                left = True
                values[x.value] = grad
                mark = self.store.device.mark()
                self.tickets.update(dict.fromkeys(x.after, mark))
                self._reduce(x)
            elif x.stays:
                staying.append(grad)
        self.held.abandon()
        self.live_memory.hold_each(staying)
        if left:  # what is in flight is what has left: the next call is counted anew
            self.counted.pop((self.schedule.serial, self.schedule.holds.sizes), None)
        else:
            self.in_flight.linger(counted.lingering)

    def _walk_instructions(self, watch: Timer, timed: bool, ready: Container[int]) -> None:
        """Carry out one instruction after the other."""
        instructions, begin = self.schedule.instructions, 0
        if is_profiling():
            actions = named_actions()
        else:
            actions = ACTIONS
            if not (timed or ready):  # nobody looks between two borrows
                self._borrow_each(self.schedule.opening)
                begin = len(self.schedule.opening)
        index, runs = begin, self.schedule.staying_runs
        while index < len(instructions):
            if index in runs and not (timed or ready or actions is not ACTIONS):
                self._stay_each(runs[index])
                index += len(runs[index])
                continue
            instruction = instructions[index]
            if timed:
                if seconds := watch.delay_s(index):
                    self._delay_compute(seconds)
                watch.begins(index)
            actions[type(instruction)](self, instruction)
            if timed:
                watch.ends(index)
            if index in ready:
                self.foresight.passed(index)
            index += 1

    def _borrow(self, borrow: Borrow) -> None:
        if borrow.on_host:
            self.host.lend(borrow)
            return
        found = self.views.view(borrow)
        self.values[borrow.register] = self.in_place[id(found)] = found

    def _borrow_each(self, borrows: Sequence[Borrow]) -> None:
        values, in_place = self.values, self.in_place
        lent = self.views.views(borrows, self.schedule.serial)
        if self.schedule.outputs:  # a result that is one of these goes out as a tensor of its own
            in_place.update(zip(map(id, lent), lent, strict=True))
        for borrow, found in zip(borrows, lent, strict=True):
            values[borrow.register] = found

    def _run(self, run: Run) -> None:
        if run.late is not None:
            self._update(run)
            return
        self.held.rises()
        if run.region.on_host:
            self.host.compute(run, self.values)
            return
        targets = self.gradients.on_device.targets(run.into, self.leaves)
        if self.cores is None:
            compute(run, self.values, targets)
        else:
            if not self.cores.take_at_once():
                self._count_stall(self.cores.take)
            try:
                compute(run, self.values, targets)
            finally:
                self.cores.give_back()
        self.held.ran(run, self.values, bool(targets))
        if run.ticket is not None:
            self.tickets[run.ticket] = self.store.device.mark()

    def _update(self, run: Run) -> None:
        """Compute a chunk of a late update."""
        progress = self.progress
        assert progress is not None, "a schedule with late updates"
        progress.begins()
        compute(run, self.values)
        progress.ends()
        if run.ticket is not None:
            self.tickets[run.ticket] = self.store.device.mark()

    @property
    def _account(self) -> str:
        return "optimizer" if self.schedule.phase is Phase.STEP else "compute"

    def _wait(self, wait: Wait) -> None:
        self._join(self.tickets[wait.ticket])
        at = wait.slot.address + wait.offset
        found = self.store.arena.slot_view(at, wait.layout)
        self.values[wait.register] = self.in_place[id(found)] = found

    def _free(self, free: Free) -> None:
        slot = free.slot
        self.values[free.register] = None
        self.taken.discard(slot)
        self.store.arena.give_slot(slot.address, slot.nbytes)

    def _left(self, left: Left) -> None:
        self.held.rises()
        # Until then the copy holds the memory; from then on it is compute's, behind the copy.
        self._join(source_released(self.tickets[left.ticket]))
        self.values[left.register] = None
        self.held.lets_go(left.register)

    def _put(self, store: StoreHome) -> None:
        source = self.store.arena.slot(store.slot.address + store.offset, store.nbytes)
        entry, after = self.entries[store.entry], self._after(store.after)
        self.tickets[store.ticket] = self.store.put(entry, source, begin=store.begin, after=after)

    def _reduce(self, reduce: Reduce) -> None:
        """Start moving a gradient to its home tier, once earlier ones leave room in flight."""
        in_flight, nbytes, leaf = self.in_flight, reduce.nbytes, self.leaves[reduce.entry]
        cast, after = reduce.cast, self._after(reduce.after)
        exchanges = reduce.parts is not None
        if cast is not None and (exchanges or self.gradients.may_rest_narrow(leaf)):
            cast = None  # it leaves as it is
        if cast is not None:
            nbytes = nbytes // cast.copy_dtype.itemsize * cast.dtype.itemsize
        most = self.held.rises().departing or self.schedule.departing_bytes
        self._expect(nbytes, most)
        grad, freed = self.values[reduce.value], NO_STORAGES
        if reduce.drop:
            self.values[reduce.value], freed = None, self.held.gives(reduce.value)
        if reduce.bucketed:
            self.bucket.append(self.gradients.exchanged.packed(leaf, grad))
            in_flight.sent(nbytes, freed)  # a copy of it lies in memory of the host
            return
        if cast is not None:
            grad, after = grad.to(cast.dtype), [self.store.device.mark()]
        if reduce.parts is not None:
            exchanged, self.values[reduce.parts] = self.values[reduce.parts], None
            in_flight.note(grad, exchanged.ticket)
            in_flight.sent(nbytes, freed)  # what ranks make of it lies in memory of the host
            dtype = grad.dtype if reduce.cast is None else reduce.cast.dtype
            if reduce.of_nbytes:
                first = reduce.begin // grad.element_size()
                self.gradients.exchanged.take_tile(leaf, grad, first, exchanged, reduce.tile)
            else:
                self.gradients.exchanged.take(leaf, dtype, exchanged)
            return
        held = self.gradients.on_device.receive(leaf, grad)
        if held is not None:
            in_flight.note(held, self.begun)
        else:
            offset = reduce.begin // grad.element_size() if reduce.of_nbytes else None
            self.gradients.take(leaf, grad, offset, after)
        in_flight.sent(nbytes, freed, stays=reduce.stays and held is not None)

    def _stay_each(self, reduces: Sequence[Reduce]) -> None:
        """As `_reduce` of each: of a planned step one after the other are hundreds, and all that
        happens to one that stays is that others hold it."""
        values, leaves, held, in_flight = self.values, self.leaves, self.held, self.in_flight
        receive, departing = self.gradients.on_device.receive, self.schedule.departing_bytes
        for reduce in reduces:
            grad, nbytes = values[reduce.value], reduce.nbytes
            if receive(leaves[reduce.entry], grad) is None:
                self._reduce(reduce)  # it goes another way
                continue
            most = held.rises().departing or departing
            if in_flight.exceeds(nbytes, most):
                self._count_stall(partial(in_flight.make_way, nbytes, most))
            values[reduce.value] = None
            in_flight.stays(nbytes, grad, held.gives(reduce.value), self.begun)

    def _expect(self, nbytes: int, most: int) -> None:
        """Let compute join gradients in flight until these bytes more fit into `most`."""
        if self.in_flight.exceeds(nbytes, most):
            self._count_stall(partial(self.in_flight.expect, nbytes, most))
        else:
            self.in_flight.expect(nbytes, most)

    def _agree(self, agree: Agree) -> None:
        """Start comparing with the other ranks which collectives this call has, over what; unless
        they have done so with what they keep whole."""
        fabric, entries, gradients = self._fabric, self.entries, self.gradients.exchanged
        detail = self.digest_of_call(self.schedule, entries)
        if self.agreed_ahead is not None:
            # Others go on now: a rank whose plan has made something else of it has to end them.
            if self.agreed_ahead != detail:
                call = f"{agree.name} of {self.schedule.name}"
                rows = self.schedule.collectives
                raise CallChanged(call, len(rows), self.agreed_ahead, detail)
            self.tickets[agree.ticket] = Ready()
            return
        text = f"of {self.schedule.name}: {len(self.schedule.collectives)} collectives"
        narrow, summed = marked_gradients(self.schedule, fabric.mesh)
        marks = [gradients.sees_wide(self.leaves[at]) for at in narrow]
        if summed:
            shared, leaves = self.schedule.exchanged_shares, self.leaves
            marks += [not gradients.comes_alone(leaves[at], shared[at]) for at in summed]
        self.marked = fabric.begin_agreement(agree.name, detail, text, bytes(marks))
        self.tickets[agree.ticket] = self.marked.ticket

    def _any_marked(self) -> MarkedGradients:
        """Those of the gradients which ranks mark that any of them has marked."""
        if self.any_marked is None:
            assert self.marked is not None, "it was agreed on"
            self._join(self.marked.ticket)
            asked = marked_gradients(self.schedule, self._fabric.mesh)
            some = iter(self.marked.every.amax(0).tolist())
            self.any_marked = MarkedGradients(
                *(frozenset(at for at in gradients if next(some)) for gradients in asked)
            )
        return self.any_marked

    def _crosses_wide(self, entry: EntryIndex) -> bool:
        """Whether a gradient that is made narrow is exchanged in its parameter's dtype, as any rank
        has a hook that is to see it so."""
        return entry in self._any_marked().narrow

    def _sums_within_groups(self, entry: EntryIndex) -> bool:
        """Whether a gradient is summed up within each group of ranks, as on no rank anything is to
        be added to it before."""
        if self._fabric.mesh.replicas == 1 or entry not in self.schedule.exchanged_shares:
            return False
        return entry not in self._any_marked().collected

    def _gather(self, gather: Gather) -> None:
        whole = self.store.arena.slot(gather.slot.address, gather.nbytes)
        # What this rank's share is stored from need not be over: the gather only reads that.
        begin, end = self._fabric.share_of(whole, gather.tile)
        readers = [t for part in (whole[:begin], whole[end:]) for t in self.store.readers(part)]
        after = [self.begun, *self._after(gather.after), *readers]
        name = self.entries[gather.entry].name
        self.tickets[gather.ticket] = self._fabric.gather(whole, name, after, gather.tile)

    def _exchange(self, x: Exchange) -> None:
        leaf, entry = self.leaves[x.entry], self.entries[x.entry]
        grad, cast = self.values[x.value], self.schedule.narrow_gradients.get(x.entry)
        narrow = cast is not None and grad.dtype is cast.copy_dtype
        wide_bytes = 0
        wide = cast is not None and narrow and self._crosses_wide(x.entry)
        if cast is not None:
            entry.note_crossing(wide)
        if cast is not None and wide:
            wide_bytes = grad.numel() * cast.dtype.itemsize
            self._expect(wide_bytes, self.schedule.departing_bytes)
            grad, narrow = grad.to(cast.dtype), False
        dtype = None
        if self._sums_within_groups(x.entry):
            dtype = grad.dtype if cast is None else cast.dtype
        seen, grad = grad, self.gradients.exchanged.before(leaf, grad, narrow, x.is_tile)
        # Hooks may have changed it, and it may be a copy: compute has got further than `x.after`.
        after: Sequence[Ticket] = [*self._after(x.after), self.store.device.mark()]
        if not x.is_tile:
            grad, after = self.gradients.exchanged.with_sum(leaf, grad, after)
        made = self._fabric.exchange(grad, entry.partition, entry.name, after, x.tile, dtype)
        self.values[x.register], self.tickets[x.ticket] = made, made.ticket
        if wide_bytes:
            self.in_flight.note(seen, made.ticket)
            self.in_flight.sent(wide_bytes, NO_STORAGES)

    def _exchange_bucket(self, x: ExchangeBucket) -> None:
        """Start exchanging small gradients; what all ranks make of each becomes that."""
        packed, self.bucket = self.bucket, []
        after = [*self._after(x.after), self.store.device.mark()]  # behind the copies to the host
        after += [ticket for piece in packed for ticket in piece.after]
        found = self._fabric.exchange_all([piece.flat for piece in packed], after)
        self.tickets[x.ticket] = found[0].ticket
        for (leaf, flat, _), exchanged in zip(packed, found, strict=True):
            self.gradients.exchanged.take(leaf, flat.dtype, exchanged)

    @property
    def _fabric(self) -> Fabric:
        fabric = self.store.fabric
        assert fabric is not None, "there are collectives"
        return fabric

    def _after(self, tickets: Sequence[int]) -> list[Ticket]:
        return [self.tickets[t] for t in tickets]

    def _fetch(self, fetch: Fetch) -> None:
        ticket = fetch.ticket
        given = ticket in self.given
        self.tickets[ticket] = self.given.pop(ticket) if given else self._start(fetch)

    def _start(self, fetch: Fetch) -> Ticket:
        arena = self.store.arena
        entry = source_of(fetch, self.entries)
        arena.take_slot(fetch.slot.address, fetch.slot.nbytes, entry.name)
        self.taken.add(fetch.slot)
        if self.schedule.phase is not Phase.STEP:
            self.store.meter.count("gathers")
        return self.store.fetch(
            entry,
            arena.slot(fetch.slot.address + fetch.offset, fetch.nbytes),
            begin=fetch.begin,
            after=[self.begun, *self._after(fetch.after)],
        )

    def _drop(self, drop: Drop) -> None:
        for register in drop.registers:
            self.in_place.pop(id(self.values[register]), None)
            self.values[register] = None
        assert self.joining is not None, "a late update has used it"
        self.joining.drop(self.entries[drop.entry])

    def _offload(self, x: Offload) -> None:
        value, after = self.values[x.value], self._after(x.after)
        source = bytes_of(value, x.layout)
        if storage_of(source) is not storage_of(value):
            self.held.copied(x.value, source)
            after = []  # compute has made the copy just now, and not when it made the value
        after = after or [self.store.device.mark()]
        made, handle, ticket = offload(self.store, source, x.tier, x.name, after)
        self.made.append(made)
        self.values[x.register], self.tickets[x.ticket] = handle, ticket

    def _join(self, ticket: Ticket) -> None:
        self._count_stall(ticket.join_compute)

    def _count_stall(self, until: Callable[[], None]) -> None:
        """Wait by `until`, and count that as a stall, if this walk is timed."""
        if not self.walk.timed:
            until()
            return
        device, meter = self.store.device, self.store.meter
        before = device.stamp()
        meter.span(self._account, self.lap, before, self.walk)
        until()
        self.lap = device.stamp()
        meter.span("stall", before, self.lap, self.walk)

    def _delay_compute(self, seconds: float) -> None:
        """Let compute do nothing for so long, which counts as nothing."""
        device = self.store.device
        assert device.streams is not None, "compute runs beside the host"
        self.store.meter.span(self._account, self.lap, device.stamp(), self.walk)
        device.streams.delay_compute(seconds)
        self.lap = device.stamp()

    def _send_updates(self) -> None:
        """After an error: send home what late updates have written whole."""
        for store in self.progress.sends(self.tickets.__contains__) if self.progress else ():
            source = self.store.arena.slot(store.slot.address + store.offset, store.nbytes)
            after = [self.store.device.mark()]
            entry = self.entries[store.entry]
            self.tickets[store.ticket] = self.store.put(
                entry, source, begin=store.begin, after=after
            )

    @cleanup
    def _abandon(self) -> None:
        """After an error: wait for transfers in flight, then give the taken slots back."""
        for ticket in (*self.tickets.values(), *self.given.values()):
            wait_quietly(ticket)
        for slot in self.taken:
            self.store.arena.give_slot(slot.address, slot.nbytes)


Action = Callable[[_Call, Any], None]

ACTIONS: dict[type, Action] = {
    Run: _Call._run,
    Borrow: _Call._borrow,
    Fetch: _Call._fetch,
    Wait: _Call._wait,
    Free: _Call._free,
    Reduce: _Call._reduce,
    Offload: _Call._offload,
    Left: _Call._left,
    Drop: _Call._drop,
    StoreHome: _Call._put,
    Agree: _Call._agree,
    Gather: _Call._gather,
    Exchange: _Call._exchange,
    ExchangeBucket: _Call._exchange_bucket,
}
"""Class of an instruction -> what a call does to carry one out."""


def named_actions() -> dict[type, Action]:
    """`ACTIONS`, each inside a range of torch.profiler: "zinf fetch blocks.3.up.weight"."""

    def named(act: Action) -> Action:
        def within_range(call: _Call, instruction: Any) -> None:
            x = instruction.effects
            with torch.profiler.record_function(f"zinf {x.kind} {x.name}"):
                act(call, instruction)

        return within_range

    return {kind: named(act) for kind, act in ACTIONS.items()}
