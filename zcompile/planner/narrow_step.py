"""Puts low-precision copies of weights into the record of a step, which is then planned like any
other.

Under autocast a weight is read only after a cast. Where a copy of it in that dtype is kept, forward
and backward bring the copy, half as many bytes or less, and the optimizer's step, which has the
weight on the device anyway, writes the copy along. Copies are entries like others: they take room
on the tier that the plan gives them, and what rests on the device is read there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from zcompile.ir.optimizer_step import Column, Row, StepRoom, lower_step
from zcompile.ir.schedule import SERIALS, CopyRead, EntryIndex, Schedule
from zcompile.ir.step import EntryFact, StepCall, StepTrace
from zcompile.ir.types import EntryKind, EntryRef, Phase

Reading = Callable[[int], Schedule | None]
"""Serial of a recorded schedule -> the one that reads copies in its place; None, if it reads
none."""

NOTHING_NARROW: Mapping[int, Schedule] = MappingProxyType({})


@dataclass(frozen=True)
class NarrowStep:
    """A step that reads copies.

    step   as it would have been recorded
    reads  serial of a recorded schedule -> the one that reads copies in its place
    """

    step: StepTrace
    reads: Mapping[int, Schedule]


def with_copies(step: StepTrace, reading: Reading) -> NarrowStep | None:
    """The step with copies of the weights that its calls read after a cast; None, if there are
    none.

        forward reads w, step writes w    ->    forward reads copy, step writes w and copy

    A weight that no row writes whole has its copy made once: it is frozen, or written otherwise.
    Where graphs were compiled to read copies (`param_dtype`), those are all there are.
    """
    if _compiled_to_read_copies(step):
        return None
    step = without_copies(step)
    reads: dict[int, Schedule] = {}
    facts, calls = dict(step.facts), []
    for call in step.calls:
        narrow = None if call.phase is Phase.STEP else reading(call.schedule.serial)
        if narrow is None:
            calls.append(call)
            continue
        reads[call.schedule.serial] = narrow
        if call.schedule.holds.sizes != narrow.holds.sizes:
            return None
        wide = [call.entries[copy.entry] for copy in narrow.copies]
        for ref, copy in zip(wide, narrow.copies, strict=True):
            name = f"{step.facts[ref].name} in {str(copy.cast.copy_dtype).removeprefix('torch.')}"
            facts[ref.copy] = EntryFact(ref.copy, name, EntryKind.COPY, copy.nbytes, "host")
        entries = (*call.entries, *(ref.copy for ref in wide))
        calls.append(replace(call, schedule=narrow, entries=entries))
    if not reads:
        return None
    copies = {call.entries[c.entry]: c for call in calls for c in call.schedule.copies}
    made = [_writing(call, facts, copies) if call.phase is Phase.STEP else call for call in calls]
    return NarrowStep(replace(step, calls=tuple(made), facts=facts), reads)


def _writing(
    call: StepCall, facts: Mapping[EntryRef, EntryFact], copies: Mapping[EntryRef, CopyRead]
) -> StepCall:
    """A call of an optimizer that writes copies along with the weights that it writes whole."""
    entries, rows = [*call.entries], []
    for row in call.schedule.rows:
        more = []
        for column in row.columns:
            ref = call.entries[column.entry]
            if ref not in copies or not column.writes or row.numel != copies[ref].numel:
                continue
            fact = facts[ref.copy]
            more.append(
                Column(
                    EntryIndex(len(entries)),
                    0,
                    copies[ref].cast.copy_dtype,
                    True,
                    False,
                    fact.name,
                )
            )
            entries.append(ref.copy)
        rows.append(replace(row, columns=(*row.columns, *more), copies=len(more)))
    return replace(call, schedule=_lowered(call.schedule, rows, len(entries)), entries=(*entries,))


def without_copies(step: StepTrace) -> StepTrace:
    """A step as it would have been recorded without the copies of a plan."""
    if _compiled_to_read_copies(step) or not any(ref.is_copy for ref in step.facts):
        return step
    calls = [
        _bare(call) if any(ref.is_copy for ref in call.entries) else call for call in step.calls
    ]
    facts = {ref: fact for ref, fact in step.facts.items() if not ref.is_copy}
    return replace(step, calls=tuple(calls), facts=facts)


def _compiled_to_read_copies(step: StepTrace) -> bool:
    return any(call.schedule.casts for call in step.calls)


def _bare(call: StepCall) -> StepCall:
    """A call of an optimizer that writes no copies."""
    kept = [number for number, ref in enumerate(call.entries) if not ref.is_copy]
    index = {number: EntryIndex(at) for at, number in enumerate(kept)}
    rows = [
        replace(
            row,
            columns=tuple(
                replace(column, entry=index[column.entry])
                for column in row.columns[: len(row.columns) - row.copies]
            ),
            copies=0,
        )
        for row in call.schedule.rows
    ]
    entries = tuple(call.entries[number] for number in kept)
    return replace(call, schedule=_lowered(call.schedule, rows, len(entries)), entries=entries)


def _lowered(schedule: Schedule, rows: list[Row], entries: int) -> Schedule:
    room = StepRoom(0, schedule.budget_bytes or 0)
    made = lower_step(schedule.name, rows, schedule.inputs, entries, room)
    return replace(made, serial=next(SERIALS))
