"""What a step needs: distinct bytes that each stretch of it reads and writes, and its compute.

Where things rest does not come in, nor what a schedule moves: this is what bounds start from.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, NamedTuple, TypeVar

from zcompile.ir.optimizer_step import resting_regions
from zcompile.ir.schedule import Borrow, Fetch, Reduce, Run, Schedule
from zcompile.ir.schedule import Store as StoreHome
from zcompile.ir.step import Step, StepCall
from zcompile.ir.types import Phase


@dataclass(frozen=True)
class Segment:
    """Calls of one phase in a row: seconds of compute, and distinct bytes group by group.

    reads   that its compute reads and did not write itself before
    writes  that it writes and somebody reads later; 0 where nobody does
    lives   whether somebody reads later what the bytes are then
    """

    phase: Phase
    compute_s: float
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    lives: tuple[bool, ...]


@dataclass(frozen=True)
class Demand:
    """What a step needs, wherever it rests.

    groups     sizes of bytes that are used alike. Copies in another dtype are none of them: compute
               may make those of what they are copies of
    gradients  which of them are gradients
    """

    groups: tuple[int, ...]
    segments: tuple[Segment, ...]
    gradients: frozenset[int] = frozenset()

    @property
    def phases_s(self) -> Mapping[Phase, float]:
        """Seconds that each phase computes at least, if it never waits."""
        sums: dict[Phase, float] = {}
        for segment in self.segments:
            sums[segment.phase] = sums.get(segment.phase, 0.0) + segment.compute_s
        return sums


class _Use(NamedTuple):
    """Of one object in one segment, as in `Segment`."""

    read: int
    written: int
    lives: bool = False


def demand_of(step: Step, region_seconds: Callable[..., float]) -> Demand:
    """A step as its bound sees it; where things rest, and what is moved, does not matter."""
    touched: dict[int, _Touched] = {}
    phases, seconds, found = [], [], []
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
        phases.append(phase)
        seconds.append(compute_s)
        found.append((reads.sizes(), writes.sizes()))
    groups = _alike(phases, found)
    segments = tuple(
        Segment(phase, compute_s, *zip(*(uses[n] for _, _, uses in groups), strict=True))
        if groups
        else Segment(phase, compute_s, (), (), ())
        for n, (phase, compute_s) in enumerate(zip(phases, seconds, strict=True))
    )
    gradients = frozenset(k for k, (_, is_gradient, _) in enumerate(groups) if is_gradient)
    return Demand(tuple(size for size, _, _ in groups), segments, gradients)


def _alike(
    phases: Sequence[Phase], found: Sequence[tuple["_Sizes", "_Sizes"]]
) -> list[tuple[int, bool, list[_Use]]]:
    """Objects of which every segment uses the same share are one group, whatever their sizes: how
    large it is, whether it is of gradients, and its uses."""
    groups: dict[object, tuple[int, bool, list[_Use]]] = {}
    for key in dict.fromkeys(k for reads, writes in found for k in (*reads, *writes)):
        plain = [_Use(reads.get(key, 0), writes.get(key, 0)) for reads, writes in found]
        is_gradient, is_copy = key[0] < 0, key[1] is not None
        if is_copy or not any(use.read for use in plain):
            continue  # or it is made and used up within a segment
        most = max(max(use.read, use.written) for use in plain)
        uses = [
            _Use(use.read, use.written if lives else 0, lives)
            for n, use in enumerate(plain)
            for lives in [_lives(phases, plain, n, is_gradient)]
        ]
        kind = is_gradient, *((use.read / most, use.written / most, use.lives) for use in uses)
        size, _, sums = groups.get(kind, (0, is_gradient, [_Use(0, 0)] * len(uses)))
        groups[kind] = (
            size + most,
            is_gradient,
            [
                _Use(a.read + b.read, a.written + b.written, b.lives)
                for a, b in zip(sums, uses, strict=True)
            ],
        )
    return list(groups.values())


def _lives(phases: Sequence[Phase], uses: Sequence[_Use], n: int, is_gradient: bool) -> bool:
    """Whether what an object is after segment n is read before it is written over. A gradient is
    added to by each backward pass, and is over with the step that reads it."""
    if is_gradient:
        return phases[n] is not Phase.STEP
    later = [uses[(n + i) % len(uses)] for i in range(1, len(uses) + 1)]
    return next((bool(use.read) for use in later if use.read or use.written), False)


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

    def keys(self) -> frozenset[K]:
        return frozenset(self._of)

    def sizes(self) -> dict[K, int]:
        """Distinct bytes of each."""
        return {key: _union(ranges) for key, ranges in self._of.items()}

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
        made = writes.keys()
        for mine, all_ in ((self.reads, reads), (self.writes, writes)):
            for at, begin, end in mine.items():
                key = call.entries[at.entry]
                names = -key if at.is_gradient else key, at.copy
                if all_ is writes or names not in made:
                    all_.add(names, begin, end)


_Object = tuple[int, object]
"""(key of an entry, dtype of its copy or None); a gradient's key is negative."""
_Sizes = Mapping[_Object, int]
_Distinct = _Ranges[_Object]


def _touched(schedule: Schedule, region_seconds: Callable[..., float]) -> _Touched:
    reads: _Ranges[_At] = _Ranges()
    writes: _Ranges[_At] = _Ranges()
    for x in schedule.instructions:
        if isinstance(x, Fetch) and (x.lasting or schedule.phase is Phase.STEP):
            # What is new in every call of a graph left the device by choice.
            copy = None if x.cast is None else x.cast.narrow
            reads.add(_At(x.entry, copy), x.begin, x.begin + x.nbytes)
        elif isinstance(x, StoreHome):
            writes.add(_At(x.entry), x.begin, x.begin + x.nbytes)
        elif isinstance(x, Borrow):
            for ranges in (reads, writes) if x.writes else (reads,):
                ranges.add(_At(x.entry), x.begin, x.begin + x.layout.nbytes)
        elif isinstance(x, Reduce):
            writes.add(_At(x.entry, is_gradient=True), x.begin, x.begin + x.nbytes)
    return _Touched(least_compute(schedule, region_seconds), reads, writes)


def least_compute(schedule: Schedule, region_seconds: Callable[..., float]) -> float:
    """Seconds, if it never waits: of an optimizer's step in its chunks, or of whole rows at rest
    that are computed together, whichever is less. At measured costs this is an estimate, since
    chunks of other sizes may take less for each byte than those that were seen."""
    runs = [x.region for x in schedule.instructions if isinstance(x, Run)]
    seconds = sum(map(region_seconds, runs))
    if not schedule.rows:
        return seconds
    return min(seconds, sum(map(region_seconds, resting_regions(schedule.name, schedule.rows))))
