"""Simulates one rank's training step, block by block, as tasks on lanes.

Lanes: the disk's links and the device's (one lane for both ways where they are half duplex), the
links between ranks, the device, the host's CPU. With bandwidth-centric partitioning each rank
fetches its share of a block, then all ranks gather it: as many links carry a block as there are
ranks. While operator i computes, i+1 is gathered, i+2 comes to the device and i+3 from disk; its
gradients are scattered and leave while the next ones compute. Operators are the blocks forward, and
each block forward again and backward. The update follows, block after block.

The parts: tasks on lanes (`simulate`), seconds of one rank for each part of a step (`Rates`; what
the machine does not say is in `Assumptions`, each with its source), the step (`step_time`), and the
placement of a transformer's bytes that fits a machine (`fastest`, `group_of`).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from zcompile.errors import ConfigInvalid
from zcompile.machine.model import TIERS, Link, Machine
from zcompile.planner.analytic.model import (
    GRADIENT_BYTES,
    WEIGHT_BYTES,
    ZERO_3,
    ClassTiers,
    GatherVolume,
    RankBytes,
    Strategy,
    Transformer,
    flat_gather,
    forward_flops,
    hierarchical_gather,
    use_of,
)
from zcompile.planner.links import LinkSimulator, SimTransfer, TaskLane


@dataclass(frozen=True)
class Task:
    """Work of `seconds` on `lane`. after: positions of earlier tasks."""

    name: str
    lane: str
    seconds: float
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """Times of tasks. starts, ends: seconds since the first task, by position; busy_s: by lane."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    busy_s: dict[str, float]

    @property
    def seconds(self) -> float:
        return max(self.ends, default=0.0)


def simulate(tasks: Sequence[Task]) -> Timeline:
    """When each task starts and ends.

    A lane does one task at a time, in the order in which they become ready; a task is ready when
    all tasks that it comes after have ended. Tasks come after earlier ones only, so there is no
    cycle and all of them end. Nothing is random.
    """
    lanes = {task.lane: (TaskLane(task.lane),) for task in tasks}
    simulator = LinkSimulator({name: lane for name, (lane,) in lanes.items()})
    works = [SimTransfer(0, lanes[task.lane], 1, task.seconds) for task in tasks]
    busy: dict[str, float] = defaultdict(float)
    for number, (task, work) in enumerate(zip(tasks, works, strict=True)):
        assert all(other < number for other in task.after)
        simulator.start(work, 0.0, after_home=[works[other] for other in task.after])
        busy[task.lane] += task.seconds
    simulator.finish()
    starts, ends = (work.begin_s or 0.0 for work in works), (work.home_s or 0.0 for work in works)
    return Timeline(tuple(starts), tuple(ends), dict(busy))


STATE_ON_DISK_BYTES = 12
"""Bytes per parameter that an update reads and writes: master, momentum and variance in float32.
The float32 gradient, which the paper counts too, is made of the half-precision one while updating.
"""


@dataclass(frozen=True)
class Assumptions:
    """What the machine does not say, each with its source.

    sustained         share of the machine's matmul rate that a training step reaches between waits.
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

    mp       ranks that split every matrix among them (tensor parallelism), within a node; their
             common batch is mp times `shape.batch`
    weights, optimizer, checkpoints  the tier where a rank's share rests
    overlap  transfers run beside compute, ahead of it; else all follows one by one
    """

    shape: Transformer
    mp: int = 1
    weights: str = "device"
    optimizer: str = "device"
    checkpoints: str = "host"
    overlap: bool = True

    @property
    def gradients(self) -> str:
        """Tier where gradients wait for the update: beside the weights, but never on a device that
        does not update them."""
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
            raise ConfigInvalid(
                "mp", job.mp, f"does not divide the {machine.ranks_per_node} ranks of a node"
            )
        if machine.replicas > 1:
            why = "is not reckoned from shapes, where all ranks hold one model; give a model, or 1"
            raise ConfigInvalid("replicas", machine.replicas, why)
        for what in ("weights", "optimizer", "checkpoints"):
            if (tier := getattr(job, what)) not in machine.tiers:
                raise ConfigInvalid(
                    what,
                    tier,
                    f"is no tier of {machine.name}, which has {', '.join(machine.tiers)}",
                )
        if TIERS.index(job.optimizer) < TIERS.index(job.weights):
            why = f"is faster than the weights' tier, {job.weights}; swap the two"
            raise ConfigInvalid("optimizer", job.optimizer, why)
        if job.checkpoints == "disk":
            raise ConfigInvalid("checkpoints", "disk", "is not simulated; use device or host")
        if self.assumed.dtype not in machine.compute.flops_per_s:
            raise ConfigInvalid(
                "dtype",
                self.assumed.dtype,
                f"has no rate on {machine.name}; known: {', '.join(machine.compute.flops_per_s)}",
            )

    @property
    def gathering_ranks(self) -> int:
        """Number of ranks that hold shares of the same matrices: one group for every rank of
        `mp`."""
        return self.machine.ranks // self.job.mp

    @cached_property
    def ways(self) -> tuple[Link, ...]:
        """Links that a collective passes, with their rates.

        Within a node every rank has its own link; between nodes the `mp` groups that pass through a
        node share what one alone would have.
        """
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
        """Lane of a link."""
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
        return max(
            way.latency_s + nbytes * (group - 1) / group / way.bytes_per_s for way in self.ways
        )

    @property
    def checkpoint_bytes(self) -> float:
        """Bytes of one block's checkpoint; ranks that split a matrix split its input's checkpoint
        too."""
        return self.job.shape.checkpoint_bytes / self.job.shape.layers

    @property
    def forward_s(self) -> float:
        """Seconds of a block's forward: matmuls, attention's products, the rest as memory traffic,
        and the all-reduces of tensor parallelism. Backward takes twice that."""
        shape, compute = self.job.shape, self.machine.compute
        flops = shape.token_count * forward_flops(shape.block_parameters, shape.seq, shape.hidden)
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
        """Seconds of updating the share of a block: on the device, or on the host's CPU."""
        if self.job.optimizer == "device":
            touched = 2 * STATE_ON_DISK_BYTES + GRADIENT_BYTES + WEIGHT_BYTES
            return self.share * touched / self.machine.compute.memory_bytes_per_s
        of_rank = self.assumed.host_bytes_per_s / self.machine.ranks_per_node
        return self.share * self.assumed.update_bytes / of_rank

    @property
    def update_read_bytes(self) -> float:
        """Bytes of a block that an update reads from disk."""
        gradients = GRADIENT_BYTES * (self.job.gradients == "disk")
        return self.share * (STATE_ON_DISK_BYTES * (self.job.optimizer == "disk") + gradients)

    @property
    def update_write_bytes(self) -> float:
        """Bytes of a block that an update writes to disk."""
        weights = WEIGHT_BYTES * (self.job.weights == "disk")
        return self.share * (STATE_ON_DISK_BYTES * (self.job.optimizer == "disk") + weights)


READ_AHEAD, COPY_AHEAD, GATHER_AHEAD = 3, 2, 1
"""Operators before its own at whose start a transfer may begin (the paper's section 6.2)."""
GRADIENT_BUFFERS = 3
"""Buffers of gradients: computing, scattered, leaving; backward waits for the first when all are
taken."""
UPDATE_BUFFERS = 3
"""Buffers of the update: arriving, updated, leaving."""


@dataclass(frozen=True)
class StepTime:
    """Times of one rank's step.

    passes_s     forward and backward, until the last gradient is home
    update_s     the optimizer's part
    compute_s    of the device in forward and backward
    flops_per_s  as the paper counts: 8 FLOPs per parameter and token, over all seconds
    busy_s       by lane, as `Machine.describe` names it
    """

    passes_s: float
    update_s: float
    compute_s: float
    flops_per_s: float
    busy_s: dict[str, float]

    @property
    def seconds(self) -> float:
        return self.passes_s + self.update_s


def step_time(job: Job, machine: Machine, assumed: Assumptions | None = None) -> StepTime:
    """Simulate a step.

    raises  ConfigInvalid, if the job does not fit the machine's ranks
    """
    rates = Rates(job, machine, assumed or Assumptions())
    passes, update = simulate(passes_tasks(rates)), simulate(update_tasks(rates))
    seconds = passes.seconds + update.seconds
    busy_s = {machine.describe(lane): s for lane, s in _sum(passes, update).items()}
    return StepTime(
        passes.seconds,
        update.seconds,
        passes.busy_s["device"],
        job.shape.step_flops / seconds,
        busy_s,
    )


def _sum(*timelines: Timeline) -> dict[str, float]:
    lanes = sorted({lane for timeline in timelines for lane in timeline.busy_s})
    return {lane: sum(t.busy_s.get(lane, 0.0) for t in timelines) for lane in lanes}


def passes_tasks(rates: Rates) -> list[Task]:
    """Tasks of forward and backward over all blocks."""
    passes = _Passes(rates)
    layers = range(rates.job.shape.layers)
    for block in layers:
        passes.forward(block)
    for block in reversed(layers):
        passes.backward(block)
    return passes.tasks


class _Passes:
    """Emits tasks in the order in which their operators need them."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.tasks: list[Task] = []
        self._computed: list[int] = []  # the task that ended each operator
        self._left: list[int] = []  # the task with which each block's gradients were gone

    def forward(self, block: int) -> None:
        done = self._compute(f"forward {block}", self.rates.forward_s, self._fetch(block))
        if self.rates.job.checkpoints != "device":
            self._link("d2h", f"checkpoint {block}", self.rates.checkpoint_bytes, done)

    def backward(self, block: int) -> None:
        arrived = [self._fetch(block)]
        if self.rates.job.checkpoints != "device":
            ahead = self._started(COPY_AHEAD)
            arrived.append(
                self._link("h2d", f"checkpoint {block}", self.rates.checkpoint_bytes, ahead)
            )
        self._compute(f"forward again {block}", self.rates.forward_s, *arrived)
        room = [] if len(self._left) < GRADIENT_BUFFERS else [self._left[-GRADIENT_BUFFERS]]
        seconds = 2 * self.rates.forward_s
        done = self._compute(f"backward {block}", seconds, self._fetch(block), *room)
        self._left.append(self._send(block, done))

    def _fetch(self, block: int) -> int | None:
        """Bring the weights of the next operator: disk, host, device, gathered."""
        rates, nbytes = self.rates, WEIGHT_BYTES * self.rates.share
        here: int | None = None
        if rates.job.weights == "disk":
            here = self._link("disk_read", f"read {block}", nbytes, self._started(READ_AHEAD))
        if rates.job.weights != "device":
            here = self._link("h2d", f"copy {block}", nbytes, here, self._started(COPY_AHEAD))
        if rates.gathering_ranks > 1:
            after = here, self._started(GATHER_AHEAD)
            here = self._add(f"gather {block}", "ranks", rates.collective_s, *after)
        return here

    def _send(self, block: int, done: int) -> int:
        """Send the gradients of a block that was computed: scattered, to the host, to disk."""
        rates, nbytes = self.rates, GRADIENT_BYTES * self.rates.share
        if rates.gathering_ranks > 1:
            done = self._add(f"scatter {block}", "ranks", rates.collective_s, done)
        if rates.job.gradients != "device":
            done = self._link("d2h", f"gradient {block}", nbytes, done)
        if rates.job.gradients == "disk":
            self._link("disk_write", f"gradient {block}", nbytes, done)
        return done

    def _compute(self, name: str, seconds: float, *after: int | None) -> int:
        last = self._computed[-1] if self._computed else None
        self._computed.append(self._add(name, "device", seconds, last, *after))
        return self._computed[-1]

    def _started(self, ahead: int) -> int | None:
        """Tasks that must have ended for the operator that is `ahead` before the next one to
        start."""
        before = len(self._computed) - ahead - 1
        return self._computed[before] if before >= 0 else None

    def _link(self, link: str, name: str, nbytes: float, *after: int | None) -> int:
        return self._add(name, self.rates.lane(link), self.rates.link(link, nbytes), *after)

    def _add(self, name: str, lane: str, seconds: float, *after: int | None) -> int:
        waits = tuple(i for i in after if i is not None)
        if not self.rates.job.overlap:
            waits = (len(self.tasks) - 1,) if self.tasks else ()
        self.tasks.append(Task(name, lane, seconds, waits))
        return len(self.tasks) - 1


def update_tasks(rates: Rates) -> list[Task]:
    """Tasks of the update: each block's bytes on disk are read, updated, written; three blocks are
    in flight."""
    tasks: list[Task] = []
    ends: list[int] = []
    on_host = rates.job.optimizer != "device"

    def add(name: str, lane: str, seconds: float, *after: int) -> int:
        tasks.append(Task(name, lane, seconds, after))
        return len(tasks) - 1

    for block in range(rates.job.shape.layers):
        last = [ends[-UPDATE_BUFFERS]] if len(ends) >= UPDATE_BUFFERS else []
        if rates.update_read_bytes:
            seconds = rates.link("disk_read", rates.update_read_bytes)
            last = [add(f"read {block}", rates.lane("disk_read"), seconds, *last)]
        last = [add(f"update {block}", "cpu" if on_host else "device", rates.update_s, *last)]
        if on_host and rates.job.weights == "device":
            seconds = rates.link("h2d", WEIGHT_BYTES * rates.share)
            add(f"weights {block}", rates.lane("h2d"), seconds, *last)
        if rates.update_write_bytes:
            seconds = rates.link("disk_write", rates.update_write_bytes)
            last = [add(f"write {block}", rates.lane("disk_write"), seconds, *last)]
        ends.append(last[0])
    return tasks


PLACES = (
    ("device", "device"),
    ("device", "host"),
    ("host", "host"),
    ("device", "disk"),
    ("host", "disk"),
    ("disk", "disk"),
)
"""Tiers of weights and optimizer state."""


def use_of_job(job: Job, machine: Machine) -> RankBytes:
    """Bytes of one rank; everything is sharded over all ranks."""
    weights, gradients, optimizer = (
        ClassTiers((tier,), True) for tier in (job.weights, job.gradients, job.optimizer)
    )
    strategy = Strategy("as placed", weights, gradients, optimizer, job.checkpoints)
    return use_of(strategy, job.shape, machine, job.mp)


def fastest(job: Job, machine: Machine, assumed: Assumptions) -> Job:
    """`job` with the tiers that make the shortest step among those that fit.

    If none fits, with those that lack the fewest bytes.

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
    """Ranks of whole nodes that hold all model states on their devices.

    Also the cost of a gather inside such a group between its nodes.
    """

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
