"""Where fractions of groups of entries rest best: a linear program, solved by HiGHS.

    minimise    sum over phases T_p
    such that   T_p >= compute seconds of p
                T_p >= seconds that each link is busy in p; links that take turns count together
                every entry rests somewhere, every tier holds what it has room for

Of what the optimizer's step writes to disk, as much as the staging ring holds may be written while
the next forward and backward compute: L_p seconds of it count in p and not in the step.

scipy, which brings HiGHS, is an optional extra.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zcompile.ir.types import Phase, aligned
from zcompile.machine.model import Link
from zcompile.planner.loads import Group, Loads

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
    late_bytes: int = 0,
) -> Fractions | None:
    """The optimum; None without scipy, or if nothing is to be placed or it does not fit.

    late_bytes  that may be on their way to the disk when a step ends
    """
    if not groups or not is_available():
        return None
    from scipy.optimize import linprog

    columns = [(n, tier) for n, g in enumerate(groups) for tier in g.loads]
    phases = _phases(groups, compute_seconds)
    late_s = late_bytes / links["disk_write"].bytes_per_s if "disk_write" in links else 0.0
    upper, limit = _limits(groups, columns, phases, room, links, late_s)
    moving = [_moving(groups[n].loads[tier]) for n, tier in columns]
    scale = max(sum(compute_seconds.values()), _most(groups), 1e-12)
    cost = [TIE * seconds / scale for seconds in moving] + [1.0 / scale] * len(phases)
    cost += [0.0] * len(phases)
    equal = [[float(n == k) for k, _ in columns] + [0.0] * 2 * len(phases)
             for n in range(len(groups))]  # fmt: skip
    bounds: list[Any] = [(0.0, None)] * len(columns)
    bounds += [(compute_seconds.get(phase, 0.0), None) for phase in phases]
    bounds += [(0.0, 0.0 if phase is Phase.STEP else late_s) for phase in phases]
    count = [float(len(g.keys)) for g in groups]
    found = linprog(
        cost, A_ub=upper, b_ub=limit, A_eq=equal, b_eq=count, bounds=bounds, method="highs"
    )
    if not found.success:
        return None
    counts: list[dict[str, float]] = [{} for _ in groups]
    for (n, tier), value in zip(columns, found.x, strict=False):
        counts[n][tier] = float(value)
    return Fractions(counts, float(sum(found.x[len(columns) : len(columns) + len(phases)])))


def _moving(loads: Loads) -> float:
    """Seconds on all links. What is written to disk before the step counts twice: the step waits
    for it to be home and reads it back, while what the step writes has until the next one."""
    again = sum(s for (phase, link), s in loads.items()
                if link == "disk_write" and phase is not Phase.STEP)  # fmt: skip
    return sum(loads.values()) + again


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
    late_s: float,
) -> tuple[list[list[float]], list[float]]:
    """Rows that must not exceed their limit: bytes of a tier; a lane's seconds less T_p, and less
    or more what is written late; all that is."""
    none = [0.0] * len(phases)
    upper, limit = [], []
    for tier, nbytes in room.items():
        sizes = [float(aligned(groups[n].nbytes)) if t == tier else 0.0 for n, t in columns]
        upper.append([*sizes, *none, *none])
        limit.append(float(nbytes))
    for phase in phases:
        time = [-float(p is phase) for p in phases]
        for lane in {links[link].lane for link in links}:
            busy = [_on_lane(groups[n].loads[tier], phase, lane, links) for n, tier in columns]
            late = none
            if "disk_write" in links and links["disk_write"].lane == lane:
                late = [-1.0] * len(phases) if phase is Phase.STEP else [-x for x in time]
            if any(busy) or any(late):
                upper.append([*busy, *time, *late])
                limit.append(0.0)
    upper.append([0.0] * len(columns) + none + [1.0] * len(phases))
    limit.append(late_s)
    return upper, limit


def _on_lane(
    loads: Mapping[tuple[Phase, str], float], phase: Phase, lane: str, links: Mapping[str, Link]
) -> float:
    return sum(
        seconds for (p, link), seconds in loads.items() if p is phase and links[link].lane == lane
    )
