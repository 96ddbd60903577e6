"""Two processes at one checkpoint: what one does is not mixed with what the other does."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from border import Border, offloaded
from torch import nn

import zcompile
from zcompile.errors import CheckpointInvalid, CheckpointUnwritable

FIELDS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "4MiB"}
Trained = tuple[nn.Module, torch.optim.Optimizer]


def trained(value: float) -> Trained:
    """Of large tensors and small ones, all of one value."""
    model = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
            optimizer.state[param]["momentum_buffer"] = torch.full_like(param, value)
    return model, optimizer


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.on_host() if hasattr(tensor, "on_host") else tensor


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[float]:
    tensors = [p for param in model.parameters() for p in (param, *optimizer.state[param].values())]
    return {value for t in tensors for value in plain(t).unique().tolist()}


@contextmanager
def read_or_told() -> Iterator[None]:
    try:
        yield
    except CheckpointInvalid as error:
        if "c was replaced or removed while it was read; read it again" not in str(error):
            raise


class Replacing:
    """Another process saves `new` when the `number`-th file below `path` is opened."""

    def __init__(self, path: Path, new: Trained, number: int) -> None:
        self.path, self.new, self.number = path, new, number
        self.opened = 0

    def __call__(self, call, go):
        below = call.of is not None and call.of.is_relative_to(self.path)
        if call.name == "open" and below:
            if self.opened == self.number:
                zcompile.save(self.path, *self.new, step=2)
            self.opened += 1
        return go()


@pytest.mark.parametrize("number", range(7))
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_not_mixed(tmp_path, number):
    zcompile.save(tmp_path / "c", *trained(1), step=1)
    around = Replacing(tmp_path / "c", trained(2), number)
    model = offloaded(trained(3)[0], Border(around), **FIELDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        optimizer.state[param]["momentum_buffer"] = torch.full_like(param, 3)
    found = {3.0}
    with read_or_told():
        found = {float(zcompile.resume(tmp_path / "c", model, optimizer)["step"])}
    assert around.opened > number, "it was replaced"
    assert values(model, optimizer) == found
    zcompile.close(model)


@pytest.mark.parametrize("number", range(3))
def test_weights_that_are_replaced_while_they_are_read_are_not_mixed(tmp_path, number):
    zcompile.save(tmp_path / "c", *trained(1))
    around = Replacing(tmp_path / "c", trained(2), number)
    model = offloaded(trained(3)[0], Border(around), **FIELDS)
    expected = {3.0}
    with read_or_told():
        zcompile.load(model, tmp_path / "c")
        expected = {1.0 if number else 2.0}
    assert around.opened > number, "it was replaced"
    found = {value for p in model.parameters() for value in plain(p).unique().tolist()}
    assert found == expected
    zcompile.close(model)


def test_a_file_of_weights_that_is_replaced_while_it_is_read_is_not_mixed(tmp_path):
    """By one of other tensors at the same places, after its header was read."""
    for value in (1, 2):
        zcompile.save(tmp_path / str(value), *trained(value))
    file = tmp_path / "1/model.safetensors"

    def around(call, go):
        if call.name == "pread" and call.of == file:
            os.replace(shutil.copy(tmp_path / "2/model.safetensors", tmp_path / "new"), file)
        return go()

    model = offloaded(trained(3)[0], Border(around), **FIELDS)
    zcompile.load(model, file)
    assert {value for p in model.parameters() for value in plain(p).unique().tolist()} == {1.0}
    zcompile.close(model)


@pytest.mark.parametrize("most", [1, 1000, 5000])
def test_a_read_that_brings_less_than_was_asked_goes_on(tmp_path, most):
    """Of the header, of a large tensor and of a small one."""
    zcompile.save(tmp_path / "c", *trained(1))
    short = 0

    def around(call, go):
        nonlocal short
        if call.name == "pread" and call.of.suffix == ".safetensors" and short < 100:
            short += 1
            into = memoryview(call.arguments["into"])[:most]
            return os.preadv(call.arguments["fd"], [into], call.arguments["offset"])
        return go()

    model = offloaded(trained(3)[0], Border(around), **FIELDS)
    zcompile.load(model, tmp_path / "c")
    assert short > 5
    assert {value for p in model.parameters() for value in plain(p).unique().tolist()} == {1.0}
    zcompile.close(model)


@pytest.mark.parametrize("instant", ["locked", "removed", "opened"])
def test_a_save_that_another_takes_for_one_that_was_killed_gives_way(tmp_path, instant):
    """Between the making of its directory and the lock on it: the other removes what is there."""
    zcompile.save(tmp_path / "c", *trained(1), step=1)
    new = tmp_path / f"c.zinf-partial-{os.getpid()}"
    others = []

    def around(call, go):
        if instant == "opened" and call.name == "flock" and call.of == new:
            new.rmdir()
        result = go()
        if call.name == "mkdir" and call.of == new:
            if instant == "locked":
                others.append(os.open(new, os.O_RDONLY))
                fcntl.flock(others[0], fcntl.LOCK_EX)
            elif instant == "removed":
                new.rmdir()
        return result

    model = offloaded(trained(2)[0], Border(around), **FIELDS)
    with pytest.raises(CheckpointUnwritable, match="another save to it is under way; wait until"):
        zcompile.save(tmp_path / "c", model, step=2)
    zcompile.close(model)
    assert zcompile.resume(tmp_path / "c", *trained(3)) == {"step": 1}
    assert new.exists() == (instant == "locked"), "who holds the lock removes it"
    for fd in others:
        os.close(fd)


def test_a_checkpoint_is_written_where_it_was_begun(tmp_path):
    """Whatever bears its name meanwhile, which does not become the checkpoint either."""
    zcompile.save(tmp_path / "c", *trained(1), step=1)
    new, victim, hidden = (
        tmp_path / name for name in (f"c.zinf-partial-{os.getpid()}", "victim", "hidden")
    )
    victim.mkdir()

    def around(call, go):
        result = go()
        if call.name == "statvfs":
            new.rename(hidden)
            new.symlink_to(victim)
        return result

    model = offloaded(trained(2)[0], Border(around), **FIELDS)
    with pytest.raises(CheckpointUnwritable, match=r"was replaced by something else meanwhile"):
        zcompile.save(tmp_path / "c", model, step=2)
    zcompile.close(model)
    assert list(victim.iterdir()) == []
    assert (hidden / "training.json").exists()
    assert zcompile.resume(tmp_path / "c", *trained(3)) == {"step": 1}
