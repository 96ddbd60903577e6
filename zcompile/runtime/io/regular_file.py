"""Opens a regular file and nothing else: a FIFO would be waited for, a device set going."""

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from zcompile.runtime.io.system_calls import Name, SystemCalls

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
