"""A small training that commits every step, in children of one process that has torch imported.

Run as a program it obeys lines of JSON on its standard input: train and be killed, resume, train
without interruption. A child is forked for each, so that it starts at once and dies alone.
"""

import hashlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zcompile

FIELDS = {"device": "cpu", "device_memory": "4MiB", "durable": True}
FEATURES = 192


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Large weights and small ones, buffers, dropout."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, 256), nn.BatchNorm1d(256), nn.Dropout(0.2), nn.Linear(256, FEATURES)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def durable(disk: str, host_memory: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = built()
    return zcompile.offload(model, disk=disk, host_memory=host_memory, **FIELDS), optimizer


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
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


def killed(
    disk: str,
    steps: int,
    host_memory: str,
    delay: float | None,
    at: tuple[str, int, bool] | None = None,
) -> tuple[int, int, float]:
    """Go on from what is in `disk`, and be killed.

    delay    seconds from the start to `kill -9`; None: train to the end
    at       name of a function of `os`, which call of it ends the process, and whether the call
             is made before that
    returns  steps that had ended, counted from the very first; the signal; seconds
    """
    reading, writing = os.pipe()
    since = time.perf_counter()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with _leaving():
            model, optimizer = durable(disk, host_memory)
            if at is not None:
                _end_at(*at)
            try:
                begin = int(zcompile.resume(disk, model, optimizer)["step"])
            except FileNotFoundError:
                begin = 0
            os.write(writing, f"{begin}\n".encode())
            for number in range(begin, begin + steps):
                train_step(model, optimizer, number)
                os.write(writing, f"{number + 1}\n".encode())
    os.close(writing)
    if delay is not None:
        time.sleep(max(0.0, delay - (time.perf_counter() - since)))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    seconds = time.perf_counter() - since
    with os.fdopen(reading) as told:
        ended = told.read().split()
    return int(ended[-1]) if ended else 0, os.waitstatus_to_exitcode(status), seconds


def _end_at(name: str, count: int, after: bool) -> None:
    """Be killed at the `count`th call of a function of `os`."""
    real, calls = getattr(os, name), itertools.count(1)

    def ending(*args: Any, **kwargs: Any) -> Any:
        last = next(calls) == count
        if last and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(os, name, ending)


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
        host = asked.get("host_memory", "256KiB")
        answer: object
        if asked["do"] == "kill":
            answer = killed(disk, steps, host, asked["delay"], asked.get("at"))
        elif asked["do"] == "resume":
            answer = in_child(lambda d=disk, n=steps, h=host: resumed(d, n, h))
        else:
            answer = in_child(lambda steps=steps: uninterrupted(steps))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
