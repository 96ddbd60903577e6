"""Chooses which fetches of the next call start while the current one still computes.

Pure, for two schedules. The runtime starts the fetches (`runtime/foresight.py`), the simulator
walks them, the verifier proves them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from zcompile.ir.schedule import Borrow, EntryIndex, Fetch, Free, Run, Schedule, Store
from zcompile.ir.types import EntryKind, Phase

N = TypeVar("N")
"""What names an entry: its key in the store, or its `EntryRef`."""


@dataclass(frozen=True)
class Handover:
    """Fetches of the next schedule that start during the current one.

    starts      instruction of the current schedule -> fetches of the next that start after it
    peak_bytes  largest sum of slots of both while the current one runs
    """

    starts: Mapping[int, Sequence[Fetch]]
    peak_bytes: int


NOTHING_WRITTEN: Mapping[int, int] = MappingProxyType({})


def handover(
    now: Schedule, then: Schedule, written: Mapping[int, int] = NOTHING_WRITTEN
) -> Handover:
    """For each opening fetch of `then`, the instruction of `now` after which it may start.

    Opening fetches are those before the first compute of `then`. Each starts after the last fetch
    of `now`, so that it delays none, after every slot of `now` under it was given back, and after
    `now` has written the bytes that it brings, which would be stale before. Entries that are new in
    every call cannot be foreseen: a fetch of a gradient stays where it is.

    written  ticket of a fetch of `then` -> instruction of `now` after which its bytes are written
    """
    last_fetch = max((i for i, x in enumerate(now.instructions) if isinstance(x, Fetch)), default=0)
    frees = [(i, x.slot) for i, x in enumerate(now.instructions) if isinstance(x, Free)]
    ready: dict[int, list[Fetch]] = {}
    for fetch in _opening(then):
        under = [i for i, slot in frees if slot.overlaps(fetch.slot)]
        at = max([last_fetch, written.get(fetch.ticket, 0), *under])
        if at < len(now.instructions):
            ready.setdefault(at, []).append(fetch)
    return Handover(ready, _joint_peak(now, ready))


def passes_by(schedule: Schedule, kind_of: Callable[[EntryIndex], EntryKind]) -> bool:
    """Whether fetches may be handed over past calls of `schedule`, from the call before to the one
    after.

    They may where gradients are changed where they rest, as by clipping, and nothing else is done:
    that takes nothing of the arena, and no fetch that can be foreseen brings what it writes.
    """
    rows = schedule.instructions
    if schedule.phase is not Phase.STEP or any(isinstance(x, Fetch) for x in rows):
        return False
    changed = [x.entry for x in rows if isinstance(x, Borrow) and x.writes]
    return bool(changed) and all(kind_of(entry) is EntryKind.GRAD for entry in changed)


def _joint_peak(now: Schedule, starts: Mapping[int, Sequence[Fetch]]) -> int:
    """Largest sum of slots taken at once by `now` and the fetches that start in it."""
    taken = peak = 0
    for index, instruction in enumerate(now.instructions):
        if isinstance(instruction, Fetch):
            taken += instruction.slot.nbytes
        elif isinstance(instruction, Free):
            taken -= instruction.slot.nbytes
        taken += sum(fetch.slot.nbytes for fetch in starts.get(index, ()))
        peak = max(peak, taken)
    return peak


def _opening(schedule: Schedule) -> Sequence[Fetch]:
    """Fetches before the first compute of a schedule that can be foreseen."""
    opening: list[Fetch] = []
    if schedule.scratch_at:
        return opening  # which the call before it may hold
    for instruction in schedule.instructions:
        if isinstance(instruction, Run):
            break
        if isinstance(instruction, Fetch) and instruction.lasting:
            opening.append(instruction)
    return opening


def last_writes(schedule: Schedule, name_of: Callable[[EntryIndex], N]) -> Mapping[N, int]:
    """Name of each entry that `schedule` writes -> the instruction after which it is written.

    Only a step writes entries.
    """
    last_run, written = 0, dict[N, int]()
    if schedule.phase is not Phase.STEP:
        return written
    for index, x in reversed(list(enumerate(schedule.instructions))):
        if isinstance(x, Run):
            last_run = index
        elif isinstance(x, Store) or (isinstance(x, Borrow) and x.writes):
            at = index if isinstance(x, Store) else last_run
            written.setdefault(name_of(x.entry), at)
    return written
