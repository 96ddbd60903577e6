"""The least seconds of a step as a linear program: what stays over each border competes for room.

For every border b between two segments, the end of a step among them, and every group k of bytes:

    h[k,b]  bytes of k on the device               sum over k of h <= C
    q[k,b]  bytes of k on the device or the host   sum over k of q <= C + H,  h <= q <= size of k
    d[k,b]  bytes of k whose value is on the device only,    d <= h
    e[k,b]  bytes of k whose value is not on the disk,       e <= q
    r[k,b]  bytes of k in the ring, on their way from the disk; w[k,b] on their way to it
            sum over k of r + w <= G, the staging ring
    g[k,b]  bytes of gradients k that are held when backward ends, beside C: in the next segment the
            optimizer reads them there, or they leave;
            sum over k of g <= what is held

For every segment s, between the borders b and b', which reads R[k] and writes W[k] distinct bytes:

    in[k]    >= R[k] - h[k,b] - g[k,b]         what is not there must come
    in[k]    >= h[k,b'] - h[k,b] - g[k,b] - W[k]
                                               so must what is there in the end, not in the
                                               beginning, and was not written
    out[k]   >= W[k] - d[k,b'] - g[k,b']       what was written is sent, or is still there only
    out[k]   >= d[k,b] + g[k,b] - d[k,b'] - g[k,b'] - W[k]
                                               so is what was there only and was not written anew;
                                               if anybody reads it later
    the same of the disk, with q for h and e for d, where in[k] + r[k,b] - r[k,b'] >= 0 came out of
    the ring, and out[k] + w[k,b'] - w[k,b] >= 0 went into it; where disk and device exchange bytes
    themselves, what comes and leaves by either counts in the first four
    T[s]     >= seconds of its compute
    T[s]     >= seconds of each link for these bytes; links that take turns count together

The sum of T is least. Every way of running the step in which nothing rests beside C and H, but for
gradients from the end of backward to that of an optimizer's step after it, obeys all of this,
whatever it keeps and when: read h, q, d, e and g off what it does at each border. So no way is
faster. Fractions of bytes, and what else must lie on the device meanwhile, are left out, which only
makes it smaller.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zcompile.ir.types import Phase
from zcompile.machine.model import Link
from zcompile.planner.demand import Demand
from zcompile.planner.linear_program import is_available
from zcompile.planner.loads import Room

COMPUTE = "compute"
MOST_SEGMENTS = 80
"""Solved in about a second; the plain bound must do for a step of more micro-batches."""
SLACK = 1e-6
"""Of a step that does one thing after the other: as much longer than the least may the way be of
which the least traffic is told. Ten times what the solver takes for equal."""


BESIDE = {"h2d": "disk_read", "d2h": "disk_write"}
"""The other way between the device and what is far, where the two exchange bytes themselves."""


def links_counted(links: Mapping[str, Link], room: Room, phase: Phase) -> frozenset[str]:
    """The links that a byte must pass, or can, which is not near enough.

    Where compute reaches the host, what is not on the device need not pass the bus.
    """
    wanted = set() if room.reach and phase is Phase.STEP else {"h2d", "d2h"}
    if "disk" in room.nbytes:
        wanted |= {"disk_read", "disk_write"}
    return frozenset(wanted & links.keys())


@dataclass(frozen=True)
class LeastSeconds:
    """seconds  of the step
    lanes       of compute and of each lane, segment by segment, in a way of taking no longer that
                moves least
    """

    seconds: float
    lanes: tuple[Mapping[str, float], ...]


def least_seconds(demand: Demand, links: Mapping[str, Link], room: Room) -> LeastSeconds | None:
    """The optimum; None without scipy, or for more segments than are worth it."""
    if not is_available() or len(demand.segments) > MOST_SEGMENTS or not demand.groups:
        return None
    program, unit_s = _Program(), _most_seconds(demand, links)
    _hold(program, demand, room)
    lanes = [_segment(program, demand, n, links, room, unit_s) for n in range(len(demand.segments))]
    times = [(("T", n), 1.0) for n in range(len(demand.segments))]
    found = program.minimised(times)
    least = sum(found[column] for column, _ in times)
    program.at_most(least + SLACK, *times)
    found = program.minimised([term for of in lanes for terms in of.values() for term in terms])
    busy = tuple(
        {
            COMPUTE: segment.compute_s,
            **{
                lane: unit_s * sum(found[column] * share for column, share in terms)
                for lane, terms in of.items()
            },
        }
        for segment, of in zip(demand.segments, lanes, strict=True)
    )
    return LeastSeconds(unit_s * least, busy)


def _most_seconds(demand: Demand, links: Mapping[str, Link]) -> float:
    """Of a step that computes and moves one thing after the other: a unit of times."""
    moved = sum(sum(s.reads) + sum(s.writes) for s in demand.segments)
    slowest = min((link.bytes_per_s for link in links.values()), default=1.0)
    return max(sum(s.compute_s for s in demand.segments) + moved / slowest, 1e-9)


def _unit_bytes(demand: Demand) -> float:
    """All bytes: in it, and with times by `_most_seconds`, what is solved has numbers around 1."""
    return float(max(1, sum(demand.groups)))


Column = tuple[object, ...]
Terms = Sequence[tuple[Column, float]]


@dataclass
class _Program:
    """Rows "sum of coefficient * column <= limit"; every column is at least its lower limit."""

    columns: dict[Column, int] = field(default_factory=dict)
    lowest: list[float] = field(default_factory=list)
    highest: list[float | None] = field(default_factory=list)
    rows: list[tuple[Terms, float]] = field(default_factory=list)

    def column(self, name: Column, lowest: float = 0.0, highest: float | None = None) -> Column:
        self.columns[name] = len(self.columns)
        self.lowest.append(lowest)
        self.highest.append(highest)
        return name

    def at_most(self, limit: float, *terms: tuple[Column, float]) -> None:
        self.rows.append((terms, limit))

    def minimised(self, costs: Terms) -> dict[Column, float]:
        """The columns where the sum of `costs` is least."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_array

        at = [(r, self.columns[c], x) for r, (terms, _) in enumerate(self.rows) for c, x in terms]
        shape = (len(self.rows), len(self.columns))
        matrix: Any = csr_array(
            ([x for _, _, x in at], ([r for r, _, _ in at], [c for _, c, _ in at])), shape=shape
        )
        limits = [limit for _, limit in self.rows]
        bounds = list(zip(self.lowest, self.highest, strict=True))
        weights = [0.0] * len(self.columns)
        for name, cost in costs:
            weights[self.columns[name]] = cost
        found = linprog(weights, A_ub=matrix, b_ub=limits, bounds=bounds, method="highs")
        assert found.success, found.message  # nothing held and everything moved obeys all rows
        return {name: float(found.x[n]) for name, n in self.columns.items()}


def _hold(program: _Program, demand: Demand, room: Room) -> None:
    """What is held over border b, which segment b begins with."""
    unit = _unit_bytes(demand)
    device = min(1.0, room.nbytes.get("device", 0) / unit)
    near = min(1.0, device + room.nbytes.get("host", 0) / unit)
    ring = min(1.0, room.ring_bytes / unit) if "disk" in room.nbytes else 0.0
    held = min(1.0, room.held_bytes / unit)
    for b in range(len(demand.segments)):
        for k, nbytes in enumerate(demand.groups):
            size = nbytes / unit
            for kind in "hqde":
                program.column((kind, k, b), highest=size)
            for kind in "rw":
                program.column((kind, k, b), highest=min(size, ring))
            program.at_most(0.0, (("h", k, b), 1.0), (("q", k, b), -1.0))
            program.at_most(0.0, (("d", k, b), 1.0), (("h", k, b), -1.0))
            program.at_most(0.0, (("e", k, b), 1.0), (("q", k, b), -1.0))
        late = demand.gradients if demand.segments[b - 1].phase is Phase.BACKWARD else ()
        for k in late:
            program.column(("g", k, b), highest=demand.groups[k] / unit)
        program.at_most(held, *((("g", k, b), 1.0) for k in late))
        every = range(len(demand.groups))
        program.at_most(device, *((("h", k, b), 1.0) for k in every))
        program.at_most(near, *((("q", k, b), 1.0) for k in every))
        program.at_most(ring, *(((kind, k, b), 1.0) for k in every for kind in "rw"))


def _segment(
    program: _Program,
    demand: Demand,
    n: int,
    links: Mapping[str, Link],
    room: Room,
    unit_s: float,
) -> dict[str, list[tuple[Column, float]]]:
    """Columns and rows of segment n; by lane, what its time is made of, in `unit_s`."""
    segment, after = demand.segments[n], (n + 1) % len(demand.segments)
    program.column(("T", n), lowest=segment.compute_s / unit_s)
    unit = _unit_bytes(demand)
    lanes: dict[str, list[tuple[Column, float]]] = {}
    counted = links_counted(links, room, segment.phase)
    for link in sorted(counted):
        held, new = ("h", "d") if link in ("h2d", "d2h") else ("q", "e")
        seconds = unit / links[link].bytes_per_s / unit_s
        for k in range(len(demand.groups)):
            moved = program.column((link, k, n))
            ways = [(moved, -1.0)]
            if room.straight and BESIDE.get(link) in counted:
                ways.append(((BESIDE[link], k, n), -1.0))
            read, written = segment.reads[k] / unit, segment.writes[k] / unit
            if link == "disk_read":
                ways += [(("r", k, n), -1.0), (("r", k, after), 1.0)]
            elif link == "disk_write":
                ways += [(("w", k, n), 1.0), (("w", k, after), -1.0)]
            program.at_most(0.0, *ways)
            beside = [(at, sign) for at, sign in ((("g", k, n), 1.0), (("g", k, after), -1.0))
                      if at in program.columns]  # fmt: skip
            if link in ("h2d", "disk_read"):
                begin, end = (held, k, n), (held, k, after)
                found = [(begin, -1.0), *((at, -1.0) for at, sign in beside if sign > 0)]
                program.at_most(-read, *ways, *found)
                program.at_most(written, *ways, *found, (end, 1.0))
            else:
                still = [((new, k, after), -1.0), *(term for term in beside if term[1] < 0)]
                program.at_most(-written, *ways, *still)
                if segment.lives[k]:
                    there = [((new, k, n), 1.0), *(term for term in beside if term[1] > 0)]
                    program.at_most(written, *ways, *there, *still)
            lanes.setdefault(links[link].lane, []).append((moved, seconds))
    for terms in lanes.values():
        program.at_most(0.0, *terms, (("T", n), -1.0))
    return lanes
