"""One file of the disk tier: opened as directly as its filesystem allows, grown before use.

Transfers bypass the page cache (`O_DIRECT`) where a real write and read back show that this
works; elsewhere they go through it, and a note says so once per directory.
"""

import errno
import itertools
import logging
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from zcompile.errors import DiskUnusable, IOFault
from zcompile.runtime.extents import Extents
from zcompile.units import GiB, MiB

ALIGNMENT = 4096
GROWTH_BYTES = 4 * MiB
MOST_GROWTH_BYTES = 1 * GiB

logger = logging.getLogger("zcompile.runtime.tier_disk")
_KEYS = itertools.count(1)

Move = Callable[[int, list[memoryview], int], int]
"""`os.preadv` or `os.pwritev`: file, buffers, offset -> bytes moved."""


class TierFile:
    """A file of aligned extents, removed on close.

    raises  DiskUnusable
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / f"zinf-{os.getpid()}-{next(_KEYS)}.tier"
        self.extents = Extents(ALIGNMENT)
        self.direct = True
        try:
            self._fd = self._open()
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise DiskUnusable(directory, f"takes no files ({error.strerror or error})",
                               "free space on it or give another directory") from error  # fmt: skip

    def take(self, nbytes: int) -> int | None:
        """Offset of an extent, growing the file if need be; None when the disk has no room."""
        offset = self.extents.take(nbytes)
        if offset is not None:
            return offset
        least = self.extents.aligned(nbytes) - self.extents.spare_at_end()
        step = min(max(GROWTH_BYTES, self.extents.capacity // 16), MOST_GROWTH_BYTES)
        generous = -(-max(least, step) // GROWTH_BYTES) * GROWTH_BYTES
        if self._grow(generous) or self._grow(least):
            return self.extents.take(nbytes)
        return None

    def occupied_bytes(self) -> int:
        """What the file really takes on its disk."""
        return os.fstat(self._fd).st_blocks * 512

    def room_bytes(self) -> int:
        """What it holds and could still grow by, for an error message."""
        disk = os.fstatvfs(self._fd)
        return self.extents.capacity + disk.f_bavail * disk.f_frsize

    def read(self, offset: int, view: memoryview, name: str) -> None:
        self._move("read", os.preadv, offset, view, name)

    def write(self, offset: int, view: memoryview, name: str) -> None:
        self._move("write", os.pwritev, offset, view, name)

    def close(self) -> None:
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return self._probed(os.open(self.path, flags | os.O_DIRECT, 0o600))
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        logger.warning(
            "%s does not take O_DIRECT: transfers go through the page cache, which is slower and "
            "uses memory beyond host_memory", self.path.parent)  # fmt: skip
        self.direct = False
        self.path.unlink(missing_ok=True)
        return self._probed(os.open(self.path, flags, 0o600))

    def _probed(self, fd: int) -> int:
        """`fd`, after one block was really written and read back."""
        page = mmap.mmap(-1, ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            page[:] = b"\xa5" * ALIGNMENT
            wrote = os.pwritev(fd, [page], 0)
            page[:] = bytes(ALIGNMENT)
            if wrote != ALIGNMENT or os.preadv(fd, [page], 0) != ALIGNMENT or page[-1] != 0xA5:
                raise OSError(errno.EIO, "a block did not come back as it was written")
            os.ftruncate(fd, 0)
        except OSError:
            os.close(fd)
            raise
        return fd

    def _grow(self, nbytes: int) -> bool:
        try:
            os.posix_fallocate(self._fd, self.extents.capacity, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise DiskUnusable(self.path.parent, f"cannot be grown into ({error.strerror})",
                                   "give another directory") from error  # fmt: skip
            return False
        self.extents.grow(nbytes)
        return True

    def _move(self, verb: str, move: Move, offset: int, view: memoryview, name: str) -> None:
        """All of `view`; a short transfer goes on where it stopped. raises IOFault"""
        done, wanted = 0, len(view)
        while done < wanted:
            try:
                moved = move(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise IOFault(error.errno or errno.EIO, verb, self.path, name, offset, done,
                              wanted, error.strerror or str(error)) from error  # fmt: skip
            if moved <= 0:
                raise IOFault(errno.EIO, verb, self.path, name, offset, done, wanted,
                              "the file ends before the data")  # fmt: skip
            done += moved
        if not self.direct:
            os.posix_fadvise(self._fd, offset, wanted, os.POSIX_FADV_DONTNEED)
