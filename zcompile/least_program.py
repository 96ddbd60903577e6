"""The least seconds of a step as a linear program: what stays over each border competes for room.

For every border b between two segments, the end of a step among them, and every group k of bytes:

    h[k,b]  bytes of k on the device               sum over k of h <= C
    q[k,b]  bytes of k on the device or the host   sum over k of q <= C + H,  h <= q <= size of k
    d[k,b]  bytes of k whose value is on the device only,    d <= h
    e[k,b]  bytes of k whose value is not on the disk,       e <= q

For every segment s, between the borders b and b', which reads R[k] and writes W[k] distinct bytes:

    in[k]    >= R[k] - h[k,b]                  what is not there must come
    out[k]   >= W[k] - d[k,b']                 what was written is sent, or is still there only
    out[k]   >= d[k,b] - d[k,b'] - W[k]        so is what was there only and was not written anew;
                                               if anybody reads it later
    the same of the disk, with q for h and e for d
    T[s]     >= seconds of its compute
    T[s]     >= seconds of each link for these bytes; links that take turns count together

The sum of T is least. Every way of running the step obeys all of this, whatever it keeps and when:
read h, q, d and e off what it does at each border. So no way is faster. Fractions of bytes, and
what else must lie on the device meanwhile, are left out, which only makes it smaller.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zcompile.demand import Demand
from zcompile.linear_program import is_available, lane_of
from zcompile.machine import Link
from zcompile.passes.place_states import Room
from zcompile.specs import Phase

COMPUTE = "compute"
MOST_SEGMENTS = 80
"""Solved in about a second; the plain bound must do for a step of more micro-batches."""
TIE = 1e-9
"""Weight of link seconds that do not count: the least traffic among the fastest."""


def links_counted(links: Mapping[str, Link], room: Room, phase: Phase) -> frozenset[str]:
    """The links that a byte must pass which is not near enough.

    Where a disk and the device exchange bytes themselves, or compute reaches the host, one that is
    not on the device need not pass the bus.
    """
    by_bus = not room.straight and not (room.reach and phase is Phase.STEP)
    wanted = {"h2d", "d2h"} if by_bus else set()
    if "disk" in room.nbytes:
        wanted |= {"disk_read", "disk_write"}
    return frozenset(wanted & links.keys())


def lanes_of_least(
    demand: Demand, links: Mapping[str, Link], room: Room
) -> tuple[Mapping[str, float], ...] | None:
    """Seconds of compute and of each lane, segment by segment, where their sum of maxima is least.

    None without scipy, or for more segments than are worth it.
    """
    if not is_available() or len(demand.segments) > MOST_SEGMENTS or not demand.groups:
        return None
    program = _Program()
    _hold(program, demand, room)
    lanes = [_segment(program, demand, n, links, room) for n in range(len(demand.segments))]
    found = program.solved()
    return tuple(
        {
            COMPUTE: segment.compute_s,
            **{
                lane: sum(found[column] * seconds for column, seconds in terms)
                for lane, terms in of.items()
            },
        }
        for segment, of in zip(demand.segments, lanes, strict=True)
    )


Column = tuple[object, ...]
Terms = Sequence[tuple[Column, float]]


@dataclass
class _Program:
    """Rows "sum of coefficient * column <= limit"; every column is at least its lower limit."""

    columns: dict[Column, int] = field(default_factory=dict)
    lowest: list[float] = field(default_factory=list)
    highest: list[float | None] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    rows: list[tuple[Terms, float]] = field(default_factory=list)

    def column(self, name: Column, lowest: float = 0.0, highest: float | None = None,
               cost: float = 0.0) -> Column:  # fmt: skip
        self.columns[name] = len(self.columns)
        self.lowest.append(lowest)
        self.highest.append(highest)
        self.costs.append(cost)
        return name

    def at_most(self, limit: float, *terms: tuple[Column, float]) -> None:
        self.rows.append((terms, limit))

    def solved(self) -> dict[Column, float]:
        from scipy.optimize import linprog
        from scipy.sparse import csr_array

        at = [(r, self.columns[c], x) for r, (terms, _) in enumerate(self.rows) for c, x in terms]
        shape = (len(self.rows), len(self.columns))
        matrix: Any = csr_array(
            ([x for _, _, x in at], ([r for r, _, _ in at], [c for _, c, _ in at])), shape=shape
        )
        limits = [limit for _, limit in self.rows]
        bounds = list(zip(self.lowest, self.highest, strict=True))
        found = linprog(self.costs, A_ub=matrix, b_ub=limits, bounds=bounds, method="highs")
        assert found.success, found.message  # nothing held and everything moved obeys all rows
        return {name: float(found.x[n]) for name, n in self.columns.items()}


UNIT = float(1 << 30)
"""Bytes are counted in GiB, so that coefficients are of one size."""


def _hold(program: _Program, demand: Demand, room: Room) -> None:
    """What is held over border b, which segment b begins with."""
    device = room.nbytes.get("device", 0) / UNIT
    near = device + room.nbytes.get("host", 0) / UNIT
    for b in range(len(demand.segments)):
        for k, nbytes in enumerate(demand.groups):
            size = nbytes / UNIT
            for kind in "hqde":
                program.column((kind, k, b), highest=size)
            program.at_most(0.0, (("h", k, b), 1.0), (("q", k, b), -1.0))
            program.at_most(0.0, (("d", k, b), 1.0), (("h", k, b), -1.0))
            program.at_most(0.0, (("e", k, b), 1.0), (("q", k, b), -1.0))
        every = range(len(demand.groups))
        program.at_most(device, *((("h", k, b), 1.0) for k in every))
        program.at_most(near, *((("q", k, b), 1.0) for k in every))


def _segment(
    program: _Program, demand: Demand, n: int, links: Mapping[str, Link], room: Room
) -> dict[str, list[tuple[Column, float]]]:
    """Columns and rows of segment n; by lane, what its seconds are made of."""
    segment, after = demand.segments[n], (n + 1) % len(demand.segments)
    program.column(("T", n), lowest=segment.compute_s, cost=1.0)
    lanes: dict[str, list[tuple[Column, float]]] = {}
    for link in sorted(links_counted(links, room, segment.phase)):
        held, new = ("h", "d") if link in ("h2d", "d2h") else ("q", "e")
        seconds = UNIT / links[link].bytes_per_s
        for k in range(len(demand.groups)):
            moved = program.column((link, k, n), cost=TIE * seconds)
            read, written = segment.reads[k] / UNIT, segment.writes[k] / UNIT
            if link in ("h2d", "disk_read"):
                program.at_most(-read, (moved, -1.0), ((held, k, n), -1.0))
            else:
                program.at_most(-written, (moved, -1.0), ((new, k, after), -1.0))
                if segment.lives[k]:
                    program.at_most(written, ((new, k, n), 1.0), ((new, k, after), -1.0),
                                    (moved, -1.0))  # fmt: skip
            lanes.setdefault(lane_of(link, links), []).append((moved, seconds))
    for terms in lanes.values():
        program.at_most(0.0, *terms, (("T", n), -1.0))
    return lanes
