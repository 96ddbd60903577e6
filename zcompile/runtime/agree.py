"""One machine for all ranks: same machine, same plan, on every one of them.

For several ranks, which `zcompile.offload` refuses so far: nothing calls this yet. It is a
collective, and `machine_for` must be none: a rank may plan alone, or measure while others do not.
Who lets several ranks train calls `agree` once, where all of them come by in the same order.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch.distributed as dist

from zcompile.errors import ZinfError
from zcompile.ir.units import show_flops, show_rate
from zcompile.machine.files import read, write
from zcompile.machine.model import Machine

ALIKE = 2.0
"""Ranks whose rates differ by more are not one kind of machine: a plan for one of them would be far
from right for another. Noise of a measurement and a busier neighbour stay well below."""


class RanksDiffer(ZinfError, RuntimeError):
    """Two ranks do not have one kind of machine."""

    def __init__(self, rank: int, figure: str, theirs: str, ours: str) -> None:
        super().__init__(
            f"rank {rank} has {figure} {theirs}, rank 0 has {ours}: more than a factor of "
            f"{ALIKE:g} apart, so that one plan does not fit both; run on nodes that are alike, "
            "measure again with `zinf doctor --measure`, or give all ranks one machine "
            "(Config(machine=...))"
        )
        self.rank = rank


def agree(machine: Machine, group: dist.ProcessGroup | None = None) -> Machine:
    """The machine that every rank of `group` gets: rates of its first rank, and of each tier the
    least that any rank has, so that what fits it fits all. All ranks call this together.

    raises  RanksDiffer, on all ranks alike
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return machine
    texts: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(texts, write(machine), group=group)
    return agreed([read(text, f"rank {rank}") for rank, text in enumerate(texts)])


def agreed(machines: list[Machine]) -> Machine:
    """The one machine of ranks that have these. raises  RanksDiffer"""
    first = machines[0]
    figures = dict(_figures(first))
    for rank, machine in enumerate(machines[1:], start=1):
        theirs = dict(_figures(machine))
        for figure in figures | theirs:
            _check_alike(rank, figure, theirs.get(figure), figures.get(figure))
    tiers = {tier: min(machine.tiers.get(tier, 0) for machine in machines) for tier in first.tiers}
    return replace(first, tiers={tier: nbytes for tier, nbytes in tiers.items() if nbytes})


Figure = tuple[float, Callable[[float], str]]


def _figures(machine: Machine) -> Iterator[tuple[str, Figure]]:
    """Every rate, by the name that an error gives it, and how to show it."""
    for link in machine.links.values():
        yield f"links.{link.name}", (link.bytes_per_s, show_rate)
    for dtype, rate in machine.compute.flops_per_s.items():
        yield f"compute of {dtype}", (rate, show_flops)
    yield "memory of the device", (machine.compute.memory_bytes_per_s, show_rate)


def _check_alike(rank: int, figure: str, theirs: Figure | None, ours: Figure | None) -> None:
    texts = ["none" if given is None else given[1](given[0]) for given in (theirs, ours)]
    if theirs is None or ours is None or not 1 / ALIKE <= theirs[0] / ours[0] <= ALIKE:
        raise RanksDiffer(rank, figure, *texts)
