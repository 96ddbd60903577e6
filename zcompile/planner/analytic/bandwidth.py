"""Which bandwidth keeps compute busy, if transfers do not overlap with it (section 4).

The arithmetic intensity of a class of bytes is the FLOPs of a step over the bytes of that class
that a step moves.
"""

from dataclasses import dataclass

PEAK_FLOPS_PER_S = 70e12
"""What one V100 reaches in a transformer's half-precision matmuls (the paper's `peak_tp`)."""


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
    """Bytes per second; `efficiency`, solved for its bandwidth."""
    return peak_flops_per_s * wanted_efficiency / ((1 - wanted_efficiency) * intensity)


@dataclass(frozen=True)
class Needed:
    """A row of Table 3: what devices of some speed need, so that they are kept as busy as a V100.

    slow_bytes_per_s   of memory outside the device, per device; times `devices` in all
    peer_bytes_per_s   between devices
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
    """What gathering a parameter costs between the nodes of a group of ranks (MiCS).

    inter_node   share of the parameter that each rank receives over the links between nodes
    hops         messages one after another
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
