"""Tensors out of safetensors files, streamed through a few blocks of memory.

While two blocks are read, two others go to the tiers. No tensor is ever whole in memory, unless it
is not row-major where it goes.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor

from zcompile.checkpoint.block_files import (
    BLOCK_BYTES,
    BLOCKS,
    LEAST_DIRECT_BYTES,
    BlockReader,
    new_blocks,
)
from zcompile.checkpoint.file import OpenFile
from zcompile.checkpoint.safetensors_file import PAGE_BYTES, Row
from zcompile.checkpoint.tensor_bytes import bytes_of
from zcompile.runtime.io.files import let_go
from zcompile.runtime.transfer.ticket import Ticket

MOST_LEAVING = 256
"""Small tensors on their way to the tiers at once."""


class Loader:
    """Brings tensors out of files, which stay open that long; a context manager.

    raises  at the end of the context too, what the last transfers raise
    """

    def __init__(self) -> None:
        self._files: dict[OpenFile, BlockReader] = {}
        self._free = new_blocks()
        self._leaving: deque[tuple[Tensor | None, Sequence[Ticket]]] = deque()
        self._thread = ThreadPoolExecutor(1, "zinf-load")

    def __enter__(self) -> "Loader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._thread.shutdown()
        try:
            while self._leaving and error is None:
                self._settle()
        finally:
            for file, reader in self._files.items():  # which were only read
                let_go(file.path, reader.close)

    def fill(self, file: OpenFile, name: str, row: Row, target: Tensor) -> None:
        """`target` takes the value of a tensor of the file, cast as `copy_` casts."""
        if file not in self._files:
            self._files[file] = BlockReader(file)
        reader, to = self._files[file], bytes_of(target)
        for begin, raw, block in self._pieces(reader, name, row):
            first = begin * target.dtype.itemsize // row.dtype.itemsize
            self._leaving.append((block, to.write(first, _cast(raw, row.dtype, target.dtype))))
        to.finish()

    def _pieces(
        self, reader: BlockReader, name: str, row: Row
    ) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Where in the tensor, its bytes, and the block that they lie in."""
        if row.nbytes < LEAST_DIRECT_BYTES:
            if row.nbytes:
                while len(self._leaving) > MOST_LEAVING:
                    self._settle()
                yield 0, reader.read_small(row.begin, row.end, name), None
            return
        coming: deque[tuple[int, Future[Tensor], Tensor]] = deque()
        for begin, end in spans(row):
            if len(coming) == BLOCKS // 2:
                at, future, block = coming.popleft()
                yield at - row.begin, future.result(), block
            while not self._free:
                self._settle()
            block = self._free.pop()
            coming.append((begin, self._thread.submit(reader.read, begin, end, block, name), block))
        for at, future, block in coming:
            yield at - row.begin, future.result(), block

    def _settle(self) -> None:
        block, tickets = self._leaving.popleft()
        for ticket in tickets:
            ticket.wait()
        if block is not None:
            self._free.append(block)


def spans(row: Row) -> Iterator[tuple[int, int]]:
    """The row's bytes in the file in parts: whole elements that lie within one block of pages."""
    begin, item = row.begin, row.dtype.itemsize
    while begin < row.end:
        bound = begin // PAGE_BYTES * PAGE_BYTES + BLOCK_BYTES
        end = min(row.end, begin + (bound - begin) // item * item)
        yield begin, end
        begin = end


def _cast(raw: Tensor, was: torch.dtype, to: torch.dtype) -> Tensor:
    """The bytes of the same elements in another dtype."""
    if was == to:
        return raw
    if raw.storage_offset() % was.itemsize:
        raw = raw.clone()
    return raw.view(was).to(to).view(torch.uint8)
