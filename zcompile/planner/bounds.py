"""The least that a step can cost, whatever a plan does: bytes over each link, and seconds.

A step is a sequence of segments: stretches of calls of one phase (forward, backward, step; one pair
of the first two per micro-batch). Take one segment and let

    D   distinct bytes that its compute reads and the segments before it left behind
    W   distinct bytes that its compute writes and somebody reads later
    C   bytes of the device
    H   bytes of the host
    G   bytes of the staging ring, which are on their way to or from the disk
    E   bytes that graphs hold beside C, which gradients may lie in when backward ends, and until
        an optimizer that comes next has read them

At the moment a segment begins at most C of its D bytes are on the device, so at least D - C arrive
while it lasts; of what an optimizer reads, E less, or all gradients if that is less. At the moment
it ends at most C of its W bytes are still there, so at least W - C have left while it lasted; of
what backward writes, E less. What is neither on the device nor on the host comes from the disk, and
goes there: at least D - C - H - G, and W - C - H - G, or as much less as above. Its
compute takes its seconds (`demand.least_compute`), a link takes its bytes over its rate, and links
that take turns add up; so the segment lasts at least as long as the largest of these. Segments
follow each other, so a step lasts at least as long as their sum.

This counts every border between two segments with all of C for each of its two segments.
`least_program.py` lets all that is held share C, and never gives less; it is taken where scipy is
there to solve it.

Both hold for plans that choose anew in each segment what stays, which is more than `place_states`
does, and in which nothing rests beside C but those gradients: what an optimizer's step streams
through there is empty whenever a segment begins or ends.
Latencies are left out, which only makes them smaller. They are bounds for updates that are
computed on the device, or on the host where `Room.reach` says so.
(ZeRO-Infinity, arXiv 2104.07857, section 4 has the traffic of a step without a residency.)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from zcompile.ir.types import Phase
from zcompile.machine.model import TIER_LINKS, Link
from zcompile.planner.demand import Demand, Segment
from zcompile.planner.least_program import COMPUTE, least_seconds, links_counted
from zcompile.planner.loads import Room


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


ASSUMES = (
    "no plan that computes what this one computes, at the seconds measured for it, and that has "
    "only the arena of this split for weights and states, takes less"
)
"""What `bound` takes for granted, for people; `floor.py` takes none of it for granted."""


def bound(demand: Demand, links: Mapping[str, Link], room: Room) -> Bound:
    """The least of a step, with `room` for its entries. Pure."""
    plain = tuple(
        least_of_segment(segment, demand.gradients, links, room) for segment in demand.segments
    )
    sharper = least_seconds(demand, links, room)
    rows = plain
    if sharper is not None:
        rows = tuple(Least(row.phase, row.nbytes, lanes)
                     for row, lanes in zip(plain, sharper.lanes, strict=True))  # fmt: skip
    due: dict[str, float] = {}
    nbytes = {link: 0 for link in links if link in TIER_LINKS}
    phases: dict[Phase, float] = {}
    for row in rows:
        due[row.binding] = due.get(row.binding, 0.0) + row.least_s
        phases[row.phase] = phases.get(row.phase, 0.0) + row.least_s
        for link, n in row.nbytes.items():
            nbytes[link] += n
    binding = max(due, key=lambda name: due[name], default=COMPUTE)
    seconds = sum(row.least_s for row in plain) if sharper is None else sharper.seconds
    return Bound(seconds, nbytes, binding, rows, phases)


def least_of_segment(
    segment: Segment, gradients: Iterable[int], links: Mapping[str, Link], room: Room
) -> Least:
    """The least of one segment by itself, with all of `room` for what it begins and ends with."""
    device = room.nbytes.get("device", 0)
    near = device + room.nbytes.get("host", 0)
    nbytes: dict[str, int] = {}
    counted = links_counted(links, room, segment.phase)
    late = room.held_bytes if segment.phase is Phase.BACKWARD else 0
    stays = sum(segment.reads[k] for k in gradients) if segment.phase is Phase.STEP else 0
    ways = (
        ("h2d", "disk_read", segment.reads, min(stays, room.held_bytes)),
        ("d2h", "disk_write", segment.writes, late),
    )
    for bus, disk, parts, held in ways:
        if disk in counted:
            nbytes[disk] = max(0, sum(parts) - near - room.ring_bytes - held)
        if bus in counted and not (room.straight and disk in counted):
            nbytes[bus] = max(0, sum(parts) - device - held)
    seconds = {COMPUTE: segment.compute_s}
    for link, n in nbytes.items():
        lane = links[link].lane
        seconds[lane] = seconds.get(lane, 0.0) + n / links[link].bytes_per_s
    return Least(segment.phase, nbytes, seconds)
