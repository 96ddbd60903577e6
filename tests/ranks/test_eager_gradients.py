"""Gradients that compiled graphs do not make: of a model that is not compiled, of the part that a
graph break leaves, of a loss beside it, and what a user sets. Ranks train with them as with any."""

import pytest
import torch
from gradients_beside import built, called
from rank_models import Means, adamw, batch, state_of, words
from rank_pool import RankRaised
from torch import nn

import zcompile

FIELDS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}
STEPS, MICRO_BATCHES = 2, 2


def trained(mesh, kind, fields=None):
    """Digests after some steps of micro-batches."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    model = zcompile.offload(built(kind), mesh=mesh, **{**FIELDS, **(fields or {})})
    optimizer = adamw(model.parameters())
    run = model if kind == "eager" else torch.compile(model, backend="zinf")
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            called(kind, model, run, 100 * step + micro * ranks + rank).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
    found = state_of(model, optimizer)
    zcompile.close(model)
    return found


def in_one_process(mesh, kind, ranks):
    model = built(kind)
    optimizer, means = adamw(model.parameters()), Means(model, ranks)
    for step in range(STEPS):
        for number in range(MICRO_BATCHES * ranks):
            called(kind, model, model, 100 * step + number).backward()
            means.take()
        means.give()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model, optimizer)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        pytest.param("eager", {}, marks=pytest.mark.slow),
        pytest.param("loss beside", {}, marks=pytest.mark.slow),
        ("broken", {}),
        pytest.param("broken", {"partition": "owner"}, marks=pytest.mark.slow),
    ],
)
def test_ranks_have_the_bits_of_one_process(pool, kind, fields):
    ranks = 3 if kind == "eager" else 2
    expected = pool.run(in_one_process, 1, kind, ranks)
    assert pool.run(trained, ranks, kind, fields) == expected * ranks


# --- What a user sets or adds ---


def set_and_added(mesh, kind):
    """Steps from gradients of a user's own, or that a hook adds to; digests, and what was seen."""
    alone = mesh is None
    model = words(blocks=1)
    if not alone:
        zcompile.offload(model, mesh=mesh, **FIELDS)
    optimizer = adamw(model.parameters())
    seen = []
    if kind == "hook":

        def more(param):
            param.grad.add_(torch.full(param.shape, 0.5))
            seen.append(float(param.grad.sum()))

        model.head.weight.register_post_accumulate_grad_hook(more)
    for _ in range(2):
        model(*batch(0, 0)).backward()  # of all ranks: their mean is that of one
        if kind == "set":
            for param in model.parameters():
                param.grad = torch.full(param.shape, 0.25)
        model.norm.weight.grad = None
        model.norm.weight.grad = torch.ones(96)
        if kind == "set":
            seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model, optimizer), seen


@pytest.mark.parametrize("kind", ["set", "hook"])
def test_gradients_that_are_the_same_on_all_ranks_are_taken(pool, kind):
    first, second = pool.run(set_and_added, 2, kind)
    assert first == second == set_and_added(None, kind)


def differing(mesh, kind):
    rank = mesh.get_local_rank()
    model = zcompile.offload(words(blocks=1), mesh=mesh, **FIELDS)
    optimizer = adamw(model.parameters())
    if kind == "set":
        model.head.weight.grad = torch.full((200, 96), float(rank))
    elif kind == "hook":
        model.head.weight.register_hook(lambda grad: grad * 2)
        loss = torch.compile(model, backend="zinf")(*batch(0, rank))
        (loss + model.head.weight.square().sum()).backward()
    elif kind == "graph":
        model(*batch(0, rank)).backward(create_graph=True)
    elif kind == "set before":
        model.head.weight.grad = torch.zeros(200, 96)
        model(*batch(0, rank)).backward()
    else:
        param = model.head.weight if rank else model.table.weight
        param.square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("set", r"RanksDiffer: the ranks differ in how they set a gradient"),
        ("made of another", r"RanksDiffer: the ranks differ in how they"),
        ("hook", r"parameter 'head.weight' has a hook and gets gradients both from the compiled"),
        ("graph", r"is to have a graph \(create_graph=True\), and several ranks"),
        ("set before", r"the .grad of 'head.weight' was set to a plain tensor before backward"),
    ],
)
def test_gradients_that_differ_are_told(pool, kind, says):
    with pytest.raises(RankRaised, match=says):
        pool.run(differing, 2, kind)
