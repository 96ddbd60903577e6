"""Trials write and read a block in a directory to learn which ways of file access work there.

A trial at start is believed rather than what can be looked up: a filesystem may accept the O_DIRECT
flag and refuse the write; a container may have a system call and forbid it. The file of a trial has
no name, so that nothing is left behind if the process is killed. Where the filesystem knows no such
files, the file has a name for a moment, which `remove_leftovers` in
`runtime/tiers/directory_lock.py` knows.
"""

import errno
import logging
import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import torch

from zcompile.runtime.io.files import Directory
from zcompile.runtime.io.rings import KernelAio, Request, Ring, ThreadRing
from zcompile.runtime.io.system_calls import SystemCalls

logger = logging.getLogger(__name__)


# --- Files of a trial ---

BLOCK_BYTES = 4096
"""Extents of the disk tier begin and end at multiples of this; every disk takes such blocks."""
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
"""Refusals of O_DIRECT."""
_NOT_NAMELESS = (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)
"""Refusals of O_TMPFILE, the last two by kernels that do not know the flag. The first may be of
O_DIRECT."""


@contextmanager
def nameless_file(directory: Directory, direct: bool) -> Iterator[int]:
    """The descriptor of a new file that nobody else can open, while the block runs.

    raises  OSError
    """
    flags, system = os.O_RDWR | (os.O_DIRECT if direct else 0), directory.system
    try:
        fd = directory.open(".", flags | os.O_TMPFILE | os.O_EXCL)
    except OSError as error:
        if error.errno not in _NOT_NAMELESS:
            raise
    else:
        try:
            yield fd
        finally:
            system.close(fd)
        return
    with _file_with_a_name(directory, flags) as fd:
        yield fd


@contextmanager
def _file_with_a_name(directory: Directory, flags: int) -> Iterator[int]:
    """The descriptor of a new file whose name is removed at once, while the block runs."""
    name, system = f"zinf-trial-{secrets.token_hex(8)}", directory.system
    with ExitStack() as opened:  # everything is undone, also where undoing a part fails
        made = directory.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        opened.callback(system.close, made)
        with ExitStack() as named:
            named.callback(directory.unlink, name)
            fd = directory.open(name, flags)
            opened.callback(system.close, fd)
        yield fd


def supports_direct(directory: Directory) -> bool:
    """Whether a block that is written with O_DIRECT can be read back.

    raises  OSError, for other reasons than O_DIRECT
    """
    try:
        with nameless_file(directory, direct=True) as fd:
            _write_and_read_back(directory.system, fd)
    except OSError as error:
        if error.errno in _NOT_DIRECT:
            return False
        raise
    return True


def check_buffered(directory: Directory) -> None:
    """raises  OSError, if a block cannot be written and read back through the page cache"""
    with nameless_file(directory, direct=False) as fd:
        _write_and_read_back(directory.system, fd)


def _write_and_read_back(system: SystemCalls, fd: int) -> None:
    """raises  OSError, if a block does not come back as it was written"""
    # Mapped, since a direct transfer needs memory that begins at a page.
    page = memoryview(mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    page[:] = b"\xa5" * BLOCK_BYTES
    wrote = system.pwrite(fd, page, 0)
    page[:] = bytes(BLOCK_BYTES)
    if wrote != BLOCK_BYTES or system.pread(fd, page, 0) != BLOCK_BYTES or page[-1] != 0xA5:
        raise OSError(errno.EIO, "a block did not come back as it was written")


def direct_granule(system: SystemCalls, fd: int) -> int:
    """Bytes of which address, offset and size of a direct transfer are multiples: 512 to 4096."""
    told = system.direct_alignment(fd)
    return BLOCK_BYTES if told is None else min(max(*told, 512), BLOCK_BYTES)


# --- Which ring serves a directory ---

RINGS: Mapping[str, Callable[[], Ring]] = {
    "aio": KernelAio,
    "threads": ThreadRing,
    "buffered": partial(ThreadRing, direct=False),
}
DIRECT = ("aio", "threads")
"""The rings for files with O_DIRECT, in the order in which they are tried. benchmarks/disk.py
compares them."""
BUFFERED = ("buffered",)
"""The rings for files without O_DIRECT, on which the kernel's rings would block whoever submits."""


def choose_rings(
    directories: Sequence[tuple[Directory, bool]], names: Sequence[str] = DIRECT
) -> list[Ring]:
    """Open one ring for each (directory, whether direct), shared by those that choose the same.

    raises  OSError of the last one tried, if none works; then nothing stays open
    """
    opened: dict[str, Ring] = {}
    try:
        return [
            _choose_ring(directory, names if direct else BUFFERED, direct, opened)
            for directory, direct in directories
        ]
    except BaseException:  # where a thread cannot be started, that is no OSError
        for ring in opened.values():
            ring.close()
        raise


def _choose_ring(
    directory: Directory, names: Sequence[str], direct: bool, opened: dict[str, Ring]
) -> Ring:
    """The first ring of `names` that works in `directory`; rings in `opened` are shared."""
    refusal = OSError(errno.ENOSYS, "there is no way to read and write")
    for name in names:
        try:
            ring = opened.get(name) or directory.system.ring(RINGS[name])
        except OSError as error:
            refusal = error
            continue
        try:
            with nameless_file(directory, direct) as fd:
                try_ring(ring, fd)
        except OSError as error:
            refusal = error
            if name not in opened:
                ring.close()
            continue
        opened[name] = ring
        logger.info("%s is reached through %s", directory.path, name)
        return ring
    raise refusal


def try_ring(ring: Ring, fd: int) -> None:
    """Write and read a block through `ring`, which nobody else uses.

    raises  OSError, if the block does not come back as it was written
    """
    blocks = torch.full((3 * BLOCK_BYTES,), 0xA5, dtype=torch.uint8)
    begin = -blocks.data_ptr() % BLOCK_BYTES
    for write in (True, False):
        ring.submit([Request(0, write, fd, blocks.data_ptr() + begin, BLOCK_BYTES, 0)])
        (outcome,) = ring.reap()
        if outcome.result != BLOCK_BYTES:
            code = max(-outcome.result, 0) or errno.EIO
            raise OSError(code, os.strerror(code))
        if write:
            blocks.zero_()
    if not blocks[begin : begin + BLOCK_BYTES].eq(0xA5).all():
        raise OSError(errno.EIO, "a block did not come back as it was written")


class Trial(NamedTuple):
    """How one ring fares in a directory.

    refused  why this ring cannot be used there; None if it can
    """

    ring: str
    refused: str | None


def try_rings(directory: Directory, direct: bool) -> tuple[Trial, ...]:
    """How every ring fares in `directory`; the first that is not refused would be used."""
    return tuple(
        _try_one_ring(name, directory, direct) for name in (DIRECT if direct else BUFFERED)
    )


def _try_one_ring(name: str, directory: Directory, direct: bool) -> Trial:
    """How the ring `name` fares in `directory`."""
    try:
        choose_rings([(directory, direct)], (name,))[0].close()
    except OSError as error:
        return Trial(name, error.strerror or str(error))
    return Trial(name, None)
