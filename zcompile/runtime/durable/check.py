"""A data reader reads committed tensors straight from their files: to check them or to bring them
back.

It needs no torch, so that `zinf disk verify` does not import it. One thread reads ahead while
another one sums, through two buffers; memory does not grow with the data.
"""

import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from zcompile.errors import DurableDamaged, ZinfError
from zcompile.ir.units import MiB
from zcompile.runtime.durable.index import (
    DATA_NAME,
    SUMS,
    Index,
    Piece,
    RunningChecksum,
    StoredTensor,
)
from zcompile.runtime.io.files import Directory, close_or_warn, unusable_error
from zcompile.runtime.transfer.interrupts import deferred_interrupts

BUFFER_BYTES = 8 * MiB
BUFFERS = 2
_DIRECT = getattr(os, "O_DIRECT", 0)
Progress = Callable[[int, int], None]
"""Called with the bytes read so far, and in all."""


class DataReader:
    """The data files of a commit, open for reading within `with`.

    raises  DurableDamaged, where one is gone; DiskUnusable
    """

    def __init__(self, directories: Sequence[Directory]) -> None:
        self.paths = [directory.path / DATA_NAME for directory in directories]
        self._directories = directories
        self._files: list[int] = []
        self._ahead = ThreadPoolExecutor(1, "zinf-check")
        self._buffers = [
            mmap.mmap(-1, BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for _ in range(BUFFERS)
        ]

    def __enter__(self) -> "DataReader":
        try:
            with deferred_interrupts():
                for directory in self._directories:
                    self._files.append(_open_past_page_cache(directory))
        except FileNotFoundError:
            self.close()
            path = directory.path / DATA_NAME
            raise DurableDamaged(path, "the data file", "is gone; the index names it") from None
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, ZinfError):
                raise unusable_error(directory.path, error) from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close each file, whatever becomes of the others: nothing was written."""
        self._ahead.shutdown()
        files, self._files = self._files, []
        for directory, path, file in zip(self._directories, self.paths, files, strict=False):
            close_or_warn(path, partial(directory.system.close, file))

    def chunks(
        self, tensor: StoredTensor, begin: int, end: int
    ) -> Iterator[tuple[int, memoryview]]:
        """Bytes [begin, end) of a tensor as (where the chunk begins, bytes), each valid until the
        next.

        begin, end  multiples of the granule, as pieces have them
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

    def _fill(self, view: memoryview, tensor: StoredTensor, begin: int) -> None:
        """Read the bytes of a tensor from `begin` on into all of `view`."""
        path, file = self.paths[tensor.file], self._files[tensor.file]
        directory = self._directories[tensor.file]
        done = 0
        while done < len(view):
            try:
                moved = _read_at(directory, file, view[done:], tensor.offset + begin + done)
            except OSError as error:
                why = f"cannot be read: {error.strerror or error}"
                raise DurableDamaged(path, repr(tensor.name), why) from error
            if moved <= 0:
                at = tensor.offset + begin + done
                why = f"ends before its data: there is no byte {at} in the file"
                raise DurableDamaged(path, repr(tensor.name), why)
            done += moved

    def check(self, tensor: StoredTensor, piece: Piece) -> None:
        """raises  DurableDamaged, if the piece does not have the checksum it was written with"""
        summing = RunningChecksum(tensor.sum)
        for _, view in self.chunks(tensor, piece.begin, piece.end):
            summing.update(view)
        if summing.value() != piece.checksum:
            begin = tensor.offset + piece.begin
            raise DurableDamaged(
                self.paths[tensor.file],
                repr(tensor.name),
                f"is damaged: bytes [{begin}, {begin + piece.end - piece.begin}) of the file do "
                "not have the checksum they were written with",
            )


def bytes_to_check(index: Index) -> int:
    """How many bytes `check_all` reads."""
    return sum(p.end - p.begin for tensor in index.tensors for p in tensor.pieces)


def check_all(index: Index, directories: Sequence[Directory], done: Progress | None = None) -> int:
    """Compare every checksum of a commit; returns how many bytes were read. raises DurableDamaged,
    OSError"""
    total, read = bytes_to_check(index), 0
    with DataReader(directories) as data:
        for tensor in index.tensors:
            if tensor.sum not in SUMS:
                raise DurableDamaged(
                    data.paths[tensor.file],
                    repr(tensor.name),
                    f"has checksums of kind {tensor.sum}, which needs xxhash",
                )
            for piece in tensor.pieces:
                data.check(tensor, piece)
                read += piece.end - piece.begin
                if done is not None:
                    done(read, total)
    return read


def _open_past_page_cache(directory: Directory) -> int:
    """Open a data file, with O_DIRECT where that works, so that what is checked is what the device
    holds."""
    try:
        return directory.open(DATA_NAME, os.O_RDONLY | _DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return directory.open(DATA_NAME, os.O_RDONLY)


def _read_at(directory: Directory, file: int, view: memoryview, offset: int) -> int:
    """Read into `view` from `offset` on, through the page cache where O_DIRECT is refused."""
    system = directory.system
    try:
        return system.pread(file, view, offset)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # Refused here, or written where smaller multiples were allowed: through the page cache.
    buffered = directory.open(DATA_NAME, os.O_RDONLY)
    try:
        system.dup2(buffered, file)
    finally:
        system.close(buffered)
    return system.pread(file, view, offset)
