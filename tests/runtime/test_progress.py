"""Long work shows itself: when, where, and what is left of it. No test waits on a clock."""

import io
import logging
import re
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn
from tqdm import tqdm

import zcompile
from zcompile.ir.units import MiB, show_size
from zcompile.passes.pipeline import pipeline
from zcompile.runtime import displays, progress
from zcompile.runtime.displays import NotebookLine, PlainLines, TerminalLine, TqdmLine
from zcompile.runtime.progress import Board


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Shown:
    """A display that keeps what it is given."""

    every_s = 2.0

    def __init__(self) -> None:
        self.lines: list[str] = []

    def show(self, line):
        self.lines.append(f"{line.text} ({line.seconds:g} s)")

    def end(self, line):
        self.lines.append(f"end of {line.what}")

    def tell(self, text):
        self.lines.append(text)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def shown():
    return Shown()


@pytest.fixture
def board(clock, shown):
    return Board(clock, lambda: shown, ticks=False)


def pass_time(board, clock, seconds, step=0.25):
    for _ in range(round(seconds / step)):
        clock.now += step
        board.tick()


def test_what_takes_less_than_a_second_is_not_shown(board, clock, shown):
    with board.working("quick"):
        pass_time(board, clock, 0.75)
    pass_time(board, clock, 5)
    assert shown.lines == []


def test_long_work_is_shown_after_a_second_and_then_every_other_with_how_far_it_is(
    board, clock, shown
):
    with board.working("loading", 8 * MiB, show_size) as work:
        work.add(MiB, "up.weight")
        pass_time(board, clock, 3.5)
        work.add(MiB)
    assert shown.lines == [
        "loading: 1.00 MiB of 8.00 MiB, up.weight (1 s)",
        "loading: 1.00 MiB of 8.00 MiB, up.weight (3 s)",
        "end of loading",
    ]


def test_who_waits_for_other_ranks_is_not_busy(board):
    with board.working("saving"):
        assert board.doing() == "saving"
        with board.waiting():
            assert board.doing() == ""
        assert board.doing() == "saving"


def test_without_a_total_the_count_and_the_step_are_shown(board, clock, shown):
    with board.working("building", unit=show_size) as work:
        pass_time(board, clock, 1)
        work.at(2 * MiB, "h.0")
        pass_time(board, clock, 2)
    assert shown.lines[:2] == ["building (1 s)", "building: 2.00 MiB, h.0 (3 s)"]


def test_nested_works_are_one_line_as_old_as_the_outermost(board, clock, shown):
    with board.working("compiling"):
        with board.working("passes", 12) as work:
            work.at(3, "tiles")
            pass_time(board, clock, 0.75)
        with board.working("scheduling"):
            pass_time(board, clock, 0.25)
    assert shown.lines == ["compiling; scheduling (1 s)", "end of compiling"]


def test_an_error_or_an_interrupt_ends_the_line(board, clock, shown):
    def broken(error):
        with board.working("outer"), board.working("inner"):
            pass_time(board, clock, 1)
            raise error

    for error in (ValueError(), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            broken(error)
        assert shown.lines.pop() == "end of outer"
    pass_time(board, clock, 5)
    assert shown.lines == ["outer; inner (1 s)"] * 2


def test_of_several_threads_the_oldest_work_is_shown_until_it_ends(board, clock, shown):
    opened, end = threading.Event(), threading.Event()

    def other():
        with board.working("other"):
            opened.set()
            end.wait()

    with board.working("first"):
        thread = threading.Thread(target=other)
        thread.start()
        opened.wait()
        pass_time(board, clock, 1)
    pass_time(board, clock, 0.25)
    end.set()
    thread.join()
    assert shown.lines == ["first (1 s)", "end of first", "other (1.25 s)", "end of other"]


def test_a_thread_looks_at_the_clock_only_while_a_work_is_open(clock, shown, own_threads):
    board = Board(clock, lambda: shown)
    assert own_threads() == []
    with board.working("outer"):
        with board.working("inner"):
            assert own_threads() == ["zinf-progress"]
        assert own_threads() == ["zinf-progress"]
    assert own_threads() == []


def test_a_work_of_a_generator_may_end_in_the_thread_that_shows_it(
    clock, shown, monkeypatch, own_threads
):
    """As where `zcompile.init` is entered in a generator that only garbage refers to."""
    monkeypatch.setattr(progress, "TICK_S", 0.0)
    ended = threading.Event()

    def suspended():
        with board.working("building"):
            yield

    def show(line):
        try:
            left.close()
            shown.lines.append("closed")
        finally:
            ended.set()

    monkeypatch.setattr(shown, "show", show)
    board = Board(clock, lambda: shown)
    board.first_s = 0.0
    left = suspended()
    next(left)
    ended.wait()
    for thread in threading.enumerate():
        if thread.name == "zinf-progress":
            thread.join()
    assert shown.lines == ["end of building", "closed"]
    assert own_threads() == []


def test_where_no_thread_can_be_started_the_work_is_done_unseen(clock, shown, monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    board = Board(clock, lambda: shown)
    monkeypatch.setattr(threading.Thread, "start", refused)
    with board.working("outer") as work:
        work.add()
    assert work.done == 1


def test_a_stream_that_takes_nothing_does_not_stop_the_work(clock):
    stream = io.StringIO()
    stream.close()
    board = Board(clock, lambda: TerminalLine(stream), ticks=False)
    with board.working("outer"):
        pass_time(board, clock, 3)


def test_zinf_progress_0_silences_all_of_it(board, clock, shown, monkeypatch):
    monkeypatch.setenv("ZINF_PROGRESS", "0")
    with board.working("outer"):
        pass_time(board, clock, 5)
    board.tell(logging.getLogger("zcompile.silent"), "a plan")
    assert shown.lines == []


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_nothing_is_left_of_the_line(clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    board = Board(clock, lambda: TerminalLine(stream), ticks=False)
    with board.working("saving run", 4 * MiB, show_size) as work:
        work.add(MiB)
        pass_time(board, clock, 1)
        assert "saving run: 1.00 MiB of 4.00 MiB" in stream.getvalue()
    # The cursor is shown again, and the line is erased by the last thing that was written.
    assert stream.getvalue().rstrip().endswith("\x1b[2K")
    assert "\x1b[?25h" in stream.getvalue()


def test_beside_a_bar_of_tqdm_it_is_one_more_bar(clock, monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(displays.display_here(), TerminalLine)
    with tqdm(total=3, file=stream, desc="epoch") as bar:
        display = displays.display_here()
        assert isinstance(display, TqdmLine)
        board = Board(clock, lambda: display, ticks=False)
        with board.working("compiling"):
            pass_time(board, clock, 1)
        assert "zcompile: compiling (1 s)" in stream.getvalue()
        assert "\n" in stream.getvalue(), "it has a line of its own, below the bar"
        assert list(tqdm._instances) == [bar]


def test_a_bar_that_appears_meanwhile_gets_the_line(clock, monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    board = Board(clock, ticks=False)
    with board.working("building"):
        pass_time(board, clock, 1)
        assert stream.getvalue().startswith("\x1b[?25l"), "rich hides the cursor"
        with tqdm(total=3, file=stream, desc="weights") as bar:
            before = len(stream.getvalue())
            pass_time(board, clock, 0.25)
            after = stream.getvalue()[before:]
            assert "\x1b[2K" in after.partition("zcompile")[0], "the line of rich is erased first"
            assert "\nzcompile: building (1 s)" in after.replace("\r", "")
        assert bar not in tqdm._instances
    assert not tqdm._instances


@pytest.mark.parametrize(("tty", "term"), [(False, "xterm"), (True, "dumb")])
def test_what_is_no_terminal_gets_plain_lines(tty, term, monkeypatch):
    stream = Terminal() if tty else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", term)
    assert isinstance(displays.display_here(), PlainLines)


def test_plain_lines_go_to_the_log_if_there_is_one(clock, caplog):
    stream = io.StringIO()
    board = Board(clock, lambda: PlainLines(stream), ticks=False)
    with caplog.at_level(logging.INFO), board.working("loading"):
        pass_time(board, clock, 3)
    assert [r.getMessage() for r in caplog.records] == [
        "loading (1 s)",
        "loading: ended after 3.0 s",
    ]
    assert stream.getvalue() == ""


def test_plain_lines_that_say_the_same_come_less_often(clock, monkeypatch):
    monkeypatch.setattr(logging.getLogger("zcompile"), "propagate", False)  # to pytest's handlers
    stream = io.StringIO()
    board = Board(clock, lambda: PlainLines(stream), ticks=False)
    with board.working("compiling", 3) as work:
        pass_time(board, clock, 12)
        work.add()
        pass_time(board, clock, 2)
    assert stream.getvalue().splitlines() == [
        "zcompile: compiling: 0 of 3 (1 s)",
        "zcompile: compiling: 0 of 3 (11 s)",
        "zcompile: compiling: 1 of 3 (13 s)",
        "zcompile: compiling: ended after 14.0 s",
    ]


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (90, "zcompile (1 s): torch.compile; graph0; passes: 2 of 15, choose-tiles, 3 ways tried"),
        (70, "zcompile (1 s): graph0; passes: 2 of 15, choose-tiles, 3 ways tried"),
        (30, "zcompile (1 s): passes: 2 of …"),
    ],
)
def test_a_narrow_terminal_shows_the_inner_works(columns, shown, clock, monkeypatch):
    """What changes is said last; the rest of a line would be cut off."""
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    board = Board(clock, lambda: TerminalLine(stream), ticks=False)
    with board.working("torch.compile"), board.working("graph0"), board.working("passes") as work:
        work.begin("2 of 15, choose-tiles, 3 ways tried")
        pass_time(board, clock, 1.25)
    assert shown in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())


def test_in_a_notebook_one_output_is_updated_and_emptied(clock):
    outputs = []

    def display(shown, **options):
        outputs.append(shown)
        return SimpleNamespace(update=lambda shown, **options: outputs.append(shown))

    board = Board(clock, lambda: NotebookLine(display), ticks=False)
    with board.working("compiling", 12):
        pass_time(board, clock, 1.5)
    *rows, last = outputs
    with Console(file=io.StringIO(), width=90) as console:
        for row in rows:
            console.print(row)
    assert console.file.getvalue().count("zcompile (1 s): compiling: 0 of 12") == 1
    assert len(rows) == 2
    assert last == {"text/plain": ""}


def test_without_a_terminal_and_a_log_it_is_said_on_stderr_unless_told_not_to(monkeypatch, capsys):
    def work():
        with progress.working("loading", 3) as work:
            work.add(step="up.weight")
            progress.BOARD.tick()
        progress.tell(logging.getLogger("zcompile.runtime.probe"), "a plan")

    monkeypatch.setattr(logging.getLogger("zcompile"), "propagate", False)  # to pytest's handlers
    monkeypatch.setattr(progress.BOARD, "first_s", 0.0)
    monkeypatch.setattr(progress.BOARD, "_ticks", False)
    work()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "zcompile: loading: 1 of 3, up.weight (0 s)",
        "zcompile: loading: ended after 0.0 s",
        "zcompile: a plan",
    ]
    monkeypatch.setenv("ZINF_PROGRESS", "0")
    work()
    assert capsys.readouterr() == ("", "")


@pytest.fixture
def told(monkeypatch, shown):
    """All that is shown where every work is long, and looked at whenever it goes on."""
    board = progress.BOARD
    monkeypatch.setattr(board, "_make", lambda: shown)
    monkeypatch.setattr(board, "first_s", 0.0)
    monkeypatch.setattr(board, "_ticks", False)
    monkeypatch.setattr(shown, "every_s", 0.0, raising=False)
    kept = Shown.show

    def ticked(method):
        def call(work, *args, **options):
            method(work, *args, **options)
            board.tick()

        return call

    monkeypatch.setattr(Shown, "show", lambda self, line: kept(self, replace(line, seconds=0)))
    for name in ("add", "at", "begin"):
        monkeypatch.setattr(progress.Work, name, ticked(getattr(progress.Work, name)))
    return shown.lines


def test_offloading_compiling_planning_and_saving_show_themselves(told, tmp_path, caplog):
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    zcompile.offload(model, device="cpu", device_memory="1MiB", host_memory="1MiB")
    assert "offloading the model: 2.00 KiB of 4.19 KiB, 0.weight (0 s)" in told
    told.clear()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model, backend="zinf")
    with caplog.at_level(logging.INFO, "zcompile"):
        for _ in range(3):
            compiled(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    passes = len(pipeline(zcompile.Config()))
    assert "torch.compile; graph0: tracing its compute (0 s)" in told
    assert f"torch.compile; graph0; passes: 1 of {passes}, tile-loss (0 s)" in told
    assert any(line.startswith("planning a step: 1 arrangements tried") for line in told)
    assert any("; moving entries to where they rest: " in line for line in told)
    (summary,) = (r.getMessage() for r in caplog.records if "a step was planned" in r.getMessage())
    assert " on the device" in summary
    assert " s a step, bound by " in summary
    told.clear()
    zcompile.save(tmp_path / "saved", model, optimizer)
    assert told[0].startswith(f"saving {tmp_path / 'saved'}: ")
    told.clear()
    zcompile.resume(tmp_path / "saved", model, optimizer)
    assert f"resuming {tmp_path / 'saved'}: 8 of 8, states of 2.bias (0 s)" in told
    zcompile.load(model, tmp_path / "saved")
    assert f"loading {tmp_path / 'saved'}: 4.19 KiB of 4.19 KiB, " in told[-2]


def test_trials_are_counted(told):
    """A budget that needs a search shows which pass searches, and how often it has tried."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    zcompile.offload(model, device="cpu", device_memory="64KiB", host_memory="4MiB")
    torch.compile(model, backend="zinf")(torch.ones(2, 64)).sum().backward()
    assert any("choose-tiles, 1 way tried (0 s)" in line for line in told), told
    assert any("choose-tiles, 2 ways tried (0 s)" in line for line in told), told
