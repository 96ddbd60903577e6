"""Which updates the host may compute, what a step with them moves, when a plan has them, and that
its bound is no higher."""

import functools
from dataclasses import replace

import pytest
from dry_runs import SMALL
from traced_steps import adamw, adamw_by_foreach, named, traced

from zcompile.config import Config
from zcompile.errors import ConfigInvalid
from zcompile.frontend.dry_run.plan import terms_of
from zcompile.ir.optimizer_step import chunk_region
from zcompile.ir.schedule import Borrow, Run
from zcompile.ir.types import SMALL_BYTES, EntryKind, Phase
from zcompile.ir.units import GiB, MiB
from zcompile.machine.cost import Costs
from zcompile.machine.model import Machine, MachineInvalid
from zcompile.passes.arrange import ArenaShare, arranged
from zcompile.planner import outlook
from zcompile.planner.bounds import bound, demand_of
from zcompile.planner.host_step import (
    demand_on_host,
    order_of_need,
    reaching,
    updated_on_host,
    with_host_updates,
    without_host_updates,
)
from zcompile.planner.placement import HOST, operands_of_host_updates
from zcompile.planner.simulator import simulate
from zcompile.verify.schedule import verify_schedule


def machine(bus: float, host: float = 100e9) -> Machine:
    """With a device that holds little, a bus of so many bytes per second, and a host that updates
    at so many."""
    links = {
        name: replace(link, bytes_per_s=bus, latency_s=1e-6)
        for name, link in SMALL.links.items()
        if name in ("h2d", "d2h")
    }
    tiers = {"device": 3 * MiB, "host": GiB}
    return replace(SMALL, tiers=tiers, links=links, host_update_bytes_per_s=host)


@functools.cache
def evaluated_at(bus: float, updates: str = "fastest") -> outlook.Evaluation:
    return evaluated(machine(bus), updates)


def evaluated(made: Machine, updates: str = "fastest", make=adamw) -> outlook.Evaluation:
    terms = replace(terms_of(Config(device="cpu", updates=updates), made), bounded=True)
    assert terms.ways.asynchronous
    return outlook.evaluated(traced(make), terms, 2 * MiB, prices=False)


@pytest.mark.parametrize("make", [adamw, adamw_by_foreach])
@pytest.mark.slow
def test_large_parameters_may_be_updated_there(make):
    step = traced(make)
    marked = with_host_updates(step)
    homes = dict.fromkeys(step.facts, "host")
    large = {ref for ref in updated_on_host(marked, homes)}
    assert named(step, large) == {
        fact.name
        for fact in step.facts.values()
        if fact.kind is EntryKind.PARAM and fact.nbytes > SMALL_BYTES and not fact.ref.is_copy
    }
    assert without_host_updates(step) is step
    back = without_host_updates(marked)
    assert not any(row.on_host for call in back.calls for row in call.schedule.rows)


def test_of_a_row_all_operands_rest_there_or_the_device_computes_it():
    step = traced()
    marked = with_host_updates(step)
    homes = dict.fromkeys(step.facts, "host")
    arena = ArenaShare(4 * MiB, 4, MiB)
    on_host = updated_on_host(marked, homes)
    weight = next(iter(on_host))
    (state, *_) = (
        ref
        for ref, first in operands_of_host_updates(marked).items()
        if first == weight and step.facts[ref].kind is EntryKind.STATE
    )
    for tier in ("disk", "device"):
        there = {**homes, state: tier}
        assert updated_on_host(marked, there) == on_host - {weight}
        made = arranged(marked, there, arena)
        (call,) = (c for c in made.calls if c.phase is Phase.STEP)
        verify_schedule(call.schedule)
        moved = {call.entries[x.home.entry] for x in call.schedule.effects if x.is_transfer}
        assert weight in moved
        assert not moved & (on_host - {weight})
        lent = [x for x in call.schedule.instructions if isinstance(x, Borrow) and x.on_host]
        assert weight not in {call.entries[x.entry] for x in lent}
        runs = [x for x in call.schedule.instructions if isinstance(x, Run)]
        assert any(x.region.on_host for x in runs)
        assert any(not x.region.on_host for x in runs)


@pytest.mark.slow
def test_a_fast_bus_lets_the_device_update():
    assert not evaluated(machine(1e12, host=1e9)).plan.on_host


def test_a_slow_bus_lets_the_host_update():
    slow = evaluated_at(1e9)
    assert slow.plan.on_host
    without = evaluated_at(1e9, "auto")
    assert not without.plan.on_host
    assert slow.timeline.step_s < without.timeline.step_s / 1.2
    assert slow.bound.seconds <= slow.timeline.step_s * 1.0001
    assert slow.floor.seconds <= slow.bound.seconds * 1.0001
    assert slow.bound.seconds <= without.bound.seconds


def test_operands_of_a_row_rest_together():
    found = evaluated_at(1e9)
    homes, step = found.plan.placement.homes, found.plan.step
    for call in step.calls:
        for row in call.schedule.rows:
            if row.on_host:
                assert {homes[call.entries[c.entry]] for c in row.columns} == {"host"}
    assert found.lanes_s[Phase.STEP][HOST] > 0


def test_the_host_takes_its_time_beside_compute():
    """The same plan on a host that is half as fast takes longer by what the host computes
    longer."""
    found = evaluated_at(1e9)
    homes, taken = found.plan.placement.homes, []
    for rate in (1e9, 5e8):
        terms = terms_of(Config(device="cpu", updates="fastest"), machine(1e9, host=rate))
        taken.append(simulate(found.plan.step, terms.costs(), homes).step_s)
    nbytes = sum(
        x.region.work.nbytes
        for call in found.plan.step.calls
        for x in call.schedule.instructions
        if isinstance(x, Run) and x.region.on_host
    )
    assert nbytes > MiB
    assert taken[1] - taken[0] == pytest.approx(nbytes / 5e8 - nbytes / 1e9, rel=0.02)


def updating(found: outlook.Evaluation, costs: Costs) -> tuple[float, float]:
    """Seconds of all that a step computes, and of what the host computes of that."""
    regions = [
        (costs.region_seconds(x.region), x.region.on_host)
        for call in found.plan.step.calls
        for x in call.schedule.instructions
        if isinstance(x, Run)
    ]
    return sum(s for s, _ in regions), sum(s for s, on_host in regions if on_host)


@pytest.mark.parametrize("host", [1e8, 1e9])
def test_what_the_host_computes_goes_on_beside_the_next_forward(host):
    """A commit would wait for all of it, so that the forward begins later."""
    found = evaluated_at(1e9)
    homes, step = found.plan.placement.homes, found.plan.step
    costs = terms_of(Config(device="cpu", updates="fastest"), machine(1e9, host=host)).costs()
    committing = replace(costs, ways=replace(costs.ways, updates_end_steps=True))
    beside, after = (simulate(step, each, homes) for each in (costs, committing))
    assert beside.step_s < after.step_s
    assert after.phases[Phase.STEP] >= 0.9 * updating(found, costs)[1], "some beside backward"
    assert beside.phases[Phase.STEP] < after.phases[Phase.STEP] / 10
    assert beside.step_s >= updating(found, costs)[1]
    assert bounded(found, costs) <= beside.step_s * 1.0001
    assert bounded(found, committing) <= after.step_s * 1.0001
    assert bounded(found, costs) <= bounded(found, committing)


def bounded(found: outlook.Evaluation, costs: Costs) -> float:
    """The least seconds of a step at these costs, wherever the host updates."""
    demand = demand_on_host(traced(), costs)
    return bound(demand, costs.machine.links, reaching(found.room)).seconds


def test_where_compute_takes_the_cores_of_the_host_one_of_them_goes_on_at_a_time():
    found = evaluated_at(1e9)
    costs = terms_of(Config(device="cpu", updates="fastest"), machine(1e9)).costs()
    costs = replace(costs, ways=replace(costs.ways, asynchronous=False))
    taken = simulate(found.plan.step, costs, found.plan.placement.homes)
    whole, on_host = updating(found, costs)
    assert on_host > 0
    assert taken.step_s >= whole
    assert bounded(found, costs) <= taken.step_s * 1.0001
    free = replace(costs, regions={**costs.regions, **free_on_host(found)})
    assert simulate(found.plan.step, free, found.plan.placement.homes).step_s < taken.step_s


def free_on_host(found: outlook.Evaluation) -> dict[str, float]:
    """Region that the host computes -> no seconds."""
    return {
        x.region.key: 0.0
        for call in found.plan.step.calls
        for x in call.schedule.instructions
        if isinstance(x, Run) and x.region.on_host
    }


def test_rows_come_in_the_order_in_which_the_forward_reads_their_parameters():
    step = evaluated_at(1e9).plan.step
    need = order_of_need(step)
    (forward,) = (c for c in step.calls if c.phase is Phase.FORWARD)
    fetched = [
        forward.entry_of(x.home)
        for x in forward.schedule.effects
        if x.home is not None and x.home.reads
    ]
    assert sorted(need, key=need.__getitem__) == list(dict.fromkeys(fetched))
    assert evaluated_at(1e9).plan.on_host <= need.keys()


def test_auto_keeps_the_bits_of_the_device():
    assert not evaluated_at(1e9, "auto").plan.on_host
    assert not Config(updates="auto").updates_on_host("cuda")
    assert Config(updates="auto").updates_on_host("cpu")
    assert Config(updates="fastest").updates_on_host("cuda")
    assert not Config(updates="device").updates_on_host("cpu")
    with pytest.raises(ConfigInvalid, match="fastest"):
        Config(updates="host")


def test_a_host_that_computes_nothing_is_no_machine():
    with pytest.raises(MachineInvalid, match="host_update_bytes_per_s"):
        machine(1e9, host=0)


def step_seconds_at(host: float) -> tuple[float, float]:
    """Least seconds of updates with the forward behind them: on the device alone, and with a host
    of that rate."""
    terms = terms_of(Config(device="cpu", updates="fastest"), machine(1e9, host=host))
    costs, step = terms.costs(), traced()
    alone = demand_of(step, costs.region_seconds, machine=costs.machine).phases_s
    demand = demand_on_host(step, costs)
    ((update, forward, together_s),) = demand.pairs
    assert [demand.segments[n].phase for n in (update, forward)] == [Phase.STEP, Phase.FORWARD]
    return alone[Phase.STEP] + alone[Phase.FORWARD], together_s


def test_the_bound_counts_updates_as_device_and_host_share_them():
    """The slower the host, the nearer to what the device takes alone; where both are as fast, no
    less than half."""
    alone, idle = step_seconds_at(1e3)
    assert idle == pytest.approx(alone, rel=1e-3)
    shared = [step_seconds_at(rate)[1] for rate in (1e9, 1e10, 1e11, 1e15)]
    assert shared == sorted(shared, reverse=True)
    assert alone > shared[0] > shared[-1] > 0
    updated = alone - shared[-1]
    nbytes = sum(
        chunk_region("", row.resting_on_host(), 0, row.numel).work.nbytes
        for call in with_host_updates(traced()).calls
        for row in call.schedule.rows
        if row.on_host
    )
    rate = nbytes / updated  # at which the host takes as long for its rows as the device would
    half = step_seconds_at(rate)[1]
    assert half >= alone / 2
    assert half < alone
