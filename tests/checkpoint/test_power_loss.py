"""A power loss at any instant loses no commit that was reported, and no checkpoint.

What a disk may hold then is said in `power_loss.py`. A state is put into a directory and resumed,
or, which is quicker by far and where there are many, judged by its bytes: the index is that of a
commit, bit by bit, and all that it names has its checksum.
"""

import errno
import functools
import json
import math
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from border import Call, offloaded
from durable_runs import plain, same
from power_loss import Crash, File, Recording, crashes
from sampled import sampled
from torch import Tensor, nn

import zcompile
from zcompile.cli.disk import gc
from zcompile.errors import (
    CheckpointInvalid,
    CheckpointMismatch,
    CommitFailed,
    DurableDamaged,
    NothingCommitted,
)
from zcompile.runtime.durable.directory import HEADER_BYTES, free_ranges
from zcompile.runtime.durable.index import SUMS, Index, parse
from zcompile.runtime.io.system_calls import KERNEL, SystemCalls

FIELDS = {"device": "cpu", "device_memory": "4MiB", "host_memory": "256KiB", "durable": True}
WIDTH = 136
STEPS = 3


class Training:
    """Weights and momentum on disk, small ones in the index, random numbers."""

    def __init__(self, disks: Sequence[Path], system: SystemCalls = KERNEL) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))
        self.model = offloaded(model, system, disk=tuple(disks), **FIELDS)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.disk = disks[0]

    def step(self, number: int) -> None:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> list[Tensor]:
        """All that training goes on from."""
        tensors = list(self.model.state_dict().values())
        for param in self.model.parameters():
            tensors += [v for v in self.optimizer.state.get(param, {}).values() if v is not None]
        return [plain(tensor) for tensor in tensors] + [torch.get_rng_state()]

    def resume(self) -> dict[str, Any]:
        return zcompile.resume(self.disk, self.model, self.optimizer)


@dataclass
class Recorded:
    """A training and what it said was safe: the numbers of its commits.

    states, extras, indexes   of each commit, the first for none
    """

    recording: Recording
    disks: tuple[Path, ...]
    states: list[list[Tensor]]
    extras: list[dict[str, Any] | None]
    indexes: list[bytes | None]


def recorded(
    base: Path, mutate: Callable[..., Any] = lambda call, go: go(), names: Sequence[str] = ("disk",)
) -> Recorded:
    base.mkdir()
    recording = Recording(base, mutate)
    disks = tuple(base / name for name in names)
    found = Recorded(recording, disks, [[]], [None], [None])

    def said(extra: dict[str, Any]) -> None:
        recording.say(len(found.states))
        found.states.append(training.state())
        found.extras.append({**extra, "step": step + 1})
        found.indexes.append((base / "disk/zinf.index").read_bytes())

    training = Training(disks, recording.border)
    extra: dict[str, Any] = {}
    for step in range(STEPS):
        if step == STEPS - 1:  # the last step is that of a run which resumed
            zcompile.close(training.model)
            training = Training(disks, recording.border)
            training.resume()
        training.step(step)
        said(extra)
        if step == 1:
            extra = {"epoch": 7}
            zcompile.save(training.disk, training.model, training.optimizer, **extra)
            said(extra)
    zcompile.close(training.model)
    shutil.rmtree(base)
    base.mkdir()
    return found


def calm(base: Path, disks: int) -> Recorded:
    return recorded(base / "base", names=("disk", "other")[:disks])


def judged(found: Recorded, tree: dict[str, File | None]) -> int | str:
    """Which commit a directory holds by its bytes, or what is wrong with it."""
    index = tree.get("disk/zinf.index")
    data = [tree.get(f"{disk.name}/zinf.tier") for disk in found.disks]
    heads = [b"" if file is None else file.content[:HEADER_BYTES] for file in data]
    if index is None:
        return "the index is gone" if any(b'"committed": true' in head for head in heads) else 0
    content = bytes(index.content) + bytes(index.size - len(index.content))
    if content not in found.indexes:
        return "the index is of no commit"
    number = found.indexes.index(content)
    told = parsed(content)
    if not all(run_in(head) == told.run for head in heads):
        return f"commit {number} lacks a data file, or its header"
    for tensor in told.tensors:
        whole = memoryview(data[tensor.file].content)
        for piece in tensor.pieces:
            part = whole[tensor.offset + piece.begin : tensor.offset + piece.end]
            if SUMS[tensor.sum](part) != piece.checksum:
                return f"commit {number}: {tensor.name} is damaged"
    return number


@functools.cache
def parsed(content: bytes) -> Index:
    """There are as many as commits, and thousands of crashes."""
    return parse(Path("/zinf.index"), content)[0]


def run_in(head: bytes | bytearray) -> str | None:
    """Of which run the first block of a data file is; None, if it cannot be read."""
    try:
        return json.loads(bytes(head).partition(b"\n")[2].partition(b"\n")[0])["run"]
    except ValueError:
        return None


def resumed(found: Recorded, crash: Crash) -> int | str:
    """Which commit a new run resumes, in every bit."""
    base = crash.recording.base
    crash.put(base)
    number = 0
    try:
        for disk in found.disks:
            disk.mkdir(exist_ok=True)  # whose making a crash came before
        training = Training(found.disks)
        try:
            extra = training.resume()
            number = found.extras.index(extra)
            if not same(training.state(), found.states[number]):
                return f"commit {number} has other values"
        except NothingCommitted:
            pass
        finally:
            zcompile.close(training.model)
    except DurableDamaged as error:
        return str(error)
    finally:
        shutil.rmtree(base)
        base.mkdir()
    return number


def lost(crash: Crash, number: int | str) -> str | None:
    """What is wrong with this outcome; None if nothing is."""
    least = max(crash.said(), default=0)
    if isinstance(number, str) or number not in (least, least + 1):
        return f"commit {least} was reported, and there is: {number}; {crash}"
    return None


def check(found: Recorded, weak: bool, seed: int, most: int, resumes: int) -> Counter[int | str]:
    """Every crash by its bytes, and some, spread over all of them, by resuming."""
    every = [(c, judged(found, c.tree())) for c in crashes(found.recording, weak, seed, most)]
    wrong = [told for crash, number in every if (told := lost(crash, number))]
    assert not wrong, f"{len(wrong)} of {len(every)} crashes, as {wrong[0]}"
    for crash, number in random.Random(seed).sample(every, min(resumes, len(every))):
        assert resumed(found, crash) == number, str(crash)
    return Counter(number for _, number in every)


@pytest.mark.parametrize(("disks", "weak"), [(1, False), (2, True)], ids=["ordered", "weak"])
def test_no_power_loss_loses_a_commit_that_was_reported(tmp_path, disks, weak):
    found = calm(tmp_path, disks)
    held = check(found, weak, seed=1, most=6 // disks, resumes=8)
    assert set(held) == set(range(len(found.states))), "every commit was the last of some crash"


@pytest.mark.parametrize("length", sampled([421, 1500], 1500))
def test_no_power_loss_loses_a_commit_in_a_directory_with_a_long_path(tmp_path, length):
    """Where the first block of the data file goes on in further sectors, and can be torn: when the
    file is made, so that there is nothing in it yet, and when it is marked as committed."""
    deep = tmp_path
    while (left := length - len(f"{deep}/base/disk")) > 0:
        deep /= "d" * (left - 1 if left <= 200 else 99)
    assert len(f"{deep}/base/disk") == length
    deep.mkdir(parents=True)
    found = calm(deep, 1)
    torn = {
        str(sorted((name, file and bytes(file.content)) for name, file in tree.items())): (
            crash,
            judged(found, tree),
        )
        for crash in crashes(found.recording, weak=False, seed=1, most=40)
        if any(
            found.recording.events[at].data.startswith(b"zinf-tier")
            for at, how in crash.choice[1]
            if how not in ("all", "size")
        )
        for tree in [crash.tree()]
    }.values()
    assert not [told for crash, number in torn if (told := lost(crash, number))]
    made = [one for one in torn if "disk/zinf.index" not in one[0].tree()]
    marked = [one for one in torn if "disk/zinf.index" in one[0].tree()]
    assert len(made) > 2
    assert len(marked) > 2
    for crash, number in (*made, *marked[:4]):
        assert resumed(found, crash) == number, str(crash)


def interrupted(base: Path) -> Recorded:
    """A training whose second commit has its name already when it fails."""
    base.mkdir()
    failing = False

    def mutate(call: Call, go: Callable[[], Any]) -> Any:
        if failing and call.name == "fsync" and call.of == base / "disk":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return go()

    recording = Recording(base, mutate)
    found = Recorded(recording, (base / "disk",), [[]], [None], [None])
    training = Training(found.disks, recording.border)
    training.step(0)
    noted(found, training)
    recording.say(1)
    failing = True
    with pytest.raises(CommitFailed) as failed:
        training.step(1)
    failing = False
    assert failed.value.outcome_unknown
    noted(found, training)
    zcompile.close(training.model)
    return found


def noted(found: Recorded, training: Training) -> None:
    """The commit that the directory names now."""
    found.extras.append({"step": len(found.states)})
    found.states.append(training.state())
    found.indexes.append((training.disk / "zinf.index").read_bytes())


def emptied(found: Recorded) -> Recorded:
    base = found.recording.base
    shutil.rmtree(base)
    base.mkdir()
    return found


def test_no_power_loss_loses_a_commit_that_was_interrupted_and_is_gone_on_from(tmp_path):
    """Else the commit before it comes back, after what it names has been written over."""
    found = interrupted(tmp_path / "base")
    training = Training(found.disks, found.recording.border)
    assert training.resume() == {"step": 2}
    found.recording.say(2)
    training.step(2)
    noted(found, training)
    found.recording.say(3)
    zcompile.close(training.model)
    held = check(emptied(found), weak=False, seed=1, most=12, resumes=8)
    assert set(held) == set(range(4))


@pytest.mark.slow
def test_no_power_loss_loses_a_commit_after_an_interrupted_one_and_gc(tmp_path):
    """What only the commit before it names is given back."""
    found = interrupted(tmp_path / "base")
    (disk,) = found.disks
    index, system = parsed(found.indexes[2]), found.recording.border
    free = free_ranges(index, 0, (disk / "zinf.tier").stat().st_size)
    old = parsed(found.indexes[1]).tensors
    assert any(low <= t.offset < high for t in old for low, high in free)
    gc(disk, everything=False, system=system)
    holes = [e for e in found.recording.events if e.call == "punch"]
    assert holes
    held = check(emptied(found), weak=False, seed=1, most=12, resumes=8)
    assert set(held) == set(range(3))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("weak", [False, True], ids=["ordered", "weak"])
@pytest.mark.parametrize("disks", [1, 2])
def test_no_power_loss_of_many_loses_a_commit_that_was_reported(tmp_path, disks, weak, seed):
    check(calm(tmp_path, disks), weak, seed=seed, most=100, resumes=100)


SAVES = 3
CONFIG = b'{"made by": "somebody else"}'


class KilledSave(BaseException):
    """The end of a process, of which nothing is seen but the calls that it makes no more."""


class Killed:
    """The `number`-th save ends between the exchange and its sync."""

    def __init__(self, number: int) -> None:
        self.left, self.dead = number, False

    def __call__(self, call: Call, go: Callable[[], Any]) -> Any:
        if call.name == "close":  # the system does that
            return go()
        if self.dead:
            raise KilledSave
        result = go()
        if call.name == "exchange":
            self.left -= 1
            self.dead = self.left == 0
            if self.dead:
                raise KilledSave
        return result


def saved(base: Path, mutate: Callable[..., Any] = lambda call, go: go()) -> Recording:
    """Checkpoints under one path, in directories that are made; `said` is how many were.

    One that is killed is tried again.
    """
    base.mkdir()
    recording = Recording(base, mutate)
    path, system = base / "runs/today/last", recording.border
    fields = {**FIELDS, "durable": False, "host_memory": "1MiB"}
    model = offloaded(nn.Linear(64, 64), system, **fields)
    for number in range(1, SAVES + 1):
        with torch.no_grad():
            model.weight.fill_(number)
        try:
            zcompile.save(path, model, number=number)
        except KilledSave:
            assert isinstance(mutate, Killed)
            mutate.dead = False
            zcompile.save(path, model, number=number)
        recording.say(number)
        if number == 1:  # somebody else's file, which is safe when its name is
            fd = system.open(path / "config.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            system.write_all(fd, CONFIG)
            system.fsync(fd)
            system.close(fd)
            fd = system.open(path, os.O_RDONLY)
            system.fsync(fd)
            system.close(fd)
            recording.say(1.5)
    zcompile.close(model)
    shutil.rmtree(base)
    base.mkdir()
    return recording


def standing(crash: Crash) -> float | str:
    """Which checkpoint a new process resumes from."""
    base = crash.recording.base
    crash.put(base)
    path, model = base / "runs/today/last", nn.Linear(64, 64)
    try:
        number = zcompile.resume(path, model)["number"]
        if not torch.equal(model.weight, torch.full((64, 64), float(number))):
            return f"checkpoint {number} has other values"
        configs = [p for p in path.parent.glob("*/config.json") if "partial" not in p.parent.name]
        kept = any(config.read_bytes() == CONFIG for config in configs)
        return number if kept or max(crash.said(), default=0) < 1.5 else "the config is lost"
    except (CheckpointInvalid, CheckpointMismatch) as error:
        return 0 if "does not exist" in str(error) else str(error)
    finally:
        shutil.rmtree(base)
        base.mkdir()


def fallen(recording: Recording, weak: bool, seed: int, most: int, tried: int) -> list[str]:
    """What is wrong after some of the crashes."""
    every = list(crashes(recording, weak, seed, most))
    assert len(every) > tried
    wrong = []
    for crash in random.Random(seed).sample(every, tried):
        least, number = math.floor(max(crash.said(), default=0)), standing(crash)
        if isinstance(number, str) or number not in (least, least + 1):
            wrong.append(f"checkpoint {least} was reported, and there is: {number}; {crash}")
    return wrong


def without_exchange(call: Call, go: Callable[[], Any]) -> Any:
    if call.name == "exchange":
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return go()


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("most", "tried"),
    [
        (8, 60),
        pytest.param(64, 1800, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("weak", [False, True], ids=["ordered", "weak"])
@pytest.mark.parametrize(
    "mutate", [lambda call, go: go(), without_exchange], ids=["exchanged", "renamed"]
)
def test_no_power_loss_loses_a_checkpoint(tmp_path, weak, mutate, most, tried):
    recording = saved(tmp_path / "base", mutate)
    assert not fallen(recording, weak, seed=1, most=most, tried=tried)


@pytest.mark.parametrize("most", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_no_power_loss_after_a_killed_save_loses_a_checkpoint(tmp_path, most):
    """The next one removes what it left, which is the old checkpoint."""
    recording = saved(tmp_path / "base", killed := Killed(1))
    assert killed.left < 0, "one was killed, and another took the place after it"
    assert not fallen(recording, weak=True, seed=1, most=most, tried=most * 20)


SAVE_MUTATIONS = {
    "weights not synced": lambda: dropped("fsync", "model.safetensors"),
    "state not synced": lambda: dropped("fsync", "training.json"),
    "directory not synced": lambda: dropped("fsync", f"last.zinf-partial-{os.getpid()}"),
    "parent not synced": lambda: dropped("fsync", "today"),
    "new parent not synced": lambda: dropped("fsync", "base"),
    "others' files not synced": lambda: dropped("fsync", "config.json"),
}


@pytest.mark.parametrize("mutation", SAVE_MUTATIONS)
def test_a_sync_that_a_checkpoint_lacks_is_noticed(tmp_path, mutation):
    recording = saved(tmp_path / "base", SAVE_MUTATIONS[mutation]())
    assert fallen(recording, weak=False, seed=1, most=8, tried=60)


def dropped(name: str, of: str) -> Callable[[Call, Callable[[], Any]], Any]:
    """One sort of sync is not made."""

    def mutate(call: Call, go: Callable[[], Any]) -> Any:
        here = call.name == name and call.of is not None and call.of.name == of
        return None if here else go()

    return mutate


class Swapped:
    """The index takes its name before it is synced, and not after."""

    def __init__(self) -> None:
        self._late: Callable[[], Any] | None = None

    def __call__(self, call: Call, go: Callable[[], Any]) -> Any:
        of = None if call.of is None else call.of.name
        if (call.name, of) == ("fsync", "zinf.index.new"):
            self._late = go
            return None
        if (call.name, of) == ("close", "zinf.index.new"):
            self._close = go
            return None
        result = go()
        if (call.name, of) == ("rename", "zinf.index.new") and self._late is not None:
            self._late()
            self._close()
        return result


MUTATIONS = {
    "data not synced": lambda: dropped("fdatasync", "zinf.tier"),
    "index not synced": lambda: dropped("fsync", "zinf.index.new"),
    "directory not synced": lambda: dropped("fsync", "disk"),
    "parent not synced": lambda: dropped("fsync", "base"),
    "renamed before it is synced": Swapped,
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_sync_that_is_missing_or_late_is_noticed(tmp_path, mutation):
    found = recorded(tmp_path / "base", MUTATIONS[mutation]())
    every = crashes(found.recording, weak=False, seed=1, most=12)
    assert any(lost(crash, judged(found, crash.tree())) for crash in every)
