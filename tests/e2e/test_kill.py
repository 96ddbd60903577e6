"""A training that is killed at any instant resumes at its last commit, to the last bit."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 6
MORE = 2
"""Steps after each resume, to see that training goes on as if nothing had happened."""
FEW, MANY = 20, 200
ON_DISK, ON_HOST = "256KiB", "64MiB"
BUDGETS = [(ON_DISK, ON_DISK), (ON_HOST, ON_HOST), (ON_DISK, ON_HOST), (ON_HOST, ON_DISK)]

Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Obeyed by a process that has torch imported and forks a child for each request."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    program = [sys.executable, str(Path(__file__).with_name("durable_run.py"))]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as server:

        def asked(do: str, **fields: object) -> Any:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(json.dumps({"do": do, **fields}) + "\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())

        yield asked
        server.terminate()


@pytest.fixture(scope="module")
def expected(ask: Ask) -> list[str]:
    """Digests of plain PyTorch: before the first step, and after each."""
    return ask("plain", steps=3 * STEPS + MORE)


@pytest.fixture(scope="module")
def seconds(ask: Ask, tmp_path_factory: pytest.TempPathFactory) -> float:
    """What a run of STEPS steps takes that nobody kills."""
    disk = tmp_path_factory.mktemp("calm")
    ended, code, seconds = ask("kill", disk=str(disk), steps=STEPS, delay=None)
    assert (ended, code) == (STEPS, 0)
    return seconds


def check_resume(
    ask: Ask, disk: Path, ended: int, expected: list[str], host_memory: str = ON_DISK
) -> int:
    """A new process finds the last step that had ended, or the one that was in flight."""
    found, digests = ask("resume", disk=str(disk), steps=MORE, host_memory=host_memory)
    assert found in (ended, ended + 1), "more than the step in flight is lost"
    assert digests == expected[found : found + MORE + 1]
    return found + MORE


def check_killed(ask: Ask, disk: Path, delay: float, expected: list[str], at: int) -> None:
    """Weights rest on disk or on the host, before and after, by turns of `at`."""
    disk.mkdir()
    before, after = BUDGETS[at % 4]
    ended, code, _ = ask("kill", disk=str(disk), steps=STEPS, delay=delay, host_memory=before)
    assert code in (0, -signal.SIGKILL)
    check_resume(ask, disk, ended, expected, after)


def instants(count: int, seconds: float) -> list[float]:
    """Of a run: evenly spread, each somewhere in its share."""
    chance = random.Random(count)
    return [seconds * (at + chance.random()) / count for at in range(count)]


def test_an_uninterrupted_durable_run_is_that_of_plain_torch(ask, tmp_path, expected):
    ended, code, _ = ask("kill", disk=str(tmp_path), steps=STEPS, delay=None)
    assert (ended, code) == (STEPS, 0)
    assert check_resume(ask, tmp_path, STEPS, expected) == STEPS + MORE


@pytest.mark.parametrize("at", range(FEW))
def test_a_run_that_is_killed_resumes_at_its_last_commit(ask, tmp_path, expected, seconds, at):
    check_killed(ask, tmp_path / "disk", instants(FEW, seconds)[at], expected, at)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", ["fdatasync", "fsync", "rename", "write"])
def test_a_run_that_is_killed_inside_a_commit_has_the_old_one_or_the_new(
    ask, tmp_path, expected, call, after
):
    # The index is synced, then its directory; the first commit also syncs data file and directory.
    for count in range(1, 10):
        disk = tmp_path / str(count)
        disk.mkdir()
        ended, code, _ = ask("kill", disk=str(disk), steps=2, delay=None, at=[call, count, after])
        if code == 0:
            break
        assert code == -signal.SIGKILL
        check_resume(ask, disk, ended, expected)
    assert count > 2


def test_a_run_may_be_killed_again_and_again(ask, tmp_path, expected, seconds):
    disk, chance, before = tmp_path, random.Random(5), 0
    for _ in range(4):
        ended, _, _ = ask("kill", disk=str(disk), steps=3, delay=seconds * chance.random())
        before = max(before, ended)
    check_resume(ask, disk, before, expected)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_instant_of_many_loses_more_than_the_step_in_flight(ask, tmp_path, expected, seconds):
    for at, delay in enumerate(instants(MANY, seconds)):
        check_killed(ask, tmp_path / f"disk{at}", delay, expected, at)
