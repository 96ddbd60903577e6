"""Which gradients stay where backward makes them, and what is held then: on steps made by hand."""

from dataclasses import replace

import pytest
from written import NOTHING, schedule

from zcompile.ir.schedule import EntryIndex, Reduce, Register, Run
from zcompile.ir.step import EntryFact, StepCall, StepTrace
from zcompile.ir.types import EntryKind, EntryRef, LiveBytes, MemoryProfile, Phase
from zcompile.memory.step_footprint import StepFootprint, held_peak, staying

HELD_BESIDE = (9, 8, 6, 4, 2)
"""Beside five gradients of 2, of a peak of 11: the picture in `memory/step_footprint.py`."""


def backward(beside=HELD_BESIDE, **of):
    """Makes a gradient of 2 for each of so many parameters; each is joined as the next leaves."""
    levels, reduces, now = [LiveBytes(0, beside[0] + 2, beside[0] + 2)], [], beside[0] + 2
    for n, bytes_beside in enumerate(beside):
        levels.append(LiveBytes(now, now, now := bytes_beside + 2, 2, True))
        reduces.append(Reduce(Register(0), EntryIndex(n), (), True, "w", 2))
    rows = [Run(NOTHING, (), (), (), None), *reduces]
    return replace(schedule(*rows, phase=Phase.BACKWARD), holds=MemoryProfile(tuple(levels)), **of)


def in_two():
    """Backward in two graphs: a gradient of 4, on its way when the second begins; three of 2, the
    first of which has left when 10 are needed, as has that of the first graph."""
    made, small = Run(NOTHING, (), (), (), None), LiveBytes(2, 2, 2, 2, True)
    one = MemoryProfile((LiveBytes(0, 4, 4), LiveBytes(4, 4, 4, 4, True)))
    two = MemoryProfile((LiveBytes(0, 2, 2), small, small, LiveBytes(2, 10, 2), small))
    reduces = [
        Reduce(Register(0), EntryIndex(n), (), True, "w", nbytes)
        for n, nbytes in enumerate((2, 2, 2, 4))
    ]
    rows = (made, reduces[3]), (made, *reduces[:2], made, reduces[2])
    return [
        replace(schedule(*of, phase=Phase.BACKWARD), holds=holds)
        for of, holds in zip(rows, (one, two), strict=True)
    ]


def step_of(*calls):
    """Calls on parameters 1 to 5."""
    params = tuple(map(EntryRef, range(1, 6)))
    made = [schedule(phase=call) if isinstance(call, Phase) else call for call in calls]
    facts = {g: EntryFact(g, "w.grad", EntryKind.GRAD, 2, "host") for g in gradients(*range(1, 6))}
    return StepTrace(tuple(StepCall(one, params) for one in made), facts)


def gradients(*numbers):
    """Of the parameters with these numbers."""
    return {EntryRef(n).gradient for n in numbers}


USUAL = Phase.FORWARD, backward(), Phase.STEP


@pytest.mark.parametrize(
    ("beside", "room", "how_many"),
    [
        (HELD_BESIDE, 12, 5),
        (HELD_BESIDE, 11, 4),
        ((9, 8, 8, 8, 8), 18, 5),
        ((9, 8, 8, 8, 8), 14, 3),
        ((9, 8, 8, 8, 8), 11, 1),
        ((9, 8, 8, 8, 8), 10, 1),
        ((9, 9, 9, 9, 9), 8, 1),
        ((0, 0, 0, 0, 0), 7, 3),
    ],
)
def test_the_last_gradients_stay_as_many_as_find_room(beside, room, how_many):
    step = step_of(Phase.FORWARD, backward(beside), Phase.STEP)
    assert staying(step, room) == gradients(*range(6 - how_many, 6))


@pytest.mark.parametrize(
    "calls",
    [
        (Phase.FORWARD, backward(), Phase.FORWARD, backward(), Phase.STEP),
        (Phase.FORWARD, Phase.STEP),
        (backward(), Phase.STEP),
        (Phase.FORWARD, backward(), Phase.STEP, Phase.FORWARD, backward(), Phase.STEP),
    ],
    ids=["micro-batches", "no backward", "no forward", "two in turn"],
)
def test_gradients_that_are_added_to_go_home(calls):
    assert staying(step_of(*calls), 1000) == frozenset()


def test_a_gradient_that_comes_twice_goes_home():
    both = staying(step_of(Phase.FORWARD, backward(), backward((9,)), Phase.STEP), 1000)
    assert both == gradients(2, 3, 4, 5)


@pytest.mark.parametrize(("room", "stay"), [(14, (2, 3)), (15, (2, 3)), (16, (1, 2, 3, 4))])
def test_what_another_graph_left_under_way_counts_beside_all_of_the_next(room, stay):
    """A run looks once, before a call, at what others hold then and at the peak of the call."""
    step = step_of(Phase.FORWARD, *in_two(), Phase.STEP)
    assert staying(step, room) == gradients(*stay)
    walk = StepFootprint()
    for call in step.calls:
        made = call.with_staying(staying(step, room)).schedule
        walk.begin(made)
        assert walk.others + held_peak(made) <= room
        walk.through(made)
        walk.end(Phase.STEP)


def test_what_is_kept_into_the_next_forward_goes_home():
    kept = frozenset(gradients(2))
    assert staying(step_of(*USUAL), 1000, kept=kept) == gradients(1, 3, 4, 5)


def test_an_step_scratch_has_its_room_while_the_optimizer_goes_on():
    step = step_of(Phase.FORWARD, backward((20, 0, 0, 0, 0)), Phase.STEP)
    assert len(staying(step, 22)) == 5
    assert len(staying(step, 22, scratch_bytes=16)) == 3
    assert len(staying(step, 22, scratch_bytes=22)) == 1, "that is on its way then, if it does not"


def test_what_shares_its_memory_or_comes_in_tiles_goes_home():
    made = backward()
    shared = [level._replace(alone=n != 2) for n, level in enumerate(made.holds.levels)]
    rows = list(made.instructions)
    rows[3] = replace(rows[3], of_nbytes=4)
    made = replace(made, instructions=tuple(rows), holds=MemoryProfile(tuple(shared)))
    assert staying(step_of(Phase.FORWARD, made, Phase.STEP), 1000) == gradients(1, 4, 5)


def test_what_stays_is_held_until_the_next_forward():
    made = backward()
    rows = [
        replace(x, stays=x.entry > 0) if isinstance(x, Reduce) else x for x in made.instructions
    ]
    made, walk, held = replace(made, instructions=tuple(rows)), StepFootprint(), []
    walk.begin(made)
    for x in made.instructions:
        walk.rise()
        if isinstance(x, Reduce):
            walk.leave(x)
            held.append(walk.now)
    walk.end(Phase.STEP)
    walk.begin(schedule(phase=Phase.STEP))
    assert walk.now == 8
    walk.end(Phase.FORWARD)
    assert walk.now == 8
    walk.begin(schedule(phase=Phase.FORWARD))
    assert walk.now == 0
    assert held == [11, 10, 10, 10, 10]
    assert held_peak(made) == 11
