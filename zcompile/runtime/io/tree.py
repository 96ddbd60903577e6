"""Directories and what lies below them, reached from descriptors: links are not followed.

So what others put there while we look around, or clear up, leads nowhere else.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zcompile.runtime.io.regular_file import is_directory
from zcompile.runtime.io.system_calls import Name, SystemCalls

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
