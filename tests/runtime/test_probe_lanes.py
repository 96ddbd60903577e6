"""Two lanes are measured alone and at once, in rounds that go on until the best one is found."""

import pytest

from zcompile.runtime import probe
from zcompile.runtime.probe import Lane, measure_lanes
from zcompile.runtime.transfer.ticket import Ready


@pytest.mark.parametrize(
    ("rounds", "asked", "best"),
    [
        ([0.01] * 9, 5, 0.01),
        ([0.03, 0.02, 0.01, 0.02, 0.02, 0.02, 0.0101, 0.0], 7, 0.01),
        ([5.0, 1.0], 1, 5.0),  # that was enough
        ([0.02 * 1.2**-n for n in range(20)], 12, 0.02 * 1.2**-11),  # never settles
    ],
)
def test_rounds_go_on_until_two_are_as_good_or_it_is_enough(rounds, asked, best):
    left = iter(rounds)
    assert probe.fastest_round(lambda: next(left)) == best
    assert len(rounds) - len(list(left)) == asked


class Hardware:
    """Two lanes on a clock of their own: `apart`, or one after the other."""

    def __init__(self, apart: bool, piece_s: float) -> None:
        self.now = 0.0
        self.apart, self.piece_s = apart, piece_s
        self.free = {"h2d": 0.0, "d2h": 0.0}

    def lane(self, name: str) -> Lane:
        return Lane(name, 1000, lambda n: self.start(name), 10, lambda n: self.start(name))

    def start(self, name: str) -> "Arrived":
        lanes = [name] if self.apart else list(self.free)
        over = max(self.now, *(self.free[lane] for lane in lanes)) + self.piece_s
        self.free.update(dict.fromkeys(lanes, over))
        return Arrived(self, over)


class Arrived(Ready):
    def __init__(self, hardware: Hardware, over: float) -> None:
        self.hardware, self.over = hardware, over

    def wait(self) -> None:
        self.hardware.now = max(self.hardware.now, self.over)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("piece_s", [0.001, 0.05, 2.0])
def test_lanes_take_turns_if_both_at_once_take_the_sum(apart, piece_s, monkeypatch):
    hardware = Hardware(apart, piece_s)
    monkeypatch.setattr(probe.time, "perf_counter", lambda: hardware.now)
    links = measure_lanes(hardware.lane("h2d"), hardware.lane("d2h"))
    assert links["h2d"].bytes_per_s == pytest.approx(1000 / piece_s, rel=0.01)
    assert links["d2h"].latency_s == pytest.approx(piece_s - 10 / (1000 / piece_s), rel=0.01)
    assert [links[name].shares for name in ("h2d", "d2h")] == (
        [None, None] if apart else ["d2h", "h2d"]
    )
