"""What a directory offers as a disk tier: filesystem, space, O_DIRECT, a quick bandwidth.

Tried rather than looked up: a filesystem may accept the O_DIRECT flag and refuse the write. The
probe's file has no name from its first moment on, so that nothing is left behind if we are killed.
"""

import errno
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zcompile.errors import DiskUnusable
from zcompile.units import MiB

BLOCK_BYTES = 4096
PROBE_BYTES = 64 * MiB
REQUEST_BYTES = 16 * MiB
ROUNDS = 3
_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True)
class Disk:
    """A directory as measured.

    direct              a 4 KiB write with O_DIRECT came back equal
    *_bytes_per_s       best of three, 16 MiB requests, one at a time, on a 64 MiB file; None if
                        there was no room for it. Buffered reads come from memory: None.
    """

    path: Path
    filesystem: str
    free_bytes: int
    direct: bool
    read_bytes_per_s: float | None
    write_bytes_per_s: float | None


def probe_disk(path: Path) -> Disk:
    """raises  DiskUnusable, if one cannot write there"""
    if not path.is_dir():
        why = "is not a directory" if path.exists() else "does not exist"
        raise DiskUnusable(path, why, "create it or give another directory")
    try:
        free_bytes = shutil.disk_usage(path).free
        direct = _has_direct(path)
        read = write = None
        if free_bytes > 2 * PROBE_BYTES:
            write, read = _bandwidth(path, direct)
    except OSError as error:
        todo = "give a directory that one may write to, with 64 MiB free"
        raise DiskUnusable(path, f"cannot be probed: {error.strerror}", todo) from error
    return Disk(path.resolve(), _filesystem(path), free_bytes, direct, read, write)


@contextmanager
def _nameless(directory: Path, direct: bool) -> Iterator[int]:
    """A file descriptor of a new file that nobody else can open."""
    made, name = tempfile.mkstemp(prefix="zinf-doctor-", dir=directory)
    try:
        try:
            used = os.open(name, os.O_RDWR | (_DIRECT if direct else 0))
        finally:
            os.unlink(name)
    finally:
        os.close(made)
    try:
        yield used
    finally:
        os.close(used)


def _has_direct(directory: Path) -> bool:
    if not _DIRECT:
        return False
    block, back = mmap.mmap(-1, BLOCK_BYTES), mmap.mmap(-1, BLOCK_BYTES)
    block.write(os.urandom(BLOCK_BYTES))
    try:
        with _nameless(directory, direct=True) as file:
            os.pwritev(file, [block], 0)
            os.preadv(file, [back], 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return block[:] == back[:]


def _bandwidth(directory: Path, direct: bool) -> tuple[float, float | None]:
    """Bytes per second of writing and, if it would not come from memory, of reading."""
    buffer = mmap.mmap(-1, REQUEST_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        buffer.madvise(mmap.MADV_HUGEPAGE)  # 4 KiB pages halve the bandwidth
    buffer.write(os.urandom(4096) * (REQUEST_BYTES // 4096))
    with _nameless(directory, direct) as file:

        def write(offset: int) -> None:
            os.pwritev(file, [buffer], offset)

        def read(offset: int) -> None:
            os.preadv(file, [buffer], offset)

        # The first write also allocates; a store writes each place many times.
        _seconds(write, file)
        writes = [_seconds(write, file) for _ in range(ROUNDS)]
        reads = [_seconds(read, file) for _ in range(ROUNDS)] if direct else []
    return PROBE_BYTES / min(writes), PROBE_BYTES / min(reads) if reads else None


def _seconds(move: Callable[[int], None], file: int) -> float:
    started = time.perf_counter()
    for offset in range(0, PROBE_BYTES, REQUEST_BYTES):
        move(offset)
    os.fdatasync(file)
    return time.perf_counter() - started


def _filesystem(path: Path) -> str:
    """Type of the mount that holds `path`, "ext4"; "unknown" where /proc does not say."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return mount_type(path.resolve(), mounts)


def mount_type(path: Path, mounts: Sequence[str]) -> str:
    """Filesystem type from lines of /proc/self/mountinfo: the deepest mount, the last on ties."""
    found, depth = "unknown", -1
    for line in mounts:
        mount, _, rest = line.partition(" - ")
        point = Path(mount.split()[4].replace("\\040", " "))
        if path.is_relative_to(point) and len(point.parts) >= depth:
            found, depth = rest.split()[0], len(point.parts)
    return found
