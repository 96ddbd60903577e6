"""What groups of ranks hold of a training, in files: written once, and read on any mesh."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from durable_ranks import ON_DISK, Fault, Group, run
from rank_groups import mesh_of, trained_in_groups
from rank_models import adamw, batch, state_of, words

import zcompile
from zcompile.checkpoint import shares

BUDGETS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}


def on(mesh, shape):
    """The mesh of a shape; None: the one dimension of the given one."""
    return mesh if shape is None else mesh_of(*shape)


def made_on(mesh, blank=False):
    with torch.device("meta" if blank else "cpu"):
        plain = words()
    model = zcompile.offload(plain, mesh=mesh, **BUDGETS)
    return model, adamw(model.parameters()), torch.compile(model, backend="zinf")


def stepped(run_, optimizer, step):
    run_(*batch(step, dist.get_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(mesh, shape, path):
    """Train a step and save; the digests, and the bytes of shares that this rank wrote."""
    model, optimizer, run_ = made_on(on(mesh, shape))
    stepped(run_, optimizer, 0)
    wrote, write = [], shares._Files.write

    def written(self, of_files):
        wrote.append(sum(part.nbytes for parts in of_files.values() for part in parts))
        write(self, of_files)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares._Files, "write", written)
        zcompile.save(path, model, optimizer, step=1)
    found = state_of(model, optimizer)
    zcompile.close(model)
    return found, sum(wrote)


def resumed(mesh, shape, path):
    model, optimizer, _ = made_on(on(mesh, shape), blank=True)
    assert zcompile.resume(path, model, optimizer)["step"] == 1
    found = state_of(model, optimizer)
    zcompile.close(model)
    return found


def test_the_first_group_saves_and_any_mesh_goes_on(pool, tmp_path):
    rows = pool.run(saved, 4, (2, 2), str(tmp_path / "groups"))
    state = trained_in_groups((2, 2), 1, 1)
    assert [found for found, _ in rows] == [state] * 4
    assert all(wrote for _, wrote in rows[:2])
    assert [wrote for _, wrote in rows[2:]] == [0, 0]
    for ranks, shape in ((2, None), (4, (2, 2))):
        assert pool.run(resumed, ranks, shape, str(tmp_path / "groups")) == [state] * ranks


@pytest.mark.slow
def test_checkpoints_go_from_any_mesh_to_any(pool, tmp_path):
    pool.run(saved, 4, (2, 2), str(tmp_path / "groups"))
    state = trained_in_groups((2, 2), 1, 1)
    for ranks, shape in ((1, None), (4, None), (4, (4, 1)), (4, (1, 4))):
        assert pool.run(resumed, ranks, shape, str(tmp_path / "groups")) == [state] * ranks
    rows = pool.run(saved, 4, None, str(tmp_path / "ranks"))
    assert pool.run(resumed, 4, (2, 2), str(tmp_path / "ranks")) == [rows[0][0]] * 4


# --- torch.distributed.checkpoint ---


def written_by_dcp(mesh, shape, path):
    model, optimizer, run_ = made_on(on(mesh, shape))
    stepped(run_, optimizer, 0)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=path, process_group=dist.group.WORLD if shape else None)
    found = state_of(model, optimizer)
    zcompile.close(model)
    return found


def read_by_dcp(mesh, shape, path):
    model, optimizer, run_ = made_on(on(mesh, shape))
    stepped(run_, optimizer, 7)  # it has states, of other values
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    group = dist.group.WORLD if shape else mesh.get_group()
    dcp.load(state, checkpoint_id=path, process_group=group)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    found = state_of(model, optimizer)
    zcompile.close(model)
    return found


@pytest.mark.slow
def test_distributed_checkpoints_go_both_ways(pool, tmp_path):
    for shape, others in (((2, 2), ((2, None), (4, (4, 1)))), (None, ((4, (2, 2)),))):
        path = str(tmp_path / f"{shape}")
        (state, *_) = pool.run(written_by_dcp, 4, shape, path)
        for ranks, other in others:
            assert pool.run(read_by_dcp, ranks, other, path) == [state] * ranks


# --- Durable runs ---

GROUPS = {"replicas": 2}


def check_goes_on(disk, begun, ranks, **fields):
    """Ranks go on from the last commit by a step; what they come to."""
    found = run(ranks, str(disk), 1, **fields)
    assert all("error" not in one for one in found), found
    assert [one["begun"] for one in found] == [begun] * ranks
    return found[0]["ended"]


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"partition": "owner"}])
def test_a_durable_run_goes_on_with_any_mesh_in_the_same_directory(tmp_path, fields):
    torch.set_num_threads(1)
    begun = state_of(model := words(), adamw(model.parameters()))
    at = check_goes_on(tmp_path, begun, 4, **GROUPS, **fields)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"rank-{n}-of-2x2" for n in range(4)]
    assert at == trained_in_groups((2, 2), 1, 1)
    at = check_goes_on(tmp_path, at, 4, **GROUPS, **fields)
    assert at == trained_in_groups((2, 2), 1, 2)
    for ranks, shape in ((4, {}), (2, {}), (4, GROUPS), (1, {}), (4, {"replicas": 4})):
        at = check_goes_on(tmp_path, at, ranks, **shape)


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(4))
def test_ranks_of_groups_that_are_killed_resume_at_one_step(tmp_path, victim):
    calls = len(run(4, str(tmp_path / "calm"), 2, **GROUPS)[victim]["calls"])
    fault = Fault(calls * (2 * victim + 1) // 8, made=victim % 2 == 0)
    group = Group(4, str(tmp_path / "run"), 2, ON_DISK, faults={victim: fault}, **GROUPS)
    found = group.outcomes(together=victim % 2 == 1)
    assert found[victim] is None, "it was killed"
    for one in (one for one in found if one is not None):
        kind, text = one["error"]
        assert kind == "RankFailed", text
        assert f"rank {victim} on " in text
    found = run(4, str(tmp_path / "run"), 1, **GROUPS)
    assert all("error" not in one for one in found), found
    (step,) = {one["found"] for one in found}
    for name, steps in (("begun", step), ("ended", step + 1)):
        assert [one[name] for one in found] == [trained_in_groups((2, 2), 1, steps)] * 4
