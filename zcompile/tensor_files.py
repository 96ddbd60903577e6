"""Tensors into safetensors files and out of them, streamed through a few blocks of memory.

Out: while the tiers fill two blocks, a thread writes two others. In: while two blocks are read,
two others go to the tiers. No tensor is ever whole in memory, unless it is not row-major.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zcompile.block_files import (
    BLOCK_BYTES,
    BLOCKS,
    LEAST_DIRECT_BYTES,
    BlockFile,
    new_blocks,
    opened,
)
from zcompile.runtime.ticket import Ticket
from zcompile.safetensors_file import PAGE_BYTES, Header, Row
from zcompile.tensor_bytes import bytes_of

Told = Callable[[int], None]
"""Told how many more bytes have been written."""
MOST_LEAVING = 256
"""Small tensors on their way to the tiers at once."""


class Source(Protocol):
    """What a part of a file is made of."""

    @property
    def nbytes(self) -> int: ...

    def read(self, begin: int, into: Tensor) -> Sequence[Ticket]: ...


class Piece(NamedTuple):
    """Part of a block: bytes from `begin` of a source, `at` of the block on."""

    source: int
    begin: int
    at: int
    nbytes: int


def cut(sizes: Sequence[int], block_bytes: int) -> Iterator[list[Piece]]:
    """What each block of a file holds whose sources, of these sizes, lie one after the other."""
    pieces: list[Piece] = []
    at = 0
    for source, size in enumerate(sizes):
        begin = 0
        while begin < size:
            nbytes = min(size - begin, block_bytes - at)
            pieces.append(Piece(source, begin, at, nbytes))
            begin, at = begin + nbytes, at + nbytes
            if at == block_bytes:
                yield pieces
                pieces, at = [], 0
    if pieces:
        yield pieces


class _First:
    """The header, as a source."""

    def __init__(self, content: bytes) -> None:
        self.nbytes = len(content)
        self._content = torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def read(self, begin: int, into: Tensor) -> Sequence[Ticket]:
        into.copy_(self._content[begin : begin + into.numel()])
        return ()


def write_file(
    path: Path, first: bytes, header: Header, tensors: Mapping[str, Tensor], told: Told
) -> None:
    """A new file, synced.

    first, header  what `arrange` made of the tensors
    raises  IOFault, and what the transfers of tiered tensors raise
    """
    names = ("the header", *header.rows)
    sources: list[Source] = [_First(first), *(bytes_of(tensors[n]) for n in header.rows)]
    with (
        opened(path, header.nbytes) as file,
        ThreadPoolExecutor(1, "zinf-save") as thread,
    ):
        writer = _Writer(file, thread, told)
        for number, pieces in enumerate(cut([s.nbytes for s in sources], BLOCK_BYTES)):
            block = writer.block()
            tickets: list[Ticket] = []
            for piece in pieces:
                into = block[piece.at : piece.at + piece.nbytes]
                tickets += sources[piece.source].read(piece.begin, into)
            used = pieces[-1].at + pieces[-1].nbytes
            writer.put(
                _Filling(number * BLOCK_BYTES, block, used, tickets, names[pieces[0].source])
            )
        writer.end()
        file.finish(header.nbytes)


class _Filling(NamedTuple):
    """A block on its way: `used` of its bytes go to `begin` of the file once the tickets are."""

    begin: int
    block: Tensor
    used: int
    tickets: list[Ticket]
    name: str


class _Writer:
    """Hands blocks from those who fill them to a thread that writes them, and back."""

    def __init__(self, file: BlockFile, thread: ThreadPoolExecutor, told: Told) -> None:
        self._file, self._thread, self._told = file, thread, told
        self._free = new_blocks()
        self._filling: deque[_Filling] = deque()
        self._writing: deque[tuple[Future[None], _Filling]] = deque()

    def block(self) -> Tensor:
        if len(self._filling) >= BLOCKS // 2:
            self._send()
        if not self._free:
            self._settle()
        return self._free.pop()

    def put(self, filling: _Filling) -> None:
        self._filling.append(filling)

    def end(self) -> None:
        while self._filling:
            self._send()
        while self._writing:
            self._settle()

    def _send(self) -> None:
        filling = self._filling.popleft()
        for ticket in filling.tickets:
            ticket.wait()
        whole = -(-filling.used // PAGE_BYTES) * PAGE_BYTES
        filling.block[filling.used : whole].zero_()
        source = filling.block[:whole]
        future = self._thread.submit(self._file.write, filling.begin, source, filling.name)
        self._writing.append((future, filling))

    def _settle(self) -> None:
        future, filling = self._writing.popleft()
        future.result()
        self._free.append(filling.block)
        self._told(filling.used)


class Loader:
    """Brings tensors out of files; a context manager.

    raises  at the end of the context too, what the last transfers raise
    """

    def __init__(self) -> None:
        self._files: dict[Path, BlockFile] = {}
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
            for file in self._files.values():
                file.close()

    def fill(self, path: Path, name: str, row: Row, target: Tensor) -> None:
        """`target` takes the value of a tensor of the file, cast as `copy_` casts."""
        if path not in self._files:
            self._files[path] = BlockFile(path)
        file, to = self._files[path], bytes_of(target)
        for begin, raw, block in self._pieces(file, name, row):
            first = begin * target.dtype.itemsize // row.dtype.itemsize
            self._leaving.append((block, to.write(first, _cast(raw, row.dtype, target.dtype))))
        to.finish()

    def _pieces(
        self, file: BlockFile, name: str, row: Row
    ) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Where in the tensor, its bytes, and the block that they lie in."""
        if row.nbytes < LEAST_DIRECT_BYTES:
            if row.nbytes:
                while len(self._leaving) > MOST_LEAVING:
                    self._settle()
                yield 0, file.read_small(row.begin, row.end, name), None
            return
        coming: deque[tuple[int, Future[Tensor], Tensor]] = deque()
        for begin, end in spans(row):
            if len(coming) == BLOCKS // 2:
                at, future, block = coming.popleft()
                yield at - row.begin, future.result(), block
            while not self._free:
                self._settle()
            block = self._free.pop()
            coming.append((begin, self._thread.submit(file.read, begin, end, block, name), block))
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
