"""The meter: bytes, seconds, peaks and counts, as `zcompile.stats` shows them."""

from dataclasses import dataclass

from zcompile.runtime.meter import MOST_SPANS, Meter


@dataclass(frozen=True)
class At:
    seconds: float

    def until(self, later):
        return later.seconds - self.seconds


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
    }


def test_spans_are_read_when_asked():
    meter = Meter()
    meter.span("compute", At(1.0), At(1.5))
    meter.span("stall", At(2.0), At(2.25))
    meter.add("stall", 1.0)
    assert meter.seconds() == {"compute": 0.5, "stall": 1.25, "optimizer": 0.0}


def test_spans_that_nobody_asks_for_stay_few():
    meter = Meter()
    for n in range(3 * MOST_SPANS):
        meter.span("compute", At(n), At(n + 1))
    assert len(meter._spans) <= MOST_SPANS
    assert meter.seconds()["compute"] == 3 * MOST_SPANS


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
