"""Seconds of one rank for each part of a step: transfers, collectives, compute, the update.

What the machine does not say is in `Assumptions`, each with its source.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

from zcompile.errors import ConfigInvalid
from zcompile.machine.model import TIERS, Link, Machine
from zcompile.planner.analytic.shapes import GRADIENT_BYTES, WEIGHT_BYTES, Transformer

STATE_ON_DISK_BYTES = 12
"""Master, momentum and variance in float32: read and written by an update. The float32 gradient,
which the paper counts too, is made of the half-precision one while updating."""


@dataclass(frozen=True)
class Assumptions:
    """sustained         of the machine's matmul rate, what a training step reaches between waits.
                      Calibrated on one point: 49 TFLOP/s per GPU for 1T parameters on 512 V100
                      (Figure 5a); every other figure is then a prediction.
    host_bytes_per_s  of a node's memory in the CPU's update, shared by the node's ranks. DGX-2: two
                      sockets of six channels DDR4-2666, 256 GB/s by data sheet; 70 % of it.
    update_bytes      of host memory traffic per parameter of a CPU Adam.
    dtype             of the compute copy
    """

    sustained: float = 0.72
    host_bytes_per_s: float = 180e9
    update_bytes: int = 28
    dtype: str = "float16"


@dataclass(frozen=True)
class Job:
    """A step of `shape` on every rank; `shape.batch` is the batch per rank.

    mp           ranks that split every matrix among them (tensor parallelism), within a node;
                 their common batch is mp times `shape.batch`
    weights, optimizer, checkpoints   the tier where a rank's share rests
    overlap      transfers run beside compute, ahead of it; else all follows one by one
    """

    shape: Transformer
    mp: int = 1
    weights: str = "device"
    optimizer: str = "device"
    checkpoints: str = "host"
    overlap: bool = True

    @property
    def gradients(self) -> str:
        """Where they wait for the update: beside the weights, but never on a device that does not
        update them."""
        if self.optimizer == "device":
            return "device"
        return "disk" if self.weights == "disk" else "host"


@dataclass(frozen=True)
class Rates:
    """Seconds per block of one rank; of a block each rank holds 1 / ranks at rest.

    raises  ConfigInvalid, if the job asks for ranks, tiers or a dtype that the machine lacks
    """

    job: Job
    machine: Machine
    assumed: Assumptions = field(default_factory=Assumptions)

    def __post_init__(self) -> None:
        job, machine = self.job, self.machine
        if job.mp < 1 or machine.ranks_per_node % job.mp:
            raise ConfigInvalid("mp", job.mp, f"does not divide the {machine.ranks_per_node} ranks "
                                "of a node")  # fmt: skip
        for what in ("weights", "optimizer", "checkpoints"):
            if (tier := getattr(job, what)) not in machine.tiers:
                raise ConfigInvalid(what, tier, f"is no tier of {machine.name}, which has "
                                    f"{', '.join(machine.tiers)}")  # fmt: skip
        if TIERS.index(job.optimizer) < TIERS.index(job.weights):
            why = f"is faster than the weights' tier, {job.weights}; swap the two"
            raise ConfigInvalid("optimizer", job.optimizer, why)
        if job.checkpoints == "disk":
            raise ConfigInvalid("checkpoints", "disk", "is not simulated; use device or host")
        if self.assumed.dtype not in machine.compute.flops_per_s:
            raise ConfigInvalid("dtype", self.assumed.dtype, f"has no rate on {machine.name}; "
                                f"known: {', '.join(machine.compute.flops_per_s)}")  # fmt: skip

    @property
    def gathering_ranks(self) -> int:
        """Those that hold shares of the same matrices: one group for every rank of `mp`."""
        return self.machine.ranks // self.job.mp

    @cached_property
    def ways(self) -> tuple[Link, ...]:
        """What a collective passes. Within a node every rank has its own link; between nodes the
        `mp` groups that pass through a node share what one alone would have."""
        links, found = self.machine.links, list[Link]()
        if self.machine.ranks_per_node > 1:
            found.append(links["rank_to_rank"])
        if self.machine.nodes > 1:
            between = links["node_to_node"]
            found.append(replace(between, bytes_per_s=between.bytes_per_s / self.job.mp))
        return tuple(found)

    def link(self, name: str, nbytes: float) -> float:
        link = self.machine.links[name]
        return link.latency_s + nbytes / link.bytes_per_s

    def lane(self, link: str) -> str:
        """What a link takes turns on."""
        return self.machine.links[link].lane

    @property
    def share(self) -> float:
        """Parameters of a block that rest with one rank."""
        return self.job.shape.block_parameters / self.machine.ranks

    @property
    def collective_s(self) -> float:
        """All-gather of a block's weights, or reduce-scatter of its gradients."""
        group = self.gathering_ranks
        nbytes = WEIGHT_BYTES * self.job.shape.block_parameters / self.job.mp
        return max(way.latency_s + nbytes * (group - 1) / group / way.bytes_per_s
                   for way in self.ways)  # fmt: skip

    @property
    def checkpoint_bytes(self) -> float:
        """Of one block; ranks that split a matrix split its input's checkpoint too."""
        return self.job.shape.checkpoint_bytes / self.job.shape.layers

    @property
    def forward_s(self) -> float:
        """Matmuls, attention's products, the rest as memory traffic, and the all-reduces of
        tensor parallelism. Backward takes twice that."""
        shape, compute = self.job.shape, self.machine.compute
        flops = shape.token_count * (2 * shape.block_parameters + 4 * shape.seq * shape.hidden)
        matmul_s = flops / (self.assumed.sustained * compute.flops_per_s[self.assumed.dtype])
        touched = 2 * shape.activation_working_bytes / shape.blocks_per_checkpoint
        return matmul_s + touched / compute.memory_bytes_per_s + self.tensor_parallel_s

    @property
    def tensor_parallel_s(self) -> float:
        """Two all-reduces per block and pass; in backward as many, in forward's time once more."""
        mp, shape = self.job.mp, self.job.shape
        if mp == 1:
            return 0.0
        nbytes = 2 * mp * shape.token_count * shape.hidden
        return 2 * 2 * (mp - 1) / mp * nbytes / self.machine.links["rank_to_rank"].bytes_per_s

    @property
    def update_s(self) -> float:
        """Of the share of a block: on the device, or on the host's CPU."""
        if self.job.optimizer == "device":
            touched = 2 * STATE_ON_DISK_BYTES + GRADIENT_BYTES + WEIGHT_BYTES
            return self.share * touched / self.machine.compute.memory_bytes_per_s
        of_rank = self.assumed.host_bytes_per_s / self.machine.ranks_per_node
        return self.share * self.assumed.update_bytes / of_rank

    @property
    def update_read_bytes(self) -> float:
        """From disk, per block."""
        gradients = GRADIENT_BYTES * (self.job.gradients == "disk")
        return self.share * (STATE_ON_DISK_BYTES * (self.job.optimizer == "disk") + gradients)

    @property
    def update_write_bytes(self) -> float:
        """To disk, per block."""
        weights = WEIGHT_BYTES * (self.job.weights == "disk")
        return self.share * (STATE_ON_DISK_BYTES * (self.job.optimizer == "disk") + weights)
