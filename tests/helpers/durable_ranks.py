"""Durable runs of several ranks, in processes that are killed, or whose disk fails, at any call.

Every run is one group of processes, as torchrun starts them; what each rank found comes back, or
nothing of one that was killed.
"""

import errno
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from border import Border, Call, offloaded
from rank_groups import mesh_of
from rank_models import adamw, state_of, train, words
from rank_plans import everything_late
from rank_pool import forked, free_port

import zcompile
from zcompile.errors import NothingCommitted, ZinfError
from zcompile.frontend.offload import session_behind

FIELDS = {"device": "cpu", "device_memory": "4MiB", "durable": True}
ON_DISK, ON_HOST = "1MiB", "64MiB"
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Fault:
    """What happens at one call on a file, of those that a rank makes while it trains.

    number  of the call, from 0, among those named `name`; "": among all
    made    the call is made before
    code    the rank is killed; else the call fails so, and so does every one after it
    awaits  a file, and a text that is in it when the fault comes
    """

    number: int
    name: str = ""
    made: bool = False
    code: int = 0
    awaits: tuple[str, str] | None = None

    def wait(self) -> None:
        """Return when what is awaited is there."""
        while self.awaits is not None:
            path, text = self.awaits
            with suppress(FileNotFoundError):
                if text.encode() in Path(path).read_bytes():
                    return
            time.sleep(0.01)


class Faulty:
    """Makes the calls of one rank, and the fault among them."""

    def __init__(self, fault: Fault | None) -> None:
        self._fault = fault
        self._lock = threading.Lock()
        self.called: list[str] = []
        self.inside = False

    def around(self, call: Call, go: Callable[[], Any]) -> Any:
        fault = self._fault
        if not self.inside:
            return go()
        with self._lock:
            number = self.called.count(call.name) if fault and fault.name else len(self.called)
            self.called.append(call.name)
        if fault is None or fault.name not in ("", call.name) or number < fault.number:
            return go()
        if fault.code:
            raise OSError(fault.code, os.strerror(fault.code))
        if number > fault.number:
            return go()
        fault.wait()
        if fault.made:
            with suppress(OSError):  # as of a name that is looked for, and is not there
                go()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")


def built() -> torch.nn.Module:
    """A small model: every process compiles it anew."""
    return words(blocks=1)


def expected_after(steps: int) -> list[dict[str, str]]:
    """Digests of plain PyTorch in one process: before the first step, and after each."""
    torch.set_num_threads(1)  # as each rank has: sums round as they are cut
    model = built()
    optimizer = adamw(model.parameters())
    found = [state_of(model, optimizer)]
    for step in range(steps):
        train(model, model, optimizer, 0, 1, steps=[step])
        found.append(state_of(model, optimizer))
    return found


def trained(
    rank: int,
    ranks: int,
    disk: str,
    steps: int,
    host_memory: str = ON_DISK,
    fault: Fault | None = None,
    resumes: bool = True,
    nodes: Sequence[str] = (),
    late_on: Sequence[int] = (),
    replicas: int = 1,
    **fields: Any,
) -> dict[str, Any]:
    """Go on from what is in `disk`: the step that was found, digests there and at the end.

    nodes  the machine that each rank takes itself to be on; each has a directory of its own, below
           `disk`, and sees no other
    late_on  ranks all of whose updates are late that may be, once a step is planned
    replicas  groups of ranks that hold all of the model each
    """
    if nodes:
        socket.gethostname = lambda: nodes[rank]
        disk = f"{disk}/{nodes[rank]}"
        Path(disk).mkdir(exist_ok=True)
    faulty = Faulty(fault)
    given = {**FIELDS, "disk": disk, "host_memory": host_memory, **fields}
    if replicas > 1:
        given["mesh"] = mesh_of(replicas, ranks // replicas)
    found: dict[str, Any] = {"found": 0}
    model = None
    try:
        model = offloaded(built(), Border(faulty.around), **given)
        optimizer = adamw(model.parameters())
        if resumes:
            try:
                found["found"] = int(zcompile.resume(disk, model, optimizer)["step"])
            except NothingCommitted:
                found["nothing"] = True
        found["begun"] = state_of(model, optimizer)
        compiled = torch.compile(model, backend="zinf")
        faulty.inside = True
        with everything_late(rank in late_on):
            for step in range(found["found"], found["found"] + steps):
                train(model, compiled, optimizer, rank, ranks, steps=[step])
                found["done"] = step + 1
        faulty.inside = False
        found["late"] = session_behind(model).late.rows
        found["ended"] = state_of(model, optimizer)
        found["calls"] = faulty.called
    except (ZinfError, OSError) as error:
        faulty.inside = False
        found["error"] = type(error).__name__, str(error)
    if model is not None:
        zcompile.close(model)
    return found


class Group:
    """`ranks` processes that run `trained` together."""

    def __init__(
        self, ranks: int, *given: Any, faults: dict[int, Fault] | None = None, **named: Any
    ):
        context = forked()
        port = free_port()
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            fault = (faults or {}).get(rank)
            arguments = (rank, ranks, port, theirs, sys.path, given, {**named, "fault": fault})
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def outcomes(self, together: bool = False) -> list[dict[str, Any] | None]:
        """What each rank found; None of one that was killed.

        together  once one has been killed, all are
        """
        if together:
            wait([process.sentinel for process in self.processes], PATIENCE_S)
            if any(process.exitcode for process in self.processes):
                for process in self.processes:
                    process.kill()
        found = [_received(pipe) for pipe in self._pipes]
        for process in self.processes:
            process.join(PATIENCE_S)
            assert process.exitcode is not None, "a rank is left"
        return found


def _received(pipe: Connection) -> dict[str, Any] | None:
    try:
        assert pipe.poll(PATIENCE_S), "a rank hangs"
        found: dict[str, Any] = pipe.recv()
    except EOFError:
        return None
    assert "trace" not in found, found["trace"]
    return found


def run(ranks: int, *given: Any, **named: Any) -> list[dict[str, Any]]:
    """What each rank found of a run in which none is killed."""
    return [found for found in Group(ranks, *given, **named).outcomes() if found is not None]


def _serve(
    rank: int,
    ranks: int,
    port: int,
    pipe: Connection,
    path: Sequence[str],
    given: Any,
    named: Any,
) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        if ranks > 1:
            dist.init_process_group("gloo", rank=rank, world_size=ranks)
        pipe.send(trained(rank, ranks, *given, **named))
    except BaseException:  # noqa: BLE001  # whatever a rank raises is told
        pipe.send({"trace": traceback.format_exc()})
    pipe.close()
    os._exit(0)


FULL = errno.ENOSPC
