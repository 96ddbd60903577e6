"""What fails on one rank while parameters are taken in is told to all of them: before anything has
moved, so that a training goes on, or else as the end of the session of all."""

import pytest
import torch
from rank_models import digest, words
from torch import nn

import zcompile
from zcompile.errors import RankFailed, TierFull, Unsupported, ZinfError
from zcompile.frontend.offload import session_behind

BUDGETS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB", "rank_timeout": 80}
"""Of a case, which is given 90 s: who is told by a time-out comes too late."""


def too_large_adapters(mesh, host_memory):
    """What each rank meets that adds two adapters, the second of which is too large where there is
    so little memory; whether they stayed plain, how many entries and whether bytes of them are
    left, and whether the weights are those of before; and whether a small one is taken in then."""
    rank = mesh.get_local_rank()
    fields = {**BUDGETS, "host_memory": host_memory[rank]}
    model = zcompile.offload(words(blocks=1), mesh=mesh, **fields)
    session, before = session_behind(model), digest(model.parameters())
    free, entries = session.free_bytes(), len(session.entries())
    adapters = nn.Sequential(nn.Linear(256, 256), nn.Linear(1024, 1024))
    model.adapters = adapters
    try:
        zcompile.offload(model)
        met = None
    except ZinfError as error:
        met = type(error).__name__, str(error)
    plain = not any(hasattr(param, "entry") for param in adapters.parameters())
    left = len(session.entries()) - entries  # which frees what is dead
    as_it_was = [plain, left, session.free_bytes() == free]
    model.adapters = nn.Linear(128, 128)
    zcompile.offload(model)
    taken = all(hasattr(param, "entry") for param in model.adapters.parameters())
    del model.adapters
    as_it_was.append(digest(model.parameters()) == before)
    zcompile.close(model)
    return met, as_it_was, taken


@pytest.mark.parametrize("host_memory", [("2MiB", "2MiB"), ("64MiB", "2MiB")])
def test_what_does_not_fit_is_refused_on_all_and_the_training_goes_on(pool, host_memory):
    found = pool.run(too_large_adapters, 2, host_memory)
    for rank, ((kind, text), as_it_was, taken) in enumerate(found):
        assert as_it_was == [True, 0, True, True]
        assert taken
        if host_memory[rank] == "2MiB":
            assert kind == TierFull.__name__
            assert "'adapters.1.weight'" in text
        else:
            assert kind == Unsupported.__name__
            assert "rank 1 on " in text
            assert "cannot take in parameters, so that no rank does: TierFull: no tier has" in text


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = words(blocks=1)
        self.register_buffer("seen", torch.arange(100.0))


def memory_is_short(*_):
    raise MemoryError("no memory is left")


def failing_at(mesh, place, builds):
    """What each rank meets where rank 1 fails at `place` while it offloads a model, or builds it
    with a weight that is put past torch's registration."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            if not builds:
                model = Buffered()
                if mesh.get_local_rank():
                    patch.setattr(place, memory_is_short)
                zcompile.offload(model, mesh=mesh, **BUDGETS)
            else:
                with zcompile.init(mesh=mesh, **BUDGETS):
                    model = Buffered()
                    model.words.head._parameters["weight"] = nn.Parameter(torch.zeros(200, 96))
                    if mesh.get_local_rank():
                        patch.setattr(place, memory_is_short)
        except (ZinfError, MemoryError) as error:
            return type(error).__name__, str(error)
    return "nothing", ""


HERE = "zcompile.frontend.offload."


@pytest.mark.parametrize(
    ("place", "builds"),
    [
        ("agree_on_parameters", False),
        ("_move_buffers", False),
        ("agree_on_buffers", False),
        ("_take_in", True),
        ("_move_buffers", True),
    ],
)
def test_what_fails_on_one_rank_on_the_way_ends_the_others_with_its_cause(pool, place, builds):
    (kind, text), failed = pool.run(failing_at, 2, HERE + place, builds)
    assert failed == ("MemoryError", "no memory is left")
    assert kind == RankFailed.__name__
    assert "rank 1 on " in text
    assert "MemoryError: no memory is left" in text
