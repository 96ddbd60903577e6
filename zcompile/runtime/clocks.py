"""What a walk took, instruction by instruction; from which costs are known and predictions checked.

Host time is read around every instruction of the first walks of a schedule, and of one in EVERY
later on: what a region costs does not change from step to step, and reading it should cost nothing
either. Where compute runs beside the host (CUDA), events of the device time the regions of the
first walks, and are read when costs are asked for.

Of what is told more than once the median of the last RECENT counts: a mean would keep the first
call, which allocates and warms up, and a minimum would leave out what transfers beside compute
take from it in every step. Of instructions that may block (`Wait`, `Borrow`, `Reduce`) it is the
minimum, which is what they take when they need not.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from zcompile.cost import Costs, Ways, call_name, issued_bytes
from zcompile.machine import Machine
from zcompile.runtime.device import Device
from zcompile.runtime.meter import Stamp
from zcompile.schedule import Borrow, Reduce, Run, Schedule, Wait
from zcompile.specs import Phase

FIRST = 8
"""Walks of a schedule that are all timed."""
EVERY = 16
"""Of later walks one in so many is."""
RECENT = 31
"""Samples kept of each thing that is timed."""

Samples = dict[object, deque[float]]


@dataclass(frozen=True)
class Walked:
    """One walk as it was: when each instruction began and ended, in seconds of one clock.

    stalls  index of a `Wait` -> seconds that compute waited there
    """

    schedule: Schedule
    begins: tuple[float, ...]
    ends: tuple[float, ...]
    stalls: Mapping[int, float]


class Clocks:
    """The times of one session. Used by one thread at a time, as the executor is.

    record  whether to keep the timeline of the last step
    """

    def __init__(self, device: Device) -> None:
        beside = device.torch_device.type != "cpu"  # of the host, so that only events can tell
        self._stamp = device.stamp if beside else None
        self.record = False
        self._walks: dict[int, int] = {}
        self._regions: Samples = {}
        self._launches: Samples = {}
        self._issues: Samples = {}
        self._gaps: Samples = {}
        self._unread: deque[tuple[str, Stamp, Stamp]] = deque()
        self._last: tuple[str, float] | None = None
        self._step: list[Walked] = []
        self._whole: tuple[Walked, ...] = ()

    def watch(self, schedule: Schedule) -> "Watch":
        """A walk begins."""
        now = perf_counter()
        if self._last is not None:
            before, ended = self._last
            _note(self._gaps, (before, call_name(schedule)), now - ended)
        if schedule.phase is Phase.FORWARD and self._stepped():
            self._whole, self._step = tuple(self._step), []
        count = self._walks[schedule.serial] = self._walks.get(schedule.serial, 0) + 1
        if not (self.record or count <= FIRST or count % EVERY == 0):
            return Watch(self, schedule)
        if self._stamp is None or count > FIRST:
            return HostWatch(self, schedule)
        return DeviceWatch(self, schedule, self._stamp)

    def costs(self, machine: Machine, ways: Ways) -> Costs:
        """What is known by now; blocks until the device has passed what was timed on it."""
        while self._unread:
            key, begin, end = self._unread.popleft()
            _note(self._regions, key, begin.until(end))
        return Costs(
            machine,
            ways,
            regions=_medians(self._regions),
            launches=_medians(self._launches),
            issues={key: _usual(key, times) for key, times in self._issues.items()},
            gaps=_medians(self._gaps),
        )

    def timeline(self) -> tuple[Walked, ...]:
        """The walks of the last whole step, if `record` was set while it ran."""
        return tuple(self._step) if self._stepped() else self._whole

    def forget(self) -> None:
        """Something else was done meanwhile: what follows is no gap between two calls."""
        self._last = None

    def over(self, schedule: Schedule) -> None:
        """A walk ended well."""
        self._last = call_name(schedule), perf_counter()

    def learn(self, schedule: Schedule, begins: list[float], ends: list[float]) -> None:
        """A walk was timed."""
        stalls: dict[int, float] = {}
        for index, x in enumerate(schedule.instructions):
            seconds = ends[index] - begins[index]
            if isinstance(x, Run):
                known = self._regions if self._stamp is None else self._launches
                _note(known, x.region.key, seconds)
            else:
                key = type(x), issued_bytes(x)
                _note(self._issues, key, seconds)
                if isinstance(x, Wait):
                    stalls[index] = seconds - min(self._issues[key])
        if self.record:
            self._step.append(Walked(schedule, tuple(begins), tuple(ends), stalls))

    def timed(self, stamps: list[tuple[str, Stamp, Stamp]]) -> None:
        """Regions were timed on the device; they are read later."""
        self._unread.extend(stamps)

    def _stepped(self) -> bool:
        return any(walked.schedule.phase is Phase.STEP for walked in self._step)


class Watch:
    """One walk that is not timed."""

    def __init__(self, clocks: Clocks, schedule: Schedule) -> None:
        self.clocks = clocks
        self.schedule = schedule

    def begins(self, index: int) -> None:
        """Instruction `index` is next."""

    def ends(self, index: int) -> None:
        """It is done, as far as the host is concerned."""

    def over(self) -> None:
        """The walk ended well."""
        self.clocks.over(self.schedule)


class HostWatch(Watch):
    """Reads the host's clock around every instruction."""

    def __init__(self, clocks: Clocks, schedule: Schedule) -> None:
        super().__init__(clocks, schedule)
        self._begins: list[float] = []
        self._ends: list[float] = []

    def begins(self, index: int) -> None:
        self._begins.append(perf_counter())

    def ends(self, index: int) -> None:
        self._ends.append(perf_counter())

    def over(self) -> None:
        super().over()
        self.clocks.learn(self.schedule, self._begins, self._ends)


class DeviceWatch(HostWatch):
    """Also puts an event of the device around every region."""

    def __init__(self, clocks: Clocks, schedule: Schedule, stamp: Callable[[], Stamp]) -> None:
        super().__init__(clocks, schedule)
        self._stamp = stamp
        self._stamps: list[tuple[str, Stamp, Stamp]] = []
        self._open: Stamp | None = None

    def begins(self, index: int) -> None:
        if isinstance(self.schedule.instructions[index], Run):
            self._open = self._stamp()
        super().begins(index)

    def ends(self, index: int) -> None:
        super().ends(index)
        x = self.schedule.instructions[index]
        if isinstance(x, Run) and self._open is not None:
            self._stamps.append((x.region.key, self._open, self._stamp()))

    def over(self) -> None:
        super().over()
        self.clocks.timed(self._stamps)


def _note(samples: Samples, key: object, seconds: float) -> None:
    times = samples.get(key)
    if times is None:
        times = samples[key] = deque(maxlen=RECENT)
    times.append(seconds)


def _medians(samples: Samples) -> dict[object, float]:
    return {key: median(times) for key, times in samples.items()}


def _usual(key: object, times: deque[float]) -> float:
    kind = key[0] if isinstance(key, tuple) else key
    return min(times) if kind in (Wait, Borrow, Reduce) else median(times)
