"""Files written and read in large blocks at multiples of a page.

They bypass the page cache where the filesystem lets them: a checkpoint is larger than what the
cache should hold, and copying it there costs more CPU than all the rest.
"""

import errno
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from zcompile.errors import IOFault
from zcompile.runtime.interrupts import deferred_interrupts
from zcompile.runtime.pages import host_pages
from zcompile.runtime.regular_file import open_regular
from zcompile.runtime.system_calls import KERNEL, SystemCalls
from zcompile.runtime.tiers import Buffer, Stretch
from zcompile.safetensors_file import PAGE_BYTES
from zcompile.units import KiB, MiB

BLOCK_BYTES = 16 * MiB
"""One request. Of this size even a thread that shares the interpreter keeps a disk busy."""
BLOCKS = 4
"""Two that arrive, two that leave."""
LEAST_DIRECT_BYTES = 256 * KiB
"""Less than this comes through the page cache, whose read-ahead serves the neighbours too."""


def new_blocks() -> list[Tensor]:
    """Memory of BLOCKS blocks, in huge pages: uint8 [BLOCK_BYTES] each."""
    return list(host_pages(BLOCKS * BLOCK_BYTES).split(BLOCK_BYTES))


class BlockFile:
    """An open file.

    nbytes  given: a new file that will have so many; None: one that exists, to be read
    system  makes all calls
    raises  IOFault, with what the system said
    """

    def __init__(self, path: Path, nbytes: int | None = None, system: SystemCalls = KERNEL) -> None:
        self.path = path
        self._system = system
        self._new = nbytes is not None
        self._buffered = -1
        """Once it was needed, a descriptor that goes through the page cache."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL if self._new else os.O_RDONLY
        verb = "write" if self._new else "read"
        try:
            self._fd = self._open(flags)
        except OSError as error:
            raise self._fault(error, verb, path.name, 0, 0, nbytes or 0) from error

    def _open(self, flags: int) -> int:
        """A new file is no link, nor what a link leads to; one that exists may be."""
        try:
            if self._new:
                return self._system.open(self.path, flags | os.O_DIRECT, 0o666)
            return open_regular(self._system, self.path, flags | os.O_DIRECT, follow=True)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Some systems create the file before they say that it cannot be direct.
            return open_regular(self._system, self.path, flags & ~os.O_EXCL, mode=0o666,
                                follow=not self._new)  # fmt: skip

    def reserve(self, nbytes: int) -> None:
        """Take the room for so many bytes; a disk that lacks it says so here. raises IOFault"""
        try:
            self._system.allocate(self._fd, 0, nbytes)
        except OSError as error:
            raise self._fault(error, "write", self.path.name, 0, 0, nbytes) from error

    def share(self, begin: int, stretches: Sequence[Stretch]) -> bool:
        """From `begin` on the file has the bytes of other files, without a copy.

        False where the filesystem cannot, or they are on another; then nothing is promised of
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
        """All of `source`. raises  IOFault

        begin, source  multiples of a page; uint8 [n], memory that begins at one too
        name           of what is written, for people
        """
        view, done = Buffer.over(source).view, 0
        while done < len(view):
            try:
                if not (moved := self._system.pwrite(self._fd, view[done:], begin + done)):
                    raise OSError(errno.EIO, "the device takes no more")
                done += moved
            except OSError as error:
                if not self._buffered_from_now_on(error):
                    raise self._fault(error, "write", name, begin, done, len(view)) from error

    def read(self, begin: int, end: int, into: Tensor, name: str) -> Tensor:
        """Bytes [begin, end), which lie somewhere in `into`. raises  IOFault

        into  uint8, begins at a page; has room for all pages that the bytes touch
        """
        low = begin // PAGE_BYTES * PAGE_BYTES
        room = -(-(end - low) // PAGE_BYTES) * PAGE_BYTES
        view, done = Buffer.over(into[:room]).view, 0
        while low + done < end:
            # What was read in part goes on at a page, as direct reads must.
            done = done // PAGE_BYTES * PAGE_BYTES
            try:
                moved = self._system.pread(self._fd, view[done:], low + done)
            except OSError as error:
                if not self._buffered_from_now_on(error):
                    raise self._fault(error, "read", name, begin, done, end - begin) from error
                continue
            if low + done + moved < end and moved < PAGE_BYTES:
                short = OSError(errno.EIO, "the file ends before the data")
                raise self._fault(short, "read", name, begin, done + moved, end - begin)
            done += moved
        return into[begin - low : end - low]

    def read_small(self, begin: int, end: int, name: str) -> Tensor:
        """Bytes [begin, end), through the page cache: uint8 [end - begin]. raises  IOFault"""
        made = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
        try:
            if self._buffered < 0:
                with deferred_interrupts():
                    self._buffered = open_regular(self._system, self.path, os.O_RDONLY, follow=True)
            moved = self._system.pread(self._buffered, Buffer.over(made).view, begin)
        except OSError as error:
            raise self._fault(error, "read", name, begin, 0, end - begin) from error
        if moved < end - begin:
            short = OSError(errno.EIO, "the file ends before the data")
            raise self._fault(short, "read", name, begin, moved, end - begin)
        return made

    def finish(self, nbytes: int) -> None:
        """A new file has all its bytes: cut off what the last page has beyond them, and sync."""
        try:
            self._system.truncate(self._fd, nbytes)
            self._system.fsync(self._fd)
        except OSError as error:
            raise self._fault(error, "write", self.path.name, 0, 0, nbytes) from error

    def close(self) -> None:
        fds, self._fd, self._buffered = (self._fd, self._buffered), -1, -1
        with ExitStack() as stack:  # each, whatever becomes of the others
            for fd in fds:
                if fd >= 0:
                    stack.callback(self._system.close, fd)

    def _buffered_from_now_on(self, error: OSError) -> bool:
        """Whether a request that failed may work without O_DIRECT, which is off then."""
        flags = self._system.flags(self._fd)
        if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
            return False
        self._system.set_flags(self._fd, flags & ~os.O_DIRECT)
        return True

    def _fault(
        self, error: OSError, verb: str, name: str, offset: int, done: int, wanted: int
    ) -> IOFault:
        why = error.strerror or str(error)
        return IOFault(error.errno or errno.EIO, verb, self.path, name, offset, done, wanted, why)
