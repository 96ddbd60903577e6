"""Ranks that end as processes of scripts do: the exit hooks are called, and Python is taken down.

A rank is forked from the process that all ranks are forked from, and calls a function of a module,
`case(*args)`, with torch.distributed initialised. What it raises is printed, and its exit code is
that of a script.
"""

import ctypes
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rank_pool import forked, free_port

PATIENCE_S = 90.0
"""Seconds for the ranks of one case: far more than any takes."""


class Ended(NamedTuple):
    """How a rank has ended.

    code  as of `subprocess`: minus a signal
    said  all that it has printed
    """

    code: int | None
    said: str


class AtTheVeryEnd:
    """Lets other ranks end when the interpreter of this one is taken down, behind all exit hooks,
    and waits until they have."""

    def __init__(self, path: Path) -> None:
        """path  of a pipe of the filesystem, which the others `await_the_very_end` of"""
        self._path = str(path)
        sys.at_the_very_end = self  # type: ignore[attr-defined]  # among the last that go

    def __del__(self, open=os.open, close=os.close, write=os.O_WRONLY, sleep=time.sleep) -> None:
        close(open(self._path, write))  # when another rank reads
        sleep(0.3)  # what waits for its messages hears that it has ended


def await_the_very_end(path: Path) -> None:
    """End this process at once, when the interpreter of another rank is taken down."""
    path.open("rb").read()
    os._exit(0)


def ended(
    case: Callable[..., Any],
    ranks: int,
    tmp_path: Path,
    *args: object,
    stopped: int | None = None,
) -> list[Ended]:
    """How as many ranks end that call `case(*args)`; None for the code of one that hangs.

    stopped  a rank that stops itself, and goes on when the others have ended
    """
    port, processes = free_port(), []
    for rank in range(ranks):
        told = (rank, ranks, port, sys.path, tmp_path, case, args)
        processes.append(forked().Process(target=_live, args=told))
        processes[-1].start()
    until = time.monotonic() + PATIENCE_S
    for rank, process in sorted(enumerate(processes), key=lambda row: row[0] == stopped):
        if rank == stopped:
            os.kill(process.pid, signal.SIGCONT)
        process.join(max(0.0, until - time.monotonic()))
    found = []
    for rank, process in enumerate(processes):
        found.append(Ended(process.exitcode, (tmp_path / f"rank-{rank}").read_text()))
        process.kill()
        process.join()
    return found


def _live(
    rank: int,
    ranks: int,
    port: int,
    path: list[str],
    tmp_path: Path,
    case: Callable[..., Any],
    args: tuple[object, ...],
) -> None:
    sys.path[:] = path
    with (tmp_path / f"rank-{rank}").open("wb") as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    faulthandler.dump_traceback_later(PATIENCE_S - 10)
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    code = 0
    try:
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        case(*args)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException as error:  # noqa: BLE001  # as Python itself does
        sys.last_value = error
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    ctypes.pythonapi.Py_Exit(code)  # multiprocessing would leave out what comes now


def wait_for_others(fabric: Any, kind: str) -> None:
    """This rank waits for others: in a gather, in an exchange, or to agree.

    fabric  a `Fabric`
    """
    if kind == "gather":
        fabric.gather(torch.zeros(1 << 20, dtype=torch.uint8), "w", []).wait()
    elif kind == "exchange":
        fabric.exchange(torch.zeros(1 << 20), None, "w", []).ticket.wait()
    else:
        fabric.agree("go on")
