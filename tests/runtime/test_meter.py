"""The meter: bytes, seconds, peaks and counts, as `zcompile.stats` shows them."""

from dataclasses import dataclass

from zcompile.ir.step import Passage
from zcompile.runtime.meter import MOST_SPANS, MOST_SPLITS, Gauge, Meter, Walk


@dataclass(frozen=True)
class At:
    seconds: float
    there: bool = True

    def until(self, later):
        assert later.there, "this would wait for the device"
        return later.seconds - self.seconds

    def passed(self):
        return self.there


def test_a_snapshot_has_exactly_what_stats_promises():
    assert Meter().snapshot() == {
        "bytes": {"disk_read": 0, "disk_write": 0, "h2d": 0, "d2h": 0},
        "seconds": {"compute": 0.0, "stall": 0.0, "optimizer": 0.0},
        "peak": {"device": 0, "host": 0, "disk": 0, "activations": 0, "together": 0},
        "planned_peak": {"device": 0, "host": 0, "disk": 0, "activations": 0, "together": 0},
        "steps": 0,
        "graphs": 0,
        "regions": 0,
        "distinct_regions": 0,
        "gathers": 0,
        "updates_on_host": 0,
    }


def test_spans_are_read_when_asked():
    meter = Meter()
    meter.span("compute", At(1.0), At(1.5))
    meter.span("stall", At(2.0), At(2.25))
    meter.add("stall", 1.0)
    assert meter.seconds() == {"compute": 0.5, "stall": 1.25, "optimizer": 0.0}


def test_a_walk_that_is_not_timed_is_divided_as_the_last_one_that_was():
    meter = Meter()
    for compute, stall in ((1.0, 9.0), (3.0, 1.0)):  # the first is the cold one
        timed = Walk(1, timed=True)
        meter.span("compute", At(0.0), At(compute / 2), timed)
        meter.span("stall", At(0.0), At(stall), timed)
        meter.seconds()
        timed.end()
        meter.span("compute", At(0.0), At(compute / 2), timed)
    assert meter.seconds() == {"compute": 4.0, "stall": 10.0, "optimizer": 0.0}
    meter.span("compute", At(0.0), At(8.0), Walk(1, timed=False))
    assert meter.seconds() == {"compute": 10.0, "stall": 12.0, "optimizer": 0.0}
    meter.span("optimizer", At(0.0), At(1.0), Walk(2, timed=False))  # nothing is known of it
    assert meter.seconds() == {"compute": 10.0, "stall": 12.0, "optimizer": 1.0}


def test_a_timed_walk_that_raises_divides_no_other():
    meter = Meter()
    whole = Walk(1, timed=True, over=True)
    meter.span("compute", At(0.0), At(3.0), whole)
    meter.span("stall", At(0.0), At(1.0), whole)
    meter.span("stall", At(0.0), At(7.0), Walk(1, timed=True))
    assert meter.seconds() == {"compute": 3.0, "stall": 8.0, "optimizer": 0.0}
    meter.span("compute", At(0.0), At(4.0), Walk(1, timed=False))
    assert meter.seconds() == {"compute": 6.0, "stall": 9.0, "optimizer": 0.0}


def test_of_few_schedules_is_kept_how_their_time_divides():
    meter = Meter()
    for schedule in range(3 * MOST_SPLITS):
        meter.span("compute", At(0.0), At(1.0), Walk(schedule, timed=True, over=True))
        meter.seconds()
    assert 0 < len(meter._splits) <= MOST_SPLITS


def test_spans_that_nobody_asks_for_stay_few():
    meter = Meter()
    for n in range(3 * MOST_SPANS):
        meter.span("compute", At(n), At(n + 1))
    assert len(meter._spans) <= MOST_SPANS
    assert meter.seconds()["compute"] == 3 * MOST_SPANS


def test_what_is_counted_in_all_survives_a_reset_and_waits_for_nothing():
    meter = Meter()
    meter.moved("h2d", 10)
    meter.span("compute", At(1.0), At(1.5))
    meter.count("steps")
    meter.reset()
    meter.moved("h2d", 5)
    meter.span("compute", At(2.0), At(2.25))
    meter.span("compute", At(3.0), At(4.0, there=False))
    meter.count("steps", 2)
    found = meter.in_all()
    assert (found.nbytes["h2d"], found.seconds["compute"], found.steps) == (15, 0.75, 3)
    assert meter.bytes()["h2d"] == 5


def test_peaks_are_high_water_marks():
    meter = Meter()
    meter.host.change(100)
    meter.host.change(-60)
    meter.host.change(30)
    meter.plan_device(500)
    meter.plan_device(300)
    assert meter.peak()["host"] == 100
    assert meter.planned_peak()["device"] == 500


def test_a_reset_zeroes_totals_and_keeps_what_was_compiled():
    meter = Meter()
    meter.moved("h2d", 10)
    meter.add("compute", 1.0)
    for what in ("steps", "graphs", "regions", "distinct_regions", "gathers"):
        meter.count(what, 2)
    meter.device.change(100)
    meter.device.change(-40)
    meter.reset()
    now = meter.snapshot()
    assert now["bytes"]["h2d"] == 0
    assert now["seconds"]["compute"] == 0.0
    assert (now["steps"], now["gathers"]) == (0, 0)
    assert (now["graphs"], now["regions"], now["distinct_regions"]) == (2, 2, 2)
    assert now["peak"]["device"] == 60


def test_a_link_is_busy_once_however_much_is_under_way():
    meter = Meter()
    meter.busy("h2d", 100, 1.0, 2.0)
    meter.busy("h2d", 50, 1.5, 3.0)
    meter.busy("h2d", 10, 5.0, 5.5)
    meter.busy("d2h", 1, 0.0, 0.25)
    assert meter.traffic() == {"h2d": (160, 2.5), "d2h": (1, 0.25)}


def test_what_passes_a_link_is_kept_only_where_it_is_asked_for():
    meter = Meter()
    meter.busy("h2d", 100, 1.0, 2.0, "before")
    meter.keep_passages(True)
    meter.busy("h2d", 50, 1.5, 3.0, "a")
    meter.busy("h2d", 10, 5.0, 5.5, "b")
    meter.busy("h2d", 1, 4.0, 5.0, "late")
    assert meter.take_passages() == (
        Passage("h2d", "a", 50, 2.0, 3.0),
        Passage("h2d", "b", 10, 5.0, 5.5),
        Passage("h2d", "late", 1, 5.0, 5.0),
    )
    assert meter.take_passages() == ()
    meter.keep_passages(False)
    meter.busy("h2d", 1, 6.0, 7.0, "after")
    assert meter.take_passages() == ()


def test_a_crest_is_the_highest_level_since_it_was_asked_last():
    gauge = Gauge()
    gauge.change(5)
    gauge.touch(3)
    gauge.change(-4)
    assert [gauge.crest(), gauge.crest()] == [8, 1]
    gauge.change(1)
    gauge.change(-1)
    gauge.reset()
    gauge.change(1)
    assert (gauge.crest(), gauge.peak) == (2, 2)
    gauge.change(9)
    assert gauge.peak == 11
