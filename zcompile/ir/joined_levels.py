"""Live bytes of a schedule in which regions were joined, from those of the regions one by one.

Between the parts of a joined region no gradient is sent: those that stay on the device are sent
behind all of them. A gradient counts in the levels that were found on the graph
(`memory/footprint.py`) until it is joined (waited for), and from then on one that stays counts as
staying (`memory/step_footprint.py`). Sent late it is joined late, and counts in the levels for that
long. Nothing else becomes live, or dies, at another time, and the sum of both counts is at each
moment what it was. Of gradients of 2 bytes each 4 may be in flight:

            before peak after                             before peak after  in flight
    run 0        8    9     8          run 0, 1, 2, 3          8   11     8
    reduce a     8    8     8          reduce a                8    8     8          4
    run 1        8    9     8          reduce b                8    8     8          4
    reduce b     8    8     8    ->    reduce c                8    8     8          6
    run 2        8    9     8          reduce d                8    8     4          4
    reduce c     8    8     6
    run 3        6    9     6
    reduce d     6    6     4
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from zcompile.ir.types import LiveBytes


class SentGradient(NamedTuple):
    """A gradient that is sent.

    number  of its level, of those that were found on the graph
    stays   it stays in the memory that compute made it in
    """

    number: int
    nbytes: int
    stays: bool


LevelOrder = Sequence[tuple[int, ...]]
"""Per instruction, the numbers of the levels that it stands for: those of all its parts, of a
joined region; else one."""


def joins_of(
    levels: Sequence[LiveBytes],
    gradients: Sequence[SentGradient],
    late: Collection[int] = (),
) -> tuple[list[int], list[int]]:
    """Simulates sending gradients, and joining the oldest of them.

    late  numbers of those for which none is joined
    returns  per gradient, the position of the one before which it is joined, their number if none;
             and the bytes that may be in flight once it is sent
    """
    default = 2 * max((g.nbytes for g in gradients), default=0)  # `Schedule.departing_bytes`
    in_flight: deque[int] = deque()
    nbytes, joined, bounds = 0, [len(gradients)] * len(gradients), []
    for position, gradient in enumerate(gradients):
        nbytes += gradient.nbytes
        bound = levels[gradient.number].departing if gradient.number < len(levels) else 0
        bound = bound or default
        if gradient.number in late:
            bound = max(bound, nbytes)
        while in_flight and nbytes > bound:
            oldest = in_flight.popleft()
            joined[oldest] = position
            nbytes -= gradients[oldest].nbytes
        in_flight.append(position)
        bounds.append(bound)
    return joined, bounds


def joined_levels(
    levels: Sequence[LiveBytes], order: LevelOrder, gradients: Sequence[SentGradient]
) -> tuple[LiveBytes, ...]:
    """The levels of the instructions of `order`. Pure.

    levels     of all instructions, where each region stands alone; or none
    gradients  in the order in which they are sent
    """
    if not levels:
        return ()
    late = _late(order)
    joined_before, _ = joins_of(levels, gradients)
    joined, bounds = joins_of(levels, gradients, late)
    # Take joined regions apart again: one moment per part, and per gradient where it is sent now.
    moments: list[LiveBytes] = []
    moment_of: dict[int, int] = {}
    for number in (number for numbers in order for number in numbers):
        level = levels[number]
        if number in late:  # nothing happens but that gradients are joined
            level = level._replace(before=moments[-1].after, peak=moments[-1].after)
            level = level._replace(after=level.before)
        moment_of[number] = len(moments)
        moments.append(level)
    # Add each gradient that is joined later, from where it was joined before to where it is now.
    still = [0] * (len(moments) + 1)
    still_after = [0] * (len(moments) + 1)
    for gradient, before, now in zip(gradients, joined_before, joined, strict=True):
        if now != before and gradients[before].number in late:
            begin = _next_region(gradients[before].number, moment_of, late)
            end = moment_of[gradients[now].number] if now < len(gradients) else len(moments)
            for change, last in ((still, end + 1), (still_after, end)):
                change[begin] += gradient.nbytes
                change[min(last, len(moments))] -= gradient.nbytes
    counted = [
        level._replace(
            before=level.before + more, peak=level.peak + more, after=level.after + more_after
        )
        for level, more, more_after in zip(
            moments, accumulate(still[:-1]), accumulate(still_after[:-1]), strict=True
        )
    ]
    bound_of = {g.number: bound for g, bound in zip(gradients, bounds, strict=True)}
    return tuple(
        _as_one([counted[moment_of[number]] for number in numbers], bound_of.get(numbers[0]))
        for numbers in order
    )


def _late(order: LevelOrder) -> frozenset[int]:
    """The numbers of what comes behind a region that it came before."""
    late, highest = set[int](), -1
    for numbers in order:
        if numbers[0] < highest:
            late.update(numbers)
        highest = max(highest, *numbers)
    return frozenset(late)


def _next_region(number: int, moment_of: Mapping[int, int], late: Collection[int]) -> int:
    """The moment of the first region behind a gradient that is sent late."""
    while number in late:
        number += 1
    return moment_of[number]


def _as_one(parts: Sequence[LiveBytes], bound: int | None) -> LiveBytes:
    """The level of an instruction that stands for several; `bound`: in flight, of a gradient."""
    first, last = parts[0], parts[-1]
    level = last._replace(before=first.before, peak=max(part.peak for part in parts))
    return level if bound is None else level._replace(departing=bound)
