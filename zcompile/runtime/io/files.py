"""A directory of the disk tier is held open, and files in it are reached from its descriptor.

So a directory that is renamed, or replaced by another, is not followed elsewhere. The path that a
user gives may lead through symbolic links; below it no link is followed. Others may have put
something there that bears one of our names, to have us write or read elsewhere: what is not a
regular file of ours is neither opened, nor removed, nor believed. A FIFO would block whoever opens
it, and opening a device is to do something with it already.
"""

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from zcompile.errors import DiskUnusable
from zcompile.runtime.io.system_calls import KERNEL, Name, SystemCalls
from zcompile.runtime.transfer.interrupts import uninterrupted

logger = logging.getLogger("zcompile.runtime.io.files")


# --- A directory held open ---


class Directory:
    """The directory that `path` names now, held open until `close`.

    system  makes all calls
    raises  OSError
    """

    def __init__(self, path: Path, system: SystemCalls = KERNEL) -> None:
        self.path = path
        self.system = system
        self._fd = system.open(path, os.O_RDONLY | os.O_DIRECTORY)
        # Whoever owns the directory can replace what lies in it, so files of theirs are no worse;
        # and root, or a user of a filesystem that knows no owners, finds files of another there.
        try:
            self._trusted = {os.geteuid(), system.fstat(self._fd).st_uid}
        except OSError:
            self.close()
            raise

    def __enter__(self) -> "Directory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self.system.close(fd)

    def open(self, name: str, flags: int) -> int:
        """Open a file of the directory, or make one that only its owner may read; returns its
        descriptor.

        raises  DiskUnusable, if what is there is not a regular file of ours; OSError
        """
        if flags & os.O_EXCL:
            return self.system.open(name, flags | os.O_NOFOLLOW, 0o600, dir_fd=self._fd)
        check = partial(self._check, name)
        try:
            return open_regular(self.system, name, flags, check, dir_fd=self._fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise self._refused(name, "is not a plain file") from error
            raise

    @uninterrupted
    def read(self, name: str, most: int | None = None) -> bytes | None:
        """The content of a file, or its first `most` bytes; None if there is no such file.

        raises  DiskUnusable, OSError
        """
        try:
            fd = self.open(name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            size = self.system.fstat(fd).st_size
            return self.system.read_all(fd, size if most is None else min(size, most))
        finally:
            self.system.close(fd)

    def stat(self, name: str) -> os.stat_result | None:
        """The `stat` result of a file of the directory; None if there is no such file.

        raises  DiskUnusable, if it is not a regular file of ours; OSError
        """
        try:
            found = self.system.stat(name, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        self._check(name, found)
        return found

    def names(self) -> list[str]:
        """The names in the directory, ordered. raises OSError"""
        return sorted(self.system.names(self._fd))

    def rename(self, name: str, new: str) -> None:
        """Rename a file within the directory. raises  OSError"""
        self.system.rename(name, new, dir_fd=self._fd)

    def unlink(self, name: str) -> None:
        """Remove a file, which may be gone already. raises DiskUnusable, if it is not ours;
        OSError"""
        self.stat(name)
        with suppress(FileNotFoundError):
            self.system.unlink(name, dir_fd=self._fd)

    def sync(self) -> None:
        """Return when the names of the directory are on the device. raises OSError"""
        self.system.fsync(self._fd)

    def _check(self, name: str, found: os.stat_result) -> None:
        """raises  DiskUnusable, if `found` is not a regular file with one name of a trusted
        owner"""
        if not is_regular(found):
            raise self._refused(name, f"is {kind_of(found)}")
        if found.st_nlink > 1:
            raise self._refused(
                name,
                f"is known by {found.st_nlink} names (hard links), so that "
                "others would change with it",
            )
        if found.st_uid not in self._trusted:
            raise self._refused(name, f"belongs to user {found.st_uid}")

    def _refused(self, name: str, why: str) -> DiskUnusable:
        return DiskUnusable(
            self.path, f"has a {name} which {why}", "remove it, or give another directory"
        )

    def is_at(self, path: Path) -> bool:
        """Whether `path` names this directory now."""
        try:
            there = self.system.stat(path, follow=True)
            return os.path.samestat(self.system.fstat(self._fd), there)
        except OSError:
            return False


def make_directory(path: Path, system: SystemCalls = KERNEL) -> Directory:
    """Open the directory `path`; where there is none, make one for its owner alone.

    raises  DiskUnusable
    """
    try:
        if stat_through_links(system, path) is None:
            _create(path, system)
    except OSError as error:
        raise DiskUnusable(
            path, f"cannot be made ({error.strerror})", "create it or give another directory"
        ) from error
    return open_directory(path, system)


def _create(path: Path, system: SystemCalls) -> None:
    """Make the directory `path`, and bring its name to the device."""
    with suppress(FileExistsError):  # another process was quicker
        system.mkdir(path, 0o700)
    with Directory(path.absolute().parent, system) as parent:
        parent.sync()  # else a commit in it may outlive its name


def open_directory(path: Path, system: SystemCalls = KERNEL) -> Directory:
    """Open the directory `path`, as `Directory` does. raises DiskUnusable"""
    try:
        return Directory(path, system)
    except OSError as error:
        raise DiskUnusable(
            path,
            f"cannot be opened ({error.strerror})",
            "give a directory that one may read and write",
        ) from error


def unusable_error(path: Path, error: OSError) -> DiskUnusable:
    """The error for a user, where a system call on a directory or on a file in it failed."""
    return DiskUnusable(
        path,
        f"does not do what it is asked ({error.strerror or error})",
        "look after the disk, or give another directory",
    )


def close_or_warn(path: Path, close: Callable[[], None]) -> None:
    """Call `close` where no data can be lost by it; if the disk refuses, log a warning."""
    try:
        close()
    except OSError as error:
        logger.warning(
            "%s could not be closed or unlocked, which loses no data: %s",
            path,
            error.strerror or error,
        )


# --- Regular files ---


def check_regular(found: os.stat_result) -> None:
    """raises  OSError, if `found` is not a regular file"""
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.ENXIO, f"it is {kind_of(found)} and no regular file")


def open_regular(
    system: SystemCalls,
    name: Name,
    flags: int,
    check: Callable[[os.stat_result], None] = check_regular,
    mode: int = 0o600,
    *,
    dir_fd: int | None = None,
    follow: bool = False,
) -> int:
    """Open a regular file, or make one if `flags` say so; returns its descriptor.

    check   raises, if the file is not to be opened; asked of what bears the name, and of what was
            opened
    follow  follow symbolic links
    raises  OSError, and what `check` raises
    """
    with suppress(FileNotFoundError):  # `open` raises that, or makes the file
        # To open a device is to do something with it already.
        check(system.stat(name, dir_fd=dir_fd, follow=follow))
    careful = flags | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    fd = system.open(name, careful, mode, dir_fd=dir_fd)
    try:  # O_NONBLOCK: a FIFO that took the place of the file meanwhile was not waited for
        check(system.fstat(fd))
        system.set_flags(fd, system.flags(fd) & ~os.O_NONBLOCK)
    except BaseException:
        system.close(fd)
        raise
    return fd


def is_regular(found: os.stat_result | None) -> bool:
    return found is not None and stat.S_ISREG(found.st_mode)


def is_directory(found: os.stat_result | None) -> bool:
    return found is not None and stat.S_ISDIR(found.st_mode)


def stat_through_links(system: SystemCalls, path: Path) -> os.stat_result | None:
    """The `stat` result of what a path leads to, through links; None if it leads nowhere. raises
    OSError"""
    try:
        return system.stat(path, follow=True)
    except (FileNotFoundError, NotADirectoryError):
        return None


def kind_of(found: os.stat_result) -> str:
    """What a `stat` result describes, in words for people: "a file", "a FIFO"."""
    return _KINDS.get(stat.S_IFMT(found.st_mode), "no file")


_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


# --- Whole trees ---

Visit = Callable[[Path, os.stat_result], None]
"""Called with the path of something below a directory, for people, and its `stat` result."""


@contextmanager
def directory_fd(
    system: SystemCalls, name: Name, *, dir_fd: int | None = None, follow: bool = False
) -> Iterator[int]:
    """The descriptor of a directory while the block runs. raises  OSError, if it is no directory"""
    flags = os.O_RDONLY | os.O_DIRECTORY | (0 if follow else os.O_NOFOLLOW)
    fd = system.open(name, flags, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        with suppress(OSError):  # nothing was written by it, and it is given back anyway
            system.close(fd)


def list_directory(system: SystemCalls, fd: int) -> Iterator[tuple[str, os.stat_result]]:
    """Name and `stat` result of everything in a directory, by name; skips what vanishes. raises
    OSError"""
    for name in sorted(system.names(fd)):
        try:
            found = system.stat(name, dir_fd=fd)
        except FileNotFoundError:
            continue
        yield name, found


def walk_tree(system: SystemCalls, fd: int, path: Path, visit: Visit) -> None:
    """Call `visit` for everything below a directory.

    path    of the directory, for people
    raises  OSError, and what `visit` raises
    """
    for name, found in list_directory(system, fd):
        visit(path / name, found)
        if is_directory(found):
            with directory_fd(system, name, dir_fd=fd) as inner:
                walk_tree(system, inner, path / name, visit)


def remove_tree(system: SystemCalls, name: Name, *, dir_fd: int | None = None) -> None:
    """Remove a directory and everything in it, as far as possible. raises OSError, the first one"""
    errors: list[OSError] = []
    with directory_fd(system, name, dir_fd=dir_fd) as fd:
        for inner, found in list_directory(system, fd):
            try:
                if is_directory(found):
                    remove_tree(system, inner, dir_fd=fd)
                else:
                    system.unlink(inner, dir_fd=fd)
            except FileNotFoundError:
                continue
            except OSError as error:
                errors.append(error)
    if errors:
        raise errors[0]
    system.rmdir(name, dir_fd=dir_fd)
