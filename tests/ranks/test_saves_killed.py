"""A rank is killed at calls on files while all save: the checkpoint before it stands, or the new
one does, whole; and the next save leaves nothing else behind."""

import os
import signal

import pytest
import torch
from border import Border, offloaded
from rank_models import digest, words
from rank_pool import RankPool, RankRaised

import zcompile
from zcompile.errors import RankFailed

BUDGETS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}


def saved_twice(mesh, path, victim, name, made):
    """Save, halve the weights, save: at the first call `name` of the second save `victim` dies."""

    def around(call, go):
        if not armed or call.name != name or mesh.get_local_rank() != victim:
            return go()
        if made:
            go()
        os.kill(os.getpid(), signal.SIGKILL)

    armed = False
    model = offloaded(words(blocks=1), Border(around), mesh=mesh, **BUDGETS)
    zcompile.save(path, model, number=1)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    armed = True
    try:
        zcompile.save(path, model, number=2)
    except RankFailed as error:
        text = str(error)
    else:
        text = ""
    zcompile.close(model)
    return text


def halved():
    model = words(blocks=1)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    return model


CASES = [
    (rank, name, made)
    for rank, names in (
        (0, ("mkdir", "allocate", "unlink", "pwrite", "truncate", "exchange", "rmdir")),
        (1, ("open", "pwrite", "truncate", "fsync")),
    )
    for name in names
    for made in (False, True)
]


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("victim", "name", "made"), CASES)
def test_a_kill_leaves_the_old_checkpoint_or_the_new_one(victim, name, made, tmp_path):
    path = tmp_path / "run"
    pool = RankPool(2)
    try:
        pool.send(saved_twice, 2, str(path), victim, name, made)
        with pytest.raises((EOFError, ConnectionError)):
            pool.receive(victim)
        ok, text = pool.receive(1 - victim)
        assert ok, text
        assert f"rank {victim} on " in text
    except RankRaised as error:
        raise AssertionError("a rank hangs") from error
    finally:
        pool.close()
    found = words(blocks=1)
    number = zcompile.resume(path, found)["number"]
    expected = halved() if number == 2 else words(blocks=1)
    assert digest(found.parameters()) == digest(expected.parameters())
    if victim == 1:
        assert number == 1
    # The next save finds nothing in its way, and nothing of the killed one is left.
    zcompile.save(path, found, number=3)
    assert os.listdir(tmp_path) == ["run"]
