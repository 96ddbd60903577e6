"""What it costs a step that an entry rests on a tier: seconds on links, phase by phase.

A phase takes as long as its busiest link, or its compute. Links that take turns are one lane.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zcompile.ir.step import EntryFact, Step
from zcompile.ir.types import Kind, Phase
from zcompile.machine.model import Link, Machine

TIERS = ("device", "host", "disk")
"""Nearest first."""
PLACED = frozenset({Kind.PARAM, Kind.GRAD, Kind.STATE})
Loads = Mapping[tuple[Phase, str], float]
"""Seconds that a link is busy in a phase."""


@dataclass(frozen=True)
class Room:
    """Bytes for entries on each tier (a tier that is absent is not there), and two shortcuts.

    reach       compute reaches the host's memory: a step borrows what rests there
    straight    disk and device memory exchange bytes without a link between host and device
    ring_bytes  of the host, in which nothing rests, may be on their way to or from the disk
    held_bytes  of the device are held by graphs; when backward ends, by gradients on their way, or
                that stay until the optimizer has read them
    """

    nbytes: Mapping[str, int]
    reach: bool = False
    straight: bool = False
    ring_bytes: int = 0
    held_bytes: int = 0


@dataclass(frozen=True)
class Group:
    """Entries that are alike: same size, same uses.

    loads  tier -> what one of them there costs
    """

    nbytes: int
    keys: tuple[int, ...]
    loads: Mapping[str, Loads]


def group(
    step: Step, machine: Machine, room: Room, stay: frozenset[int] = frozenset()
) -> list[Group]:
    """The entries of a step that are placed, alike ones together, in the order of first use; but
    for those that `stay` where compute makes them, which take nothing of a tier, nor of a link."""
    uses: dict[int, dict[Phase, tuple[int, int, int, int]]] = {}
    for call in step.calls:
        for use in call.uses():
            if use.key in stay:
                continue
            phases = uses.setdefault(use.key, {})
            r, rn, w, wn = phases.get(call.phase, (0, 0, 0, 0))
            phases[call.phase] = (
                r + use.read_bytes, rn + (use.read_bytes > 0),
                w + use.written_bytes, wn + (use.written_bytes > 0),
            )  # fmt: skip
    alike: dict[tuple[object, ...], list[int]] = {}
    for key, phases in uses.items():
        fact = step.facts.get(key)
        if fact is not None and fact.kind in PLACED:
            alike.setdefault((fact.nbytes, fact.kind, *sorted(
                (p.value, u) for p, u in phases.items())), []).append(key)  # fmt: skip
    return [
        Group(
            step.facts[keys[0]].nbytes,
            tuple(keys),
            {
                tier: _loads(step.facts[keys[0]], uses[keys[0]], tier, machine.links, room)
                for tier in TIERS
                if tier in room.nbytes
            },
        )
        for keys in alike.values()
    ]


def _loads(
    fact: EntryFact,
    uses: Mapping[Phase, tuple[int, int, int, int]],
    tier: str,
    links: Mapping[str, Link],
    room: Room,
) -> Loads:
    """Seconds on each link that one entry costs if it rests on `tier`."""
    loads: dict[tuple[Phase, str], float] = {}

    def add(phase: Phase, link: str, nbytes: int, times: int) -> None:
        if times and link in links:
            seconds = nbytes / links[link].bytes_per_s + times * links[link].latency_s
            loads[phase, link] = loads.get((phase, link), 0.0) + seconds

    for phase, (read, reads, written, writes) in uses.items():
        if tier == "device" or (tier == "host" and room.reach and phase is Phase.STEP):
            continue
        if tier == "disk":
            add(phase, "disk_read", read, reads)
            add(phase, "disk_write", written, writes)
            if fact.kind is Kind.GRAD and writes > 1:  # sums are formed on the host
                add(phase, "disk_read", written // writes * (writes - 1), writes - 1)
        if tier == "host" or not room.straight:
            add(phase, "h2d", read, reads)
            add(phase, "d2h", written, writes)
    return loads


def totals(
    groups: Sequence[Group], counts: Sequence[Mapping[str, float]]
) -> dict[tuple[Phase, str], float]:
    """Seconds that each link is busy in each phase."""
    busy: dict[tuple[Phase, str], float] = {}
    for g, count in zip(groups, counts, strict=True):
        for tier, n in count.items():
            for at, seconds in g.loads[tier].items():
                busy[at] = busy.get(at, 0.0) + n * seconds
    return busy


def lanes_of(
    phase: Phase, busy: Mapping[tuple[Phase, str], float], links: Mapping[str, Link]
) -> dict[str, float]:
    """Seconds that each lane is busy in a phase."""
    lanes: dict[str, float] = {}
    for (p, link), seconds in busy.items():
        if p is phase:
            lane = links[link].lane
            lanes[lane] = lanes.get(lane, 0.0) + seconds
    return lanes


def evaluate(
    groups: Sequence[Group],
    homes: Mapping[int, str],
    compute_seconds: Mapping[Phase, float],
    links: Mapping[str, Link],
) -> tuple[float, Mapping[Phase, str]]:
    """Seconds of a step under `homes`, and what binds in each phase."""
    counts = []
    for g in groups:
        count: dict[str, float] = {}
        for key in g.keys:
            count[homes[key]] = count.get(homes[key], 0) + 1
        counts.append(count)
    busy = totals(groups, counts)
    seconds, binding = 0.0, {}
    for phase in dict.fromkeys((*compute_seconds, *(p for p, _ in busy))):
        lanes = {"compute": compute_seconds.get(phase, 0.0), **lanes_of(phase, busy, links)}
        binding[phase] = max(lanes, key=lambda lane: lanes[lane])
        seconds += lanes[binding[phase]]
    return seconds, binding
