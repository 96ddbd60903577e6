"""A checkpoint shares the bytes of the disk tier where the filesystem can, and only those."""

import mmap
import os
import shutil
import struct
import subprocess

import pytest
import safetensors.torch
import torch
from pairs import assert_equal, on_disk
from torch import nn

import zcompile
from zcompile.ir.units import MiB


class Mixed(nn.Module):
    """Some tensors are whole pages, some are not; one is turned, one is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(64, 1024))
        self.odd = nn.Parameter(torch.randn(1023, 77))
        self.register_buffer("plain", torch.randn(2048))
        self.second = nn.Parameter(torch.randn(4096))
        self.turned = nn.Parameter(torch.randn(1024, 8).t())
        self.third = nn.Parameter(torch.randn(32, 4096))


def check(model: nn.Module, path) -> None:
    found = safetensors.torch.load_file(path / "model.safetensors")
    assert found.keys() == model.state_dict().keys()
    for name, value in Mixed().state_dict().items():
        assert_equal(value.contiguous(), found[name])


class Clones:
    """FICLONERANGE, done by copying; the first `works` calls of it, the rest fail."""

    def __init__(self, works: int) -> None:
        self.calls = 0
        self._works = works

    def __call__(self, to: int, request: int, argument: bytes) -> int:
        assert request == 0x4020940D
        source, offset, nbytes, at = struct.unpack("qQQQ", argument)
        assert offset % 4096 == nbytes % 4096 == at % 4096 == 0
        self.calls += 1
        if self.calls > self._works:
            raise OSError(18, "Invalid cross-device link")
        pages = mmap.mmap(-1, nbytes)
        assert os.preadv(source, [pages], offset) == nbytes
        assert os.pwrite(to, pages, at) == nbytes
        return 0


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize(("works", "calls"), [(99, 3), (2, 3), (0, 1)])
def test_whole_pages_on_disk_are_shared_and_the_rest_streams(
    durable, works, calls, tmp_path, monkeypatch
):
    model = on_disk(Mixed(), tmp_path, durable=durable)
    clones = Clones(works)
    monkeypatch.setattr("fcntl.ioctl", clones)
    zcompile.stats(model, reset=True)
    told = []
    zcompile.save(tmp_path / "c", model, progress=lambda *now: told.append(now))
    read = zcompile.stats(model)["bytes"]["disk_read"]
    assert clones.calls == calls
    shared = sum(p.nbytes for p in (model.first, model.second, model.third)[:works])
    whole = sum(p.nbytes for p in model.parameters())
    assert whole - shared <= read < whole - shared + 4 * 4096
    assert told[-1][0] == told[-1][1]
    check(model, tmp_path / "c")


def test_what_rests_on_the_host_or_was_never_written_is_not_shared(tmp_path, monkeypatch):
    clones = Clones(99)
    monkeypatch.setattr("fcntl.ioctl", clones)
    model = zcompile.offload(Mixed(), device="cpu", device_memory="1MiB", host_memory="64MiB")
    zcompile.save(tmp_path / "c", model)
    check(model, tmp_path / "c")
    blank = on_disk(nn.Linear(1024, 4, bias=False), tmp_path)
    with torch.no_grad():
        blank.weight.zero_()
    zcompile.save(tmp_path / "d", blank)
    assert clones.calls == 0
    assert not safetensors.torch.load_file(tmp_path / "d/model.safetensors")["weight"].any()


@pytest.fixture
def xfs(tmp_path):
    """A directory on a filesystem that shares bytes between files."""
    if os.geteuid() or not shutil.which("mkfs.xfs"):
        pytest.skip("needs root and mkfs.xfs")
    image, path = tmp_path / "image", tmp_path / "xfs"
    path.mkdir()
    with image.open("wb") as file:
        file.truncate(512 * MiB)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", image], check=True, timeout=60)
    mounted = subprocess.run(["mount", "-o", "loop", image, path], check=False, timeout=60)
    if mounted.returncode:
        pytest.skip("needs the right to mount an image")
    yield path
    subprocess.run(["umount", "-l", path], check=True, timeout=60)


def test_shared_bytes_stay_when_training_goes_on(xfs):
    model = on_disk(Mixed(), xfs)
    zcompile.save(xfs / "c", model)
    read = zcompile.stats(model, reset=True)["bytes"]["disk_read"]
    assert read < sum(p.nbytes for p in (model.odd, model.turned)) + 4 * 4096
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    check(model, xfs / "c")
    zcompile.resume(xfs / "c", model)
    for name, value in Mixed().state_dict().items():
        assert_equal(value, model.state_dict()[name])


def test_the_request_is_that_of_the_kernel_headers():
    # _IOW(0x94, 13, struct file_clone_range), which is four words of 64 bits
    assert (1 << 30 | struct.calcsize("qQQQ") << 16 | 0x94 << 8 | 13) == 0x4020940D
