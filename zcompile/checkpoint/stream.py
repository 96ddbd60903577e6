"""Streams tensors into and out of safetensors files, through a few blocks of memory.

Where the filesystem can, a new file shares the bytes of tensors that rest in files already. The
others stream: while the tiers fill two blocks, a thread writes two others; and while two blocks are
read, two others go to the tiers. No tensor is ever whole in memory, unless it is not row-major.

The parts: the bytes of a tensor as a file has them, row-major, range by range, on any tier
(`TensorBytes`); writing a file (`NewFile`); reading (`Loader`).
"""

import hashlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zcompile.checkpoint.block_files import (
    BLOCK_BYTES,
    BLOCKS,
    LEAST_DIRECT_BYTES,
    BlockReader,
    BlockWriter,
    new_blocks,
)
from zcompile.checkpoint.file import OpenFile
from zcompile.checkpoint.safetensors import PAGE_BYTES, Header, Row
from zcompile.checkpoint.torch_file import TorchFile
from zcompile.ir.torch_compat import is_lazy, materialised
from zcompile.runtime.device.pages import copy_bytes
from zcompile.runtime.eager.tensor import TieredTensor
from zcompile.runtime.io.files import close_or_warn
from zcompile.runtime.io.system_calls import SystemCalls
from zcompile.runtime.tiers.base import FileRange
from zcompile.runtime.transfer.ticket import Ticket


class TensorBytes(ABC):
    """The bytes of one tensor in row-major order, read or written by ranges."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.nbytes = tensor.numel() * tensor.dtype.itemsize

    @abstractmethod
    def read(self, begin: int, into: Tensor) -> Sequence[Ticket]:
        """Start to fill `into`, uint8 [n] on the host, with bytes [begin, begin + n)."""

    @abstractmethod
    def write(self, begin: int, source: Tensor) -> Sequence[Ticket]:
        """Start to write `source`, uint8 [n] on the host, to bytes [begin, begin + n).

        `source` must not change before the tickets are done.
        """

    @property
    def own(self) -> tuple[int, int]:
        """The bytes [begin, end) that `write` keeps; all, unless other ranks keep theirs."""
        return 0, self.nbytes

    def file_ranges(self, begin: int, end: int) -> Sequence[FileRange]:
        """Where in files bytes [begin, end) lie, if all of them do."""
        return ()

    def finish(self) -> None:
        """Take note that all bytes were written."""
        increment_version(self.tensor)


class _Tiered(TensorBytes):
    """A tensor that is row-major in its entry; of one that ranks share, the share of this rank."""

    tensor: TieredTensor

    def __init__(self, tensor: TieredTensor) -> None:
        super().__init__(tensor)
        self._first = tensor.entry_layout.offset * tensor.dtype.itemsize
        if (part := tensor.entry.partition) is not None:
            self.nbytes = part.own_count * tensor.dtype.itemsize

    def read(self, begin: int, into: Tensor) -> Sequence[Ticket]:
        entry, at = self.tensor.entry, self._first + begin
        # Whole pages can come straight from the disk, so they do not wait with what is left.
        whole = into.numel() // PAGE_BYTES * PAGE_BYTES
        parts = [(at, into[:whole]), (at + whole, into[whole:])]
        return [entry.store.read(entry, part, begin=begin) for begin, part in parts if part.numel()]

    def write(self, begin: int, source: Tensor) -> Sequence[Ticket]:
        entry = self.tensor.entry
        return [entry.store.put(entry, source, begin=self._first + begin)]

    def file_ranges(self, begin: int, end: int) -> Sequence[FileRange]:
        entry = self.tensor.entry
        return entry.store.file_ranges(entry, self._first + begin, self._first + end)

    def finish(self) -> None:
        entry = self.tensor.entry
        if not entry.nbytes:
            entry.store.zero(entry)  # without bytes, but no longer unset
        # A compiled graph saves handles for backward, and asks them whether they were written.
        increment_version(self.tensor._handle)


class _Shared(TensorBytes):
    """A tensor of which several ranks hold shares: all of them read all of it together, and each
    keeps of what it writes what is its own."""

    tensor: TieredTensor

    def __init__(self, tensor: TieredTensor) -> None:
        super().__init__(tensor)
        self._whole: Tensor | None = None

    @property
    def own(self) -> tuple[int, int]:
        part = self.tensor.entry.partition
        assert part is not None, "there are shares"
        first, last = part.own
        return first * self.tensor.dtype.itemsize, last * self.tensor.dtype.itemsize

    def read(self, begin: int, into: Tensor) -> Sequence[Ticket]:
        if self._whole is None:
            self._whole = self.tensor.entry.store.read_all(self.tensor.entry)
        _copy(into, self._whole[begin : begin + into.numel()])
        if begin + into.numel() == self.nbytes:
            self._whole = None
        return ()

    def write(self, begin: int, source: Tensor) -> Sequence[Ticket]:
        entry, (first, last) = self.tensor.entry, self.own
        low, high = max(first, begin), min(last, begin + source.numel())
        if low >= high:
            return ()
        mine = source[low - begin : high - begin]
        return [entry.store.put(entry, mine, begin=low - first)]

    def finish(self) -> None:
        entry, part = self.tensor.entry, self.tensor.entry.partition
        assert part is not None, "there are shares"
        here = part.own_count * self.tensor.dtype.itemsize
        if here < entry.nbytes:  # the padding has a value too
            padding = torch.zeros(entry.nbytes - here, dtype=torch.uint8)
            entry.store.put(entry, padding, begin=here).wait()
        increment_version(self.tensor._handle)


class _Plain(TensorBytes):
    """A row-major tensor in ordinary memory, of the host or of a device."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self._flat = tensor.detach().reshape(-1).view(torch.uint8)

    def read(self, begin: int, into: Tensor) -> Sequence[Ticket]:
        _copy(into, self._flat[begin : begin + into.numel()])
        return ()

    def write(self, begin: int, source: Tensor) -> Sequence[Ticket]:
        _copy(self._flat[begin : begin + source.numel()], source)
        return ()


class _Whole(TensorBytes):
    """A tensor that is not row-major, so all of it passes through host memory at once."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self._rows: Tensor | None = None

    def read(self, begin: int, into: Tensor) -> Sequence[Ticket]:
        if self._rows is None:
            value = self.tensor.detach()
            value = value.on_host() if isinstance(value, TieredTensor) else value.cpu()
            self._rows = materialised(value).contiguous()
        flat = self._rows.reshape(-1).view(torch.uint8)
        _copy(into, flat[begin : begin + into.numel()])
        if begin + into.numel() == self.nbytes:
            self._rows = None
        return ()

    def write(self, begin: int, source: Tensor) -> Sequence[Ticket]:
        if self._rows is None:
            self._rows = torch.empty(self.tensor.size(), dtype=self.tensor.dtype, device="cpu")
        flat = self._rows.view(-1).view(torch.uint8)
        _copy(flat[begin : begin + source.numel()], source)
        return ()

    def finish(self) -> None:
        if self._rows is not None:
            self.tensor.detach().copy_(self._rows)
            self._rows = None


def bytes_of(tensor: Tensor) -> TensorBytes:
    """The bytes of a tensor of any kind."""
    if not tensor.is_contiguous() or is_lazy(tensor):
        return _Whole(tensor)
    if not isinstance(tensor, TieredTensor):
        return _Plain(tensor)
    if tensor.entry.partition is None:
        return _Tiered(tensor)
    return _Shared(tensor) if tensor.covers else _Whole(tensor)


def is_shared(tensor: Tensor) -> TypeGuard[TieredTensor]:
    """Whether other ranks hold parts of a tensor, so that all of it is read together."""
    return isinstance(tensor, TieredTensor) and tensor.entry.partition is not None


def share_of(tensor: Tensor) -> TensorBytes | None:
    """The bytes of this rank's share; None, if they are no range of the tensor's row-major
    bytes."""
    if not is_shared(tensor) or not isinstance(bytes_of(tensor), _Shared):
        return None
    return _Tiered(tensor)


def _copy(target: Tensor, source: Tensor) -> None:
    if target.is_cpu and source.is_cpu:
        copy_bytes(target, source, target.numel())
    else:
        target.copy_(source)


ReportBytes = Callable[[int], None]
"""Is told how many more bytes have been written."""


class Piece(NamedTuple):
    """Part of a block: bytes from `begin` of a source, at byte `at` of the block."""

    source: int
    begin: int
    at: int
    nbytes: int


def cut(sizes: Sequence[int], block_bytes: int) -> Iterator[list[Piece]]:
    """The pieces of each block of a file whose sources, of these sizes, lie one after the other."""
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


class Source(Protocol):
    """What bytes of a file come from."""

    def read(self, begin: int, into: Tensor) -> Sequence[Ticket]:
        """As `TensorBytes.read`."""

    def file_ranges(self, begin: int, end: int) -> Sequence[FileRange]:
        """As `TensorBytes.file_ranges`."""


class Memory:
    """Bytes in memory, as a source: a header, or what another rank has sent.

    content  uint8 [n] on the host
    """

    def __init__(self, content: Tensor) -> None:
        self._content = content

    def read(self, begin: int, into: Tensor) -> Sequence[Ticket]:
        into.copy_(self._content[begin : begin + into.numel()])
        return ()

    def file_ranges(self, begin: int, end: int) -> Sequence[FileRange]:
        return ()


class Part(NamedTuple):
    """Bytes [begin, end) of a file: those of `source` from `skip` on.

    name  for people
    """

    begin: int
    end: int
    name: str
    source: Source
    skip: int = 0

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def header_part(first: bytes) -> Part:
    """The first bytes of a file, as `arrange` made them."""
    content = torch.frombuffer(bytearray(first), dtype=torch.uint8)
    return Part(0, len(first), "the header", Memory(content))


def parts_of(first: bytes, header: Header, tensors: Mapping[str, Tensor]) -> list[Part]:
    """All of a file, in order.

    first, header  what `arrange` made of the tensors
    """
    rows = [
        Part(row.begin, row.end, name, bytes_of(tensors[name])) for name, row in header.rows.items()
    ]
    return [header_part(first), *rows]


class NewFile:
    """Writes a safetensors file, or those pages of one that are for this process.

    folder  descriptor of the directory that it lies in
    parts   what is written, in the order of the file; where one does not begin at the end of the
            one before, it begins at a page
    nbytes  of the whole file
    made    whether the file is there, because another process writes the rest of it
    raises  IOFault
    """

    def __init__(
        self,
        path: Path,
        folder: int,
        parts: Sequence[Part],
        nbytes: int,
        system: SystemCalls,
        made: bool = False,
    ) -> None:
        self._parts, self._nbytes = parts, nbytes
        self._file = BlockWriter(path, folder, nbytes, system, made)
        try:
            self._shared = self._share()
        except BaseException:
            self.close()
            raise

    def reserve(self) -> None:
        """Take the room on the disk.

        raises  IOFault, if there is none
        """
        self._file.reserve(self._nbytes)

    def stream(self, told: ReportBytes) -> None:
        """Write all that is not shared, and sync.

        raises  IOFault, and what transfers raise
        """
        told(sum(self._parts[number].nbytes for number in self._shared))
        with ThreadPoolExecutor(1, "zinf-save") as thread:
            writer = _Writer(self._file, thread, told)
            for run in self._runs():
                sizes = [part.nbytes for part in run]
                for count, pieces in enumerate(cut(sizes, BLOCK_BYTES)):
                    self._fill(writer, run[0].begin + count * BLOCK_BYTES, run, pieces)
            writer.end()
        self._file.finish(self._nbytes)

    def close(self) -> None:
        self._file.close()

    def _fill(
        self, writer: "_Writer", begin: int, run: Sequence[Part], pieces: list[Piece]
    ) -> None:
        block = writer.block()
        tickets: list[Ticket] = []
        for piece in pieces:
            into, part = block[piece.at : piece.at + piece.nbytes], run[piece.source]
            tickets += part.source.read(part.skip + piece.begin, into)
        used = pieces[-1].at + pieces[-1].nbytes
        writer.put(_Filling(begin, block, used, tickets, run[pieces[0].source].name))

    def _share(self) -> set[int]:
        """Share bytes of files with the new one; returns the numbers of the parts that it has
        thereby."""
        shared: set[int] = set()
        for number, part in enumerate(self._parts):
            if part.begin % PAGE_BYTES or part.nbytes % PAGE_BYTES or not part.nbytes:
                continue  # it begins or ends within a page
            stretches = part.source.file_ranges(part.skip, part.skip + part.nbytes)
            if not stretches:
                continue
            if not self._file.share(part.begin, stretches):
                break
            shared.add(number)
        return shared

    def _runs(self) -> Iterator[list[Part]]:
        """Runs of neighbouring parts to be written."""
        run: list[Part] = []
        for number, part in enumerate(self._parts):
            if run and (number in self._shared or part.begin != run[-1].end):
                yield run
                run = []
            if number not in self._shared:
                run.append(part)
        if run:
            yield run


class _Filling(NamedTuple):
    """A block that is being filled: `used` of its bytes go to `begin` of the file once `tickets`
    are done."""

    begin: int
    block: Tensor
    used: int
    tickets: list[Ticket]
    name: str


class _Writer:
    """Hands blocks from those who fill them to a thread that writes them, and back."""

    def __init__(self, file: BlockWriter, thread: ThreadPoolExecutor, told: ReportBytes) -> None:
        self._file, self._thread, self._told = file, thread, told
        self._free = new_blocks()
        self._filling: deque[_Filling] = deque()
        self._writing: deque[tuple[Future[None], _Filling]] = deque()

    def block(self) -> Tensor:
        """A free block."""
        if len(self._filling) >= BLOCKS // 2:
            self._send()
        if not self._free:
            self._settle()
        return self._free.pop()

    def put(self, filling: _Filling) -> None:
        """Take a block that is being filled."""
        self._filling.append(filling)

    def end(self) -> None:
        """Write all blocks."""
        while self._filling:
            self._send()
        while self._writing:
            self._settle()

    def _send(self) -> None:
        """Wait until the oldest block is filled, and let the thread write it."""
        filling = self._filling.popleft()
        for ticket in filling.tickets:
            ticket.wait()
        whole = -(-filling.used // PAGE_BYTES) * PAGE_BYTES
        filling.block[filling.used : whole].zero_()
        source = filling.block[:whole]
        future = self._thread.submit(self._file.write, filling.begin, source, filling.name)
        self._writing.append((future, filling))

    def _settle(self) -> None:
        """Wait until the oldest block is written."""
        future, filling = self._writing.popleft()
        future.result()
        self._free.append(filling.block)
        self._told(filling.used)


SAMPLE_BYTES = 4096
"""Of a tensor in a file that ranks compare before each reads its own part, in all windows."""
WINDOWS = 8
"""Of a sample, from the first bytes of a tensor to its last; as many as ranks, if there are more,
so that each rank's part has one or next to it."""
MOST_IN_FLIGHT = 256
"""Most small tensors in flight to the tiers at once."""


class Loader:
    """Brings tensors out of files, which stay open that long; a context manager.

    raises  at the end of the context too, what the last transfers raise
    """

    def __init__(self) -> None:
        self._files: dict[OpenFile, BlockReader] = {}
        self._held: TorchFile | None = None
        """The file of `torch.save` that is read."""
        self._flat: tuple[str, Tensor] | None = None
        """The name of its tensor that was read last, and the bytes of that, row-major."""
        self._free = new_blocks()
        self._leaving: deque[tuple[Tensor | None, Sequence[Ticket]]] = deque()
        self._thread = ThreadPoolExecutor(1, "zinf-load")

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._thread.shutdown()
        try:
            while self._leaving and error is None:
                self._settle()
        finally:
            for file, reader in self._files.items():  # which were only read
                close_or_warn(file.path, reader.close)

    def fill(self, file: OpenFile | TorchFile, name: str, row: Row, target: Tensor) -> None:
        """Give `target` the value of a tensor of the file, cast as `copy_` casts.

        Of a tensor that ranks share, each reads its own part, and SAMPLE_BYTES all over it, by
        which they see that all have the same file under its name. What every rank holds whole, each
        reads whole, and they compare all of it.
        """
        to, size = bytes_of(target), target.dtype.itemsize
        fabric = target.entry.store.fabric if isinstance(target, TieredTensor) else None
        if fabric is not None:
            shared = is_shared(target)
            windows = windows_of(row, fabric.size) if shared else [(0, row.count)]
            seen = self._seen(file, name, row, windows)
            fabric.agree("load", name, shared, *seen, text=f"the values of {name!r}")
        first, last = (at // size for at in to.own)
        for begin, raw, block in self._read(file, name, row, first, last):
            value = _cast(raw, row.dtype, target.dtype)
            self._leaving.append((block, to.write(begin * size, value)))
        to.finish()

    def _seen(
        self, file: OpenFile | TorchFile, name: str, row: Row, windows: Sequence[tuple[int, int]]
    ) -> Iterator[object]:
        """By what ranks see that a tensor is the same for all of them: its place, and values.

        windows  elements [first, last)
        """
        yield from (row.dtype, row.size, row.begin)
        made = hashlib.blake2b()
        for first, last in windows:
            for _, raw, block in self._read(file, name, row, first, last):
                made.update(raw.numpy().data)
                self._leaving.append((block, ()))
        yield made.digest()

    def digest(self, file: OpenFile | TorchFile, name: str, row: Row, dtype: torch.dtype) -> bytes:
        """A digest of a tensor of the file, cast to `dtype`: the same for the same bytes alone."""
        made = hashlib.blake2b()
        for _, raw, block in self._read(file, name, row, 0, row.nbytes // row.dtype.itemsize):
            made.update(_cast(raw, row.dtype, dtype).numpy().data)
            self._leaving.append((block, ()))
        return made.digest()

    def _read(
        self, file: OpenFile | TorchFile, name: str, row: Row, first: int, last: int
    ) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Elements [first, last) of a tensor, piece by piece: (first element, the bytes, the block
        that they lie in)."""
        size = row.dtype.itemsize
        if isinstance(file, TorchFile):
            if self._held is not None and self._held is not file:
                self._held.leave()
            if self._held is not file or self._flat is None or self._flat[0] != name:
                flat = materialised(file.tensor(name)).contiguous().reshape(-1)
                self._flat = name, flat.view(torch.uint8)
            self._held = file
            pieces = self._views(self._flat[1], first * size, last * size)
        else:
            if file not in self._files:
                self._files[file] = BlockReader(file)
            begin, end = row.begin + first * size, row.begin + last * size
            pieces = self._pieces(self._files[file], name, row, begin, end)
        return ((at // size, raw, block) for at, raw, block in pieces)

    def _views(
        self, flat: Tensor, first: int, last: int
    ) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Bytes [first, last) of a tensor that a file shows in memory: uint8 [n]."""
        for begin in range(first, last, BLOCK_BYTES):
            piece = flat[begin : min(last, begin + BLOCK_BYTES)]
            most = MOST_IN_FLIGHT if piece.numel() < LEAST_DIRECT_BYTES else BLOCKS
            while len(self._leaving) >= most:
                self._settle()
            yield begin, piece, None

    def _pieces(
        self, reader: BlockReader, name: str, row: Row, first: int, last: int
    ) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Bytes [first, last) of a file of safetensors, which lie in `row`; told where in it."""
        if last - first < LEAST_DIRECT_BYTES:
            if first < last:
                while len(self._leaving) > MOST_IN_FLIGHT:
                    self._settle()
                yield first - row.begin, reader.read_small(first, last, name), None
            return
        coming: deque[tuple[int, Future[Tensor], Tensor]] = deque()
        for begin, end in spans(first, last, row.dtype.itemsize):
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
        """Wait until the oldest piece is in its tier."""
        block, tickets = self._leaving.popleft()
        for ticket in tickets:
            ticket.wait()
        if block is not None:
            self._free.append(block)


def windows_of(row: Row, ranks: int) -> list[tuple[int, int]]:
    """The elements [first, last) of a shared tensor that ranks compare: as far from each other as
    they can be, the first ones and the last ones among them."""
    number = max(WINDOWS, ranks)
    most = max(1, SAMPLE_BYTES // number // row.dtype.itemsize)
    if row.count <= number * most:
        return [(0, row.count)]
    begins = [(row.count - most) * at // (number - 1) for at in range(number)]
    return [(begin, begin + most) for begin in begins]


def spans(begin: int, last: int, item: int) -> Iterator[tuple[int, int]]:
    """Ranges of bytes [begin, last) of a file: whole elements of `item` bytes that lie within one
    block of pages."""
    while begin < last:
        bound = begin // PAGE_BYTES * PAGE_BYTES + BLOCK_BYTES
        end = min(last, begin + (bound - begin) // item * item)
        yield begin, end
        begin = end


def _cast(raw: Tensor, was: torch.dtype, to: torch.dtype) -> Tensor:
    """The bytes of the same elements in another dtype."""
    if was == to:
        return raw
    if raw.storage_offset() % was.itemsize:
        raw = raw.clone()
    return raw.view(was).to(to).view(torch.uint8)
