"""The processes of ranks end with their errors, whatever their threads wait for at that time."""

import atexit
import os
import signal
import sys
import time
import traceback

import pytest
import torch
import torch.distributed as dist
from ended_ranks import AtTheVeryEnd, await_the_very_end, ended, wait_for_others
from rank_models import adamw, batch, words
from sampled import sampled
from torch.distributed.device_mesh import DeviceMesh

import zcompile
from zcompile.errors import ZinfError
from zcompile.frontend.offload import session_behind
from zcompile.runtime.closing import _close_all as closing_hook
from zcompile.runtime.ranks.fabric import Fabric

BUDGETS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "64MiB"}


# --- A rank whose peer ends while the interpreter of this one is taken down ---


def waiting(path, kind):
    """Rank 0 waits for rank 1 in a thread of a lane, and is told that it has failed."""
    fabric = Fabric([0, 1], None, 60.0)
    fabric.agree("begin")
    if dist.get_rank() == 1:
        fabric.failed_here(ValueError("not today"))
        await_the_very_end(path)
    atexit.register(print, "the exit hook of the user")
    AtTheVeryEnd(path)
    try:
        wait_for_others(fabric, kind)
    finally:
        fabric.close(ZinfError("closed"))


@pytest.mark.parametrize("kind", sampled(["gather", "exchange", "agree"], "gather"))
def test_a_rank_that_waits_in_torch_ends_with_its_error(kind, tmp_path):
    """Its thread would come back into an interpreter that is gone, which ends the process by a
    signal."""
    os.mkfifo(path := tmp_path / "end")
    found, _ = ended(waiting, 2, tmp_path, path, kind)
    assert found.code == 1, found.said
    assert "RankFailed: rank 1 on " in found.said
    assert "ValueError: not today" in found.said
    assert "the exit hook of the user" in found.said


def leaving(path):
    """Rank 1 ends while it waits for rank 0, which goes on when rank 1 is gone."""
    fabric = Fabric([0, 1], None, 60.0)
    fabric.agree("begin")
    if dist.get_rank() == 1:
        os.open(path, os.O_WRONLY)  # until it ends
        fabric.gather(torch.zeros(1 << 20, dtype=torch.uint8), "w", [])
        while fabric._lanes["gather"].waiting is None:
            time.sleep(0.01)
    else:
        path.open("rb").read()
        fabric.agree("go on")
    fabric.close(ZinfError("closed"))


def test_a_rank_that_ends_blames_none_that_it_has_waited_for(tmp_path):
    """Its own end closes the connection to the other, which is not gone."""
    os.mkfifo(path := tmp_path / "end")
    stayed, left = ended(leaving, 2, tmp_path, path)
    assert (left.code, left.said) == (0, "")
    assert stayed.code == 1, stayed.said
    assert "RankFailed: rank 1 on " in stayed.said
    assert "has ended its run after begin" in stayed.said


def busy():
    """Rank 1 ends while a lane of it is busy by itself; a hook of the user's, which was there
    before zcompile was imported, then sends over the group of the user's mesh."""
    mesh = DeviceMesh("cpu", [0, 1])
    fabric = Fabric([0, 1], mesh.get_group(), 60.0)
    fabric.agree("begin")
    told = torch.zeros(1)
    if dist.get_rank() == 0:
        dist.recv(told, 1, mesh.get_group())
        assert told.item() == 7.0
    else:
        atexit.unregister(closing_hook)
        atexit.register(lambda: dist.send(told + 7.0, 0, mesh.get_group()))
        atexit.register(closing_hook)
        fabric._submit("exchange", "add up", lambda: time.sleep(1.0), (), 0)
    fabric.close(ZinfError("closed"))


def test_a_lane_that_waits_for_nobody_closes_no_group_of_the_users(tmp_path):
    assert ended(busy, 2, tmp_path) == [(0, ""), (0, "")]


# --- Training that fails ---


def fail(cause):
    """End this rank, or let it come too late."""
    if cause == "raises":
        raise ValueError("not today")
    if cause == "exits":
        sys.exit(3)
    if cause == "is interrupted":
        signal.raise_signal(signal.SIGINT)
    if cause == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(5.0)


def training(cause, place, culprit, closes):
    """Train a step; in the next one a rank fails: before its call, or within, where it gathers or
    exchanges."""
    rank, timeout = dist.get_rank(), "2s" if cause == "comes late" else "60s"
    atexit.register(print, "the exit hook of the user")
    model = zcompile.offload(words(), **BUDGETS, stage=3, rank_timeout=timeout)
    optimizer, run = adamw(model.parameters()), torch.compile(model, backend="zinf")
    fabric, names = session_behind(model).fabric, []

    def noting(act):
        def acts(what, second, *args, **more):
            names.append(second if isinstance(second, str) else args[0])
            if rank == culprit and armed and "down" in names[-1]:
                fail(cause)
            return act(what, second, *args, **more)

        return acts

    armed = False
    if place != "agree":
        setattr(fabric, place, noting(getattr(fabric, place)))
    for step in range(2):
        if rank == culprit and armed and place == "agree":
            fail(cause)
        try:
            run(*batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        except ZinfError:
            if not closes:
                raise
            zcompile.close(model)
            traceback.print_exc()
            sys.exit(1)
        armed = True


CAUSES = {
    "raises": (1, "failed: ValueError: not today"),
    "exits": (3, "failed: SystemExit: 3"),
    "is interrupted": (1, "failed: KeyboardInterrupt"),
    "is killed": (-signal.SIGKILL, "its process ended without a word"),
    "comes late": (1, "did not come within 2 s"),
}
"""What a rank does -> its exit code, and what the others are told."""


@pytest.mark.slow
@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("place", ["agree", "gather", "exchange"])
@pytest.mark.parametrize("cause", CAUSES)
def test_all_ranks_end_with_their_errors(cause, place, ranks, closes, tmp_path):
    code, told = CAUSES[cause]
    if (cause, place) == ("exits", "agree"):
        told = "has ended its run"  # between two calls that is no failure
    for rank, found in enumerate(ended(training, ranks, tmp_path, cause, place, 1, closes)):
        assert found.code == (code if rank == 1 else 1), found.said
        if rank != 1:
            assert "rank 1 on " in found.said
            assert told in found.said
        if found.code != -signal.SIGKILL:
            assert found.said.endswith("the exit hook of the user\n")
