"""The bound of a step that is cut between regions: by hand, and below every plan there is."""

import functools
import itertools
import random
from dataclasses import replace

import pytest
import torch
from bounded_steps import B, F, P, links, schedule
from dry_runs import SMALL
from sampled import sampled
from torch import nn

from zcompile.config import Config
from zcompile.errors import BudgetExceeded
from zcompile.frontend.dry_run.plan import terms_of, trace
from zcompile.ir.schedule import Fetch, Reduce, Run, Slot, Wait
from zcompile.ir.step import EntryFact, StepCall, StepTrace
from zcompile.ir.types import HELD, SMALL_BYTES, EntryKind, EntryRef, Layout, Phase, Region, aligned
from zcompile.ir.units import GiB, KiB, MiB
from zcompile.machine.cost import Costs, TransferModes
from zcompile.machine.model import TIERS, Compute
from zcompile.memory import step_footprint
from zcompile.memory.step_footprint import most_held, staying
from zcompile.passes.arrange import ArenaShare, arranged
from zcompile.planner import pieces
from zcompile.planner.bounds import Demand, Segment, bound, demand_of, least_seconds
from zcompile.planner.host_step import with_host_updates
from zcompile.planner.late_step import with_all_late, with_late_step
from zcompile.planner.pieces import demand_in_pieces
from zcompile.planner.placement import Room
from zcompile.planner.simulator import simulate, step_seconds

LARGE = 100 * P
"""Bytes of a weight that is not left out."""
assert LARGE > SMALL_BYTES
V, W = EntryRef(7), EntryRef(8)
FACTS = {ref: EntryFact(ref, str(ref), EntryKind.PARAM, LARGE, "host") for ref in (V, W)}


def reading(phase: Phase, *entries: int, made: int | None = None):
    """A schedule with one region of 1 s for each of these entries, which is the first to read it;
    the first region makes the gradient of `made`."""
    slot, layout, rows = Slot(0, LARGE), Layout((LARGE // 4,), (1,), 0, torch.float32), []
    for n in entries:
        rows += [Fetch(n, 0, LARGE, slot, n), Wait(n, slot, layout, n)]
        rows.append(Run(Region(f"{phase} {n}", "", lambda: ()), (n,), ()))
        if made is not None and n == entries[0]:
            rows.append(Reduce(10, made, nbytes=LARGE))
    return schedule(phase, *rows)


def seconds_of(step: StepTrace, room: Room, rate: float) -> tuple[float, float]:
    """The bound of a step in pieces, and of its whole segments."""
    demand, ways = demand_in_pieces(step, lambda region: 1.0), links(h2d=rate, d2h=rate)
    whole = replace(demand, pieces=None)
    return bound(demand, ways, room).seconds, bound(whole, ways, room).seconds


def test_what_a_region_reads_is_there_when_it_begins():
    """One of two weights fits, so the other comes while one is read or between them: in the next
    step as well. As one segment, the half that is there counts against each step."""
    step = StepTrace((StepCall(reading(F, 0, 1), (V, W)),), FACTS)
    room = Room({"device": LARGE, "host": GiB})
    assert seconds_of(step, room, LARGE / 10) == pytest.approx((20.0, 10.0))


def test_what_comes_last_does_not_come_beside_what_is_computed_behind_it():
    """Backward has no time in which the last weight of forward could come."""
    backward = schedule(B, Run(Region("b", "", lambda: ()), (), ()))
    ahead = StepCall(reading(F, 0, 1), (V, W))
    step = StepTrace((ahead, StepCall(backward, ())), FACTS)
    # Both weights must come; one of them may in backward and in the region of the other.
    inside, whole = seconds_of(step, Room({"device": LARGE, "host": GiB}), LARGE / 10)
    assert (inside, whole) == pytest.approx((20.0, 11.0))
    # Where both fit, and nothing moves, compute is all there is.
    assert seconds_of(step, Room({"device": 2 * LARGE, "host": GiB}), LARGE / 10) == (3.0, 3.0)


def test_a_gradient_leaves_once_it_is_made():
    """Two regions, of which the first makes a gradient and the second reads what is not there: what
    is sent meanwhile is not in the time before it."""
    backward = StepCall(reading(B, 0, 1, made=1), (V, W))
    forward = StepCall(reading(F, 0), (W.gradient,))
    facts = {**FACTS, W.gradient: replace(FACTS[W], ref=W.gradient, kind=EntryKind.GRAD)}
    demand = demand_in_pieces(StepTrace((forward, backward), facts), lambda region: 1.0)
    (gradient,) = demand.pieces.gradients
    made = [(s.phase, s.writes[gradient]) for s in demand.pieces.segments]
    assert made == [(F, 0), (F, 0), (B, 0), (B, LARGE), (B, 0)]


LAYERS, WIDTH, BATCH = 3, 160, 256
NBYTES = WIDTH * WIDTH * 4
CHUNK = 16 * KiB
MACHINE = replace(SMALL, compute=Compute({"float32": 2e9}, 4e9))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@functools.cache
def recorded(batch: int = BATCH) -> StepTrace:
    """A step of linear layers, traced for a device that holds it all."""
    torch._dynamo.reset()
    machine = replace(MACHINE, tiers={**SMALL.tiers, "device": 64 * MiB, "host": GiB})
    terms = replace(terms_of(Config(device="cpu"), machine), bounded=True)
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)
    return trace(Stack(), (torch.randn(batch, WIDTH),), terms, sgd, 1).step


@functools.cache
def most_live(batch: int) -> int:
    """The least room for what graphs hold."""
    return step_footprint._held(recorded(batch), frozenset())[0]


FEW = 16
"""A batch whose activations are small beside gradients, of which not all find room."""


@pytest.mark.parametrize("batch", [FEW, BATCH])
def test_gradients_that_stay_are_no_more_than_may_be_held(batch):
    for step in kinds_of_plans(batch):
        for beside in range(most_live(batch), most_live(batch) + 4 * NBYTES, NBYTES // 4):
            stays = sum(step.facts[ref].nbytes for ref in staying(step, beside))
            assert stays <= most_held(step, beside)


def test_the_last_gradient_is_made_beside_what_it_is_made_of():
    """There is room for three gradients, and not for what the last one is made of beside them."""
    small = LAYERS * WIDTH * 4  # of biases
    assert most_live(FEW) < 3 * NBYTES + small
    assert most_held(recorded(FEW), 3 * NBYTES + small) == 2 * NBYTES + small
    assert most_held(recorded(FEW), 4 * NBYTES) == 3 * NBYTES + small


def test_gradients_are_held_whole_or_not_at_all():
    assert step_footprint._most_that_fit([LARGE, LARGE, LARGE], 5 * LARGE // 2) == 2 * LARGE
    assert step_footprint._most_that_fit([LARGE, 3 * LARGE], 2 * LARGE) == LARGE
    assert step_footprint._most_that_fit([LARGE, 7], LARGE - 1) == 7
    assert step_footprint._most_that_fit([LARGE, LARGE], -1) == 0


def kinds_of_plans(batch: int = BATCH) -> list[StepTrace]:
    """The step as it was recorded, with all updates late, and with one."""
    step = recorded(batch)
    every = with_late_step(step, CHUNK)
    one = with_late_step(step, CHUNK, list(every.forwards)[:1])
    return [step, every.step, one.step]


def costs_at(scale: float, asynchronous: bool) -> Costs:
    slower = {n: replace(x, bytes_per_s=x.bytes_per_s * scale) for n, x in MACHINE.links.items()}
    return Costs(replace(MACHINE, links=slower), TransferModes(asynchronous=asynchronous))


BESIDE = 1 * MiB
"""Of the device, for what graphs hold: gradients of all layers, beside nothing else."""


def room_of(device: int, host: int, costs: Costs, reach: bool, held_bytes: int = BESIDE) -> Room:
    nbytes = {"device": device, "host": host, "disk": GiB}
    ring = costs.ways.ring_bytes
    return Room(nbytes, reach=reach, straight=reach, ring_bytes=ring, held_bytes=held_bytes)


def homes_by(choose, step: StepTrace, device: int, host: int) -> dict[EntryRef, str] | None:
    """Homes of large entries as `choose` has them, all else on the device; None, if a tier is
    overfull."""
    homes = {
        ref: choose() if fact.nbytes > SMALL_BYTES else "device" for ref, fact in step.facts.items()
    }
    for tier, most in (("device", device), ("host", host)):
        if sum(aligned(step.facts[ref].nbytes) for ref in homes if homes[ref] == tier) > most:
            return None
    return homes


def walked(step: StepTrace, homes, costs: Costs, device: int, reach: bool) -> float | None:
    """Seconds of a plan with those homes, and all that they leave to stream through; None, if it
    cannot be arranged."""
    resident = sum(aligned(step.facts[r].nbytes) for r, home in homes.items() if home == "device")
    arena = ArenaShare(device - resident, 64, CHUNK, reach=reach, nbytes=device)
    try:
        made = arranged(step, homes, arena)
    except BudgetExceeded:
        return None
    return min(step_seconds(made, costs, homes), simulate(made, costs, homes).step_s)


def least(costs: Costs, room: Room, batch: int = BATCH) -> tuple[float, float]:
    late = with_all_late(recorded(batch), CHUNK)
    demand = demand_in_pieces(late, costs.region_seconds, costs.machine, room.held_bytes)
    assert demand.pieces is not None
    found = (bound(of, costs.machine.links, room) for of in (demand, replace(demand, pieces=None)))
    inside, whole = (of.seconds for of in found)
    return inside, whole


@pytest.mark.parametrize("seed", sampled(range(12), 0, 1))
def test_no_plan_with_any_homes_is_below_the_bound(seed):
    """Plans of all kinds, with homes drawn at random, on machines drawn at random."""
    draw, tried = random.Random(seed), 0
    while tried < 12:
        asynchronous, reach = draw.random() < 0.5, draw.random() < 0.3
        costs = costs_at(draw.choice([0.02, 0.05, 0.1, 0.5]), asynchronous)
        device, host = draw.choice([2, 3, 5]) * NBYTES + 64 * KiB, draw.choice([2, 4, 8]) * NBYTES
        batch = draw.choice([FEW, BATCH])
        beside = most_live(batch) + draw.choice([0, 1, 2, 3]) * NBYTES // 2
        inside, whole = least(costs, room_of(device, host, costs, reach, beside), batch)
        assert inside >= whole
        weights = [draw.random() for _ in range(3)]
        for step in kinds_of_plans(batch):
            homes = homes_by(lambda of=weights: draw.choices(TIERS, of)[0], step, device, host)
            if homes is None:
                continue
            if draw.random() < 0.7:
                homes |= dict.fromkeys(staying(step, beside), HELD)
            taken = walked(step, homes, costs, device, reach)
            if taken is not None:
                tried += 1
                assert inside <= taken * (1 + 1e-6)


@pytest.mark.parametrize("kind", sampled([0, 1, 2], 1))
def test_no_placement_of_all_there_are_is_below_the_bound(kind):
    """Two tiers, on which the large entries rest in every way that there is room for."""
    step, costs = kinds_of_plans()[kind], costs_at(0.05, True)
    device, host = 3 * NBYTES + 64 * KiB, GiB
    inside, whole = least(costs, room_of(device, host, costs, False))
    large = sum(fact.nbytes > SMALL_BYTES for fact in step.facts.values())
    found = []
    for tiers in itertools.product(("device", "host"), repeat=large):
        homes = homes_by(iter(tiers).__next__, step, device, host)
        if homes is not None and tiers.count("device") in (1, 2):
            found.append(walked(step, homes, costs, device, False))
    made = [seconds for seconds in found if seconds is not None]
    assert len(made) > 20
    assert whole <= inside <= min(made) * (1 + 1e-6)


def test_a_stack_of_layers_takes_the_last_of_them_longer_in_pieces():
    """Links bind its forward, with late updates, and the last layer is computed once all has come:
    so much longer is the bound, and no more."""
    costs = costs_at(0.02, True)
    room = room_of(2 * NBYTES + 64 * KiB, GiB, costs, False)
    inside, whole = least(costs, replace(room, held_bytes=0))
    regions = {
        x.region.key: costs.region_seconds(x.region)
        for x in recorded().calls[0].schedule.effects
        if x.region is not None
    }
    layer_s = max(regions.values())
    assert whole + 0.9 * layer_s < inside < whole + 1.5 * layer_s


def test_updates_may_be_computed_at_any_time_before_their_parameters_are_read():
    late = with_all_late(recorded(), CHUNK)
    costs = costs_at(1.0, True)
    demand = demand_in_pieces(late, costs.region_seconds, costs.machine)
    cut = demand.pieces
    ahead = [n for n, segment in enumerate(cut.segments) if segment.phase is F]
    assert len(ahead) == pieces.CUTS + 1
    # All operands of the updates: parameters, gradients and states of three layers.
    reads = [sum(cut.segments[n].reads) for n in ahead]
    assert sum(reads) == 3 * LAYERS * NBYTES
    assert reads[-1] == 0, "all has come when the last layer begins"
    for n in ahead:
        segment = cut.segments[n]
        assert all(since in (0, n) for since in segment.since)
        pairs = zip(segment.reads, segment.since, strict=True)
        assert all(since == n for r, since in pairs if r and n)
    assert [bool(sum(cut.segments[n].needs)) for n in ahead] == [False, True, True]
    # What updates take is of no piece by itself, and of all of them together as before.
    several, seconds = cut.together[-1]
    assert several == tuple(ahead)
    assert seconds == pytest.approx(demand.segments[0].compute_s)
    assert sum(cut.segments[n].compute_s for n in ahead) < seconds


def test_a_step_of_which_the_host_updates_a_part_is_not_cut():
    marked = with_host_updates(recorded())
    assert demand_in_pieces(marked, lambda region: 1.0).pieces is None
    assert demand_of(recorded(), lambda region: 1.0).pieces is None


def test_a_step_of_more_pieces_than_a_program_is_solved_for_is_not_cut(monkeypatch):
    monkeypatch.setattr(pieces, "MOST_SEGMENTS", 3)
    assert demand_in_pieces(recorded(), lambda region: 1.0).pieces is None


@pytest.mark.parametrize(("since", "seconds"), [(0, 20.0), (1, 10.0)])
@pytest.mark.parametrize("way", ["reads", "writes"])
def test_what_may_be_used_in_a_piece_before_moves_there_as_well(way, since, seconds):
    moved = {"reads": ((P,), (0,)), "writes": ((0,), (P,))}[way]
    ahead = Segment(F, 10.0, (0,), (0,), (True,), late=True)
    after = Segment(F, 0.0, *moved, (True,), late=True, since=(since,))
    read = Segment(B, 0.0, (P,) if way == "writes" else (0,), (0,), (True,))
    # Where it is written it is read later; the bus back takes no time.
    ways = links(h2d=1e9) if way == "writes" else links()
    found = least_seconds(Demand((P,), (ahead, after, read)), ways, Room({"device": 0}))
    assert found.seconds == pytest.approx(seconds, rel=1e-3)
