"""Which gradients stay where backward makes them, until the optimizer has read them. Pure.

What graphs hold falls as backward goes on. In what activations leave behind, gradients may rest
that need not travel home and back then: neither over a bus nor to a disk. The last ones do, since
those that are made first find the device still full.

    held beside them      9 8 6 4 2      of 11, after each of five gradients of 2
    if all of them stay  11 12 12 12 12  too much
    if the last four do   9 10 10 10 10

A gradient is the user's until it is set to None, so this is for steps after which it is: the next
forward needs the room again.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from zcompile.ir.schedule import Reduce, Schedule
from zcompile.ir.step import Step
from zcompile.ir.types import Level, Phase
from zcompile.memory.held_walk import HeldWalk, held_peak

PATTERN = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)
"""Of a step: with more than one backward pass, gradients are added to."""


def staying(
    step: Step, room_bytes: int, annex_bytes: int = 0, kept: frozenset[int] = frozenset()
) -> frozenset[int]:
    """Keys of the gradients that stay: of those that come once, whole, and in memory of their own
    as many of the last as leave no more than `room_bytes` held at any time, and while the optimizer
    goes on `annex_bytes` less; or no more than is held anyway, by those on their way.

    kept  those that are not gone when the next forward begins, none of which stays
    """
    if tuple(phase for phase, _ in groupby(call.phase for call in step.calls)) != PATTERN:
        return frozenset()
    may = [key for key in _candidates(step) if key not in kept]
    anyway, anyway_in_steps = _held(step, frozenset())
    room, in_steps = max(room_bytes, anyway), max(room_bytes - annex_bytes, anyway_in_steps)
    fewest, most = 0, len(may)
    while fewest < most:  # the more stay, the more is held
        some = (fewest + most + 1) // 2
        held, then = _held(step, frozenset(may[-some:]))
        if held <= room and then <= in_steps:
            fewest = some
        else:
            most = some - 1
    return frozenset(may[len(may) - fewest :])


def staying_bytes(step: Step, keys: frozenset[int]) -> int:
    """Of these gradients."""
    return sum(step.facts[key].nbytes for key in keys)


def _candidates(step: Step) -> Iterator[int]:
    """Keys of the gradients that could stay, in the order in which they are made."""
    made = [
        (call.entries[x.entry], _whole_and_alone(call.schedule, index, x))
        for call in step.calls
        if call.phase is Phase.BACKWARD
        for index, x in enumerate(call.schedule.instructions)
        if isinstance(x, Reduce)
    ]
    times = Counter(key for key, _ in made)
    return (-key for key, may in made if may and times[key] == 1)


def _whole_and_alone(schedule: Schedule, index: int, reduce: Reduce) -> bool:
    return not reduce.of_nbytes and schedule.level_at.get(index, Level()).alone


def _held(step: Step, keys: frozenset[int]) -> tuple[int, int]:
    """The most that is held from backward on, and while the optimizer goes on, if these stay. When
    a call begins, all that others hold then is counted beside its own peak, as a run does."""
    walk, most, in_steps = HeldWalk(), 0, 0
    calls = [call.with_staying(keys) for call in step.calls]
    for call, after in zip(calls, [*calls[1:], calls[0]], strict=True):
        walk.begin(call.schedule)
        if call.phase is Phase.BACKWARD:
            most = max(most, walk.others + held_peak(call.schedule))
            walk.through(call.schedule)
        elif call.phase is Phase.STEP:
            in_steps = max(in_steps, walk.now)
        walk.end(after.phase)
    return max(most, in_steps), in_steps
