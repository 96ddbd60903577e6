"""An evaluation that is made of another says what `answer` says from nothing, to the bit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zcompile.passes.plan_activations.evaluation import Evaluation
from zcompile.passes.plan_activations.problem import (
    KEEP,
    RECOMPUTE,
    Maker,
    OffloadTier,
    Problem,
    Value,
    Weight,
    answer,
)

ACTIONS = (KEEP, RECOMPUTE, "host", "disk")


@st.composite
def problems(draw):
    """Ops that read several values made before, and make several; weights that several ops read."""
    makers, values, weights = [], [], draw(st.integers(0, 2))
    count = draw(st.integers(1, 6))
    boundary, times = count, 3 * count + 2
    for number in range(count):
        there = range(len(values))
        reads = draw(st.lists(st.sampled_from(there), unique=True, max_size=3)) if values else []
        used = draw(st.lists(st.integers(0, weights - 1), unique=True)) if weights else []
        made = range(len(values), len(values) + draw(st.integers(1, 2)))
        makers.append(Maker(draw(st.floats(0.1, 9)), tuple(reads), tuple(made), tuple(used)))
        for _ in made:
            readers = draw(st.lists(st.integers(boundary, times - 1), unique=True, max_size=3))
            last = draw(st.integers(number, boundary - 1))
            size = draw(st.integers(0, 9))
            left = draw(st.integers(0, boundary - 1))
            values.append(Value("v", size, number, last, tuple(sorted(readers)), number, left=left))
    late = st.lists(st.integers(boundary, times - 1), max_size=2)
    problem = Problem(
        tuple(values),
        tuple(makers),
        tuple(
            Weight(draw(st.integers(1, 9)), (0, boundary - 1), tuple(draw(late)))
            for _ in range(weights)
        ),
        tuple(draw(st.lists(st.integers(0, 5), min_size=times, max_size=times))),
        boundary,
        {"host": OffloadTier(0.5, 0.25, 9, 0.1), "disk": OffloadTier(1.5, 1.25, 20, 0.3)},
        (draw(st.floats(-1, 5)), draw(st.floats(-1, 5))),
        draw(st.integers(1, 40)),
        draw(st.integers(0, 9)),
    )
    change = st.tuples(st.integers(0, len(values) - 1), st.sampled_from(ACTIONS))
    return problem, draw(st.lists(st.lists(change, max_size=3), min_size=1, max_size=8))


def same(kept: Evaluation) -> bool:
    """Whether it equals what is found from nothing."""
    fresh = answer(kept.problem, kept.actions)
    held, slots = kept.curves().held.tolist(), kept.slots.tolist()
    assert (held, slots) == (fresh.held, fresh.slots)
    assert (kept.wanted, kept.repeats) == (fresh.wanted, fresh.repeats)
    assert kept.curves().moved == fresh.moved
    assert list(kept.curves().moved) == list(fresh.moved)
    assert (kept.again_s, kept.seconds) == (fresh.again_s, fresh.seconds)
    assert kept.over == fresh.over(kept.problem)
    most = max(fresh.held)
    assert kept.measure() == (fresh.over(kept.problem), most, fresh.held.count(most))
    assert kept.peak_time() == fresh.held.index(most)
    return True


@settings(deadline=None, max_examples=150)
@given(problems())
@pytest.mark.slow
def test_it_follows_every_change_and_stays_as_it_was(case):
    problem, turns = case
    now = Evaluation(problem, [KEEP] * len(problem.values))
    assert same(now)
    for changes in turns:
        before = list(now.actions)
        then = now.changed(changes)
        assert same(then)
        assert now.actions == before
        assert same(now)
        now = then


@settings(deadline=None, max_examples=150)
@given(problems(), st.data())
def test_what_is_surely_too_much_is_too_much(case, data):
    problem, _ = case
    actions = [data.draw(st.sampled_from(ACTIONS)) for _ in problem.values]
    now = Evaluation(problem, actions)
    for number, action in enumerate(actions):
        if action != KEEP:
            assert now.least_over_saving(number) <= now.changed([(number, KEEP)]).over


def test_a_value_that_waits_beside_the_peak_is_surely_too_much():
    """Op 1 runs again at time 4, of the value of op 0; at time 3 all of the budget is held."""
    values = (Value("a", 2, 0, 1, (5,), 0), Value("b", 4, 1, 1, (4,), 1))
    makers = (Maker(1.0, (), (0,)), Maker(1.0, (0,), (1,)))
    problem = Problem(values, makers, (), (0, 0, 0, 8, 0, 0), 2, {}, (0.0, 0.0), budget=10)
    now = Evaluation(problem, (KEEP, RECOMPUTE))
    assert now.over == 0
    assert now.least_over_saving(1) == now.changed([(1, KEEP)]).over == 4


@settings(deadline=None, max_examples=50)
@given(problems(), st.data())
def test_it_begins_wherever_it_is_told_to(case, data):
    problem, _ = case
    actions = [data.draw(st.sampled_from(ACTIONS)) for _ in problem.values]
    assert same(Evaluation(problem, actions))


def test_what_a_chain_of_ops_is_run_again_with_goes_where_its_end_is_saved():
    """c is made of b, that of a: once c is saved, nobody needs b again, nor a for it."""
    values = (
        Value("a", 6, 0, 1, (), 0),
        Value("b", 1, 1, 2, (), 1),
        Value("c", 4, 2, 2, (5,), 2),
    )
    makers = (Maker(1.0, (), (0,)), Maker(1.0, (0,), (1,)), Maker(1.0, (1,), (2,)))
    problem = Problem(values, makers, (), (0, 0, 0, 0, 5, 0, 0), 3, {}, (0.0, 0.0), budget=11)
    now = Evaluation(problem, (KEEP, RECOMPUTE, RECOMPUTE))
    assert now.over == 0
    assert now.least_over_saving(2) == now.changed([(2, KEEP)]).over == -2
