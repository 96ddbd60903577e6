"""Computes the floor of a step: no plan within the same budgets takes less, however it splits them.

`bounds.py` takes for granted what the plans of this compiler have in common: that weights and
states rest in the arena only, that values are recomputed where this plan recomputes them, that
compute takes the seconds it took while links were at work. The floor does not:

- Compute is that of the traced graph, before any pass: without what is recomputed or cut, at
  seconds that regions took while no transfer was in flight. What is known of compute is what was
  measured: where a region never ran with links idle, its seconds beside transfers are all there
  is, and work that passes added is taken off by its share of the predicted work. Kernels that
  nobody has run may be faster.
- All of `device_memory` and all of `host_memory` are there for entries that rest at the border of
  two segments, so that over each link go only the bytes which no use of that memory can save
  (`bounds.least_of_segment`).
- Everything overlaps: a step lasts as long as the busiest of compute and the links, and not as long
  as the sum over its segments.

Optimizers are called after backward, as the user's loop does it: a plan that moved updates into
backward would read gradients once less.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from zcompile.ir.schedule import Schedule
from zcompile.ir.step import StepTrace
from zcompile.machine.cost import Costs, predicted_seconds
from zcompile.machine.model import TIER_LINKS, Link
from zcompile.planner.bounds import COMPUTE, Demand, least_compute, least_of_segment
from zcompile.planner.placement import Room

ASSUMES = (
    "no plan within these budgets that steps its optimizer after backward takes less, if compute "
    "cannot be faster than it was seen: the busiest of compute as it was traced, at the seconds "
    "its regions took with links idle, where they ran so, and of each link at its rate for the "
    "bytes that have to move"
)
"""What the floor assumes, for people."""


@dataclass(frozen=True)
class Floor:
    """The floor of a step.

    seconds    lower bound on any plan
    compute_s  of the traced compute, with links idle
    nbytes     that have to move over each link
    binding    "compute", or the link (of links that take turns, the first) that is busiest
    """

    seconds: float
    compute_s: float
    nbytes: Mapping[str, int]
    binding: str


def floor(
    step: StepTrace, demand: Demand, costs: Costs, links: Mapping[str, Link], room: Room
) -> Floor:
    """The floor of `step`, whose demand is `demand`. Pure.

    costs  with seconds of regions while links were idle, where such are known
    links  at the rates that they were measured to have
    room   with the whole budgets of device, host and disk
    """
    nbytes = {link: 0 for link in links if link in TIER_LINKS}
    for segment in demand.segments:
        for link, n in least_of_segment(segment, demand.gradients, links, room).nbytes.items():
            nbytes[link] += n
    known: dict[int, float] = {}
    compute_s = 0.0
    for call in step.calls:
        serial = call.schedule.serial
        if serial not in known:
            known[serial] = traced_compute(call.schedule, costs)
        compute_s += known[serial]
    busy = {COMPUTE: compute_s}
    for link, n in nbytes.items():
        lane = links[link].lane
        busy[lane] = busy.get(lane, 0.0) + n / links[link].bytes_per_s
    binding = max(busy, key=lambda name: busy[name])
    return Floor(busy[binding], compute_s, nbytes, binding)


def traced_compute(schedule: Schedule, costs: Costs) -> float:
    """Seconds of a call's compute with links idle, without work that passes added to the traced
    graph.

    The added work is taken off by its share of the work, each op priced as `predicted_seconds`
    does. Where a region never ran with links idle, its seconds beside transfers count.
    """
    seconds = least_compute(schedule, costs.idle_seconds)
    if schedule.traced_work is None:
        return seconds
    compute = costs.machine.compute
    scheduled_s = sum(predicted_seconds(region.work, compute) for region in schedule.regions())
    traced_s = predicted_seconds(schedule.traced_work, compute)
    return seconds * min(1.0, traced_s / scheduled_s) if scheduled_s else seconds
