"""Places each weight, gradient and optimizer state of a step on a tier, by a linear program.

A step scans its states in the same order every time, so what pays is a set that stays and a window
through which the rest streams: an LRU of the same size would hit nothing. Every tier an entry may
rest on costs it seconds on links in each phase; a phase takes as long as its busiest link, or its
compute; links that take turns are one lane. Fractions of groups of entries are placed by a linear
program and rounded. Where the tiers have no room for all, the nearest are filled, and the farthest
is given more than it has.

    minimise    sum over phases T_p
    such that   T_p >= compute seconds of p
                T_p >= seconds that each link is busy in p; links that take turns count together
                every entry rests somewhere, every tier holds what it has room for

Of the bytes that the optimizer's step writes to disk, as many as the staging ring holds may be
written while the next forward and backward compute: L_p seconds of it count in p and not in the
step. So may those that a forward with late updates writes, behind it, which counts in what a
placement promises, and not in where entries rest. Of the updates that the host computes, U seconds
go on beside the backward that completes their gradients, and beside the next forward: as long as
these take at most (`beside_updates`).

Sources: the values are those of a resident byte in ZeRO-Infinity's traffic (arXiv 2104.07857,
section 4); that a pinned set is optimal for a cyclic scan is Belady's argument.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from types import MappingProxyType

from zcompile.ir.step import EntryFact, StepTrace
from zcompile.ir.types import HELD, SMALL_BYTES, EntryKind, EntryRef, Phase, aligned
from zcompile.machine.model import TIERS, Link, Machine
from zcompile.machine.staging import lane_bytes
from zcompile.memory.linear_program import LinearProgram, Term

PLACED = frozenset({EntryKind.PARAM, EntryKind.GRAD, EntryKind.STATE, EntryKind.COPY})
Loads = Mapping[tuple[Phase, str], float]
"""(phase, link) -> seconds that the link is busy in the phase."""


@dataclass(frozen=True)
class Room:
    """Bytes for entries on each tier (a tier that is absent is not there), and two shortcuts.

    reach       compute reaches the host's memory: a step views entries there in place
    straight    disk and device memory exchange bytes without a link between host and device
    ring_bytes  of the host, in which nothing rests, may be in flight to or from the disk
    held_bytes  of the device are live in graphs; when backward ends, they may be gradients in
                flight, or gradients that stay until the optimizer has read them
    host_bytes_per_s  at which the host reads and writes operands of updates that it computes beside
                compute; 0: it is the one that computes
    updates_end_steps  a step waits for those updates, as for a commit
    """

    nbytes: Mapping[str, int]
    reach: bool = False
    straight: bool = False
    ring_bytes: int = 0
    held_bytes: int = 0
    host_bytes_per_s: float = 0.0
    updates_end_steps: bool = False


@dataclass(frozen=True)
class Group:
    """Entries of the same size with the same uses; or sets of entries that rest together, as the
    operands of a row do that the host may compute.

    refs   of each entry; of each set, the first
    loads  tier -> seconds on links that one of them costs there
    sets   in the order of `refs`; empty: each is an entry by itself
    """

    nbytes: int
    refs: tuple[EntryRef, ...]
    loads: Mapping[str, Loads]
    sets: tuple[tuple[EntryRef, ...], ...] = ()

    def all_of(self, number: int) -> tuple[EntryRef, ...]:
        """The entries of a set, by its number."""
        return self.sets[number] if self.sets else self.refs[number : number + 1]

    @property
    def every(self) -> Iterator[EntryRef]:
        """All entries."""
        return (ref for number in range(len(self.refs)) for ref in self.all_of(number))


def group(
    step: StepTrace, machine: Machine, room: Room, stay: frozenset[EntryRef] = frozenset()
) -> list[Group]:
    """The entries of a step that are placed, in groups, in the order of first use.

    stay  gradients that stay where compute makes them, which take nothing of a tier or a link
    """
    uses: dict[EntryRef, dict[Phase, tuple[int, int, int, int]]] = {}
    for call in step.calls:
        for use in call.uses():
            if use.ref in stay:
                continue
            phases = uses.setdefault(use.ref, {})
            r, rn, w, wn = phases.get(call.phase, (0, 0, 0, 0))
            # A step makes copies anew: what is blank comes over no link.
            read = 0 if use.ref.is_copy and call.phase is Phase.STEP else use.read_bytes
            phases[call.phase] = (
                r + read,
                rn + (read > 0),
                w + use.written_bytes,
                wn + (use.written_bytes > 0),
            )
    together, sets = operands_of_host_updates(step), dict[EntryRef, list[EntryRef]]()
    for ref in uses:
        fact = step.facts.get(ref)
        if fact is not None and fact.kind in PLACED:
            sets.setdefault(together.get(ref, ref), []).append(ref)
    alike: dict[object, list[tuple[EntryRef, ...]]] = {}
    for refs in sets.values():
        facts = [step.facts[ref] for ref in refs]
        used = [sorted((p.value, u) for p, u in uses[ref].items()) for ref in refs]
        key = tuple(
            (fact.nbytes, fact.kind, fact.pinned, *phases)
            for fact, phases in zip(facts, used, strict=True)
        )
        alike.setdefault(key, []).append(tuple(refs))
    return [_group(found, step, uses, together, machine, room) for found in alike.values()]


Uses = Mapping[EntryRef, Mapping[Phase, tuple[int, int, int, int]]]
"""Of each entry and phase: bytes that are read, how often, bytes that are written, how often."""


def _group(
    sets: Sequence[tuple[EntryRef, ...]],
    step: StepTrace,
    uses: Uses,
    together: Mapping[EntryRef, EntryRef],
    machine: Machine,
    room: Room,
) -> Group:
    """The group of sets that are alike, of one entry each, or of operands that rest `together`."""
    first = sets[0]
    on_host = first[0] in together
    loads = {
        tier: _sum_of_loads(first, step, uses, tier, on_host, machine.links, room)
        for tier in TIERS
        if tier in room.nbytes
    }
    refs = tuple(of[0] for of in sets)
    if not on_host:
        return Group(step.facts[first[0]].nbytes, refs, loads)
    nbytes = sum(aligned(step.facts[ref].nbytes) for ref in first)
    return Group(nbytes, refs, loads, tuple(sets))


def _sum_of_loads(
    refs: Sequence[EntryRef],
    step: StepTrace,
    uses: Uses,
    tier: str,
    on_host: bool,
    links: Mapping[str, Link],
    room: Room,
) -> Loads:
    """The loads of entries that rest together on `tier`; of operands of a row that the host
    computes there, if they are that."""
    if len(refs) == 1 and not on_host:
        return _loads(step.facts[refs[0]], uses[refs[0]], tier, links, room)
    sums: dict[tuple[Phase, str], float] = {}
    reached = replace(room, reach=True) if on_host else room
    updated = 0
    for ref in refs:
        for at, seconds in _loads(step.facts[ref], uses[ref], tier, links, reached).items():
            sums[at] = sums.get(at, 0.0) + seconds
        read, _, written, _ = uses[ref].get(Phase.STEP, (0, 0, 0, 0))
        updated += read + written
    if on_host and tier == "host" and room.host_bytes_per_s:
        sums[Phase.STEP, HOST] = updated / room.host_bytes_per_s
    return sums


HOST = "host"
"""The lane of what the host computes beside compute."""


def operands_of_host_updates(step: StepTrace) -> Mapping[EntryRef, EntryRef]:
    """Each operand of a row that the host may compute -> the first operand of that row."""
    found: dict[EntryRef, EntryRef] = {}
    for call in step.calls:
        for row in call.schedule.rows:
            if row.on_host:
                refs = [call.entries[column.entry] for column in row.columns]
                found |= dict.fromkeys(refs, refs[0])
    return found


ALONE: Mapping[Phase, float] = MappingProxyType({})
"""Nothing goes on beside updates of the host."""


def beside_updates(step: StepTrace, room: Room) -> Mapping[Phase, float]:
    """Phase -> the part of its seconds beside which updates of the host go on.

    Of several micro-batches those are the last backward and the next first forward. No update that
    awaits compute begins before backward ends, and none goes on where a step waits for it.
    """
    rows = [row for call in step.calls for row in call.schedule.rows if row.on_host]
    stretches = Counter(phase for phase, _ in groupby(call.phase for call in step.calls))
    parts = {}
    if rows and not any(row.awaits_compute for row in rows):
        parts[Phase.BACKWARD] = stretches[Phase.STEP] / max(1, stretches[Phase.BACKWARD])
    if rows and not room.updates_end_steps:
        parts[Phase.FORWARD] = stretches[Phase.STEP] / max(1, stretches[Phase.FORWARD])
    return {phase: min(1.0, part) for phase, part in parts.items()}


def phases_of_updates(step: StepTrace) -> tuple[Phase, ...]:
    """The phases whose writes to the disk may go on behind them: those in which weights are
    updated. With late updates forward is one."""
    late = any(call.schedule.updates_late for call in step.calls)
    return (Phase.FORWARD, Phase.STEP) if late else (Phase.STEP,)


def _lane_of(link: str, links: Mapping[str, Link]) -> str:
    return HOST if link == HOST else links[link].lane


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
            if fact.kind is EntryKind.GRAD and writes > 1:  # sums are formed on the host
                add(phase, "disk_read", written // writes * (writes - 1), writes - 1)
        if tier == "host" or not room.straight:
            add(phase, "h2d", read, reads)
            add(phase, "d2h", written, writes)
    return loads


def lane_seconds(
    groups: Sequence[Group], homes: Mapping[EntryRef, str], links: Mapping[str, Link]
) -> dict[Phase, dict[str, float]]:
    """Seconds that each lane is busy in each phase, under `homes`."""
    busy: dict[tuple[Phase, str], float] = {}
    for g in groups:
        for tier, n in Counter(homes[ref] for ref in g.refs).items():
            for at, seconds in g.loads[tier].items():
                busy[at] = busy.get(at, 0.0) + n * seconds
    lanes: dict[Phase, dict[str, float]] = {}
    for (phase, link), seconds in busy.items():
        of, lane = lanes.setdefault(phase, {}), _lane_of(link, links)
        of[lane] = of.get(lane, 0.0) + seconds
    return lanes


def evaluate(
    groups: Sequence[Group],
    homes: Mapping[EntryRef, str],
    compute_seconds: Mapping[Phase, float],
    links: Mapping[str, Link],
    beside: Mapping[Phase, float] = ALONE,
) -> tuple[float, Mapping[Phase, str]]:
    """Seconds of a step under `homes`, and the lane or "compute" that binds in each phase.

    beside  as of `beside_updates`
    """
    found = lane_seconds(groups, homes, links)
    binding, taken = {}, dict[Phase, float]()
    phases = dict.fromkeys((*compute_seconds, *found))
    for phase in sorted(phases, key=lambda phase: phase is Phase.STEP):
        lanes = {"compute": compute_seconds.get(phase, 0.0), **found.get(phase, {})}
        if phase is Phase.STEP and HOST in lanes:
            hidden_s = sum(part * taken.get(other, 0.0) for other, part in beside.items())
            lanes[HOST] = max(0.0, lanes[HOST] - hidden_s)
        binding[phase] = max(lanes, key=lambda lane: lanes[lane])
        taken[phase] = lanes[binding[phase]]
    return sum(taken.values()), {phase: binding[phase] for phase in phases}


def with_late_writes(
    groups: Sequence[Group],
    homes: Mapping[EntryRef, str],
    compute_seconds: Mapping[Phase, float],
    links: Mapping[str, Link],
    late_bytes: int,
    beside: Mapping[Phase, float] = ALONE,
    writing: Sequence[Phase] = (Phase.STEP,),
) -> float:
    """Seconds of a step under `homes`, if so many bytes may be in flight to the disk when a phase
    of updates ends, and other phases have time for them: what `fractions` makes least.

    beside   as of `beside_updates`
    writing  as of `phases_of_updates`
    """
    found = lane_seconds(groups, homes, links)
    seconds, _ = evaluate(groups, homes, compute_seconds, links, beside)
    if "disk_write" not in links:
        return seconds
    writes, spare, waits = links["disk_write"].lane, 0.0, dict[Phase, float]()
    for phase in dict.fromkeys((*compute_seconds, *found)):
        lanes = found.get(phase, {})
        others = (s for lane, s in lanes.items() if lane != writes)
        waits[phase] = lanes.get(writes, 0.0) - max(compute_seconds.get(phase, 0.0), *others, 0.0)
        spare += max(0.0, -waits[phase])
    late_s = late_bytes / links["disk_write"].bytes_per_s
    left = sum(min(late_s, max(0.0, waits.get(phase, 0.0))) for phase in writing)
    return seconds - min(left, spare)


TIE = 1e-3
"""Weight of a second on a link that does not bind: among plans that are equal to a thousandth, the
one that moves least is taken. Much less would drown in the solver's tolerance (1e-7 of the
objective, which is near 1 here)."""


WHOLE_GAP = 0.01
"""What whole entries are placed by may be longer than the least by this part: simulations tell two
placements apart no better."""
WHOLE_NODES = 200
"""Most linear programs that are solved for it. Of groups of few entries, where rounding costs most,
some tens are enough."""


@dataclass(frozen=True)
class Fractions:
    """The optimum of the program: how many of each group rest on each tier, and the seconds that
    takes."""

    counts: list[dict[str, float]]
    seconds: float


def fractions(
    groups: Sequence[Group],
    room: Mapping[str, int],
    compute_seconds: Mapping[Phase, float],
    links: Mapping[str, Link],
    late_bytes: int = 0,
    beside: Mapping[Phase, float] = ALONE,
    whole: bool = False,
    writing: Sequence[Phase] = (Phase.STEP,),
) -> Fractions | None:
    """The optimum; None if the tiers together have no room for all.

    late_bytes  that may be in flight to the disk when a phase of updates ends
    beside      as of `beside_updates`
    whole       no entry is split: nearly the optimum of such, or None, where none was found soon
    writing     as of `phases_of_updates`
    """
    phases = _phases(groups, compute_seconds)
    late_s = late_bytes / links["disk_write"].bytes_per_s if "disk_write" in links else 0.0
    program = LinearProgram()
    for n, g in enumerate(groups):
        for tier in g.loads:
            program.column((n, tier))
            program.only_whole((n, tier))
    for phase in phases:
        program.column(("T", phase), lowest=compute_seconds.get(phase, 0.0))
    left = {
        q: [program.column(("L", q, p), highest=late_s) for p in phases if p is not q]
        for q in writing
    }
    _bytes_fit(program, groups, room)
    _lanes_fit(program, groups, phases, links, beside, writing)
    for columns in left.values():
        program.at_most(late_s, *((column, 1.0) for column in columns))
    for n, g in enumerate(groups):
        program.exactly(float(len(g.refs)), *(((n, tier), 1.0) for tier in g.loads))
    scale = max(sum(compute_seconds.values()), _most(groups), 1e-12)
    costs = [
        *(
            ((n, tier), TIE * _moving(loads) / scale)
            for n, g in enumerate(groups)
            for tier, loads in g.loads.items()
        ),
        *((("T", phase), 1.0 / scale) for phase in phases),
    ]
    if whole:
        found = program.minimised_whole(WHOLE_GAP, WHOLE_NODES, *costs)
    else:
        found = program.minimised(*costs)
    if found is None:
        return None
    counts = [{tier: found.values[n, tier] for tier in g.loads} for n, g in enumerate(groups)]
    return Fractions(counts, sum(found.values["T", phase] for phase in phases))


def _moving(loads: Loads) -> float:
    """Seconds on all links, for ties.

    Bytes written to disk before the step count twice: the step waits for them to be home and reads
    them back, while what the step writes has until the next one.
    """
    again = sum(
        s for (phase, link), s in loads.items() if link == "disk_write" and phase is not Phase.STEP
    )
    return sum(loads.values()) + again


def _most(groups: Sequence[Group]) -> float:
    """Seconds of all links together, if every entry rests as far away as it can."""
    return sum(len(g.refs) * max(sum(at.values()) for at in g.loads.values()) for g in groups)


def _phases(groups: Sequence[Group], compute_seconds: Mapping[Phase, float]) -> list[Phase]:
    used = (phase for g in groups for loads in g.loads.values() for phase, _ in loads)
    return list(dict.fromkeys((*compute_seconds, *used)))


def _bytes_fit(program: LinearProgram, groups: Sequence[Group], room: Mapping[str, int]) -> None:
    """Constrain each tier to the bytes that it has room for."""
    for tier, nbytes in room.items():
        sizes = [
            ((n, tier), float(aligned(g.nbytes))) for n, g in enumerate(groups) if tier in g.loads
        ]
        program.at_most(float(nbytes), *sizes)


def _lanes_fit(
    program: LinearProgram,
    groups: Sequence[Group],
    phases: Sequence[Phase],
    links: Mapping[str, Link],
    beside: Mapping[Phase, float],
    writing: Sequence[Phase],
) -> None:
    """Constrain each lane in phase p to T_p seconds.

    Of writes to the disk L_qp seconds are not of q, which is `writing`, and count in p; of what the
    host computes, U seconds, which go on `beside` parts of backward and the next forward.
    """
    on_host = any((Phase.STEP, HOST) in loads for g in groups for loads in g.loads.values())
    if on_host:
        hides = [(("T", phase), -part) for phase, part in beside.items() if phase in phases]
        program.at_most(0.0, (program.column("U"), 1.0), *hides)
    for phase in phases:
        for lane in (*dict.fromkeys(link.lane for link in links.values()), HOST):
            busy = [
                ((n, tier), seconds)
                for n, g in enumerate(groups)
                for tier, loads in g.loads.items()
                if (seconds := _on_lane(loads, phase, lane, links))
            ]
            late: list[Term] = []
            if "disk_write" in links and links["disk_write"].lane == lane:
                late = [(("L", q, phase), 1.0) for q in writing if q is not phase]
                if phase in writing:
                    late += [(("L", phase, p), -1.0) for p in phases if p is not phase]
            if on_host and lane == HOST and phase is Phase.STEP:
                late = [("U", -1.0)]
            if busy or late:
                program.at_most(0.0, *busy, (("T", phase), -1.0), *late)


def _on_lane(
    loads: Mapping[tuple[Phase, str], float], phase: Phase, lane: str, links: Mapping[str, Link]
) -> float:
    """Seconds of a lane in a phase."""
    return sum(
        seconds
        for (p, link), seconds in loads.items()
        if p is phase and _lane_of(link, links) == lane
    )


SMALL_SHARE = 8
"""Small entries rest on the device as long as all take at most 1/SMALL_SHARE of it."""


@dataclass(frozen=True)
class Placement:
    """The tier of each entry of a step.

    homes          entry -> tier
    seconds        of a step, by the busiest resource of each phase, if each waited for its writes
    least_seconds  lower bound in this model: if entries could be split, and the ring wrote late
                   what updates write to disk
    rounded_seconds  the same of this placement, whose entries are whole
    binding        phase -> the link that takes longest, or "compute"
    """

    homes: Mapping[EntryRef, str]
    seconds: float
    least_seconds: float
    binding: Mapping[Phase, str] = field(default_factory=lambda: MappingProxyType({}))
    rounded_seconds: float = 0.0

    @cached_property
    def stay(self) -> frozenset[EntryRef]:
        """Gradients that stay where compute makes them."""
        return frozenset(ref for ref, home in self.homes.items() if home == HELD)

    def resident_bytes(self, step: StepTrace) -> int:
        """Bytes of the arena for entries that rest on the device."""
        return sum(
            aligned(step.facts[ref].nbytes) for ref, home in self.homes.items() if home == "device"
        )


def place(
    step: StepTrace,
    machine: Machine,
    room: Room,
    compute_seconds: Mapping[Phase, float],
    stay: frozenset[EntryRef] = frozenset(),
    whole: bool = False,
    groups: Sequence[Group] | None = None,
) -> Placement:
    """The placement of every weight, gradient and state in `step`. Pure.

    compute_seconds  of each phase, with nothing to wait for
    stay             the gradients that stay where compute makes them
    whole            place whole entries by a program of whole numbers, and not by one of fractions
                     that are rounded; where that finds none, the latter
    groups           what `group` finds, for a caller that places a step several times
    """
    groups = group(step, machine, room, stay) if groups is None else groups
    room = _spared(room, sum(aligned(step.facts[ref].nbytes) for ref in stay))
    pinned = [g for g in groups if step.facts[g.refs[0]].pinned]
    room = _without(room, pinned)
    groups = [g for g in groups if g not in pinned]
    small, groups = _small(groups, room.nbytes.get("device", 0))
    room = _without(room, small)
    small = [*pinned, *small]
    late = lane_bytes(room.ring_bytes)
    beside = beside_updates(step, room)
    writing = phases_of_updates(step)
    terms = (room.nbytes, compute_seconds, machine.links, late, beside)
    best = fractions(groups, *terms, whole=True) if groups and whole else None
    if best is None and groups:
        best = fractions(groups, *terms)
    counts = [{} for _ in groups] if best is None else best.counts
    homes = _homes(groups, _rounded(groups, counts, room.nbytes))
    homes |= {ref: "device" for g in small for ref in g.every}
    homes |= dict.fromkeys(stay, HELD)
    every = (*small, *groups)
    seconds, binding = evaluate(every, homes, compute_seconds, machine.links, beside)
    promised = best
    if best is not None and len(writing) > 1:
        # Entries are placed no better by it, but plans are shorter than the other program promises.
        promised = fractions(groups, *terms, writing=writing)
    least = promised.seconds if promised is not None else seconds
    rounded = with_late_writes(every, homes, compute_seconds, machine.links, late, beside, writing)
    return Placement(homes, seconds, min(least, seconds), binding, rounded)


def moved(
    placement: Placement,
    homes: Mapping[EntryRef, str],
    step: StepTrace,
    machine: Machine,
    room: Room,
    compute_seconds: Mapping[Phase, float],
) -> Placement:
    """`placement` with entries on other tiers, and what that takes."""
    beside, late = beside_updates(step, room), lane_bytes(room.ring_bytes)
    terms = group(step, machine, room, placement.stay), homes, compute_seconds, machine.links
    seconds, binding = evaluate(*terms, beside)
    rounded = with_late_writes(*terms, late, beside, phases_of_updates(step))
    found = replace(placement, homes=homes, seconds=seconds, binding=binding)
    return replace(found, rounded_seconds=rounded)


def _without(room: Room, groups: Sequence[Group]) -> Room:
    """`room` without what these take of the device; less than nothing, if they do not fit."""
    taken = sum(len(g.refs) * aligned(g.nbytes) for g in groups)
    return replace(room, nbytes={**room.nbytes, "device": room.nbytes.get("device", 0) - taken})


def _spared(room: Room, nbytes: int) -> Room:
    """`room` with so many bytes less on the farthest tier.

    Gradients that stay on the device are to find room there, should the device be needed.
    """
    far = next(tier for tier in reversed(TIERS) if tier in room.nbytes)
    return replace(room, nbytes={**room.nbytes, far: max(0, room.nbytes[far] - nbytes)})


def _small(groups: Sequence[Group], device_bytes: int) -> tuple[list[Group], list[Group]]:
    """Small entries, which cost the starts of their transfers, and all others.

    The first rest on the device before anything else, if all of them take little of it.
    """
    small = [g for g in groups if g.nbytes <= SMALL_BYTES]
    if sum(len(g.refs) * aligned(g.nbytes) for g in small) * SMALL_SHARE > device_bytes:
        return [], list(groups)
    return small, [g for g in groups if g.nbytes > SMALL_BYTES]


def _rounded(
    groups: Sequence[Group], counts: Sequence[Mapping[str, float]], room: Mapping[str, int]
) -> list[dict[str, int]]:
    """Whole entries: shares rounded down, then every tier is filled up, the nearest first."""
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
    for n, g in ((n, groups[n]) for n in by_value):
        made[n][tiers[-1]] += len(g.refs) - sum(made[n].values())
    for near, tier in enumerate(tiers):
        for n, g in ((n, groups[n]) for n in by_value):
            for far in tiers[:near:-1]:
                some = min(made[n][far], max(0, left[tier]) // aligned(g.nbytes))
                made[n][far] -= some
                made[n][tier] += some
                left[tier] -= some * aligned(g.nbytes)
                left[far] += some * aligned(g.nbytes)
    return made


def _homes(groups: Sequence[Group], counts: Sequence[Mapping[str, int]]) -> dict[EntryRef, str]:
    """The tier of each entry: each share of a group is spread evenly over the order of use."""
    homes: dict[EntryRef, str] = {}
    for g, count in zip(groups, counts, strict=True):
        owed = dict.fromkeys(count, 0.0)
        given = dict.fromkeys(count, 0)
        for number in range(len(g.refs)):
            for tier in owed:
                owed[tier] += count[tier] / len(g.refs)
            tier = max(owed, key=lambda t: (given[t] < count[t], owed[t] - given[t]))
            homes |= dict.fromkeys(g.all_of(number), tier)
            given[tier] += 1
    return homes
