"""Proves schedules safe, without a device: each by itself, and one that hands over to the next.

The rules are in `proof.py`, the order of events in `happens_before.py`.
"""

from collections.abc import Hashable, Mapping, Sequence

from zcompile.ir.handover import Handover
from zcompile.ir.schedule import Fetch, Offload, Reduce, Register, Run, Schedule, Ticket
from zcompile.verify.proof import Proof
from zcompile.verify.walks import Called, Use, Walk


def verify_schedule(schedule: Schedule, entries: Sequence[Hashable] = ()) -> None:
    """entries  what stands for the entry behind each index; empty: all are different

    raises  ScheduleInvalid with the sentence and the instruction, on the first unsafe one
    """
    proof = Proof()
    walk = proof.begin(Called(schedule, entries), {})
    for index in range(len(schedule.instructions)):
        proof.step(walk, index)
    proof.end(walk)
    _account(walk, proof.peak)
    _gradients_are_placed_alone(walk)


def verify_handover(now: Called, then: Called, handover: Handover) -> None:
    """`then`, walked right after `now`, with the fetches that are handed over under way by then.

    Both are safe by themselves. What one writes and the other fetches is known by their entries.
    raises  ScheduleInvalid, which shows the schedule that is not safe beside the other
    """
    proof = Proof()
    first = proof.begin(now, {})
    for index in handover.starts:
        if not 0 <= index < len(now.schedule.instructions):
            raise first.fail(f"fetches are handed over after instruction {index}, which it has not")
    if handover.starts and then.schedule.annex_at:
        raise first.fail("fetches are handed over into memory that graphs hold until then")
    given: dict[Ticket, Use] = {}
    fetches = {x: i for i, x in enumerate(then.schedule.instructions) if isinstance(x, Fetch)}
    spans = then.spans()
    for index in range(len(now.schedule.instructions)):
        proof.step(first, index)
        for fetch in handover.starts.get(index, ()):
            _may_be_handed(first, fetch, fetches, given)
            span = spans[fetches[fetch]]
            assert span is not None
            given[fetch.ticket] = proof.hand(first, fetch, span)
    proof.end(first)
    if proof.peak != handover.peak_bytes:
        raise first.fail(f"the peak of both is {proof.peak} bytes, it says {handover.peak_bytes}")
    second = proof.begin(then, given)
    for index in range(len(then.schedule.instructions)):
        proof.step(second, index)
    proof.end(second)


def _may_be_handed(
    walk: Walk, fetch: Fetch, fetches: Mapping[Fetch, int], given: Mapping[Ticket, Use]
) -> None:
    if fetch not in fetches:
        raise walk.fail(f"the fetch of {fetch.name!r} is handed over, which the next has not")
    if fetch.ticket in given:
        raise walk.fail(f"the fetch of {fetch.name!r} is handed over twice")
    if not fetch.lasting:
        raise walk.fail(f"{fetch.name!r} is handed over, which is new in every call")


def _account(walk: Walk, peak: int) -> None:
    """What a schedule says of its bytes is true, to the byte."""
    schedule = walk.schedule
    end = max((fetch.slot.end for fetch in schedule.fetches()), default=0)
    if end != schedule.arena_bytes:
        raise walk.fail(f"the slots end at {end}, the schedule says {schedule.arena_bytes}")
    if peak != schedule.peak_bytes:
        raise walk.fail(f"the peak is {peak} bytes, the schedule says {schedule.peak_bytes}")
    if schedule.budget_bytes is not None and end > schedule.budget_bytes:
        raise walk.fail(f"the slots end at {end}, the budget is {schedule.budget_bytes}")


def _gradients_are_placed_alone(walk: Walk) -> None:
    """What a region makes where a gradient rests goes home as that gradient, and is read by nobody
    else: from then on it may change."""
    schedule, readers = walk.schedule, _readers(walk.schedule)
    for run in schedule.instructions:
        if not isinstance(run, Run) or not (run.into or run.region.placed):
            continue
        if len(run.into) != len(run.region.placed):
            raise walk.fail(f"{run.region.text!r} places another number of outputs than it is told")
        for at, entry in zip(run.region.placed, run.into, strict=True):
            match readers.get(run.outputs[at]):
                case [Reduce(entry=taker, drop=True, of_nbytes=0)] if taker == entry:
                    pass
                case _:
                    name = schedule.names.get(entry, str(entry))
                    raise walk.fail(f"what is made as the gradient of {name!r} is not that alone")


def _readers(schedule: Schedule) -> Mapping[Register, list[object]]:
    """Of each register, in order; that a result is not dropped is proven elsewhere."""
    found: dict[Register, list[object]] = {}
    for x in schedule.instructions:
        match x:
            case Run():
                registers = x.inputs
            case Reduce() | Offload():
                registers = (x.value,)
            case _:
                registers = ()
        for register in registers:
            found.setdefault(register, []).append(x)
    return found
