"""The verbs of a place where bytes rest.

A tier reserves extents and moves bytes between them and host buffers. What an entry is, in which
order things happen, and how bytes reach the device is known to others.

Which bytes of an address space are taken: ranges handed out, taken back, merged.

Used for the host tier and for each file of the disk tier. `Written` answers another question
about ranges: which bytes of one entry hold a value, and which are still blank.

An entry at home: where its bytes rest, which of them hold a value, and what is under way.

Operations on one entry take effect in the order of their submission. Two that touch the same
bytes, one of them writing, follow each other; all others run side by side.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from zcompile.runtime.tiers.extents import Written
from zcompile.runtime.transfer.ticket import Promise


@dataclass(frozen=True)
class Extent:
    """Where an entry rests: `nbytes` from `offset` of file (or address space) number `file`.

    name  of the entry, for people
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
        """`nbytes` from where `memory` begins, which may be more than it has itself."""
        array = (ctypes.c_ubyte * nbytes).from_address(memory.data_ptr())
        return cls(memory, memoryview(array))

    @property
    def nbytes(self) -> int:
        return len(self.view)

    def part(self, begin: int, end: int) -> "Buffer":
        return Buffer(self.memory[begin:end], self.view[begin:end])


class Stretch(NamedTuple):
    """Bytes of an open file, which hold part of an entry. Offset and size in bytes."""

    fd: int
    offset: int
    nbytes: int


@runtime_checkable
class Compacting(Protocol):
    """A tier that can close its holes."""

    def compact(self, extents: Sequence[Extent]) -> list[Extent] | None:
        """Bytes of all extents move together, to the beginning, so that what is free is one hole.

        extents  all that are reserved; nothing reads or writes them
        Returns  where each is then; None, if others are reserved too: then nothing moved
        """


class TierIO(Protocol):
    """A place where bytes rest. Offsets and sizes in bytes; `read` and `write` return at once."""

    name: str
    alignment: int
    """Extents begin and end at multiples of this."""
    in_memory: bool
    """Whether copies, and compute where it can reach them, may touch the bytes where they rest."""

    on_device: bool
    """Whether they rest in the device's own memory: then only compute moves them."""

    @property
    def granule(self) -> int:
        """Memory address, `begin` and size of every read and write are multiples of this, which
        divides `alignment`."""

    def pieces(self, extent: Extent, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """Bytes [begin, end) as (where it begins, memory), in order; nothing, if not in memory."""

    def reserve(self, nbytes: int, name: str) -> Extent:
        """Room for `nbytes`, rounded up to the alignment; its content is anything.

        raises  TierFull
        """

    def release(self, extent: Extent) -> None:
        """Nobody reads or writes the extent any more."""

    def read(self, extent: Extent, begin: int, into: Buffer) -> Promise:
        """Fill `into` with the bytes of the extent from `begin` on. Fails with IOFault."""

    def write(self, extent: Extent, begin: int, source: Buffer) -> Promise:
        """Put `source` into the extent from `begin` on. Fails with IOFault."""

    def stretches(self, extent: Extent, begin: int, end: int) -> Sequence[Stretch]:
        """Where in files bytes [begin, end) of the extent lie, end to end; none if in no file.

        True until the next write.
        """

    def usage(self) -> tuple[str, int, int]:
        """Its name, bytes reserved, and bytes it could hold: a row of an error message."""

    def close(self) -> None:
        """Stop, and give everything back; idempotent."""


class Touching(Protocol):
    """What reads or writes bytes [begin, end) of an entry."""

    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def writes(self) -> bool: ...


class Operation(Touching, Protocol):
    """One fetch, put or add."""

    @property
    def home(self) -> Promise: ...


class Span(NamedTuple):
    """A use of the bytes that is no transfer."""

    begin: int
    end: int
    writes: bool


class Place:
    """Where an entry rests. Guarded by the lock of the `TransferQueue`."""

    def __init__(self, nbytes: int, tier: TierIO, extent: Extent) -> None:
        self.nbytes = nbytes
        self.tier = tier
        self.extent = extent
        self.written = Written()
        self.error: BaseException | None = None
        self.freed = False
        self.under_way: list[Operation] = []

    @property
    def name(self) -> str:
        """Of the entry, for people; said once, where its bytes rest."""
        return self.extent.name

    @name.setter
    def name(self, name: str) -> None:
        self.extent = replace(self.extent, name=name)

    def blocks(self, begin: int, end: int) -> tuple[int, int]:
        """The whole blocks of the tier that hold [begin, end): what a transfer really touches."""
        unit = self.tier.granule
        return begin // unit * unit, -(-end // unit) * unit

    def blockers(self, new: Touching) -> Sequence[Operation]:
        """The operations that must be over before `new` may start, newest first."""
        low, high = self.blocks(new.begin, new.end)
        found = []
        for old in reversed(self.under_way):
            begin, end = self.blocks(old.begin, old.end)
            if begin < high and low < end and (old.writes or new.writes):
                found.append(old)
                if old.writes and begin <= low and high <= end:
                    break  # what is older on these bytes comes before `old`
        return found
