"""A directory of the disk tier, held open: what lies in it is reached from its descriptor.

So a directory that is renamed, or replaced by another, is not followed elsewhere. Only what
lies inside is ours; the path that a user gives may lead through symbolic links. Others may have put
something there that bears one of our names, to have us write or read elsewhere: what is not a plain
file of ours is neither opened, nor removed, nor believed.

Opens a regular file and nothing else: a FIFO would be waited for, a device set going.

Directories and what lies below them, reached from descriptors: links are not followed.

So what others put there while we look around, or clear up, leads nowhere else.
"""

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType

from zcompile.errors import DiskUnusable
from zcompile.runtime.io.system_calls import KERNEL, Name, SystemCalls
from zcompile.runtime.transfer.interrupts import uninterrupted

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def kind_of(found: os.stat_result) -> str:
    """For people."""
    return _KINDS.get(stat.S_IFMT(found.st_mode), "no file")


def is_directory(found: os.stat_result | None) -> bool:
    return found is not None and stat.S_ISDIR(found.st_mode)


def is_regular(found: os.stat_result | None) -> bool:
    return found is not None and stat.S_ISREG(found.st_mode)


def found_at(system: SystemCalls, path: Path) -> os.stat_result | None:
    """What a path leads to, through links; None if it leads nowhere. raises OSError"""
    try:
        return system.stat(path, follow=True)
    except (FileNotFoundError, NotADirectoryError):
        return None


def check_regular(found: os.stat_result) -> None:
    """raises  OSError, if it is no regular file"""
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
    """A descriptor of a file, which is there, or is made if `flags` say so.

    check   raises, if it is not to be opened; asked of what bears the name, and of what was opened
    follow  symbolic links
    raises  OSError, and what `check` raises
    """
    with suppress(FileNotFoundError):  # `open` says so, or makes it
        # To open a device is to do something with it already.
        check(system.stat(name, dir_fd=dir_fd, follow=follow))
    careful = flags | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    fd = system.open(name, careful, mode, dir_fd=dir_fd)
    try:  # what took its place meanwhile was not waited for
        check(system.fstat(fd))
        system.set_flags(fd, system.flags(fd) & ~os.O_NONBLOCK)
    except BaseException:
        system.close(fd)
        raise
    return fd


logger = logging.getLogger("zcompile.runtime.io.files")


class Directory:
    """The directory that `path` names now, until `close`.

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self.system.close(fd)

    def open(self, name: str, flags: int) -> int:
        """A descriptor of a file in it, which only its owner may read if it is new.

        raises  DiskUnusable, if what is there is not a plain file of ours; OSError
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
        """What is in a file, or its first `most` bytes; None if there is none.

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
        """Of a file in it; None if there is none.

        raises  DiskUnusable, if it is not a plain file of ours; OSError
        """
        try:
            found = self.system.stat(name, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        self._check(name, found)
        return found

    def names(self) -> list[str]:
        """What lies in it, ordered. raises OSError"""
        return sorted(self.system.names(self._fd))

    def rename(self, name: str, new: str) -> None:
        """raises  OSError"""
        self.system.rename(name, new, dir_fd=self._fd)

    def unlink(self, name: str) -> None:
        """Of what may be gone already. raises DiskUnusable, if it is not ours; OSError"""
        self.stat(name)
        with suppress(FileNotFoundError):
            self.system.unlink(name, dir_fd=self._fd)

    def sync(self) -> None:
        """The names in it are on the device. raises OSError"""
        self.system.fsync(self._fd)

    def _check(self, name: str, found: os.stat_result) -> None:
        """raises  DiskUnusable"""
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


def made(path: Path, system: SystemCalls = KERNEL) -> Directory:
    """The directory `path`; a new one, for its owner alone, where there was none.

    raises  DiskUnusable
    """
    try:
        if found_at(system, path) is None:
            _make(path, system)
    except OSError as error:
        raise DiskUnusable(
            path, f"cannot be made ({error.strerror})", "create it or give another directory"
        ) from error
    return opened(path, system)


def _make(path: Path, system: SystemCalls) -> None:
    with suppress(FileExistsError):  # another process was quicker
        system.mkdir(path, 0o700)
    with Directory(path.absolute().parent, system) as parent:
        parent.sync()  # else a commit in it may outlive its name


def opened(path: Path, system: SystemCalls = KERNEL) -> Directory:
    """As `Directory`. raises DiskUnusable"""
    try:
        return Directory(path, system)
    except OSError as error:
        raise DiskUnusable(
            path,
            f"cannot be opened ({error.strerror})",
            "give a directory that one may read and write",
        ) from error


def unusable(path: Path, error: OSError) -> DiskUnusable:
    """What a call of the system on a directory, or on a file in it, failed with."""
    return DiskUnusable(
        path,
        f"does not do what it is asked ({error.strerror or error})",
        "look after the disk, or give another directory",
    )


def let_go(path: Path, close: Callable[[], None]) -> None:
    """Call `close` on what nothing is lost with; a disk that refuses is told in the log."""
    try:
        close()
    except OSError as error:
        logger.warning("%s is let go, but %s", path, error.strerror or error)


Visit = Callable[[Path, os.stat_result], None]
"""Told of something below a directory: where it is, for people, and what it is."""


@contextmanager
def folder(
    system: SystemCalls, name: Name, *, dir_fd: int | None = None, follow: bool = False
) -> Iterator[int]:
    """A descriptor of a directory. raises  OSError, if it is none"""
    flags = os.O_RDONLY | os.O_DIRECTORY | (0 if follow else os.O_NOFOLLOW)
    fd = system.open(name, flags, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        with suppress(OSError):  # nothing was written by it, and it is given back anyway
            system.close(fd)


def items(system: SystemCalls, fd: int) -> Iterator[tuple[str, os.stat_result]]:
    """What lies in a directory, by name; what vanishes meanwhile does not. raises OSError"""
    for name in sorted(system.names(fd)):
        try:
            found = system.stat(name, dir_fd=fd)
        except FileNotFoundError:
            continue
        yield name, found


def walk(system: SystemCalls, fd: int, path: Path, visit: Visit) -> None:
    """Tell `visit` of all that lies below a directory. raises  OSError, and what `visit` raises

    path  of the directory, for people
    """
    for name, found in items(system, fd):
        visit(path / name, found)
        if is_directory(found):
            with folder(system, name, dir_fd=fd) as inner:
                walk(system, inner, path / name, visit)


def remove(system: SystemCalls, name: Name, *, dir_fd: int | None = None) -> None:
    """A directory and all that is in it, as far as that goes. raises OSError, the first"""
    errors: list[OSError] = []
    with folder(system, name, dir_fd=dir_fd) as fd:
        for inner, found in items(system, fd):
            try:
                if is_directory(found):
                    remove(system, inner, dir_fd=fd)
                else:
                    system.unlink(inner, dir_fd=fd)
            except FileNotFoundError:
                continue
            except OSError as error:
                errors.append(error)
    if errors:
        raise errors[0]
    system.rmdir(name, dir_fd=dir_fd)
