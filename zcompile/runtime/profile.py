"""The profile records a training step as it happens, and times it instruction by instruction.

`Recorder` writes down which schedules ran, on which entries: as pure as what a plan in a dry run
starts from (`ir/step.py`), without an entry or a tensor. `Clocks` collects the times from which
costs are known and predictions checked. Host time is read around every instruction of the first
walks of a schedule, and of one in EVERY later on: what a region costs does not change from step to
step, and reading it should cost nothing either. Where compute runs beside the host (CUDA), events
of the device time the regions of the first walks, and are read when costs are asked for. There only
such walks time what compute waits for, too: a walk that is not timed has two events, and its time
divides as that of the last one that was (`runtime/meter.py::Meter.span`).

What lies between two events is the device's own time only if the host was *ahead*: if it had
enqueued the whole region before the device came to the first event. Else the device may have waited
for the host within, which takes longer than the device for most regions of a small model; such a
sample is an upper bound, and counts only as long as there is no other. Therefore a region that no
sample with the host ahead is known of is delayed on the device for longer than the host took to
enqueue it before (`Clocks.delay_s`). The delay has an end of its own and waits for nobody: an op
that waits for the device, or whose kernel is loaded meanwhile, is late, and nothing worse.

One figure stands for many samples of one thing (`Samples`): the mean of the last RECENT counts, of
which none counts for more than MOST times their median. A step is the sum of hundreds of such times
and comes near the sum of their means: noise only ever adds, so medians or minima would sum up to
too little every time. The limit leaves out what a machine that sleeps adds. A *cold* sample, when
kernels are chosen and pages are touched for the first time, counts only as long as nothing else is
known. Of instructions that may wait for a transfer (as `Wait`, `Borrow`) the figure is the minimum,
which is what they take when they need not wait; what `Reduce` waits for is known, and taken off.
Between two calls it is the median: a user may do anything there now and then. The first time there
is cold. What `torch.compile` takes there, as for backward after the first forward or for another
shape of a batch, is taken off (`COMPILING`), and so is what the project does there itself, as
planning (`Clocks.set_aside`).
"""

import weakref
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import fmean, median
from time import perf_counter
from typing import NamedTuple, Protocol

from zcompile.ir.schedule import Schedule
from zcompile.ir.step import EntryFact, StepCall, StepTrace
from zcompile.ir.types import EntryKind, EntryRef, Phase, Region, aligned
from zcompile.machine.cost import Costs, TransferModes, call_name, line_through, remeasured
from zcompile.machine.model import Machine
from zcompile.runtime.changes import CHANGES
from zcompile.runtime.device.base import Device
from zcompile.runtime.meter import Stamp
from zcompile.runtime.store.store import Entry, call_key, others_than

# --- Recording a step ---

MOST_CALLS = 20_000
"""Calls of one step; beyond that nobody ends the step: a loop that updates parameters by itself."""
MOST_KNOWN = 1024
"""Calls of which is remembered what was written down; a step has a few, unless they vary."""


_RECORDED = attrgetter("_place.tier", "_place.nbytes", "_kind", "_crosses_wide")
"""What is written down of an entry depends on these, beside what it is called (`Entry.ref`)."""


@dataclass(frozen=True)
class _RecordedCall:
    """What was written down of one call, on entries that are as `alike` says, by `_RECORDED`."""

    alike: Sequence[tuple[object, ...]]
    call: StepCall
    facts: Mapping[EntryRef, EntryFact]
    gradients: Mapping[EntryRef, EntryFact]

    def is_of(self, entries: Sequence[Entry], places: Sequence[int]) -> bool:
        """Whether those of `entries` in these places are as those of the call were."""
        refs, alike = self.call.entries, self.alike
        found = [entries[at] for at in places]
        if [entry.ref for entry in found] != [refs[at] for at in places]:
            return False
        return [*map(_RECORDED, found)] == [alike[at] for at in places]


class _KeptCall(NamedTuple):
    """A call of a schedule, as long as `CHANGES` has the same mark.

    entries  that outlive steps; None in the place of others
    sizes    dynamic sizes of the call
    """

    mark: object
    entries: Sequence[Entry | None]
    sizes: tuple[int, ...]
    known: _RecordedCall


class ListResults:
    """Counts bytes of what list ops made, while Python has it: an optimizer makes such lists, and
    drops them, between two of its ops. They are counted alike where ops run one by one, so that
    results are entries, and where they are noted, so that there will be none unless a plan lets
    all that they read rest in reach (`eager/joined.py`)."""

    def __init__(self) -> None:
        self._now = self._most = 0
        self._alive: dict[int, tuple[weakref.ref[object], int]] = {}
        """By the id of the reference, which tells that it has died."""

    def made(self, result: object, nbytes: int) -> None:
        """A result, or the handle of one, is there from here on until it dies."""
        size = aligned(nbytes)
        self._now += size
        self._most = max(self._most, self._now)
        alive = weakref.ref(result, self._died)
        self._alive[id(alive)] = alive, size

    def _died(self, of: "weakref.ref[object]") -> None:
        _, size = self._alive.pop(id(of))
        self._now -= size

    def take_most(self) -> int:
        """Most bytes that were there at once since this was asked last."""
        most, self._most = self._most, self._now
        return most


@dataclass(slots=True)
class Noted:
    """One call of the step that is recorded.

    call    with the schedule that was asked for
    walked  the schedule that was walked, arranged for where entries rest; None: none was
    more    entries that it names beside those of the call
    """

    call: StepCall
    walked: Schedule | None
    more: tuple[EntryRef, ...] = ()

    def walks(self, schedule: Schedule | None, more: Sequence[Entry] = ()) -> None:
        self.walked, self.more = schedule, tuple([entry.ref for entry in more])


class Recorder:
    """The calls since a step began: with the first forward after an optimizer was done.

    Several optimizers, or one that runs within backward, make one step together. A forward without
    a backward counts once, however often it runs: an evaluation is no part of the step, and a
    frozen piece of a model is. A recorder that was not started costs nothing.

    last_walked  the step that ended last, with the schedules that were walked, where `keep_walks`
                 asks for it; `end` returns those that were asked for, before they were arranged
    """

    def __init__(self) -> None:
        self.last_walked: StepTrace | None = None
        self._on = self._keeps_walks = False
        self._stepped = False
        self.list_results = ListResults()
        self._calls: list[Noted] = []
        self._alone: set[tuple[int, tuple[EntryRef, ...]]] = set()
        self._told: list[_RecordedCall | Mapping[EntryRef, EntryFact]] = []
        """What facts come from: calls, and entries that were made."""
        self._last: tuple[list[StepCall], list[_RecordedCall | Mapping[EntryRef, EntryFact]]] = (
            [],
            [],
        )
        self._last_step = StepTrace(())
        """The step that ended last, and what it was made of: a step like it is the same object."""
        self._known: dict[tuple[int, tuple[int, ...], tuple[EntryRef, ...]], _RecordedCall] = {}
        self._kept: dict[object, _KeptCall] = {}
        """By `call_key`."""

    def start(self, walks: bool = False) -> None:
        """Record from here on; `walks`: also what is walked."""
        self._on = True
        self.keep_walks(walks or self._keeps_walks)

    def keep_walks(self, wanted: bool) -> None:
        """Record what is walked from the next step on, or no more."""
        self._keeps_walks = wanted

    def note(self, schedule: Schedule, entries: Sequence[Entry]) -> "Noted | None":
        """A schedule is about to run; returns its call, if that is recorded."""
        if not self._on:
            return None
        if len(self._calls) >= MOST_CALLS:
            return None
        known = self._know(schedule, entries)
        call = known.call
        if schedule.phase is Phase.FORWARD and not schedule.trains:
            if (schedule.serial, call.entries) in self._alone:
                return None
            self._alone.add((schedule.serial, call.entries))
        self._told.append(known)
        noted = Noted(call, schedule)
        self._calls.append(noted)
        return noted

    def take_back(self, noted: "Noted") -> None:
        """A call was not carried out to its end: it is no part of a step, and what it was to make
        is not there."""
        self._calls = [other for other in self._calls if other is not noted]
        self._alone.discard((noted.call.schedule.serial, noted.call.entries))

    def made(self, noted: "Noted", entries: Sequence[Entry]) -> None:
        """A call has run, and made these entries."""
        noted.call = replace(noted.call, made=tuple(e.ref for e in entries))
        self._told.append(facts_of(entries))

    def _know(self, schedule: Schedule, entries: Sequence[Entry]) -> "_RecordedCall":
        """What is written down of a call; as in the last step, while entries are alike."""
        key = call_key(schedule.serial, entries)
        mark, kept, sizes = CHANGES.mark, self._kept.get(key), schedule.holds.sizes
        if kept is not None and kept.mark is mark and kept.sizes == sizes:
            others = others_than(kept.entries, entries)
            if others is not None and kept.known.is_of(entries, others):
                return kept.known
        known = self._know_anew(schedule, entries, sizes)
        lasting = [entry if entry.kind.lasting else None for entry in entries]
        if len(self._kept) >= MOST_KNOWN:
            self._kept.clear()
        self._kept[key] = _KeptCall(mark, lasting, sizes, known)
        return known

    def _know_anew(
        self, schedule: Schedule, entries: Sequence[Entry], sizes: tuple[int, ...]
    ) -> "_RecordedCall":
        refs = tuple([e.ref for e in entries])
        alike = [*map(_RECORDED, entries)]
        passing = any(e.kind is EntryKind.ACTIVATION for e in entries)  # new in every call
        same = schedule.serial, sizes, _kept(entries) if passing else refs
        known = self._known.get(same)
        if known is None or known.alike != alike:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            call, facts = StepCall(schedule, refs), facts_of(entries)
            known = _RecordedCall(alike, call, facts, _gradients(schedule, entries))
            self._known[same] = known
        if passing and known.call.entries != refs:
            known = replace(known, call=StepCall(schedule, refs), facts=facts_of(entries))
        return known

    @property
    def has_backward(self) -> bool:
        """Whether a backward was recorded since the last optimizer was done."""
        return not self._stepped and any(n.call.phase is Phase.BACKWARD for n in self._calls)

    def stepped(self) -> None:
        """An optimizer is done. Calls without a forward before them are not a step to plan for."""
        if any(noted.call.phase is Phase.FORWARD for noted in self._calls):
            self._stepped = True
        else:
            self.end()

    def ends_with(self, schedule: Schedule) -> bool:
        """Whether the next step begins with `schedule`."""
        return self._stepped and schedule.phase is Phase.FORWARD

    def end(self) -> StepTrace | None:
        """The step that has just ended; None, if nothing of it was recorded."""
        self._stepped = False
        self._alone.clear()
        noted, told, self._calls, self._told = self._calls, self._told, [], []
        result_bytes = self.list_results.take_most()
        self.last_walked = None
        if not noted:
            return None
        step = self._step_of([n.call for n in noted], told)
        if step.result_bytes != result_bytes:
            step = self._last_step = replace(step, result_bytes=result_bytes)
        if self._keeps_walks:
            walked = tuple(
                replace(n.call, schedule=n.walked, entries=(*n.call.entries, *n.more))
                for n in noted
                if n.walked is not None
            )
            self.last_walked = replace(step, calls=walked)
        return step

    def _step_of(
        self, calls: list[StepCall], told: "list[_RecordedCall | Mapping[EntryRef, EntryFact]]"
    ) -> StepTrace:
        """The step of these calls: the last one, if these are the very calls of that."""
        last_calls, last_told = self._last
        alike = len(calls) == len(last_calls) and len(told) == len(last_told)
        if not alike or not all(
            a is b
            for a, b in (*zip(calls, last_calls, strict=True), *zip(told, last_told, strict=True))
        ):
            self._last = calls, told
            made = tuple(calls)
            self._last_step = StepTrace(made, _facts(told), _micro_batches(made))
        return self._last_step


def _facts(
    told: Sequence[_RecordedCall | Mapping[EntryRef, EntryFact]],
) -> dict[EntryRef, EntryFact]:
    """What is known of the entries of a step: later calls know better, and an entry that is there
    better than who is about to make it. Of a gradient that a rank sums as a whole before ranks
    exchange it, and keeps its share of then, the larger counts."""
    facts: dict[EntryRef, EntryFact] = {}
    summed: dict[EntryRef, EntryFact] = {}
    for part in told:
        if isinstance(part, _RecordedCall):
            facts = {**part.gradients, **facts, **part.facts}
            if part.call.schedule.no_sync_of is not None:
                summed |= part.gradients
        else:
            facts |= part
    for ref, fact in summed.items():
        facts[ref] = replace(facts[ref], nbytes=max(fact.nbytes, facts[ref].nbytes))
    return facts


NOBODY = EntryRef(0)
"""Stands for a value that only one call has; keys of entries begin at 1."""


def _kept(entries: Sequence[Entry]) -> tuple[EntryRef, ...]:
    """The entries of a call without values that only this call has, whose places stay."""
    return tuple([NOBODY if e.kind is EntryKind.ACTIVATION else e.ref for e in entries])


def _micro_batches(calls: Sequence[StepCall]) -> int:
    """How often the backward of the most walked piece ran."""
    backwards = [call.schedule for call in calls if call.phase is Phase.BACKWARD]
    serials = [x.serial if x.no_sync_of is None else x.no_sync_of for x in backwards]
    return max((serials.count(serial) for serial in set(serials)), default=1)


def facts_of(entries: Sequence[Entry]) -> dict[EntryRef, EntryFact]:
    """The facts of each entry."""
    return {
        e.ref: EntryFact(e.ref, e.name, e.kind, e.place.nbytes, e.home, crosses_wide=e.crosses_wide)
        for e in entries
    }


def _gradients(schedule: Schedule, entries: Sequence[Entry]) -> dict[EntryRef, EntryFact]:
    """The facts of gradients that a backward makes, which are entries later on."""
    facts = {}
    for x in schedule.effects if schedule.phase is Phase.BACKWARD else ():
        home = x.home
        if home is not None and x.is_gradient:
            param = entries[home.entry]
            ref, nbytes = param.ref.gradient, home.of_nbytes or home.nbytes
            if x.tile is not None:
                nbytes = x.tile.share_nbytes
            facts[ref] = EntryFact(ref, f"{param.name}.grad", EntryKind.GRAD, nbytes, "host")
    return facts


# --- One figure for many samples ---

RECENT = 64
"""Samples kept of each thing that is timed."""
MOST = 16.0
"""A sample counts for at most this many medians."""


class Samples:
    """Seconds of things that happen again and again, by key."""

    def __init__(self) -> None:
        self._times: dict[object, deque[float]] = {}
        self._cold: set[object] = set()

    def note(self, key: object, seconds: float, cold: bool = False) -> None:
        """Note a sample; `cold`: it was the first of its kind."""
        known = key in self._times
        if cold and known and key not in self._cold:
            return
        if cold:
            self._cold.add(key)
        elif key in self._cold:
            self._cold.discard(key)
            del self._times[key]
        self._times.setdefault(key, deque(maxlen=RECENT)).append(seconds)

    def knows(self, key: object) -> bool:
        """Whether there is a sample of it."""
        return key in self._times

    def share(self, region: Region, seconds: float, cold: bool) -> None:
        """Note what a region took; of a joined one, share it among its parts by what each took
        alone.

        Without all of those nothing is noted, and nothing of a cold run: that would be theirs.
        """
        if not region.parts:
            self.note(region.key, seconds, cold)
            return
        if cold or any(part.key not in self._times for part in region.parts):
            return
        alone = {key: self.least(key) for key in {part.key for part in region.parts}}
        whole = sum(alone[part.key] for part in region.parts)
        for key, part_s in alone.items():
            self.note(key, seconds * part_s / whole if whole else 0.0)

    def least(self, key: object) -> float:
        """The least of the last samples."""
        return min(self._times[key])

    def median(self, key: object) -> float:
        """The median of the last samples."""
        return median(self._times[key])

    def means(self) -> dict[object, float]:
        return {key: _mean(times) for key, times in self._times.items()}

    def medians(self) -> dict[object, float]:
        return {key: median(times) for key, times in self._times.items()}

    def leasts(self) -> dict[object, float]:
        return {key: min(times) for key, times in self._times.items()}


def _mean(times: deque[float]) -> float:
    """The mean of samples, none counted for more than MOST times their median."""
    most = MOST * median(times)
    return fmean(min(seconds, most) for seconds in times)


# --- Timing walks ---

FIRST = 8
"""Walks of a schedule that are all timed."""
EVERY = 16
"""Of later walks one in so many is timed."""
ENOUGH = 3
"""Samples of a region with the host ahead, from which on it is delayed no more."""
DELAY_MARGIN = 2.0
"""A region is delayed for so many times what the host took before to enqueue it."""
MOST_DELAY_S = 20e-3
"""Of one region. It was enqueued once before, when its kernels may have been loaded, which takes
longer than it ever will again."""
MOST_UNHEARD = 4096
"""Regions that the host has computed of late, and that nobody has looked at."""
STEPS = 16
"""Steps over which the links are measured: with a quarter for each, those before count for a
hundredth."""
Levels = tuple[int, ...]
"""Highest bytes of several gauges since they were read last."""
Traffic = Mapping[str, tuple[int, float]]
IDLE = (0, 0.0)


@dataclass(frozen=True)
class Walked:
    """The times of one walk: when each instruction began and ended, in seconds of one clock.

    stalls  index of an instruction -> seconds that compute, or the host, waited there
    levels  what `Clocks` is given as `levels`, of each instruction
    """

    schedule: Schedule
    begins: tuple[float, ...]
    ends: tuple[float, ...]
    stalls: Mapping[int, float]
    levels: tuple[Levels, ...] = ()


class WalkEnd(NamedTuple):
    """When the walk of a call ended.

    at_s  of the host's time without what is no part of gaps
    """

    name: str
    phase: Phase
    at_s: float


class DeviceSample(NamedTuple):
    """A region was enqueued between two stamps of a device that computes beside the host.

    cold   the region ran for the first time
    ahead  all of it was enqueued before the device came to `begin`; not known of a cold one, in
           which kernels may be tried out
    """

    region: Region
    begin: Stamp
    end: Stamp
    cold: bool
    ahead: bool


class Compiling:
    """A clock that stands still while `torch.compile` works, which torch itself tells.

    seconds  that it has worked in this process, without what is on its way
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began: float | None = None

    def begins(self, _: object = None) -> None:
        """`torch.compile` begins to trace."""
        self._began = perf_counter()

    def ends(self, _: object = None) -> None:
        """It is done; without a begin nothing happens."""
        if self._began is not None:
            self.seconds += perf_counter() - self._began
            self._began = None

    @property
    def works(self) -> bool:
        """Whether it is at work now."""
        return self._began is not None

    def without(self) -> float:
        """Seconds of the host's clock without those of `torch.compile`."""
        return perf_counter() - self.seconds


COMPILING = Compiling()


class StepListener(Protocol):
    """Hears of the steps of a session. What it takes is no part of a step."""

    def stepped(self) -> None:
        """An optimizer is done, perhaps not the only one of the step."""

    def over(self) -> None:
        """The next step begins."""


class Clocks:
    """The times of one session. Used by one thread at a time, as the executor is.

    waited   seconds that gradients have waited until others were sent, in all
    traffic  bytes and busy seconds of each link, in all; of a link that cannot tell, nothing
    idle     whether no transfer is in flight
    levels   highest levels of memory since it was called last, for a timeline

    whole_steps, whole_s  steps that another one followed, each from its first call to that of the
                          next, but for the first; seconds of all of them
    """

    def __init__(
        self,
        device: Device,
        waited: Callable[[], float],
        traffic: Callable[[], Traffic] = dict,
        idle: Callable[[], bool] = lambda: False,
        levels: Callable[[], Levels] = tuple,
    ) -> None:
        self.waited = waited
        self.idle = idle
        self.levels = levels
        self._traffic, self._moved = traffic, traffic()
        self._rates: deque[tuple[dict[str, int], dict[str, float]]] = deque(maxlen=STEPS)
        beside = device.torch_device.type != "cpu"  # of the host, so that only events can tell
        self._stamp = device.stamp if beside else None
        self.keeps_timeline = False
        self._step_ended: Callable[[], None] = nobody_looks
        self._listener: StepListener | None = None
        self.whole_steps, self.whole_s = 0, 0.0
        self._walks: dict[int, int] = {}
        self._regions, self._idle_regions = Samples(), Samples()
        self._region_bounds = Samples()
        """Upper bounds: of the device, which may have waited for the host meanwhile."""
        self._timed_ahead: Counter[str] = Counter()
        """By the key of a region: samples of the device with the host ahead."""
        self._alike: dict[str, dict[str, int]] = {}
        self._launches = Samples()
        self._issues = Samples()
        self._waiting: set[object] = set()
        """Keys of `_issues` whose instructions may have to wait for a transfer."""
        self._gaps = Samples()
        self._unread: deque[DeviceSample] = deque()
        self._unheard: deque[tuple[Region, float, bool]] = deque(maxlen=MOST_UNHEARD)
        """What the host has computed beside calls, as its thread tells."""
        self._last: WalkEnd | None = None
        self._before_step: WalkEnd | None = None
        """The last walk before those of an optimizer's step."""
        self._step_names: set[str] = set()
        """Calls of that step so far."""
        self._aside_s = 0.0
        """Seconds between walks that are no part of gaps, in all."""
        self._is_aside = False
        self._step_began: float | None = None
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._stepping = False
        self._step: list[Walked] = []
        self._whole: tuple[Walked, ...] = ()

    def keep_timeline(self, step_ended: Callable[[], None]) -> None:
        """Time every walk, and call `step_ended` when a step is known to be over."""
        self.keeps_timeline, self._step_ended = True, step_ended

    def drop_timeline(self) -> None:
        """Time walks now and then again."""
        self.keeps_timeline = False

    @property
    def has_listener(self) -> bool:
        return self._listener is not None

    def listen(self, listener: "StepListener") -> None:
        """Let `listener` hear of steps."""
        self._listener = listener

    def watch(self, schedule: Schedule) -> "Timer":
        """A walk begins: returns its timer."""
        now = perf_counter()
        self.pause_ends(schedule)
        if schedule.phase is Phase.FORWARD and self._stepping:
            if self._step_began is not None:
                self._steps.append(now - self._step_began)
                self.whole_steps += 1
                self.whole_s += self._steps[-1]
            self._step_began, self._stepping = now, False
            self._measure_links()
            self._whole, self._step = tuple(self._step), []
            if self._listener is not None:
                self._listener.over()
                self._step_began = perf_counter()
            if self.keeps_timeline and self._whole:
                self._step_ended()
                self._step_began = perf_counter()
        count = self._walks[schedule.serial] = self._walks.get(schedule.serial, 0) + 1
        if not (self.keeps_timeline or count <= FIRST or count % EVERY == 0):
            return Timer(self, schedule)
        if self._stamp is None or count > FIRST:
            return HostTimer(self, schedule)
        return DeviceTimer(self, schedule, self._stamp)

    def pause_ends(self, schedule: Schedule) -> None:
        """A walk of this schedule is next: what comes until it begins is no part of the gap."""
        if self._last is None or self._is_aside:
            return
        before, self._last = self._last, None
        name = call_name(schedule)
        self._note_gap(before, name)
        if schedule.phase is not Phase.STEP:
            self._before_step = None
        elif before.phase is not Phase.STEP:
            self._before_step, self._step_names = before, {name}
        elif self._before_step is not None and name not in self._step_names:
            # A step may make this call without those before it, as the one that a plan was made
            # with: only a gradient that stays is clipped by a call of its own, and no other does.
            self._note_gap(self._before_step, name)
            self._step_names.add(name)

    def _note_gap(self, before: "WalkEnd", name: str) -> None:
        """A walk of this name begins, some time after the walk `before`."""
        between = before.name, name
        seconds = self._between_s() - before.at_s
        self._gaps.note(between, seconds, cold=not self._gaps.knows(between))

    def _between_s(self) -> float:
        """Time of the host, without what is no part of gaps."""
        return COMPILING.without() - self._aside_s

    def waited_between(self, seconds: float) -> None:
        """The host waited for a transfer since the last walk: that is no part of the gap."""
        if not self._is_aside:
            self._aside_s += seconds

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Whatever is done in here between two walks, other walks included, is no part of the gap
        between them: planning, which takes longer than a step, comes again in hardly any."""
        last, begin, self._is_aside = self._last, self._between_s(), True
        try:
            yield
        finally:
            self._is_aside = False
            self._aside_s += self._between_s() - begin
            self._last = None if self._last is None else last

    def stepped(self) -> None:
        """An optimizer is done: the next forward begins a step."""
        self._stepping = True
        if self._listener is not None:
            self._listener.stepped()

    def costs(self, machine: Machine, ways: TransferModes) -> Costs:
        """What is known by now; blocks until the device has passed what was timed on it.

        machine  as it was probed; its links are brought to what they did in the last steps
        """
        while self._unread:
            region, begin, end, cold, ahead = self._unread.popleft()
            self._ran(region, begin.until(end), cold, ahead)
        for region, seconds, cold in [self._unheard.popleft() for _ in range(len(self._unheard))]:
            self._ran(region, seconds, cold)
        for nbytes, busy_s in self._rates:
            machine = remeasured(machine, nbytes, busy_s)
        regions = self._region_bounds.leasts() | self._regions.means()
        waits = {key: s for key, s in self._issues.leasts().items() if key in self._waiting}
        return Costs(
            machine,
            ways,
            regions=regions,
            alike={
                like: line_through([(nbytes, regions[key]) for key, nbytes in keys.items()])
                for like, keys in self._alike.items()
            },
            launches=self._launches.means(),
            issues=self._issues.means() | waits,
            gaps=self._gaps.medians(),
            idle=self._region_bounds.leasts() | self._regions.leasts() | self._idle_regions.means(),
        )

    def hears_of(self, schedule: Schedule) -> Callable[[Region, float], None]:
        """A walk begins: returns what is told of the seconds of regions that the host computes
        beside it, by any thread."""
        cold = self._walks.get(schedule.serial, 0) == 0
        unheard = self._unheard

        def took(region: Region, seconds: float) -> None:
            unheard.append((region, seconds, cold))

        return took

    def _measure_links(self) -> None:
        """A step is over: what each link moved in it, and how long it took."""
        before, self._moved = self._moved, self._traffic()
        step = {
            link: (n - before.get(link, IDLE)[0], s - before.get(link, IDLE)[1])
            for link, (n, s) in self._moved.items()
        }
        self._rates.append(
            ({k: row[0] for k, row in step.items()}, {k: row[1] for k, row in step.items()})
        )

    def timeline(self) -> tuple[Walked, ...]:
        """The walks of the last step that another followed, if they were all timed."""
        return self._whole

    def step_s(self) -> float | None:
        """Median seconds of the last steps, from first call to first call; None before the
        second."""
        return median(self._steps) if self._steps else None

    def last_step_s(self) -> float | None:
        """As `step_s`, of the last step alone."""
        return self._steps[-1] if self._steps else None

    def forget(self) -> None:
        """Something else was done meanwhile: the time until the next call is no gap."""
        self._last = self._before_step = self._step_began = None

    def over(self, schedule: Schedule) -> None:
        """A walk ended well."""
        self._last = WalkEnd(call_name(schedule), schedule.phase, self._between_s())

    def learn(
        self,
        schedule: Schedule,
        begins: list[float],
        ends: list[float],
        waits: Mapping[int, float],
        given: frozenset[int],
        idle: Container[int] = (),
        levels: Sequence[Levels] = (),
    ) -> None:
        """A walk was timed.

        waits  seconds that gradients waited, by instruction
        given  tickets of fetches that were in flight before the walk began
        idle   instructions beside which no transfer was in flight
        levels of memory, of each instruction
        """
        stalls, cold = dict(waits), self._is_cold(schedule)
        for index, x in enumerate(schedule.effects):
            seconds = ends[index] - begins[index]
            if x.region is not None:
                if x.on_host:
                    self._launches.share(x.region, seconds, cold)
                elif self._stamp is None:
                    seconds -= waits.get(index, 0.0)
                    self._ran(x.region, seconds, cold)
                    if index in idle:
                        self._idle_regions.share(x.region, seconds, cold)
                else:
                    self._launches.share(x.region, seconds, cold)
            elif x.ticket not in given:
                key = x.kind, x.moved_bytes
                self._issues.note(key, seconds - waits.get(index, 0.0))
                if x.may_wait:
                    self._waiting.add(key)
                    if x.after:
                        stalls[index] = seconds - self._issues.least(key)
        if self.keeps_timeline:
            walked = Walked(schedule, tuple(begins), tuple(ends), stalls, tuple(levels))
            self._step.append(walked)

    def _ran(self, region: Region, seconds: float, cold: bool, ahead: bool = True) -> None:
        """A region took so long; where the device was timed without the host `ahead`, at most."""
        samples = self._regions if ahead else self._region_bounds
        samples.share(region, seconds, cold)
        if region.like:
            self._alike.setdefault(region.like, {})[region.key] = region.work.nbytes

    def timed(self, schedule: Schedule, region: Region, begin: Stamp, end: Stamp) -> None:
        """A region of a walk was just enqueued between two stamps, which are read later."""
        new = not self._launches.knows(region.key)  # else another schedule has walked it before
        cold = new and self._is_cold(schedule)
        ahead = not (cold or begin.passed())
        self._unread.append(DeviceSample(region, begin, end, cold, ahead))
        self._timed_ahead[region.key] += ahead

    def delay_s(self, region: Region) -> float:
        """Seconds for which the device should do nothing before a region, so that the host is ahead
        when the device comes to it; 0: what the device takes is known, or it is the first time.

        A joined region is not delayed: its parts were timed alone before.
        """
        known = self._timed_ahead[region.key] >= ENOUGH
        if region.parts or known or not self._launches.knows(region.key):
            return 0.0
        return min(DELAY_MARGIN * self._launches.median(region.key), MOST_DELAY_S)

    def _is_cold(self, schedule: Schedule) -> bool:
        """Whether this was the first walk of a schedule."""
        return self._walks.get(schedule.serial) == 1


class Timer:
    """One walk that is not timed.

    given  tickets of the fetches that were in flight before it began
    timed  whether it wants to hear of each instruction
    """

    timed = False

    def __init__(self, clocks: Clocks, schedule: Schedule) -> None:
        self.given: frozenset[int] = frozenset()
        self.clocks = clocks
        self.schedule = schedule

    def hand_over(self, given: Iterable[int]) -> None:
        """The fetches with these tickets were in flight before the walk began."""
        self.given = frozenset(given)

    def delay_s(self, index: int) -> float:
        """Seconds for which compute should do nothing before instruction `index`, which is next, so
        that the device's own time of it can be told."""
        return 0.0

    def begins(self, index: int) -> None:
        """Instruction `index` is next."""

    def ends(self, index: int) -> None:
        """Instruction `index` is done, as far as the host is concerned."""

    def over(self) -> None:
        """The walk ended well."""
        self.clocks.over(self.schedule)


class HostTimer(Timer):
    """Reads the host's clock around every instruction of a walk."""

    timed = True

    def __init__(self, clocks: Clocks, schedule: Schedule) -> None:
        super().__init__(clocks, schedule)
        self._begins: list[float] = []
        self._ends: list[float] = []
        self._waits: dict[int, float] = {}
        self._waited = clocks.waited()
        self._idle: set[int] = set()
        self._levels: list[Levels] | None = [] if clocks.keeps_timeline else None

    def begins(self, index: int) -> None:
        if self.clocks.idle():
            self._idle.add(index)
        self._begins.append(perf_counter())

    def ends(self, index: int) -> None:
        self._ends.append(perf_counter())
        if not self.clocks.idle():
            self._idle.discard(index)
        if (waited := self.clocks.waited()) > self._waited:
            self._waits[index] = waited - self._waited
            self._waited = waited
        if self._levels is not None:
            self._levels.append(self.clocks.levels())

    def over(self) -> None:
        super().over()
        self.clocks.learn(
            self.schedule,
            self._begins,
            self._ends,
            self._waits,
            self.given,
            self._idle,
            self._levels or (),
        )


class DeviceTimer(HostTimer):
    """Also puts an event of the device around every region."""

    def __init__(self, clocks: Clocks, schedule: Schedule, stamp: Callable[[], Stamp]) -> None:
        super().__init__(clocks, schedule)
        self._stamp = stamp
        self._open: Stamp | None = None

    def _region_at(self, index: int) -> Region | None:
        """The region that the device computes at an instruction."""
        x = self.schedule.effects[index]
        return None if x.on_host else x.region

    def delay_s(self, index: int) -> float:
        region = self._region_at(index)
        return 0.0 if region is None else self.clocks.delay_s(region)

    def begins(self, index: int) -> None:
        if self._region_at(index) is not None:
            self._open = self._stamp()
        super().begins(index)

    def ends(self, index: int) -> None:
        super().ends(index)
        region = self._region_at(index)
        if region is not None and self._open is not None:
            self.clocks.timed(self.schedule, region, self._open, self._stamp())


def nobody_looks() -> None:
    return
