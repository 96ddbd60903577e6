"""What is held beside the arena from call to call: kept for backward, or still on its way home.

Within a call the levels of its schedule say what is held; this adds what other calls hold then. The
runtime measures the same (`runtime/holding.py`, `runtime/leaving.py`).
"""

import sys
from collections import deque
from collections.abc import Sequence

from zcompile.holds import Level
from zcompile.schedule import CHANGE_HOLDING, Reduce, Schedule
from zcompile.specs import Phase
from zcompile.steps import StepCall


def most_inherited(schedule: Schedule) -> int:
    """Bytes of gradients that may be under way still when a call of `schedule` begins. A step of an
    optimizer holds nothing of its own beside the arena, so that all may that were at the end."""
    if schedule.phase is Phase.STEP:
        return sys.maxsize
    return schedule.departing_bytes if schedule.phase is Phase.BACKWARD else 0


class HeldWalk:
    """Walks the calls of a step, in order, and may do so again and again.

    others  bytes that are not of the call at hand
    now     all bytes held, after the last instruction
    """

    def __init__(self) -> None:
        self._kept = 0
        self._inherited: deque[int] = deque()
        self._own: deque[int] = deque()
        self._level = Level()
        self.now = 0

    @property
    def others(self) -> int:
        return self._kept + sum(self._inherited)

    def begin(self, schedule: Schedule) -> int:
        """A call begins; how many departures are joined before."""
        self._schedule = schedule
        joined, most = 0, most_inherited(schedule)
        while self._inherited and (not most or sum(self._inherited) > most):
            self._inherited.popleft()
            joined += 1
        self._kept -= schedule.holds.saved_bytes
        levels = schedule.holds.levels
        self._levels = iter(levels)
        self.now = self.others + (levels[0].before if levels else 0)
        return joined

    def rise(self) -> int:
        """The most held while the next instruction is carried out that changes what is held."""
        level = self._level = next(self._levels, Level())
        most = self.others + level.peak
        self.now = self.others + level.after
        return most

    def leave(self, reduce: Reduce) -> int:
        """A gradient leaves: the oldest on their way are joined until it fits; how many."""
        joined, most = 0, self._level.departing or self._schedule.departing_bytes
        for rows in (self._inherited, self._own):
            while rows and self._under_way + reduce.nbytes > most:
                rows.popleft()
                joined += 1
        self._own.append(reduce.nbytes)
        return joined

    def end(self, then: Phase) -> int:
        """The call is over, and one of `then` follows; how many departures are joined now. After
        an optimizer's step, which may be several calls, nothing is on its way any more."""
        self._kept += self._schedule.holds.kept_bytes
        self._inherited.extend(self._own)
        self._own.clear()
        over = self._schedule.phase is Phase.STEP and then is not Phase.STEP
        joined = len(self._inherited) if over else 0
        if joined:
            self._inherited.clear()
        self.now = self.others
        return joined

    @property
    def _under_way(self) -> int:
        return sum(self._inherited) + sum(self._own)


def held_in_steps(calls: Sequence[StepCall]) -> int:
    """The most that is held beside the arena when an optimizer goes on; `calls` come again and
    again. That is gradients on their way, and what a backward that never came would need."""
    walk, most = HeldWalk(), 0
    for number in range(-len(calls), len(calls)):
        call, after = calls[number], calls[(number + 1) % len(calls)]
        walk.begin(call.schedule)
        if call.phase is Phase.STEP:
            most = max(most, walk.now)
        for x in call.schedule.instructions:
            if isinstance(x, CHANGE_HOLDING):
                walk.rise()
            if isinstance(x, Reduce):
                walk.leave(x)
        walk.end(after.phase)
    return most
