"""The record of a step, without what is gone by the time that it is planned."""

from typing import cast

from zcompile.ir.schedule import Schedule
from zcompile.ir.step import EntryFact, StepCall, StepTrace, without_dead_entries
from zcompile.ir.types import EntryKind, EntryRef

HERE, GONE = EntryRef(1), EntryRef(2)


def fact(ref, kind):
    return EntryFact(ref, str(ref), kind, 8, "host")


def call(*refs):
    """Of no schedule: what is there is decided by entries alone."""
    return StepCall(cast(Schedule, None), refs)


def test_a_call_that_uses_only_gradients_of_what_is_gone_is_gone_too():
    """As clearing and clipping the gradients of weights that have other data by now."""
    calls = call(HERE, HERE.gradient), call(GONE, GONE.gradient), call(GONE.gradient)
    facts = {
        ref: fact(ref, EntryKind.GRAD if ref.is_gradient else EntryKind.PARAM)
        for made in calls
        for ref in made.entries
    }
    left = without_dead_entries(StepTrace(calls, facts), {HERE, HERE.gradient})
    assert left.calls == calls[:1]
    assert left.facts.keys() == {HERE, HERE.gradient}
