"""One rank's training step, block by block, as tasks on lanes.

Lanes: the disk's links and the device's (one lane for both ways where they are half duplex), the
links between ranks, the device, the host's CPU. With bandwidth-centric partitioning each rank
fetches its share of a block, then all ranks gather it: as many links carry a block as there are
ranks. While operator i computes, i+1 is gathered, i+2 comes to the device and i+3 from disk; its
gradients are scattered and leave while the next ones compute. Operators are the blocks forward, and
each block forward again and backward. The update follows, block after block.
"""

from dataclasses import dataclass

from zcompile.machine.model import Machine
from zcompile.planner.analytic.events import Task, Timeline, simulate
from zcompile.planner.analytic.rates import Assumptions, Job, Rates
from zcompile.planner.analytic.shapes import GRADIENT_BYTES, WEIGHT_BYTES

READ_AHEAD, COPY_AHEAD, GATHER_AHEAD = 3, 2, 1
"""Operators before its own at whose start a transfer may begin (the paper's section 6.2)."""
GRADIENT_BUFFERS = 3
"""Computing, scattered, leaving: backward waits for the first of them when all are taken."""
UPDATE_BUFFERS = 3
"""Arriving, updated, leaving."""


@dataclass(frozen=True)
class StepTime:
    """Of one rank.

    passes_s     forward and backward, until the last gradient is home
    update_s     the optimizer's part
    compute_s    of the device in forward and backward
    flops_per_s  as the paper counts: 8 FLOPs per parameter and token, over all seconds
    busy_s       by lane, as `Machine.told` has it
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
    """raises  ConfigInvalid, if the job does not fit the machine's ranks"""
    rates = Rates(job, machine, assumed or Assumptions())
    passes, update = simulate(passes_tasks(rates)), simulate(update_tasks(rates))
    seconds = passes.seconds + update.seconds
    busy_s = {machine.told(lane): s for lane, s in _sum(passes, update).items()}
    return StepTime(passes.seconds, update.seconds, passes.busy_s["device"],
                    job.shape.step_flops / seconds, busy_s)  # fmt: skip


def _sum(*timelines: Timeline) -> dict[str, float]:
    lanes = sorted({lane for timeline in timelines for lane in timeline.busy_s})
    return {lane: sum(t.busy_s.get(lane, 0.0) for t in timelines) for lane in lanes}


def passes_tasks(rates: Rates) -> list[Task]:
    """Forward and backward over all blocks."""
    passes = _Passes(rates)
    layers = range(rates.job.shape.layers)
    for block in layers:
        passes.forward(block)
    for block in reversed(layers):
        passes.backward(block)
    return passes.tasks


class _Passes:
    """Tasks in the order in which their operators need them."""

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
        """Weights of the next operator: disk, host, device, gathered."""
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
        """Gradients of a block that was computed: scattered, to the host, to disk."""
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
        """What must have ended for the operator that is `ahead` before the next one to start."""
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
    """Per block: what rests on disk is read, updated, written; three blocks are under way."""
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
