"""What things cost: predicted from work and machine, looked up where measured; when to replan."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from written import LOW, fetch, free, run, schedule

from zcompile.ir.types import NO_WORK, Phase, Region, Work
from zcompile.machine.cost import (
    LEAST_MEASURED_BYTES,
    Costs,
    call_name,
    line_through,
    measured,
    predicted_seconds,
    remeasured,
    replan_pays,
)
from zcompile.machine.model import Compute, Link, Machine

COMPUTE = Compute({"float32": 100.0, "bfloat16": 400.0}, 10.0, 0.5)
MACHINE = Machine("paper", {}, {"h2d": Link("h2d", 1e6), "d2h": Link("d2h", 1e6)}, COMPUTE)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (NO_WORK, 0.0),
        (Work(nbytes=50, ops=1), 5.0 + 0.5),
        (Work(flops=1000, dense_nbytes=20, ops=1), 10.0 + 0.5),
        (Work(flops=1000, dense_nbytes=20, ops=1, dtype="bfloat16"), 2.5 + 0.5),
        (Work(flops=100, dense_nbytes=200, ops=1), 20.0 + 0.5),
        (Work(flops=1000, dense_nbytes=20, nbytes=50, ops=3), 10.0 + 5.0 + 1.5),
        (Work(flops=1000, dtype="float64"), 10.0),
    ],
)
def test_predicted_seconds(work, seconds):
    assert predicted_seconds(work, COMPUTE) == seconds


def test_a_region_that_ran_costs_what_it_took():
    costs = Costs(MACHINE, regions={"seen": 2.0})
    assert costs.region_seconds(Region("seen", "", tuple, Work(flops=1000))) == 2.0
    assert costs.region_seconds(Region("new", "", tuple, Work(flops=1000))) == 10.0


def test_an_instruction_of_another_size_costs_what_the_nearest_did():
    costs = Costs(MACHINE, issues={("fetch", 512): 1.0, ("fetch", 4096): 3.0})
    seconds = [
        costs.issue_seconds(fetch(LOW, 0, nbytes=n).effects) for n in (512, 513, 4000, 1 << 20)
    ]
    assert seconds == [1.0, 1.0, 3.0, 3.0]
    assert costs.issue_seconds(free(LOW, 1).effects) == 0.0


def test_a_gap_is_known_by_what_two_schedules_compute():
    one, other = schedule(run()), schedule(run(), phase=Phase.BACKWARD)
    costs = Costs(MACHINE, gaps={(call_name(one), call_name(other)): 0.25})
    replanned = replace(one, serial=one.serial + 100, instructions=())
    assert costs.gap_seconds(replanned, other) == 0.25
    assert costs.gap_seconds(other, one) == 0.0


def test_a_measured_rate_is_believed_bit_by_bit():
    link, nbytes = Link("h2d", 100e6), 1 << 30
    seen = [link := measured(link, nbytes, nbytes / 50e6) for _ in range(12)]
    rates = [x.bytes_per_s for x in seen]
    assert rates == sorted(rates, reverse=True)
    assert 75e6 < rates[0] < 100e6
    assert rates[-1] == pytest.approx(50e6, rel=0.02)


@given(st.floats(1e3, 1e12), st.integers(LEAST_MEASURED_BYTES, 1 << 40), st.floats(1e-6, 1e6))
def test_an_estimate_lies_between_what_was_believed_and_what_was_seen(rate, nbytes, busy_s):
    estimate = measured(Link("h2d", rate), nbytes, busy_s).bytes_per_s
    low, high = sorted((rate, nbytes / busy_s))
    assert low * (1 - 1e-9) <= estimate <= high * (1 + 1e-9)


def test_a_little_traffic_says_nothing_about_a_link():
    assert measured(Link("h2d", 1e6), LEAST_MEASURED_BYTES - 1, 1e3) == Link("h2d", 1e6)


def test_only_links_that_were_in_use_change():
    found = remeasured(MACHINE, {"h2d": 1 << 30}, {"h2d": 1.0})
    assert found.links["d2h"] == MACHINE.links["d2h"]
    assert found.links["h2d"].bytes_per_s > 1e6
    assert found.compute == MACHINE.compute


@pytest.mark.parametrize(
    ("step_s", "replanned_s", "planning_s", "left", "pays"),
    [
        (1.0, 1.0, 0.0, None, False),
        (1.0, 0.98, 0.0, None, False),  # within what steps differ by themselves
        (1.0, 0.9, 1.0, None, True),
        (1.0, 0.9, 6.0, None, False),  # earned back after 60 steps only
        (1.0, 0.9, 1.0, 5, False),  # the run ends before
        (1.0, 1.5, 0.0, None, False),
    ],
)
def test_replanning_pays_if_it_is_earned_back(step_s, replanned_s, planning_s, left, pays):
    assert replan_pays(step_s, replanned_s, planning_s, left) is pays


def test_a_chunk_of_another_size_costs_by_what_others_like_it_took():
    line = line_through([(1000, 2e-3), (3000, 4e-3)])
    assert line.fixed_s == 2e-3
    assert 2 * line.fixed_s + 4000 * line.s_per_byte == pytest.approx(6e-3)
    region = Region("other", "", lambda: (), Work(nbytes=2000), "adam float32!")
    costs = Costs(MACHINE, alike={"adam float32!": line})
    assert costs.region_seconds(region) == pytest.approx(3e-3)
    assert Costs(MACHINE).region_seconds(region) != pytest.approx(3e-3)


def test_a_joined_region_costs_what_its_parts_do():
    known, other = Region("a", "mm", call=tuple), Region("b", "add", call=tuple, work=Work(ops=2))
    joined = Region("c", "2 joined", call=tuple, work=Work(ops=9), parts=(known, other, known))
    costs = Costs(MACHINE, regions={"a": 3.0}, launches={"a": 0.5}, idle={"a": 2.0})
    assert costs.region_seconds(joined) == 6.0 + costs.region_seconds(other)
    assert costs.idle_seconds(joined) == 4.0 + costs.idle_seconds(other)
    assert costs.launch_seconds(joined) == 1.0 + costs.launch_seconds(other)
