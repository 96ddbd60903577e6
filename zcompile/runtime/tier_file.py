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
from zcompile.runtime.disk_trial import BLOCK_BYTES, direct_granule, takes_blocks, takes_direct
from zcompile.runtime.extents import Extents
from zcompile.runtime.lanes import Target
from zcompile.units import GiB, MiB

ALIGNMENT = BLOCK_BYTES
GROWTH_BYTES = 4 * MiB
MOST_GROWTH_BYTES = 1 * GiB

logger = logging.getLogger("zcompile.runtime.tier_nvme")
_KEYS = itertools.count(1)


class TierFile:
    """A file of aligned extents, removed on close.

    path     by default a new name in `directory`
    direct   transfers bypass the page cache
    granule  transfers come in multiples of this
    raises   DiskUnusable
    """

    new = os.O_CREAT | os.O_EXCL
    """How it is opened; a file that is there already is never taken for a new one."""

    def __init__(self, directory: Path, path: Path | None = None) -> None:
        self.path = path or directory / f"zinf-{os.getpid()}-{next(_KEYS)}.tier"
        self.extents = Extents(ALIGNMENT)
        try:
            self.direct = self._takes_direct()
            flags = os.O_RDWR | self.new | os.O_CLOEXEC
            self._fd = os.open(self.path, flags | (os.O_DIRECT if self.direct else 0), 0o600)
        except OSError as error:
            raise DiskUnusable(directory, f"takes no files ({error.strerror or error})",
                               "free space on it or give another directory") from error  # fmt: skip
        self.granule = direct_granule(self._fd) if self.direct else 1

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
        """What the file really takes on its disk."""
        return os.fstat(self._fd).st_blocks * 512

    def room_bytes(self) -> int:
        """What it holds and could still grow by, for an error message."""
        disk = os.fstatvfs(self._fd)
        return self.extents.capacity + disk.f_bavail * disk.f_frsize

    def close(self) -> None:
        if self._fd >= 0:
            remove_left(self.path)
            os.close(self._fd)
            self._fd = -1

    def _takes_direct(self) -> bool:
        directory = self.path.parent
        if takes_direct(directory):
            return True
        takes_blocks(directory)
        logger.warning(
            "%s does not take O_DIRECT: transfers go through the page cache, which is slower and "
            "uses memory beyond host_memory", directory)  # fmt: skip
        return False

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


def remove_left(path: Path) -> None:
    """Remove what is not needed any more; a disk that does not let us is no reason to fail."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s stays behind: %s", path, error.strerror or error)
