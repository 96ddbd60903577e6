"""Opens files of checkpoints for reading; anybody may have put them there.

A path that a user gives may lead through symbolic links, and a name in a directory may be one too:
the cache of Hugging Face is made of them. They have to lead to a regular file. Each file is opened
once, and names in a directory are reached from its descriptor. So what was checked is what is read,
also while another process replaces the checkpoint.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from zcompile.errors import CheckpointInvalid, ZinfError
from zcompile.runtime.io.files import close_or_warn, open_regular
from zcompile.runtime.io.system_calls import Name, SystemCalls
from zcompile.runtime.transfer.interrupts import deferred_interrupts, uninterrupted

_COPY_AGAIN = "remove it, or copy the checkpoint again"
_TODO = {
    errno.ENXIO: _COPY_AGAIN,
    errno.ELOOP: _COPY_AGAIN,
    errno.EACCES: "give yourself the right to read it",
    errno.ENAMETOOLONG: "name one that exists",
}


@contextmanager
def checkpoint_errors(path: Path) -> Iterator[None]:
    """A context that turns errors of the system into those of a checkpoint.

    raises  CheckpointInvalid
    """
    try:
        yield
    except ZinfError:
        raise
    except FileNotFoundError as error:
        raise CheckpointInvalid(path, "does not exist", "name one that does") from error
    except OSError as error:
        todo = _TODO.get(error.errno or 0, "look after the disk")
        raise CheckpointInvalid(
            path, f"cannot be read ({error.strerror or error})", todo
        ) from error
    except MemoryError as error:
        raise CheckpointInvalid(path, "has a part that is larger than memory") from error


@dataclass(frozen=True, eq=False)
class OpenFile:
    """A file that is open until its `OpenFiles` end.

    path          for people
    name, dir_fd  where it was found: a path, or a name in the directory of the descriptor
    """

    path: Path
    fd: int
    name: Name
    dir_fd: int | None
    system: SystemCalls


class OpenFiles:
    """Files and directories of checkpoints, open until the end of the context.

    system  makes all calls
    """

    def __init__(self, system: SystemCalls) -> None:
        self.system = system
        self._held: list[tuple[Path, int]] = []

    def __enter__(self) -> "OpenFiles":
        return self

    def __exit__(self, *_: object) -> None:
        with deferred_interrupts():
            while self._held:  # which were only read
                path, fd = self._held.pop()
                close_or_warn(path, partial(self.system.close, fd))

    @uninterrupted
    def folder(self, path: Path) -> "Folder":
        """Open a directory.

        raises  CheckpointInvalid
        """
        with checkpoint_errors(path):
            fd = self.system.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._held.append((path, fd))
        return Folder(self, path, fd)

    def file(self, path: Path) -> OpenFile:
        """Open a file.

        raises  CheckpointInvalid
        """
        with checkpoint_errors(path):
            return self.found(path, path, None)

    @uninterrupted
    def found(self, path: Path, name: Name, dir_fd: int | None) -> OpenFile:
        """Open the file `path`, by the name that it has in a directory.

        raises  OSError
        """
        fd = open_regular(self.system, name, os.O_RDONLY, dir_fd=dir_fd, follow=True)
        self._held.append((path, fd))
        return OpenFile(path, fd, name, dir_fd, self.system)


class Folder:
    """A directory of a checkpoint; it is read as it is, whatever bears its name by now."""

    def __init__(self, files: OpenFiles, path: Path, fd: int) -> None:
        self.path = path
        self._files, self._fd = files, fd

    def names(self) -> list[str]:
        """Names in the directory, sorted.

        raises  CheckpointInvalid
        """
        with checkpoint_errors(self.path):
            return sorted(self._files.system.names(self._fd))

    def holds(self, name: str) -> bool:
        """Whether a name leads to something.

        raises  CheckpointInvalid
        """
        with checkpoint_errors(self.path / name):
            try:
                self._files.system.stat(name, dir_fd=self._fd, follow=True)
            except FileNotFoundError:
                self._check_stands()
                return False
        return True

    def file(self, name: str) -> OpenFile:
        """Open the file of a name.

        raises  CheckpointInvalid
        """
        path = self.path / name
        with checkpoint_errors(path):
            try:
                return self._files.found(path, name, self._fd)
            except FileNotFoundError as error:
                self._check_stands()
                raise CheckpointInvalid(
                    path, "does not exist", "copy the checkpoint again"
                ) from error

    def _check_stands(self) -> None:
        """Refuse a directory that was replaced or removed: one that lacks a file may be on its way
        out.

        raises  CheckpointInvalid, OSError
        """
        system = self._files.system
        try:
            if os.path.samestat(system.stat(self.path, follow=True), system.fstat(self._fd)):
                return
        except FileNotFoundError:
            pass
        raise CheckpointInvalid(
            self.path, "was replaced or removed while it was read", "read it again"
        )
