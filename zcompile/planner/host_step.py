"""Lets the host compute updates in the record of a step, which is then planned like any other.

A step brings parameter, gradient and states of a row to the device, and sends parameter and states
back. Where all of them rest on the host, it can compute the row itself, in place: then nothing
crosses the bus in the step but gradients that are still on their way, and the parameter comes when
a forward reads it. On a slow bus this is faster, though the host's memory is slower than the
device's (the CPU optimizer of ZeRO-Offload, arXiv 2101.06840, and ZeRO-Infinity).

Source of the rule which rows may be computed so: all that such a row reads and writes are the
parameter, its gradient, its states, and a low-precision copy of it (`ir/late_updates.py`).

The step does not wait for the host: rows go on beside the next forward, in the order in which that
reads their parameters, and its fetch of each waits for its row.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from zcompile.ir.late_updates import is_update, weight_of
from zcompile.ir.optimizer_step import Row, chunk_region
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


def demand_on_host(step: StepTrace, costs: Costs) -> Demand:
    """What a step needs, whatever the host updates, which goes on beside the next forward.

    An optimizer's segment computes what the device must. It and the forward behind it take together
    at least what device and host take for both; where they are the same cores, the sum. Where a
    commit ends a step, the segment takes that alone.
    """
    demand = demand_of(step, costs.region_seconds, machine=costs.machine)
    ways = costs.ways
    if not ways.asynchronous and ways.updates_end_steps:
        return demand
    marked = with_host_updates(step) or step
    segments, pairs = list(demand.segments), []
    grouped = groupby(marked.calls, key=lambda call: call.phase)
    for n, (phase, calls) in enumerate(grouped):
        if phase is not Phase.STEP:
            continue
        segment, rows = segments[n], _either(calls, costs)
        after = (n + 1) % len(segments)
        if ways.updates_end_steps:
            segments[n] = replace(segment, compute_s=_together_s(segment.compute_s, rows))
            continue
        alone_s = max(0.0, segment.compute_s - sum(here_s for here_s, _ in rows))
        segments[n] = replace(segment, compute_s=alone_s)
        if demand.segments[after].phase is Phase.FORWARD:
            both_s = segment.compute_s + demand.segments[after].compute_s
            if ways.asynchronous:
                both_s = _together_s(both_s, rows)
            else:
                both_s -= sum(max(0.0, here_s - there_s) for here_s, there_s in rows)
            pairs.append((n, after, both_s))
    return replace(demand, segments=tuple(segments), pairs=tuple(pairs))


def _either(calls: Iterable[StepCall], costs: Costs) -> list[tuple[float, float]]:
    """Of each row that the host may compute: seconds of the device for it, and of the host."""
    either = []
    for call in calls:
        for row in call.schedule.rows:
            if row.on_host:
                here, there = replace(row, on_host=False), row.resting_on_host()
                name, numel = call.schedule.name, row.numel
                here_s, there_s = (
                    costs.region_seconds(chunk_region(name, way, 0, numel)) for way in (here, there)
                )
                either.append((here_s, there_s))
    return either


def _together_s(device_s: float, either: Sequence[tuple[float, float]]) -> float:
    """Lower bound, in seconds, on what the device computes in `device_s`, rows that it may share
    with the host among it.

    The device needs `device_s` less the seconds of what the host computes, and the host the seconds
    of that. Rows may be shared in any parts; the longer of the two is least where the host takes
    those rows first that the device needs longest for, by the host's seconds.

    either  as of `_either`
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
