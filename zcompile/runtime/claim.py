"""Who owns a directory of the disk tier.

An exclusive `flock` on a file that says who holds it. The kernel drops the lock with its process,
however that ends, so whoever gets the lock knows that files left in the directory are nobody's.
"""

import fcntl
import gc
import logging
import os
import re
import time
import weakref
from contextlib import suppress
from pathlib import Path

from zcompile.errors import DiskOwned, DiskUnusable

LOCK_NAME = "zinf.lock"
TIER_FILE = re.compile(r"zinf-(\d+)-\d+\.tier\Z")
"""A scratch file, and the process that made it."""

logger = logging.getLogger("zcompile.runtime.claim")


class Claim:
    """The exclusive use of `directory`, from construction to `release`.

    reclaiming  scratch files of dead processes are removed
    raises  DiskOwned, DiskUnusable
    """

    def __init__(self, directory: Path, reclaiming: bool = True) -> None:
        self.directory = directory
        self._path = directory / LOCK_NAME
        try:
            self._fd = self._locked()
        except DiskOwned:
            gc.collect()  # a model of this process that was let go may not have been collected yet
            self._fd = self._locked()
        if died := os.pread(self._fd, 64, 0).decode(errors="replace").strip():
            logger.warning("%s: process %s, ended without closing its model", directory, died)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()} since {time.strftime('%F %T')}\n".encode(), 0)
        _CLAIMS.add(self)
        if reclaiming:
            reclaim(directory)

    def release(self) -> None:
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            self.forget()

    def forget(self) -> None:
        """Close this process's end of the lock and leave the file alone."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _locked(self) -> int:
        while True:
            fd = self._opened()
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = _owner(os.pread(fd, 64, 0).decode(errors="replace"))
                os.close(fd)
                raise DiskOwned(self.directory, owner) from None
            except OSError as error:
                os.close(fd)
                raise DiskUnusable(self.directory, f"cannot be locked ({error.strerror})",
                                   "give a directory on a local filesystem") from error  # fmt: skip
            # The file may have been removed, by its last owner, since it was opened.
            if _same_file(fd, self._path):
                return fd
            os.close(fd)

    def _opened(self) -> int:
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DiskUnusable(self.directory, f"takes no files ({error.strerror})",
                               "give a directory one may write to") from error  # fmt: skip


def scratch_files(directory: Path) -> list[Path]:
    """What stores without `durable` keep there while they run."""
    return sorted(path for path in directory.iterdir() if TIER_FILE.match(path.name))


def reclaim(directory: Path) -> int:
    """Remove what dead processes left; the bytes it took. The directory is ours."""
    freed = 0
    for path in scratch_files(directory):
        found = TIER_FILE.match(path.name)
        assert found is not None
        with suppress(FileNotFoundError):
            left = path.stat()
            when = time.strftime("%F %T", time.localtime(left.st_mtime))
            path.unlink()
            freed += left.st_blocks * 512
            logger.warning("%s: process %s, which last wrote at %s, ended without closing its "
                           "model; what it kept there is lost, %s is removed",
                           directory, found[1], when, path.name)  # fmt: skip
    return freed


def owner_of(directory: Path) -> str | None:
    """Who holds the directory, without taking it: "process 12"; None if nobody does."""
    try:
        fd = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _owner(os.pread(fd, 64, 0).decode(errors="replace"))
    finally:
        os.close(fd)
    return None


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _owner(text: str) -> str:
    pid = text.split(" ", 1)[0]
    return "another model of this process" if pid == str(os.getpid()) else f"process {pid or '?'}"


_CLAIMS: "weakref.WeakSet[Claim]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # A lock is held until every copy of its descriptor is closed; a child that outlives its
    # parent would go on owning the directory.
    for claim in list(_CLAIMS):
        claim.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)
