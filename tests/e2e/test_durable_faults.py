"""Faults under a durable training: one clear error, the last commit intact, no thread left."""

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from committed import check_all, read_index
from runtime.disks import mounted_ext4, mounted_tmpfs, shut_down
from torch import Tensor, nn

import zcompile
from zcompile.errors import CommitFailed, DiskUnusable, TierFull, ZinfError
from zcompile.frontend.offload import session_behind
from zcompile.ir.units import KiB, MiB

WIDTH = 768
FIELDS = {"device": "cpu", "device_memory": "16MiB", "host_memory": "256KiB", "durable": True}
WEIGHT_BYTES = WIDTH * WIDTH * 4
"""Of each of the two weights; their momentum takes as much, and all of it twice."""


def built(disk: Path | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    if disk is not None:
        zcompile.offload(model, disk=disk, **FIELDS)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, begin: int, end: int) -> None:
    for number in range(begin, end):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> list[Tensor]:
    return [p.on_host() if hasattr(p, "on_host") else p.detach() for p in model.parameters()]


def check_resumes(disk: Path, step: int) -> None:
    """A new run finds `step`, sound, and goes on as one that had no faults."""
    index = read_index(disk)
    assert index is not None
    check_all(index[0], [disk])
    expected, optimizer = built(None)
    train(expected, optimizer, 0, step + 1)
    model, optimizer = built(disk)
    assert zcompile.resume(disk, model, optimizer) == {"step": step}
    train(model, optimizer, step, step + 1)
    pairs = zip(dict(model.named_parameters()), values(model), values(expected), strict=True)
    differing = {
        name: (int((got != wanted).sum()), float((got - wanted).abs().max()))
        for name, got, wanted in pairs
        if not torch.equal(got, wanted)
    }
    session_behind(model).close()
    assert differing == {}, "parameter: (elements that differ, by how much at most)"


OTHERS: set[threading.Thread] = set()


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("zinf-")}


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    """Threads of models that tests of other files compiled, which torch may remember."""
    OTHERS.update(threads())
    yield
    OTHERS.clear()


def close(model: nn.Module) -> None:
    assert threads() - OTHERS, "its own"
    session_behind(model).close()
    assert threads() <= OTHERS


def fill(disk: Path) -> Path:
    """A file that takes all that the filesystem has free."""
    ballast = disk / "ballast"
    for size in (MiB, KiB):
        with ballast.open("ab", buffering=0) as file, suppress(OSError):
            while file.write(bytes(size)):
                pass
    return ballast


def test_a_disk_that_is_too_small_for_the_model_is_told_when_it_is_offloaded(tmp_path):
    with mounted_tmpfs(tmp_path, WEIGHT_BYTES + 64 * KiB) as disk:
        with pytest.raises(TierFull, match=r"no tier has .* left for '2\.weight'"):
            built(disk)
        assert list(disk.iterdir()) == []


def test_a_disk_that_is_full_before_a_step_stops_it_before_it_writes(tmp_path):
    with mounted_ext4(tmp_path, 48 * MiB) as disk:
        model, optimizer = built(disk)
        train(model, optimizer, 0, 1)
        ballast = fill(disk)
        with pytest.raises(TierFull, match="the new version of what this step changes"):
            train(model, optimizer, 1, 2)
        close(model)
        ballast.unlink()
        check_resumes(disk, 1)


def test_a_disk_that_fills_up_during_a_step_is_told_with_the_tensor(tmp_path, monkeypatch):
    with mounted_ext4(tmp_path, 48 * MiB) as disk:
        model, optimizer = built(disk)
        train(model, optimizer, 0, 1)
        monkeypatch.setattr(
            session_behind(model).commit_log.tier, "bytes_to_come", lambda extents: 0
        )
        ballast = fill(disk)
        with pytest.raises(TierFull, match=r"left for '\d\.weight"):
            train(model, optimizer, 1, 2)
        close(model)
        ballast.unlink()
        check_resumes(disk, 1)


def test_a_disk_that_is_full_when_a_step_commits_keeps_the_step_before(tmp_path):
    with mounted_ext4(tmp_path, 48 * MiB) as disk:
        model, optimizer = built(disk)
        train(model, optimizer, 0, 2)
        ballast = fill(disk)
        with pytest.raises(CommitFailed) as caught:
            train(model, optimizer, 2, 3)
        assert caught.value.errno == errno.ENOSPC
        assert "step 3 was not committed (No space left on device); step 2 is intact" in str(
            caught.value
        )
        with pytest.raises(CommitFailed):  # and nothing is written after it
            train(model, optimizer, 3, 4)
        close(model)
        ballast.unlink()
        check_resumes(disk, 2)


CALLS = [
    ("fdatasync", errno.EIO),
    ("fsync", errno.EIO),
    ("rename", errno.EROFS),
    ("pwrite", errno.EDQUOT),
]


@pytest.mark.parametrize(("call", "code"), CALLS, ids=lambda value: str(value))
def test_a_commit_that_fails_names_the_step_and_keeps_the_one_before(
    tmp_path, monkeypatch, call, code
):
    model, optimizer = built(tmp_path)
    train(model, optimizer, 0, 2)

    def failing(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as broken:
        broken.setattr(os, call, failing)
        with pytest.raises(CommitFailed, match="step 3 was not committed") as caught:
            train(model, optimizer, 2, 3)
    assert caught.value.errno == code
    close(model)
    check_resumes(tmp_path, 2)


def test_a_directory_that_vanishes_is_told_with_its_name(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    model, optimizer = built(disk)
    train(model, optimizer, 0, 1)
    shutil.rmtree(disk)
    with pytest.raises(CommitFailed, match="No such file or directory") as caught:
        train(model, optimizer, 1, 2)
    assert str(disk) in str(caught.value)
    close(model)


def test_a_device_that_fails_is_told_and_nothing_hangs(tmp_path):
    image = tmp_path / "image"
    with mounted_ext4(tmp_path, 48 * MiB) as disk:
        model, optimizer = built(disk)
        train(model, optimizer, 0, 2)
        shut_down(disk)
        with pytest.raises(ZinfError, match="Input/output error"):
            train(model, optimizer, 2, 3)
        close(model)
        del model, optimizer
        kept = tmp_path / "kept"
        shutil.copy(image, kept)
    again = tmp_path / "again"
    again.mkdir()
    subprocess.run(["e2fsck", "-fy", kept], check=False, timeout=60)
    subprocess.run(["mount", "-o", "loop", kept, again], check=True, timeout=60)
    try:
        check_resumes(again, 2)
    finally:
        subprocess.run(["umount", again], check=True, timeout=60)


def test_a_directory_that_may_only_be_read_is_refused(tmp_path):
    with mounted_tmpfs(tmp_path, 48 * MiB) as disk:
        model, optimizer = built(disk)
        train(model, optimizer, 0, 1)
        close(model)
        remount = ["mount", "-o", "remount,ro", str(disk)]
        subprocess.run(remount, check=True, timeout=60)
        with pytest.raises(DiskUnusable, match="is not writable"):
            built(disk)
        subprocess.run([*remount[:2], "remount,rw", str(disk)], check=True, timeout=60)
        check_resumes(disk, 1)
