"""Chooses which fetches of the next call start while the current one still computes.

Pure, for two schedules. The runtime starts the fetches (`runtime/foresight.py`), the simulator
walks them, the verifier proves them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from zcompile.ir.effects import IN, Instruction
from zcompile.ir.schedule import EntryIndex, Schedule
from zcompile.ir.types import Phase

N = TypeVar("N")
"""What names an entry: its key in the store, or its `EntryRef`."""


@dataclass(frozen=True)
class Handover:
    """Fetches of the next schedule that start during the current one.

    starts      instruction of the current schedule -> fetches of the next that start after it
    peak_bytes  largest sum of slots of both while the current one runs
    """

    starts: Mapping[int, Sequence[Instruction]]
    peak_bytes: int


NOTHING_WRITTEN: Mapping[int, int] = MappingProxyType({})


def handover(
    now: Schedule, then: Schedule, written: Mapping[int, int] = NOTHING_WRITTEN
) -> Handover:
    """`handed_over`, and the bytes that the slots of both take."""
    starts = handed_over(now, then, written)
    return Handover(starts, _joint_peak(now, starts))


def handed_over(
    now: Schedule, then: Schedule, written: Mapping[int, int] = NOTHING_WRITTEN
) -> Mapping[int, Sequence[Instruction]]:
    """For each opening fetch of `then`, the instruction of `now` after which it may start.

    Opening fetches are those before the first compute of `then`. Each starts after the last fetch
    of `now`, so that it delays none, after every slot of `now` under it was given back, and after
    `now` has written the bytes that it brings, which would be stale before. Entries that are new in
    every call cannot be foreseen: a fetch of a gradient stays where it is.

    written  ticket of a fetch of `then` -> instruction of `now` after which its bytes are written
    """
    rows = list(enumerate(now.effects))
    last_fetch = max((i for i, x in rows if x.lane is IN), default=0)
    frees = [(i, x.gives_back) for i, x in reversed(rows) if x.gives_back is not None]
    ready: dict[int, list[Instruction]] = {}
    for fetch in _opening(then):
        x, under = fetch.effects, 0
        if (slot := x.takes) is not None:
            under = next((i for i, freed in frees if freed.overlaps(slot)), 0)
        at = max(last_fetch, 0 if x.ticket is None else written.get(x.ticket, 0), under)
        if at < len(now.instructions):
            ready.setdefault(at, []).append(fetch)
    return ready


def passes_by(schedule: Schedule, then: Schedule, written: Mapping[int, int]) -> bool:
    """Whether fetches of `then` may be handed over past a call of `schedule`, by the call before.

    They may past a step that moves nothing, takes nothing of the arena, and writes nothing that the
    opening fetches bring: one that clips gradients where they rest, or that updates what rests on
    the device while all other updates are late.

    written  ticket of a fetch of `then` -> instruction of `schedule` after which its bytes are
             written
    """
    if not schedule.changes_in_place:
        return False
    return not any(fetch.effects.ticket in written for fetch in _opening(then))


def _joint_peak(now: Schedule, starts: Mapping[int, Sequence[Instruction]]) -> int:
    """Largest sum of slots taken at once by `now` and the fetches that start in it."""
    taken = peak = 0
    for index, x in enumerate(now.effects):
        taken += x.taken_bytes
        taken += sum(fetch.effects.taken_bytes for fetch in starts.get(index, ()))
        peak = max(peak, taken)
    return peak


def _opening(schedule: Schedule) -> Sequence[Instruction]:
    """Fetches before the first compute of a schedule that can be foreseen."""
    opening: list[Instruction] = []
    if schedule.scratch_at:
        return opening  # which the call before it may hold
    for instruction in schedule.instructions:
        x = instruction.effects
        if x.region is not None:
            break
        if x.lane is IN and x.home is not None and x.home.lasting:
            opening.append(instruction)
    return opening


def last_writes(schedule: Schedule, name_of: Callable[[EntryIndex], N]) -> Mapping[N, int]:
    """Name of each entry that `schedule` writes -> the instruction after which it is written.

    A step writes entries, and a forward with late updates.
    """
    last_run, written = 0, dict[N, int]()
    if schedule.phase is Phase.BACKWARD:
        return written
    for index, x in reversed(list(enumerate(schedule.effects))):
        if x.region is not None:
            last_run = index
        if x.home is not None and x.writes_home:
            written.setdefault(name_of(x.home.entry), index if x.is_transfer else last_run)
    return written
