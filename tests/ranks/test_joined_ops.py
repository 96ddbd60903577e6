"""Optimizers that compute op by op update shares where they rest: what a step does to a parameter
is one row, on which the ranks agree once, and for which nothing is gathered."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_models import batch, state_of, train, words
from sampled import sampled
from torch import nn, optim

import zcompile
from zcompile.errors import RanksDiffer, ZinfError
from zcompile.frontend.offload import session_behind
from zcompile.runtime.eager import joined
from zcompile.runtime.ranks.fabric import RECORD_BYTES

BUDGETS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}

OP_BY_OP = {
    "AdamW": lambda p: optim.AdamW(p, lr=1e-3, foreach=False),
    "Adam, amsgrad": lambda p: optim.Adam(p, lr=1e-3, amsgrad=True, weight_decay=0.1),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.1),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-2),
    "ASGD": lambda p: optim.ASGD(p, lr=1e-2),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-3),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-3),
    "RMSprop, centered": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "SGD, Nesterov": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
}
WITH_OTHER_OPS = ("Adam, amsgrad", "ASGD")
"""Of which some ops do not wait, as those with `out=`: on each the ranks agree by itself."""
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


@pytest.mark.parametrize("name", sampled([*OP_BY_OP], "AdamW"))
def test_an_optimizer_that_computes_op_by_op_gathers_nothing(pool, name):
    rows = pool.run(trained, 2, name)
    assert [found for found, _ in rows] == [trained_eagerly(name)] * 2
    assert [crossed["gather"] for _, crossed in rows] == [0, 0]
    once = [crossed["agree"] == RECORD_BYTES for _, crossed in rows]
    assert once == [name not in WITH_OTHER_OPS] * 2


@pytest.mark.parametrize("name", sampled([*GATHERED], "Adafactor"))
@pytest.mark.slow
def test_results_of_which_the_whole_is_asked_for_are_gathered(pool, name):
    rows = pool.run(trained, 2, name)
    assert [found for found, _ in rows] == [trained_eagerly(name)] * 2
    assert all(crossed["gather"] > 0 for _, crossed in rows)


class Keeping(optim.Optimizer):
    """Keeps two results for each parameter."""

    def __init__(self, params):
        super().__init__(params, {})
        self.kept = []

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            self.kept += [p * 2, p * 3, p * 4]
            p.mul_(0.5)


def kept_results(mesh, order, device_memory="4MiB"):
    """Whether results are what they were made as, read in this order after the step, which has
    changed what they were made of; or the error."""
    torch.manual_seed(0)
    weight = torch.randn(130, 150).t()  # as it lies
    model = nn.Linear(130, 150, bias=False)
    model.weight = nn.Parameter(weight)
    fields = {**BUDGETS, "device_memory": device_memory}
    model = zcompile.offload(model, mesh=mesh, **fields)
    optimizer, found = Keeping(model.parameters()), {}
    torch.compile(model, backend="zinf")(torch.ones(2, 130)).sum().backward()
    try:
        # Ops of users do not wait; these stand for what torch's optimizers may keep.
        with mock.patch.object(joined, "_is_called_by_torchs_optimizers", return_value=True):
            optimizer.step()
        for at in order[mesh.get_local_rank()]:
            assert isinstance(optimizer.kept[at], joined.LazyResult)
            found[at] = torch.equal(optimizer.kept[at] + 0, weight * (2 + at))
    except ZinfError as error:
        found = f"{type(error).__name__}: {error}"
    dist.barrier(mesh.get_group())  # else one that ends first may be told by another
    zcompile.close(model)
    return found


def test_results_that_are_kept_are_read_whole_as_they_were_made(pool):
    assert pool.run(kept_results, 2, [(0, 1)] * 2) == [{0: True, 1: True}] * 2


def test_ranks_that_read_other_results_are_told(pool):
    for text in pool.run(kept_results, 2, [(0, 1), (1, 0)]):
        assert text.startswith("RanksDiffer: ")
        assert "rank 0: read 'result 0 of Keeping'" in text
        assert "rank 1: read 'result 1 of Keeping'" in text


def test_a_result_for_which_there_is_no_room_is_refused(pool):
    for text in pool.run(kept_results, 2, [(0, 1)] * 2, "160KiB"):
        assert text.startswith("BudgetExceeded: a result of an optimizer, which takes whole"), text


UNEVEN = {**BUDGETS, "throttle": {"h2d": "50MB/s", "d2h": "50MB/s"}}


def uneven(mesh, name):
    """The weights after steps in which ranks have batches of other sizes, so that each plans by
    itself what rests where, and which updates are late; with a second step that no forward comes
    before."""
    model = zcompile.offload(words(blocks=2), mesh=mesh, **UNEVEN)
    optimizer, run = UNEVENLY[name](model.parameters()), torch.compile(model, backend="zinf")
    rank = mesh.get_local_rank()
    homes = []
    for step in range(8):
        drawn = torch.Generator().manual_seed(2 * step + rank)
        ids = torch.randint(200, ((2, 12)[rank], (8, 32)[rank] + 1), generator=drawn)
        run(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).backward()
        optimizer.step()
        homes = [entry.home for entry in session_behind(model).entries()]
        if step == 6:
            optimizer.step()
        optimizer.zero_grad()
    found = state_of(model, optimizer)
    zcompile.close(model)
    return found, homes


UNEVENLY = {
    "op by op": lambda p: optim.AdamW(p, lr=1e-3, foreach=False),
    "in lists": lambda p: optim.AdamW(p, lr=1e-3, foreach=True),
}


@pytest.mark.parametrize("name", sampled([*UNEVENLY], "op by op"))
@pytest.mark.slow
def test_what_each_rank_plans_by_itself_changes_nothing_that_they_agree_on(pool, name):
    (found, homes), (others, elsewhere) = pool.run(uneven, 2, name)
    assert found == others
    assert homes != elsewhere, "each rank has a plan of its own"


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


def test_ranks_that_differ_in_ops_that_waited_are_told_with_what(pool):
    for text in pool.run(with_another_rate, 2):
        assert "call ops of AdamW" in text
        assert "'table.weight'" in text
        assert "rank 0: call" in text
        assert "with 0.99999, " in text
        assert "with 0.99998, " in text
