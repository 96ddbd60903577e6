"""What stands for many samples: the mean, capped; what was cold counts until something is warm."""

import pytest

from zcompile.ir.types import Region
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


def region(key: str, *parts: Region) -> Region:
    return Region(key, key, call=tuple, parts=parts)


def test_what_a_joined_region_took_is_shared_by_what_its_parts_took_alone():
    samples = noted(1.0, 3.0)
    samples.note("b", 2.0)
    a, b = region("a"), region("b")
    samples.share(region("a b a", a, b, a), 2.0, cold=False)
    assert samples.means() == {"a": pytest.approx((1 + 3 + 0.5) / 3), "b": pytest.approx(1.5)}
    samples.share(a, 4.0, cold=False)
    assert len(samples._times["a"]) == 4


def test_a_joined_region_that_is_cold_or_has_unknown_parts_tells_nothing():
    samples, a = noted(1.0), region("a")
    samples.share(region("a a", a, a), 9.0, cold=True)
    samples.share(region("a c", a, region("c")), 9.0, cold=False)
    assert samples.means() == {"a": 1.0}
