"""What regions take on a card is the card's time, whatever the host takes to enqueue them: by the
device's own code over simulated streams, and a host that is slower than they are."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
from streams.cuda import Event, Pace
from streams.modes import training

from zcompile.ir.schedule import Run
from zcompile.machine.cost import TransferModes
from zcompile.machine.model import Compute, Machine
from zcompile.runtime import live_memory, profile, session
from zcompile.runtime.device import cuda
from zcompile.runtime.device.cuda import SPIN_CYCLES_PER_S
from zcompile.runtime.executor import ACTIONS, _Call
from zcompile.runtime.profile import ENOUGH

HOST_S, CARD_S = 64e-6, 2e-6
"""Seconds of an op."""
BARE = Machine("bare", {}, {}, Compute({"float32": 1.0}, 1.0))


@dataclass
class Measured:
    """Some steps of a model that streams from the host.

    regions  what they take, as the first plan is made with: after two steps
    ops      of each of them
    delays   seconds of each delay, by the step
    walked   seconds of the stream of compute in all walks, by the step
    counted  of them, by the step, as compute, stall, or the optimizer's
    """

    regions: Mapping[str, float]
    ops: Mapping[str, int]
    delays: list[list[float]]
    walked: list[float]
    counted: list[float]


@pytest.fixture(scope="module")
def measured() -> Iterator[Measured]:
    with training("streaming") as run, pytest.MonkeyPatch.context() as patch:
        pace, compute, executor = Pace(HOST_S, CARD_S), run.simulation.compute, run.session.executor
        patch.setattr(Event, "pace", pace)
        for module in (profile, session, live_memory):  # who tells what the host takes, or waits
            patch.setattr(module, "perf_counter", lambda: pace.now)
        # Else no events are asked for, since memory of the simulated card lies on a CPU.
        patch.setattr(executor.clocks, "_stamp", executor.store.device.stamp)
        found, carry_out = Measured({}, {}, [], [], []), ACTIONS[Run]
        ops: dict[str, int] = {}
        walk = _Call.run

        def counting(call, instruction):
            before = pace.launched
            carry_out(call, instruction)
            ops[instruction.region.key] = pace.launched - before

        def spin(cycles):
            found.delays[-1].append(cycles / SPIN_CYCLES_PER_S)
            pace.occupy(compute, found.delays[-1][-1])

        def walking(call, others):
            begun = max(compute.over_s, pace.now)
            walk(call, others)
            found.walked[-1] += max(compute.over_s, pace.now) - begun

        patch.setattr(_Call, "run", walking)
        patch.setitem(ACTIONS, Run, counting)
        patch.setattr(cuda, "spin", spin)
        for step in range(2 + ENOUGH):
            found.delays.append([])
            found.walked.append(0.0)
            counted = sum(run.session.meter.seconds().values())
            run.steps(1)
            found.counted.append(sum(run.session.meter.seconds().values()) - counted)
            if step == 1:
                costs = executor.clocks.costs(BARE, TransferModes())
                found.regions, found.ops = costs.regions, dict(ops)
        yield found


def test_a_region_takes_what_the_card_takes_though_the_host_is_slower(measured):
    assert {1, 2, 3} <= set(measured.ops.values())
    of_card = {key: CARD_S * count for key, count in measured.ops.items()}
    assert measured.regions == pytest.approx(of_card, abs=1e-9)


def test_compute_is_delayed_until_the_times_of_the_card_are_known(measured):
    first, *between, last = map(len, measured.delays)
    assert all(n > 0 for n in between)
    assert between == sorted(between, reverse=True)
    assert first == last == 0


def test_delays_are_counted_as_nothing_and_all_else_of_a_walk_is_counted(measured):
    delayed = map(sum, measured.delays)
    assert measured.counted == pytest.approx(
        [walked - seconds for walked, seconds in zip(measured.walked, delayed, strict=True)]
    )
