"""Entries of one size change places where compute waits for one of them."""

import functools
import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from dry_runs import SMALL
from torch import nn

from zcompile.config import Config
from zcompile.frontend.dry_run.plan import terms_of, trace
from zcompile.ir.step import StepTrace
from zcompile.ir.types import EntryKind, EntryRef
from zcompile.ir.units import GiB, KiB, MiB
from zcompile.machine.cost import Costs, TransferModes
from zcompile.passes.arrange import ArenaShare
from zcompile.planner import exchanges
from zcompile.planner.bounds import demand_of
from zcompile.planner.exchanges import (
    ALONE_IN_VAIN,
    IN_VAIN,
    REPLAYS,
    ROUNDS,
    TRIES,
    VAIN_ROUNDS,
    exchanged,
)
from zcompile.planner.host_step import with_host_updates
from zcompile.planner.placement import Placement, Room, beside_updates, evaluate, group
from zcompile.planner.replay import Replay
from zcompile.planner.simulator import simulate, step_seconds
from zcompile.planner.step_plan import StepPlan, as_planned, with_homes
from zcompile.verify.schedule import verify_schedule

LAYERS, WIDTH, BATCH = 6, 160, 64
NBYTES = WIDTH * WIDTH * 4
COSTS = Costs(SMALL, TransferModes())
WINDOW = 4 * NBYTES
ROOM = Room({"device": 64 * MiB, "host": GiB, "disk": GiB})


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.layers(x)).square().mean()


@functools.cache
def recorded() -> StepTrace:
    """A step of linear layers, traced for a device that holds it all."""
    torch._dynamo.reset()
    machine = replace(SMALL, tiers={**SMALL.tiers, "device": 64 * MiB, "host": GiB})
    terms = replace(terms_of(Config(device="cpu"), machine), bounded=True)
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)
    return trace(Stack(), (torch.randn(BATCH, WIDTH),), terms, sgd, 1).step


def ref_of(name: str) -> EntryRef:
    return next(ref for ref, fact in recorded().facts.items() if fact.name == name)


def seconds(made, homes) -> float:
    return step_seconds(made, COSTS, homes)


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch) -> None:
    """No exchanges are replayed."""
    monkeypatch.setattr(exchanges, "ROUNDS", 0)


@pytest.fixture
def replayed(one_by_one, monkeypatch) -> None:
    """Exchanges are replayed, and none is tried by itself."""
    monkeypatch.setattr(exchanges, "ROUNDS", ROUNDS)
    monkeypatch.setattr(exchanges, "TRIES", 0)


def exchanged_at(step: StepTrace, plan: StepPlan, asked, **how) -> StepPlan:
    found, _ = exchanged(step, as_planned(step, plan), plan, COSTS, ROOM, asked, **how)
    return found


def planned(*on_disk: str, step: StepTrace | None = None) -> StepPlan:
    """A plan with those entries on disk, and all that is large else on the host."""
    step = recorded() if step is None else step
    large = {ref: fact for ref, fact in step.facts.items() if fact.nbytes >= NBYTES}
    homes = {ref: "host" if ref in large else "device" for ref in step.facts}
    homes |= {ref: "disk" for ref, fact in large.items() if fact.name in on_disk}
    arena = ArenaShare(WINDOW, 64, 16 * KiB, nbytes=64 * MiB)
    blank = StepPlan(Placement(homes, 0.0, 0.0), arena, step, 0.0)
    return with_homes(blank, step, homes, seconds)


FIRST_TWO = [
    f"layers.{layer}.weight{of}" for layer in (0, 1) for of in ("", ".grad", ".momentum_buffer")
]
"""All that two updates read rests on disk, and nothing of the others."""


def bytes_on(plan: StepPlan) -> Counter[str]:
    counted = Counter[str]()
    for ref, home in plan.placement.homes.items():
        counted[home] += recorded().facts[ref].nbytes
    return counted


def test_what_is_waited_for_changes_places_with_what_is_not():
    plan = planned(*FIRST_TWO)
    found = exchanged_at(recorded(), plan, seconds)
    assert found.seconds < 0.95 * plan.seconds
    assert found.seconds == seconds(found.step, found.placement.homes)
    assert bytes_on(found) == bytes_on(plan)
    assert found.placement.homes != plan.placement.homes
    for call in found.step.calls:
        verify_schedule(call.schedule)


@pytest.mark.parametrize("gains", [0.9, 1.0])
def test_the_times_are_of_the_plan_that_is_returned(gains):
    plan, step = planned(*FIRST_TWO), recorded()
    takes_s, _ = asked(lambda n: plan.seconds * gains**n)
    found, times = exchanged(step, step, plan, COSTS, ROOM, takes_s)
    assert (found is plan) == (gains == 1.0)
    assert times == simulate(found.step, COSTS, found.placement.homes)


def not_asked(*_):
    raise AssertionError("an exchange was tried")


def test_nothing_is_tried_where_compute_hardly_waits(monkeypatch):
    plan = planned(*FIRST_TWO)

    def busy(made, costs, homes):
        times = simulate(made, costs, homes)
        return replace(times, step_s=(1 + exchanges.WAITS) * times.stall_s)

    monkeypatch.setattr(exchanges, "simulate", busy)
    assert exchanged_at(recorded(), plan, not_asked) is plan


def test_what_binds_is_told_of_where_entries_rest_then():
    plan = planned(*FIRST_TWO)
    found = exchanged_at(recorded(), plan, seconds)
    assert found is not plan
    compute = demand_of(recorded(), COSTS.region_seconds).phases_s
    groups, beside = group(recorded(), SMALL, ROOM), beside_updates(recorded(), ROOM)
    told = evaluate(groups, found.placement.homes, compute, SMALL.links, beside)
    assert (found.placement.seconds, found.placement.binding) == told
    assert found.placement.rounded_seconds <= found.placement.seconds


def asked(takes_s):
    """Simulations that take these seconds; and the homes that they were asked for."""
    homes_asked = []

    def of(made, homes) -> float:
        homes_asked.append(homes)
        return takes_s(len(homes_asked))

    return of, homes_asked


def test_the_search_ends_when_nothing_is_gained():
    plan = planned(*FIRST_TWO)
    vain, homes_asked = asked(lambda n: plan.seconds)
    assert exchanged_at(recorded(), plan, vain) is plan
    assert len(homes_asked) == IN_VAIN


def test_the_search_goes_on_for_longer_where_nothing_is_replayed():
    plan = planned(*FIRST_TWO)
    vain, homes_asked = asked(lambda n: plan.seconds)
    reaching = replace(plan, arena=replace(plan.arena, reach=True))
    assert exchanged_at(recorded(), reaching, vain) is reaching
    assert IN_VAIN < len(homes_asked) <= ALONE_IN_VAIN


def test_the_search_ends_after_some_tries_even_if_each_gains():
    plan = planned(*FIRST_TWO)
    better, homes_asked = asked(lambda n: plan.seconds * 0.9**n)
    found = exchanged_at(recorded(), plan, better)
    assert len(homes_asked) == TRIES
    assert found.placement.homes == homes_asked[-1]
    unlike = {tuple(homes[ref] for ref in recorded().facts) for homes in homes_asked}
    assert len(unlike) == TRIES


def test_each_exchange_is_of_two_entries_of_one_size():
    plan = planned(*FIRST_TWO)
    vain, homes_asked = asked(lambda n: plan.seconds)
    exchanged_at(recorded(), plan, vain)
    for homes in homes_asked:
        moved = [ref for ref, home in plan.placement.homes.items() if homes[ref] != home]
        assert [recorded().facts[ref].nbytes for ref in moved] == [NBYTES, NBYTES]
        assert {homes[ref] for ref in moved} == {"host", "disk"}


def with_pinned(*pinned: EntryRef) -> StepTrace:
    facts = recorded().facts
    return replace(
        recorded(), facts=facts | {ref: replace(facts[ref], pinned=True) for ref in pinned}
    )


def test_operands_of_one_update_are_not_exchanged_with_each_other():
    """Compute waits for the last of them, whichever that is."""
    others = [r for r, f in recorded().facts.items() if not f.name.startswith("layers.0.weight")]
    step = with_pinned(*others)
    plan = planned("layers.0.weight.momentum_buffer", step=step)
    waits = simulate(plan.step, COSTS, plan.placement.homes)
    assert waits.stall_s * exchanges.WAITS > waits.step_s
    assert exchanged_at(step, plan, not_asked) is plan


def test_entries_of_different_sizes_are_not_exchanged():
    of = ("layers.0.weight", "wide.weight")
    others = [ref for ref, fact in recorded().facts.items() if not fact.name.startswith(of)]
    step = with_pinned(*others)
    plan = planned(*FIRST_TWO, step=step)
    assert exchanged_at(step, plan, not_asked) is plan


def test_what_is_pinned_stays():
    pinned = ref_of("layers.0.weight")
    step = with_pinned(pinned)
    plan = planned(*FIRST_TWO, step=step)
    better, homes_asked = asked(lambda n: plan.seconds * 0.9**n)
    exchanged_at(step, plan, better)
    assert homes_asked
    assert {homes[pinned] for homes in homes_asked} == {"disk"}


def test_operands_of_updates_of_the_host_rest_there_together():
    marked = with_host_updates(recorded(), {ref_of("layers.5.weight")})
    assert marked is not None
    plan = replace(planned(*FIRST_TWO, step=marked), on_host=frozenset({ref_of("layers.5.weight")}))
    better, homes_asked = asked(lambda n: plan.seconds * 0.9**n)
    exchanged_at(recorded(), plan, better)
    assert homes_asked
    of_host = [r for r, f in recorded().facts.items() if f.name.startswith("layers.5.weight")]
    assert len(of_host) == 3
    assert {homes[ref] for homes in homes_asked for ref in of_host} == {"host"}


def test_a_commit_counts():
    """What leaves the disk is written there by every commit."""
    plan = planned(*FIRST_TWO)
    lasting = [r for r, f in recorded().facts.items() if f.kind is not EntryKind.GRAD]

    def committed(homes) -> int:
        return sum(recorded().facts[ref].nbytes for ref in lasting if homes[ref] != "disk")

    better, homes_asked = asked(lambda n: plan.seconds * 0.999**n)
    found = exchanged_at(recorded(), plan, better, commit_bytes_per_s=1.0)
    assert any(committed(homes) > committed(plan.placement.homes) for homes in homes_asked)
    assert committed(found.placement.homes) <= committed(plan.placement.homes)


@pytest.mark.parametrize("kind", [EntryKind.PARAM, EntryKind.STATE, EntryKind.GRAD])
def test_of_one_update_all_operands_are_waited_for_together(kind):
    """The operand that came last is the one that is waited for; any of them may be exchanged."""
    plan = planned(*FIRST_TWO)
    vain, homes_asked = asked(lambda n: plan.seconds)
    exchanged_at(recorded(), plan, vain)
    kinds = {
        recorded().facts[ref].kind
        for homes in homes_asked
        for ref, home in plan.placement.homes.items()
        if home == "disk" != homes[ref]
    }
    assert kind in kinds


def costs_at(asynchronous: bool = False, straight: bool = False) -> Costs:
    ways = TransferModes(asynchronous=asynchronous, straight_read=straight, straight_write=straight)
    return Costs(SMALL, ways)


@pytest.mark.parametrize("costs", [costs_at(), costs_at(straight=True), costs_at(True)])
def test_a_replay_is_near_the_simulation_and_tells_which_homes_are_better(costs):
    plan, draw = planned(*FIRST_TWO), random.Random(0)
    replay = Replay(plan.step, costs, plan.placement.homes)
    large = [ref for ref, fact in recorded().facts.items() if fact.nbytes >= NBYTES]
    rows = []
    for far in (0, 0.2, 0.4, 0.6, 0.8, 1):
        homes = plan.placement.homes | {
            ref: "disk" if draw.random() < far else "host" for ref in large
        }
        rows.append((replay.seconds(homes), step_seconds(plan.step, costs, homes)))
    for told, simulated in rows:
        assert told == pytest.approx(simulated, rel=0.15)
    for (told, simulated), (other, otherwise) in itertools.combinations(rows, 2):
        if simulated > 1.2 * otherwise:
            assert told > other


def test_where_one_link_carries_everything_a_replay_is_as_exact_as_the_simulation():
    """Nothing is on disk, so nothing passes the ring in pieces."""
    plan = planned()
    told = Replay(plan.step, COSTS, plan.placement.homes).seconds(plan.placement.homes)
    assert told == pytest.approx(plan.seconds, rel=1e-3)


def test_what_replays_find_is_faster_and_takes_as_much_of_each_tier(replayed):
    plan = planned(*FIRST_TWO)
    found = exchanged_at(recorded(), plan, seconds)
    assert found.seconds < 0.97 * plan.seconds
    assert found.seconds == seconds(found.step, found.placement.homes)
    assert bytes_on(found) == bytes_on(plan)
    for call in found.step.calls:
        verify_schedule(call.schedule)
    again = exchanged_at(recorded(), plan, seconds)
    assert again.placement.homes == found.placement.homes


@pytest.mark.parametrize(("gains", "most"), [(1.0, VAIN_ROUNDS), (0.9, ROUNDS)])
def test_the_simulator_judges_replays_some_times(replayed, gains, most):
    """It has the last word: what it does not find faster is not taken."""
    plan = planned(*FIRST_TWO)
    takes_s, homes_asked = asked(lambda n: plan.seconds * gains**n)
    found = exchanged_at(recorded(), plan, takes_s)
    assert 0 < len(homes_asked) <= most
    assert found.placement.homes == (homes_asked[-1] if gains < 1 else plan.placement.homes)


@pytest.mark.parametrize(("instructions", "count"), [(400_000, REPLAYS), (1, 1)])
def test_of_a_long_schedule_fewer_exchanges_are_replayed(
    replayed, monkeypatch, instructions, count
):
    plan, counts = planned(*FIRST_TWO), []

    def counted(replay, homes, alike, draw, count):
        counts.append(count)
        return dict(homes)

    monkeypatch.setattr(exchanges, "REPLAYED", instructions)
    monkeypatch.setattr(exchanges, "_replayed", counted)
    exchanged_at(recorded(), plan, asked(lambda n: plan.seconds)[0])
    assert counts[:VAIN_ROUNDS] == [count] * VAIN_ROUNDS


def test_entries_of_different_sizes_are_not_exchanged_by_replays(replayed):
    of = ("layers.0.weight", "wide.weight")
    others = [ref for ref, fact in recorded().facts.items() if not fact.name.startswith(of)]
    step = with_pinned(*others)
    plan = planned(*FIRST_TWO, step=step)
    assert exchanged_at(step, plan, not_asked) is plan


def test_nothing_is_replayed_where_instructions_depend_on_the_tier(replayed, monkeypatch):
    """Where compute reaches the host, what rests there is not fetched."""
    plan = planned(*FIRST_TWO)
    takes_s, homes_asked = asked(lambda n: plan.seconds)
    exchanged_at(recorded(), plan, takes_s)
    assert homes_asked
    reaching = replace(plan, arena=replace(plan.arena, reach=True))
    assert exchanged_at(recorded(), reaching, not_asked) is reaching
