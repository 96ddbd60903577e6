"""Which placement of a transformer's bytes fits a machine, and how few ranks suffice."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zcompile.machine.model import Machine
from zcompile.planner.analytic.bandwidth import GatherVolume, flat_gather, hierarchical_gather
from zcompile.planner.analytic.rates import Assumptions, Job
from zcompile.planner.analytic.shapes import Transformer
from zcompile.planner.analytic.step import step_time
from zcompile.planner.analytic.strategies import ZERO_3, Rest, Strategy, Use, use_of

PLACES = (
    ("device", "device"),
    ("device", "host"),
    ("host", "host"),
    ("device", "disk"),
    ("host", "disk"),
    ("disk", "disk"),
)
"""Tiers of weights and optimizer state."""


def use_of_job(job: Job, machine: Machine) -> Use:
    """What one rank holds; everything is sharded over all ranks."""
    weights, gradients, optimizer = (
        Rest((tier,), True) for tier in (job.weights, job.gradients, job.optimizer)
    )
    strategy = Strategy("as placed", weights, gradients, optimizer, job.checkpoints)
    return use_of(strategy, job.shape, machine, job.mp)


def fastest(job: Job, machine: Machine, assumed: Assumptions) -> Job:
    """`job` with the tiers that make the shortest step among those that fit, or, if none does, with
    those that lack the fewest bytes.

    raises  ConfigInvalid, if the job does not fit the machine's ranks
    """
    jobs = list(_placed(job, machine))
    uses = [use_of_job(placed, machine) for placed in jobs]
    fitting = [placed for placed, use in zip(jobs, uses, strict=True) if use.fits]
    if fitting:
        return min(fitting, key=lambda placed: step_time(placed, machine, assumed).seconds)
    return min(zip(jobs, uses, strict=True), key=lambda pair: pair[1].missing_bytes)[0]


def _placed(job: Job, machine: Machine) -> Iterator[Job]:
    for weights, optimizer in PLACES:
        for checkpoints in ("device", "host"):
            if {weights, optimizer, checkpoints} <= set(machine.tiers):
                yield replace(job, weights=weights, optimizer=optimizer, checkpoints=checkpoints)


@dataclass(frozen=True)
class Group:
    """Ranks of whole nodes that hold all model states on their devices, and what a gather inside
    such a group costs between its nodes."""

    ranks: int
    flat: GatherVolume
    hierarchical: GatherVolume


def group_of(shape: Transformer, machine: Machine) -> Group | None:
    """The smallest such group (MiCS, arXiv:2205.00119); None if all ranks are too few."""
    per_node = machine.ranks_per_node
    for ranks in range(per_node, machine.ranks + 1, per_node):
        if use_of(ZERO_3, shape, replace(machine, ranks=ranks)).fits:
            return Group(ranks, flat_gather(ranks), hierarchical_gather(ranks, per_node))
    return None
