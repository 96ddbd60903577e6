"""Reads durable data straight from its files: to check it, or to bring it back.

Without a store, so that `zinf disk verify` needs no torch. One thread reads ahead while another
one sums, through two buffers; memory does not grow with the data.
"""

import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from zcompile.errors import DurableDamaged
from zcompile.runtime.checksums import SUMS, Piece, Running
from zcompile.runtime.index import DATA_NAME, Index, Resting
from zcompile.units import MiB

BUFFER_BYTES = 8 * MiB
BUFFERS = 2
_DIRECT = getattr(os, "O_DIRECT", 0)

Progress = Callable[[int, int], None]


class DataReader:
    """The data files of a commit, open for reading.

    raises  DurableDamaged, where one is gone; OSError
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self.paths = [directory / DATA_NAME for directory in directories]
        self._files: list[int] = []
        self._ahead = ThreadPoolExecutor(1, "zinf-check")
        self._buffers = [mmap.mmap(-1, BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                         for _ in range(BUFFERS)]  # fmt: skip
        try:
            for path in self.paths:
                self._files.append(_opened(path))
        except FileNotFoundError:
            self.close()
            raise DurableDamaged(path, "the data file", "is gone; the index names it") from None
        except OSError:
            self.close()
            raise

    def __enter__(self) -> "DataReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.close()

    def close(self) -> None:
        self._ahead.shutdown()
        for file in self._files:
            os.close(file)
        self._files.clear()

    def chunks(self, tensor: Resting, begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """Bytes [begin, end) of a tensor as (where it begins, bytes), each valid until the next.

        begin, end  as pieces have them: whole granules
        raises      DurableDamaged where the file ends before, or cannot be read
        """
        starts = range(begin, end, BUFFER_BYTES)

        def read(turn: int) -> memoryview:
            low = starts[turn]
            view = memoryview(self._buffers[turn % BUFFERS])[: min(BUFFER_BYTES, end - low)]
            self._fill(view, tensor, low)
            return view

        coming = [self._ahead.submit(read, 0)] if starts else []
        for turn, low in enumerate(starts):
            view = coming[turn].result()
            if turn + 1 < len(starts):
                coming.append(self._ahead.submit(read, turn + 1))
            yield low, view

    def _fill(self, view: memoryview, tensor: Resting, begin: int) -> None:
        path, file = self.paths[tensor.file], self._files[tensor.file]
        done = 0
        while done < len(view):
            try:
                moved = _moved(path, file, view[done:], tensor.offset + begin + done)
            except OSError as error:
                why = f"cannot be read: {error.strerror}"
                raise DurableDamaged(path, repr(tensor.name), why) from error
            if moved <= 0:
                why = f"ends before its data: the file has {os.fstat(file).st_size} bytes"
                raise DurableDamaged(path, repr(tensor.name), why)
            done += moved

    def check(self, tensor: Resting, piece: Piece) -> None:
        """raises  DurableDamaged, if the piece does not have the checksum it was written with"""
        summing = Running(tensor.sum)
        for _, view in self.chunks(tensor, piece.begin, piece.end):
            summing.update(view)
        if summing.value() != piece.checksum:
            begin = tensor.offset + piece.begin
            raise DurableDamaged(
                self.paths[tensor.file], repr(tensor.name),
                f"is damaged: bytes [{begin}, {begin + piece.end - piece.begin}) of the file do "
                "not have the checksum they were written with")  # fmt: skip


def check_all(index: Index, directories: Sequence[Path], done: Progress | None = None) -> int:
    """Every checksum of a commit; how many bytes were read. raises DurableDamaged, OSError"""
    total = sum(p.end - p.begin for tensor in index.tensors for p in tensor.pieces)
    read = 0
    with DataReader(directories) as data:
        for tensor in index.tensors:
            if tensor.sum not in SUMS:
                raise DurableDamaged(data.paths[tensor.file], repr(tensor.name), "has checksums "
                                     f"of kind {tensor.sum}, which needs xxhash")  # fmt: skip
            for piece in tensor.pieces:
                data.check(tensor, piece)
                read += piece.end - piece.begin
                if done is not None:
                    done(read, total)
    return read


def _opened(path: Path) -> int:
    """Past the page cache where that works, so that what is checked is what the device holds."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | _DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _moved(path: Path, file: int, view: memoryview, offset: int) -> int:
    try:
        return os.preadv(file, [view], offset)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # Refused here, or written where smaller multiples were allowed: through the page cache.
    buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(buffered, file, inheritable=False)
    os.close(buffered)
    return os.preadv(file, [view], offset)
