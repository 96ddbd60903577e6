"""The floor of a step: what it counts, and that no plan, and no other bound, is below it."""

from dataclasses import replace

import pytest
from bounded_steps import B, F, P, S, links, schedule, training
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planned_runs import begun
from sampled import sampled, sampled_rows

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.ir.schedule import Run
from zcompile.ir.step import StepCall, StepTrace
from zcompile.ir.types import Region, Work
from zcompile.ir.units import Bytes, KiB
from zcompile.machine.cost import Costs, TransferModes
from zcompile.machine.model import Compute, Link, Machine
from zcompile.planner.bounds import bound
from zcompile.planner.floor import floor, traced_compute
from zcompile.planner.placement import Room

MACHINE = Machine("fake", {}, {}, Compute({"float32": 1.0}, 1.0))
TWICE = Region("twice", "", lambda: (), Work(dense_nbytes=8, nbytes=12, ops=5))
ONCE = replace(TWICE.work, dense_nbytes=4, nbytes=6, ops=3)


def costs(seconds, idle=None):
    given = {} if idle is None else {"idle": {"twice": idle}}
    return Costs(MACHINE, TransferModes(), regions={"twice": seconds}, **given)


def computing(phase, traced=None):
    return replace(schedule(phase, Run(TWICE, (), ())), traced_work=traced)


def floor_of(compute_s, room, ways):
    phases = zip((F, B, S), compute_s, strict=True)
    regions = {phase: Region(phase.value, "", lambda: ()) for phase in (F, B, S)}
    calls = [StepCall(schedule(phase, Run(regions[phase], (), ())), ()) for phase, _ in phases]
    seconds = {regions[phase].key: s for phase, s in zip((F, B, S), compute_s, strict=True)}
    known = Costs(MACHINE, TransferModes(), regions=seconds)
    return floor(StepTrace(tuple(calls)), training(compute_s), known, ways, room)


def test_the_floor_is_the_busiest_of_compute_and_the_links_over_the_whole_step():
    moved = floor_of((1.0, 2.0, 0.0), Room({"device": 0, "host": 10**9}), links())
    assert (moved.seconds, moved.binding) == (pytest.approx(6 * P / 100), "h2d")
    assert moved.nbytes == {"h2d": 6 * P, "d2h": 4 * P}
    computed = floor_of((50.0, 60.0, 0.0), Room({"device": 0, "host": 10**9}), links())
    assert (computed.seconds, computed.binding) == (pytest.approx(110.0), "compute")
    assert computed.compute_s == pytest.approx(110.0)


def test_links_that_take_turns_are_busy_one_after_the_other():
    both = {"h2d": Link("h2d", 100.0, shares="d2h"), "d2h": Link("d2h", 100.0, shares="h2d")}
    found = floor_of((0.0, 0.0, 0.0), Room({"device": 0, "host": 10**9}), both)
    assert found.seconds == pytest.approx(10 * P / 100)


def test_compute_counts_as_it_is_while_links_are_idle():
    call = computing(F)
    assert traced_compute(call, costs(3.0)) == 3.0
    assert traced_compute(call, costs(3.0, idle=2.0)) == 2.0
    assert traced_compute(call, costs(3.0, idle=4.0)) == 3.0, "by chance; the floor takes less"


def test_what_passes_make_again_does_not_count():
    assert traced_compute(computing(B, traced=ONCE), costs(4.0)) == pytest.approx(2.0)
    assert traced_compute(computing(B, traced=TWICE.work), costs(4.0)) == pytest.approx(4.0)


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(*[st.floats(0.0, 60.0)] * 3),
    st.integers(0, 4 * P),
    st.integers(0, 5 * P),
    st.integers(0, 2 * P),
    st.booleans(),
)
@example((0.0, 0.0, 2.0**-24), 3 * P, 0, P, False)  # less than the solver tells from nothing
def test_no_split_of_the_budgets_has_its_least_below_the_floor(compute_s, arena, host, held, disk):
    """The least of a split: `arena` bytes for entries, and `held` beside them for graphs."""
    ways = links(disk_read=30.0, disk_write=20.0) if disk else links()
    far = {"disk": 10**9} if disk else {}
    demand = replace(training(compute_s), gradients=frozenset({1}))
    split = Room({"device": arena, "host": host, **far}, held_bytes=held)
    least = bound(demand, ways, split).seconds
    whole = Room({"device": arena + held, "host": host, **far})
    assert floor_of(compute_s, whole, ways).seconds <= least * (1 + 1e-6) + 1e-9, "but for rounding"


@pytest.mark.parametrize("choice", sampled(["keep", "recompute"], "recompute"))
def test_of_a_run_the_floor_is_below_the_least_and_says_what_it_is_due_to(choice):
    budget = {"keep": 112 * KiB, "recompute": 64 * KiB}[choice]
    model, _, _ = begun(4, device_memory=Bytes(budget), activations=choice)
    told = zcompile.stats(model)["predicted"]
    assert 0 < told["floor_compute_s"] <= told["floor_s"] <= told["least_s"] * (1 + 1e-6)
    assert told["floor_compute_s"] <= told["least_compute_s"]
    assert (
        told["floor_binding"] == "compute"
        or told["floor_binding"] in zcompile.stats(model)["bytes"]
    )


@pytest.mark.parametrize(
    ("choice", "budget", "added"),
    sampled_rows(
        [("keep", "16MiB", False), ("keep", 80 * KiB, True), ("recompute", 64 * KiB, True)],
        ("keep", "16MiB", False),
    ),
)
def test_tiles_and_what_is_made_again_are_no_part_of_the_traced_work(choice, budget, added):
    model, _, _ = begun(2, device_memory=Bytes(budget), activations=choice)
    step = session_behind(model).executor.recorder.end()
    backward = [call.schedule for call in step.calls if call.schedule.phase is B]
    scheduled = sum(x.region.work.ops for s in backward for x in s.instructions if type(x) is Run)
    traced = sum(s.traced_work.ops for s in backward)
    assert (traced < scheduled) if added else (traced == scheduled)
