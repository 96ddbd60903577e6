"""Residency: on which tier each weight, gradient and optimizer state of a step rests.

A step scans its states in the same order every time, so what pays is a set that stays and a window
through which the rest streams: an LRU of the same size would hit nothing. Every tier an entry may
rest on costs it seconds on links in each phase; a phase takes as long as its busiest link, or its
compute. Fractions of entries are placed by a linear program (HiGHS, through scipy, if it is
installed) and rounded; without it a greedy choice by seconds saved per byte is taken.

Sources: the values are those of a resident byte in ZeRO-Infinity's traffic (arXiv 2104.07857,
section 4); that a pinned set is the least for a cyclic scan is Belady's argument.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from zcompile.linear_program import fractions, lane_of
from zcompile.machine import Link, Machine
from zcompile.packing import aligned
from zcompile.specs import Kind, Phase
from zcompile.steps import EntryFact, Step

TIERS = ("device", "host", "disk")
"""Nearest first."""
PLACED = frozenset({Kind.PARAM, Kind.GRAD, Kind.STATE})
Loads = Mapping[tuple[Phase, str], float]
"""Seconds that a link is busy in a phase."""


@dataclass(frozen=True)
class Room:
    """Bytes for entries on each tier (a tier that is absent is not there), and two shortcuts.

    reach     compute reaches the host's memory: a step borrows what rests there
    straight  disk and device memory exchange bytes without a link between host and device
    """

    nbytes: Mapping[str, int]
    reach: bool = False
    straight: bool = False


@dataclass(frozen=True)
class Placement:
    """Where each entry of a step rests.

    homes          key -> tier
    seconds        of a step, by the busiest resource of each phase
    least_seconds  the same, if entries could be split: no placement does better in this model
    binding        phase -> the link that takes longest, or "compute"
    """

    homes: Mapping[int, str]
    seconds: float
    least_seconds: float
    binding: Mapping[Phase, str] = field(default_factory=lambda: MappingProxyType({}))

    def resident_bytes(self, step: Step) -> int:
        """Of the arena, for what rests on the device."""
        return sum(
            aligned(step.facts[key].nbytes) for key, home in self.homes.items() if home == "device"
        )


@dataclass(frozen=True)
class Group:
    """Entries that are alike: same size, same uses.

    loads  tier -> what one of them there costs
    """

    nbytes: int
    keys: tuple[int, ...]
    loads: Mapping[str, Loads]


def place(
    step: Step, machine: Machine, room: Room, compute_seconds: Mapping[Phase, float]
) -> Placement:
    """The placement of every weight, gradient and state in `step`. Pure.

    compute_seconds  of each phase, with nothing to wait for
    """
    groups = group(step, machine, room)
    best = fractions(groups, room.nbytes, compute_seconds, machine.links)
    counts = best.counts if best is not None else greedy(groups, room, compute_seconds, machine)
    homes = _homes(groups, _rounded(groups, counts, room.nbytes))
    seconds, binding = evaluate(groups, homes, compute_seconds, machine.links)
    least = best.seconds if best is not None else seconds
    return Placement(homes, seconds, min(least, seconds), binding)


def group(step: Step, machine: Machine, room: Room) -> list[Group]:
    """The entries of a step that are placed, alike ones together, in the order of first use."""
    uses: dict[int, dict[Phase, tuple[int, int, int, int]]] = {}
    for call in step.calls:
        for use in call.uses():
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


def greedy(
    groups: Sequence[Group],
    room: Room,
    compute_seconds: Mapping[Phase, float],
    machine: Machine,
) -> list[dict[str, float]]:
    """How many of each group on each tier: the move that saves most seconds per byte, again and
    again. Where a single move saves nothing, since two links bind, their sum decides."""
    tiers = [tier for tier in TIERS if tier in room.nbytes]
    counts: list[dict[str, float]] = [{tiers[-1]: float(len(g.keys))} for g in groups]
    left = dict(room.nbytes)
    for tier in tiers[:-1]:
        while True:
            busy = totals(groups, counts)
            weights = _weights(busy, compute_seconds, machine.links)
            movable = [
                n
                for n, g in enumerate(groups)
                if counts[n].get(tiers[-1], 0) >= 1 and aligned(g.nbytes) <= left[tier]
            ]
            value = {
                n: _saved(groups[n], tiers[-1], tier, weights) / max(groups[n].nbytes, 1)
                for n in movable
            }
            best = max(movable, key=value.__getitem__, default=None)
            if best is None or value[best] <= 0:
                break
            most = int(left[tier] // aligned(groups[best].nbytes))
            some = max(1, min(int(counts[best][tiers[-1]]), most) // 8)
            counts[best][tiers[-1]] -= some
            counts[best][tier] = counts[best].get(tier, 0) + some
            left[tier] -= some * aligned(groups[best].nbytes)
    return counts


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


def _weights(
    busy: Mapping[tuple[Phase, str], float],
    compute_seconds: Mapping[Phase, float],
    links: Mapping[str, Link],
) -> Mapping[tuple[Phase, str], float]:
    """What a second less on a link in a phase is worth: all on the binding one, else little."""
    weights = {}
    for (phase, link), seconds in busy.items():
        longest = max(compute_seconds.get(phase, 0.0), *_lanes(phase, busy, links).values())
        lane = _lanes(phase, busy, links)[lane_of(link, links)]
        weights[phase, link] = 1.0 if lane >= longest * 0.999 else 1e-3 * seconds
    return weights


def _saved(g: Group, far: str, near: str, weights: Mapping[tuple[Phase, str], float]) -> float:
    def cost(loads: Loads) -> float:
        return sum(weights.get(at, 1e-3) * seconds for at, seconds in loads.items())

    return cost(g.loads[far]) - cost(g.loads[near])


def _lanes(
    phase: Phase, busy: Mapping[tuple[Phase, str], float], links: Mapping[str, Link]
) -> dict[str, float]:
    lanes: dict[str, float] = {}
    for (p, link), seconds in busy.items():
        if p is phase:
            lane = lane_of(link, links)
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
        lanes = {"compute": compute_seconds.get(phase, 0.0), **_lanes(phase, busy, links)}
        binding[phase] = max(lanes, key=lambda lane: lanes[lane])
        seconds += lanes[binding[phase]]
    return seconds, binding


def _rounded(
    groups: Sequence[Group], counts: Sequence[Mapping[str, float]], room: Mapping[str, int]
) -> list[dict[str, int]]:
    """Whole entries: shares rounded down, then the rest goes to the nearest tier it fits."""
    tiers = [tier for tier in TIERS if tier in room]
    left = dict(room)
    made: list[dict[str, int]] = []
    for g, count in zip(groups, counts, strict=True):
        whole = {tier: int(count.get(tier, 0.0) + 1e-6) for tier in tiers}
        for tier, n in whole.items():
            left[tier] -= n * aligned(g.nbytes)
        made.append(whole)
    by_value = sorted(
        range(len(groups)),
        key=lambda n: -sum(groups[n].loads[tiers[-1]].values()) / max(groups[n].nbytes, 1),
    )
    for n in by_value:
        size = aligned(groups[n].nbytes)
        for _ in range(len(groups[n].keys) - sum(made[n].values())):
            tier = next((t for t in tiers if left[t] >= size), tiers[-1])
            made[n][tier] += 1
            left[tier] -= size
    return made


def _homes(groups: Sequence[Group], counts: Sequence[Mapping[str, int]]) -> dict[int, str]:
    """Which of a group's entries rest where: each share spread evenly over the order of use."""
    homes: dict[int, str] = {}
    for g, count in zip(groups, counts, strict=True):
        owed = dict.fromkeys(count, 0.0)
        given = dict.fromkeys(count, 0)
        for key in g.keys:
            for tier in owed:
                owed[tier] += count[tier] / len(g.keys)
            tier = max(owed, key=lambda t: (given[t] < count[t], owed[t] - given[t]))
            homes[key] = tier
            given[tier] += 1
    return homes
