"""Small real filesystems for tests, mounted for as long as a block lasts."""

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN; its flag 2 drops the journal, so that every later access fails with EIO."""


@contextmanager
def mounted_ext4(directory: Path, nbytes: int) -> Iterator[Path]:
    """An empty ext4 of about `nbytes`. Skips the test where one may not mount."""
    image, point = directory / "image", directory / "mounted"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(nbytes)
    with _mount(
        ("mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0", str(image)),
        ("mount", "-o", "loop", str(image), str(point)),
        point,
    ):
        shutil.rmtree(point / "lost+found")
        yield point
    image.unlink()


@contextmanager
def mounted_tmpfs(directory: Path, nbytes: int) -> Iterator[Path]:
    """An empty tmpfs of `nbytes`. Skips the test where one may not mount."""
    point = directory / "memory"
    point.mkdir()
    command = ("mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(point))
    with _mount(("true",), command, point):
        yield point


def shut_down(point: Path) -> None:
    """The device of the filesystem mounted at `point` is gone: every access fails with EIO."""
    fd = os.open(point, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", 2))
    except OSError as error:
        pytest.skip(f"cannot shut a filesystem down: {error.strerror}")
    finally:
        os.close(fd)


@contextmanager
def _mount(prepare: tuple[str, ...], mount: tuple[str, ...], point: Path) -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    for command in (prepare, mount):
        if shutil.which(command[0]) is None:
            pytest.skip(f"there is no {command[0]}")
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode:
            pytest.skip(f"{command[0]} is refused: {done.stderr.strip()}")
    try:
        yield
    finally:
        if ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(point), 0) != 0:
            ctypes.CDLL(None).umount2(os.fsencode(point), 2)  # MNT_DETACH
            pytest.fail(f"{point} is still in use: {os.strerror(ctypes.get_errno())}")
        point.rmdir()
