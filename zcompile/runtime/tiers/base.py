"""A tier is a place where the bytes of entries rest; `TierIO` is the interface of all tiers.

A tier reserves extents and moves bytes between them and host buffers. What an entry is, in which
order things happen, and how bytes reach the device is known to others. A `Place` says where one
entry rests, which of its bytes hold a value, and which transfers are in flight on it: operations on
one entry take effect in the order of their submission. Two that touch the same bytes, one of them
writing, follow each other; all others run side by side.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from zcompile.runtime.changes import CHANGES
from zcompile.runtime.tiers.extents import WrittenRanges
from zcompile.runtime.transfer.ticket import Countdown, Promise

# --- Tiers ---


class Extent(NamedTuple):
    """A range of a tier: `nbytes` from `offset` of file (or address space) number `file`.

    name  of the entry that rests there, for people
    """

    file: int
    offset: int
    nbytes: int
    name: str


class Buffer(NamedTuple):
    """Host memory that system calls can write to, and the tensor that owns it."""

    memory: Tensor
    view: memoryview

    @classmethod
    def over(cls, memory: Tensor) -> "Buffer":
        """memory  uint8 [n], n > 0, contiguous, on the host; must outlive the buffer's use"""
        return cls.at(memory, memory.numel())

    @classmethod
    def at(cls, memory: Tensor, nbytes: int) -> "Buffer":
        """A buffer of `nbytes` from where `memory` begins, which may be more than `memory` has."""
        array = (ctypes.c_ubyte * nbytes).from_address(memory.data_ptr())
        return cls(memory, memoryview(array))

    @property
    def nbytes(self) -> int:
        return len(self.view)

    def part(self, begin: int, end: int) -> "Buffer":
        return Buffer(self.memory[begin:end], self.view[begin:end])


class FileRange(NamedTuple):
    """A range of an open file that holds part of an entry. Offset and size in bytes."""

    fd: int
    offset: int
    nbytes: int


class TierIO(Protocol):
    """A place where bytes rest. Offsets and sizes in bytes; `read` and `write` return at once."""

    name: str
    alignment: int
    """Extents begin and end at multiples of this."""
    in_memory: bool
    """Whether copies, and compute where it can reach them, may touch the bytes where they rest."""

    on_device: bool
    """Whether the bytes rest in the device's own memory: then only compute moves them."""

    @property
    def granule(self) -> int:
        """Memory address, `begin` and size of every read and write are multiples of this, which
        divides `alignment`."""

    def pieces(self, extent: Extent, begin: int, end: int) -> Sequence[tuple[int, Tensor]]:
        """Bytes [begin, end) as (where it begins, memory), in order; nothing, if not in memory.

        Nobody may change the metadata of these tensors: others may be given the same objects.
        """

    def reserve(self, nbytes: int, name: str) -> Extent:
        """An extent of `nbytes`, rounded up to the alignment; its content is undefined.

        raises  TierFull
        """

    def release(self, extent: Extent) -> None:
        """Give the extent back: nobody reads or writes it any more."""

    def read(self, extent: Extent, begin: int, into: Buffer) -> Promise:
        """Fill `into` with the bytes of the extent from `begin` on. Fails with IOFault."""

    def write(self, extent: Extent, begin: int, source: Buffer) -> Promise:
        """Write `source` to the extent from `begin` on. Fails with IOFault."""

    def file_ranges(self, extent: Extent, begin: int, end: int) -> Sequence[FileRange]:
        """The file ranges of bytes [begin, end) of the extent, end to end; none if they lie in no
        file.

        True until the next write.
        """

    def usage(self) -> tuple[str, int, int]:
        """Name, bytes reserved and capacity in bytes: a row of an error message."""

    def close(self) -> None:
        """Stop, and give everything back; idempotent."""


@runtime_checkable
class Compacting(Protocol):
    """A tier that can close the holes between its extents."""

    def compact(self, extents: Sequence[Extent]) -> list[Extent] | None:
        """Move the bytes of all extents to the beginning, so that the free bytes are one hole.

        extents  all that are reserved; nothing reads or writes them
        returns  where each is then; None, if others are reserved too: then nothing moved
        """


# --- Places ---


class ByteAccess(Protocol):
    """A read or write of bytes [begin, end) of an entry."""

    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def writes(self) -> bool: ...


class Operation(ByteAccess, Protocol):
    """A transfer on an entry: one fetch, put or add; or work of the host on it (`on_host`)."""

    @property
    def on_host(self) -> bool: ...

    def end_heard(self) -> Promise:
        """A promise that is kept once all is done. Not free: who asks may have a thread wait."""


class Span(NamedTuple):
    """An access to bytes of an entry that is no transfer: compute touches them in place."""

    begin: int
    end: int
    writes: bool


class Place:
    """Where an entry rests, and what is in flight on it. Guarded by the lock of the
    `TransferQueue`."""

    def __init__(
        self, nbytes: int, tier: TierIO, extent: Extent, written: WrittenRanges | None = None
    ) -> None:
        self.nbytes = nbytes
        self.tier = tier
        self.extent = extent
        self.written = WrittenRanges() if written is None else written
        self.error: BaseException | None = None
        self.freed = False
        self.in_flight: list[Operation] = []

    @property
    def name(self) -> str:
        """Of the entry, for people; said once, where its bytes rest."""
        return self.extent.name

    def rename(self, name: str) -> None:
        self.extent = self.extent._replace(name=name)
        CHANGES.note()

    def rest(self, tier: TierIO, extent: Extent) -> None:
        """Let the entry rest in `extent` of `tier` from here on; what lies there is its value."""
        self.tier, self.extent = tier, extent
        CHANGES.note()

    def free(self) -> None:
        """The entry is dead: nothing new is submitted."""
        self.freed = True

    def host_uses_over(self) -> Promise:
        """A promise that is kept once the host is done with what it has still to do with the
        entry."""
        over = Countdown()
        for operation in tuple(self.in_flight):
            if operation.on_host:
                over.hold()
                operation.end_heard().then(over.drop)
        over.drop()
        return over

    def blocks(self, begin: int, end: int) -> tuple[int, int]:
        """The whole blocks of the tier that hold [begin, end): what a transfer really touches."""
        unit = self.tier.granule
        return begin // unit * unit, -(-end // unit) * unit

    def blockers(self, new: ByteAccess) -> Sequence[Operation]:
        """The operations that must be over before `new` may start, newest first."""
        if not self.in_flight:
            return ()
        low, high = self.blocks(new.begin, new.end)
        found = []
        for old in reversed(self.in_flight):
            begin, end = self.blocks(old.begin, old.end)
            if begin < high and low < end and (old.writes or new.writes):
                found.append(old)
                if old.writes and begin <= low and high <= end:
                    break  # what is older on these bytes comes before `old`
        return found
