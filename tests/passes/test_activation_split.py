"""The device is shared between values and what rests there by what each of them saves."""

import pytest
from activation_chains import chain

from zcompile.passes.plan_activations.problem import KEEP, OffloadTier
from zcompile.passes.plan_activations.solve import STREAMED_S, StreamingLoad, seconds, split

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
