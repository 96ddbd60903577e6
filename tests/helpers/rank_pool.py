"""A pool of rank processes: started once for a file of tests, many cases run in it.

A case is a function of a test module, `case(mesh, *args)`; every rank of a mesh of the first n
ranks calls it, and what each returns comes back. An error comes back as its text.
"""

import atexit
import faulthandler
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

PATIENCE_S = 90.0
"""Seconds for one case: far more than any takes."""


class RankRaised(AssertionError):
    """A case raised on some ranks."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def forked() -> ForkServerContext:
    """Makes processes of one that has imported what ranks need, and has made nothing else."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["rank_imports"])
    with pytest.MonkeyPatch.context() as patched:
        # It passes over what it does not find, and up to Python 3.12 does not look along sys.path.
        patched.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    return context


class RankPool:
    """`size` processes that know each other by torch.distributed."""

    def __init__(self, size: int) -> None:
        context = forked()
        port = free_port()
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, port, theirs, sys.path), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def run(self, case: Callable[..., Any], ranks: int, *args: object) -> list[Any]:
        """What each of the first `ranks` ranks returns. raises  RankRaised"""
        found = self.outcomes(case, ranks, *args)
        if wrong := [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(found) if not ok]:
            raise RankRaised("\n".join(wrong))
        return [value for _, value in found]

    def outcomes(
        self, case: Callable[..., Any], ranks: int, *args: object
    ) -> Sequence[tuple[bool, Any]]:
        """As `run`: whether each rank returned, and what; of one that raised, its traceback."""
        self.send(case, ranks, *args)
        return [self.receive(rank) for rank in range(ranks)]

    def send(self, case: Callable[..., Any], ranks: int, *args: object) -> None:
        """Let the first `ranks` ranks begin a case."""
        for pipe in self._pipes[:ranks]:
            pipe.send((case.__module__, case.__name__, ranks, args))

    def receive(self, rank: int) -> tuple[bool, Any]:
        """What a rank has made of its case, as in `outcomes`."""
        pipe = self._pipes[rank]
        if not pipe.poll(PATIENCE_S):
            raise RankRaised(f"rank {rank} does not come back; its stacks are on stderr")
        found: tuple[bool, Any] = pipe.recv()
        return found

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(rank: int, size: int, port: int, pipe: Connection, path: list[str]) -> None:
    """Run cases until the pipe closes."""
    sys.path[:] = path
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    meshes = {n: DeviceMesh("cpu", list(range(n))) for n in range(1, size + 1)}
    while True:
        try:
            module, name, ranks, args = pipe.recv()
        except (EOFError, OSError):
            break
        faulthandler.dump_traceback_later(PATIENCE_S - 10)
        try:
            torch._dynamo.reset()
            pipe.send((True, getattr(import_module(module), name)(meshes[ranks], *args)))
        except SystemExit:
            atexit._run_exitfuncs()  # as at the end of any process; one that was forked has none
            return
        except BaseException:  # noqa: BLE001  # whatever a case raises is told
            pipe.send((False, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
    os._exit(0)  # rank 0 has the store: the others need not see it go
