"""Makes updates late in the record of a step, which is then planned like any other."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from zcompile.ir.late_updates import LateRows, is_update, weight_of
from zcompile.ir.optimizer_step import LEAST_PACED_BYTES, Row, StepRoom, lower_step
from zcompile.ir.schedule import SERIALS, EntryIndex, Schedule
from zcompile.ir.step import StepCall, StepTrace
from zcompile.ir.types import SMALL_BYTES, EntryKind, EntryRef, Phase
from zcompile.passes.arrange import arrange
from zcompile.passes.late_updates import reads_once

MOST_CHUNKS = 1024
"""Most chunks of late updates of a step, in roomy windows: each is a region with values of its own
to be placed, for each window that is tried. Steps of larger models are planned without."""


@dataclass(frozen=True)
class LateStep:
    """A step whose updates are late.

    step      its first forwards compute the updates of the step before
    forwards  parameter that is updated late -> serial of the recorded forward that does it
    """

    step: StepTrace
    forwards: Mapping[EntryRef, int]


def with_late_step(
    step: StepTrace,
    chunk_bytes: int,
    wanted: Collection[EntryRef] | None = None,
    least_bytes: int = LEAST_PACED_BYTES,
) -> LateStep | None:
    """The step with its updates in the forward; None, if none may be late.

        forward, backward, step     ->     forward with updates, backward

    What is left of a call of the optimizer stays: updates of small parameters, which rest on the
    device, are computed together there.

    chunk_bytes  of an operand, at most
    wanted       parameters whose updates are late, if they may be; None: all
    least_bytes  of an operand in a chunk, where room allows
    """
    found = _late_rows(step, wanted)
    if not 0 < _chunks(step, found, chunk_bytes) <= MOST_CHUNKS:
        return None
    joining: dict[int, LateRows] = {}
    forwards, calls = dict[EntryRef, int](), [*step.calls]
    for number, rows in found.items():
        call = step.calls[number]
        for forward in dict.fromkeys(rows.values()):
            mine = [_settled(call, n) for n, at in rows.items() if at == forward]
            before = joining.get(forward, LateRows())
            joining[forward] = before.with_rows(
                call.schedule.name,
                mine,
                call.schedule.inputs,
                call.entries,
                step.calls[forward].entries,
            )
            serial = step.calls[forward].schedule.serial
            forwards |= {_weight_ref(step, call, row): serial for row in mine}
        rest = [row for n, row in enumerate(call.schedule.rows) if n not in rows]
        calls[number] = replace(call, schedule=_without(call.schedule, rest))
    for number, late in joining.items():
        call = step.calls[number]
        calls[number] = replace(
            call,
            schedule=_base_of(
                call.schedule, replace(late, chunk_bytes=chunk_bytes, least_bytes=least_bytes)
            ),
            entries=(*call.entries, *late.entries),
        )
    kept = [c for c in calls if c.phase is not Phase.STEP or c.schedule.instructions]
    return LateStep(replace(step, calls=tuple(kept)), forwards)


def with_all_late(
    step: StepTrace, chunk_bytes: int, least_bytes: int = LEAST_PACED_BYTES
) -> StepTrace:
    """The step with all updates late that may be; as it is, if none may."""
    late = with_late_step(step, chunk_bytes, least_bytes=least_bytes)
    return step if late is None else late.step


def _chunks(step: StepTrace, found: Mapping[int, Mapping[int, int]], chunk_bytes: int) -> int:
    """Number of chunks of the rows that may be late, where room does not make them smaller."""
    rows = [step.calls[number].schedule.rows[n] for number, of in found.items() for n in of]
    sizes = (row.numel * max(c.dtype.itemsize for c in row.columns) for row in rows)
    return sum(-(-nbytes // chunk_bytes) for nbytes in sizes)


def _settled(call: StepCall, number: int) -> Row:
    """A row of a call; its states outlive the step, also where that was the first, which made
    them."""
    row: Row = call.schedule.rows[number]
    columns = (
        replace(column, lasting=not call.entries[column.entry].is_gradient)
        for column in row.columns
    )
    return replace(row, columns=tuple(columns))


def _base_of(schedule: Schedule, late: LateRows) -> Schedule:
    """The forward with late updates as passes plan it before a placement is known: everything is
    fetched."""
    assert schedule.program is not None, "of a graph"
    program = replace(schedule.program, late=late)
    made = arrange(program, None, 0)
    budget = schedule.budget_bytes
    return replace(made, holds=schedule.holds, budget_bytes=budget, program=program)


def _without(schedule: Schedule, rest: Sequence[Row]) -> Schedule:
    """The call of an optimizer with these rows only; without instructions, if there are none."""
    if not rest:
        return replace(schedule, instructions=(), rows=(), serial=next(SERIALS))
    room = StepRoom(0, schedule.budget_bytes or 0)
    return lower_step(schedule.name, rest, schedule.inputs, len(schedule.names), room)


def _late_rows(step: StepTrace, wanted: Collection[EntryRef] | None) -> dict[int, dict[int, int]]:
    """Number of a call of the optimizer -> row that may be late -> number of the forward that it
    may join."""
    reader = _first_readers(step)
    if not reader:
        return {}
    rows = [
        (row, [call.entries[column.entry] for column in row.columns])
        for call in step.calls
        if call.phase is Phase.STEP
        for row in call.schedule.rows
    ]
    touched = Counter(ref for _, refs in rows for ref in set(refs) if not ref.is_gradient)
    touched += Counter(  # gradients are scaled before
        ref
        for row, refs in rows
        if (kinds := _kinds(step, refs)) is not None and is_update(kinds, row)
        for ref in set(refs)
        if ref.is_gradient
    )
    found: dict[int, dict[int, int]] = {}
    for number, call in enumerate(step.calls):
        if call.phase is not Phase.STEP:
            continue
        for n, row in enumerate(call.schedule.rows):
            refs = [call.entries[column.entry] for column in row.columns]
            kinds = _kinds(step, refs)
            if kinds is None or not is_update(kinds, row):
                continue
            once = all(touched[r] == 1 for r in refs)
            weight = weight_of(kinds, row)
            ref = call.entries[weight.entry]
            forward = reader.get(ref)
            large = step.facts[ref].nbytes > SMALL_BYTES
            if (
                not once
                or forward is None
                or not large
                or (wanted is not None and ref not in wanted)
            ):
                continue
            reading = step.calls[forward]
            program, entry = reading.schedule.program, EntryIndex(reading.entries.index(ref))
            if program is not None and reads_once(program, entry, row, weight):
                found.setdefault(number, {})[n] = forward
    return found


def _kinds(step: StepTrace, refs: Sequence[EntryRef]) -> list[EntryKind] | None:
    """The kinds of entries; None, if one is not known."""
    if any(ref not in step.facts for ref in refs):
        return None
    return [EntryKind.GRAD if ref.is_gradient else step.facts[ref].kind for ref in refs]


def _weight_ref(step: StepTrace, call: StepCall, row: Row) -> EntryRef:
    refs = [call.entries[column.entry] for column in row.columns]
    return call.entries[weight_of(_kinds(step, refs) or [], row).entry]


def _first_readers(step: StepTrace) -> Mapping[EntryRef, int]:
    """Parameter -> the call of a forward that reads it first, by one name.

    None of a step whose optimizer goes on before other forwards and backwards, as two take turns:
    the forward that comes next is not always the first.
    """
    phases = [call.phase for call in step.calls]
    if Phase.STEP not in phases:
        return {}
    if any(phase is not Phase.STEP for phase in phases[phases.index(Phase.STEP) :]):
        return {}
    if any(c.schedule.gathers_inside for c in step.calls if c.phase is Phase.FORWARD):
        return {}
    opening = _opening(step)
    found: dict[EntryRef, int | None] = {}
    for number, call in enumerate(step.calls):
        for ref in call.entries:
            by = number if number in opening and call.entries.count(ref) == 1 else None
            found.setdefault(ref, by)
    return {ref: number for ref, number in found.items() if number is not None}


def _opening(step: StepTrace) -> frozenset[int]:
    """The forwards before the first backward, of each piece the first, that a budget bounds."""
    seen: set[int] = set()
    opening = []
    for number, call in enumerate(step.calls):
        schedule = call.schedule
        if call.phase is not Phase.FORWARD:
            break
        if schedule.serial not in seen and schedule.trains and schedule.budget_bytes is not None:
            opening.append(number)
        seen.add(schedule.serial)
    return frozenset(opening)
