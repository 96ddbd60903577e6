"""Computes the memory of a transformer from its shape, by strategy, and the bandwidth that it
needs.

All sizes are bytes of the whole model, over all ranks, for `batch` sequences at a time; the
formulas are those of section 3 of the paper. Embeddings are left out, as there. The parts:

- model states, activations, working memory (`Transformer`);
- the bandwidth that keeps compute busy, if transfers do not overlap with it (section 4). The
  arithmetic intensity of a class of bytes is the FLOPs of a step over the bytes of that class that
  a step moves;
- the tier of each class of bytes, by strategy, and the largest model that fits a machine so. A
  strategy is data (Table 2 of the paper): for weights, gradients and optimizer state the tiers that
  may hold them, and whether every rank holds all of them or its share.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

from zcompile.errors import ConfigInvalid, UnknownOption
from zcompile.ir.units import GiB
from zcompile.machine.model import Machine

WEIGHT_BYTES = 2
GRADIENT_BYTES = 2
OPTIMIZER_BYTES = 16
"""Per parameter: half precision for the model; master, momentum, variance and gradient in float32
for the optimizer."""
STATE_BYTES = WEIGHT_BYTES + GRADIENT_BYTES + OPTIMIZER_BYTES


@dataclass(frozen=True)
class Transformer:
    """A stack of equal blocks: attention, and an MLP four times as wide.

    hidden                 elements of one token's vector
    batch                  sequences at a time; a share of one, where several ranks split it
    seq                    tokens of a sequence
    blocks_per_checkpoint  blocks between two saved activations; values in between are recomputed

    raises  ConfigInvalid
    """

    layers: int
    hidden: int
    heads: int
    batch: float = 1
    seq: int = 1024
    blocks_per_checkpoint: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigInvalid(f"transformer:{field.name}", value, "must be more than zero")
            if math.isinf(value):
                raise ConfigInvalid(f"transformer:{field.name}", value, "must be finite")

    @property
    def block_parameters(self) -> int:
        """Four matrices: 3 hd x hd, hd x hd, hd x 4 hd, 4 hd x hd."""
        return 12 * self.hidden**2

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters

    @property
    def model_state_bytes(self) -> int:
        return STATE_BYTES * self.parameters

    @property
    def token_count(self) -> float:
        return self.batch * self.seq

    @property
    def checkpoint_bytes(self) -> int:
        """One vector per token and checkpoint, in half precision."""
        return round(2 * self.token_count * self.hidden * self.layers / self.blocks_per_checkpoint)

    @property
    def activation_bytes(self) -> int:
        """All activations, if none is recomputed.

        The paper's table prints twice what its formula for the working memory gives for all
        layers, in every row; this is the table's.
        """
        return round(2 * self._block_activation_bytes * self.layers)

    @property
    def model_working_bytes(self) -> int:
        """MSWM: weights and gradients of the largest operator, hd x 4 hd, must be at one place."""
        return (WEIGHT_BYTES + GRADIENT_BYTES) * self.hidden * 4 * self.hidden

    @property
    def activation_working_bytes(self) -> int:
        """AWM: the activations between two checkpoints."""
        return round(self._block_activation_bytes * self.blocks_per_checkpoint)

    @property
    def _block_activation_bytes(self) -> float:
        return self.token_count * (16 * self.hidden + 2 * self.heads * self.seq)

    @property
    def step_flops(self) -> float:
        """Forward, forward again, backward: 2 + 2 + 4 per parameter and token. Attention's own
        products are not counted, as in the paper."""
        return 8 * self.token_count * self.parameters


_SHORT = {"bsz": "batch", "ci": "blocks_per_checkpoint"}


def read_shape(options: Mapping[str, str], others: Iterable[str] = ()) -> Transformer:
    """A shape from texts: layers, hidden and heads, and further fields of `Transformer`.

    others  keys that the caller reads itself, and that an error names too
    raises  UnknownOption, ConfigInvalid
    """
    known = {field.name for field in fields(Transformer)}
    values: dict[str, float] = {}
    for key, text in options.items():
        name = _SHORT.get(key, key)
        if name not in known:
            raise UnknownOption(key, {*known, *others}, "transformer:")
        values[name] = _number(name, text)
    for name in ("layers", "hidden", "heads"):
        if name not in values:
            raise ConfigInvalid(
                "transformer",
                dict(options),
                f"lacks {name}=...; a shape is written like layers=128,hidden=25600,heads=256",
            )
    return Transformer(**values)  # type: ignore[arg-type]  # _number gives ints where they must be


def _number(name: str, text: str) -> float:
    try:
        return float(text) if name == "batch" else int(text)
    except ValueError:
        raise ConfigInvalid(f"transformer:{name}", text, "is not a number") from None


def forward_flops(parameters: int, seq: int, width: int) -> float:
    """FLOPs of one token's forward through a block: 2 for each parameter, and attention's two
    products with `seq` keys and values, all heads of which are `width` wide together."""
    return 2 * parameters + 4 * seq * width


PEAK_FLOPS_PER_S = 70e12
"""Rate of one V100 in a transformer's half-precision matmuls (the paper's `peak_tp`)."""


def weights_intensity(batch: float, seq: int) -> float:
    """8 FLOPs per parameter and token; weights come three times, gradients go once, 2 B each."""
    return batch * seq


def optimizer_intensity(batch: float, seq: int) -> float:
    """8 FLOPs per parameter and token; 16 B are read and 16 B written."""
    return batch * seq / 4


def checkpoint_intensity(hidden: int, blocks_per_checkpoint: int = 1) -> float:
    """96 hd² FLOPs per token and block; 2 hd bytes go and come, once per checkpoint."""
    return 24.0 * hidden * blocks_per_checkpoint


def efficiency(
    intensity: float, bytes_per_s: float, peak_flops_per_s: float = PEAK_FLOPS_PER_S
) -> float:
    """Compute time over compute and transfer time, one after the other."""
    return intensity * bytes_per_s / (intensity * bytes_per_s + peak_flops_per_s)


def bandwidth_for(
    wanted_efficiency: float, intensity: float, peak_flops_per_s: float = PEAK_FLOPS_PER_S
) -> float:
    """Bytes per second for a wanted efficiency: `efficiency`, solved for its bandwidth."""
    return peak_flops_per_s * wanted_efficiency / ((1 - wanted_efficiency) * intensity)


@dataclass(frozen=True)
class Needed:
    """A row of Table 3: bandwidth for devices of some speed, so that they are kept as busy as a
    V100.

    slow_bytes_per_s  of memory outside the device, per device; times `devices` in all
    peer_bytes_per_s  between devices
    """

    devices: int
    peak_flops_per_s: float
    slow_bytes_per_s: float
    peer_bytes_per_s: float

    @property
    def slow_total_bytes_per_s(self) -> float:
        return self.devices * self.slow_bytes_per_s


V100_NEEDS = Needed(512, PEAK_FLOPS_PER_S, 3e9, 70e9)


def needed(times_as_fast: float, of: Needed = V100_NEEDS) -> Needed:
    """At equal intensities and efficiency, bandwidth grows as compute does."""
    return Needed(
        of.devices,
        times_as_fast * of.peak_flops_per_s,
        times_as_fast * of.slow_bytes_per_s,
        times_as_fast * of.peer_bytes_per_s,
    )


@dataclass(frozen=True)
class GatherVolume:
    """Cost of gathering a parameter between the nodes of a group of ranks (MiCS).

    inter_node  share of the parameter that each rank receives over the links between nodes
    hops        messages one after another
    """

    inter_node: float
    hops: float


def flat_gather(ranks: int) -> GatherVolume:
    """One ring over all ranks."""
    return GatherVolume((ranks - 1) / ranks, ranks)


def hierarchical_gather(ranks: int, ranks_per_node: int) -> GatherVolume:
    """First between nodes, each rank with its peers, then inside the node (arXiv:2205.00119)."""
    nodes = ranks / ranks_per_node
    return GatherVolume((ranks - ranks_per_node) / ranks, nodes + ranks_per_node)


RESERVED_BYTES = 4 * GiB
"""An assumption: of each device, 2 GB of buffers (DeepSpeed's defaults: 5e8 elements of half
precision for reductions, as many for gathers) and 2 GB of CUDA context, libraries' workspaces,
logits and fragmentation."""


@dataclass(frozen=True)
class ClassTiers:
    """The tiers that a class of bytes may rest on.

    tiers    fastest first
    sharded  each rank holds its share instead of everything
    """

    tiers: tuple[str, ...]
    sharded: bool


@dataclass(frozen=True)
class Strategy:
    """The tiers of each class of bytes. checkpoints: the tier of activation checkpoints."""

    name: str
    weights: ClassTiers
    gradients: ClassTiers
    optimizer: ClassTiers
    checkpoints: str = "device"


_DEVICE, _HOST, _DISK = ("device",), ("device", "host"), ("device", "host", "disk")
_SHARDS = ClassTiers(_DEVICE, True)
_ALL = ClassTiers(_DEVICE, False)

DATA_PARALLEL = Strategy("data parallel", _ALL, _ALL, _ALL)
ZERO_2 = Strategy("ZeRO-2", _ALL, _SHARDS, _SHARDS)
ZERO_OFFLOAD = Strategy("ZeRO-Offload", _ALL, ClassTiers(_HOST, True), ClassTiers(_HOST, True))
MODEL_PARALLEL = Strategy("3D parallelism", _SHARDS, _SHARDS, _SHARDS)
ZERO_3 = Strategy("ZeRO-3", _SHARDS, _SHARDS, _SHARDS)
INFINITY_CPU = Strategy("Infinity-CPU", *(ClassTiers(_HOST, True),) * 3, "host")
INFINITY_NVME = Strategy("Infinity-NVMe", *(ClassTiers(_DISK, True),) * 3, "host")

STRATEGIES = (
    DATA_PARALLEL,
    ZERO_2,
    ZERO_OFFLOAD,
    MODEL_PARALLEL,
    ZERO_3,
    INFINITY_CPU,
    INFINITY_NVME,
)

WIDTHS = (1536, 4096, 8192, 18 * 1024, 25 * 1024, 48 * 1024, 64 * 1024, 88 * 1024)
"""Hidden sizes of the paper's models."""
MOST_LAYERS = 205
LEAST_LAYERS = 16


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank by tier, and those that found no place (0: it fits)."""

    bytes_by_tier: dict[str, int]
    missing_bytes: int

    @property
    def fits(self) -> bool:
        return not self.missing_bytes


def use_of(strategy: Strategy, shape: Transformer, machine: Machine, mp: int = 1) -> RankBytes:
    """Bytes of one rank, if `shape.batch` is its batch and `mp` ranks split a matrix.

    Of a class that may rest on several tiers the slowest is filled first. As the sets of tiers are
    nested, and those with the fewest tiers choose first, this places all if anything does.
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
    return RankBytes({tier: before[tier] - free[tier] for tier in _DISK}, missing)


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
