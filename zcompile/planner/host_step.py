"""Lets the host compute updates in the record of a step, which is then planned like any other.

A step brings parameter, gradient and states of a row to the device, and sends parameter and states
back. Where all of them rest on the host, it can compute the row itself, in place: then nothing
crosses the bus in the step but gradients that are still on their way, and the parameter comes when
a forward reads it. On a slow bus this is faster, though the host's memory is slower than the
device's (the CPU optimizer of ZeRO-Offload, arXiv 2101.06840, and ZeRO-Infinity).

Source of the rule which rows may be computed so: all that such a row reads and writes are the
parameter, its gradient, its states, and a low-precision copy of it (`ir/late_updates.py`).

The step does not wait for the host: rows go on beside the next forward, in the order in which that
reads their parameters, and its fetch of each waits for its row. Where the host runs ahead of the
device they begin beside backward, but for those that read a value of the device, as a factor of
clipping: the host waits for that, and so for all compute before it.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import torch

from zcompile.ir.late_updates import is_update, weight_of
from zcompile.ir.optimizer_step import Column, Row, chunk_region
from zcompile.ir.schedule import SERIALS
from zcompile.ir.step import StepCall, StepTrace
from zcompile.ir.types import SMALL_BYTES, EntryKind, EntryRef, Phase
from zcompile.machine.cost import Costs
from zcompile.machine.model import Link
from zcompile.planner.bounds import Demand, demand_of
from zcompile.planner.floor import Floor, floor
from zcompile.planner.placement import Room


def with_host_updates(
    step: StepTrace, wanted: Collection[EntryRef] | None = None
) -> StepTrace | None:
    """The step with rows that the host may compute marked so; None, if there are none.

    The instructions of its calls are as before: a step is lowered from its rows once a placement
    says what rests where, and a row of which an operand rests elsewhere is computed on the device.

    wanted  parameters that may be updated there; None: all
    """
    touched = Counter(
        ref
        for call in step.calls
        for row in call.schedule.rows
        for ref in {call.entries[column.entry] for column in row.columns}
        if not ref.is_gradient or _weight_of(step, call, row) is not None
    )
    found, calls = False, []
    for call in step.calls:
        if call.phase is not Phase.STEP or call.schedule.budget_bytes is None:
            calls.append(call)
            continue
        rows = []
        for row in call.schedule.rows:
            weight = _weight_of(step, call, row)
            may = (
                weight is not None
                and (wanted is None or weight in wanted)
                and step.facts[weight].nbytes > SMALL_BYTES
                and all(touched[call.entries[column.entry]] == 1 for column in row.columns)
            )
            found |= may
            rows.append(replace(row, on_host=may))
        calls.append(_with_rows(call, rows))
    return replace(step, calls=tuple(calls)) if found else None


def without_host_updates(step: StepTrace) -> StepTrace:
    """The step as it was before rows were marked, or recorded before the host computed any: of no
    row is the host to compute it."""
    if not any(row.on_host for call in step.calls for row in call.schedule.rows):
        return step
    calls = tuple(
        _with_rows(call, [replace(row, on_host=False) for row in call.schedule.rows])
        if any(row.on_host for row in call.schedule.rows)
        else call
        for call in step.calls
    )
    return replace(step, calls=calls)


def updated_on_host(step: StepTrace, homes: Mapping[EntryRef, str]) -> frozenset[EntryRef]:
    """The parameters that the host updates in a step whose rows are marked, under a placement."""
    found = set()
    for call in step.calls:
        for row in call.schedule.rows:
            refs = [call.entries[column.entry] for column in row.columns]
            if row.on_host and all(homes.get(ref, step.facts[ref].home) == "host" for ref in refs):
                weight = _weight_of(step, call, row)
                assert weight is not None, "it is marked"
                found.add(weight)
    return frozenset(found)


def order_of_need(step: StepTrace) -> Mapping[EntryRef, int]:
    """Parameter -> its place in the order in which the forwards of a step come to read them first:
    the host updates them in this order."""
    found: dict[EntryRef, int] = {}
    for call in step.calls:
        if call.phase is Phase.FORWARD:
            for x in call.schedule.effects:
                if x.home is not None and x.home.reads and not x.is_gradient:
                    found.setdefault(call.entry_of(x.home), len(found))
    return found


# --- Bounds ---


class _SharedRow(NamedTuple):
    """A row that the host may compute.

    of         the segment whose optimizer computes it
    here_s     seconds of the device for it; there_s: of the host
    segments   those in the course of which the host may compute it
    """

    of: int
    here_s: float
    there_s: float
    segments: frozenset[int]


def demand_on_host(step: StepTrace, costs: Costs) -> Demand:
    """What a step needs, whatever the host updates, which goes on beside the device.

    An optimizer's segment computes what the device must. The host may compute a row from the
    backward on that completes its gradient, since it runs ahead of the device, until a forward
    reads what it writes; so it is these segments together that take at least what device and host
    take for all that they compute, however they share such rows. So do all segments for all rows.
    A row begins with its optimizer's segment where it awaits compute, or where host and device are
    the same cores, which take the sum; it ends with that where a commit ends a step.
    """
    demand = demand_of(step, costs.region_seconds, machine=costs.machine)
    rows = list(_shared_rows(with_host_updates(step) or step, costs))
    if not rows:
        return demand
    segments, movable_s = [], []
    for n, segment in enumerate(demand.segments):
        most_s = min(segment.compute_s, sum(row.here_s for row in rows if row.of == n))
        segments.append(replace(segment, compute_s=segment.compute_s - most_s))
        movable_s.append(most_s)
    together = []
    for window in {frozenset(range(len(segments))), *(row.segments for row in rows)}:
        inside = [row for row in rows if row.segments <= window]
        device_s = sum(segments[n].compute_s for n in window)
        for n in window:
            device_s += min(movable_s[n], sum(row.here_s for row in inside if row.of == n))
        if costs.ways.asynchronous:
            least_s = _together_s(device_s, [(row.here_s, row.there_s) for row in inside])
        else:
            least_s = device_s - sum(max(0.0, row.here_s - row.there_s) for row in inside)
        together.append((tuple(sorted(window)), least_s))
    return replace(demand, segments=tuple(segments), together=tuple(sorted(together)))


def _shared_rows(step: StepTrace, costs: Costs) -> Iterator[_SharedRow]:
    """The rows of a step that are marked for the host."""
    stretches = [list(calls) for _, calls in groupby(step.calls, key=lambda call: call.phase)]
    accesses = [_Accesses.of(calls) for calls in stretches]
    ways, count = costs.ways, len(stretches)
    for n, calls in enumerate(stretches):
        for call in calls:
            for row in call.schedule.rows:
                if not row.on_host:
                    continue
                before = after = 0
                if ways.asynchronous and not row.awaits_compute:
                    back = [accesses[(n - i) % count].written for i in range(1, count)]
                    before = _first_over(back, call, row, lambda ref: ref.is_gradient)
                if not ways.updates_end_steps:
                    ahead = [accesses[(n + i) % count].read for i in range(1, count)]
                    after = _first_over(ahead, call, row, lambda ref: not ref.is_gradient)
                here, there = replace(row, on_host=False), row.resting_on_host()
                here_s, there_s = (
                    costs.region_seconds(chunk_region(call.schedule.name, way, 0, row.numel))
                    for way in (here, there)
                )
                during = frozenset((n + i) % count for i in range(-before, after + 1))
                yield _SharedRow(n, here_s, there_s, during)


_Ranges = Mapping[EntryRef, Sequence[tuple[torch.dtype | None, int, int]]]
"""Of each entry, (dtype of a copy that is made of it, or None; begin, end) in bytes of that."""


class _Accesses(NamedTuple):
    """What the calls of a segment read and write of entries, the steps of optimizers aside."""

    read: _Ranges
    written: _Ranges

    @staticmethod
    def of(calls: Iterable[StepCall]) -> "_Accesses":
        read: dict[EntryRef, list[tuple[torch.dtype | None, int, int]]] = {}
        written: dict[EntryRef, list[tuple[torch.dtype | None, int, int]]] = {}
        for call in calls:
            if call.phase is Phase.STEP:
                continue
            for x in call.schedule.effects:
                if (home := x.home) is not None:
                    access = home.copy_dtype, home.begin, home.end
                    for does, found in ((home.reads, read), (home.writes, written)):
                        if does:
                            found.setdefault(call.entry_of(home), []).append(access)
        return _Accesses(read, written)


def _first_over(
    segments: Sequence[_Ranges], call: StepCall, row: Row, wanted: Callable[[EntryRef], bool]
) -> int:
    """How many segments on all elements of a row were come to, in one of its operands that are
    `wanted` at least; as many as there are, if they were not."""
    columns = [c for c in row.columns if wanted(call.entries[c.entry])]
    for n in range(len(segments)):
        for column in columns:
            ref = call.entries[column.entry]
            accesses = [access for ranges in segments[: n + 1] for access in ranges.get(ref, ())]
            if accesses and _cover(accesses, column, row.numel):
                return n + 1
    return len(segments)


def _cover(
    accesses: Iterable[tuple[torch.dtype | None, int, int]], column: Column, numel: int
) -> bool:
    """Whether accesses of an entry, or of its copies, are of all elements of a column."""
    width = column.dtype.itemsize
    reached = column.begin // width
    end = reached + numel
    spans = []
    for dtype, begin, last in accesses:
        of = width if dtype is None else dtype.itemsize
        spans.append((begin // of, last // of))
    for first, last in sorted(spans):
        if first > reached:
            break
        reached = max(reached, last)
    return reached >= end


def _together_s(device_s: float, either: Sequence[tuple[float, float]]) -> float:
    """Lower bound, in seconds, on what the device computes in `device_s`, rows that it may share
    with the host among it.

    The device needs `device_s` less the seconds of what the host computes, and the host the seconds
    of that. Rows may be shared in any parts; the longer of the two is least where the host takes
    those rows first that the device needs longest for, by the host's seconds.

    either  of each such row, seconds of the device for it, and of the host
    """
    host_s = 0.0
    for here_s, there_s in sorted(either, key=lambda row: row[1] / max(row[0], 1e-12)):
        if host_s + there_s >= device_s - here_s:
            part = (device_s - host_s) / max(here_s + there_s, 1e-12)
            return max(device_s - part * here_s, 0.0)
        device_s, host_s = device_s - here_s, host_s + there_s
    return device_s


def floor_on_host(
    step: StepTrace, demand: Demand, costs: Costs, links: Mapping[str, Link], room: Room
) -> Floor:
    """As `floor`, of plans in which the host updates what it likes; `demand` is of
    `demand_on_host`."""
    if costs.ways.asynchronous:
        step = replace(step, calls=tuple(c for c in step.calls if c.phase is not Phase.STEP))
    return floor(step, demand, costs, links, reaching(room))


def reaching(room: Room) -> Room:
    """`room`, from whose host nothing need come to the device to be updated."""
    return replace(room, reach=True)


def _with_rows(call: StepCall, rows: list[Row]) -> StepCall:
    """A call of an optimizer with these rows in the place of its own, which they are but for who
    computes them."""
    return replace(call, schedule=replace(call.schedule, rows=tuple(rows), serial=next(SERIALS)))


def _weight_of(step: StepTrace, call: StepCall, row: Row) -> EntryRef | None:
    """The parameter that a row updates; None, if it is another row."""
    refs = [call.entries[column.entry] for column in row.columns]
    if any(ref not in step.facts for ref in refs):
        return None
    kinds = [EntryKind.GRAD if ref.is_gradient else step.facts[ref].kind for ref in refs]
    return call.entries[weight_of(kinds, row).entry] if is_update(kinds, row) else None
