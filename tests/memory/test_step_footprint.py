"""Gradients on their way home from one call to the next: joined no sooner than they must be."""

from dataclasses import replace

from written import schedule

from zcompile.ir.schedule import EntryIndex, Reduce, Register, Schedule
from zcompile.ir.types import LiveBytes, MemoryProfile, Phase
from zcompile.memory.footprint import Departure, plan_joins
from zcompile.memory.step_footprint import StepFootprint


def backward(*sizes: int) -> Schedule:
    """A call that lets go of gradients of so many bytes, one after the other."""
    leaving = [Departure(at, nbytes, {at: (nbytes, at)}) for at, nbytes in enumerate(sizes)]
    joins = plan_joins(leaving, [0] * (len(sizes) + 1), fills=False)
    levels = tuple(LiveBytes(departing=most) for most in joins.most)
    made = [Reduce(Register(0), EntryIndex(0), (), False, "w", nbytes) for nbytes in sizes]
    return replace(schedule(*made), phase=Phase.BACKWARD, holds=MemoryProfile(levels))


def joined(*calls: Schedule) -> list[list[int]]:
    """Per call: how many are joined as it begins, and as each of its gradients leaves."""
    walk, found = StepFootprint(), []
    for call in calls:
        counts = [walk.begin(call)]
        for reduce in call.instructions:
            walk.rise()
            counts.append(walk.leave(reduce))
        walk.end(Phase.BACKWARD)
        found.append(counts)
    return found


def test_a_large_one_travels_on_while_the_next_call_lets_go_of_small_ones():
    assert joined(backward(256), backward(1, 256, 1)) == [[0, 0], [0, 0, 1, 0]]


def test_small_ones_of_a_call_are_joined_as_planned_once_one_was():
    assert joined(backward(1, 1, 1, 1)) == [[0, 0, 0, 1, 1]]


def test_what_is_left_of_a_large_call_is_joined_before_a_small_one_begins():
    assert joined(backward(256), backward(1, 1)) == [[0, 0], [1, 0, 0]]


def test_a_gradient_in_a_larger_storage_holds_all_of_that():
    """And two that are parts of one hold it until the last of them has come home."""
    call = backward(2, 2, 2)
    levels = tuple(LiveBytes(departing=6, carried=nbytes) for nbytes in (0, 3, 4))
    walk, held = StepFootprint(), []
    for then in (replace(call, holds=MemoryProfile(levels)), backward(2), backward(1)):
        walk.begin(then)  # twice its own may be under way still
        if then.holds.levels == levels:
            walk.through(then)
            walk.end(Phase.BACKWARD)
        held.append(walk.others)
    assert held == [7, 7, 4]
