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
from collections.abc import Iterator, Sequence
from itertools import groupby

from zcompile.held_walk import HeldWalk, marked
from zcompile.schedule import CHANGE_HOLDING, Instruction, Reduce
from zcompile.specs import Phase
from zcompile.steps import Step, StepCall

PATTERN = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)
"""Of a step: with more than one backward pass, gradients are added to."""

Moments = Sequence[tuple[StepCall, Sequence[Instruction]]]
"""Calls, and of those of backward what changes what is held."""


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
    moments = [(call, _changes(call)) for call in step.calls]
    may = [key for key in _candidates(moments) if key not in kept]
    anyway, anyway_in_steps = _held(moments, frozenset())
    room, in_steps = max(room_bytes, anyway), max(room_bytes - annex_bytes, anyway_in_steps)
    fewest, most = 0, len(may)
    while fewest < most:  # the more stay, the more is held
        some = (fewest + most + 1) // 2
        held, then = _held(moments, frozenset(may[-some:]))
        if held <= room and then <= in_steps:
            fewest = some
        else:
            most = some - 1
    return frozenset(may[len(may) - fewest :])


def staying_bytes(step: Step, keys: frozenset[int]) -> int:
    """Of these gradients."""
    return sum(step.facts[key].nbytes for key in keys)


def _changes(call: StepCall) -> Sequence[Instruction]:
    if call.phase is not Phase.BACKWARD:
        return ()
    return [x for x in call.schedule.instructions if isinstance(x, CHANGE_HOLDING)]


def _candidates(moments: Moments) -> Iterator[int]:
    """Keys of the gradients that could stay, in the order in which they are made."""
    made = [(call, x) for call, changes in moments for x in changes if isinstance(x, Reduce)]
    times = Counter(call.entries[x.entry] for call, x in made)
    for call, changes in moments:
        for x, level in zip(changes, call.schedule.holds.levels, strict=False):
            if isinstance(x, Reduce) and level.alone and not x.of_nbytes:
                key = call.entries[x.entry]
                if times[key] == 1:
                    yield -key


def _held(moments: Moments, keys: frozenset[int]) -> tuple[int, int]:
    """The most that is held from backward on, and while the optimizer goes on, if these stay."""
    walk, most, in_steps = HeldWalk(), 0, 0
    for (call, changes), (after, _) in zip(moments, [*moments[1:], moments[0]], strict=True):
        walk.begin(call.schedule)
        if call.phase is Phase.STEP:
            in_steps = max(in_steps, walk.now)
        # When a call begins, all that others hold then is counted beside its own peak.
        most = max(most, walk.others + _most(HeldWalk(), call, changes, keys))
        _most(walk, call, changes, keys, begun=True)
        walk.end(after.phase)
    return max(most, in_steps), in_steps


def _most(
    walk: HeldWalk, call: StepCall, changes: Sequence[Instruction], keys: frozenset[int],
    begun: bool = False,
) -> int:  # fmt: skip
    """The most held in the call, beside what others hold when it begins."""
    if not begun:
        walk.begin(call.schedule)
    others, most = walk.others, 0
    for x in changes:
        most = max(most, walk.rise() - others)
        if isinstance(x, Reduce):
            walk.leave(marked(call, x, keys))
            most = max(most, walk.now - others)
    return most
