"""Estimates costs: seconds of a region, of an instruction, of a transfer; and whether to replan.

Measured where something has run, predicted from work and machine where nothing may. Pure:
measurements come in as data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from zcompile.ir.effects import Effects
from zcompile.ir.optimizer_step import ON_HOST
from zcompile.ir.schedule import Schedule
from zcompile.ir.types import Region, Work
from zcompile.ir.units import MiB
from zcompile.machine.model import Compute, Link, Machine

NOTHING: Mapping[Any, float] = MappingProxyType({})

WEIGHT = 0.25
"""Weight of a new measurement in a link's moving estimate: four steps after a link has changed for
good, two thirds of the change are believed; a single odd step moves the estimate by a quarter."""
LEAST_MEASURED_BYTES = 8 * MiB
"""Less traffic than this says more about starting transfers than about the link."""
LEAST_GAIN = 0.03
"""Least gain of a new plan, as part of a step: steps differ by less than this by themselves, and
replanning would never end."""
STEPS_TO_PAY = 50
"""Number of steps within which planning again must be earned back."""


class Line(NamedTuple):
    """Seconds of regions that differ only in the bytes they touch."""

    fixed_s: float
    s_per_byte: float


NO_LINES: Mapping[str, Line] = MappingProxyType({})


def line_through(points: Sequence[tuple[int, float]]) -> Line:
    """The line of some regions, from (bytes, seconds) of each.

    The least seconds are the fixed part of each region, the rest goes by bytes. Then their sum is
    right, and none costs less than nothing.
    """
    fixed_s = min(seconds for _, seconds in points)
    nbytes = sum(n for n, _ in points)
    return Line(fixed_s, (sum(s for _, s in points) - fixed_s * len(points)) / max(nbytes, 1))


@dataclass(frozen=True)
class TransferModes:
    """How bytes travel in the runtime that is predicted.

    asynchronous    compute runs beside the host (CUDA); else it is the host's own thread
    straight_read   a file is read into the arena without a buffer between, on no link but the disk
    straight_write  slots of the arena are written to a file likewise, but for those of at most
                    `behind_bytes`, which are written behind (`staging.py::behind_bytes`)
    granule         block size of the disk: whole blocks move there
    chunk_bytes     of the staging ring, for all other bytes between disk and device
    ring_bytes      of all its chunks
    backlog_bytes   most bytes of gradients in flight, before the next waits for one to arrive
    updates_end_steps  what the host computes of an optimizer's step is over when that ends, since a
                       commit writes it
    """

    asynchronous: bool = False
    straight_read: bool = False
    straight_write: bool = False
    behind_bytes: int = 0
    granule: int = 512
    chunk_bytes: int = 4 * MiB
    ring_bytes: int = 256 * MiB
    backlog_bytes: int = 256 * MiB
    updates_end_steps: bool = False


@dataclass(frozen=True)
class Costs:
    """A machine, and what was measured on it.

    regions   region key -> seconds of compute
    alike     `Region.like` -> seconds of compute by the bytes it touches
    launches  region key -> seconds of the host to start it, where compute runs beside it
    issues    (`Effects.kind`, `Effects.moved_bytes`) of an instruction -> seconds of the host
    gaps      (`call_name` of one call, of the next) -> seconds of the host between them
    idle      region key -> seconds of compute while no transfer was in flight
    """

    machine: Machine
    ways: TransferModes = TransferModes()
    regions: Mapping[Any, float] = field(default_factory=lambda: NOTHING)
    alike: Mapping[str, "Line"] = field(default_factory=lambda: NO_LINES)
    launches: Mapping[Any, float] = field(default_factory=lambda: NOTHING)
    issues: Mapping[Any, float] = field(default_factory=lambda: NOTHING)
    gaps: Mapping[Any, float] = field(default_factory=lambda: NOTHING)
    idle: Mapping[Any, float] = field(default_factory=lambda: NOTHING)

    def region_seconds(self, region: Region) -> float:
        """Seconds of compute: measured if the region has run, by others like it if those have, else
        predicted; of a joined one, those of its parts. On the host they are the host's."""
        if region.parts:
            return sum(map(self.region_seconds, region.parts))
        if (known := self.regions.get(region.key)) is not None:
            return known
        like = region.like
        if region.on_host and not self.ways.asynchronous and like not in self.alike:
            like = like.removeprefix(ON_HOST)  # in the same memory, by the same cores
        if (line := self.alike.get(like)) is not None:
            return line.fixed_s + line.s_per_byte * region.work.nbytes
        if region.on_host and self.ways.asynchronous:
            return region.work.nbytes / self.machine.host_update_bytes_per_s
        return predicted_seconds(region.work, self.machine.compute)

    def idle_seconds(self, region: Region) -> float:
        """As `region_seconds`, while no transfer is in flight, and never more than that."""
        if region.parts:
            return sum(map(self.idle_seconds, region.parts))
        seconds = self.region_seconds(region)
        return min(seconds, self.idle.get(region.key, seconds))

    def launch_seconds(self, region: Region) -> float:
        """Seconds of the host to start a region, where it goes on meanwhile."""
        if region.parts:
            return sum(map(self.launch_seconds, region.parts))
        known = self.launches.get(region.key)
        return region.work.ops * self.machine.compute.launch_s if known is None else known

    def issue_seconds(self, x: Effects) -> float:
        """Seconds of the host for an instruction that need not wait: of those of the same kind and
        size, else of the nearest size; 0 if none of its kind was measured."""
        if (known := self.issues.get((x.kind, x.moved_bytes))) is not None:
            return known
        sizes = [(abs(n - x.moved_bytes), s) for (k, n), s in self.issues.items() if k == x.kind]
        return min(sizes)[1] if sizes else 0.0

    def gap_seconds(self, before: Schedule, after: Schedule) -> float:
        """Seconds of the host between two calls; 0 if they were not seen to follow each other."""
        return self.gaps.get((call_name(before), call_name(after)), 0.0)


def predicted_seconds(work: Work, compute: Compute) -> float:
    """Seconds of a region: dense ops by FLOPs or bytes, whichever takes longer; others by bytes;
    and starts.

    A dtype whose rate is not known counts at the lowest known rate.
    """
    dense = work.dense_nbytes / compute.memory_bytes_per_s
    if work.flops:
        rate = compute.flops_per_s.get(work.dtype) or min(compute.flops_per_s.values())
        dense = max(dense, work.flops / rate)
    return dense + work.nbytes / compute.memory_bytes_per_s + work.ops * compute.launch_s


def call_name(schedule: Schedule) -> str:
    """Name of what a schedule computes, however it is planned."""
    return f"{schedule.phase.value} {schedule.name}"


def measured(link: Link, nbytes: int, busy_s: float) -> Link:
    """`link` with a moving estimate of its rate, after `nbytes` took it `busy_s`."""
    if nbytes < LEAST_MEASURED_BYTES or busy_s <= 0:
        return link
    seconds_per_byte = (1 - WEIGHT) / link.bytes_per_s + WEIGHT * busy_s / nbytes
    return replace(link, bytes_per_s=1 / seconds_per_byte)


def remeasured(machine: Machine, nbytes: Mapping[str, int], busy_s: Mapping[str, float]) -> Machine:
    """`machine` after a step that moved so much, in so many busy seconds, over each link."""
    links = {
        name: measured(link, nbytes.get(name, 0), busy_s.get(name, 0.0))
        for name, link in machine.links.items()
    }
    return replace(machine, links=links)


def replan_pays(
    step_s: float, replanned_step_s: float, planning_s: float, steps_left: int | None = None
) -> bool:
    """Whether to plan again, since costs are not what the plan was made for.

    step_s            seconds of a step of the present plan, at costs as they are now
    replanned_step_s  seconds of a step of the new plan, at the same costs
    planning_s        seconds of replacing it, once: planning, and moving entries that rest
                      elsewhere
    steps_left        None: not known
    """
    gain_s = step_s - replanned_step_s
    horizon = STEPS_TO_PAY if steps_left is None else min(STEPS_TO_PAY, steps_left)
    return gain_s > LEAST_GAIN * step_s and gain_s * horizon > planning_s
