"""A lock on a directory of the disk tier says which process, and which model, owns the directory.

The lock is an exclusive `flock` on a file that says who holds it. The kernel drops the lock with
its process, however that ends, so whoever gets the lock knows that files left in the directory are
nobody's.
"""

import fcntl
import gc
import logging
import os
import re
import time

from zcompile.errors import DiskOwned, DiskUnusable
from zcompile.runtime.closing import wait_for_dead_stores
from zcompile.runtime.io.files import Directory

logger = logging.getLogger(__name__)
LOCK_NAME = "zinf.lock"
_LOCK = re.compile(r"([0-9]{1,10}) since ([0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2})\n")
"""The content of a lock file. Anything else in it came from elsewhere, and is not passed on."""
_MOST_LOCK_BYTES = 64
MOST_TRIES = 100
RETRY_SECONDS = 0.01
"""A lock that is shared by others who ask is tried again, at most MOST_TRIES times, after so
long."""


class DirectoryLock:
    """The exclusive use of `directory`, from construction to `release`.

    reclaiming  remove scratch files of dead processes
    raises      DiskOwned, DiskUnusable
    """

    def __init__(self, directory: Directory, reclaiming: bool = True) -> None:
        self.directory = directory
        self._system = directory.system
        try:
            self._fd = self._acquire()
        except DiskOwned:
            # A model of this process that is unreachable may not be collected yet; what tensors of
            # it hold goes with the collection after theirs.
            for _ in range(2):
                gc.collect()
            wait_for_dead_stores()
            self._fd = self._acquire()
        try:
            if (died := _lock_text(directory, self._fd)) is not None:
                logger.warning(
                    "%s: process %s since %s, ended without closing its model",
                    directory.path,
                    *died,
                )
            self._system.truncate(self._fd, 0)
            told = f"{os.getpid()} since {time.strftime('%F %T')}\n"
            self._system.write_all(self._fd, told.encode())
        except OSError as error:
            self.release()
            raise DiskUnusable(
                directory.path,
                f"takes no files ({error.strerror})",
                "free space on it or give another directory",
            ) from error
        _HELD_LOCKS.add(self)
        try:
            if reclaiming:
                remove_leftovers(directory)
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Give the lock back, and remove its file."""
        if self._fd >= 0:
            try:
                if _is_current(self.directory, self._fd):
                    self.directory.unlink(LOCK_NAME)
            finally:
                self.drop()

    def drop(self) -> None:
        """Close this process's end of the lock and leave the file alone."""
        fd, self._fd = self._fd, -1
        _HELD_LOCKS.discard(self)
        if fd >= 0:
            self._system.close(fd)

    def _acquire(self) -> int:
        """The descriptor of the lock file, locked. raises  DiskOwned, DiskUnusable"""
        looked_at = 0
        while True:
            fd = self._open()
            try:
                self._system.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                try:
                    owner = _exclusive_holder(self.directory, fd)
                finally:
                    self._system.close(fd)
                if owner is None and (looked_at := looked_at + 1) < MOST_TRIES:
                    time.sleep(RETRY_SECONDS)
                    continue
                owner = owner or "programs that keep asking who uses it"
                raise DiskOwned(self.directory.path, owner) from None
            except OSError as error:
                self._system.close(fd)
                raise DiskUnusable(
                    self.directory.path,
                    f"cannot be locked ({error.strerror})",
                    "give a directory on a local filesystem",
                ) from error
            # The file may have been removed, by its last owner, since it was opened.
            try:
                if _is_current(self.directory, fd):
                    return fd
            except OSError:
                self._system.close(fd)
                raise
            self._system.close(fd)

    def _open(self) -> int:
        """Open the lock file, or make one."""
        try:
            return self.directory.open(LOCK_NAME, os.O_RDWR | os.O_CREAT)
        except DiskUnusable:
            raise
        except OSError as error:
            raise DiskUnusable(
                self.directory.path,
                f"takes no files ({error.strerror})",
                "give a directory one may write to",
            ) from error


def holder_of(directory: Directory) -> str | None:
    """Who holds the directory, without taking the lock: "process 12"; None if nobody does."""
    try:
        fd = directory.open(LOCK_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return _exclusive_holder(directory, fd)
    finally:
        directory.system.close(fd)


def _exclusive_holder(directory: Directory, fd: int) -> str | None:
    """Who holds the lock alone, or None.

    Others who ask the same do not hold it alone: they share the lock for a moment.
    """
    try:
        directory.system.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _describe_holder(_lock_text(directory, fd))
    return None


def _is_current(directory: Directory, fd: int) -> bool:
    """Whether the open file is still the lock of the directory."""
    named = directory.stat(LOCK_NAME)
    return named is not None and os.path.samestat(directory.system.fstat(fd), named)


def _lock_text(directory: Directory, fd: int) -> tuple[str, str] | None:
    """The process that holds the lock, and since when; None if the file does not say so."""
    text = directory.system.read_all(fd, _MOST_LOCK_BYTES).decode(errors="replace")
    found = _LOCK.fullmatch(text)
    return None if found is None else (found[1], found[2])


def _describe_holder(told: tuple[str, str] | None) -> str:
    """Who holds the lock, in words for people."""
    if told is None:
        return "a process that the lock does not name"
    return "another model of this process" if told[0] == str(os.getpid()) else f"process {told[0]}"


# --- Leftovers of dead processes ---

TIER_FILE = re.compile(r"zinf-([0-9]{1,10})-[0-9]{1,20}\.tier\Z")
"""A scratch file of the disk tier, and the process that made it."""
TRIAL_FILE = re.compile(r"zinf-trial-[0-9a-f]{16}\Z")
"""A file of `runtime/io/trial.py` whose process was killed before it could remove the file."""


def scratch_files(directory: Directory) -> list[str]:
    """Files that stores without `durable` keep there while they run, and leftovers of trials."""
    return [name for name in directory.names() if TIER_FILE.match(name) or TRIAL_FILE.match(name)]


def remove_leftovers(directory: Directory) -> int:
    """Remove what dead processes left, in a directory that is ours; returns the bytes it took."""
    freed = 0
    for name in scratch_files(directory):
        found = TIER_FILE.match(name)
        if (left := directory.stat(name)) is None:
            continue
        when = time.strftime("%F %T", time.localtime(left.st_mtime))
        directory.unlink(name)
        freed += left.st_blocks * 512
        if found is None:
            logger.warning(
                "%s: %s was left when it was tried what the disk takes, and is removed",
                directory.path,
                name,
            )
            continue
        logger.warning(
            "%s: process %s, which last wrote at %s, ended without closing its "
            "model; what it kept there is lost, %s is removed",
            directory.path,
            found[1],
            when,
            name,
        )
    return freed


# --- Forks ---

_HELD_LOCKS: set[DirectoryLock] = set()
"""The locks that this process holds."""


def _after_fork_in_child() -> None:
    """Drop the locks of the parent process."""
    # A lock is held until every copy of its descriptor is closed; a child that outlives its
    # parent would go on owning the directory.
    for lock in list(_HELD_LOCKS):
        lock.drop()


os.register_at_fork(after_in_child=_after_fork_in_child)
