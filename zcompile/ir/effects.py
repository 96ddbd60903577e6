"""Defines what an instruction of a schedule says of itself: its effects.

The executor carries instructions out by their class. Everything else (the proof, the simulator, the
counts of live bytes, the bounds, the printer, what is recorded) reads their effects alone, so a new
kind of instruction is a class with `effects`, and an action in `runtime/executor.py`. Sizes and
addresses are bytes; a register is an index into the values of one call.
"""

import enum
from dataclasses import dataclass
from typing import NamedTuple, NewType, Protocol

import torch

from zcompile.ir.partition import SharedRange
from zcompile.ir.types import Region

Register = NewType("Register", int)
Ticket = NewType("Ticket", int)
EntryIndex = NewType("EntryIndex", int)
"""Position of a handle among those of a schedule; the call says which entry that is."""


@dataclass(frozen=True)
class Slot:
    """A range of the device arena."""

    address: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.address + self.nbytes

    def overlaps(self, other: "Slot") -> bool:
        return self.address < other.end and other.address < self.end


class Lane(enum.Enum):
    """Where an instruction acts: in order on the compute stream, or beside it as a transfer.

    Collectives of one kind are carried out one after the other, in the order of the list.
    """

    COMPUTE = "compute"
    IN = "in"
    """A transfer to the device."""
    OUT = "out"
    """A transfer off the device."""
    FABRIC = "fabric"
    """A collective: a transfer between ranks, which each of them starts in the same order."""


class HomeRole(enum.Enum):
    """Which entry is meant, of those that go by one index of a schedule."""

    ENTRY = "the entry itself"
    COPY = "its low-precision copy"
    GRADIENT = "its gradient"
    NEW = "an entry that the call makes"


COMPUTE, IN, OUT, FABRIC = Lane
ENTRY, COPY, GRADIENT, NEW = HomeRole
"""Members by themselves: looking them up in their class takes long in walks of thousands."""


class HomeAccess(NamedTuple):
    """Bytes [begin, end) of an entry that an instruction reads or writes.

    entry      index among the entries of the call; of a new entry, among those that the call makes
    in_place   compute uses the bytes where they rest, or they stay where compute made them
    lasting    the entry outlives the step, so that what is read of it can be foreseen
    copy_dtype dtype of the low-precision copy
    of_nbytes  size of the gradient that these bytes are a tile of; 0: they are all of it
    tile       the bytes of that gradient which the tile has, where ranks hold parts of it, and this
               one the bytes above; None: this one has them all
    tier       on which a new entry is made
    """

    entry: EntryIndex
    begin: int
    end: int
    reads: bool = False
    writes: bool = False
    role: HomeRole = ENTRY
    in_place: bool = False
    lasting: bool = True
    copy_dtype: torch.dtype | None = None
    of_nbytes: int = 0
    tier: str = ""
    tile: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class Piece(NamedTuple):
    """A gradient in a bucket, in which those of small entries cross together."""

    entry: EntryIndex
    nbytes: int


class Effects(NamedTuple):
    """All that others need to know of an instruction.

    kind, name    what a person calls it, and what it is about
    lane          compute, or a transfer to or off the device
    nbytes        that it moves; else that it views or gives back
    region        what it computes
    reads         registers whose values it reads, also through the memory that they lie over
    forgets       registers that must not be read afterwards; before `defines`
    defines       registers that get a value
    takes         slot that is taken from here on
    gives_back    slot that is not taken any more; registers over it are forgotten
    reads_slot    taken slot of which it reads `nbytes`: the first, or those from `slot_begin` on
    writes_slot   taken slot of which it writes `nbytes`: the first, or those from `slot_begin` on
    views         taken slot, or neighbouring ones, over `nbytes` of which the registers lie that it
                  defines: the first, or those from `slot_begin` on
    home          bytes of an entry
    after         tickets that it waits for: a transfer starts, or compute goes on, once these are
                  complete
    ticket        it gives out: complete once compute has passed, or once the transfer has ended
    changes_live  it changes the bytes that a call has live outside the arena
    lets_go       bytes that were live since a call before, outside the arena, and are not any more
    into          entries whose whole gradients are the registers that its region places
    nodes         nodes of the graph whose values the registers in `defines` get
    slot_begin    first byte that it writes of `writes_slot`, reads of `reads_slot`, or views
    fills         `writes_slot` has all its bytes afterwards, with those that were written before
    shares        of a gradient that is exchanged, or of a tile of it: how ranks hold its `nbytes`;
                  None: every rank gets all of each rank
    bucket        gradients that it puts into the bucket of the call, or that cross with it
    viewed_as     dtype of the tensors over `views`
    tile          of what ranks hold shares of, the range that it is about; None: all of it
    wide_nbytes   bytes of a gradient that crosses between ranks, if hooks see it; 0: the same
    on_host       the host computes the region, or is lent the bytes of an entry for one
    writes        of `reads`, those whose values it changes in place, to be kept
    """

    kind: str
    name: str
    lane: Lane = COMPUTE
    nbytes: int = 0
    region: Region | None = None
    reads: tuple[Register, ...] = ()
    forgets: tuple[Register, ...] = ()
    defines: tuple[Register, ...] = ()
    takes: Slot | None = None
    gives_back: Slot | None = None
    reads_slot: Slot | None = None
    writes_slot: Slot | None = None
    views: Slot | None = None
    home: HomeAccess | None = None
    after: tuple[Ticket, ...] = ()
    ticket: Ticket | None = None
    changes_live: bool = False
    lets_go: int = 0
    into: tuple[EntryIndex, ...] = ()
    nodes: tuple[str, ...] = ()
    slot_begin: int = 0
    fills: bool = False
    shares: SharedRange | None = None
    bucket: tuple[Piece, ...] = ()
    viewed_as: torch.dtype | None = None
    tile: SharedRange | None = None
    wide_nbytes: int = 0
    on_host: bool = False
    writes: tuple[Register, ...] = ()

    @property
    def is_collective(self) -> bool:
        """Whether all ranks take part in it."""
        return self.lane is FABRIC

    @property
    def updates(self) -> bool:
        """Whether it computes a late update."""
        return self.region is not None and not self.changes_live

    @property
    def is_agreement(self) -> bool:
        """Whether it is a collective that moves nothing."""
        return self.is_collective and not (self.fills or self.defines or self.bucket)

    @property
    def is_transfer(self) -> bool:
        return self.lane is not COMPUTE

    @property
    def moved_bytes(self) -> int:
        """Bytes that the host hands over to a transfer, which its seconds depend on."""
        return 0 if self.lane is COMPUTE else self.nbytes

    @property
    def is_gradient(self) -> bool:
        """Whether it sends a gradient to its entry, or leaves it there."""
        return self.home is not None and self.home.role is GRADIENT

    @property
    def stays(self) -> bool:
        """Whether it leaves a gradient where compute made it."""
        return self.home is not None and self.home.in_place and self.is_transfer

    @property
    def may_wait(self) -> bool:
        """Whether compute, or the host, may have to wait for a transfer here before it goes on."""
        return self.lane is COMPUTE and (bool(self.after) or self.home is not None)

    @property
    def taken_bytes(self) -> int:
        """By how much the sum of taken slots grows; negative where it shrinks."""
        taken = self.takes.nbytes if self.takes is not None else 0
        return taken - self.gives_back.nbytes if self.gives_back is not None else taken

    @property
    def writes_home(self) -> bool:
        """Whether it writes bytes of an entry that the call was given, or lets compute do so."""
        home = self.home
        return home is not None and home.writes and home.role is ENTRY


class Instruction(Protocol):
    """One instruction of a schedule."""

    @property
    def effects(self) -> Effects:
        """What it does; the same each time."""
