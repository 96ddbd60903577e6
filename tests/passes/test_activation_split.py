"""The device is shared between values and what rests there by what each of them saves."""

from dataclasses import replace

import pytest
from activation_chains import chain

from zcompile.passes.plan_activations import solve
from zcompile.passes.plan_activations.problem import KEEP, RECOMPUTE, OffloadTier
from zcompile.passes.plan_activations.solve import (
    STREAMED_S,
    Solved,
    StreamingLoad,
    seconds,
    split,
)

UNSEEN = {"tiers": {"host": OffloadTier(1e-4, 1e-4, 1000)}, "slack_s": (99.0, 99.0)}
"""Transfers that compute hides."""


def streams(count):
    """Parameters of 10 bytes in all."""
    return StreamingLoad((9.0, 9.0), (0.0, 0.0), 10, count)


def test_many_parameters_rest_with_their_gradients_while_values_travel():
    problem = chain(*[10] * 8, budget=80, **UNSEEN)
    made = split(problem, streams(100), ("host",))
    assert made.fits
    assert max(made.answer.held) == 40  # beside two slots of 10, and 20 of what rests


def test_what_costs_nothing_to_stream_leaves_the_room_to_values():
    problem = chain(10, 10, 10, 10, budget=40, **UNSEEN)
    assert split(problem, streams(0), ("host",)).actions == (KEEP,) * 4


def test_what_does_not_rest_costs_its_starts():
    problem = chain(10, 10, 10, 10, budget=60, **UNSEEN)
    made = split(problem, streams(0), ("host",))
    spared = seconds(problem, streams(1000), made) - seconds(problem, streams(0), made)
    assert spared == pytest.approx(0.1 * 1000 * STREAMED_S)  # two of 20 bytes are for slots


BUSY_LINK = {"tiers": {"host": OffloadTier(0.02, 0.02, 1000)}, "seconds": 0.15, "budget": 50}
"""Values of 10 bytes take 0.2 seconds to leave, and 0.15 to be made again."""


@pytest.mark.parametrize(("off_s", "action"), [(0.0, "host"), (2.0, RECOMPUTE)])
def test_what_updates_write_in_forward_is_on_the_link_that_values_leave_by(off_s, action):
    """Values were sent away over a link that forward had full of late updates, and it waited."""
    problem = chain(*[10] * 8, slack_s=(2.0, 2.0), **BUSY_LINK)
    load = StreamingLoad((2.0, 2.0), (0.0, 0.0), 1000, updates_s=(0.0, off_s), apart=True)
    made = split(problem, load, (RECOMPUTE, "host"))
    assert made.fits
    assert set(made.actions) == {KEEP, action}


def test_what_comes_and_what_leaves_share_a_link_only_where_it_is_one():
    apart = StreamingLoad((4.0, 4.0), (1.0, 1.0), 1000, updates_s=(2.0, 2.5), apart=True)
    assert apart.slack_s(0) == (1.5, 3.0)
    assert apart.slack_s(10_000) == (4.0, 4.0)  # nothing streams
    assert replace(apart, apart=False).slack_s(0) == (-1.5, 3.0)


@pytest.mark.parametrize("budget", [5, 30])
def test_what_was_searched_quickly_is_not_searched_again(monkeypatch, budget):
    """Nothing fits the smaller budget, so that all searches are made."""
    begun = []

    class Noted(solve.Search):
        def __init__(self, problem, ways, begin, *, actions=None, **how):
            begun.append((problem, tuple(ways), tuple(actions or begin), tuple(how.items())))
            super().__init__(problem, ways, begin, actions=actions, **how)

    monkeypatch.setattr(solve, "Search", Noted)
    made = split(chain(*[10] * 8, budget=budget, **UNSEEN), streams(0), (RECOMPUTE, "host"))
    assert made.fits is (budget > 5)
    plain = [repr(search) for search in begun if "stays" not in dict(search[3])]
    assert len(plain) > 4
    assert len(plain) == len(set(plain))


def renamed(problem, prefix):
    values = (replace(value, name=prefix + value.name) for value in problem.values)
    return replace(problem, values=tuple(values))


def test_an_equal_problem_is_not_searched_again(monkeypatch):
    """Nodes of a cut graph have other names in each copy; all else of their values is the same."""
    searched = []

    def counted(*asked):
        searched.append(asked)
        return split(*asked)

    monkeypatch.setattr(solve, "split", counted)
    problem, solved = chain(10, 10, 10, 10, budget=40, **UNSEEN), Solved()
    made = solved.split(problem, streams(0), ("host",))
    assert solved.split(renamed(problem, "copy_of_"), streams(0), ("host",)) is made
    assert len(searched) == 1
    for other in (
        (replace(problem, budget=30), streams(0), ("host",)),
        (problem, streams(1), ("host",)),
        (problem, streams(0), (RECOMPUTE,)),
        (problem, streams(0), ("host",), 10),
    ):
        assert solved.split(*other) == split(*other)
    assert len(searched) == 5
