"""When everything of a step happens: what the simulator predicts and the executor records."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from zcompile.ir.schedule import Instruction, Run
from zcompile.ir.specs import Phase


class Moment(NamedTuple):
    """One instruction, the `number`-th of a call. Seconds from the beginning of the step; before it
    they are negative.

    begin_s, end_s       of compute, or of the host for what it only starts
    stall_s              what compute, or the host before it goes on, waited before `begin_s`
    sent_s, arrived_s    of the transfer it starts, if it does
    """

    call: int
    number: int
    instruction: Instruction
    begin_s: float
    end_s: float
    stall_s: float = 0.0
    sent_s: float | None = None
    arrived_s: float | None = None

    @property
    def is_work(self) -> bool:
        """Whether it computes."""
        return isinstance(self.instruction, Run)


@dataclass(frozen=True)
class Timeline:
    """One step of many alike.

    step_s          from the end of one step to the end of the next
    compute_s       in regions
    stall_s         that compute waited for transfers
    phases          seconds by phase, what lies between two calls counted to the later one
    nbytes, busy_s  over each link: bytes, and seconds in which it was in use
    peak_bytes      of what rests on the device, and of slots
    held_bytes      of the device, at most, by values between ops, which lie beside the arena
    together_bytes  of both, at most at once
    """

    step_s: float
    compute_s: float
    stall_s: float
    phases: Mapping[Phase, float]
    nbytes: Mapping[str, int]
    busy_s: Mapping[str, float]
    peak_bytes: int
    held_bytes: int
    together_bytes: int
    moments: tuple[Moment, ...] = ()

    @property
    def least_s(self) -> float:
        """No step of this plan is shorter: compute, or a link that is never idle."""
        return max(self.compute_s, *self.busy_s.values()) if self.busy_s else self.compute_s
