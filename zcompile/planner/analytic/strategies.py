"""Where each class of bytes rests, by strategy, and the largest model that fits a machine so.

A strategy is data (Table 2 of the paper): for weights, gradients and optimizer state the tiers that
may hold them, and whether every rank holds all of them or its share.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from zcompile.ir.units import GiB
from zcompile.machine.model import Machine
from zcompile.planner.analytic.shapes import (
    GRADIENT_BYTES,
    OPTIMIZER_BYTES,
    WEIGHT_BYTES,
    Transformer,
)

RESERVED_BYTES = 4 * GiB
"""An assumption: of each device, 2 GB of buffers (DeepSpeed's defaults: 5e8 elements of half
precision for reductions, as many for gathers) and 2 GB of CUDA context, libraries' workspaces,
logits and fragmentation."""


@dataclass(frozen=True)
class Rest:
    """tiers: fastest first; sharded: each rank holds its share instead of everything."""

    tiers: tuple[str, ...]
    sharded: bool


@dataclass(frozen=True)
class Strategy:
    """checkpoints: the tier of activation checkpoints."""

    name: str
    weights: Rest
    gradients: Rest
    optimizer: Rest
    checkpoints: str = "device"


_DEVICE, _HOST, _DISK = ("device",), ("device", "host"), ("device", "host", "disk")
_SHARDS = Rest(_DEVICE, True)
_ALL = Rest(_DEVICE, False)

DATA_PARALLEL = Strategy("data parallel", _ALL, _ALL, _ALL)
ZERO_2 = Strategy("ZeRO-2", _ALL, _SHARDS, _SHARDS)
ZERO_OFFLOAD = Strategy("ZeRO-Offload", _ALL, Rest(_HOST, True), Rest(_HOST, True))
MODEL_PARALLEL = Strategy("3D parallelism", _SHARDS, _SHARDS, _SHARDS)
ZERO_3 = Strategy("ZeRO-3", _SHARDS, _SHARDS, _SHARDS)
INFINITY_CPU = Strategy("Infinity-CPU", *(Rest(_HOST, True),) * 3, "host")
INFINITY_NVME = Strategy("Infinity-NVMe", *(Rest(_DISK, True),) * 3, "host")

STRATEGIES = (DATA_PARALLEL, ZERO_2, ZERO_OFFLOAD, MODEL_PARALLEL, ZERO_3, INFINITY_CPU,
              INFINITY_NVME)  # fmt: skip

WIDTHS = (1536, 4096, 8192, 18 * 1024, 25 * 1024, 48 * 1024, 64 * 1024, 88 * 1024)
"""Hidden sizes of the paper's models."""
MOST_LAYERS = 205
LEAST_LAYERS = 16


@dataclass(frozen=True)
class Use:
    """Of one rank: bytes by tier, and what found no place (0: it fits)."""

    bytes_by_tier: dict[str, int]
    missing_bytes: int

    @property
    def fits(self) -> bool:
        return not self.missing_bytes


def use_of(strategy: Strategy, shape: Transformer, machine: Machine, mp: int = 1) -> Use:
    """What one rank holds, if `shape.batch` is the batch of one rank and `mp` ranks split a matrix.

    Of a class that may rest on several tiers the slowest is filled first. As the sets of tiers
    are nested, and those with the fewest tiers choose first, this places all if anything does.
    """
    free = {tier: machine.tiers.get(tier, 0) for tier in _DISK}
    before = dict(free)
    missing = 0
    for tiers, nbytes in _demands(strategy, shape, machine.ranks, mp):
        for tier in reversed(tiers):
            taken = min(nbytes, free[tier])
            free[tier] -= taken
            nbytes -= taken
        missing += nbytes
    return Use({tier: before[tier] - free[tier] for tier in _DISK}, missing)


def _demands(
    strategy: Strategy, shape: Transformer, ranks: int, mp: int
) -> list[tuple[tuple[str, ...], int]]:
    working = RESERVED_BYTES + shape.model_working_bytes // mp + shape.activation_working_bytes
    found: list[tuple[tuple[str, ...], int]] = [
        (_DEVICE, working),
        ((strategy.checkpoints,), shape.checkpoint_bytes),
    ]
    for rest, per_parameter in (
        (strategy.weights, WEIGHT_BYTES),
        (strategy.gradients, GRADIENT_BYTES),
        (strategy.optimizer, OPTIMIZER_BYTES),
    ):
        nbytes = per_parameter * shape.parameters
        found.append((rest.tiers, -(-nbytes // ranks) if rest.sharded else nbytes))
    return sorted(found, key=lambda demand: len(demand[0]))


def largest(strategy: Strategy, machine: Machine) -> Transformer | None:
    """The most parameters that fit, among the paper's widths at one sequence per rank."""
    fitting = (shape for shape in _shapes() if use_of(strategy, shape, machine).fits)
    return max(fitting, key=lambda shape: shape.parameters, default=None)


def _shapes() -> Iterator[Transformer]:
    for hidden in WIDTHS:
        for layers in range(LEAST_LAYERS, MOST_LAYERS + 1):
            yield Transformer(layers, hidden, heads=max(16, hidden // 128))
