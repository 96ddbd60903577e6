"""Instructions are named ranges of the real torch.profiler, and cost nothing without one."""

import torch
from offloaded import twins
from small_models import mlp

from zcompile.runtime import executor


def test_instructions_are_named_ranges_of_a_profile():
    torch._dynamo.reset()
    pair = twins(mlp())
    assert pair.train(torch.ones(2, 8))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert pair.train(torch.ones(2, 8))
    names = [event.name for event in profile.events()]
    assert "zinf fetch 0.weight" in names
    assert "zinf wait 0.weight" in names
    assert "zinf reduce 2.weight" in names
    # What a region computes lies inside its range; the eager twin's is in none.
    ranges = [range_of(e) for e in profile.events() if e.name == "aten::threshold_backward"]
    assert ranges == ["zinf run detach threshold_backward t mm", ""]


def range_of(event) -> str:
    """The innermost of our ranges around an event of a profile; "" outside of them."""
    while event is not None and not event.name.startswith("zinf "):
        event = event.cpu_parent
    return "" if event is None else event.name


def test_without_a_profiler_nothing_is_named(monkeypatch):
    def named() -> None:
        raise AssertionError("ranges are made that nobody sees")

    torch._dynamo.reset()
    pair = twins(mlp())
    monkeypatch.setattr(executor, "named_actions", named)
    assert pair.train(torch.ones(2, 8))
