"""The most of a device that a schedule takes: slots of the arena, and values beside it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from zcompile.holds import Level
from zcompile.schedule import CHANGE_HOLDING, Fetch, Free, Instruction, Schedule

NOTHING_STARTS: Mapping[int, Sequence[Fetch]] = MappingProxyType({})


def device_peak(schedule: Schedule, starts: Mapping[int, Sequence[Fetch]] = NOTHING_STARTS) -> int:
    """The most bytes of the device taken at once by slots and values of a call.

    starts  instruction -> fetches of the next schedule that start after it
    """
    levels = iter(schedule.holds.levels)
    taken = peak = 0
    held = schedule.holds.levels[0].before if schedule.holds.levels else 0
    for index, x in enumerate(schedule.instructions):
        if isinstance(x, Fetch):
            taken += x.slot.nbytes
        elif isinstance(x, Free):
            taken -= x.slot.nbytes
        elif isinstance(x, CHANGE_HOLDING):
            level = next(levels, Level())
            peak, held = max(peak, taken + level.peak), level.after
        taken += sum(fetch.slot.nbytes for fetch in starts.get(index, ()))
        peak = max(peak, taken + held)
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
