"""Bounds from below what a step costs, whatever a plan does: bytes over each link, and seconds.

A step is a sequence of segments: stretches of calls of one phase (forward, backward, step; one pair
of the first two per micro-batch). Take one segment and let

    D   distinct bytes that its compute reads and the segments before it left behind
    W   distinct bytes that its compute writes and somebody reads later
    C   bytes of the device
    H   bytes of the host
    G   bytes of the staging ring, which are on their way to or from the disk
    L   bytes of it that one of these directions may take (`machine/staging.py::lane_bytes`)
    E   bytes that graphs hold beside C, which gradients may lie in when backward ends, and until
        an optimizer that comes next has read them

At the moment a segment begins at most C of its D bytes are on the device, so at least D - C arrive
while it lasts; of what an optimizer reads, E less, or all gradients if that is less. At the moment
it ends at most C of its W bytes are still there, so at least W - C have left while it lasted; of
what backward writes, E less. What is neither on the device nor on the host comes from the disk, and
goes there: at least D - C - H - L, and W - C - H - L, or as much less as above. Its
compute takes its seconds (`demand.least_compute`), a link takes its bytes over its rate, and links
that take turns add up; so the segment lasts at least as long as the largest of these. Segments
follow each other, so a step lasts at least as long as their sum.

This counts every border between two segments with all of C for each of its two segments.
The linear program of `least_seconds` lets all that is held share C, and never gives less; it is
taken for steps that it solves in a second.

Late updates (`ir/late_updates.py`) are of the forward's segment, and what is left of the step with
them (`demand_of`, together). That bounds plans in which only some of them are late as well: a step
and the forward behind it last at least as long together as one segment that does the work of both.

Where links bind, forwards and backwards are cut between regions, and the same program gives more
(`planner/pieces.py`): what comes last does not come beside the compute behind it.

Both hold for plans that choose anew in each segment what stays, which is more than `place_states`
does, and in which nothing rests beside C but those gradients: what an optimizer's step streams
through there is empty whenever a segment begins or ends.
Latencies are left out, which only makes them smaller. They are bounds for updates that are
computed on the device, or on the host where `Room.reach` says so.
(ZeRO-Infinity, arXiv 2104.07857, section 4 has the traffic of a step without a residency.)

The parts: what a step needs, wherever things rest and whatever a schedule moves (`demand_of`); the
linear program (`least_seconds`); the bound (`bound`).
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from zcompile.ir.effects import GRADIENT, NEW
from zcompile.ir.optimizer_step import resting_regions
from zcompile.ir.schedule import Schedule
from zcompile.ir.step import StepCall, StepTrace
from zcompile.ir.types import EntryRef, Phase
from zcompile.machine.model import TIER_LINKS, Link, Machine
from zcompile.machine.staging import lane_bytes
from zcompile.memory.linear_program import Column, LinearProgram, Term
from zcompile.planner.paths import crossing_wide, crossings, ways_between_ranks
from zcompile.planner.placement import Room


@dataclass(frozen=True)
class Segment:
    """Calls of one phase in a row: seconds of compute, and distinct bytes group by group.

    reads   that its compute reads and did not write itself before
    writes  that it writes and somebody reads later; 0 where nobody does
    lives   whether somebody reads the bytes later, as they are after the segment
    late    whether it is of a forward that computes late updates
    crosses the most bytes that come to any rank, by the link between ranks: what the graph gathers
            and exchanges, but for what is kept whole on every rank
    needs   of a piece (`planner/pieces.py`), that are on the device when it begins; empty: none
    since   of a piece, in how many pieces before it what it reads and writes may be so as well;
            empty: in none
    """

    phase: Phase
    compute_s: float
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    lives: tuple[bool, ...]
    late: bool = False
    crosses: tuple[tuple[str, int], ...] = ()
    needs: tuple[int, ...] = ()
    since: tuple[int, ...] = ()

    @property
    def updates(self) -> bool:
        """Whether it computes updates."""
        return self.late or self.phase is Phase.STEP


@dataclass(frozen=True)
class Demand:
    """What a step needs, on whatever tiers its entries rest.

    groups     sizes of groups of bytes with the same uses. Low-precision copies are none of them:
               compute may make those of their masters
    gradients  which of the groups are gradients
    ways       the links between ranks that anything passes; none: there is one rank
    together   (segments, seconds): these last at least so long together, for what may be computed
               in any of them
    pieces     the same step with its segments cut (`planner/pieces.py`); None: it is not cut
    held_bytes  most bytes of gradients that are held when backward ends, which are whole
               (`memory/step_footprint.py::most_held`); None: as many as there is room for
    """

    groups: tuple[int, ...]
    segments: tuple[Segment, ...]
    gradients: frozenset[int] = frozenset()
    ways: tuple[Link, ...] = ()
    together: tuple[tuple[tuple[int, ...], float], ...] = ()
    pieces: "Demand | None" = None
    held_bytes: int | None = None

    @property
    def phases_s(self) -> Mapping[Phase, float]:
        """Lower bound, in seconds, on the compute of each phase."""
        sums: dict[Phase, float] = {}
        for segment in self.segments:
            sums[segment.phase] = sums.get(segment.phase, 0.0) + segment.compute_s
        return sums


class _Use(NamedTuple):
    """The use of one object in one segment, as in `Segment`."""

    read: int
    written: int
    lives: bool = False


def demand_of(
    step: StepTrace,
    region_seconds: Callable[..., float],
    together: bool = False,
    machine: Machine | None = None,
) -> Demand:
    """The demand of a step.

    region_seconds  seconds of a region's compute
    together        what is left of an optimizer's step is of one segment with late updates: so that
                    plans in which other updates are late are bounded too
    machine         whose ranks train together; None: there is one
    """
    touched: dict[int, _Touched] = {}
    wide = crossing_wide(step)
    ways = () if machine is None else ways_between_ranks(machine)
    phases, seconds, late, found, crosses = [], [], [], [], []
    for phase, calls in segmented(step, together):
        reads: _Distinct = _Ranges()
        writes: _Distinct = _Ranges()
        compute_s, updates = 0.0, False
        for call in calls:
            updates |= call.schedule.updates_late
            serial = call.schedule.serial
            if serial not in touched:
                touched[serial] = _touched(call.schedule, region_seconds)
            compute_s += touched[serial].compute_s
            touched[serial].add_to(call, reads, writes)
        phases.append(phase)
        seconds.append(compute_s)
        late.append(updates)
        crosses.append(_crossing(calls, machine, wide))
        found.append((reads.sizes(), writes.sizes()))
    groups = _alike(phases, found)
    segments = tuple(
        Segment(
            phase,
            compute_s,
            tuple(uses[n].read for _, _, uses in groups),
            tuple(uses[n].written for _, _, uses in groups),
            tuple(uses[n].lives for _, _, uses in groups),
            late[n],
            crosses[n],
        )
        for n, (phase, compute_s) in enumerate(zip(phases, seconds, strict=True))
    )
    gradients = frozenset(k for k, (_, is_gradient, _) in enumerate(groups) if is_gradient)
    return Demand(tuple(size for size, _, _ in groups), segments, gradients, ways)


def _crossing(
    calls: Sequence[StepCall], machine: Machine | None, wide: Container[str]
) -> tuple[tuple[str, int], ...]:
    """The bytes that collectives take of each link between ranks; `wide`: as of `crossings`."""
    found: dict[str, int] = {}
    if machine is not None:
        every = (x for call in calls for x in call.schedule.effects if x.is_collective)
        for _, link, crossing in (way for x in every for way in crossings(x, machine, wide)):
            found[link.name] = found.get(link.name, 0) + crossing.slowest
    return tuple(found.items())


def segmented(step: StepTrace, together: bool) -> list[tuple[Phase, list[StepCall]]]:
    """The calls of each segment, and its phase; `together` as of `demand_of`."""
    found = [(p, list(calls)) for p, calls in groupby(step.calls, key=lambda call: call.phase)]
    late = any(call.schedule.updates_late for call in step.calls)
    if together and late and len(found) > 1 and found[-1][0] is Phase.STEP:
        _, updates = found.pop()
        found[0] = found[0][0], [*updates, *found[0][1]]
    return found


def _alike(
    phases: Sequence[Phase], found: Sequence[tuple["_Sizes", "_Sizes"]]
) -> list[tuple[int, bool, list[_Use]]]:
    """Groups of objects of which every segment uses the same share: size, whether gradients,
    uses."""
    groups: dict[object, tuple[int, bool, list[_Use]]] = {}
    for key in dict.fromkeys(k for reads, writes in found for k in (*reads, *writes)):
        plain = [_Use(reads.get(key, 0), writes.get(key, 0)) for reads, writes in found]
        is_gradient, is_copy = key[0].is_gradient, key[1] is not None or key[0].is_copy
        if is_copy or not any(use.read for use in plain):
            continue  # or it is made and used up within a segment
        most = max(max(use.read, use.written) for use in plain)
        uses = [
            _Use(use.read, use.written if lives else 0, lives)
            for n, use in enumerate(plain)
            for lives in [outlives(phases, plain, n, is_gradient)]
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


def outlives(
    phases: Sequence[Phase], uses: Sequence[tuple[int, ...]], n: int, is_gradient: bool
) -> bool:
    """Whether an object is read after segment n before it is overwritten.

    uses  of each segment: bytes that it reads of it, and writes

    A gradient is added to by each backward pass, and is over with the step, or the forward with a
    late update, that reads it.
    """
    if is_gradient:
        return phases[n] is not Phase.STEP and not uses[n][0]
    later = [uses[(n + i) % len(uses)] for i in range(1, len(uses) + 1)]
    return next((bool(use[0]) for use in later if use[0] or use[1]), False)


K = TypeVar("K")


class _At(NamedTuple):
    """The object that an instruction names: an entry's index, its copy in a dtype, or its
    gradient. Of what does not last, only gradients are wanted, which late updates read: whatever
    else is new in every call of a graph left the device by choice."""

    entry: int
    copy: object = None
    is_gradient: bool = False
    lasts: bool = True


class _Ranges(Generic[K]):
    """Byte ranges of objects, and the number of distinct bytes in them."""

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
        """Distinct bytes of each object."""
        return {key: distinct_bytes(ranges) for key, ranges in self._of.items()}

    def items(self) -> Iterator[tuple[K, int, int]]:
        return ((key, a, b) for key, ranges in self._of.items() for a, b in ranges)


def distinct_bytes(ranges: Sequence[tuple[int, int]]) -> int:
    """Bytes that are in any of the ranges."""
    total = reached = 0
    for begin, end in sorted(ranges):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


@dataclass(frozen=True)
class _Touched:
    """Seconds of a schedule's compute, and the bytes that it reads and writes."""

    compute_s: float
    reads: _Ranges[_At]
    writes: _Ranges[_At]

    def add_to(self, call: StepCall, reads: "_Distinct", writes: "_Distinct") -> None:
        """Add the bytes of a call, by the keys of its entries."""
        made = writes.keys()
        for mine, all_ in ((self.reads, reads), (self.writes, writes)):
            for at, begin, end in mine.items():
                of = call.gradients if at.is_gradient else call.entries
                names = of[at.entry], at.copy
                if not (at.lasts or names[0].is_gradient):
                    continue
                if all_ is reads and names[0].is_copy and call.phase is Phase.STEP:
                    continue  # made anew, of what is there
                if all_ is writes or names not in made:
                    all_.add(names, begin, end)


_Object = tuple[EntryRef, object]
"""(an entry, dtype of its copy or None)."""
_Sizes = Mapping[_Object, int]
_Distinct = _Ranges[_Object]


def _touched(schedule: Schedule, region_seconds: Callable[..., float]) -> _Touched:
    reads: _Ranges[_At] = _Ranges()
    writes: _Ranges[_At] = _Ranges()
    for x in schedule.effects:
        home = x.home
        if home is None or home.role is NEW:
            continue
        lasts = home.lasting or schedule.phase is Phase.STEP
        at = _At(home.entry, home.copy_dtype, home.role is GRADIENT, lasts)
        if home.reads:
            reads.add(at, home.begin, home.end)
        if home.writes:
            writes.add(at, home.begin, home.end)
    return _Touched(least_compute(schedule, region_seconds), reads, writes)


def least_compute(schedule: Schedule, region_seconds: Callable[..., float]) -> float:
    """Lower bound, in seconds, on the compute of a schedule.

    Of an optimizer's step in its chunks, or of whole resident rows that are computed together,
    whichever is less. At measured costs this is an estimate, since chunks of other sizes may take
    less for each byte than those that were seen.
    """
    seconds = sum(map(region_seconds, schedule.regions()))
    if not schedule.rows:
        return seconds
    return min(seconds, sum(map(region_seconds, resting_regions(schedule.name, schedule.rows))))


COMPUTE = "compute"
MOST_SEGMENTS = 80
"""Most segments of a step whose linear program is solved, which takes about a second; for more
micro-batches the plain bound must do."""
SLACK = 1e-6
"""Part of a fully sequential step by which a way of running it may exceed the optimum when its
traffic is minimised. Ten times the difference that the solver takes for equal."""


LINKS_BIND = 1.001
"""Pieces are looked at where the bound of whole segments is so many times their compute: of a step
that compute alone bounds, cuts tell nothing."""


BESIDE = {"h2d": "disk_read", "d2h": "disk_write"}
"""Link -> the other way between device and far tiers, where disk and device exchange bytes
themselves."""


def links_counted(links: Mapping[str, Link], room: Room, updates: bool) -> frozenset[str]:
    """The links that a byte from a far tier must pass, or can, where updates are computed or not.

    Where compute reaches the host, operands of updates that are not on the device need not pass the
    bus.
    """
    wanted = set() if room.reach and updates else {"h2d", "d2h"}
    if "disk" in room.nbytes:
        wanted |= {"disk_read", "disk_write"}
    return frozenset(wanted & links.keys())


@dataclass(frozen=True)
class LeastSeconds:
    """The optimum of the linear program.

    seconds  of the step
    lanes    busy seconds of compute and of each lane, segment by segment, in an optimal way that
             moves least
    """

    seconds: float
    lanes: tuple[Mapping[str, float], ...]


def _fabric_seconds(segment: Segment, demand: Demand) -> dict[str, float]:
    """Seconds of the links between ranks that anything crosses."""
    rates = {link.name: link.bytes_per_s for link in demand.ways}
    return {name: nbytes / rates[name] for name, nbytes in segment.crosses if nbytes}


def least_seconds(
    demand: Demand, links: Mapping[str, Link], room: Room, one_place: bool = False
) -> LeastSeconds | None:
    """The least seconds of a step, by a linear program; None for more segments than are worth it.

    What stays over each border between segments competes for room.

    one_place  as much of each group is on the device, and off the disk, at every border: the least
               of plans in which entries rest in the same place in all segments

    For every border b between two segments, the end of a step among them, and every group k of
    bytes:

        h[k,b]  bytes of k on the device               sum over k of h <= C
        q[k,b]  bytes of k on the device or the host   sum over k of q <= C + H,
                                                       h <= q <= size of k
        d[k,b]  bytes of k whose value is on the device only,    d <= h
        e[k,b]  bytes of k whose value is not on the disk,       e <= q
        r[k,b]  bytes of k in the ring, on their way from the disk; w[k,b] on their way to it
                sum over k of r + w <= G, the staging ring; of r and of w <= its part for one way
        g[k,b]  bytes of gradients k that are held when backward ends, and when a forward with late
                updates begins, beside C: in the next segment updates read them there, or they
                leave, or are held on;
                sum over k of g <= what is held

    For every segment s, between the borders b and b', which reads R[k] and writes W[k] distinct
    bytes (of a piece, which may do so in some before it as well, the first and third row are of
    all these together, in the others W[k] is what it may write, and h[k,b] >= what it needs there):

        in[k]    >= R[k] - h[k,b] - g[k,b]         what is not there must come
        in[k]    >= h[k,b'] - h[k,b] - g[k,b] - W[k]
                                                   so must what is there in the end, not in the
                                                   beginning, and was not written
        out[k]   >= W[k] - d[k,b'] - g[k,b']       what was written is sent, or is still there only
        out[k]   >= d[k,b] + g[k,b] - d[k,b'] - g[k,b'] - W[k]
                                                   so is what was there only and was not written
                                                   anew; if anybody reads it later
        the same of the disk, with q for h and e for d, where in[k] + r[k,b] - r[k,b'] >= 0 came
        out of the ring, and out[k] + w[k,b'] - w[k,b] >= 0 went into it; where disk and device
        exchange bytes themselves, what comes and leaves by either counts in the first four
        T[s]     >= seconds of its compute, and of what crosses between ranks in it
        T[s]     >= seconds of each link for these bytes; links that take turns count together
        the sum of T over some segments >= seconds of what may be computed in any of these
        (`Demand.together`)

    The sum of T is least. Every way of running the step in which nothing rests beside C and H, but
    for gradients from the end of backward to that of an optimizer's step after it, obeys all of
    this, whatever it keeps and when: read h, q, d, e and g off what it does at each border. So no
    way is faster. Fractions of bytes, and what else must lie on the device meanwhile, are left out,
    which only makes it smaller.
    """
    if len(demand.segments) > MOST_SEGMENTS or not demand.groups:
        return None
    unit_s = _most_seconds(demand, links)
    program, times, lanes = _program(demand, links, room, unit_s)
    if one_place:
        for kind, k, b in product("hq", range(len(demand.groups)), range(1, len(demand.segments))):
            program.exactly(0.0, ((kind, k, b), 1.0), ((kind, k, 0), -1.0))
    found = _solved(program, times)
    least = sum(found[column] for column, _ in times)
    program.at_most(least + SLACK, *times)
    found = _solved(program, [term for of in lanes for terms in of.values() for term in terms])
    busy = tuple(
        {
            COMPUTE: segment.compute_s,
            **_fabric_seconds(segment, demand),
            **{
                lane: unit_s * sum(found[column] * share for column, share in terms)
                for lane, terms in of.items()
            },
        }
        for segment, of in zip(demand.segments, lanes, strict=True)
    )
    return LeastSeconds(unit_s * least, busy)


def _seconds_in_pieces(
    demand: Demand, links: Mapping[str, Link], room: Room
) -> dict[Phase, float] | None:
    """The least seconds of a step that is cut, phase by phase, by the same program; None for more
    pieces than are worth it."""
    if len(demand.segments) > MOST_SEGMENTS or not demand.groups:
        return None
    unit_s = _most_seconds(demand, links)
    program, times, _ = _program(demand, links, room, unit_s)
    found, phases = _solved(program, times), dict[Phase, float]()
    for segment, (column, _) in zip(demand.segments, times, strict=True):
        phases[segment.phase] = phases.get(segment.phase, 0.0) + unit_s * found[column]
    return phases


def _program(
    demand: Demand, links: Mapping[str, Link], room: Room, unit_s: float
) -> tuple[LinearProgram, list[Term], list[dict[str, list[Term]]]]:
    """The program of `least_seconds`, the sum that it is about, and the lanes of each segment."""
    program = LinearProgram()
    _hold(program, demand, room)
    lanes = [_segment(program, demand, n, links, room, unit_s) for n in range(len(demand.segments))]
    for several, seconds in demand.together:
        program.at_most(-seconds / unit_s, *((("T", n), -1.0) for n in several))
    return program, [(("T", n), 1.0) for n in range(len(demand.segments))], lanes


def _solved(program: LinearProgram, costs: Sequence[Term]) -> Mapping[Column, float]:
    found = program.minimised(*costs)
    assert found is not None, "where nothing is held and everything moves, all rows are kept"
    return found.values


def _most_seconds(demand: Demand, links: Mapping[str, Link]) -> float:
    """Seconds of a step that computes and moves one thing after the other: the unit of times."""
    moved = sum(sum(s.reads) + sum(s.writes) for s in demand.segments)
    slowest = min((link.bytes_per_s for link in links.values()), default=1.0)
    return max(sum(s.compute_s for s in demand.segments) + moved / slowest, 1e-9)


def _unit_bytes(demand: Demand) -> float:
    """The unit of bytes: all of them. With it, and times by `_most_seconds`, numbers are around
    1."""
    return float(max(1, sum(demand.groups)))


def _hold(program: LinearProgram, demand: Demand, room: Room) -> None:
    """Columns and rows of border b, which segment b begins with."""
    unit = _unit_bytes(demand)
    device = min(1.0, room.nbytes.get("device", 0) / unit)
    near = min(1.0, device + room.nbytes.get("host", 0) / unit)
    ring_bytes = room.ring_bytes if "disk" in room.nbytes else 0
    ring, one_way = min(1.0, ring_bytes / unit), min(1.0, lane_bytes(ring_bytes) / unit)
    held = min(1.0, room.held_bytes / unit)
    for b in range(len(demand.segments)):
        for k, nbytes in enumerate(demand.groups):
            size = nbytes / unit
            for kind in "hqde":
                program.column((kind, k, b), highest=size)
            for kind in "rw":
                program.column((kind, k, b), highest=min(size, one_way))
            program.at_most(0.0, (("h", k, b), 1.0), (("q", k, b), -1.0))
            program.at_most(0.0, (("d", k, b), 1.0), (("h", k, b), -1.0))
            program.at_most(0.0, (("e", k, b), 1.0), (("q", k, b), -1.0))
        held_here = demand.segments[b - 1].phase is Phase.BACKWARD or demand.segments[b].late
        late = demand.gradients if held_here else ()
        for k in late:
            program.column(("g", k, b), highest=demand.groups[k] / unit)
        ended = demand.segments[b].phase is not Phase.BACKWARD and demand.held_bytes is not None
        most = min(held, (demand.held_bytes or 0) / unit) if ended else held
        program.at_most(most, *((("g", k, b), 1.0) for k in late))
        needs = demand.segments[b].needs
        if sum(needs) <= room.nbytes.get("device", 0):  # else there is no plan to be bounded
            for k, nbytes in enumerate(needs):
                if nbytes:
                    program.at_most(-nbytes / unit, (("h", k, b), -1.0))
        every = range(len(demand.groups))
        program.at_most(device, *((("h", k, b), 1.0) for k in every))
        program.at_most(near, *((("q", k, b), 1.0) for k in every))
        for kind in "rw":
            program.at_most(one_way, *(((kind, k, b), 1.0) for k in every))
        program.at_most(ring, *(((kind, k, b), 1.0) for k in every for kind in "rw"))


def _segment(
    program: LinearProgram,
    demand: Demand,
    n: int,
    links: Mapping[str, Link],
    room: Room,
    unit_s: float,
) -> dict[str, list[Term]]:
    """Columns and rows of segment n; by lane, the terms of its time, in `unit_s`."""
    segment, after = demand.segments[n], (n + 1) % len(demand.segments)
    least_s = max(segment.compute_s, *_fabric_seconds(segment, demand).values(), 0.0)
    program.column(("T", n), lowest=least_s / unit_s)
    unit = _unit_bytes(demand)
    lanes: dict[str, list[Term]] = {}
    counted = links_counted(links, room, segment.updates)
    for link in sorted(counted):
        held, new = ("h", "d") if link in ("h2d", "d2h") else ("q", "e")
        seconds = unit / links[link].bytes_per_s / unit_s
        for k in range(len(demand.groups)):
            moved = program.column((link, k, n))
            lanes.setdefault(links[link].lane, []).append((moved, seconds))
            begun = n - (segment.since[k] if segment.since else 0)
            now, whole = (_ways(demand, link, k, m, n, room, counted) for m in (n, begun))
            program.at_most(0.0, *now)
            read, written = segment.reads[k] / unit, segment.writes[k] / unit
            anew = _written_by(demand, k, n) / unit
            end = [(at, -1.0) for at in [("g", k, after)] if at in program]
            if link in ("h2d", "disk_read"):
                there = [(held, k, begun), ("g", k, begun)], [(held, k, n), ("g", k, n)]
                then, here = ([(at, -1.0) for at in row if at in program] for row in there)
                program.at_most(-read, *whole, *then)
                program.at_most(anew, *now, *here, ((held, k, after), 1.0))
            else:
                still = [((new, k, after), -1.0), *end]
                program.at_most(-written, *whole, *still)
                if segment.lives[k]:
                    here = [(at, 1.0) for at in [(new, k, n), ("g", k, n)] if at in program]
                    program.at_most(anew, *now, *here, *still)
    for terms in lanes.values():
        program.at_most(0.0, *terms, (("T", n), -1.0))
    return lanes


def _ways(
    demand: Demand, link: str, k: int, first: int, last: int, room: Room, counted: Container[str]
) -> list[Term]:
    """The negative of what bytes of group k move by a link, from segment `first` to `last`: those
    that leave or reach the ring there are on its other side before or after."""
    after = (last + 1) % len(demand.segments)
    ways: list[Term] = [((link, k, m), -1.0) for m in range(first, last + 1)]
    if room.straight and (beside := BESIDE.get(link)) in counted:
        ways += [((beside, k, m), -1.0) for m in range(first, last + 1)]
    if link == "disk_read":
        ways += [(("r", k, first), -1.0), (("r", k, after), 1.0)]
    elif link == "disk_write":
        ways += [(("w", k, first), 1.0), (("w", k, after), -1.0)]
    return ways


def _written_by(demand: Demand, k: int, n: int) -> int:
    """The most bytes of group k that segment n writes, or may write in the place of a later one."""
    segments = demand.segments
    pieces = (m for m in range(n, len(segments)) if not (m > n and not segments[m].since))
    return max(segments[m].writes[k] for m in pieces if m == n or segments[m].since[k] >= m - n)


@dataclass(frozen=True)
class Least:
    """The bound of one segment. nbytes: over each link; seconds: of each resource by itself."""

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
    """The bound of a step.

    seconds  lower bound on any plan
    nbytes   over each link
    binding  "compute", or the link that most of those seconds are due to
    """

    seconds: float
    nbytes: Mapping[str, int]
    binding: str
    segments: tuple[Least, ...] = ()
    phases: Mapping[Phase, float] = field(default_factory=dict)


ASSUMES = (
    "no plan that computes what this one computes, at the seconds measured for it, and that has "
    "only the arena of this split for weights and states, takes less"
)
"""What `bound` assumes, for people; `floor.py` assumes none of it."""


def bound(demand: Demand, links: Mapping[str, Link], room: Room) -> Bound:
    """The bound of a step, with `room` for its entries. Pure."""
    plain = tuple(
        least_of_segment(segment, demand.gradients, links, room, _fabric_seconds(segment, demand))
        for segment in demand.segments
    )
    sharper = least_seconds(demand, links, room)
    rows = plain
    if sharper is not None:
        rows = tuple(
            Least(row.phase, row.nbytes, lanes)
            for row, lanes in zip(plain, sharper.lanes, strict=True)
        )
    due: dict[str, float] = {}
    nbytes = {link: 0 for link in links if link in TIER_LINKS}
    for way in demand.ways:
        nbytes[way.name] = sum(
            dict(segment.crosses).get(way.name, 0) for segment in demand.segments
        )
    phases: dict[Phase, float] = {}
    for row in rows:
        due[row.binding] = due.get(row.binding, 0.0) + row.least_s
        phases[row.phase] = phases.get(row.phase, 0.0) + row.least_s
        for link, n in row.nbytes.items():
            nbytes[link] += n
    due[COMPUTE] = due.get(COMPUTE, 0.0) + _lacking(rows, demand)
    binding = max(due, key=lambda name: due[name], default=COMPUTE)
    seconds = sum(row.least_s for row in plain) + _lacking(plain, demand)
    if sharper is not None:  # less only where the solver takes tenths of a microsecond for nothing
        seconds = max(seconds, sharper.seconds)
    if demand.pieces is not None and seconds > sum(demand.phases_s.values()) * LINKS_BIND:
        pieces = _seconds_in_pieces(demand.pieces, links, room)
        if pieces is not None and sum(pieces.values()) > seconds:
            seconds, phases = sum(pieces.values()), pieces
    return Bound(seconds, nbytes, binding, rows, phases)


def _lacking(rows: Sequence[Least], demand: Demand) -> float:
    """Seconds that segments take longer than each by itself, for what several share."""
    lacks = (s - sum(rows[n].least_s for n in several) for several, s in demand.together)
    return max((0.0, *lacks))


def least_of_segment(
    segment: Segment,
    gradients: Iterable[int],
    links: Mapping[str, Link],
    room: Room,
    between: Mapping[str, float] = MappingProxyType({}),
) -> Least:
    """The bound of one segment by itself, with all of `room` for entries at its beginning and its
    end.

    between  seconds of links between ranks
    """
    device = room.nbytes.get("device", 0)
    near = device + room.nbytes.get("host", 0)
    one_way = lane_bytes(room.ring_bytes)
    nbytes: dict[str, int] = {}
    counted = links_counted(links, room, segment.updates)
    late = room.held_bytes if segment.phase is Phase.BACKWARD else 0
    stays = sum(segment.reads[k] for k in gradients) if segment.updates else 0
    ways = (
        ("h2d", "disk_read", segment.reads, min(stays, room.held_bytes)),
        ("d2h", "disk_write", segment.writes, late),
    )
    for bus, disk, parts, held in ways:
        if disk in counted:
            nbytes[disk] = max(0, sum(parts) - near - one_way - held)
        if bus in counted and not (room.straight and disk in counted):
            nbytes[bus] = max(0, sum(parts) - device - held)
    seconds = {COMPUTE: segment.compute_s, **between}
    for link, n in nbytes.items():
        lane = links[link].lane
        seconds[lane] = seconds.get(lane, 0.0) + n / links[link].bytes_per_s
    return Least(segment.phase, nbytes, seconds)
