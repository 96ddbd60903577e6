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

from zcompile.errors import DiskOwned, DiskUnusable
from zcompile.runtime.closing import wait_for_the_dead
from zcompile.runtime.io.files import Directory

LOCK_NAME = "zinf.lock"
TIER_FILE = re.compile(r"zinf-([0-9]{1,10})-[0-9]{1,20}\.tier\Z")
"""A scratch file, and the process that made it."""
TRIAL_FILE = re.compile(r"zinf-trial-[0-9a-f]{16}\Z")
"""Of `disk_trial`, whose process was killed before it could remove it."""
_LOCK = re.compile(r"([0-9]{1,10}) since ([0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2})\n")
"""What a lock says. Whatever else is in it came from elsewhere, and is not passed on."""
_MOST_LOCK_BYTES = 64
MOST_LOOKS = 100
LOOK_SECONDS = 0.01
"""Who finds the lock shared tries again so often, after so long."""

logger = logging.getLogger("zcompile.runtime.tiers.claim")


class Claim:
    """The exclusive use of `directory`, from construction to `release`.

    reclaiming  scratch files of dead processes are removed
    raises  DiskOwned, DiskUnusable
    """

    def __init__(self, directory: Directory, reclaiming: bool = True) -> None:
        self.directory = directory
        self._system = directory.system
        try:
            self._fd = self._locked()
        except DiskOwned:
            gc.collect()  # a model of this process that was let go may not have been collected yet
            wait_for_the_dead()
            self._fd = self._locked()
        try:
            if (died := _told(directory, self._fd)) is not None:
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
        _CLAIMS.add(self)
        try:
            if reclaiming:
                reclaim(directory)
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        if self._fd >= 0:
            try:
                if _is_named(self.directory, self._fd):
                    self.directory.unlink(LOCK_NAME)
            finally:
                self.forget()

    def forget(self) -> None:
        """Close this process's end of the lock and leave the file alone."""
        fd, self._fd = self._fd, -1
        _CLAIMS.discard(self)
        if fd >= 0:
            self._system.close(fd)

    def _locked(self) -> int:
        looked_at = 0
        while True:
            fd = self._opened()
            try:
                self._system.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                try:
                    owner = _holder(self.directory, fd)
                finally:
                    self._system.close(fd)
                if owner is None and (looked_at := looked_at + 1) < MOST_LOOKS:
                    time.sleep(LOOK_SECONDS)
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
                if _is_named(self.directory, fd):
                    return fd
            except OSError:
                self._system.close(fd)
                raise
            self._system.close(fd)

    def _opened(self) -> int:
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


def scratch_files(directory: Directory) -> list[str]:
    """What stores without `durable` keep there while they run, and what was left of a trial."""
    return [name for name in directory.names() if TIER_FILE.match(name) or TRIAL_FILE.match(name)]


def reclaim(directory: Directory) -> int:
    """Remove what dead processes left; the bytes it took. The directory is ours."""
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


def owner_of(directory: Directory) -> str | None:
    """Who holds the directory, without taking it: "process 12"; None if nobody does."""
    try:
        fd = directory.open(LOCK_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return _holder(directory, fd)
    finally:
        directory.system.close(fd)


def _holder(directory: Directory, fd: int) -> str | None:
    """Who holds the lock alone. Others who ask the same do not: they share it for a moment."""
    try:
        directory.system.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _owner(_told(directory, fd))
    return None


def _is_named(directory: Directory, fd: int) -> bool:
    """Whether the open file is still the lock of the directory."""
    named = directory.stat(LOCK_NAME)
    return named is not None and os.path.samestat(directory.system.fstat(fd), named)


def _told(directory: Directory, fd: int) -> tuple[str, str] | None:
    """The process that holds the lock, and since when; None if it does not say so."""
    text = directory.system.read_all(fd, _MOST_LOCK_BYTES).decode(errors="replace")
    found = _LOCK.fullmatch(text)
    return None if found is None else (found[1], found[2])


def _owner(told: tuple[str, str] | None) -> str:
    if told is None:
        return "a process that the lock does not name"
    return "another model of this process" if told[0] == str(os.getpid()) else f"process {told[0]}"


_CLAIMS: set[Claim] = set()
"""Those that are held."""


def _after_fork_in_child() -> None:
    # A lock is held until every copy of its descriptor is closed; a child that outlives its
    # parent would go on owning the directory.
    for claim in list(_CLAIMS):
        claim.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)
