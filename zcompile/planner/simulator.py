"""Simulates training steps without a device: the instructions of the executor, walked on a clock.

The host starts what comes next and waits where the executor would; compute goes on in order, on the
host's own thread or beside it; transfers travel as `links.py` says. Beside the host, on CUDA, it is
compute that waits for a copy, by an event: the host waits only until all parts of the copy are
enqueued, for room in the backlog, and where memory goes back to the device for good. A step is
walked several times in a row, since the transfers that are ahead when it begins were started while
the one before still ran, and the last walk is the answer (`simulate`). `predicted` gives it as
plain numbers, beside those that `zcompile.stats` measures.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from zcompile.ir.effects import (
    COMPUTE,
    FABRIC,
    GRADIENT,
    IN,
    Effects,
    HomeAccess,
    Instruction,
    Register,
    Slot,
    Ticket,
)
from zcompile.ir.step import Moment, Passage, StepCall, StepTrace, Timeline
from zcompile.ir.types import EntryRef, Phase, aligned
from zcompile.machine.cost import Costs
from zcompile.memory.step_footprint import StepFootprint
from zcompile.planner.host_step import order_of_need
from zcompile.planner.links import (
    CORES,
    HOST,
    LinkSimulator,
    RecordingLinkSimulator,
    SimTransfer,
    TaskLane,
)
from zcompile.planner.paths import LinkPaths


class ComputeTask(NamedTuple):
    """A piece of compute, the piece before it, and the time at which the host came to it."""

    before: SimTransfer
    issued_s: float
    task: SimTransfer

    @property
    def stall_s(self) -> float:
        """Seconds that compute waited for more than the host and what is before."""
        return max(0.0, time_of(self.task.begin_s) - later(self.before, self.issued_s))


class WalkedInstruction(NamedTuple):
    """An instruction that was walked; its times are known once all traffic is over.

    waited_s  seconds of them that the host waited
    work      the compute that it started; sent: the transfer
    """

    call: int
    number: int
    instruction: Instruction
    begin_s: float
    end_s: float
    waited_s: float
    work: ComputeTask | None
    sent: SimTransfer | None
    together_bytes: int
    outside_bytes: int

    def moment(self, begun: float) -> Moment:
        """The instruction with its times, in seconds since `begun`."""
        if self.work is not None:
            begin, end = time_of(self.work.task.begin_s), time_of(self.work.task.over_s)
            stall = self.work.stall_s + self.waited_s
        else:
            begin, end, stall = self.begin_s + self.waited_s, self.end_s, self.waited_s
        sent = arrived = None
        if self.sent is not None:
            sent, arrived = time_of(self.sent.begin_s) - begun, time_of(self.sent.home_s) - begun
        return Moment(
            self.call,
            self.number,
            self.instruction,
            begin - begun,
            end - begun,
            stall,
            sent,
            arrived,
            self.together_bytes,
            self.outside_bytes,
        )


def time_of(time_s: float | None) -> float:
    """A time that must be known by now."""
    assert time_s is not None, "asked before all traffic was over"
    return time_s


def later(task: SimTransfer, host_s: float) -> float:
    """The time at which both a task and the host are done."""
    return max(time_of(task.over_s), host_s)


class WaitBetween(NamedTuple):
    """A wait between two calls: of the host, from `begin_s` to `end_s`; or of compute, by `work`.

    before  the piece of compute before it
    """

    before: SimTransfer
    begin_s: float
    end_s: float
    work: ComputeTask | None

    @property
    def idle_s(self) -> float:
        """Seconds of it in which compute was idle."""
        if self.work is not None:
            return self.work.stall_s
        return max(0.0, self.end_s - later(self.before, self.begin_s))


_Use = tuple[EntryRef, int, int, bool]
"""Bytes [begin, end) of an entry that the host computes with: (entry, begin, end, writes)."""
_Row = tuple[int, int, bool, SimTransfer]
"""A transfer in flight: (begin, end, writes, transfer) on bytes [begin, end) of an entry."""


class Leaving:
    """Transfers of bytes that leave slots, which may have been given back, by where the slots are:
    the same addresses come again step after step."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], list[tuple[int, SimTransfer]]] = {}
        """(begin, end) -> transfers, each with its place in the order of all."""
        self._places = itertools.count()
        self._kept, self._most = 0, 16
        """Transfers that are remembered, and how many may be before those that ended are dropped:
        looking for these each time would take longer than all else."""
        self._refilled: set[tuple[int, int]] = set()
        """(begin, end) of what was overwritten since a transfer from there started."""

    def start(self, slot: Slot, transfer: SimTransfer) -> None:
        """Add a transfer that starts, in the place of all that what it moves came after."""
        at = slot.address, slot.end
        if at in self._refilled:
            self._refilled.remove(at)
            self._kept -= len(self._rows.pop(at, ()))
        if self._kept >= self._most:
            live = {at: [r for r in rows if r[1].over_s is None] for at, rows in self._rows.items()}
            self._rows = {at: rows for at, rows in live.items() if rows}
            self._kept = sum(map(len, self._rows.values()))
            self._most = 2 * self._kept + 16
        self._rows.setdefault(at, []).append((next(self._places), transfer))
        self._kept += 1

    def overwritten(self, begin: int, end: int) -> list[SimTransfer]:
        """Those that have not ended, of slots that share bytes with [begin, end), as they came; a
        transfer to there starts after them.

        What leaves a slot in there from now on comes after that transfer, and so after them: it
        stands for them. Else a step of many chunks, of which each waits for all that left its
        lane, would take time with the square of them.
        """
        inside = [(at, rows) for at, rows in self._rows.items() if at[0] < end and begin < at[1]]
        self._refilled.update(at for at, _ in inside if begin <= at[0] and at[1] <= end)
        return _pending(rows for _, rows in inside)

    def behind(self, address: int) -> list[SimTransfer]:
        """Those that have not ended, of slots that begin at `address` or behind it."""
        return _pending(many for (first, _), many in self._rows.items() if first >= address)


def _pending(groups: Iterable[list[tuple[int, SimTransfer]]]) -> list[SimTransfer]:
    found = [row for rows in groups for row in rows if row[1].over_s is None]
    if len(found) > 1:
        found.sort(key=itemgetter(0))
    return [transfer for _, transfer in found]


class InFlight:
    """Transfers in flight, by the entry: which of them another one must wait for."""

    def __init__(self) -> None:
        self._rows: dict[EntryRef, list[_Row]] = {}

    def start(
        self, ref: EntryRef, begin: int, end: int, writes: bool, transfer: SimTransfer
    ) -> None:
        """Add a transfer that starts."""
        self._rows.setdefault(ref, []).append((begin, end, writes, transfer))

    def blockers(self, ref: EntryRef, begin: int, end: int, writes: bool) -> list[SimTransfer]:
        """Transfers in flight over those bytes of the entry, if either side writes."""
        rows = self._rows.get(ref)
        if not rows:
            return []
        self._rows[ref] = rows = [row for row in rows if row[3].home_s is None]
        return [
            transfer
            for first, last, wrote, transfer in rows
            if first < end and begin < last and (wrote or writes)
        ]


class SimulatedSteps:
    """Host, compute and arena while step after step is walked. Times in seconds.

    tells  whether each instruction is remembered, for a timeline
    """

    def __init__(
        self, step: StepTrace, costs: Costs, homes: Mapping[EntryRef, str], tells: bool = True
    ) -> None:
        self._calls = step.calls
        self._result_bytes = step.result_bytes
        self._tells = tells
        self._costs = costs
        self._asynchronous = costs.ways.asynchronous
        self._routes = LinkPaths(step, costs, homes)
        ways = costs.ways
        simulator = RecordingLinkSimulator if tells else LinkSimulator
        every = (x for call in step.calls for x in call.schedule.effects)
        updates = any(x.on_host for x in every)
        # Where compute takes the host's cores, it and what the host computes beside take turns.
        shares = updates and not self._asynchronous
        self._cores = (TaskLane(CORES),) if shares else ()
        self._on_host = (TaskLane(HOST, shares=CORES if shares else None),) if updates else ()
        lanes = {lane.name: lane for lane in (*self._cores, *self._on_host)}
        links = {**costs.machine.links, **lanes}
        self._traffic = simulator(links, ways.chunk_bytes, ways.ring_bytes)
        self._need = order_of_need(step) if updates else {}
        self._lent: dict[Register, _Use] = {}
        """What the host is to compute with next."""
        self._updating: list[SimTransfer] = []
        """What it computes, or will."""
        self._sent_of: dict[SimTransfer, str] = {}
        """The name of what each transfer moves, if instructions are remembered."""
        self._collectives: dict[str, SimTransfer] = {}
        """The last collective of each kind, behind which the next one comes."""
        self._ahead = self._routes.handovers(self._calls)
        self._issues: dict[tuple[str, int], float] = {}
        self._host = 0.0
        self._compute = self._begun = SimTransfer(0)
        self._done: dict[Ticket, SimTransfer] = {}
        self._given: dict[Ticket, SimTransfer] = {}
        self._traffic.start(self._compute, 0.0)
        self._in_flight = InFlight()
        self._leaving = Leaving()
        scratches = (call.schedule.scratch_at for call in step.calls)
        self._scratch_at = min((at for at in scratches if at), default=0)
        self._backlog: list[SimTransfer] = []
        self._taken = sum(map(aligned, self._routes.resident("device")))
        self._held = StepFootprint()
        self._departing: deque[SimTransfer] = deque()
        self._last_copies: dict[str, list[SimTransfer]] = {}
        """By stream, which has one link: copies that the device makes itself, the newest of each
        chain that is in order."""
        self._joined: ComputeTask | None = None
        """What compute waits for before the instruction that is walked sends its gradient."""
        self._begin()

    def _begin(self) -> None:
        """Reset what is counted per step."""
        self._routes.begin()
        self._peak, self._held_peak = self._taken, self._held.now
        self._together = self._taken + self._held.now
        self._sent: list[SimTransfer] = []
        self._walked: list[WalkedInstruction] = []
        self._crest = self._held.now
        self._between: list[WaitBetween] = []

    def timeline(self) -> Timeline:
        """Walk the step once more, and return its times and bytes."""
        before = self._end()
        ends = self.step()
        self._traffic.finish()
        begun = since = before()
        phases = dict.fromkeys(Phase, 0.0)
        for call, end in zip(self._calls, ends, strict=True):
            phases[call.phase] += end() - since
            since = end()
        moments = tuple(walked.moment(begun) for walked in self._walked)
        nbytes, busy_s = self._routes.totals(self._sent)
        return Timeline(
            step_s=since - begun,
            compute_s=sum(m.end_s - m.begin_s for m in moments if m.is_work),
            stall_s=sum(m.stall_s for m in moments) + sum(wait.idle_s for wait in self._between),
            phases=phases,
            nbytes=nbytes,
            busy_s=busy_s,
            peak_bytes=self._peak,
            held_bytes=self._held_peak,
            together_bytes=self._together,
            moments=moments,
            passages=tuple(self._passages(begun, since)),
        )

    def _passages(self, begun: float, ended: float) -> Iterator[Passage]:
        """What the links carried from `begun` to `ended`, in seconds since `begun`."""
        if not isinstance(self._traffic, RecordingLinkSimulator):
            return
        by = {w.sent: (w.call, w.number) for w in self._walked if w.sent is not None}
        for row in self._traffic.carried:
            if row.end_s > begun and row.begin_s < ended:
                name = self._sent_of[row.transfer]
                call, number = by.get(row.transfer, (None, None))
                times = row.begin_s - begun, row.end_s - begun
                yield Passage(row.link, name, row.nbytes, *times, call, number)

    def seconds(self) -> float:
        """Walk the step once more; `step_s` of the timeline, for which not all traffic need be
        over."""
        before = self._end()
        ends = self.step()
        self._traffic.until(self._compute, "over_s")
        return ends[-1]() - before() if ends else 0.0

    def step(self, first: int = 0) -> list[Callable[[], float]]:
        """Walk all calls from the `first` on; returns functions that give the end of each, once all
        traffic is over."""
        self._begin()
        ends = []
        for number, call in list(enumerate(self._calls))[first:]:
            before = self._calls[number - 1].schedule
            self._host += self._costs.gap_seconds(before, call.schedule)
            self._walk(number, call)
            ends.append(self._end())
        return ends

    def _end(self) -> Callable[[], float]:
        """A function that gives the time at which host and compute have both come to here."""
        return partial(later, self._compute, self._host)

    def _walk(self, number: int, call: StepCall) -> None:
        self._call, self._begun = call, self._compute
        if call.phase is not Phase.STEP and (leaving := self._from_scratch()):
            self._wait_between(partial(self._await, leaving))
        self._wait_between(partial(self._join, self._held.begin(call.schedule)))
        results = self._result_bytes if call.phase is Phase.STEP else 0
        self._grow(results)
        then, starts = self._ahead[number]
        self._done, self._given = ({}, self._given) if then is None else (self._given, {})
        for index, x in enumerate(call.schedule.effects):
            self._waited, self._joined, begin = 0.0, None, self._host
            before, self._crest = self._taken, self._held.now
            if x.changes_live:
                self._rise()
            work = sent = None
            if x.lane is COMPUTE:
                work = self._act(x)
            elif x.lane is FABRIC:
                sent = self._cross(x)
            else:
                sent = self._arrive(x) if x.lane is IN else self._leave(x)
                work = self._joined
            if self._tells:
                done = begin, self._host, self._waited, work, sent
                together = max(before + self._crest, self._taken + self._held.now)
                peaks = together, max(self._crest, self._held.now)
                self._walked.append(
                    WalkedInstruction(
                        number, index, call.schedule.instructions[index], *done, *peaks
                    )
                )
            for fetch in starts.get(index, ()):
                self._bring(then or call, fetch.effects, self._given, self._compute)
        if call.phase is Phase.STEP and self._costs.ways.updates_end_steps:
            self._wait_between(partial(self._await, self._updating))
        self._updating = [task for task in self._updating if task.over_s is None]
        self._taken -= results
        after = self._calls[(number + 1) % len(self._calls)].phase
        self._wait_between(partial(self._join, self._held.end(after)))

    def _act(self, x: Effects) -> ComputeTask | None:
        """Walk an instruction of the compute stream; returns the compute that it starts."""
        task, region = None, x.region
        if x.on_host:
            self._update(x)
            return None
        if x.home is not None:
            self._await_home(x.home)
        if region is not None:
            after, since = [self._done[ticket] for ticket in x.after], self._host
            if self._asynchronous:
                self._until_enqueued(after)
            task = self._work(self._costs.region_seconds(region), *after)._replace(issued_s=since)
            if self._asynchronous:
                self._host += self._costs.launch_seconds(region)
        else:
            if x.after:
                awaited = [self._done[ticket] for ticket in x.after]
                task = self._compute_joins(awaited)
                if x.changes_live:  # it gives memory back
                    self._gone(awaited)
            self._issue(x)
        if x.takes is not None:
            self._take(x.takes)
        if x.gives_back is not None:
            self._give_back(x.gives_back)
        if x.lets_go:
            self._held.let_go(x.lets_go)
        if x.ticket is not None:
            self._done[x.ticket] = self._compute
        return task

    def _compute_joins(self, transfers: Sequence[SimTransfer]) -> ComputeTask:
        """Let compute wait for transfers; beside the host, which waits until they are enqueued."""
        since = self._host
        if self._asynchronous:
            self._until_enqueued(transfers)
        return self._work(0.0, *transfers)._replace(issued_s=since)

    def _until_enqueued(self, transfers: Sequence[SimTransfer]) -> None:
        """Let the host wait until all copies of transfers are enqueued on the device."""
        for transfer in transfers:
            for other, moment in transfer.hears_of:
                self._host = max(self._host, self._traffic.until(other, moment))
            if not transfer.by_events:
                self._host = max(self._host, self._traffic.until(transfer, "queued_s"))

    def _gone(self, transfers: Sequence[SimTransfer]) -> None:
        """Compute has joined transfers that read memory of its own, and has that memory again:
        beside the host at once, since whatever it does next comes after them."""
        if self._asynchronous:
            self._backlog = [j for j in self._backlog if j not in transfers]
        else:
            self._await(transfers)

    def _work(self, seconds: float, *after: SimTransfer) -> ComputeTask:
        """Let compute go on for so many seconds, after all before it and `after`."""
        cores = self._cores if seconds else ()
        task = SimTransfer(0, cores, len(cores), seconds=seconds)
        before, self._compute = self._compute, task
        issued = self._host
        self._traffic.advance(self._host)
        if self._asynchronous or cores:
            self._traffic.start(task, self._host, (before, *after))
            if not self._asynchronous:
                self._host = self._traffic.until(task, "over_s")
        else:  # nothing is left before it but `after`, and nothing follows it until it is over
            for transfer in after:
                self._traffic.until(transfer, "over_s")
            self._host = self._traffic.compute(task, seconds)
        return ComputeTask(before, issued, task)

    def _update(self, x: Effects) -> None:
        """Lend the host bytes of an entry, or have it compute with what it was lent, which is in
        flight on those entries from here on as a transfer is.

        It first waits for compute so far where it reads a value that the device has made.
        """
        if x.region is None:
            assert x.home is not None, "it is lent bytes of an entry"
            use = self._call.entry_of(x.home), x.home.begin, x.home.end, x.home.writes
            self._lent |= dict.fromkeys(x.defines, use)
            self._issue(x)
            return
        uses = [self._lent.pop(register) for register in x.reads if register in self._lent]
        before = [task for use in uses for task in self._in_flight.blockers(*use)]
        places = [self._need[use[0]] for use in uses if use[0] in self._need]
        seconds, urgency = (
            self._costs.region_seconds(x.region),
            min(places, default=len(self._need)),
        )
        if x.region.awaits_compute:
            self._host = max(self._host, self._traffic.until(self._compute, "over_s"))
        task = SimTransfer(0, self._on_host, 1, seconds=seconds, urgency=urgency)
        self._traffic.advance(self._host)
        self._traffic.start(task, self._host, (), dict.fromkeys(before))
        for use in uses:
            self._in_flight.start(*use, task)
        self._updating.append(task)
        if self._asynchronous:
            self._host += self._costs.launch_seconds(x.region)

    def _await_home(self, home: HomeAccess) -> None:
        """Let the host wait until no transfer uses bytes of an entry that compute is to use.

        What compute itself moves, beside the host, it has moved when it comes there.
        """
        before, ref = self._host, self._call.entry_of(home)
        for transfer in self._in_flight.blockers(ref, home.begin, home.end, home.writes):
            if transfer.route or not self._asynchronous:
                self._host = max(self._host, self._traffic.until(transfer, "home_s"))
        self._waited = self._host - before

    def _arrive(self, x: Effects) -> SimTransfer:
        """Start a transfer to the device, unless that was done in a call before."""
        assert x.ticket is not None
        if x.ticket not in self._done:
            self._bring(self._call, x, self._done, self._begun, x.after)
        return self._done[x.ticket]

    def _bring(
        self,
        call: StepCall,
        x: Effects,
        done: dict[Ticket, SimTransfer],
        mark: SimTransfer,
        after: Sequence[Ticket] = (),
    ) -> None:
        """Start a transfer to the device: after `mark` of compute, and after transfers that still
        read its slot."""
        assert x.home is not None
        assert x.ticket is not None
        self._issue(x)
        ref, slot = self._routes.entry_of(call, x.home), x.writes_slot
        under = [] if slot is None else self._under(slot)
        transfer = self._routes.transfer(call, ref, x)
        self._start(transfer, ref, x.home, after, (mark, *under))
        if x.takes is not None:
            self._take(x.takes)
        done[x.ticket] = transfer

    def _give_back(self, slot: Slot) -> None:
        self._taken -= slot.nbytes

    def _take(self, slot: Slot) -> None:
        self._grow(slot.nbytes)

    def _grow(self, nbytes: int) -> None:
        """Let so many bytes more of the arena be in use."""
        self._taken += nbytes
        self._peak = max(self._peak, self._taken)
        self._together = max(self._together, self._taken + self._held.now)

    def _leave(self, x: Effects) -> SimTransfer:
        """Start a transfer off the device."""
        home = x.home
        assert home is not None
        before, ref = self._host, self._call.entry_of(home)
        transfer = self._routes.transfer(self._call, ref, x)
        if home.role is GRADIENT:
            self._joined = self._join(self._held.leave(x))
            self._departing.append(transfer)
            if self._joined is not None:
                before = self._host
        if x.reads and transfer.route:  # else the value is at home where it is
            self._make_room(x.nbytes)
            self._backlog.append(transfer)
        self._waited = self._host - before
        if slot := x.reads_slot:
            self._issue(x)
            self._leaving.start(slot, transfer)
        # A value leaves behind all compute, if no ticket says behind which.
        mark = (self._compute,) if x.reads and not x.after else ()
        self._start(transfer, ref, home, x.after, mark)
        if not slot:
            self._issue(x)
        if x.ticket is not None:
            self._done[x.ticket] = transfer
        return transfer

    def _cross(self, x: Effects) -> SimTransfer:
        """Start a collective, once what it waits for is over, and the one of its kind before: the
        other ranks come to it at the same time."""
        assert x.ticket is not None
        follows = [self._done[ticket] for ticket in x.after]
        if x.writes_slot is not None:
            follows += self._under(x.writes_slot)
        self._traffic.advance(self._host)
        for kind, transfer in self._routes.collective(x):
            before = self._collectives.get(kind)
            behind = [self._begun] if before is None else [self._begun, before]
            self._collectives[kind] = transfer
            self._traffic.start(transfer, self._host, (*behind, *follows))
            follows = [transfer]
            self._sent.append(transfer)
            if self._tells:
                self._sent_of[transfer] = x.name
        self._issue(x)
        self._done[x.ticket] = transfer
        return transfer

    def _rise(self) -> None:
        """Count live bytes during the next instruction that changes them."""
        held = self._crest = self._held.rise()
        self._held_peak = max(self._held_peak, held)
        self._together = max(self._together, self._taken + held)

    def _wait_between(self, wait: Callable[[], ComputeTask | None]) -> None:
        """Let the host or compute wait between instructions, and remember for how long."""
        task, begin = self._compute, self._host
        work = wait()
        self._between.append(WaitBetween(task, begin, self._host, work))

    def _join(self, departures: int) -> ComputeTask | None:
        """Let compute join the oldest gradients in flight, whose memory it has then; on the host's
        own thread the host waits for them."""
        oldest = [self._departing.popleft() for _ in range(departures)]
        joins = self._compute_joins(oldest) if oldest and self._asynchronous else None
        self._gone(oldest)
        return joins

    def _await(self, transfers: Sequence[SimTransfer]) -> None:
        """Let the host wait for transfers."""
        for transfer in transfers:
            self._host = max(self._host, self._traffic.until(transfer, "over_s"))

    def _from_scratch(self) -> list[SimTransfer]:
        """Transfers that must be over before the step scratch is given back."""
        return self._leaving.behind(self._scratch_at) if self._scratch_at else []

    def _under(self, slot: Slot) -> list[SimTransfer]:
        """Transfers that must be over before `slot` is overwritten."""
        return self._leaving.overwritten(slot.address, slot.end)

    def _start(
        self,
        transfer: SimTransfer,
        ref: EntryRef,
        home: HomeAccess,
        after: Sequence[Ticket],
        follows: Sequence[SimTransfer] = (),
    ) -> None:
        """Start a transfer once its memory is its own (`after`, `follows`) and no transfer of its
        entry blocks it."""
        self._traffic.advance(self._host)
        blockers = self._in_flight.blockers(ref, home.begin, home.end, home.writes)
        if self._asynchronous and not transfer.staged:
            sharing = [*follows, *(self._done[t] for t in after)]
            transfer.order_by_events(tuple(dict.fromkeys(_heard_of(blockers, sharing))))
        self._in_flight.start(ref, home.begin, home.end, home.writes, transfer)
        on_stream = self._behind(transfer) if transfer.by_events and transfer.route else ()
        self._traffic.start(
            transfer, self._host, (*follows, *(self._done[t] for t in after)), blockers, on_stream
        )
        self._sent.append(transfer)
        if self._tells:
            self._sent_of[transfer] = self._routes.name(ref)

    def _behind(self, copy: SimTransfer) -> Sequence[SimTransfer]:
        """The copies that the device makes before this one, which is enqueued now: a stream is in
        order, so one that waits for an event holds up all that come later.

        Those of which the host has yet to hear something are not enqueued yet, and come later.
        """
        stream = copy.route[0].name
        before = [c for c in self._last_copies.get(stream, ()) if c.queued_s is None]
        waits = any(time is None for time in map(_moment, copy.hears_of))
        enqueued = [] if waits else [c for c in before if None not in map(_moment, c.hears_of)]
        self._last_copies[stream] = [*(c for c in before if c not in enqueued), copy]
        return enqueued

    def _make_room(self, nbytes: int) -> None:
        """Let the host wait until the bytes on their way out, with `nbytes` more, are within the
        backlog."""
        self._traffic.advance(self._host)
        most = self._costs.ways.backlog_bytes
        while True:
            self._backlog = [j for j in self._backlog if j.over_s is None]
            if not self._backlog or sum(j.nbytes for j in self._backlog) + nbytes <= most:
                return
            self._host = max(self._host, self._traffic.until(self._backlog[0], "over_s"))

    def _issue(self, x: Effects) -> None:
        """Let the host take the seconds of an instruction."""
        key = x.kind, 0 if x.lane is COMPUTE else x.nbytes
        if (seconds := self._issues.get(key)) is None:
            seconds = self._issues[key] = self._costs.issue_seconds(x)
        self._host += seconds


def _moment(row: tuple[SimTransfer, str]) -> float | None:
    """The time of a moment of a transfer; None before."""
    time_s: float | None = getattr(*row)
    return time_s


def _heard_of(
    on_entry: Iterable[SimTransfer], on_memory: Iterable[SimTransfer]
) -> Iterator[tuple[SimTransfer, str]]:
    """What the host must have heard of before a copy can be enqueued that follows others: of those
    that use the same bytes of its entry, and those (or compute) that use the same memory."""
    for others, moment in ((on_entry, "home_s"), (on_memory, "queued_s")):
        for other in others:
            if other.by_events:
                yield from (row for row in other.hears_of if getattr(*row) is None)
            elif other.route and getattr(other, moment) is None:
                yield other, moment


REPEATS = 3
"""Walks of a step. The first begins with idle links and nothing ahead; by the third a step leaves
to the next what it was left itself."""


def simulate(
    step: StepTrace,
    costs: Costs,
    homes: Mapping[EntryRef, str] | None = None,
    repeats: int = REPEATS,
) -> Timeline:
    """The times and bytes of a step in the middle of a long run of equal ones.

    homes   entry -> "device", "held", "host" or "disk"; where it is silent, as it was
            recorded
    raises  Unsupported, if a transfer needs a link that the machine does not have
    """
    walk = SimulatedSteps(step, costs, homes or {})
    for _ in range(repeats - 1):
        walk.step()
    return walk.timeline()


def step_seconds(
    step: StepTrace,
    costs: Costs,
    homes: Mapping[EntryRef, str] | None = None,
) -> float:
    """`step_s` of what `simulate` returns, sooner: for one of many that are compared.

    The step is walked once, behind what the step before does after its forward. A walk that begins
    with idle links is too little: what it leaves to write it never waits for, so plans that write
    much would seem fast. What it leaves is what its backward and optimizer leave, whatever was on
    its way when backward began; but where links need more than a step to come to rest.
    """
    walk = SimulatedSteps(step, costs, homes or {}, tells=False)
    walk.step(behind_forward(step))
    return walk.seconds()


def behind_forward(step: StepTrace) -> int:
    """The number of the first call behind all forwards; 0, if there is none."""
    forwards = [n for n, call in enumerate(step.calls) if call.phase is Phase.FORWARD]
    behind = forwards[-1] + 1 if forwards else 0
    return behind if behind < len(step.calls) else 0


def predicted(
    step: StepTrace, costs: Costs, homes: Mapping[EntryRef, str] | None = None
) -> dict[str, Any]:
    """The times and bytes of one step of many alike, simulated; under the names of
    `zcompile.stats`.

    step_s   seconds of it
    bound_s  lower bound, in seconds, on a step of the same plan: its compute, or its busiest link
    seconds  `compute` of forward and backward, `stall`, `optimizer` (compute of the step phase)
    phases   seconds of each; time of the host between two calls counts to the later one
    bytes    over each link
    busy     seconds that each link is in use
    peak     bytes of the `device`

    raises  Unsupported, if the machine lacks a link that the step needs
    """
    return told(simulate(step, costs, homes), step)


def told(timeline: Timeline, step: StepTrace) -> dict[str, Any]:
    """A timeline of `step` as plain numbers."""
    optimizer_s = sum(
        moment.end_s - moment.begin_s
        for moment in timeline.moments
        if moment.is_work and step.calls[moment.call].phase is Phase.STEP
    )
    return {
        "step_s": timeline.step_s,
        "bound_s": timeline.least_s,
        "seconds": {
            "compute": timeline.compute_s - optimizer_s,
            "stall": timeline.stall_s,
            "optimizer": optimizer_s,
        },
        "phases": {phase.value: seconds for phase, seconds in timeline.phases.items()},
        "bytes": dict(timeline.nbytes),
        "busy": dict(timeline.busy_s),
        "peak": {
            "device": timeline.peak_bytes,
            "activations": timeline.held_bytes,
            "together": timeline.together_bytes,
        },
    }
