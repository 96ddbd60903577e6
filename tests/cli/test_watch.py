"""`zinf watch`: pictures and lines of logs that were recorded, on a clock that is given."""

import io
import json

import pytest
import small_run
from rich.console import Console
from step_logs import BEGAN, append, begun, observed, planned, stepped, usual, write

from zcompile.cli.frame import drawn, frame_of, headline, show_duration
from zcompile.cli.watch import Watcher, watch
from zcompile.errors import ConfigInvalid, RunUnreadable
from zcompile.ir import step_log as form
from zcompile.ir.step_log import Process, StepLog

NOW = BEGAN + 8.5
GONE = Process(form.this_process().pid, 0, form.this_process().where)
ELSEWHERE = Process(17, 1, "node7 pid:[1]")


def frame(tmp_path, records, now=NOW, **options):
    log = StepLog(write(tmp_path / "run-0", records))
    log.read()
    return frame_of(log, now, **options)


def text(frame, width=80, ascii_only=False, hint=""):
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(drawn(frame, width, ascii_only, hint))
    return "\n".join(line.rstrip() for line in console.export_text().splitlines()) + "\n"


@pytest.mark.parametrize("width", [80, 140])
def test_a_run_that_goes_well(tmp_path, golden, width):
    shown = text(frame(tmp_path, usual(), tokens=4096, others=["run-1"]), width, hint="a hint")
    assert max(map(len, shown.splitlines())) <= width
    assert shown == golden


def test_plain_characters_alone_where_others_cannot_be_shown(tmp_path):
    text(frame(tmp_path, usual()), ascii_only=True).encode("ascii")


def test_figures_are_of_usual_steps_under_the_plan(tmp_path):
    slow = stepped(9, 30.0, compute_s=0.5)
    made = frame(tmp_path, [*usual(), slow, stepped(10, 2.0, count=2)], BEGAN + 10)
    assert made.step_s == 1.0
    assert made.last_s == 1.0
    assert made.seconds == pytest.approx(
        {"compute": 0.5, "stall": 0.2, "optimizer": 0.1, "elsewhere": 0.2}
    )
    read = next(link for link in made.links if link.name == "disk_read")
    assert read.bytes_per_s == pytest.approx(1 << 30)
    assert read.busy == pytest.approx(0.4)
    assert made.history == (4.0, *[1.0] * 6, 30.0, 1.0)


def test_after_a_new_plan_steps_before_it_do_not_count(tmp_path):
    made = frame(tmp_path, [*usual(), planned(2, 0.4), stepped(9, 0.5)], BEGAN + 9)
    assert (made.step_s, made.predicted_s) == (0.5, 0.4)
    renewed = frame(tmp_path, [*usual(), planned(1, 0.4)])
    assert (renewed.step_s, renewed.predicted_s) == (1.0, 0.4), "a prediction made anew is no plan"


@pytest.mark.parametrize(
    ("records", "now", "state", "said"),
    [
        ([begun(), observed()], BEGAN + 30, "starting", "its first step, for 30 s by now"),
        (usual(), BEGAN + 12, "running", "running"),
        (usual(), BEGAN + 30, "quiet", "no step for 22 s: it plans"),
        ([*usual(), form.Ended(9, BEGAN + 9)], BEGAN + 200, "ended", "ended 3 min ago"),
        (
            [*usual(), form.Ended(9, BEGAN + 9, "TierFull: no room")],
            BEGAN + 10,
            "failed",
            "ended 1 s ago, by TierFull: no room",
        ),
        ([begun(process=GONE), *usual()[1:]], BEGAN + 12, "gone", "last heard 4 s ago"),
        ([begun(process=GONE)], BEGAN + 12, "gone", "killed"),
        ([begun(process=ELSEWHERE), *usual()[1:]], BEGAN + 12, "running", "it runs as node7"),
        ([], BEGAN, "waiting", "no step was logged yet"),
    ],
)
def test_what_becomes_of_a_run_is_said(tmp_path, records, now, state, said):
    made = frame(tmp_path, records, now)
    assert made.state == state
    assert said in made.said
    assert state in text(made)
    assert said in " ".join(text(made).split())
    if state != "running" and records:
        assert said in headline(made)


def test_without_a_plan_it_is_said_why(tmp_path):
    why = "with residency=False entries rest where they were put first"
    records = [begun(), form.Planned(0, why, None, {}, {}, {}), stepped(1, None), stepped(2)]
    made = frame(tmp_path, records, BEGAN + 3)
    assert made.predicted_s is None
    assert f"no plan of a whole step: {why}" in text(made).replace("\n", " ")
    assert "predicted" not in text(made)


def test_a_line_says_the_same(tmp_path):
    assert headline(frame(tmp_path, usual(), tokens=4096)) == (
        "run-0: step 8, 1.00 s a step (predicted 800 ms), 20% stalled, 4,096 tokens/s, "
        "disk_read 1.07 GB/s, h2d 3.22 GB/s, device 15.0 GiB, host 32.0 GiB, disk 100 GiB"
    )


@pytest.mark.parametrize(
    ("seconds", "said"), [(3, "3 s"), (119, "119 s"), (150, "2 min"), (12000, "3 h 20 min")]
)
def test_time_that_passes(seconds, said):
    assert show_duration(seconds) == said


# --- Following ---


class Clock:
    """A clock that only sleeping moves. then: what is done while one sleeps, in order."""

    def __init__(self, *then):
        self.now, self.then = NOW, list(then)

    def sleep(self, seconds):
        self.now += seconds
        if not self.then:
            raise KeyboardInterrupt
        self.then.pop(0)()


def watched(path, clock, terminal=False, **options):
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=terminal)
    answer = watch(path, console=console, now=lambda: clock.now, sleep=clock.sleep, **options)
    return answer, console.file.getvalue()


def run_of(path, records):
    """A run that has begun, so that it is one by itself."""
    small_run.write_graph(write(path, records), 0)
    (path / "run.json").write_text("{}")
    return path


def test_a_run_is_watched_until_it_ends(tmp_path):
    run = run_of(tmp_path / "run-0", usual())
    clock = Clock(
        lambda: append(run, stepped(9)),
        lambda: None,
        lambda: append(run, form.Ended(10, BEGAN + 11)),
    )
    answer, told = watched(run, clock, every_s=1.0)
    assert (answer.code, answer.shown) == (0, True)
    assert [row.split(",")[0] for row in told.splitlines()] == [
        "run-0: step 8",
        "run-0: step 9",
        "run-0: ended 0 s ago; step 10",
    ]


def test_a_picture_is_redrawn_on_a_terminal(tmp_path):
    run = run_of(tmp_path / "run-0", usual())
    clock = Clock(
        lambda: append(run, stepped(9)), lambda: append(run, form.Ended(9, BEGAN + 9, "OSError"))
    )
    answer, told = watched(run, clock, terminal=True)
    assert answer.code == 1
    assert "…" not in told, "a small terminal shows all of it"
    assert told.count("tokens-per-step") == 2, "how to see them is said while it runs"
    assert "step 8" in told
    assert "ended 0 s ago, by OSError" in told


def test_a_directory_is_followed_from_run_to_run(tmp_path):
    def second():
        write(tmp_path / "runs/run-1", usual(5))

    clock = Clock(
        lambda: write(tmp_path / "runs/run-0", usual()),
        second,
        lambda: append(tmp_path / "runs/run-1", form.Ended(5, BEGAN)),
    )
    answer, told = watched(tmp_path / "runs", clock, as_json=True)
    assert answer.code == 0, "Ctrl-C is how one leaves"
    rows = [json.loads(row) for row in told.splitlines()]
    assert [(row["run"].split("/")[-1], row["state"], row["others"]) for row in rows] == [
        ("runs", "waiting", []),
        ("run-0", "quiet", []),
        ("run-1", "quiet", ["run-0"]),
        ("run-0", "quiet", []),
    ]


def test_a_run_that_lives_is_shown_before_newer_ones_that_are_over(tmp_path):
    write(tmp_path / "run-0", usual())
    write(tmp_path / "run-1", [*usual(), form.Ended(8, BEGAN)])
    write(tmp_path / "run-2", [begun(process=GONE)])
    (tmp_path / "run-3").mkdir()
    assert Watcher(tmp_path).frame(NOW).run == "run-0"


def test_a_run_of_another_version_does_not_hide_those_beside_it(tmp_path):
    write(tmp_path / "run-0", usual())
    write(tmp_path / "run-1", [begun(format=9)])
    assert Watcher(tmp_path).frame(NOW).run == "run-0"
    with pytest.raises(RunUnreadable, match="format 9"):
        Watcher(run_of(tmp_path / "run-1", [begun(format=9)])).frame(NOW)


# --- The command ---


def test_once_prints_one_picture(zinf, tmp_path):
    write(tmp_path / "run-0", [*usual(), form.Ended(8, BEGAN)])
    code, out, err = zinf("watch", tmp_path, "--once", "--tokens-per-step", "4096")
    assert (code, err) == (0, "")
    assert "4,096 tokens/s" in out
    assert not any(row.endswith(" ") for row in out.splitlines())
    told = json.loads(zinf("watch", tmp_path, "--once", "--json")[1])
    assert (told["step"], told["tokens_per_s"]) == (8, None)
    assert told["tiers"][0]["budget_bytes"] == 20 << 30


def test_once_of_a_run_that_was_killed_exits_1(zinf, tmp_path):
    write(tmp_path / "run-0", [begun(process=GONE), *usual()[1:]])
    assert zinf("watch", tmp_path, "--once")[0] == 1


@pytest.mark.parametrize("there", [None, "", "run-0"])
def test_once_without_a_log_is_one_sentence(zinf, tmp_path, there):
    root = tmp_path / "runs"
    if there is not None:
        (root / there).mkdir(parents=True)
    code, out, err = zinf("watch", root, "--once")
    assert (code, out) == (1, "")
    assert "cannot be watched: no " in err


def test_a_file_is_no_directory_of_runs(zinf, tmp_path):
    (tmp_path / "runs").write_text("")
    code, _, err = zinf("watch", tmp_path / "runs", "--once")
    assert code == 1
    assert "is not a directory" in err


@pytest.mark.parametrize("option", ["--every", "--tokens-per-step"])
def test_what_cannot_be_meant_is_refused(zinf, tmp_path, option):
    code, _, err = zinf("watch", tmp_path, option, "0")
    assert code == 2
    assert "0" in err
    with pytest.raises(ConfigInvalid):
        watch(tmp_path, every_s=float("nan"))
