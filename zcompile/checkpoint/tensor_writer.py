"""Tensors into safetensors files, streamed through a few blocks of memory.

Where the filesystem can, a file shares the bytes of tensors that rest in files already. The others
stream: while the tiers fill two blocks, a thread writes two others. No tensor is ever whole in
memory, unless it is not row-major.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from zcompile.checkpoint.block_files import BLOCK_BYTES, BLOCKS, BlockWriter, new_blocks
from zcompile.checkpoint.safetensors_file import PAGE_BYTES, Header
from zcompile.checkpoint.tensor_bytes import TensorBytes, bytes_of
from zcompile.runtime.io.system_calls import SystemCalls
from zcompile.runtime.transfer.ticket import Ticket

Told = Callable[[int], None]
"""Told how many more bytes have been written."""


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


class NewFile:
    """A file that is being written.

    folder         descriptor of the directory that it lies in
    first, header  what `arrange` made of the tensors
    raises         IOFault
    """

    def __init__(
        self,
        path: Path,
        folder: int,
        first: bytes,
        header: Header,
        tensors: Mapping[str, Tensor],
        system: SystemCalls,
    ) -> None:
        self._header = header
        self._file = BlockWriter(path, folder, header.nbytes, system)
        self._names = ("the header", *header.rows)
        self._sources: list[_First | TensorBytes] = [_First(first)]
        try:
            self._sources += [bytes_of(tensors[name]) for name in header.rows]
            self._shared = self._share()
        except BaseException:
            self.close()
            raise

    def reserve(self) -> None:
        """Take the room. raises IOFault, if there is none"""
        self._file.reserve(self._header.nbytes)

    def stream(self, told: Told) -> None:
        """Write all that is not shared, and sync. raises IOFault, and what transfers raise"""
        told(sum(self._sources[number].nbytes for number in self._shared))
        with ThreadPoolExecutor(1, "zinf-save") as thread:
            writer = _Writer(self._file, thread, told)
            for begin, run in self._runs():
                sizes = [self._sources[number].nbytes for number in run]
                for count, pieces in enumerate(cut(sizes, BLOCK_BYTES)):
                    self._fill(writer, begin + count * BLOCK_BYTES, run, pieces)
            writer.end()
        self._file.finish(self._header.nbytes)

    def close(self) -> None:
        self._file.close()

    def _fill(self, writer: "_Writer", begin: int, run: range, pieces: list[Piece]) -> None:
        block = writer.block()
        tickets: list[Ticket] = []
        for piece in pieces:
            into = block[piece.at : piece.at + piece.nbytes]
            tickets += self._sources[run[piece.source]].read(piece.begin, into)
        used = pieces[-1].at + pieces[-1].nbytes
        name = self._names[run[pieces[0].source]]
        writer.put(_Filling(begin, block, used, tickets, name))

    def _share(self) -> set[int]:
        """Which sources the file has by now, since it shares their bytes."""
        shared: set[int] = set()
        for number, row in enumerate(self._header.rows.values(), 1):
            source = self._sources[number]
            if row.begin % PAGE_BYTES or row.nbytes % PAGE_BYTES or not row.nbytes:
                break  # what comes now begins or ends within a page
            assert isinstance(source, TensorBytes), "only the header is none"
            stretches = source.stretches()
            if not stretches:
                continue
            if not self._file.share(row.begin, stretches):
                break
            shared.add(number)
        return shared

    def _runs(self) -> Iterator[tuple[int, range]]:
        """What is to be written: neighbours among the sources, and where the first begins."""
        begin, run = 0, range(0)
        at = 0
        for number, source in enumerate(self._sources):
            if number in self._shared:
                if run:
                    yield begin, run
                run = range(0)
            else:
                begin = begin if run else at
                run = range(run.start if run else number, number + 1)
            at += source.nbytes
        if run:
            yield begin, run


class _Filling(NamedTuple):
    """A block on its way: `used` of its bytes go to `begin` of the file once the tickets are."""

    begin: int
    block: Tensor
    used: int
    tickets: list[Ticket]
    name: str


class _Writer:
    """Hands blocks from those who fill them to a thread that writes them, and back."""

    def __init__(self, file: BlockWriter, thread: ThreadPoolExecutor, told: Told) -> None:
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
