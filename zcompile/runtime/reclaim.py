"""Space that no commit names goes back to the filesystem; or everything does. Without a store."""

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from zcompile.errors import DiskUnusable, DurableDamaged
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


def index_gone(directory: Path, header: DataHeader) -> DurableDamaged:
    """The error for a directory that was given; a copy may name another one, which may be sound."""
    data = directory / DATA_NAME
    if header.number == 0:
        return DurableDamaged(directory / INDEX_NAME, "the index", f"is gone; {data} belongs to a "
                              "commit")  # fmt: skip
    return DurableDamaged(data, f"the commit in {header.first}", "is gone or damaged, and this is "
                          f"file {header.number} of it")  # fmt: skip


def check_original(home: Path, index: Index, number: int, other: Path) -> None:
    """Whether data file `number` of the commit in `home` is its own, in `other`.

    raises  DiskUnusable, if `home` is a copy, and `other` is what the original goes on with
    """
    if (original := _original(home, index, number, other)) is not None:
        raise DiskUnusable(home, f"is a copy of {original}, and {other / DATA_NAME} is a file of "
                           "the original", f"copy {other} too, and give the copies as disk, in "
                           "this order")  # fmt: skip


def own_directories(home: Path, index: Index, directories: Sequence[Path]) -> list[Path]:
    """Those of `directories` whose data file is of the commit in `home` and of no other."""
    own = [home]
    for number, other in enumerate(directories[1:], 1):
        with suppress(DurableDamaged):
            header = read_header(other)
            same = header is not None and (header.run, header.number) == (index.run, number)
            if same and _original(home, index, number, other) is None:
                own.append(other)
    return own


def _original(home: Path, index: Index, number: int, other: Path) -> Path | None:
    """The directory that `home` is a copy of, if that has a commit which names `other`."""
    try:
        header = read_header(other)
        if header is None or header.run != index.run or _same(Path(header.first), home):
            return None
        found = read_index(Path(header.first))
    except OSError:  # there is no sound commit any more: moved, or removed
        return None
    named = found is not None and found[0].run == index.run and _names(found[0], number, other)
    return Path(header.first) if named else None


def _names(index: Index, number: int, directory: Path) -> bool:
    return number < len(index.directories) and _same(Path(index.directories[number]), directory)


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _punch(fd: int, begin: int, nbytes: int) -> None:
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if call(fd, KEEP_SIZE | PUNCH_HOLE, begin, nbytes) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
