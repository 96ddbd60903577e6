"""A training that is killed at any instant resumes at its last commit, to the last bit."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from planned_runs import streaming
from sampled import sampled

ROOT = Path(__file__).parents[2]
STEPS = 6
MORE = 2
"""Steps after each resume, to see that training goes on as if nothing had happened."""
ON_DISK, ON_HOST = "256KiB", "64MiB"
BUDGETS = [(ON_DISK, ON_DISK), (ON_HOST, ON_HOST), (ON_DISK, ON_HOST), (ON_HOST, ON_DISK)]

Ask = Callable[..., Any]
At = tuple[int, str, int, bool]
"""`durable_run.Death`: step, call, which of these, and whether it is made before the end."""


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Obeyed by a process that has torch imported and forks a child for each request."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'helpers'}",
    }
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


def check_resume(
    ask: Ask, disk: Path, ended: int, expected: list[str], host_memory: str = ON_DISK
) -> int:
    """A new process finds the last step that had ended, or the one that was in flight."""
    found, digests = ask("resume", disk=str(disk), steps=MORE, host_memory=host_memory)
    assert found in (ended, ended + 1), "more than the step in flight is lost"
    assert digests == expected[found : found + MORE + 1]
    return found + MORE


def check_killed(ask: Ask, disk: Path, at: At, expected: list[str], turn: int) -> str:
    """The phase in which the kill came, in the middle of a step.

    Weights rest on disk or on the host, before and after, by turns.
    """
    before, after = BUDGETS[turn % 4]
    ended, code, call = ask("kill", disk=str(disk), steps=STEPS, at=at, host_memory=before)
    assert code == -signal.SIGKILL, f"call {at[2]} of {at[1]} came in step {at[0]}"
    assert ended == at[0], "it came in the middle of that step"
    assert call == at[1]
    check_resume(ask, disk, ended, expected, after)
    return phase_of(call)


def phase_of(call: str) -> str:
    if call in ("ring_write", "pwrite", "allocate", "truncate"):
        return "write"
    if call in ("fsync", "fdatasync"):
        return "sync"
    return "rename" if call == "rename" else "between"


@pytest.fixture(scope="module")
def calls(ask: Ask, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, int]]:
    """Of each step: how many calls on files of each name it makes at least, with any budget."""
    found: list[dict[str, int]] = []
    told = [
        ask("calls", disk=str(tmp_path_factory.mktemp("calm")), steps=3, host_memory=budget)
        for budget in (ON_DISK, ON_HOST)
    ]
    for one, other in zip(*([Counter(step) for step in steps] for steps in told), strict=True):
        found.append(dict(one & other))
    return found


def spread(most: int, count: int) -> list[int]:
    """At most so many numbers below `most`, evenly."""
    count = min(most, count)
    return [most * (2 * at + 1) // (2 * count) for at in range(count)]


def chosen_of(calls: list[dict[str, int]], step: int, count: int) -> list[At]:
    """Some calls of each name in a step; those that are made and those that are not by turns."""
    found = [
        (step, name, number)
        for name in sorted(calls[step])
        for number in spread(calls[step][name], count)
    ]
    return [(*at, turn % 2 == 0) for turn, at in enumerate(found)]


@pytest.mark.slow
def test_an_uninterrupted_durable_run_is_that_of_plain_torch(ask, tmp_path, expected):
    assert ask("kill", disk=str(tmp_path), steps=STEPS) == [STEPS, 0, None]
    assert check_resume(ask, tmp_path, STEPS, expected) == STEPS + MORE


def kills(ask: Ask, base: Path, expected: list[str], chosen: Sequence[At]) -> Counter[str]:
    """How many came in each phase."""
    found: Counter[str] = Counter()
    for turn, at in enumerate(chosen):
        (disk := base / f"{turn}").mkdir()
        found[check_killed(ask, disk, at, expected, turn)] += 1
    return found


@pytest.mark.slow  # tests/checkpoint/test_power_loss.py makes what each kill leaves
@pytest.mark.parametrize("step", sampled([0, 2], 2))
def test_a_run_that_is_killed_in_a_step_has_the_old_commit_or_the_new(
    ask, tmp_path, expected, calls, step, record_property
):
    chosen = chosen_of(calls, step, 1)
    phases = kills(ask, tmp_path, expected, chosen)
    record_property("killed in", dict(phases))
    assert phases.total() == len(chosen), "every one came in the middle of a step"
    assert set(phases) == {"write", "sync", "rename", "between"}


COMMIT = {
    0: [("fsync", 0), ("fdatasync", 0), ("fsync", 1), ("rename", 0), ("fsync", 2), ("fsync", 3)],
    1: [("fdatasync", 0), ("fsync", 0), ("rename", 0), ("fsync", 1)],
}
"""Of a commit's syncs and renames, in order: the first one syncs the names of the data files before
the index, and marks the data file after it; each then syncs data and index, renames the index,
and syncs its directory."""


@pytest.mark.parametrize(
    ("step", "after"),
    [
        pytest.param(0, False, marks=pytest.mark.slow),
        pytest.param(0, True, marks=pytest.mark.slow),
        (1, False),
        pytest.param(1, True, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_at_any_sync_or_rename_of_a_commit_loses_none(
    ask, tmp_path, expected, step, after, record_property
):
    phases = kills(ask, tmp_path, expected, [(step, *at, after) for at in COMMIT[step]])
    record_property("killed in", dict(phases))
    assert phases == Counter(phase_of(name) for name, _ in COMMIT[step])


@pytest.mark.slow
def test_a_step_has_the_syncs_at_which_it_is_killed(calls):
    for step, made in COMMIT.items():
        wanted = Counter(name for name, _ in made)
        assert {name: calls[step].get(name) for name in wanted} == wanted


@pytest.mark.slow
def test_a_run_may_be_killed_again_and_again(ask, tmp_path, expected):
    before = 0
    for call in ("ring_write", "fdatasync", "rename", "ring_read"):
        ended, code, name = ask("kill", disk=str(tmp_path), steps=3, at=(1, call, 0, False))
        assert (code, name) == (-signal.SIGKILL, call)
        assert ended == before + 1, "a step had ended before"
        before = ended
    check_resume(ask, tmp_path, before, expected)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("step", range(3))
def test_no_call_of_many_loses_more_than_the_step_in_flight(
    ask, tmp_path, expected, calls, step, record_property
):
    chosen = chosen_of(calls, step, 8)
    phases = kills(ask, tmp_path, expected, chosen)
    record_property("killed in", dict(phases))
    assert phases.total() == len(chosen)


# While updates wait for the next forward, or are computed in it


@pytest.fixture(scope="module")
def room() -> int:
    """Device memory in which updates are late."""
    return int(streaming()["device_memory"])


@pytest.fixture(scope="module")
def expected_late(ask: Ask, room: int) -> list[str]:
    return ask("plain", steps=STEPS + MORE, late=room)


LATE_KILLS = [
    ("ring_write", 0, False),  # in the forward, or its backward: what an update has made goes home
    ("ring_write", 5, True),
    ("fdatasync", 0, False),
    ("rename", 0, False),
    ("rename", 0, True),
]


@pytest.mark.slow  # tests/checkpoint/test_durable_late.py makes each state that such a kill leaves
@pytest.mark.parametrize("kill", LATE_KILLS)
def test_a_run_that_is_killed_while_updates_are_to_come_resumes_bit_equal(
    ask, tmp_path, expected_late, room, kill
):
    at = (STEPS - 1, *kill)
    ended, code, call = ask("kill", disk=str(tmp_path), steps=STEPS, at=at, late=room)
    assert (code, call) == (-signal.SIGKILL, kill[0])
    assert ended == STEPS - 1
    assert b'"late": [' in (tmp_path / "zinf.index").read_bytes()
    found, digests = ask("resume", disk=str(tmp_path), steps=MORE, late=room)
    assert found in (ended, ended + 1)
    assert digests == expected_late[found : found + MORE + 1]
