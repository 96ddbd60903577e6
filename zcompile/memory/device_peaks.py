"""The most of a device that a schedule takes: slots of the arena, and values beside it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from zcompile.ir.schedule import CHANGE_HOLDING, Fetch, Free, Instruction, Reduce, Schedule
from zcompile.memory.held_walk import HeldWalk

NOTHING_STARTS: Mapping[int, Sequence[Fetch]] = MappingProxyType({})


def device_peak(schedule: Schedule, starts: Mapping[int, Sequence[Fetch]] = NOTHING_STARTS) -> int:
    """The most bytes of the device taken at once by slots and values of a call.

    starts  instruction -> fetches of the next schedule that start after it
    """
    walk, taken, peak = HeldWalk(), 0, 0
    walk.begin(schedule)
    kept = walk.others  # a forward would have left as much
    for index, x in enumerate(schedule.instructions):
        if isinstance(x, Fetch):
            taken += x.slot.nbytes
        elif isinstance(x, Free):
            taken -= x.slot.nbytes
        elif isinstance(x, CHANGE_HOLDING):
            peak = max(peak, taken + walk.rise() - kept)
            if isinstance(x, Reduce):
                walk.leave(x)
        taken += sum(fetch.slot.nbytes for fetch in starts.get(index, ()))
        peak = max(peak, taken + walk.now - kept)
    return peak


def peak_of(instructions: Sequence[Instruction]) -> int:
    """The largest sum of slots taken at once, in bytes."""
    now = peak = 0
    for instruction in instructions:
        if isinstance(instruction, Fetch):
            now += instruction.slot.nbytes
            peak = max(peak, now)
        elif isinstance(instruction, Free):
            now -= instruction.slot.nbytes
    return peak
