"""`zinf timeline`: what a dump holds of a step, and how it is shown."""

import pytest
from small_run import write_run

from zcompile.cli import main
from zcompile.errors import RunUnreadable
from zcompile.ir.serialize import (
    MomentRecord,
    StepRecord,
    TimelineRecord,
    encode,
    open_run,
    timeline_file,
)


def moment(index, kind, begin_s, end_s, stall_s=0.0, ahead=None):
    begin, end, stall = ahead or (None, None, None)
    return MomentRecord(
        0, "forward", index, kind, f"w{index}", begin_s, end_s, stall_s, begin, end, stall
    )


HALF = TimelineRecord(
    4,
    StepRecord(2.0, 1.0, 1.0, {"forward": 2.0}, {"h2d": 1 << 20}, {"h2d": 1.0}),
    StepRecord(1.5, 1.0, 0.5, {"forward": 1.5}, {"h2d": 1 << 20}, {"h2d": 0.5}),
    (
        moment(0, "wait", 0.0, 1.0, 1.0, (0.5, 0.5, 0.5)),
        moment(1, "run", 1.0, 2.0, 0.0, (0.5, 1.5, 0.0)),
    ),
)


@pytest.fixture
def run(tmp_path):
    path = write_run(tmp_path)
    timeline_file(path).write_text(encode(HALF))
    return path


def test_a_timeline_reads_back_as_it_was_written(run):
    assert open_run(run).timeline() == HALF


def test_it_shows_measured_beside_predicted(run, capsys):
    assert main(["timeline", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 4 of run-0"
    (step,) = [line.split() for line in lines if line.startswith("  whole step")]
    assert step == ["whole", "step", "2.00", "s", "1.50", "s", "0.75"]
    measured, predicted = [line.split("|")[1] for line in lines if line.endswith("|")]
    assert measured == "." * 36 + "#" * 36, "waits for half of it, then computes"
    assert predicted == "." * 24 + "#" * 48
    assert "w0" in lines[-1]
    assert lines[-1].split()[-4:] == ["1.00", "s", "500", "ms"]


def test_without_a_prediction_only_what_was_measured_is_shown(run, capsys):
    bare = TimelineRecord(4, HALF.measured, None, (moment(1, "run", 0.0, 1.0),))
    timeline_file(run).write_text(encode(bare))
    assert main(["timeline", str(run)]) == 0
    out = capsys.readouterr().out
    assert "  predicted |" not in out
    assert "longest stalls" not in out


def test_a_run_without_one_says_when_it_is_written(tmp_path):
    with pytest.raises(RunUnreadable, match="written when the third begins"):
        open_run(write_run(tmp_path)).timeline()
