"""Optimizers that compute op by op update shares where they rest: what a step does to a parameter
is one row, on which the ranks agree once, and for which nothing is gathered."""

import pytest
import torch
from rank_models import batch, state_of, train, words
from sampled import sampled
from torch import optim

import zcompile
from zcompile.errors import RanksDiffer

BUDGETS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}

OP_BY_OP = {
    "AdamW": lambda p: optim.AdamW(p, lr=1e-3, foreach=False),
    "AdamW in lists": lambda p: optim.AdamW(p, lr=1e-3, foreach=True),
    "Adam, amsgrad": lambda p: optim.Adam(p, lr=1e-3, amsgrad=True, weight_decay=0.1),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.1),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-2),
    "ASGD": lambda p: optim.ASGD(p, lr=1e-2),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-3),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-3),
    "RMSprop, centered": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "SGD, Nesterov": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
}
GATHERED = {
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
    "Adamax": lambda p: optim.Adamax(p, lr=1e-3),
    "Rprop": lambda p: optim.Rprop(p, lr=1e-3),
}
"""Norms, `out=` and indices are asked for of whole tensors, some of which ops before have made."""
MAKERS = {**OP_BY_OP, **GATHERED}


def trained(mesh, name):
    """The state after three steps, and what crosses in the last step of the optimizer."""
    model = zcompile.offload(words(), mesh=mesh, **BUDGETS)
    optimizer, run = MAKERS[name](model.parameters()), torch.compile(model, backend="zinf")
    rank, ranks = mesh.get_local_rank(), mesh.size()
    train(model, run, optimizer, rank, ranks, steps=range(2))
    for number in range(rank, 4, ranks):
        (run(*batch(2, number)) / (4 // ranks)).backward()
    zcompile.stats(model, reset=True)
    optimizer.step()
    crossed = zcompile.stats(model)["fabric"]["bytes"]
    found = state_of(model, optimizer)
    zcompile.close(model)
    return found, crossed


def trained_eagerly(name):
    model = words()
    optimizer = MAKERS[name](model.parameters())
    train(model, model, optimizer, 0, 1)
    return state_of(model, optimizer)


@pytest.mark.parametrize("name", sampled([*OP_BY_OP], "AdamW", "RMSprop, centered"))
def test_an_optimizer_that_computes_op_by_op_gathers_nothing(pool, name):
    rows = pool.run(trained, 2, name)
    assert [found for found, _ in rows] == [trained_eagerly(name)] * 2
    assert [crossed["gather"] for _, crossed in rows] == [0, 0]


@pytest.mark.parametrize("name", sampled([*GATHERED], "Adafactor"))
def test_results_of_which_the_whole_is_asked_for_are_gathered(pool, name):
    rows = pool.run(trained, 2, name)
    assert [found for found, _ in rows] == [trained_eagerly(name)] * 2
    assert all(crossed["gather"] > 0 for _, crossed in rows)


def with_another_rate(mesh):
    """The error where a rank has another rate."""
    model = zcompile.offload(words(), mesh=mesh, **BUDGETS)
    run, rank = torch.compile(model, backend="zinf"), mesh.get_local_rank()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3 * (1 + rank), foreach=False)
    run(*batch(0, rank)).backward()
    with pytest.raises(RanksDiffer) as met:
        optimizer.step()
    zcompile.close(model)
    return str(met.value)


def test_ranks_that_differ_are_told_so_before_any_op_runs(pool):
    for text in pool.run(with_another_rate, 2):
        assert "call ops of AdamW" in text
        assert "'table.weight'" in text
        assert "rank 0: call" in text
        assert "with 0.99999, " in text
        assert "with 0.99998, " in text
