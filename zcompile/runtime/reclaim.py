"""Space that no commit names goes back to the filesystem; or everything does. Without a store."""

import ctypes
import os
from pathlib import Path

from zcompile.errors import DurableDamaged
from zcompile.runtime.data_header import HEADER_BYTES, DataHeader, read_header
from zcompile.runtime.index import DATA_NAME, INDEX_NAME, Index, read_index, sync_directory

KEEP_SIZE, PUNCH_HOLE = 1, 2
"""linux/falloc.h"""


def free_ranges(index: Index, number: int, size: int) -> list[tuple[int, int]]:
    """What of a data file of `size` bytes the commit does not name: (begin, end), ordered."""
    taken = sorted((t.offset, t.offset + t.room) for t in index.tensors if t.file == number)
    free, at = [], HEADER_BYTES
    for begin, end in [*taken, (size, size)]:
        if at < begin:
            free.append((at, begin))
        at = max(at, end)
    return free


def trim(index: Index, number: int, directory: Path) -> int:
    """Give free space of a data file back; the bytes. What is at its end is cut off."""
    fd = os.open(directory / DATA_NAME, os.O_RDWR | os.O_CLOEXEC)
    try:
        before = os.fstat(fd).st_blocks
        size = os.fstat(fd).st_size
        for begin, end in free_ranges(index, number, size):
            if end == size:
                os.ftruncate(fd, begin)
            else:
                _punch(fd, begin, end - begin)
        os.fsync(fd)
        return (before - os.fstat(fd).st_blocks) * 512
    finally:
        os.close(fd)


def remove_all(directory: Path) -> int:
    """No commit and no data file any more; the bytes they took. The commit goes first."""
    freed = 0
    for name in (INDEX_NAME, f"{INDEX_NAME}.new", DATA_NAME):
        path = directory / name
        if path.exists():
            freed += path.stat().st_blocks * 512
            path.unlink()
            sync_directory(directory)
    return freed


def committed_elsewhere(directory: Path) -> DataHeader | None:
    """The header of a data file that a commit in another directory names. raises OSError"""
    try:
        header = read_header(directory)
        if header is None or header.number == 0:
            return None
        index = read_index(Path(header.first))
    except DurableDamaged:
        return None
    return header if index is not None and index[0].run == header.run else None


def _punch(fd: int, begin: int, nbytes: int) -> None:
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if call(fd, KEEP_SIZE | PUNCH_HOLE, begin, nbytes) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
