"""Puts parameters of which all rests on every rank into the record of a step, which is then planned
like any other.

Ranks hold shares of a parameter, and gather it where it is read: in forward, and in backward once
more. Where all of it is kept on the device, the first call after an update gathers it, and the
others read it there. What is kept takes the room of the whole parameter on each rank, so that fewer
shares and states may rest there.

Which parameters these are decides what crosses between ranks, so that all of them must keep the
same (`frontend/kept_wholes.py`). They are taken in an order that is up to the graph alone.
"""

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from zcompile.ir.schedule import EntryIndex, Schedule
from zcompile.ir.step import EntryFact, StepCall, StepTrace
from zcompile.ir.types import EntryKind, EntryRef, Phase, aligned
from zcompile.passes.arrange import keeping_wholes
from zcompile.passes.keep_wholes import gathered_by

NO_WHOLES: frozenset[EntryRef] = frozenset()
PARTS = (1, 2, 4)
"""What is kept may take the device divided by these."""


@dataclass(frozen=True)
class Gathered:
    """A parameter that ranks gather in a step.

    nbytes  of all shares
    saves   gathers of it in a step that are none, if it is kept
    """

    ref: EntryRef
    nbytes: int
    saves: int


def gathered_in(step: StepTrace) -> list[Gathered]:
    """The parameters that a step, as it was recorded, gathers: first those of which keeping a byte
    saves most, then in the order of the step. Without those that come in two dtypes, as graphs of
    their own may read them (`param_dtype`)."""
    times, sizes = Counter[EntryRef](), dict[EntryRef, GatheredAs]()
    mixed = set[EntryRef]()
    written = _written_in(step)
    for call in step.calls:
        for index in gathered_by(call.schedule) if call.phase is not Phase.STEP else ():
            ref, read = call.entries[index], gathered_as(call.schedule)[index]
            if sizes.setdefault(ref, read) != read:
                mixed.add(ref)
            times[ref] += 1
    alike = {ref: n for ref, n in times.items() if ref not in mixed}
    found = [Gathered(ref, sizes[ref].nbytes, n - (ref in written)) for ref, n in alike.items()]
    return sorted(found, key=lambda row: -row.saves)


def sets_to_try(rows: Sequence[Gathered], device_bytes: int) -> list[frozenset[EntryRef]]:
    """Sets of parameters to keep, the largest first: as many as parts of the device have room
    for."""
    found: dict[frozenset[EntryRef], None] = {}
    for part in PARTS:
        left, taken = device_bytes // part, set[EntryRef]()
        for row in rows:
            if row.saves > 0 and aligned(row.nbytes) <= left:
                left -= aligned(row.nbytes)
                taken.add(row.ref)
        if taken:
            found.setdefault(frozenset(taken))
    return list(found)


def with_wholes(step: StepTrace, wanted: Set[EntryRef]) -> StepTrace:
    """The step with all of these parameters kept on the device, once training is under way.

    forward and backward gather w, step    ->    forward gathers w and keeps it, backward
    writes its share                             reads it, step writes its share
    """
    if not wanted:
        return step
    facts = dict(step.facts)
    made: dict[tuple[int, frozenset[EntryIndex], frozenset[EntryIndex]], Schedule] = {}
    fresh = set[EntryRef]()

    def kept(call: StepCall) -> StepCall:
        if call.phase is Phase.STEP:
            fresh.difference_update(_written_by(call))
            return call
        read = frozenset(n for n in gathered_by(call.schedule) if call.entries[n] in wanted)
        if not read:
            return call
        stale = frozenset(n for n in read if call.entries[n] not in fresh)
        fresh.update(call.entries[n] for n in read)
        key = call.schedule.serial, read, stale
        if key not in made:
            made[key] = keeping_wholes(call.schedule, read, stale)
        schedule = replace(made[key], holds=call.schedule.holds)
        of = [call.entries[copy.entry] for copy in schedule.copies]
        for ref, copy in zip(of, schedule.copies, strict=True):
            name = f"all of {step.facts[ref].name}"
            facts[ref.copy] = EntryFact(
                ref.copy, name, EntryKind.COPY, copy.nbytes, "device", pinned=True
            )
        entries = (*call.entries, *(ref.copy for ref in of))
        return replace(call, schedule=schedule, entries=entries)

    for call in step.calls:  # what the step before has left
        kept(call)
    calls = tuple(map(kept, step.calls))
    return replace(step, calls=calls, facts=facts)


def _written_in(step: StepTrace) -> set[EntryRef]:
    return {ref for call in step.calls if call.phase is Phase.STEP for ref in _written_by(call)}


def _written_by(call: StepCall) -> set[EntryRef]:
    effects = (x for x in call.schedule.effects if x.writes_home)
    rows = (column for row in call.schedule.rows for column in row.columns if column.writes)
    return {
        *(call.entries[x.home.entry] for x in effects if x.home is not None),
        *(call.entries[column.entry] for column in rows),
    }


class GatheredAs(NamedTuple):
    """How a schedule gathers a parameter: bytes of all shares, in the dtype they are gathered in.

    Two dtypes may have as many bytes.
    """

    nbytes: int
    dtype: torch.dtype


def gathered_as(schedule: Schedule) -> dict[EntryIndex, GatheredAs]:
    """How a schedule, as it was compiled, gathers each entry of which it does, but for tiles."""
    assert schedule.program is not None, "of a graph"
    values, whole = reversed(schedule.program.values), set(gathered_by(schedule))
    return {v.entry: GatheredAs(v.nbytes, v.layout.dtype) for v in values if v.entry in whole}
