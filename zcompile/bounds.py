"""The least that a step can cost, whatever a plan does: bytes over each link, and seconds.

A step is a sequence of segments: stretches of calls of one phase (forward, backward, step; one pair
of the first two per micro-batch). Take one segment and let

    D   distinct bytes that its compute reads and the step before it left behind
    W   distinct bytes that its compute writes and somebody reads later
    C   bytes of the device
    H   bytes of the host

At the moment a segment begins at most C of its D bytes are on the device, so at least D - C arrive
while it lasts. At the moment it ends at most C of its W bytes are still there, so at least W - C
have left while it lasted. What is neither on the device nor on the host comes from the disk, and
goes there: at least D - C - H, and W - C - H. Its compute takes its seconds, a link takes its bytes
over its rate, and links that take turns add up; so the segment lasts at least as long as the
largest of these. Segments follow each other, so a step lasts at least as long as their sum.

This holds for plans that choose anew in each segment what stays, which is more than `place_states`
does: a byte held over a border between two segments saves one transfer at each, no more, and every
border is counted with all of C. Latencies are left out, which only makes it smaller. It is a bound
for updates that are computed on the device, or on the host where `Room.reach` says so.
(ZeRO-Infinity, arXiv 2104.07857, section 4 has the traffic of a step without a residency.)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Generic, NamedTuple, TypeVar

from zcompile.linear_program import lane_of
from zcompile.machine import TIER_LINKS, Link
from zcompile.passes.place_states import Room
from zcompile.schedule import Borrow, Fetch, Reduce, Run, Schedule
from zcompile.schedule import Store as StoreHome
from zcompile.specs import Phase
from zcompile.steps import Step, StepCall

COMPUTE = "compute"


@dataclass(frozen=True)
class Segment:
    """Calls of one phase in a row: seconds of compute, distinct bytes that it reads and writes."""

    phase: Phase
    compute_s: float
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True)
class Least:
    """The least of one segment. `nbytes`: over each link; `seconds`: of each resource by itself."""

    phase: Phase
    nbytes: Mapping[str, int]
    seconds: Mapping[str, float]

    @property
    def binding(self) -> str:
        return max(self.seconds, key=lambda name: self.seconds[name])

    @property
    def least_s(self) -> float:
        return self.seconds[self.binding]


@dataclass(frozen=True)
class Bound:
    """The least of a step.

    seconds   no plan takes less
    nbytes    over each link
    binding   "compute", or the link that most of those seconds are due to
    """

    seconds: float
    nbytes: Mapping[str, int]
    binding: str
    segments: tuple[Least, ...] = ()
    phases: Mapping[Phase, float] = field(default_factory=dict)


def bound(segments: Sequence[Segment], links: Mapping[str, Link], room: Room) -> Bound:
    """The least of a step of these segments, with `room` for its entries. Pure."""
    rows = tuple(_least(segment, links, room) for segment in segments)
    due: dict[str, float] = {}
    nbytes = {link: 0 for link in links if link in TIER_LINKS}
    phases: dict[Phase, float] = {}
    for row in rows:
        due[row.binding] = due.get(row.binding, 0.0) + row.least_s
        phases[row.phase] = phases.get(row.phase, 0.0) + row.least_s
        for link, n in row.nbytes.items():
            nbytes[link] += n
    binding = max(due, key=lambda name: due[name], default=COMPUTE)
    return Bound(sum(row.least_s for row in rows), nbytes, binding, rows, phases)


def _least(segment: Segment, links: Mapping[str, Link], room: Room) -> Least:
    device = room.nbytes.get("device", 0)
    near = device + room.nbytes.get("host", 0)
    nbytes: dict[str, int] = {}
    ways = (("h2d", "disk_read", segment.read_bytes), ("d2h", "disk_write", segment.written_bytes))
    for bus, disk, n in ways:
        if disk in links and "disk" in room.nbytes:
            nbytes[disk] = max(0, n - near)
        # Where a disk and the device exchange bytes themselves, or compute reaches the host, a
        # byte that is not on the device need not pass the bus.
        if bus in links and not room.straight and not (room.reach and segment.phase is Phase.STEP):
            nbytes[bus] = max(0, n - device)
    seconds = {COMPUTE: segment.compute_s}
    for link, n in nbytes.items():
        lane = lane_of(link, links)
        seconds[lane] = seconds.get(lane, 0.0) + n / links[link].bytes_per_s
    return Least(segment.phase, nbytes, seconds)


def segments_of(step: Step, region_seconds: Callable[..., float]) -> tuple[Segment, ...]:
    """A step as the bound sees it; what is read from where, or moved, does not matter."""
    touched: dict[int, _Touched] = {}
    made = []
    for phase, calls in groupby(step.calls, key=lambda call: call.phase):
        reads: _Distinct = _Ranges()
        writes: _Distinct = _Ranges()
        compute_s = 0.0
        for call in calls:
            serial = call.schedule.serial
            if serial not in touched:
                touched[serial] = _touched(call.schedule, region_seconds)
            compute_s += touched[serial].compute_s
            touched[serial].add_to(call, reads, writes)
        made.append(Segment(phase, compute_s, reads.nbytes(), writes.nbytes()))
    return tuple(made)


K = TypeVar("K")


class _At(NamedTuple):
    """What an instruction names: an entry's index, its copy in a dtype, or its gradient."""

    entry: int
    copy: object = None
    is_gradient: bool = False


class _Ranges(Generic[K]):
    """Byte ranges of objects, and how many distinct bytes they are."""

    def __init__(self) -> None:
        self._of: dict[K, list[tuple[int, int]]] = {}

    def add(self, key: K, begin: int, end: int) -> None:
        ranges = self._of.setdefault(key, [])
        if ranges and ranges[-1][1] == begin:  # chunks come in order
            ranges[-1] = (ranges[-1][0], end)
        elif not ranges or ranges[-1] != (begin, end):
            ranges.append((begin, end))

    def nbytes(self) -> int:
        return sum(_union(ranges) for ranges in self._of.values())

    def items(self) -> Iterator[tuple[K, int, int]]:
        return ((key, a, b) for key, ranges in self._of.items() for a, b in ranges)


def _union(ranges: Sequence[tuple[int, int]]) -> int:
    total = reached = 0
    for begin, end in sorted(ranges):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


@dataclass(frozen=True)
class _Touched:
    """What a schedule computes, reads and writes."""

    compute_s: float
    reads: _Ranges[_At]
    writes: _Ranges[_At]

    def add_to(self, call: StepCall, reads: "_Distinct", writes: "_Distinct") -> None:
        for mine, all_ in ((self.reads, reads), (self.writes, writes)):
            for at, begin, end in mine.items():
                key = call.entries[at.entry]
                all_.add((-key if at.is_gradient else key, at.copy), begin, end)


_Distinct = _Ranges[tuple[int, object]]
"""By (key of an entry, dtype of its copy or None)."""


def _touched(schedule: Schedule, region_seconds: Callable[..., float]) -> _Touched:
    reads: _Ranges[_At] = _Ranges()
    writes: _Ranges[_At] = _Ranges()
    compute_s = 0.0
    for x in schedule.instructions:
        if isinstance(x, Run):
            compute_s += region_seconds(x.region)
        elif isinstance(x, Fetch):
            copy = None if x.cast is None else x.cast.narrow
            reads.add(_At(x.entry, copy), x.begin, x.begin + x.nbytes)
        elif isinstance(x, StoreHome):
            writes.add(_At(x.entry), x.begin, x.begin + x.nbytes)
        elif isinstance(x, Borrow):
            for ranges in (reads, writes) if x.writes else (reads,):
                ranges.add(_At(x.entry), x.begin, x.begin + x.layout.nbytes)
        elif isinstance(x, Reduce):
            writes.add(_At(x.entry, is_gradient=True), 0, x.nbytes)
    return _Touched(compute_s, reads, writes)
