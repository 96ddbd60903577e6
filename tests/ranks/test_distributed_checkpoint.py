"""torch.distributed.checkpoint writes and reads shares: from and to any number of ranks, and from
and to plain PyTorch in one process."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rank_models import STEPS, adamw, state_of, train, trained_eagerly, words
from sampled import sampled, sampled_rows
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zcompile

BUDGETS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}


def everything(model, optimizer, by_name):
    """The state of a training, as users give it to DCP."""
    if by_name:
        weights, states = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": states}
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def put_back(model, optimizer, state, by_name):
    if by_name:
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    else:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


def made_on(mesh, **fields):
    """A model and its optimizer on some ranks; None: plain, in this process."""
    model = run = words()
    if mesh is not None:
        run = torch.compile(zcompile.offload(model, mesh=mesh, **BUDGETS, **fields), backend="zinf")
    rank, ranks = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
    return model, adamw(model.parameters()), run, rank, ranks


def group_of(mesh):
    return {"no_dist": True} if mesh is None else {"process_group": mesh.get_group()}


def saved(mesh, path, by_name=False, **fields):
    """Train all steps but the last, and let DCP save."""
    model, optimizer, run, rank, ranks = made_on(mesh, **fields)
    train(model, run, optimizer, rank, ranks, steps=range(STEPS - 1))
    dcp.save(everything(model, optimizer, by_name), checkpoint_id=path, **group_of(mesh))
    found = state_of(model, optimizer)
    if mesh is not None:
        zcompile.close(model)
    return found


def loaded(mesh, path, by_name=False, **fields):
    """Let DCP load into a training of other values, and train the last step."""
    model, optimizer, run, rank, ranks = made_on(mesh, **fields)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    train(model, run, optimizer, rank, ranks, steps=[7])  # its optimizer has states
    state = everything(model, optimizer, by_name)
    dcp.load(state, checkpoint_id=path, **group_of(mesh))
    put_back(model, optimizer, state, by_name)
    begun = state_of(model, optimizer)
    train(model, run, optimizer, rank, ranks, steps=[STEPS - 1])
    found = state_of(model, optimizer)
    if mesh is not None:
        zcompile.close(model)
    return begun, found


@pytest.mark.slow  # ranks and plain torch read each other's, below
@pytest.mark.parametrize(("before", "after"), sampled_rows([(2, 4), (4, 1)], (4, 1)))
def test_other_ranks_go_on_from_what_dcp_wrote(pool, tmp_path, before, after):
    path = str(tmp_path / "dcp")
    written = pool.run(saved, before, path)
    assert written == [written[0]] * before
    rows = pool.run(loaded, after, path)
    assert [begun for begun, _ in rows] == [written[0]] * after
    assert [found for _, found in rows] == [trained_eagerly()] * after


@pytest.mark.parametrize("by_name", sampled([False, True], True))
def test_plain_torch_reads_what_ranks_wrote(pool, tmp_path, by_name):
    (written, _) = pool.run(saved, 2, str(tmp_path / "dcp"), by_name)
    assert loaded(None, tmp_path / "dcp", by_name) == (written, trained_eagerly())


@pytest.mark.parametrize("by_name", sampled([False, True], False))
def test_ranks_read_what_plain_torch_wrote(pool, tmp_path, by_name):
    written = saved(None, tmp_path / "dcp", by_name)
    expected = written, trained_eagerly()
    assert pool.run(loaded, 2, str(tmp_path / "dcp"), by_name) == [expected] * 2


def saved_by_owners(mesh, path):
    return saved(mesh, path, partition="owner")


def loaded_by_owners(mesh, path):
    return loaded(mesh, path, partition="owner")


@pytest.mark.slow
def test_what_owners_wrote_is_read_by_slices_and_the_other_way_round(pool, tmp_path):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    written = pool.run(saved_by_owners, 2, first)
    assert written == pool.run(saved, 2, second)
    rows = pool.run(loaded, 2, first), pool.run(loaded_by_owners, 2, second)
    assert rows == ([(written[0], trained_eagerly())] * 2,) * 2


def turned(mesh, path, save):
    """Weights whose storage is not row-major, and that do not divide."""
    torch.manual_seed(0)
    holder = torch.nn.Module()
    holder.turned = torch.nn.Parameter(torch.randn(91, 7, 67).permute(2, 0, 1))
    holder.narrow = torch.nn.Parameter(torch.randn(60_001).bfloat16())
    expected = copy.deepcopy(holder.state_dict())
    zcompile.offload(holder, mesh=mesh, **BUDGETS)
    if save:
        dcp.save(holder.state_dict(), checkpoint_id=path, **group_of(mesh))
    else:
        with torch.no_grad():
            holder.turned.zero_()
            holder.narrow.zero_()
        state = holder.state_dict()
        dcp.load(state, checkpoint_id=path, **group_of(mesh))
    same = all(torch.equal(value.cpu(), expected[n]) for n, value in holder.state_dict().items())
    zcompile.close(holder)
    return same


@pytest.mark.slow  # tests/ranks/test_trains.py shares any layout
def test_blocks_of_any_layout_come_back(pool, tmp_path):
    assert pool.run(turned, 3, str(tmp_path / "dcp"), True) == [True] * 3
    assert pool.run(turned, 2, str(tmp_path / "dcp"), False) == [True] * 2


def test_one_process_saves_and_loads_a_tiered_model_by_dcp(tmp_path):
    model = zcompile.offload(words(), **BUDGETS)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    plain = words()
    with torch.no_grad():
        for param in (*model.parameters(), *plain.parameters()):
            param.zero_()
    for one in (model, plain):
        state = one.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
        for name, value in words().state_dict().items():
            assert torch.equal(one.state_dict()[name].cpu(), value)
    zcompile.close(model)
