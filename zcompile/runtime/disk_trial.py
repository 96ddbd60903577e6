"""What a directory takes: tried there rather than looked up.

A filesystem may accept the O_DIRECT flag and refuse the write; a container may have the system
call and forbid it. The file of a trial has no name from its first moment on, so that nothing is
left behind if we are killed.
"""

import ctypes
import errno
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from zcompile.runtime.ring import Request, Ring

BLOCK_BYTES = 4096
"""Extents of the disk tier begin and end at multiples of this; every disk takes such blocks."""
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_DIOALIGN = struct.Struct("<II")
"""stx_dio_mem_align, stx_dio_offset_align at byte 152 of struct statx (linux/stat.h)."""
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


@contextmanager
def nameless_file(directory: Path, direct: bool) -> Iterator[int]:
    """A descriptor of a new file that nobody else can open.

    raises  OSError
    """
    made, name = tempfile.mkstemp(prefix="zinf-trial-", dir=directory)
    try:
        try:
            fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
        finally:
            os.unlink(name)
    finally:
        os.close(made)
    try:
        yield fd
    finally:
        os.close(fd)


def takes_direct(directory: Path) -> bool:
    """Whether a block that is written with O_DIRECT comes back.

    raises  OSError, for other reasons than O_DIRECT
    """
    try:
        with nameless_file(directory, direct=True) as fd:
            _probe(fd)
    except OSError as error:
        if error.errno in _NOT_DIRECT:
            return False
        raise
    return True


def takes_blocks(directory: Path) -> None:
    """raises  OSError, if a block cannot be written and read back through the page cache"""
    with nameless_file(directory, direct=False) as fd:
        _probe(fd)


def direct_granule(fd: int) -> int:
    """What address, offset and size of a direct transfer must be multiples of: 512 to 4096."""
    told = ctypes.create_string_buffer(256)
    statx = getattr(ctypes.CDLL(None), "statx", None)  # glibc 2.28
    if statx is None or statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, told) != 0:
        return BLOCK_BYTES
    memory, offset = _DIOALIGN.unpack_from(told, 152)
    known = int.from_bytes(told.raw[:4], "little") & _STATX_DIOALIGN and memory and offset
    return min(max(memory, offset, 512), BLOCK_BYTES) if known else BLOCK_BYTES


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


def _probe(fd: int) -> None:
    page = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page[:] = b"\xa5" * BLOCK_BYTES
    wrote = os.pwritev(fd, [page], 0)
    page[:] = bytes(BLOCK_BYTES)
    if wrote != BLOCK_BYTES or os.preadv(fd, [page], 0) != BLOCK_BYTES or page[-1] != 0xA5:
        raise OSError(errno.EIO, "a block did not come back as it was written")
