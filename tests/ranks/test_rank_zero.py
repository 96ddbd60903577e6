"""Rank 0 reads alone what several ranks hold shares of, while the others send it their shares."""

import io

import pytest
import torch
from rank_models import adamw, batch, digest, state_of, train, words
from sampled import sampled_rows
from torch import nn

import zcompile
from zcompile.errors import ConfigInvalid, Unsupported

BUDGETS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}
STEPS = range(3)
"""The last is planned."""


def offloaded(mesh, **fields):
    model = zcompile.offload(words(), mesh=mesh, **BUDGETS, **fields)
    return model, adamw(model.parameters()), torch.compile(model, backend="zinf")


def go_on(mesh, made, steps=STEPS):
    model, optimizer, run = made
    train(model, run, optimizer, mesh.get_local_rank(), mesh.size(), steps=steps)
    return state_of(model, optimizer)


def tensors_of(model, optimizer):
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [*model.parameters(), *states]


def saved_by_rank_zero(mesh, directory, fields):
    """Train, save as a script does that knows of one process, and train on."""
    made = offloaded(mesh, disk=directory, **fields)
    model, optimizer, _ = made
    expected, memory = go_on(mesh, made), io.BytesIO()
    moved = zcompile.stats(model)["fabric"]["bytes"]
    with zcompile.rank_zero_reads(model, optimizer) as is_rank_zero:
        if is_rank_zero:
            torch.save([model.state_dict(), optimizer.state_dict()], memory)
            weight = next(model.parameters())
            assert torch.equal(weight.clone(), torch.from_numpy(weight.numpy(force=True).copy()))
    brought = zcompile.stats(model)["fabric"]["bytes"]["gather"] - moved["gather"]
    assert state_of(model, optimizer) == expected
    found = go_on(mesh, made, range(3, 4))
    zcompile.close(model)
    return is_rank_zero, expected, memory.getvalue(), brought, found


def never_saved(mesh):
    made = offloaded(mesh)
    go_on(mesh, made)
    found = go_on(mesh, made, range(3, 4))
    zcompile.close(made[0])
    return found


@pytest.mark.parametrize(
    ("ranks", "fields"),
    sampled_rows(
        [(2, {}), (2, {"stage": 2}), (2, {"partition": "owner"}), (4, {})],
        (2, {}),
        (2, {"partition": "owner"}),
    ),
)
def test_rank_zero_saves_as_a_process_alone_does(pool, ranks, fields, tmp_path):
    rows = pool.run(saved_by_rank_zero, ranks, str(tmp_path), fields)
    assert [row[0] for row in rows] == [True] + [False] * (ranks - 1)
    expected = rows[0][1]
    weights, states = torch.load(io.BytesIO(rows[0][2]))
    plain = words()
    plain.load_state_dict(weights)
    again = adamw(plain.parameters())
    again.load_state_dict(states)
    assert state_of(plain, again) == expected
    assert [row[4] for row in rows] == pool.run(never_saved, ranks)
    # Whoever is not rank 0 has sent its shares, and nothing else; where one owns, it may have none.
    assert sum(row[3] for row in rows[1:]) > 0


def interrupted_on(mesh, who):
    """One rank raises within the context: what each is told, and what all train to behind it."""
    made = offloaded(mesh)
    go_on(mesh, made)
    weight = next(made[0].parameters())
    try:
        with zcompile.rank_zero_reads(made[0]) as is_rank_zero:
            if mesh.get_local_rank() == who:
                raise OSError("no space left")
            if is_rank_zero:
                assert weight.detach().cpu().any()
        told = ""
    except (OSError, Unsupported) as error:
        told = f"{type(error).__name__}: {error}"
    found = go_on(mesh, made, range(3, 4))
    zcompile.close(made[0])
    return told, found


@pytest.mark.parametrize("who", [0, 1])
def test_what_fails_within_is_told_and_training_goes_on(pool, who):
    rows = pool.run(interrupted_on, 2, who)
    told = [row[0] for row in rows]
    assert told[who] == "OSError: no space left"
    if who == 0:
        assert told[1].startswith("Unsupported: rank 0 on ")
        assert "failed while it read alone: OSError: no space left; mend that there" in told[1]
    else:
        assert told[0] == ""
    assert [row[1] for row in rows] == pool.run(never_saved, 2)


def refused_within(mesh):
    """What each rank is told of what it may not do within; and what all train to behind it."""
    made = offloaded(mesh)
    model, optimizer, run = made
    go_on(mesh, made)
    run(*batch(3, mesh.get_local_rank())).backward()
    weight, told = next(model.parameters()), {}

    def attempt(name, act):
        try:
            act()
        except Unsupported as error:
            told[name] = str(error)

    with zcompile.rank_zero_reads(model):
        attempt("read", lambda: weight.detach().cpu())
        attempt("read a gradient", lambda: weight.grad.cpu())
        attempt("read a state", lambda: optimizer.state[weight]["exp_avg"].numpy())
        attempt("write", lambda: weight.detach().zero_())
        attempt("call", lambda: run(*batch(3, mesh.get_local_rank())))
        attempt("step", optimizer.step)
        attempt("measure", lambda: nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        attempt("save", lambda: zcompile.save("nowhere", model))
        attempt("enter again", lambda: zcompile.rank_zero_reads(model).__enter__())
    optimizer.zero_grad()
    found = go_on(mesh, made, range(3, 4))
    zcompile.close(model)
    return told, found


def test_whatever_all_ranks_do_is_refused_within(pool):
    rows = pool.run(refused_within, 2)
    first, other = (row[0] for row in rows)
    assert "read" not in first
    assert other["read"].startswith(
        "rank 1 reads 'table.weight' within zcompile.rank_zero_reads, where rank 0 alone reads"
    )
    for name in ("read a gradient", "read a state", "measure"):
        assert "none of what zcompile.rank_zero_reads was given" in first[name]
    for told in (first, other):
        for name in ("write", "call", "step", "save", "enter again"):
            assert "within zcompile.rank_zero_reads" in told[name], name
    assert [row[1] for row in rows] == pool.run(never_saved, 2)


def test_one_process_reads_as_ever(tmp_path):
    plain, model = words(), zcompile.offload(words(), **BUDGETS)
    for one in (plain, model):
        with zcompile.rank_zero_reads(one, adamw(one.parameters())) as is_rank_zero:
            assert is_rank_zero
    assert digest(model.parameters()) == digest(plain.parameters())
    with (
        pytest.raises(ConfigInvalid, match="neither a module nor an optimizer; give it those"),
        zcompile.rank_zero_reads(model.state_dict()),
    ):
        pass
