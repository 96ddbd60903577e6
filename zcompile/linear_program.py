"""Where fractions of groups of entries rest best: a linear program, solved by HiGHS.

    minimise    sum over phases T_p
    such that   T_p >= compute seconds of p
                T_p >= seconds that each link is busy in p; links that take turns count together
                every entry rests somewhere, every tier holds what it has room for

scipy, which brings HiGHS, is an optional extra.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zcompile.loads import Group
from zcompile.machine import Link
from zcompile.packing import aligned
from zcompile.specs import Phase

TIE = 1e-3
"""Weight of a second on a link that does not bind: among plans that are equal to a thousandth, the
one that moves least. Much less would drown in the solver's tolerance (1e-7 of what is minimised,
which is near 1 here)."""


@dataclass(frozen=True)
class Fractions:
    """How many of each group on each tier, and the seconds that takes."""

    counts: list[dict[str, float]]
    seconds: float


def is_available() -> bool:
    return importlib.util.find_spec("scipy") is not None


def fractions(
    groups: Sequence[Group],
    room: Mapping[str, int],
    compute_seconds: Mapping[Phase, float],
    links: Mapping[str, Link],
) -> Fractions | None:
    """The optimum; None without scipy, or if nothing is to be placed or it does not fit."""
    if not groups or not is_available():
        return None
    from scipy.optimize import linprog

    columns = [(n, tier) for n, g in enumerate(groups) for tier in g.loads]
    phases = _phases(groups, compute_seconds)
    upper, limit = _limits(groups, columns, phases, room, links)
    moving = [sum(groups[n].loads[tier].values()) for n, tier in columns]
    scale = max(sum(compute_seconds.values()), _most(groups), 1e-12)
    cost = [TIE * seconds / scale for seconds in moving] + [1.0 / scale] * len(phases)
    equal = [[float(n == k) for k, _ in columns] + [0.0] * len(phases) for n in range(len(groups))]
    bounds: list[Any] = [(0.0, None)] * len(columns)
    bounds += [(compute_seconds.get(phase, 0.0), None) for phase in phases]
    count = [float(len(g.keys)) for g in groups]
    found = linprog(
        cost, A_ub=upper, b_ub=limit, A_eq=equal, b_eq=count, bounds=bounds, method="highs"
    )
    if not found.success:
        return None
    counts: list[dict[str, float]] = [{} for _ in groups]
    for (n, tier), value in zip(columns, found.x, strict=False):
        counts[n][tier] = float(value)
    return Fractions(counts, float(sum(found.x[len(columns) :])))


def _most(groups: Sequence[Group]) -> float:
    """Seconds of all links together, if every entry rests as far away as it can."""
    return sum(len(g.keys) * max(sum(at.values()) for at in g.loads.values()) for g in groups)


def _phases(groups: Sequence[Group], compute_seconds: Mapping[Phase, float]) -> list[Phase]:
    used = (phase for g in groups for loads in g.loads.values() for phase, _ in loads)
    return list(dict.fromkeys((*compute_seconds, *used)))


def _limits(
    groups: Sequence[Group],
    columns: Sequence[tuple[int, str]],
    phases: Sequence[Phase],
    room: Mapping[str, int],
    links: Mapping[str, Link],
) -> tuple[list[list[float]], list[float]]:
    """Rows that must not exceed their limit: bytes of a tier; a lane's seconds less T_p."""
    upper, limit = [], []
    for tier, nbytes in room.items():
        sizes = [float(aligned(groups[n].nbytes)) if t == tier else 0.0 for n, t in columns]
        upper.append([*sizes, *[0.0] * len(phases)])
        limit.append(float(nbytes))
    for phase in phases:
        for lane in {links[link].lane for link in links}:
            busy = [_on_lane(groups[n].loads[tier], phase, lane, links) for n, tier in columns]
            if any(busy):
                upper.append([*busy, *[-float(p is phase) for p in phases]])
                limit.append(0.0)
    return upper, limit


def _on_lane(
    loads: Mapping[tuple[Phase, str], float], phase: Phase, lane: str, links: Mapping[str, Link]
) -> float:
    return sum(
        seconds for (p, link), seconds in loads.items() if p is phase and links[link].lane == lane
    )
