"""`benchmarks.startup`: phases that lie within others are counted once; titles are true."""

import argparse
import sys

import pytest

from benchmarks import startup


def test_a_phase_is_told_without_what_lies_within_it(monkeypatch):
    clock = [0.0, 0.0]
    monkeypatch.setattr(startup.Phases, "_now", staticmethod(lambda: tuple(clock)))

    def passes(seconds, cpu):
        clock[0] += seconds
        clock[1] += cpu

    phases = startup.Phases()
    passes(100, 100)  # of no phase
    with phases.phase("outer"):
        passes(1, 2)
        phases.timed("inner", passes)(10, 20)
        passes(3, 4)
    with phases.phase("inner"):
        passes(5, 6)
    assert phases.taken == {"outer": [4, 6], "inner": [15, 26]}


@pytest.mark.slow
def test_every_phase_is_met_from_the_building_to_the_third_step():
    args = argparse.Namespace(device="cpu", host=40.0)
    count, phases = startup.started(args, 8e6, 1)
    within = {name for name, _, _ in startup.INSIDE}
    steps = {f"{part} {n}" for part in ("forward", "backward", "update") for n in (1, 2, 3)}
    assert set(phases.taken) == within | steps | {"build, with random values", "trace"}
    assert all(min(row) >= 0 for row in phases.taken.values())
    assert 8e6 <= count < 16e6


def test_titles_tell_the_bytes_that_were_built_as_their_columns_do(monkeypatch, capsys):
    built = {(4e8, 2): 0.45e9, (8e8, 2): 0.9e9, (4e8, 4): 0.51e9}
    monkeypatch.setattr(
        startup,
        "alone",
        lambda *case: {"bytes": built[case], "phases": {"trace": (1.0, 2.0)}},
    )
    sizes = ["--gigabytes", "0.4", "0.8", "--layers", "2", "4", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["startup", *sizes])
    startup.main()
    lines = capsys.readouterr().out.splitlines()
    by_layers = lines.index("0.45 to 0.51 GB, more: of CPU per layer; s, of CPU")
    assert lines[by_layers + 2] == "| phase | 0.45 GB, 2 layers | 0.51 GB, 4 layers | more |"
    assert startup.show_gigabytes([0.451, 0.452]) == "0.45 GB"
