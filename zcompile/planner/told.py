"""What a simulated walk remembers of each instruction, until its times are known."""

from typing import NamedTuple

from zcompile.ir.schedule import Instruction
from zcompile.ir.step import Moment
from zcompile.planner.journeys import Journey


class Task(NamedTuple):
    """A piece of compute, that before it, and when the host came to it."""

    before: Journey
    issued_s: float
    task: Journey


Done = tuple[Task | None, Journey | None]
"""The compute and the transfer that an instruction started."""
NOTHING_STARTED: Done = (None, None)


class Told(NamedTuple):
    """An instruction that was walked; its times are known once all traffic is over."""

    call: int
    number: int
    instruction: Instruction
    begin_s: float
    end_s: float
    waited_s: float
    work: Task | None
    sent: Journey | None

    def moment(self, begun: float) -> Moment:
        if self.work is not None:
            ready = later(self.work.before, self.work.issued_s)
            begin, end = time_of(self.work.task.begin_s), time_of(self.work.task.over_s)
            stall = max(0.0, begin - ready)
        else:
            begin, end, stall = self.begin_s + self.waited_s, self.end_s, self.waited_s
        sent = arrived = None
        if self.sent is not None:
            sent, arrived = time_of(self.sent.begin_s) - begun, time_of(self.sent.home_s) - begun
        return Moment(self.call, self.number, self.instruction, begin - begun, end - begun, stall,
                      sent, arrived)  # fmt: skip


def time_of(time_s: float | None) -> float:
    assert time_s is not None, "asked before all traffic was over"
    return time_s


def later(task: Journey, host_s: float) -> float:
    return max(time_of(task.over_s), host_s)


def idle(waited: tuple[Journey, float, float]) -> float:
    """Of the time in which the host waited between calls, what compute did not fill: the piece of
    compute before it, and when it began and ended."""
    task, begin, end = waited
    return max(0.0, end - later(task, begin))
