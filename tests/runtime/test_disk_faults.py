"""Real filesystems on a bad day: full, failing, gone, forbidden, in memory."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from runtime.disks import mounted_ext4, mounted_tmpfs, shut_down

from zcompile.errors import DiskUnusable, IOFault, TierFull
from zcompile.ir.units import MiB
from zcompile.runtime.device.pages import host_pages
from zcompile.runtime.meter import Meter
from zcompile.runtime.tiers.base import Buffer
from zcompile.runtime.tiers.disk import DiskTier

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def no_thread_is_left(own_threads: Callable[[], list[str]]) -> Iterator[None]:
    before = own_threads()
    yield
    assert own_threads() == before


@contextmanager
def opened(directory: Path) -> Iterator[DiskTier]:
    crashes: list[BaseException] = []
    tier = DiskTier((directory,), {}, Meter(), crashes.append)
    try:
        yield tier
    finally:
        tier.close()
    assert crashes == []


def noise(nbytes: int) -> Buffer:
    return Buffer.over(host_pages(nbytes).random_(0, 255))


def comes_back(tier: DiskTier, nbytes: int) -> bool:
    """Whether what is written to a new entry is read."""
    extent, source = tier.reserve(nbytes, "w"), noise(nbytes)
    into = Buffer.over(host_pages(nbytes))
    tier.write(extent, 0, source).wait()
    tier.read(extent, 0, into).wait()
    return torch.equal(into.memory, source.memory)


@pytest.mark.parametrize("mounted", [mounted_ext4, mounted_tmpfs])
def test_a_full_disk_refuses_the_entry_that_does_not_fit_and_keeps_the_others(tmp_path, mounted):
    with mounted(tmp_path, 12 * MiB) as disk:
        with opened(disk) as tier:
            assert comes_back(tier, 4 * MiB)
            with pytest.raises(TierFull, match=r"no tier has 20\.0 MiB left for 'head\.weight'"):
                tier.reserve(20 * MiB, "head.weight")
            assert comes_back(tier, 1 * MiB)
        assert list(disk.iterdir()) == []


def test_a_disk_that_dies_is_told_by_every_verb_and_closes(tmp_path):
    with mounted_ext4(tmp_path, 24 * MiB) as disk, opened(disk) as tier:
        extent, source = tier.reserve(4 * MiB, "blocks.3.bias"), noise(4 * MiB)
        tier.write(extent, 0, source).wait()
        shut_down(disk)
        for verb, move in (("read", tier.read), ("write", tier.write)):
            with pytest.raises(IOFault) as caught:
                move(extent, 0, source).wait()
            assert caught.value.errno == errno.EIO
            assert f"{verb} of 'blocks.3.bias' failed: Input/output error" in str(caught.value)
            assert f"of {disk}/zinf-" in str(caught.value)
        with pytest.raises(DiskUnusable, match="cannot be grown into"):
            tier.reserve(8 * MiB, "blocks.4.bias")


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.ENODEV, errno.EDQUOT])
def test_whatever_the_system_says_is_in_the_error(tmp_path, faults, verb, code):
    with opened(tmp_path) as tier:
        extent = tier.reserve(1 * MiB, "head.weight")
        faults.fail(verb, code)
        move = tier.read if verb == "read" else tier.write
        with pytest.raises(IOFault) as caught:
            move(extent, 0, noise(1 * MiB)).wait()
        assert caught.value.errno == code
        assert f"{verb} of 'head.weight' failed: {os.strerror(code)}" in str(caught.value)


def test_a_directory_that_vanishes_takes_nothing_along_that_is_open(tmp_path):
    disk = tmp_path / "gone"
    disk.mkdir()
    with opened(disk) as tier:
        shutil.rmtree(disk)
        assert comes_back(tier, 4 * MiB)
        assert comes_back(tier, 40 * MiB)


def test_a_directory_that_does_not_exist_says_so(tmp_path):
    with pytest.raises(DiskUnusable, match="gone"), opened(tmp_path / "gone" / "disk"):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root may")
def test_a_directory_that_one_may_not_write_to_says_so(tmp_path):
    tmp_path.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(DiskUnusable, match="Permission denied"), opened(tmp_path):
            pass
    finally:
        os.seteuid(0)


def test_memory_is_a_disk_too(tmp_path):
    with mounted_tmpfs(tmp_path, 32 * MiB) as disk, opened(disk) as tier:
        assert comes_back(tier, 16 * MiB)
