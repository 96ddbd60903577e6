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
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from zcompile.ir.step import Step
from zcompile.ir.types import HELD, SMALL_BYTES, Phase, aligned
from zcompile.machine.model import Machine
from zcompile.machine.staging import lane_bytes
from zcompile.planner.greedy_placement import greedy
from zcompile.planner.linear_program import fractions
from zcompile.planner.loads import TIERS, Group, Room, evaluate, group

SMALL_SHARE = 8
"""Small entries rest on the device as long as all take no more than this part of it."""


@dataclass(frozen=True)
class Placement:
    """Where each entry of a step rests.

    homes          key -> tier
    seconds        of a step, by the busiest resource of each phase, if each waited for its writes
    least_seconds  if entries could be split, and the ring wrote late what the step writes to disk:
                   no placement does better in this model
    binding        phase -> the link that takes longest, or "compute"
    """

    homes: Mapping[int, str]
    seconds: float
    least_seconds: float
    binding: Mapping[Phase, str] = field(default_factory=lambda: MappingProxyType({}))

    @cached_property
    def stay(self) -> frozenset[int]:
        """Gradients that stay where compute makes them."""
        return frozenset(key for key, home in self.homes.items() if home == HELD)

    def resident_bytes(self, step: Step) -> int:
        """Of the arena, for what rests on the device."""
        return sum(
            aligned(step.facts[key].nbytes) for key, home in self.homes.items() if home == "device"
        )


def place(
    step: Step,
    machine: Machine,
    room: Room,
    compute_seconds: Mapping[Phase, float],
    stay: frozenset[int] = frozenset(),
) -> Placement:
    """The placement of every weight, gradient and state in `step`. Pure.

    compute_seconds  of each phase, with nothing to wait for
    stay             the gradients that stay where compute makes them
    """
    groups = group(step, machine, room, stay)
    room = _spared(room, sum(aligned(step.facts[key].nbytes) for key in stay))
    small, groups = _small(groups, room.nbytes.get("device", 0))
    taken = sum(len(g.keys) * aligned(g.nbytes) for g in small)
    nbytes = {**room.nbytes, "device": room.nbytes.get("device", 0) - taken}
    room = replace(room, nbytes=nbytes)
    late = lane_bytes(room.ring_bytes)
    best = fractions(groups, room.nbytes, compute_seconds, machine.links, late)
    counts = best.counts if best is not None else greedy(groups, room, compute_seconds, machine)
    homes = _homes(groups, _rounded(groups, counts, room.nbytes))
    homes |= {key: "device" for g in small for key in g.keys}
    homes |= dict.fromkeys(stay, HELD)
    seconds, binding = evaluate((*small, *groups), homes, compute_seconds, machine.links)
    least = best.seconds if best is not None else seconds
    return Placement(homes, seconds, min(least, seconds), binding)


def _spared(room: Room, nbytes: int) -> Room:
    """Without so many bytes of the farthest tier: what stays on the device is to find room there,
    should the device be needed."""
    far = next(tier for tier in reversed(TIERS) if tier in room.nbytes)
    return replace(room, nbytes={**room.nbytes, far: max(0, room.nbytes[far] - nbytes)})


def _small(groups: Sequence[Group], device_bytes: int) -> tuple[list[Group], list[Group]]:
    """Entries so small that starting their transfers is what they cost, and all others. The first
    rest on the device before anything else, if all of them take little of it."""
    small = [g for g in groups if g.nbytes <= SMALL_BYTES]
    if sum(len(g.keys) * aligned(g.nbytes) for g in small) * SMALL_SHARE > device_bytes:
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
        made[n][tiers[-1]] += len(g.keys) - sum(made[n].values())
    for near, tier in enumerate(tiers):
        for n, g in ((n, groups[n]) for n in by_value):
            for far in tiers[:near:-1]:
                some = min(made[n][far], max(0, left[tier]) // aligned(g.nbytes))
                made[n][far] -= some
                made[n][tier] += some
                left[tier] -= some * aligned(g.nbytes)
                left[far] += some * aligned(g.nbytes)
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
