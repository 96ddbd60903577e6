"""Saving, resuming and loading with any number of ranks; what is read of a model outside of it."""

import copy
import errno
import io
import os
import socket
from collections import Counter
from pathlib import Path

import pytest
import torch
from border import Border, offloaded
from heard import warnings_of
from rank_models import STEPS, adamw, batch, digest, state_of, train, trained_eagerly, words
from safetensors.torch import load_file
from sampled import sampled, sampled_rows
from torch import nn

import zcompile
from zcompile.checkpoint.stream import SAMPLE_BYTES
from zcompile.errors import ZinfError
from zcompile.ir.types import SMALL_BYTES

BUDGETS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}
LOGGER = "zcompile.checkpoint.shares"


def made_on(mesh, model=None):
    model = zcompile.offload(words() if model is None else model, mesh=mesh, **BUDGETS)
    return model, adamw(model.parameters()), torch.compile(model, backend="zinf")


def first_steps(mesh, path):
    """Train all steps but the last, and save."""
    model, optimizer, run = made_on(mesh)
    rank, ranks = (0, 1) if mesh is False else (mesh.get_local_rank(), mesh.size())
    train(model, run, optimizer, rank, ranks, steps=range(STEPS - 1))
    with pytest.MonkeyPatch.context() as patched:
        of_one_name(patched)
        zcompile.save(path, model, optimizer, step=STEPS - 1)
    found = state_of(model, optimizer)
    zcompile.close(model)
    return found


def last_step(mesh, path):
    """Resume on `meta`, and train the last step; the digests after resuming and at the end."""
    with torch.device("meta"):
        blank = words()
    model, optimizer, run = made_on(mesh, blank)
    extra = zcompile.resume(path, model, optimizer)
    begun = state_of(model, optimizer)
    rank, ranks = (0, 1) if mesh is False else (mesh.get_local_rank(), mesh.size())
    train(model, run, optimizer, rank, ranks, steps=range(extra["step"], STEPS))
    found = state_of(model, optimizer)
    zcompile.close(model)
    return begun, found


def first_digests(mesh, path):
    """Resume on `meta`."""
    with torch.device("meta"):
        blank = words()
    model, optimizer, _ = made_on(mesh, blank)
    zcompile.resume(path, model, optimizer)
    found = state_of(model, optimizer)
    zcompile.close(model)
    return found


@pytest.mark.parametrize(("before", "after"), sampled_rows([(4, 2), (2, 4), (4, 1)], (4, 2)))
def test_a_run_goes_on_with_another_number_of_ranks(pool, before, after, tmp_path):
    saved = pool.run(first_steps, before, str(tmp_path / "run"))
    assert saved == [saved[0]] * before
    rows = pool.run(last_step, after, str(tmp_path / "run"))
    assert rows == [(saved[0], trained_eagerly())] * after
    # As many batches are no multiple of three: what is there at once is the same.
    assert pool.run(first_digests, 3, str(tmp_path / "run")) == [saved[0]] * 3


@pytest.mark.slow  # tests/ranks/test_durable.py goes on with more ranks
def test_one_process_saves_and_several_ranks_go_on(pool, tmp_path):
    saved = first_steps(False, tmp_path / "run")
    rows = pool.run(last_step, 2, str(tmp_path / "run"))
    assert rows == [(saved, trained_eagerly())] * 2


@pytest.mark.slow
def test_several_ranks_save_and_one_process_goes_on(pool, tmp_path):
    (saved, _) = pool.run(first_steps, 2, str(tmp_path / "run"))
    first_steps(False, tmp_path / "one")
    assert bytes_in(tmp_path / "run", *OF_RANDOM_STATES) == bytes_in(
        tmp_path / "one", *OF_RANDOM_STATES
    )
    assert last_step(False, tmp_path / "run") == (saved, trained_eagerly())


def loaded(mesh, path):
    model, _, _ = made_on(mesh, words(width=96))
    torch.manual_seed(mesh.get_local_rank())
    zcompile.load(model, path)
    found = digest(model.parameters())
    zcompile.close(model)
    return found


@pytest.mark.slow  # who saves and who goes on load them, above
def test_weights_are_loaded_by_all_ranks(pool, tmp_path):
    pool.run(first_steps, 2, str(tmp_path / "run"))
    file = tmp_path / "run" / "model.safetensors"
    names = [name for name, _ in words().named_parameters()]
    expected = digest(load_file(file)[name] for name in names)
    assert pool.run(loaded, 4, str(file)) == [expected] * 4


class Odd(nn.Module):
    """Tensors that no page and no share ends with, in several dtypes and orders; some frozen, tied,
    or no parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.even = nn.Parameter(torch.randn(256, 256))
        self.odd = nn.Parameter(torch.randn(203, 97))
        self.tied = self.odd
        self.narrow = nn.Parameter(torch.randn(301, 151).bfloat16())
        self.frozen = nn.Parameter(torch.randn(256, 192).bfloat16(), requires_grad=False)
        self.few = nn.Parameter(torch.randn(17))
        self.turned = nn.Parameter(torch.randn(131, 140).t())
        self.register_buffer("seen", torch.arange(20_001))


def of_one_name(patched):
    """A context in which saves give their checkpoints one name, as no two have."""
    patched.setattr("zcompile.checkpoint.checkpoint.secrets.token_hex", lambda n: "0" * 2 * n)


def odd_saved(mesh, path, apart=False):
    """Save, on a rank in a directory of its own if `apart`; the warnings, and progress."""
    rank = 0 if mesh is False else mesh.get_local_rank()
    model = zcompile.offload(Odd(), mesh=mesh, **BUDGETS)
    told, before = [], os.getcwd()
    with pytest.MonkeyPatch.context() as patched, warnings_of(LOGGER) as said:
        of_one_name(patched)
        if apart and rank:
            (there := Path(f"{path}-{rank}")).mkdir()
            os.chdir(there)
        elif apart:
            os.chdir(Path(path).parent)
        try:
            zcompile.save(
                Path(path).name if apart else path,
                model,
                turned=model.even.detach().t(),
                of_rank=torch.full((3 + rank,), rank),
                progress=lambda *counts: told.append(counts),
            )
        finally:
            os.chdir(before)
    zcompile.close(model)
    return said, told


def bytes_in(path, *but):
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name not in but}


OF_RANDOM_STATES = ("training.json", "training.safetensors")
"""Files that grow with the number of ranks: they have the random state of each."""


@pytest.mark.parametrize("ranks", sampled([2, 3, 4], 3))
def test_ranks_write_the_bytes_that_one_process_writes(pool, ranks, tmp_path):
    _, (*_, (_, total)) = odd_saved(False, tmp_path / "one")
    rows = pool.run(odd_saved, ranks, str(tmp_path / "run"))
    assert [said for said, _ in rows] == [[]] * ranks
    one = bytes_in(tmp_path / "one", *OF_RANDOM_STATES)
    assert bytes_in(tmp_path / "run", *OF_RANDOM_STATES) == one
    # Each was told of all of its own, and together of all of it.
    assert all(told[-1][0] == told[-1][1] for _, told in rows)
    others = (ranks - 1) * 16384  # random states, and what the header says of them
    assert 0 <= sum(told[-1][1] for _, told in rows) - total < others
    assert max(told[-1][1] for _, told in rows[1:]) < total / ranks
    model = Odd()
    extra = zcompile.resume(tmp_path / "run", model)
    assert torch.equal(extra["turned"], model.even.t())
    assert extra["of_rank"].tolist() == [0, 0, 0]
    assert digest(model.state_dict().values()) == digest(Odd().state_dict().values())


def test_where_ranks_see_other_directories_rank_0_writes_all(pool, tmp_path):
    odd_saved(False, tmp_path / "one")
    (said, _), *others = pool.run(odd_saved, 2, str(tmp_path / "run"), True)
    host = socket.gethostname()
    assert said == [
        f"run, as rank 0 on {host} sees it, is not seen by rank 1 on {host}: rank 0 writes all of "
        "the checkpoint, tensor by tensor. Save to a directory that all machines share, so that "
        "each rank writes its part; or copy this one to the same path of each machine before "
        "zcompile.resume"
    ]
    assert [said for said, _ in others] == [[]]
    one = bytes_in(tmp_path / "one", *OF_RANDOM_STATES)
    assert bytes_in(tmp_path / "run", *OF_RANDOM_STATES) == one
    assert not any((tmp_path / "run-1").iterdir())


def saved_in_vain(mesh, path, failing):
    """Save; what `failing` names fails on rank 1 in a second save; then once more.

    The errors of the second save, and of another rank's if it is told; steps go on after it.
    """

    def around(call, go):
        of = str(call.of)
        if armed and mesh.get_local_rank() == 1 and call.name == failing and "partial" in of:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return go()

    armed = False
    model = offloaded(words(blocks=1), Border(around), mesh=mesh, **BUDGETS)
    zcompile.save(path, model, number=1)
    armed = True
    with pytest.raises(OSError, match="No space left on device") as caught:
        zcompile.save(path, model, number=2)
    armed = False
    kept = zcompile.resume(path, model)["number"]
    zcompile.save(path, model, number=3)
    zcompile.close(model)
    return str(caught.value), kept


@pytest.mark.parametrize("failing", sampled(["open", "pwrite", "fsync"], "pwrite"))
def test_a_failure_of_one_rank_is_told_to_all_and_the_run_goes_on(pool, failing, tmp_path):
    path = tmp_path / "run"
    rows = pool.run(saved_in_vain, 3, str(path), failing)
    assert [kept for _, kept in rows] == [1, 1, 1]
    for rank in (0, 2):
        assert rows[rank][0].startswith(
            f"[Errno 5] no checkpoint can be written to {path}: rank 1 on {socket.gethostname()} "
            "could not do its part: "
        )
        assert rows[rank][0].endswith(
            "mend that, and save again: what stood there stands, and the run can go on"
        )
    assert "could not do its part" not in rows[1][0]
    assert zcompile.resume(path, words(blocks=1)) == {"number": 3}
    assert os.listdir(tmp_path) == ["run"]


def other_tensors(mesh, path):
    model = zcompile.offload(words(blocks=1), mesh=mesh, **BUDGETS)
    more = {"kept": model.head.weight.detach()} if mesh.get_local_rank() == 0 else {}
    with pytest.raises(ZinfError) as caught:
        zcompile.save(path, model, **more)
    zcompile.close(model)
    return str(caught.value)


def test_ranks_that_save_other_shared_tensors_are_told(pool, tmp_path):
    (first, second) = pool.run(other_tensors, 2, str(tmp_path / "run"))
    told = "rank 0 saves 'extra.kept', of which all ranks hold shares, and rank 1 does not"
    assert told in first
    assert second.startswith(told)
    assert not os.listdir(tmp_path)


def bytes_read(mesh, path):
    """Resume; the bytes that this rank has read of the files of tensors."""
    counted = Counter()

    def around(call, go):
        found = go()
        if call.name == "pread" and call.of is not None and call.of.suffix == ".safetensors":
            counted[call.of.stem] += found
        return found

    model = offloaded(words(), Border(around), mesh=mesh, **BUDGETS)
    zcompile.resume(path, model)
    found = digest(model.parameters())
    zcompile.close(model)
    return found, counted["model"]


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_rank_reads_its_own_part_of_the_files(pool, ranks, tmp_path):
    model = zcompile.offload(words(), mesh=False, **BUDGETS)
    zcompile.save(tmp_path / "run", model)
    zcompile.close(model)
    small = 2 * sum(p.nbytes for p in words().parameters() if p.nbytes <= SMALL_BYTES)
    shared = [p for p in words().parameters() if p.nbytes > SMALL_BYTES]
    header = 2 * 4096
    for found, count in pool.run(bytes_read, ranks, str(tmp_path / "run")):
        assert found == digest(words().parameters())
        # Of each a share, up to 1024 elements more, and the sample that ranks compare.
        most = sum(p.nbytes // ranks + 4096 + SAMPLE_BYTES for p in shared)
        assert count <= header + small + most
        assert count >= sum(p.nbytes for p in shared) // 8


def read(mesh):
    """What users read of a model, each as a plain tensor or text."""
    model, optimizer, run = made_on(mesh)
    train(model, run, optimizer, mesh.get_local_rank(), mesh.size(), steps=range(1))
    weight = model.table.weight
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        eager = float(model(*batch(7, 0)))
        compiled = float(run(*batch(7, 0)))
    found = {
        "saved": digest(torch.load(file).values()),
        "printed": repr(weight),
        "norm": float(weight.norm()),
        "row": weight[3].tolist(),
        "copy": digest(copy.deepcopy(model).parameters()),
        "eager": eager,
        "compiled": compiled,
    }
    zcompile.close(model)
    return found


@pytest.mark.slow
def test_readers_outside_of_a_graph_see_whole_values(pool):
    (first, *others) = pool.run(read, 4)
    assert others == [first] * 3
    model = words()
    optimizer = adamw(model.parameters())
    train(model, model, optimizer, 0, 1, steps=range(1))
    with torch.no_grad():
        loss = float(model(*batch(7, 0)))
    assert first == {
        "saved": digest(model.state_dict().values()),
        "printed": repr(model.table.weight),
        "norm": float(model.table.weight.detach().norm()),
        "row": model.table.weight[3].tolist(),
        "copy": digest(model.parameters()),
        "eager": loss,
        "compiled": loss,
    }


def digests_after_writes(model):
    """Write to parameters outside of a graph, as loops do; of the parameters, and all in a row."""
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
            param.add_(torch.ones(param.shape))
        torch.manual_seed(3)
        model.head.weight.normal_()
        model.table.weight[5].fill_(7.0)
        model.load_state_dict({"norm.weight": torch.full((96,), 2.0)}, strict=False)
        far = torch.nn.utils.parameters_to_vector(model.parameters())
    return digest(model.parameters()), digest([far])


def written(mesh):
    model, _, _ = made_on(mesh)
    found = digests_after_writes(model)
    zcompile.close(model)
    return found


def test_writers_outside_of_a_graph_write_each_rank_s_share(pool):
    expected = digests_after_writes(words())
    assert pool.run(written, 4) == [expected] * 4
