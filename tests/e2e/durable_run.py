"""A small training that commits every step, in children of one process that has torch imported.

Run as a program it obeys lines of JSON on its standard input: train and be killed, resume, train
without interruption. A child is forked for each, so that it starts at once and dies alone.
"""

import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import planned_runs
import pytest
import torch
from border import Border, Call, offloaded
from planned_runs import LITTLE_HOST
from torch import Tensor, nn

import zcompile
from zcompile.ir.units import Bytes
from zcompile.runtime.io.system_calls import KERNEL, SystemCalls

FIELDS = {"device": "cpu", "device_memory": "4MiB", "durable": True}
FEATURES = 192
At = tuple[int, str, int, bool]


ASKED = {"late": 0}
"""Device memory of a model that is compiled and planned, and whose updates are late; 0: it is not
compiled."""


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Large weights and small ones, buffers, dropout."""
    torch.manual_seed(0)
    if ASKED["late"]:
        gpt = planned_runs.gpt()
        return gpt, planned_runs.adamw(gpt)
    model = nn.Sequential(
        nn.Linear(FEATURES, 256), nn.BatchNorm1d(256), nn.Dropout(0.2), nn.Linear(256, FEATURES)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def durable(
    disk: str, host_memory: str, system: SystemCalls = KERNEL
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = built()
    if not ASKED["late"]:
        return offloaded(model, system, disk=disk, host_memory=host_memory, **FIELDS), optimizer
    planned_runs.let_all_be_late(pytest.MonkeyPatch())
    room = {**FIELDS, "device_memory": Bytes(ASKED["late"]), "host_memory": LITTLE_HOST}
    offloaded(model, system, disk=disk, **room)
    model.compile(backend="zinf")
    return model, optimizer


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    if ASKED["late"]:
        planned_runs.loss_of(model, planned_runs.ids(number)).backward()
    else:
        x = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all that training goes on from, bit by bit."""
    summed = hashlib.sha256()
    for tensor in _tensors(model, optimizer):
        plain = tensor.on_host() if hasattr(tensor, "on_host") else tensor
        summed.update(plain.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return summed.hexdigest()


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    yield from model.state_dict().values()
    for param in model.parameters():
        state = optimizer.state.get(param, {})
        yield from (state[key] for key in sorted(state))
    yield torch.get_rng_state()


def uninterrupted(steps: int) -> list[str]:
    """Digests of plain PyTorch in memory: before the first step, and after each."""
    model, optimizer = built()
    digests = [digest(model, optimizer)]
    for number in range(steps):
        train_step(model, optimizer, number)
        digests.append(digest(model, optimizer))
    return digests


def resumed(disk: str, steps: int, host_memory: str) -> tuple[int, list[str]]:
    """The step a new process finds, and the digests there and after `steps` more."""
    model, optimizer = durable(disk, host_memory)
    try:
        found = int(zcompile.resume(disk, model, optimizer)["step"])
    except FileNotFoundError:
        found = 0
    digests = [digest(model, optimizer)]
    for number in range(found, found + steps):
        train_step(model, optimizer, number)
        digests.append(digest(model, optimizer))
    return found, digests


class Death:
    """Ends this process at one call on a file.

    at      which step of this run, name of the call, which of these in the step, counted from 0,
            and whether the call is made before the end
    last    told the name of the call, right before
    called  names of the calls of each step so far
    """

    def __init__(self, at: At | None, last: Callable[[str], object]) -> None:
        self._at, self._last = at, last
        self._lock = threading.Lock()
        self.called: list[list[str]] = []
        self.inside = False

    def around(self, call: Call, go: Callable[[], Any]) -> Any:
        if not self.inside:
            return go()
        with self._lock:
            number = self.called[-1].count(call.name)
            self.called[-1].append(call.name)
        if self._at is None or [len(self.called) - 1, call.name, number] != list(self._at[:3]):
            return go()
        if self._at[3]:
            with suppress(OSError):  # as of a file that is looked for and is not there
                go()
        self._last(call.name)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")

    def step(self, train: Callable[[], None]) -> None:
        """`train` is one step, in which it may come."""
        self.called.append([])
        self.inside = True
        train()
        self.inside = False


def trained(
    disk: str, steps: int, host_memory: str, death: Death, ended: Callable[[int], object]
) -> None:
    """Go on from what is in `disk`; `ended` is told how many steps have, from the very first."""
    model, optimizer = durable(disk, host_memory, Border(death.around))
    try:
        begin = int(zcompile.resume(disk, model, optimizer)["step"])
    except FileNotFoundError:
        begin = 0
    ended(begin)
    for number in range(begin, begin + steps):
        death.step(partial(train_step, model, optimizer, number))
        ended(number + 1)


def calls(disk: str, steps: int, host_memory: str) -> list[list[str]]:
    """Names of the calls on files that each step makes."""
    death = Death(None, lambda name: None)
    trained(disk, steps, host_memory, death, lambda number: None)
    return death.called


def killed(disk: str, steps: int, host_memory: str, at: At | None) -> tuple[int, int, str | None]:
    """Go on from what is in `disk`, and be killed.

    at       as `Death` has it; None: train to the end
    returns  steps that had ended, counted from the very first; the signal; the call in which
             the end came, None if it did not come in a step
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with _leaving():
            death = Death(at, lambda name: os.write(writing, f"{name}\n".encode()))
            trained(disk, steps, host_memory, death, lambda n: os.write(writing, f"{n}\n".encode()))
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as told:
        lines = told.read().split()
    ended = [int(line) for line in lines if line.isdigit()]
    call = next((line for line in lines if not line.isdigit()), None)
    return ended[-1] if ended else 0, os.waitstatus_to_exitcode(status), call


def in_child(job: Callable[[], object]) -> object:
    """What `job` returns in a process of its own, by way of JSON."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with _leaving(), os.fdopen(writing, "w") as answer:
            json.dump(job(), answer)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None


class _leaving:
    """A child ends here, whatever happened."""

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None:
            sys.excepthook(kind, error, trace)
        sys.stderr.flush()
        os._exit(0 if kind is None else 1)


def main() -> None:
    torch.set_num_threads(1)
    assert zcompile.offload, "names are imported when first used: here, once for all children"
    for line in sys.stdin:
        asked = json.loads(line)
        disk, steps = asked.get("disk", ""), asked["steps"]
        ASKED["late"] = asked.get("late", 0)
        host = asked.get("host_memory", "256KiB")
        answer: object
        if asked["do"] == "kill":
            answer = killed(disk, steps, host, asked.get("at"))
        elif asked["do"] == "calls":
            answer = in_child(lambda d=disk, n=steps, h=host: calls(d, n, h))
        elif asked["do"] == "resume":
            answer = in_child(lambda d=disk, n=steps, h=host: resumed(d, n, h))
        else:
            answer = in_child(lambda steps=steps: uninterrupted(steps))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
