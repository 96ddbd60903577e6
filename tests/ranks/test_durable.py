"""Durable runs of several ranks resume at a step that all have, wherever they were killed, and
with another number of ranks."""

import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from durable_ranks import FULL, ON_DISK, ON_HOST, Fault, Group, built, expected_after, run
from rank_models import adamw, state_of
from sampled import sampled

import zcompile
from zcompile.cli.disk import gc
from zcompile.errors import DurableHeld, Unsupported

STEPS = 3
MORE = 1
"""Steps after each resume, to see that training goes on as if nothing had happened."""
FIELDS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}


@pytest.fixture(scope="module")
def expected() -> list[dict[str, str]]:
    return expected_after(8)


def check_resumes(expected, ranks, disk, steps=0, host_memory=ON_DISK, **fields):
    """All ranks go on from one step, with the bits of plain PyTorch; the step, and that after."""
    found = run(ranks, str(disk), steps, host_memory, **fields)
    assert all("error" not in one for one in found), found
    (step,) = {one["found"] for one in found}
    assert [one["begun"] for one in found] == [expected[step]] * ranks
    assert [one["ended"] for one in found] == [expected[step + steps]] * ranks
    return step, step + steps


@pytest.mark.slow
def test_a_durable_run_is_that_of_plain_torch(expected, tmp_path):
    assert check_resumes(expected, 2, tmp_path, STEPS) == (0, STEPS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank-0-of-2", "rank-1-of-2"]
    assert check_resumes(expected, 2, tmp_path, MORE, ON_HOST) == (STEPS, STEPS + MORE)


@pytest.fixture(scope="module")
def first_step(expected, tmp_path_factory) -> Path:
    """A directory in which two ranks have committed a step."""
    made = tmp_path_factory.mktemp("first")
    assert check_resumes(expected, 2, made, 1) == (0, 1)
    return made


@pytest.fixture
def committed(first_step, tmp_path) -> Path:
    """A copy of it."""
    return shutil.copytree(first_step, tmp_path / "committed")


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> list[str]:
    """Names of the calls on files that a rank makes in `STEPS` steps."""
    return run(2, str(tmp_path_factory.mktemp("calm")), STEPS)[1]["calls"]


def killed(
    expected, disk, fault, victim, together, steps=STEPS, then=2, partition="slices", **named
):
    """Kill ranks at one call of one of them; the step that all resume at, of `then` ranks.

    partition  of the two that are killed, and of those that resume, if they are two again
    """
    named["partition"] = partition
    group = Group(2, str(disk), steps, faults={victim: fault}, **named)
    found = group.outcomes(together)
    assert found[victim] is None, "it was killed"
    other = found[1 - victim]
    if not together:
        assert other is not None
        kind, text = other["error"]
        assert kind == "RankFailed", text
        assert f"rank {victim} on " in text
        assert "is gone" in text
    same = {"partition": partition} if then == 2 else {}
    step, _ = check_resumes(expected, then, disk, MORE, **same)
    if other is not None:
        done = other.get("done", 0)
        assert step in (done, done + 1), "more than the step in flight is lost"
    return step


@pytest.mark.parametrize("turn", sampled(range(48), 27))
def test_ranks_that_are_killed_at_any_call_resume_at_one_step(expected, calls, tmp_path, turn):
    number = len(calls) * (2 * turn + 1) // 96
    together = turn % 3 == 0
    killed(expected, tmp_path, Fault(number, made=turn % 2 == 0), turn % 2, together)


LATE_STEPS = 5
"""The third is planned: the last two go by a plan whose updates are late."""
SLOW_LINKS = {
    "device_memory": "500KiB",
    "stage": 3,  # no update is late of a plan that keeps weights whole
    "throttle": {"h2d": "200MB/s", "d2h": "200MB/s"},
}


@pytest.fixture(scope="module")
def late_calls(tmp_path_factory) -> Callable[[tuple[int, ...]], list[int]]:
    """How many calls on files each rank makes in `LATE_STEPS` steps, updates of which are late."""

    @cache
    def calls(late_on):
        disk = str(tmp_path_factory.mktemp("late"))
        found = run(2, disk, LATE_STEPS, late_on=late_on, **SLOW_LINKS)
        late = [bool(one["late"]) for one in found]  # when the last step has ended
        assert late == [rank in late_on for rank in range(2)]
        return [len(one["calls"]) for one in found]

    return calls


@pytest.mark.slow  # at a call of a step without a plan, above
@pytest.mark.parametrize("turn", range(24))
def test_ranks_that_are_killed_while_updates_are_to_come_resume_at_one_step(
    expected, late_calls, tmp_path, turn
):
    late_on, then = ((0, 1), (0,), (1,))[turn % 3], (2, 1, 4)[turn // 3 % 3]
    victim = turn % 2
    calls = late_calls(late_on)[victim]
    fault = Fault(calls - 1 - calls * (2 * turn + 1) // 96, made=turn // 2 % 2 == 0)
    of_steps = {"steps": LATE_STEPS, "late_on": late_on, **SLOW_LINKS}
    killed(expected, tmp_path, fault, victim, turn % 4 == 0, then=then, **of_steps)


@pytest.fixture(scope="module")
def owner_calls(tmp_path_factory) -> list[int]:
    """How many calls on files each rank makes in `STEPS` steps, of tensors that one rank holds."""
    found = run(2, str(tmp_path_factory.mktemp("owners")), STEPS, partition="owner")
    return [len(one["calls"]) for one in found]


@pytest.mark.slow  # at a call of a step over slices, above
@pytest.mark.parametrize("turn", range(24))
def test_ranks_that_are_killed_while_each_tensor_is_with_one_of_them_resume_at_one_step(
    expected, owner_calls, tmp_path, turn
):
    victim, then = turn % 2, (2, 1, 4)[turn % 3]
    fault = Fault(owner_calls[victim] * (2 * turn + 1) // 48, made=turn // 2 % 2 == 0)
    killed(expected, tmp_path, fault, victim, turn % 4 == 0, then=then, partition="owner")


def once_committed(disk, rank, step) -> Fault:
    """A kill at the rename of a commit, when another rank has made its own."""
    index = str(disk / f"rank-{rank}-of-2" / "zinf.index")
    return Fault(step - 1, "rename", awaits=(index, f'"step": {step}, '))


@pytest.mark.slow  # what is prepared is kept, below
@pytest.mark.parametrize("victim", sampled([0, 1], 1))
def test_what_one_rank_has_committed_counts_on_the_one_that_was_killed_before_it_could(
    expected, tmp_path, victim
):
    """Killed before its rename: the other one has been told that all have prepared the commit."""
    assert killed(expected, tmp_path, once_committed(tmp_path, 1 - victim, 2), victim, False) == 2


@pytest.mark.slow
def test_a_first_commit_that_one_rank_has_counts_too(expected, tmp_path):
    assert killed(expected, tmp_path, once_committed(tmp_path, 0, 1), 1, False) == 1


@pytest.mark.slow
def test_a_run_goes_on_with_more_ranks_and_fewer_in_the_same_directory(expected, tmp_path):
    for at, ranks in enumerate((2, 1, 4)):
        assert check_resumes(expected, ranks, tmp_path, 1) == (at, at + 1)
    shutil.rmtree(tmp_path / "rank-3-of-4")
    (found, _) = run(2, str(tmp_path), MORE)
    kind, text = found["error"]
    assert kind == "Unsupported"
    assert "is of 4 ranks, and here it lacks the parts of ranks 3; start 4 ranks" in text


@pytest.mark.slow
def test_a_run_in_which_each_tensor_is_with_one_rank_goes_on(expected, tmp_path):
    owner = {"partition": "owner"}
    assert check_resumes(expected, 2, tmp_path, 1, **owner) == (0, 1)
    assert check_resumes(expected, 2, tmp_path, 1, **owner) == (1, 2)
    assert check_resumes(expected, 4, tmp_path, 1) == (2, 3)
    assert check_resumes(expected, 2, tmp_path, 1, ON_HOST, **owner) == (3, 4)
    told = [one["error"] for one in run(2, str(tmp_path), 1)]
    assert {kind for kind, _ in told} == {"Unsupported"}
    says = "holds on rank 0 alone all of .*, and the model a slice on each rank of it; give the"
    assert any(re.search(says, text) for _, text in told)
    assert check_resumes(expected, 1, tmp_path, 1) == (4, 5)


@pytest.mark.slow
def test_a_model_that_is_not_durable_takes_what_ranks_committed(expected, committed):
    model = zcompile.offload(built(), **FIELDS)
    optimizer = adamw(model.parameters())
    assert zcompile.resume(committed, model, optimizer)["step"] == 1
    assert state_of(model, optimizer) == expected[1]
    plain = built()
    assert zcompile.resume(committed, plain, made := adamw(plain.parameters()))["step"] == 1
    assert state_of(plain, made) == expected[1]
    zcompile.close(model)


@pytest.mark.slow
def test_a_step_over_what_other_ranks_committed_is_refused(expected, committed):
    found = run(2, str(committed), MORE, resumes=False)
    assert {one["error"][0] for one in found} <= {"DurableHeld", "RankFailed"}
    (alone,) = run(1, str(committed), MORE, resumes=False)
    kind, text = alone["error"]
    assert kind == "DurableHeld"
    assert f"{str(committed)!r} holds step 1 of an earlier run of 2 ranks" in text
    assert check_resumes(expected, 2, committed) == (1, 1)


def test_a_rank_whose_directory_is_gone_is_named_on_all(expected, committed):
    kept = committed / "kept"
    (committed / "rank-1-of-2").rename(kept)
    for found in run(2, str(committed), MORE):
        kind, text = found["error"]
        assert kind in ("DurableDamaged", "RankFailed")
        assert "commit 0 of this training, which rank 0 has, is missing on rank 1" in text
    shutil.rmtree(committed / "rank-1-of-2")
    kept.rename(committed / "rank-1-of-2")
    assert check_resumes(expected, 2, committed) == (1, 1)


def test_the_directory_of_one_rank_is_not_taken_for_a_whole_one(expected, committed):
    own = committed / "rank-0-of-2"
    model = zcompile.offload(built(), **FIELDS, disk=own, durable=True)
    with pytest.raises(Unsupported, match="holds what rank 0 of 2 has committed"):
        zcompile.resume(own, model, adamw(model.parameters()))
    zcompile.close(model)
    assert check_resumes(expected, 2, committed) == (1, 1)


@pytest.mark.parametrize("name", sampled(["fdatasync", "fsync", "ring_write"], "ring_write"))
def test_a_full_disk_on_one_rank_ends_all_with_the_commit_intact(expected, tmp_path, name):
    fault = Fault(1, name, code=FULL)
    other, full = run(2, str(tmp_path), STEPS, faults={1: fault})
    assert "No space left on device" in full["error"][1]
    kind, text = other["error"]
    assert kind == "RankFailed"
    assert "rank 1 on " in text
    assert "No space left on device" in text
    step, _ = check_resumes(expected, 2, tmp_path)
    assert step in (other.get("done", 0), other.get("done", 0) + 1)


@pytest.mark.slow
def test_what_is_prepared_is_left_alone_and_read_by_others(expected, tmp_path):
    """Rank 1 has prepared what rank 0 has committed, and was killed."""
    Group(2, str(tmp_path), STEPS, faults={1: once_committed(tmp_path, 0, 2)}).outcomes()
    with pytest.raises(DurableHeld, match="has step 2 prepared in rank-1-of-2"):
        gc(tmp_path / "rank-1-of-2", everything=False)
    plain = built()
    optimizer = adamw(plain.parameters())
    assert zcompile.resume(tmp_path, plain, optimizer)["step"] == 2
    assert state_of(plain, optimizer) == expected[2]
    assert check_resumes(expected, 2, tmp_path) == (2, 2)


NODES = ["node-a", "node-b"]
"""Two machines without a filesystem that they share, one rank on each."""


@pytest.mark.slow
def test_what_lies_on_another_machine_is_named_and_can_be_brought_here(expected, tmp_path):
    run(2, str(tmp_path), 1, nodes=NODES)
    here, there = (tmp_path / node for node in NODES)
    plain = built()
    optimizer = adamw(plain.parameters())
    with pytest.raises(Unsupported) as caught:
        zcompile.resume(here, plain, optimizer)
    assert str(caught.value) == (
        f"the last commit in {here} is of 2 ranks, and here it lacks the parts of ranks 1; start 2 "
        f"ranks, each where its directory is (that of rank 1 lay on node-b, in {here}); or bring "
        "rank-0-of-2 and the others together in one directory that all ranks see; if one of them "
        "is lost, so is the commit: go on from a checkpoint that zcompile.save wrote, in another "
        "directory"
    )
    assert state_of(plain, optimizer) == expected[0]
    shutil.copytree(there / "rank-1-of-2", here / "rank-1-of-2")
    assert zcompile.resume(here, plain, optimizer)["step"] == 1
    assert state_of(plain, optimizer) == expected[1]


@pytest.mark.slow
def test_ranks_of_several_machines_go_on_where_their_parts_lie(expected, tmp_path):
    run(2, str(tmp_path), 1, nodes=NODES)
    first, second = run(2, str(tmp_path), 1, nodes=["node-a", "node-c"])  # a new one for b
    for found in first, second:
        assert found["error"][0] in ("DurableDamaged", "RankFailed")
        assert "which rank 0 has, is missing on rank 1: its directory" in found["error"][1]
    assert "it lay on node-b, and the rank is on node-c now: start it there" in first["error"][1]
    for found in run(2, str(tmp_path), 1, nodes=NODES[::-1]):  # each looks where the other's lies
        assert found["error"][0] in ("Unsupported", "RankFailed")
        assert "here it lacks the parts of ranks" in found["error"][1]
    for found in run(2, str(tmp_path), 1, nodes=NODES):
        assert found["found"] == 1
        assert found["begun"] == expected[1]
        assert found["ended"] == expected[2]
