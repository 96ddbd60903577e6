"""`python -m benchmarks.gpu` on the CPU, with tiny sizes: on a card it has one try.

What it asks of a card alone (links, pinning, kernels) is left out here.
"""

import json
import math

import pytest
import torch

from benchmarks.gpu import __main__ as bench
from benchmarks.gpu import machine, seven_billion, steps
from benchmarks.gpu.record import Record, digits
from zcompile.ir.units import MiB

COLUMNS = [("name", "what", str), ("seconds", "s", digits(1))]
TINY = {
    "steps": {
        "layers": 2,
        "width": 64,
        "batch": 2,
        "sequence": 32,
        "warmup": 3,
        "rounds": 2,
        "held": "48MiB",
        "device-memory": "4MiB",
        "host-memory": "64MiB",
    },
    "seven-billion": {
        "samples": 4,
        "context": 32,
        "hidden": 32,
        "intermediate": 64,
        "heads": 2,
        "vocabulary": 128,
        "card": "16MiB",
        "host": "64MiB",
    },
}


def tiny(part, *more):
    """Arguments of a part, in sizes that a CPU takes seconds for."""
    sizes = [text for name, size in TINY[part].items() for text in (f"--{name}", str(size))]
    return ["--device", "cpu", "--parts", part, *sizes, *more]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def out(tmp_path):
    return tmp_path / "gpu.json"


def read(path):
    return json.loads(path.read_text())


def test_the_json_is_written_after_every_row(out, clock):
    record, seen = Record({"card": "none"}, 60, out, clock), []

    def measure(part, given):
        for number in range(3):
            with part.row(f"row {number}") as row:
                row["seconds"] = number + given
            seen.append([row["seconds"] for row in read(out)["parts"]["a"]["rows"]])

    record.run("a", COLUMNS, 1.0, measure, 0.5)
    assert seen == [[0.5], [0.5, 1.5], [0.5, 1.5, 2.5]]
    assert read(out)["card"] == "none"


def test_a_row_is_printed_as_soon_as_it_is_known(out, clock, capsys):
    record = Record({}, 60, out, clock)
    capsys.readouterr()

    def measure(part, given):
        with part.row("first") as row:
            row["seconds"] = 1.25
        assert "\n| what | s |\n|---|---|\n| first | 1.2 |\n" in capsys.readouterr().out
        with part.row("second"):
            pass
        assert capsys.readouterr().out == "| second |  |\n"

    record.run("a", COLUMNS, 1.0, measure, None)
    assert "error" not in record.parts["a"]


def test_a_part_that_raises_leaves_the_others(out, clock, capsys):
    record = Record({}, 60, out, clock)

    def fails(part, given):
        with part.row("before") as row:
            row["seconds"] = 1.0
        raise ValueError("a card that melts")

    def goes_on(part, given):
        with part.row("after") as row:
            row["seconds"] = 2.0

    record.run("bad", COLUMNS, 0.5, fails, None)
    record.run("good", COLUMNS, 1.0, goes_on, None)
    parts = read(out)["parts"]
    assert "ValueError: a card that melts" in parts["bad"]["error"]
    assert [row["name"] for row in parts["bad"]["rows"]] == ["before"]
    assert [row["name"] for row in parts["good"]["rows"]] == ["after"]
    assert "ValueError: a card that melts" in capsys.readouterr().out


def test_a_row_that_raises_leaves_the_next(out, clock, capsys):
    record = Record({}, 60, out, clock)

    def measure(part, given):
        with part.row("bad"):
            raise ValueError("too hot")
        with part.row("good") as row:
            row["seconds"] = 2.0

    record.run("a", COLUMNS, 1.0, measure, None)
    bad, good = read(out)["parts"]["a"]["rows"]
    assert "too hot" in bad["error"]
    assert good["seconds"] == 2.0
    assert "| bad, failed: ValueError: too hot |  |" in capsys.readouterr().out


def test_a_row_that_would_end_too_late_is_not_begun(out, clock, capsys):
    record, begun = Record({}, 60, out, clock), []

    def measure(part, given):
        for number in range(10):
            if part.has_time(f"row {number}", "slow"):
                with part.row(f"row {number}", "slow"):
                    begun.append(number)
                    clock.now += 11
        if part.has_time("a quick one", "quick"):
            begun.append("quick")

    record.run("a", COLUMNS, 0.5, measure, None)
    assert begun == [0, 1, "quick"]  # of 30 s; the third would take until 33
    assert "not begun: row 2; its like took 11.0 s, and 8.0 s are left" in capsys.readouterr().out


def test_what_a_part_leaves_goes_to_the_others(clock):
    record, found = Record({}, 60, None, clock), []

    def measure(part, given):
        found.append(part.left())
        clock.now += 10

    record.run("a", COLUMNS, 1 / 3, measure, None)
    record.run("b", COLUMNS, 1.0, measure, None)
    assert found == [20, 50]


def test_no_part_begins_when_the_time_is_up(out, clock):
    record, begun = Record({}, 60, out, clock), []

    def measure(part, given):
        begun.append(given)
        clock.now += 61

    record.run("a", COLUMNS, 0.5, measure, "a")
    record.run("b", COLUMNS, 1.0, measure, "b")
    assert begun == ["a"]
    assert read(out)["parts"]["b"]["notes"] == ["not begun: the time is up"]


def test_without_a_card_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--parts", "machine"]) == 1
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_the_machine_is_measured(out, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "WINDOW_BYTES", 16 * MiB)
    given = ["--device", "cpu", "--parts", "machine", "kernels", "--disk", str(tmp_path)]
    assert bench.main([*given, "--out", str(out)]) == 0
    parts = read(out)["parts"]
    rows = {row["name"]: row["value"] for row in parts["machine"]["rows"]}
    assert {"matmul, bfloat16", "disk_read", "disk_write", "probe: h2d", "probe: memory"} <= set(
        rows
    )
    assert all(math.isfinite(value) and value > 0 for value in rows.values())
    assert "nothing to measure: kernels run on CUDA devices" in parts["kernels"]["notes"][0]


@pytest.mark.slow  # a model whose states are off the card, below
def test_steps_are_compared_with_eager_and_with_their_plan(out, tmp_path):
    only = ["--only", "planned-half", "streaming", "--trace", str(tmp_path)]
    assert bench.main(tiny("steps", *only, "--dtypes", "bf16", "--out", str(out))) == 0
    rows = {row["name"]: row for row in read(out)["parts"]["steps"]["rows"]}
    assert list(rows) == [
        f"bf16 {x}" for x in ("eager", "planned-half", "streaming", "eager-again")
    ]
    assert {row["equal_losses"] for row in rows.values()} == {"5 of 5"}
    assert all(row["of_eager"] > 0 for row in rows.values())
    planned, streamed = rows["bf16 planned-half"], rows["bf16 streaming"]
    assert planned["device_memory"] == 24 << 20
    assert planned["of_predicted"] == planned["step_s"] / planned["predicted"]["step_s"]
    assert streamed["predicted"] is None
    assert streamed["bytes"]["h2d"] > planned["bytes"]["h2d"]
    assert (tmp_path / "step-bf16.json.gz").stat().st_size > 0


def test_other_weights_are_other_losses(monkeypatch, out):
    """So that equal ones tell something."""
    deep, made = steps.copy.deepcopy, []

    def changed(model):
        made.append(model)
        other = deep(model)
        if len(made) == 2:
            with torch.no_grad():
                other.norm.weight[0] += 1e-3
        return other

    monkeypatch.setattr(steps.copy, "deepcopy", changed)
    given = ["--only", "eager", "--dtypes", "f32", "--out", str(out)]
    assert bench.main(tiny("steps", *given)) == 0
    first, again = read(out)["parts"]["steps"]["rows"]
    assert first["equal_losses"] == "5 of 5"
    assert again["equal_losses"] == "0 of 5"


def test_a_model_whose_states_are_off_the_card(out):
    given = ["--resident", "0", "--blocks", "1", "--plan", "1", "--out", str(out)]
    assert bench.main(tiny("seven-billion", *given)) == 0
    trained, ahead = read(out)["parts"]["seven-billion"]["rows"]
    assert len(trained["all_s"]) == seven_billion.WARM_UP + 3
    assert trained["flops"] == 6 * trained["parameters"] * 4 * 32 / trained["step_s"]
    assert trained["predicted"]["step_s"] == trained["predicted_s"]
    assert ahead["ahead_s"] > 0
    assert "fits" in ahead["ahead"]


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        ([], "8, out of time after 0 of 6 steps, 0 of 3 counted"),
        ([9.0, 2.0], "8, out of time after 2 of 6 steps, 0 of 3 counted"),
        ([9.0, 2.0, 4.0, 1.0], "8, out of time after 4 of 6 steps, 1 of 3 counted"),
        ([9.0, 2.0, 4.0, 1.0, 1.0, 1.0], "8"),
    ],
)
def test_a_row_that_ran_out_of_time_says_so(seconds, told):
    args = bench.parser().parse_args(tiny("seven-billion", "--steps", "3"))
    row = {"name": "8", "parameters": 10, "all_s": seconds}
    links = dict.fromkeys(("h2d", "d2h", "disk_read", "disk_write"), 0)
    stats = {"steps": len(seconds), "bytes": links, "peak": {}, "inexact": [], "predicted": None}
    seven_billion.settled(row, args, {**stats, "seconds": {"stall": 0.0, "optimizer": 0.0}})
    assert row["name"] == told
    assert ("step_s" in row) is bool(seconds)


def test_the_llama_of_the_defaults_has_the_parameters_of_llama_7b():
    args = bench.parser().parse_args([])
    assert seven_billion.parameters(seven_billion.shape_of(args, 32)) == 6738415616


def test_a_model_on_the_card_is_timed_in_its_parts():
    args, row = bench.parser().parse_args(tiny("seven-billion", "--resident-samples", "2")), {}
    seven_billion.resident(args, 1, False, row)
    assert row["step_s"] == row["passes_s"] + row["optimizer_s"]
    assert row["flops"] > 0


def test_a_step_is_extended_along_a_line_of_layers():
    few = {"passes_s": 3.0, "optimizer_s": 0.5}
    more = {"passes_s": 5.0, "optimizer_s": 0.75}
    made = seven_billion.extended(few, more, (2, 4), 32, samples=4.0)
    assert made == {"passes_s": 4 * 33.0, "optimizer_s": 4.25, "step_s": 136.25}
