"""The log of steps, read as it grows, is cut, is damaged, or is another version's."""

import os

import pytest
from step_logs import append, begun, observed, planned, stepped, usual, write

from zcompile.errors import RunUnreadable
from zcompile.ir import step_log as form
from zcompile.ir.step_log import KEPT, Process, StepLog, is_alive, log_file, this_process


@pytest.fixture
def log(tmp_path):
    return StepLog(write(tmp_path / "run-0", usual()))


def test_what_was_written_is_read(log):
    log.read()
    assert (log.begun, log.planned, log.ended) == (begun(), planned(), None)
    assert list(log.steps) == [
        stepped(1, None),
        stepped(2, 4.0),
        *(stepped(n) for n in range(3, 9)),
    ]
    assert log.recent == 6, "steps under the plan"


def test_only_what_is_new_is_read_and_a_line_without_an_end_waits(log):
    log.read()
    append(log.run, stepped(9))
    whole = form.line(stepped(10))
    with log_file(log.run).open("ab") as file:
        file.write(whole[:40])
    log.read()
    assert log.steps[-1] == stepped(9)
    with log_file(log.run).open("ab") as file:
        file.write(whole[40:])
    log.read()
    assert log.steps[-1] == stepped(10)
    append(log.run, form.Ended(10, 1011.0))
    log.read()
    assert log.ended == form.Ended(10, 1011.0)


@pytest.mark.parametrize("replaced", [True, False])
def test_a_log_that_was_written_anew_is_read_from_its_beginning(log, tmp_path, replaced):
    log.read()
    fewer = [begun(), planned(2), stepped(40)]
    if replaced:
        os.replace(log_file(write(tmp_path / "new", fewer)), log_file(log.run))
    else:
        write(log.run, fewer)
    log.read()
    assert list(log.steps) == [stepped(40)]
    assert log.planned == planned(2)


def test_of_a_long_log_the_newest_lines_are_kept(tmp_path):
    rows = [stepped(n) for n in range(1, KEPT + 100)]
    log = StepLog(write(tmp_path, [begun(), planned(), *rows]))
    log.read()
    assert list(log.steps) == rows[-KEPT:]
    assert log.planned == planned()


def test_a_run_without_a_log_has_nothing_to_read(tmp_path):
    log = StepLog(tmp_path)
    log.read()
    assert log.begun is None


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: b"not json\n" + text, "is not what a run writes"),
        (lambda text: text.split(b"\n", 1)[1], "its first line is missing"),
        (
            lambda text: text.replace(b'"format":1', b'"format":9'),
            "format 9.*zinf of zcompile 0.1.0",
        ),
        (lambda text: text.replace(b'"count":1', b'"count":"one"'), "stepped.count should be int"),
        (lambda text: text + b"[1]\n", "an object with one key"),
    ],
)
def test_what_no_run_writes_is_refused(log, damage, said):
    path = log_file(log.run)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RunUnreadable, match=said):
        log.read()


def test_what_a_later_version_adds_is_passed_over(log):
    with log_file(log.run).open("ab") as file:
        file.write(b'{"thought":{"about":1}}\n')
        file.write(form.line(stepped(9)).replace(b'"count"', b'"more":{"x":1},"count"'))
    log.read()
    assert log.steps[-1] == stepped(9)
    assert observed() != log.planned


def test_a_process_is_told_from_a_later_one_with_its_number():
    mine = this_process()
    assert is_alive(mine) is True
    assert is_alive(Process(mine.pid, mine.born - 1, mine.where)) is False
    assert is_alive(Process(2**22 + 1, 1, mine.where)) is False, "no pid is so large"
    assert is_alive(Process(mine.pid, mine.born, "another host")) is None


def test_a_process_that_nobody_has_waited_for_is_gone():
    if (pid := os.fork()) == 0:
        os._exit(0)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is not cleared up
        assert form._born(pid) is None
    finally:
        os.waitpid(pid, 0)
