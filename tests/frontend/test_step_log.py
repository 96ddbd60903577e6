"""What a process that trains writes for `zinf watch`: of a real run, and when it cannot write."""

import gc
import logging
import os
import subprocess
import sys

import pytest
import torch
from offloaded import SMALL
from small_models import mlp

import zcompile
from zcompile.frontend import step_log
from zcompile.frontend.offload import session_behind
from zcompile.frontend.step_log import Sampler, _Writer
from zcompile.ir.step_log import KEPT, StepLog, log_file
from zcompile.ir.version import VERSION

STEPS = 4


def train(model, steps=STEPS):
    call = torch.compile(model, backend="zinf")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        call(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model that was trained, and the directory of its run."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_log, "EVERY_S", 0.0)
        model = zcompile.offload(mlp(), **SMALL, dump=root, machine="desktop-24gb")
        train(model)
    return model, root / "run-0"


def read(run):
    log = StepLog(run)
    log.read()
    return log


def test_a_real_run_writes_each_step_when_the_next_begins(run):
    model, path = run
    log, session = read(path), session_behind(model)
    assert log.begun is not None
    assert (log.begun.zcompile, log.begun.device) == (VERSION, "cpu")
    assert log.begun.process.pid == os.getpid()
    assert log.begun.model == type(model).__name__
    assert [(row.step, row.count) for row in log.steps] == [(1, 1), (2, 1), (3, 1)]
    assert log.steps[0].seconds is None, "nobody saw it begin"
    assert all(row.seconds > 0 for row in list(log.steps)[1:])
    assert sum(row.seconds or 0 for row in log.steps) == pytest.approx(
        session.executor.clocks.whole_s, abs=1e-5
    )
    assert log.steps[0].nbytes["h2d"] > 0
    assert 0 < sum(row.compute_s for row in log.steps) <= session.meter.seconds()["compute"]
    assert log.steps[-1].peak["host"] == session.meter.peak()["host"]


def test_after_two_steps_the_plan_and_what_links_carry_are_told(run):
    planned = read(run[1]).planned
    assert planned is not None
    assert (planned.number, planned.why) == (1, "")
    assert planned.step_s > 0
    assert set(planned.binding) == {"forward", "backward", "step"}
    assert planned.links["h2d"].bytes_per_s > 0
    assert planned.budgets["device"] == 1 << 20


def test_nothing_is_written_unless_a_dump_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    model = zcompile.offload(mlp(), **SMALL)
    train(model, 2)
    assert not session_behind(model).executor.clocks.has_listener
    assert not list(tmp_path.rglob("*"))


# --- The writer alone ---


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def writer(run, tmp_path, clock):
    """A writer of the model's session, which has another already; it keeps none alive."""
    made = _Writer(session_behind(run[0]), tmp_path, clock)
    yield made
    made._close()


def over(writer, clock, times=1, seconds=1.0):
    for _ in range(times):
        clock.now += seconds
        writer.stepped()
        writer.over()


def test_short_steps_share_a_line(writer, clock, tmp_path):
    over(writer, clock, 3, step_log.EVERY_S / 4)
    over(writer, clock, 4, step_log.EVERY_S / 4)
    assert [(row.step, row.count) for row in read(tmp_path).steps] == [(1, 1), (5, 4)]


def test_the_end_tells_of_the_step_that_no_other_followed(writer, clock, tmp_path):
    over(writer, clock, 3)
    writer.stepped()
    writer.end()
    ended = read(tmp_path).ended
    assert ended is not None
    assert (ended.step, ended.why) == (4, "")
    size = log_file(tmp_path).stat().st_size
    writer.end()
    over(writer, clock)
    assert log_file(tmp_path).stat().st_size == size, "it is closed"


def test_the_file_stays_small_and_keeps_the_newest_lines(writer, clock, tmp_path, monkeypatch):
    monkeypatch.setattr(step_log, "MOST_BYTES", 300_000)
    sizes = set()
    for _ in range(1000):
        over(writer, clock)
        sizes.add(log_file(tmp_path).stat().st_size)
    log = read(tmp_path)
    assert max(sizes) <= 300_000
    assert log.begun is not None
    assert log.planned is not None
    assert [row.step for row in log.steps] == list(range(1001 - KEPT, 1001))
    assert [path.name for path in tmp_path.iterdir()] == ["steps.jsonl"]


def no_room(*given):
    raise OSError(28, "No space left on device")


def half(file, text):
    return os.pwrite(file, text[: len(text) // 2], os.fstat(file).st_size)


@pytest.mark.parametrize("failing", [no_room, half])
def test_a_full_disk_stops_the_log_with_one_warning(
    writer, clock, tmp_path, monkeypatch, caplog, failing
):
    over(writer, clock, 2)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(step_log.os, "write", failing)
        over(writer, clock, 2)
    over(writer, clock, 2)
    writer.end()
    (told,) = caplog.messages
    assert "takes no steps any more" in told
    assert [row.step for row in read(tmp_path).steps] == [1, 2]


def test_a_directory_that_is_gone_stops_no_training(run, tmp_path, caplog):
    writer = _Writer(session_behind(run[0]), tmp_path / "gone")
    writer.over()
    assert "takes no steps any more: No such file" in caplog.text


def test_a_child_that_was_forked_writes_nothing(writer, clock, tmp_path):
    over(writer, clock)
    text = log_file(tmp_path).read_bytes()
    if (pid := os.fork()) == 0:
        over(writer, clock)
        writer.end()
        os._exit(0)
    os.waitpid(pid, 0)
    assert log_file(tmp_path).read_bytes() == text


def test_what_is_measured_does_not_hang_on_resets(run):
    session = session_behind(run[0])
    sampler = Sampler(session)
    session.meter.moved("d2h", 100)
    session.meter.add("stall", 0.25)
    zcompile.stats(run[0], reset=True)
    session.meter.moved("d2h", 20)
    session.meter.add("stall", 0.5)
    made = sampler.take(session, 9, 1)
    assert (made.nbytes["d2h"], made.stall_s) == (120, 0.75)
    assert sampler.take(session, 10, 1).nbytes["d2h"] == 0


PROGRAM = """
import sys
sys.path += {path!r}
import torch, zcompile
from offloaded import SMALL
from small_models import mlp
model = zcompile.offload(mlp(), **SMALL, dump={root!r}, residency=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
call = torch.compile(model, backend="zinf")
for _ in range(2):
    call(torch.ones(2, 8)).sum().backward()
    optimizer.step()
raise ValueError("what went wrong")
"""


def test_the_end_names_the_error_that_ended_the_process(writer, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "last_value", ValueError("what went wrong"), raising=False)
    writer.end()
    ended = read(tmp_path).ended
    assert ended is not None
    assert ended.why == "ValueError: what went wrong"


@pytest.mark.slow
def test_a_process_that_fails_says_why(tmp_path):
    program = PROGRAM.format(path=sys.path, root=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 1
    ended = read(tmp_path / "run-0").ended
    assert ended is not None
    assert (ended.step, ended.why) == (2, "ValueError: what went wrong")


def test_a_model_that_is_dropped_ends_its_log(tmp_path):
    torch._dynamo.reset()
    model = zcompile.offload(mlp(), **SMALL, dump=tmp_path)
    train(model, 1)
    assert read(tmp_path / "run-0").ended is None
    del model
    torch._dynamo.reset()
    gc.collect()
    ended = read(tmp_path / "run-0").ended
    assert ended is not None
    assert ended.step == 1
