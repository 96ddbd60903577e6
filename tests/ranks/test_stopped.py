"""A rank is stopped, as by a debugger or with its container: the others end with an error about it.

Rank 0 has the store of torch.distributed in its process: no call of that comes back meanwhile.
"""

import atexit
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch.distributed as dist
from ended_ranks import PATIENCE_S, ended, wait_for_others
from sampled import sampled_rows

from zcompile.errors import ZinfError
from zcompile.runtime.ranks.fabric import Fabric


class Ranks(Fabric):
    """Two ranks that wait for each other for a second once they have begun: a machine that is busy
    is not taken for one that stands still."""

    def __init__(self) -> None:
        super().__init__([0, 1], None, 60.0)
        self.agree("begin")
        self._watch._timeout_s = 1.0

    def close(self) -> None:
        super().close(ZinfError("closed"))


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def standing_still(who, kind):
    """One rank is stopped until the other has ended, which waits for it."""
    with closing(Ranks()) as fabric:
        atexit.register(print, "the exit hook of the user")
        if dist.get_rank() == who:
            stop()
        wait_for_others(fabric, kind)


SILENT = "rank 0 on .* has not answered for 1 s: its process keeps the store of torch.distributed"
LATE = "rank 1 on .* did not come within 1 s to "


@pytest.mark.parametrize(
    ("who", "told", "kind"),
    sampled_rows(
        [(w, t, k) for w, t in [(0, SILENT), (1, LATE)] for k in ("agree", "gather", "exchange")],
        (0, SILENT, "gather"),
    ),
)
def test_a_rank_that_stands_still_is_named(who, told, kind, tmp_path):
    found = ended(standing_still, 2, tmp_path, who, kind, stopped=who)
    waited, stood = found[1 - who], found[who]
    assert waited.code == 1, waited.said
    assert re.search(told, waited.said)
    assert waited.said.endswith("the exit hook of the user\n")
    # When it goes on, the other is gone, or it has still read what that has said.
    assert stood.code == 1, stood.said
    assert re.search(rf"RankFailed: .*(while rank {who} stood still|{told})", stood.said)
    assert stood.said.endswith("the exit hook of the user\n")


def going_on(path, who):
    """One rank is stopped for longer than the store is waited for in any other way, and goes on."""
    with closing(Ranks()) as fabric:
        fabric._watch._timeout_s = 60.0
        if dist.get_rank() == who:
            path.write_text(str(os.getpid()))
            fabric.agree("stop")
            stop()
        else:
            fabric.agree("stop")
            other = int(path.read_text())
            threading.Timer(3.0, os.kill, (other, signal.SIGCONT)).start()
        fabric.agree("go on")


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_is_stopped_for_less_than_the_timeout_is_waited_for(who, tmp_path):
    found = ended(going_on, 2, tmp_path, tmp_path / "pid", who)
    assert found == [(0, ""), (0, "")]


def failing(who):
    """The store is silent while a rank fails by itself: it does not wait to tell the others."""
    with closing(Ranks()) as fabric:
        atexit.register(print, "the exit hook of the user")
        if dist.get_rank() == who:
            stop()
            fabric.agree("go on")
        else:
            fabric._watch._timeout_s = 3600.0
            fabric.failed_here(ValueError("not today"))
            raise ValueError("not today")


@pytest.mark.slow
def test_a_rank_that_fails_while_the_store_is_silent_ends(tmp_path):
    told, stood = ended(failing, 2, tmp_path, 0, stopped=0)[::-1]
    assert told.code == 1, told.said
    assert "ValueError: not today" in told.said
    assert told.said.endswith("the exit hook of the user\n")
    assert stood.code == 1, stood.said
    assert "RankFailed: rank 1 on " in stood.said


def meeting(who, timeout_s):
    """One rank is stopped before it offloads."""
    if dist.get_rank() == who:
        stop()
    Fabric([0, 1], None, timeout_s)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "told"),
    [
        (0, "rank 0 on a host that is not known yet has not answered for 1 s"),
        (1, "rank 1 on a host that is not known yet did not come within 1 s to offload the model"),
    ],
)
def test_a_rank_that_stands_still_before_all_have_met_is_named(who, told, tmp_path):
    found = ended(meeting, 2, tmp_path, who, 1.0, stopped=who)
    assert found[1 - who].code == 1, found
    assert told in found[1 - who].said
    assert found[who].code == 1, found


def joining(who, timeout_s, number):
    """A signal stops or ends one rank when all have met, before they make a process group."""
    new_group = dist.new_group

    def after_the_signal(*args, **options):
        if dist.get_rank() == who:
            os.kill(os.getpid(), number)
        return new_group(*args, **options)

    dist.new_group = after_the_signal
    Fabric([*range(dist.get_world_size())], None, timeout_s)


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_is_stopped_or_killed_where_a_group_is_made_is_named(number, who, tmp_path):
    stopped = who if number == signal.SIGSTOP else None
    found = ended(joining, 2, tmp_path, who, 2.0, number, stopped=stopped)
    assert found[1 - who].code == 1, found
    assert f"rank {who} on " in found[1 - who].said
    assert found[who].code == (1 if number == signal.SIGSTOP else -signal.SIGKILL), found


@pytest.mark.slow
def test_two_ranks_that_wait_for_a_third_to_make_a_group_end_without_a_signal(tmp_path):
    """When rank 0 ends, and its store with it, torch's call comes back in rank 1, which ends."""
    found = ended(joining, 3, tmp_path, 2, 2.0, signal.SIGKILL)
    assert [rank.code for rank in found] == [1, 1, -signal.SIGKILL], found


def failing_while_stopped(path):
    """Rank 0 is stopped for longer than one who has other things to do waits for its store."""
    with closing(Ranks()) as fabric:
        fabric._watch._timeout_s = 3600.0
        if dist.get_rank() == 0:
            path.write_text(str(os.getpid()))
            fabric.agree("stop")
            stop()
            fabric.agree("go on")
        else:
            fabric.agree("stop")
            other = int(path.read_text())
            threading.Timer(3.0, os.kill, (other, signal.SIGCONT)).start()
            fabric.failed_here(ValueError("not today"))
            raise ValueError("not today")


@pytest.mark.slow
def test_why_a_rank_has_failed_is_told_to_one_that_was_stopped_meanwhile(tmp_path):
    stood, failed = ended(failing_while_stopped, 2, tmp_path, tmp_path / "pid")
    assert "ValueError: not today" in failed.said
    assert re.search("RankFailed: rank 1 on .* failed: ValueError: not today", stood.said)


def with_sockets_of_the_user():
    """Sockets that block, in a program that has set a timeout for those that it makes."""
    ours, other = socket.socketpair()
    socket.setdefaulttimeout(60.0)
    fabric = Ranks()
    fabric.close()
    assert ours.gettimeout() is None
    assert os.get_blocking(ours.fileno())
    threading.Timer(0.2, other.send, (b"x",)).start()
    assert ours.recv(1) == b"x"


def test_sockets_of_a_program_stay_as_they_are(tmp_path):
    assert ended(with_sockets_of_the_user, 2, tmp_path) == [(0, ""), (0, "")]


SCRIPT = """
import atexit, os, sys
import torch.distributed as dist
from test_stopped import Ranks
dist.init_process_group("gloo")
with open(sys.argv[1] + f"/said-{dist.get_rank()}", "w") as said:
    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
atexit.register(print, "the exit hook of the user")
fabric = Ranks()
pipe = open(sys.argv[1] + f"/pipe-{dist.get_rank()}", "w")
pipe.write("began\\n")
pipe.flush()
if dist.get_rank() == 1:
    open(sys.argv[1] + "/ends").read()
fabric.agree("go on")
"""


@pytest.mark.slow
def test_a_rank_that_does_not_come_while_torchrun_stands_still_is_named(tmp_path):
    """torchrun has the store."""
    for name in ("pipe-0", "pipe-1", "ends"):
        os.mkfifo(tmp_path / name)
    (script := tmp_path / "script.py").write_text(SCRIPT)
    root = Path(__file__).parents[2]
    env = dict(os.environ, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    env["PYTHONPATH"] = f"{root}:{root / 'tests' / 'ranks'}:{root / 'tests' / 'helpers'}"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    with (
        (tmp_path / "torchrun").open("w") as said,
        subprocess.Popen([*launch, script, tmp_path], env=env, stdout=said, stderr=said) as run,
        (tmp_path / "pipe-0").open() as first,
        (tmp_path / "pipe-1").open() as second,
    ):
        try:
            assert [pipe.readline() for pipe in (first, second)] == ["began\n"] * 2
            run.send_signal(signal.SIGSTOP)
            with (tmp_path / "ends").open("w"):  # rank 1 waits for its end
                ended, _, _ = select.select([first], [], [], PATIENCE_S)
                assert ended, "rank 0 hangs"
                assert first.read() == ""
        finally:
            run.send_signal(signal.SIGCONT)
        assert run.wait(PATIENCE_S) == 1
    said = (tmp_path / "said-0").read_text()
    assert "RankFailed: rank 1 on " in said
    assert re.search(
        r"did not come to agree on go on: why is not known, since the store of torch.distributed "
        r"\(at \S+:\d+\), which torchrun keeps, has not answered for \d+ s",
        said,
    )
    # Its model is not closed: the connection to the store is cut with the process, behind the hook.
    assert "the exit hook of the user\n" in said
    assert "terminate called" not in said
