"""Updates that the host computes beside what comes after their step: nobody can tell.

The lane of the host computes as late as it may (`held_updates.py`): whoever does not wait for an
update finds the old value, and a test that fails.
"""

import random
from functools import partial

import pytest
import torch
from between_steps import BETWEEN, FIRST
from held_updates import arrived, held
from host_runs import Pair, let_host_update_all, trained_pair
from planned_runs import PLANNED, ids, loss_of, plan_at_given_costs, review_no_plan

import zcompile
from zcompile.errors import TierFull, UpdateBroken
from zcompile.ir.types import EntryKind
from zcompile.planner.host_step import order_of_need
from zcompile.runtime.transfer.host_work import HostWork

adamw = partial(torch.optim.AdamW, lr=1e-2, fused=True)


def force(monkeypatch):
    """Let the host update what it may, by one plan, the same on a machine that is busy."""
    let_host_update_all(monkeypatch)
    plan_at_given_costs(monkeypatch)
    review_no_plan(monkeypatch)


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    force(monkeypatch)


@pytest.fixture(scope="module")
def shared():
    with pytest.MonkeyPatch.context() as patch:
        force(patch)
        lanes = held(patch)
        with trained_pair(lambda params: adamw(params[::-1])) as pair:  # steps begin with the last
            assert len(pair.session.controller.plan.on_host) > 3
            yield pair, lanes[-1]


@pytest.fixture
def pair(shared):
    """A run whose last step's updates are all still to come. Tests share it one after the other:
    whoever compiles anew lets what was compiled be forgotten."""
    made, lane = shared
    assert made.equal(), "the test before this one left the two apart"
    made.step(2)
    arrived(made.session)
    assert waiting(made, lane) == made.session.controller.plan.on_host
    return made


@pytest.fixture
def lane(shared):
    return shared[1]


def weight_of(work: HostWork, pair: Pair):
    """The parameter that a piece of work updates."""
    entries = {entry.place: entry for entry in pair.session.entries()}
    (found,) = (
        entries[use.place]
        for use in work.uses
        if use.place in entries and entries[use.place].kind is EntryKind.PARAM
    )
    return found.ref


def waiting(pair: Pair, lane):
    """The parameters whose updates are still to come."""
    return {weight_of(work, pair) for _, _, work in lane._waiting}


def test_a_forward_waits_for_the_rows_of_what_it_reads_in_its_order(pair, lane):
    plan, lane.done[:] = pair.session.controller.plan, []
    need = order_of_need(plan.step)
    with torch.no_grad():
        told = [loss_of(forward, ids(7)).item() for forward in (pair.plain, pair.compiled)]
    assert told[0] == told[1]
    assert lane.waits == 0
    order = [weight_of(work, pair) for work in lane.done]
    assert set(order) == plan.on_host
    assert order == sorted(order, key=need.__getitem__)
    assert pair.equal()


@pytest.mark.parametrize(
    "asking", [FIRST, pytest.param(BETWEEN, marks=pytest.mark.slow)], ids=["first", "all"]
)
def test_whoever_asks_before_the_next_forward_finds_the_update_done(pair, lane, asking):
    sides = list(zip((pair.plain, pair.model), pair.optimizers, strict=True))
    for between in asking:
        pair.step(2)
        arrived(pair.session)
        assert lane.waits, between.__name__
        found = [between(model, optimizer) for model, optimizer in sides]
        assert found[0] == found[1], between.__name__
        pair.step(2)
        assert pair.equal(), between.__name__


def test_gradients_that_are_used_again_are_as_the_step_left_them(pair, lane):
    """A second step on the same gradients, clipped once; zeroed in place; and changed."""
    for forward in (pair.plain, pair.compiled):
        loss_of(forward, ids(33)).backward()
    for model, optimizer in zip((pair.plain, pair.model), pair.optimizers, strict=True):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.step()
        for p in model.parameters():
            p.grad.add_(0.01)
        optimizer.step()
        arrived(pair.session)
        left = waiting(pair, lane)
        optimizer.zero_grad(set_to_none=False)
    assert left == pair.session.controller.plan.on_host
    assert pair.step().equal()


def test_gradients_count_until_their_rows_have_run(pair, lane):
    """They are dropped, and their bytes are read: both what is counted and what was planned say so,
    until nobody reads them."""
    session = pair.session
    session.enter("")
    meter, nbytes = (
        session.meter,
        sum(
            use.place.extent.nbytes
            for _, _, work in lane._waiting
            for use in work.uses
            if use.place.freed
        ),
    )
    assert nbytes >= sum(p.nbytes for p in pair.model.parameters()) // 2
    before, planned = meter.host.now, meter.planned_host.now
    assert planned >= before
    session.drain()
    assert lane.waits == 0
    assert meter.host.now == before - nbytes
    assert meter.planned_host.now == planned - nbytes


def test_a_tier_that_is_full_waits_for_dead_gradients(pair, lane):
    """What rows still read is waited for, and taken."""
    homes, filled = pair.session.homes, []
    pair.session.enter("")
    dead = [use.place for _, _, work in lane._waiting for use in work.uses if use.place.freed]
    host = dead[0].tier
    size = homes.free()["host"]
    while size >= host.alignment:
        try:
            filled.append(host.reserve(size, "all that is free"))
        except TierFull:
            size //= 2
    place = homes.reserve("more", EntryKind.STATE, max(each.nbytes for each in dead))
    assert lane.waits < len(dead)
    homes.left(place, EntryKind.STATE)
    for extent in (place.extent, *filled):
        host.release(extent)


def test_hooks_and_frozen_parameters_find_the_update_done(pair, lane):
    seen: list[list[float]] = [[], []]
    for number, (model, forward) in enumerate(
        ((pair.plain, pair.plain), (pair.model, pair.compiled))
    ):
        name = "head.weight" if "head.weight" in dict(model.named_parameters()) else None
        param = model.get_parameter(name or next(n for n, _ in model.named_parameters()))

        def read(grad, param=param, told=seen[number]):
            told.append(float(param.detach().sum()))

        hook = param.register_hook(read)
        loss_of(forward, ids(44)).backward()
        hook.remove()
    assert seen[0] == seen[1]
    assert seen[0]
    for optimizer in pair.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    assert pair.equal()


def test_an_average_of_the_weights_and_another_optimizer_read_what_was_updated(pair, lane):
    told = []
    for model, _ in zip((pair.plain, pair.model), pair.optimizers, strict=True):
        param = next(iter(model.parameters()))
        average = torch.optim.swa_utils.AveragedModel(torch.nn.ParameterList([param]))
        other = torch.optim.SGD([param], lr=0.1)
        param.grad = torch.ones_like(param)
        other.step()
        other.zero_grad()
        told.append(float(next(iter(average.parameters())).detach().sum()))
    assert told[0] == told[1]
    assert pair.step().equal()


# Runs of their own


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))]
)
def test_random_loops(monkeypatch, seed):
    """Whatever is done between steps, however many rows are done by then, with several
    micro-batches and clipping now and then, and gradients that live on."""
    lanes, drawn = held(monkeypatch), random.Random(seed)
    with trained_pair(adamw) as made:
        sides = list(
            zip((made.plain, made.model), (made.plain, made.compiled), made.optimizers, strict=True)
        )
        for step in range(4):
            batches, clip = drawn.choice((1, 1, 2)), drawn.random() < 0.5
            keeps, acts = drawn.random() < 0.3, drawn.sample(BETWEEN[:10], 2)
            for model, forward, optimizer in sides:
                for batch in range(batches):
                    loss_of(forward, ids(100 * step + batch)).backward()
                if clip:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                if not keeps:
                    optimizer.zero_grad()
            arrived(made.session)
            assert lanes[-1].waits
            for act in acts:
                lanes[-1].some(drawn.randrange(4))
                told = [act(model, optimizer) for model, _, optimizer in sides]
                assert told[0] == told[1], act.__name__
        assert made.equal()


def test_a_row_that_fails_is_told_to_the_forward_that_reads_it(monkeypatch):
    lanes, own = held(monkeypatch), HostWork.run
    with trained_pair(adamw) as made:

        def fails(work, cores):
            if work is made_last[0]:
                work._compute = out_of_luck
            own(work, cores)

        def out_of_luck(memory):
            raise RuntimeError("out of luck")

        made.step()
        arrived(made.session)
        made_last = [max(lanes[-1]._waiting, key=lambda row: row[:2])[2]]
        name = next(
            n
            for n, p in made.model.named_parameters()
            if p.entry.ref == weight_of(made_last[0], made)
        )
        monkeypatch.setattr(HostWork, "run", fails)
        with pytest.raises(UpdateBroken, match=name) as caught:
            loss_of(made.compiled, ids(1))
        assert "out of luck" in str(caught.value)
        with pytest.raises(UpdateBroken, match=name):
            made.model.state_dict()[name].on_host()
        with pytest.raises(UpdateBroken, match=name):
            made.step()


def test_several_micro_batches_and_a_frozen_weight(monkeypatch):
    """The first forward finds all rows done that it needs; what is frozen is in none."""
    lanes = held(monkeypatch)
    made = Pair(adamw)
    for model in (made.plain, made.model):
        next(iter(model.parameters())).requires_grad_(False)
    waits = []
    for number in range(PLANNED + 3):
        for forward, optimizer in zip((made.plain, made.compiled), made.optimizers, strict=True):
            for batch in range(2):
                loss_of(forward, ids(10 * number + batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        arrived(made.session)
        waits.append(lanes[-1].waits)
    assert waits[-1] > 0
    frozen = next(iter(made.model.parameters())).entry.ref
    assert frozen not in made.session.controller.plan.on_host
    assert made.equal()
    zcompile.close(made.model)
