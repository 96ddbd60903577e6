"""What stands for many samples: the mean, capped; what was cold counts until something is warm."""

import pytest

from zcompile.runtime.profile import MOST, RECENT, Samples


def noted(*seconds: float) -> Samples:
    samples = Samples()
    for s in seconds:
        samples.note("a", s)
    return samples


def test_the_mean_counts_and_none_for_more_than_so_many_medians():
    assert noted(1.0, 2.0, 3.0).means()["a"] == pytest.approx(2.0)
    assert noted(1.0, 1.0, 1000.0).means()["a"] == pytest.approx((2 + MOST) / 3)


def test_old_samples_are_forgotten():
    assert noted(*[5.0] * 10, *[1.0] * RECENT).means()["a"] == pytest.approx(1.0)


def test_what_was_cold_counts_until_something_is_warm():
    samples = Samples()
    samples.note("a", 9.0, cold=True)
    samples.note("a", 7.0, cold=True)  # the same region in another layer
    assert samples.means()["a"] == pytest.approx(8.0)
    samples.note("a", 1.0)
    assert samples.means()["a"] == pytest.approx(1.0)
    samples.note("a", 9.0, cold=True)  # a new schedule walks it for the first time
    assert samples.means()["a"] == pytest.approx(1.0)


def test_leasts_and_medians():
    samples = noted(3.0, 1.0, 2.0)
    assert samples.least("a") == samples.leasts()["a"] == 1.0
    assert samples.medians()["a"] == 2.0
