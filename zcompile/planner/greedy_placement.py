"""Where entries rest well, without a solver: the most seconds saved per byte, again and again."""

from collections.abc import Mapping, Sequence

from zcompile.ir.types import Phase, aligned
from zcompile.machine.model import Link, Machine
from zcompile.planner.loads import TIERS, Group, Loads, Room, lanes_of, totals


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


def _weights(
    busy: Mapping[tuple[Phase, str], float],
    compute_seconds: Mapping[Phase, float],
    links: Mapping[str, Link],
) -> Mapping[tuple[Phase, str], float]:
    """What a second less on a link in a phase is worth: all on the binding one, else little."""
    weights = {}
    for (phase, link), seconds in busy.items():
        longest = max(compute_seconds.get(phase, 0.0), *lanes_of(phase, busy, links).values())
        lane = lanes_of(phase, busy, links)[links[link].lane]
        weights[phase, link] = 1.0 if lane >= longest * 0.999 else 1e-3 * seconds
    return weights


def _saved(g: Group, far: str, near: str, weights: Mapping[tuple[Phase, str], float]) -> float:
    def cost(loads: Loads) -> float:
        return sum(weights.get(at, 1e-3) * seconds for at, seconds in loads.items())

    return cost(g.loads[far]) - cost(g.loads[near])
