"""Saving, resuming and loading with any number of ranks; what is read of a model outside of it."""

import copy
import io

import pytest
import torch
from rank_models import STEPS, adamw, batch, digest, state_of, train, trained_eagerly, words
from safetensors.torch import load_file
from sampled import sampled_rows

import zcompile

BUDGETS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}


def made_on(mesh, model=None):
    model = zcompile.offload(words() if model is None else model, mesh=mesh, **BUDGETS)
    return model, adamw(model.parameters()), torch.compile(model, backend="zinf")


def first_steps(mesh, path):
    """Train all steps but the last, and save."""
    model, optimizer, run = made_on(mesh)
    rank, ranks = (0, 1) if mesh is False else (mesh.get_local_rank(), mesh.size())
    train(model, run, optimizer, rank, ranks, steps=range(STEPS - 1))
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


@pytest.mark.slow  # one process goes on, below; tests/ranks/test_durable.py: 1, 2, 4
@pytest.mark.parametrize(("before", "after"), sampled_rows([(4, 2), (2, 4)], (4, 2)))
def test_a_run_goes_on_with_another_number_of_ranks(pool, before, after, tmp_path):
    saved = pool.run(first_steps, before, str(tmp_path / "run"))
    assert saved == [saved[0]] * before
    rows = pool.run(last_step, after, str(tmp_path / "run"))
    assert rows == [(saved[0], trained_eagerly())] * after


@pytest.mark.slow  # tests/ranks/test_durable.py goes on with more ranks
def test_one_process_saves_and_several_ranks_go_on(pool, tmp_path):
    saved = first_steps(False, tmp_path / "run")
    rows = pool.run(last_step, 2, str(tmp_path / "run"))
    assert rows == [(saved, trained_eagerly())] * 2


def test_several_ranks_save_and_one_process_goes_on(pool, tmp_path):
    (saved, _) = pool.run(first_steps, 2, str(tmp_path / "run"))
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
