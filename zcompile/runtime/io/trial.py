"""What a directory takes, and which ring serves it: tried there, at start, rather than looked up.

A filesystem may accept the O_DIRECT flag and refuse the write; a container may have the system
call and forbid it. The file of a trial has no name, so that nothing is left behind if we are
killed; where the filesystem knows no such files it has one for a moment, which `reclaim` in
`runtime/tiers/claim.py` knows.
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

BLOCK_BYTES = 4096
"""Extents of the disk tier begin and end at multiples of this; every disk takes such blocks."""
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_NOT_NAMELESS = (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)
"""Of O_TMPFILE; the last two of kernels that do not know it. The first may be of O_DIRECT."""


@contextmanager
def nameless_file(directory: Directory, direct: bool) -> Iterator[int]:
    """A descriptor of a new file that nobody else can open.

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
    with _named_for_a_moment(directory, flags) as fd:
        yield fd


@contextmanager
def _named_for_a_moment(directory: Directory, flags: int) -> Iterator[int]:
    name, system = f"zinf-trial-{secrets.token_hex(8)}", directory.system
    with ExitStack() as opened:  # all of it is undone, also where undoing some of it fails
        made = directory.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        opened.callback(system.close, made)
        with ExitStack() as named:
            named.callback(directory.unlink, name)
            fd = directory.open(name, flags)
            opened.callback(system.close, fd)
        yield fd


def takes_direct(directory: Directory) -> bool:
    """Whether a block that is written with O_DIRECT comes back.

    raises  OSError, for other reasons than O_DIRECT
    """
    try:
        with nameless_file(directory, direct=True) as fd:
            _probe(directory.system, fd)
    except OSError as error:
        if error.errno in _NOT_DIRECT:
            return False
        raise
    return True


def takes_blocks(directory: Directory) -> None:
    """raises  OSError, if a block cannot be written and read back through the page cache"""
    with nameless_file(directory, direct=False) as fd:
        _probe(directory.system, fd)


def direct_granule(system: SystemCalls, fd: int) -> int:
    """What address, offset and size of a direct transfer must be multiples of: 512 to 4096."""
    told = system.direct_alignment(fd)
    return BLOCK_BYTES if told is None else min(max(*told, 512), BLOCK_BYTES)


def try_ring(ring: Ring, fd: int) -> None:
    """Through `ring`, on which nothing else goes on.

    raises  OSError, if a block does not come back as it was written
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


def _probe(system: SystemCalls, fd: int) -> None:
    # Mapped, as it has to begin at a page.
    page = memoryview(mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    page[:] = b"\xa5" * BLOCK_BYTES
    wrote = system.pwrite(fd, page, 0)
    page[:] = bytes(BLOCK_BYTES)
    if wrote != BLOCK_BYTES or system.pread(fd, page, 0) != BLOCK_BYTES or page[-1] != 0xA5:
        raise OSError(errno.EIO, "a block did not come back as it was written")


logger = logging.getLogger(__name__)

RINGS: Mapping[str, Callable[[], Ring]] = {
    "aio": KernelAio,
    "threads": ThreadRing,
    "buffered": partial(ThreadRing, direct=False),
}
DIRECT = ("aio", "threads")
"""In the order in which they are tried. benchmarks/disk.py compares them."""
BUFFERED = ("buffered",)
"""For files without O_DIRECT, on which the kernel's rings would block whoever submits."""


class Trial(NamedTuple):
    """refused  why this ring cannot be used in a directory; None if it can"""

    ring: str
    refused: str | None


def try_all(directory: Directory, direct: bool) -> tuple[Trial, ...]:
    """How every ring fares in `directory`; the first that is not refused would be used."""
    return tuple(_trial(name, directory, direct) for name in (DIRECT if direct else BUFFERED))


def choose(
    directories: Sequence[tuple[Directory, bool]], names: Sequence[str] = DIRECT
) -> list[Ring]:
    """One ring for each (directory, whether direct), shared by those that choose the same.

    raises  OSError of the last one tried, if none works; then nothing stays open
    """
    opened: dict[str, Ring] = {}
    try:
        return [
            _first(directory, names if direct else BUFFERED, direct, opened)
            for directory, direct in directories
        ]
    except BaseException:  # a thread that cannot be started is none of the system's
        for ring in opened.values():
            ring.close()
        raise


def _first(
    directory: Directory, names: Sequence[str], direct: bool, opened: dict[str, Ring]
) -> Ring:
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


def _trial(name: str, directory: Directory, direct: bool) -> Trial:
    try:
        choose([(directory, direct)], (name,))[0].close()
    except OSError as error:
        return Trial(name, error.strerror or str(error))
    return Trial(name, None)
