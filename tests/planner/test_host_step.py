"""Which updates the host may compute, what a step with them moves, when a plan has them, and that
its bound is no higher."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from dry_runs import SMALL
from traced_steps import adamw, adamw_by_foreach, named, traced

from zcompile.config import Config
from zcompile.errors import ConfigInvalid
from zcompile.frontend.dry_run.plan import terms_of
from zcompile.ir.optimizer_step import ON_HOST, chunk_region
from zcompile.ir.schedule import SERIALS, Borrow, Run
from zcompile.ir.step import StepCall, StepTrace, joined
from zcompile.ir.types import SMALL_BYTES, EntryKind, EntryRef, Phase
from zcompile.ir.units import GiB, MiB
from zcompile.machine.cost import Costs, Line
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
from zcompile.planner.placement import (
    HOST,
    Group,
    Room,
    beside_updates,
    evaluate,
    fractions,
    operands_of_host_updates,
)
from zcompile.planner.simulator import simulate
from zcompile.runtime.session import Session
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
    together = {frozenset(demand.segments[n].phase for n in s): s_ for s, s_ in demand.together}
    assert together.keys() == {frozenset(Phase), frozenset({Phase.STEP, Phase.FORWARD})}
    least_s = together[frozenset({Phase.STEP, Phase.FORWARD})]
    return alone[Phase.STEP] + alone[Phase.FORWARD], least_s


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


def with_rows(step: StepTrace, awaits: bool) -> StepTrace:
    """The step with rows that read a value of the device, or none of which does."""

    def changed(call: StepCall) -> StepCall:
        rows = tuple(replace(row, awaits_compute=awaits) for row in call.schedule.rows)
        return replace(call, schedule=replace(call.schedule, rows=rows, serial=next(SERIALS)))

    return replace(step, calls=tuple(changed(c) if c.schedule.rows else c for c in step.calls))


def of_another_model(step: StepTrace) -> StepTrace:
    """The same step of entries that are others."""

    def other(ref: EntryRef) -> EntryRef:
        return ref._replace(number=ref.number + 1_000_000)

    calls = [
        StepCall(c.schedule, tuple(map(other, c.entries)), tuple(map(other, c.made)))
        for c in step.calls
    ]
    facts = {other(ref): replace(f, ref=other(ref)) for ref, f in step.facts.items()}
    return replace(step, calls=tuple(calls), facts=facts)


def in_micro_batches(step: StepTrace, count: int) -> StepTrace:
    passes = [c for c in step.calls if c.phase is not Phase.STEP]
    updates = [c for c in step.calls if c.phase is Phase.STEP]
    return replace(step, calls=(*passes * count, *updates), micro_batches=count)


def costs_at(step: StepTrace, device: float, host: float, **ways: bool) -> Costs:
    """Where forward takes 2 ms, backward 20 ms, and device and host, behind a bus that takes no
    time, need so many seconds for all updates."""
    terms = terms_of(Config(device="cpu", updates="fastest"), machine(1e12))
    costs = terms.costs()
    costs = replace(costs, ways=replace(costs.ways, **ways))
    regions, rows = {}, []
    for call in (with_host_updates(step) or step).calls:
        runs = [x.region for x in call.schedule.instructions if isinstance(x, Run)]
        whole_s = {Phase.FORWARD: 2e-3, Phase.BACKWARD: 20e-3}.get(call.phase, 0.0)
        for region in runs:
            regions |= {r.key: whole_s / len(runs) for r in region.parts or (region,) if whole_s}
        rows += [(call, row) for row in call.schedule.rows]
    every = [chunk_region(c.schedule.name, r, 0, r.numel) for c, r in rows]
    nbytes = sum(region.work.nbytes for region in every)
    alike = {}
    for region in every:
        like = region.like.removeprefix(ON_HOST)
        alike |= {like: Line(0.0, device / nbytes), f"{ON_HOST}{like}": Line(0.0, host / nbytes)}
    return replace(costs, regions=regions, alike=alike)


STEPS = {
    "one model": lambda step: step,
    "two in turn": lambda step: joined(step, of_another_model(step)),
    "micro-batches": lambda step: in_micro_batches(step, 3),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("awaits", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_step_takes_less_than_its_least(name, awaits, asynchronous):
    """With the host as fast as the device, faster and slower."""
    step = STEPS[name](with_rows(traced(), awaits))
    marked = with_host_updates(step)
    room, homes = evaluated_at(1e9).room, dict.fromkeys(step.facts, "host")
    arena = ArenaShare(4 * MiB, 4, MiB)
    made = arranged(marked, homes, arena)
    for host, ends in itertools.product((1e-3, 4e-3, 20e-3), (False, True)):
        costs = costs_at(step, 4e-3, host, asynchronous=asynchronous, updates_end_steps=ends)
        demand = demand_on_host(step, costs)
        least = bound(demand, costs.machine.links, reaching(room)).seconds
        assert simulate(made, costs, homes).step_s >= least * 0.9999, (host, ends)
        assert least >= sum(s.compute_s for s in demand.segments) * 0.9999


def windows(step: StepTrace, **ways: bool) -> list[tuple[int, ...]]:
    """The segments in which rows may be computed, the whole step aside."""
    demand = demand_on_host(step, costs_at(step, 1e-3, 1e-3, **ways))
    return [several for several, _ in demand.together if len(several) < len(demand.segments)]


def test_a_row_has_from_the_last_write_of_its_gradient_to_the_next_read_of_its_parameter():
    """Segments of the steps: forward, backward, ..., step; those of two models in turn."""
    free, awaiting = (with_rows(traced(), awaits) for awaits in (False, True))
    three = in_micro_batches(free, 3)
    assert windows(free, asynchronous=True) == []
    assert windows(three, asynchronous=True) == [(0, 5, 6)]
    assert windows(in_micro_batches(awaiting, 3), asynchronous=True) == [(0, 6)]
    assert windows(three, asynchronous=False) == [(0, 6)]
    assert windows(three, asynchronous=True, updates_end_steps=True) == [(5, 6)]
    assert windows(three, asynchronous=False, updates_end_steps=True) == [(6,)]
    both = joined(awaiting, of_another_model(awaiting))
    assert windows(both, asynchronous=True) == [(0, 1, 2, 3, 5), (0, 2, 3, 4, 5)]


def ends_of_backward_and_of_the_first_row(awaits: bool) -> tuple[float, float]:
    """Seconds until backward is over, and until the host has submitted a row."""
    step = with_host_updates(with_rows(traced(), awaits))
    homes = dict.fromkeys(step.facts, "host")
    made = arranged(step, homes, ArenaShare(4 * MiB, 4, MiB))
    moments = simulate(made, costs_at(step, 1e-3, 1e-3), homes).moments
    phases = [call.phase for call in made.calls]
    backward = [m.end_s for m in moments if m.is_work and phases[m.call] is Phase.BACKWARD]
    rows = [m.end_s for m in moments if m.is_work and m.instruction.effects.on_host]
    return max(backward), min(rows)


def test_the_host_waits_for_what_a_row_reads_of_the_device():
    """As the factor of clipping, which is over once backward is; nothing else does it wait for."""
    backward_s, row_s = ends_of_backward_and_of_the_first_row(awaits=True)
    assert row_s >= backward_s * (1 - 1e-9)
    backward_s, row_s = ends_of_backward_and_of_the_first_row(awaits=False)
    assert row_s < backward_s


def test_the_record_of_a_step_tells_rows_that_read_a_value_of_the_device():
    """A fused optimizer counts its steps in tensors there."""
    (update,) = (c for c in traced().calls if c.phase is Phase.STEP)
    assert all(row.awaits_compute for row in update.schedule.rows)

    class Streams:
        is_on_host = staticmethod(lambda memory: memory.is_cpu)

    class Beside:
        streams = Streams()

    class Here:
        streams = None

    class OnDevice:
        device = Beside()

    class OnHost:
        device = Here()

    there, number = torch.empty((), device="meta"), torch.ones(())
    assert Session.any_on_device(OnDevice(), [1.0, number, there])
    assert not Session.any_on_device(OnDevice(), [1.0, number])
    assert not Session.any_on_device(OnHost(), [1.0, number])


@pytest.mark.slow
def test_a_factor_of_clipping_is_awaited_and_numbers_are_not():
    (update,) = (c for c in traced(adamw_by_foreach).calls if c.phase is Phase.STEP)
    assert not any(row.awaits_compute for row in update.schedule.rows)
    (update,) = (c for c in traced(clipped).calls if c.phase is Phase.STEP)
    assert any(row.awaits_compute for row in update.schedule.rows)


class Clipped(torch.optim.AdamW):
    """Clips gradients before its step."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


def clipped(params):
    return Clipped(params, foreach=True)


def test_a_placement_lets_updates_go_on_beside_what_they_can():
    free, awaiting = (with_host_updates(with_rows(traced(), a)) for a in (False, True))
    rooms = [Room({"host": GiB}, updates_end_steps=ends) for ends in (False, True)]
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    assert beside_updates(free, rooms[0]) == {forward: 1.0, backward: 1.0}
    assert beside_updates(awaiting, rooms[0]) == {forward: 1.0}
    assert beside_updates(free, rooms[1]) == {backward: 1.0}
    assert beside_updates(in_micro_batches(free, 4), rooms[0]) == {forward: 0.25, backward: 0.25}
    assert beside_updates(without_host_updates(free), rooms[0]) == {}


@pytest.mark.parametrize(
    ("beside", "hidden_s"),
    [({}, 0.0), ({Phase.FORWARD: 0.25}, 1.0), ({Phase.FORWARD: 0.5, Phase.BACKWARD: 0.5}, 5.0)],
)
def test_seconds_of_the_host_are_hidden_by_parts_of_forward_and_backward(beside, hidden_s):
    (ref,) = refs = (EntryRef(1),)
    group = Group(MiB, refs, {"host": {(Phase.STEP, HOST): 9.0}})
    compute = {Phase.FORWARD: 4.0, Phase.BACKWARD: 6.0, Phase.STEP: 0.5}
    seconds, binding = evaluate([group], {ref: "host"}, compute, {}, beside)
    assert seconds == pytest.approx(10 + 9 - hidden_s)
    assert binding[Phase.STEP] == HOST
    best = fractions([group], {"host": GiB}, compute, {}, 0, beside)
    assert best.seconds == pytest.approx(seconds)
