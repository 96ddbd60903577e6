"""What all groups are told when a rank of one of them fails, is killed, or does not come."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from rank_groups import mesh_of
from rank_models import adamw, batch, words
from rank_pool import RankPool
from sampled import sampled

import zcompile
from zcompile.errors import RankFailed, RanksDiffer, ZinfError
from zcompile.frontend.offload import session_behind

BUDGETS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}
PROMPT_S = 10.0
"""Seconds in which all ranks know, where they would wait for a minute if nobody told them."""
VICTIM = 3
"""Of the second group."""


@pytest.fixture
def pool_to_lose():
    """A pool that a rank is killed of."""
    made = RankPool(4)
    yield made
    made.close()


def told(_, name, **fields):
    """Train a step, then another one in which the last rank does something else; what this one
    meets, and when."""
    model = zcompile.offload(words(), mesh=mesh_of(2, 2), **BUDGETS, **fields)
    optimizer, run = adamw(model.parameters()), torch.compile(model, backend="zinf")
    rank = dist.get_rank()
    for step in range(2):
        if step and rank == VICTIM:
            globals()[name](model, optimizer)
        try:
            run(*batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        except (ZinfError, ValueError) as error:
            at = time.time()
            zcompile.close(model)
            return type(error).__name__, str(error), at
    zcompile.close(model)
    return "nothing", "", time.time()


def other_rate(model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.5


def refuse(_):
    raise ValueError("not today")


def raises(model, optimizer):
    model.blocks[0].up.weight.register_hook(refuse)


def loses_a_sum(model, optimizer):
    """What crosses between groups fails on this rank alone."""
    fabric = session_behind(model).fabric
    lane = fabric._lanes["replicate"]
    lane.posted = lambda what, posts: refuse(what)


def rests(model, optimizer):
    time.sleep(5.0)


def dies(model, optimizer):
    model.blocks[0].up.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))


def late(mesh):
    return told(mesh, "rests", rank_timeout="2s")


@pytest.mark.slow
def test_groups_that_differ_are_told_so(pool):
    for kind, text, _ in pool.run(told, 4, "other_rate"):
        assert kind == RanksDiffer.__name__
        assert "lr=0.5" in text
        assert f"rank {VICTIM}:" in text


@pytest.mark.parametrize("name", sampled(["raises", "loses_a_sum"], "loses_a_sum"))
def test_what_one_rank_raises_ends_both_groups(pool, name):
    *others, (kind, _, at) = pool.run(told, 4, name)
    assert kind == "ValueError"
    for kind, text, then in others:
        assert kind == RankFailed.__name__
        assert f"rank {VICTIM} on " in text
        assert "ValueError: not today" in text
        assert abs(then - at) < PROMPT_S


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_missed_by_both_groups(pool):
    for kind, text, _ in pool.run(late, 4):
        assert kind == RankFailed.__name__
        assert f"rank {VICTIM} on " in text
        assert "did not come within 2 s to agree on forward" in text


@pytest.mark.slow  # one that raises ends them too, above
def test_a_rank_that_is_killed_ends_both_groups(pool_to_lose):
    """In the middle of backward: its group waits for it, as does the rank that holds its share."""
    pool_to_lose.send(told, 4, "dies")
    began = time.time()
    for rank in range(VICTIM):
        ok, found = pool_to_lose.receive(rank)
        assert ok, found
        kind, text, at = found
        assert kind == RankFailed.__name__
        assert f"rank {VICTIM} on " in text
        assert "is gone" in text
        assert at - began < 2 * PROMPT_S
