"""Ranks that give `zcompile.save` something else, or read other files: each of them is told, before
anything of several values is made, and the run can go on where it can."""

import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rank_models import digest
from safetensors.torch import load_file, save_file
from sampled import sampled
from torch import nn

import zcompile
from zcompile.checkpoint.safetensors import Row
from zcompile.checkpoint.shares import check_held_alike
from zcompile.checkpoint.stream import SAMPLE_BYTES, WINDOWS, windows_of
from zcompile.errors import RanksDiffer, Unsupported, ZinfError
from zcompile.ir.rank_mesh import RankMesh

BUDGETS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}


class Three(nn.Module):
    """Two shared tensors of one size, and one that is not row-major."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.full((256, 256), 1.0))
        self.b = nn.Parameter(torch.full((256, 256), 2.0))
        self.turned = nn.Parameter(torch.arange(131 * 140.0).view(131, 140).t())


def given_by(name, model, rank):
    """What a rank gives as `extra`."""
    a, b, turned = (p.detach() for p in (model.a, model.b, model.turned))
    first, second = {
        "another": (a, b),
        "transposed": (a, a.t()),
        "rows": (a[:128], a[128:]),
        "dtype": (a, a.view(torch.int32)),
        "size": (a, turned),
        "nothing": (a, None),
        "unpackable": (3, object()),
        "unpackable on all": (object(), object()),
    }[name]
    return first if rank == 0 else second


def saved_apart(mesh, path, name):
    """Save what differs by rank, then what does not; the error, and whether a step goes on."""
    rank = mesh.get_local_rank()
    model = zcompile.offload(Three(), mesh=mesh, rank_timeout=30, **BUDGETS)
    with pytest.raises(ZinfError) as caught:
        zcompile.save(path, model, kept=given_by(name, model, rank))
    left = os.path.exists(path)
    zcompile.save(path, model, kept=model.b.detach().t())
    total = float(model.a.sum())
    zcompile.close(model)
    return type(caught.value).__name__, str(caught.value), left, total


SAID = {
    "another": "as 'extra.kept' rank 0 saves 'a' (parameter float32[256, 256], strides [256, 1], "
    "of 262144 bytes), and rank 1 'b' (",
    "transposed": "and rank 1 'a' (parameter float32[256, 256], strides [1, 256], of",
    "rows": "strides [256, 1] from element 32768 on, of",
    "dtype": "int32[256, 256]",
    "size": "and rank 1 'turned' (",
    "nothing": "rank 0 saves 'extra.kept', of which all ranks hold shares, and rank 1 does not",
    "unpackable": "extra.kept is a builtins.object, which a checkpoint cannot keep",
    "unpackable on all": "extra.kept is a builtins.object, which a checkpoint cannot keep",
}


@pytest.mark.parametrize("name", sampled(sorted(SAID), "another", "unpackable"))
def test_ranks_that_save_something_else_are_told_and_go_on(pool, name, tmp_path):
    rows = pool.run(saved_apart, 2, str(tmp_path / "run"), name)
    for kind, text, left, total in rows:
        assert SAID[name] in text
        assert not left
        assert total == 256 * 256
        assert kind in ("Unsupported", "CheckpointUnwritable")
    assert rows[1][0] == "Unsupported"
    assert os.listdir(tmp_path) == ["run"]
    kept = load_file(tmp_path / "run" / "training.safetensors")["extra.kept"]
    assert torch.equal(kept, Three().b.detach().t())


def views_saved(mesh, path):
    """Save views that are no ranges of their tensor, an empty one among them, and read on."""
    model = zcompile.offload(Three(), mesh=mesh, **BUDGETS)
    a, turned = model.a.detach(), model.turned.detach()
    zcompile.save(path, model, none=a[:0], rows=turned[3:77], columns=a[:, 1:9], few=turned[:0])
    total = float(model.a.sum())
    zcompile.close(model)
    return total


def views_saved_apart(mesh, path):
    """The same, where rank 0 has a directory that others do not see."""
    there = Path(f"{path}-{mesh.get_local_rank()}")
    there.mkdir()
    before = os.getcwd()
    os.chdir(there)
    try:
        return views_saved(mesh, "run")
    finally:
        os.chdir(before)


@pytest.mark.parametrize("case", [views_saved, views_saved_apart])
def test_views_of_shared_tensors_are_saved_and_empty_ones_are_gathered_by_nobody(
    pool, case, tmp_path
):
    assert pool.run(case, 2, str(tmp_path / "run")) == [256 * 256] * 2
    folder = tmp_path / ("run" if case is views_saved else "run-0/run")
    found, model = load_file(folder / "training.safetensors"), Three()
    assert found["extra.none"].shape == (0, 256)
    assert torch.equal(found["extra.rows"], model.turned[3:77])
    assert torch.equal(found["extra.columns"], model.a[:, 1:9])
    assert digest(values_in(folder)) == digest(model.parameters())


def values_in(folder):
    found = load_file(folder / "model.safetensors")
    return [found[name] for name, _ in Three().named_parameters()]


def of_either_model(mesh, path, turned):
    """Save a tensor of one model on one rank, and of another of its class on the other."""
    rank = mesh.get_local_rank()
    models = [zcompile.offload(Three(), mesh=mesh, rank_timeout=30, **BUDGETS) for _ in range(2)]
    kept = (models[rank].turned if turned else models[rank].a).detach()
    with pytest.raises(ZinfError) as caught:
        zcompile.save(path, models[0], kept=kept)
    zcompile.save(path, models[0], kept=models[1].b.detach())
    for model in models:
        zcompile.close(model)
    return str(caught.value)


@pytest.mark.parametrize("turned", sampled([False, True], True))
def test_a_tensor_that_is_of_two_models_of_one_class_is_refused(pool, turned, tmp_path):
    name = "turned" if turned else "a"
    said = f"as 'extra.kept' rank 0 saves '{name}' of one model, and rank 1 that of another"
    assert all(said in text for text in pool.run(of_either_model, 2, str(tmp_path / "run"), turned))


def of_other_models(mesh, path):
    """Save tensors of a model beside; what is told where ranks hold that in another order."""
    model = zcompile.offload(Three(), mesh=mesh, **BUDGETS)
    beside = zcompile.offload(Three(), mesh=mesh, **BUDGETS)
    zcompile.save(path, model, kept=beside.b.detach(), more=beside.a.detach().t())
    others = SimpleNamespace(ranks=(1, 0), mesh=RankMesh(2))
    with pytest.raises(Unsupported) as caught:
        check_held_alike(others, {"kept": beside.b.detach()})
    zcompile.close(model)
    zcompile.close(beside)
    return str(caught.value)


def test_a_tensor_of_another_model_is_saved_and_of_another_mesh_is_refused(pool, tmp_path):
    first, second = pool.run(of_other_models, 2, str(tmp_path / "run"))
    said = "'kept' is of a model whose mesh has the ranks [0, 1] of the world, and the model that"
    assert said in first
    assert said in second
    kept = load_file(tmp_path / "run" / "training.safetensors")
    assert torch.equal(kept["extra.kept"], Three().b)
    assert torch.equal(kept["extra.more"], Three().a.t())


class One(nn.Module):
    def __init__(self, *size):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(*size))


def read_apart(mesh, path, *size):
    """Load the file of this rank; the error, or the bytes that this rank has."""
    model = zcompile.offload(One(*size), mesh=mesh, **BUDGETS)
    file = next(Path(path).glob(f"{mesh.get_local_rank()}.*"))
    with pytest.raises(RanksDiffer) as caught:
        zcompile.load(model, file)
    zcompile.close(model)
    return str(caught.value)


WIDE = torch.ones(15_000, dtype=torch.float64)
"""More than 64 KiB in the file, and less in a model of float32: every rank holds all of it."""


@pytest.mark.parametrize("kind", sampled(["safetensors", "bin"], "safetensors"))
@pytest.mark.parametrize(
    ("values", "differing"),
    [
        (WIDE, slice(8000, 8001)),
        (torch.ones(256, 256), slice(8, None)),
        (torch.ones(256, 256), slice(255, None)),
        (torch.ones(256, 256), slice(100, 140)),
    ],
    ids=["whole on each", "most", "the end", "a middle"],
)
def test_files_of_other_values_are_told_apart(pool, values, differing, kind, tmp_path):
    for rank in range(2):
        values[differing] = rank
        if kind == "bin":
            torch.save({"w": values}, tmp_path / f"{rank}.bin")
        else:
            save_file({"w": values}, tmp_path / f"{rank}.safetensors")
    for text in pool.run(read_apart, 2, str(tmp_path), *values.shape):
        assert "the ranks differ in how they load" in text


@pytest.mark.parametrize("count", [17, 1023, 1024, 40_001, 10_000_019])
@pytest.mark.parametrize("ranks", [2, 5, 64])
def test_windows_are_in_the_part_of_every_rank(count, ranks):
    windows = windows_of(Row(torch.float32, (count,), 0, 4 * count), ranks)
    assert windows[0][0] == 0
    assert windows[-1][1] == count
    assert all(first < last for first, last in windows)
    assert all(one[1] <= other[0] for one, other in pairwise(windows))
    assert sum(last - first for first, last in windows) * 4 <= SAMPLE_BYTES
    if len(windows) > 1:
        assert len(windows) == max(ranks, WINDOWS)
        for rank in range(ranks):
            begin, end = count * rank // ranks, count * (rank + 1) // ranks
            assert any(first < end and last > begin for first, last in windows)


def resumed_apart(mesh, path):
    """Resume what lies in the directory of this rank, a checkpoint or a commit."""
    model = zcompile.offload(Three(), mesh=mesh, **BUDGETS)
    with pytest.raises(RanksDiffer) as caught:
        zcompile.resume(f"{path}/{mesh.get_local_rank()}", model)
    zcompile.close(model)
    return str(caught.value)


def test_ranks_that_resume_other_checkpoints_of_equal_values_are_told(pool, tmp_path):
    for rank in range(2):
        zcompile.save(tmp_path / str(rank), Three(), step=rank)
    for text in pool.run(resumed_apart, 2, str(tmp_path)):
        assert "the ranks differ in how they resume" in text
        assert f"in {tmp_path}/1" in text


def test_ranks_that_resume_commits_of_other_trainings_are_told(pool, tmp_path):
    for rank in range(2):
        path = tmp_path / str(rank)
        model = zcompile.offload(Three(), mesh=False, disk=path, durable=True, **BUDGETS)
        zcompile.save(path, model)
        zcompile.close(model)
    for text in pool.run(resumed_apart, 2, str(tmp_path)):
        assert "the ranks differ in how they read what was committed" in text
        assert f"rank 1: read what was committed step 0 in {tmp_path}/1" in text


def committed_apart(mesh, path):
    """Save to the own durable directory what one rank cannot keep, then what both can."""
    rank = mesh.get_local_rank()
    model = zcompile.offload(Three(), mesh=mesh, disk=path, durable=True, **BUDGETS)
    with pytest.raises(ZinfError) as caught:
        zcompile.save(path, model, kept=object() if rank else 3)
    zcompile.save(path, model, kept=4)
    total = float(model.a.sum())
    zcompile.close(model)
    return str(caught.value), total


def test_a_commit_that_one_rank_refuses_is_made_by_none_and_the_run_goes_on(pool, tmp_path):
    (first, total), (second, _) = pool.run(committed_apart, 2, str(tmp_path / "run"))
    assert "rank 1 on " in first
    assert SAID["unpackable"] in first
    assert second.startswith(SAID["unpackable"])
    assert total == 256 * 256
    assert zcompile.resume(tmp_path / "run", Three()) == {"kept": 4, "step": 0}
