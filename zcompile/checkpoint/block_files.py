"""Writes and reads files in large blocks at multiples of a page.

They bypass the page cache where the filesystem lets them: a checkpoint is larger than the cache
should hold, and copying it there costs more CPU than all the rest.
"""

import errno
import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from zcompile.checkpoint.file import OpenFile
from zcompile.checkpoint.safetensors import PAGE_BYTES
from zcompile.errors import IOFault
from zcompile.ir.units import KiB, MiB
from zcompile.runtime.device.pages import host_pages
from zcompile.runtime.io.files import close_or_warn, open_regular
from zcompile.runtime.io.system_calls import SystemCalls
from zcompile.runtime.tiers.base import Buffer, FileRange

BLOCK_BYTES = 16 * MiB
"""Bytes of one request. With this size even a thread that shares the interpreter keeps a disk
busy."""
BLOCKS = 4
"""Blocks in memory: two arrive, two leave."""
LEAST_DIRECT_BYTES = 256 * KiB
"""Smaller tensors come through the page cache, whose read-ahead serves the neighbours too."""

logger = logging.getLogger("zcompile.checkpoint.block_files")


def new_blocks() -> list[Tensor]:
    """Memory of BLOCKS blocks, in huge pages: uint8 [BLOCK_BYTES] each."""
    return list(host_pages(BLOCKS * BLOCK_BYTES).split(BLOCK_BYTES))


class BlockWriter:
    """Writes a file, which it opens.

    path    in the directory of the descriptor `folder`
    nbytes  that the file will have
    system  makes all calls
    made    whether it is there already; else it is made
    raises  IOFault, with what the system said
    """

    def __init__(
        self, path: Path, folder: int, nbytes: int, system: SystemCalls, made: bool = False
    ) -> None:
        self.path = path
        self._system, self._new = system, 0 if made else os.O_CREAT
        try:
            self._fd = self._open(folder)
        except OSError as error:
            raise _fault(error, "write", path, path.name, 0, 0, nbytes) from error

    def _open(self, folder: int) -> int:
        """Open the file; it is no link, nor what a link leads to."""
        flags, name = os.O_RDWR | self._new, self.path.name
        try:
            alone = os.O_EXCL if self._new else os.O_NOFOLLOW
            return self._system.open(name, flags | alone | os.O_DIRECT, 0o666, dir_fd=folder)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Some systems create the file before they say that it cannot be direct.
            return open_regular(self._system, name, flags, mode=0o666, dir_fd=folder)

    def reserve(self, nbytes: int) -> None:
        """Take the room for so many bytes; a disk that lacks it says so here.

        raises  IOFault
        """
        try:
            self._system.allocate(self._fd, 0, nbytes)
        except OSError as error:
            raise _fault(error, "write", self.path, self.path.name, 0, 0, nbytes) from error

    def share(self, begin: int, stretches: Sequence[FileRange]) -> bool:
        """Give the file the bytes of other files from `begin` on, without a copy.

        False where the filesystem cannot, or they are on another one; then nothing is promised of
        these bytes.
        """
        for stretch in stretches:
            try:
                self._system.clone(self._fd, begin, stretch.fd, stretch.offset, stretch.nbytes)
            except OSError:
                return False  # streaming takes its place, and raises what still stands in the way
            begin += stretch.nbytes
        return True

    def write(self, begin: int, source: Tensor, name: str) -> None:
        """Write all of `source`.

        begin   in the file, a multiple of a page
        source  uint8 [n], n a multiple of a page, memory that begins at one too
        name    of what is written, for people
        raises  IOFault
        """
        view, done = Buffer.over(source).view, 0
        while done < len(view):
            try:
                if not (moved := self._system.pwrite(self._fd, view[done:], begin + done)):
                    raise OSError(errno.EIO, "the device takes no more")
                done += moved
            except OSError as error:
                if not self._buffered_from_now_on(error):
                    raise _fault(error, "write", self.path, name, begin, done, len(view)) from error

    def finish(self, nbytes: int) -> None:
        """Cut off what the last page has beyond `nbytes`, and sync."""
        try:
            self._system.truncate(self._fd, nbytes)
            self._system.fsync(self._fd)
        except OSError as error:
            raise _fault(error, "write", self.path, self.path.name, 0, 0, nbytes) from error

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._system.close(fd)

    def _buffered_from_now_on(self, error: OSError) -> bool:
        """Whether a request that failed may work without O_DIRECT, which is off then."""
        flags = self._system.flags(self._fd)
        if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
            return False
        self._system.set_flags(self._fd, flags & ~os.O_DIRECT)
        return True


class BlockReader:
    """Reads an open file; large parts of it past the page cache, where that can be.

    The file's descriptor goes through the page cache. Another one, past it, is opened when it is
    needed; it is not used if it turns out to be of another file, which has taken the name.
    """

    def __init__(self, file: OpenFile) -> None:
        self._file, self._system = file, file.system
        self._direct: int | None = None
        """-1: there is none."""

    def read(self, begin: int, end: int, into: Tensor, name: str) -> Tensor:
        """Read bytes [begin, end); returns the part of `into` that holds them.

        into    uint8, begins at a page; has room for all pages that the bytes touch
        raises  IOFault
        """
        if self._direct is None:
            self._direct = self._opened_direct()
        low = begin // PAGE_BYTES * PAGE_BYTES
        room = -(-(end - low) // PAGE_BYTES) * PAGE_BYTES
        view, done = Buffer.over(into[:room]).view, 0
        while low + done < end:
            # What was read in part goes on within a page, as direct reads must not.
            direct = self._direct >= 0 and not done % PAGE_BYTES
            fd = self._direct if direct else self._file.fd
            try:
                if not (moved := self._system.pread(fd, view[done:], low + done)):
                    raise OSError(errno.EIO, "the file ends before the data")
                done += moved
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise self._fault(error, name, begin, low + done, end) from error
                close_or_warn(self._file.path, self.close)
        return into[begin - low : end - low]

    def read_small(self, begin: int, end: int, name: str) -> Tensor:
        """Bytes [begin, end), through the page cache: uint8 [end - begin].

        raises  IOFault
        """
        made = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
        view, done = Buffer.over(made).view, 0
        while begin + done < end:
            try:
                if not (moved := self._system.pread(self._file.fd, view[done:], begin + done)):
                    raise OSError(errno.EIO, "the file ends before the data")
                done += moved
            except OSError as error:
                raise self._fault(error, name, begin, begin + done, end) from error
        return made

    def close(self) -> None:
        """Close the descriptor past the page cache; the file stays open.

        raises  OSError
        """
        fd, self._direct = self._direct, -1
        if fd is not None and fd >= 0:
            self._system.close(fd)

    def _opened_direct(self) -> int:
        """A descriptor past the page cache; -1 where none can be had: then the cache serves the
        same bytes."""
        file, fd = self._file, -1
        try:
            fd = open_regular(
                self._system, file.name, os.O_RDONLY | os.O_DIRECT, dir_fd=file.dir_fd, follow=True
            )
            if os.path.samestat(self._system.fstat(fd), self._system.fstat(file.fd)):
                return fd
        except OSError as error:
            logger.info("%s is read through the page cache: %s", file.path, error.strerror)
        if fd >= 0:
            close_or_warn(file.path, partial(self._system.close, fd))
        return -1

    def _fault(self, error: OSError, name: str, begin: int, at: int, end: int) -> IOFault:
        done = max(at - begin, 0)
        return _fault(error, "read", self._file.path, name, begin, done, end - begin)


def _fault(
    error: OSError, verb: str, path: Path, name: str, offset: int, done: int, wanted: int
) -> IOFault:
    why = error.strerror or str(error)
    return IOFault(error.errno or errno.EIO, verb, path, name, offset, done, wanted, why)
