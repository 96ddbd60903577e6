"""One file of the disk tier: opened as directly as its filesystem allows, grown before use.

Transfers bypass the page cache (`O_DIRECT`) where a real write and read back show that this
works; elsewhere they go through it, and a note says so once per directory.
"""

import errno
import itertools
import logging
import os
from pathlib import Path

from zcompile.errors import DiskUnusable
from zcompile.ir.units import GiB, MiB
from zcompile.runtime.io.directory import Directory, unusable
from zcompile.runtime.io.disk_trial import BLOCK_BYTES, direct_granule, takes_blocks, takes_direct
from zcompile.runtime.io.lanes import Target
from zcompile.runtime.tiers.extents import Extents

ALIGNMENT = BLOCK_BYTES
GROWTH_BYTES = 4 * MiB
MOST_GROWTH_BYTES = 1 * GiB
NOT_ALLOCATED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""What filesystems say that cannot. The last is glibc's, which writes single bytes there instead,
and O_DIRECT refuses those."""

logger = logging.getLogger(__name__)
_KEYS = itertools.count(1)


class TierFile:
    """A file of aligned extents, removed on close.

    name     by default a new one
    direct   transfers bypass the page cache
    granule  transfers come in multiples of this
    raises   DiskUnusable
    """

    new = os.O_CREAT | os.O_EXCL
    """How it is opened; a file that is there already is never taken for a new one."""

    def __init__(self, directory: Directory, name: str | None = None) -> None:
        self.directory = directory
        self.system = directory.system
        self.name = name or f"zinf-{os.getpid()}-{next(_KEYS)}.tier"
        self.extents = Extents(ALIGNMENT)
        try:
            self.direct = self._takes_direct()
            flags = os.O_RDWR | self.new | (os.O_DIRECT if self.direct else 0)
            self._fd = directory.open(self.name, flags)
        except DiskUnusable:
            raise
        except OSError as error:
            raise DiskUnusable(directory.path, f"takes no files ({error.strerror or error})",
                               "free space on it or give another directory") from error  # fmt: skip
        self.granule = direct_granule(self.system, self._fd) if self.direct else 1

    @property
    def path(self) -> Path:
        """For people."""
        return self.directory.path / self.name

    def at(self, offset: int) -> Target:
        return Target(self.path, self._fd, offset, self.granule)

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
        """What the file really takes on its disk. raises DiskUnusable"""
        try:
            return self.system.fstat(self._fd).st_blocks * 512
        except OSError as error:
            raise unusable(self.directory.path, error) from error

    def room_bytes(self) -> int:
        """What it holds and could still grow by, for an error message. raises DiskUnusable"""
        try:
            disk = self.system.statvfs(self._fd)
        except OSError as error:
            raise unusable(self.directory.path, error) from error
        return self.extents.capacity + disk.f_bavail * disk.f_frsize

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            remove_left(self.directory, self.name)
            self.system.close(fd)

    def _takes_direct(self) -> bool:
        if takes_direct(self.directory):
            return True
        takes_blocks(self.directory)
        logger.warning(
            "%s does not take O_DIRECT: transfers go through the page cache, which is slower and "
            "uses memory beyond host_memory", self.directory.path)  # fmt: skip
        return False

    def _grow(self, nbytes: int) -> bool:
        try:
            try:
                self.system.allocate(self._fd, self.extents.capacity, nbytes)
            except OSError as error:
                if error.errno not in NOT_ALLOCATED:
                    raise
                logger.warning("%s reserves no room: a disk that is full is noticed when it is "
                               "written to", self.directory.path)  # fmt: skip
                self.system.truncate(self._fd, self.extents.capacity + nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise DiskUnusable(self.directory.path, f"cannot be grown into ({error.strerror})",
                                   "give another directory") from error  # fmt: skip
            return False
        self.extents.grow(nbytes)
        return True


def remove_left(directory: Directory, name: str) -> None:
    """Remove what is not needed any more; a disk that does not let us is no reason to fail."""
    try:
        directory.unlink(name)
    except OSError as error:
        logger.warning("%s stays behind: %s", directory.path / name, error.strerror or error)
