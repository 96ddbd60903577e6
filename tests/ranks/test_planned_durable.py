"""Steps of durable runs of several ranks are planned, each rank's by itself; whoever finds a commit
of them finds the step that it names, also where updates were still to come."""

import shutil

import pytest
import torch
from durable_ranks import expected_after
from rank_models import adamw, state_of, train, words
from rank_plans import ROOMY, SLOW, TIGHT, everything_late

import zcompile
from zcompile.frontend.offload import session_behind
from zcompile.frontend.replan import plan_in_force
from zcompile.ir.types import EntryKind
from zcompile.runtime.durable.worlds import held_in, sharing_of
from zcompile.runtime.io.files import open_directory
from zcompile.runtime.io.system_calls import KERNEL

STEPS = 4
"""Two are seen, the third is planned, and the last goes by the plan."""
MORE = 1
"""Steps after a resume."""
LARGE = 4
"""Weights that ranks hold shares of: each matrix and table."""
DURABLE = {**ROOMY, "device_memory": TIGHT[2], "durable": True}


def eagerly(mesh, steps):
    return expected_after(steps)  # there, where torch has one thread


@pytest.fixture(scope="module")
def expected(pool):
    return pool.run(eagerly, 1, STEPS + MORE)[0]


def killed_after_steps(mesh, path, late_on, fields):
    """Train, and leave what is on the disk at the end of the last step, with updates to come.

    late_on  ranks whose updates are late; the others' are computed in the step
    """
    rank, ranks = mesh.get_local_rank(), mesh.size()
    model = words(blocks=1)
    zcompile.offload(model, mesh=mesh, disk=f"{path}/run", throttle=SLOW, **fields)
    optimizer = adamw(model.parameters())
    run = torch.compile(model, backend="zinf")
    with everything_late(rank in late_on):
        train(model, run, optimizer, rank, ranks, steps=range(STEPS))
    session = session_behind(model)
    plan = plan_in_force(session)
    assert plan is not None
    found = {"late": session.late.rows, "wholes": len(plan.wholes)}
    session.fabric.agree("have made the last step")
    if rank == 0:
        shutil.copytree(f"{path}/run", f"{path}/killed")
    session.fabric.agree("have copied it")
    found["ended"] = state_of(model, optimizer)
    zcompile.close(model)
    return found


def gone_on(mesh, path, fields):
    """What is found in a copy of a directory, and made of it."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    model = words(blocks=1)
    zcompile.offload(model, mesh=mesh, disk=path, throttle=SLOW, **fields)
    optimizer = adamw(model.parameters())
    found = zcompile.resume(path, model, optimizer)["step"]
    begun = state_of(model, optimizer)
    run, steps = torch.compile(model, backend="zinf"), range(found, found + MORE)
    train(model, run, optimizer, rank, ranks, steps=steps)
    ended = state_of(model, optimizer)
    zcompile.close(model)
    return found, begun, ended


def check_killed(pool, expected, tmp_path, late_on, goes_on, fields=DURABLE):
    """Two ranks train, of which some have updates to come after the last step; as many ranks as
    `goes_on` says, each in a copy of what is on the disk then, and plain PyTorch find that step."""
    rows = pool.run(killed_after_steps, 2, str(tmp_path), late_on, fields)
    assert [row["ended"] for row in rows] == [expected[STEPS]] * 2
    assert [row["late"] >= LARGE for row in rows] == [rank in late_on for rank in range(2)]
    assert [row["wholes"] >= LARGE for row in rows] == [fields["stage"] == 2] * 2
    for ranks in goes_on:
        path = shutil.copytree(tmp_path / "killed", tmp_path / f"by-{ranks}")
        beside = fields if fields is not DURABLE else {**DURABLE, "device_memory": TIGHT[ranks]}
        for found, begun, ended in pool.run(gone_on, ranks, str(path), beside):
            assert found == STEPS
            assert begun == expected[STEPS]
            assert ended == expected[STEPS + MORE]
    plain = words(blocks=1)
    optimizer = adamw(plain.parameters())
    zcompile.resume(tmp_path / "killed", plain, optimizer)
    assert state_of(plain, optimizer) == expected[STEPS]


@pytest.mark.slow
def test_ranks_resume_where_one_had_updates_to_come_and_the_other_none(pool, expected, tmp_path):
    check_killed(pool, expected, tmp_path, late_on=[1], goes_on=[2])
    with open_directory(tmp_path / "killed" / "rank-1-of-2", KERNEL) as home:
        (index, _) = held_in(home).last
        sharing = sharing_of(index, home.path)
    waiting = {tensor.name for tensor in index.tensors if tensor.kind == EntryKind.GRAD.value}
    assert len(waiting) >= LARGE
    assert not waiting & sharing.shares, "its part of a gradient is all that the update reads"


@pytest.mark.slow  # stages stand in `test_stages.py`
def test_weights_that_ranks_keep_whole_are_no_part_of_a_commit(pool, expected, tmp_path):
    fields = {**DURABLE, "stage": 2, "device_memory": "4MiB"}
    check_killed(pool, expected, tmp_path, late_on=[], goes_on=[2, 1], fields=fields)


@pytest.mark.slow
@pytest.mark.parametrize("late_on", [[], [0, 1]])
def test_any_number_of_ranks_goes_on_from_steps_that_were_planned(
    pool, expected, tmp_path, late_on
):
    check_killed(pool, expected, tmp_path, late_on, goes_on=[2, 1, 4])
