"""Defines what the compiler knows of parameters, entries, layouts, regions and live bytes."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, NewType

import torch

from zcompile.ir.units import KiB

ParamName = NewType("ParamName", str)
"""Dotted name of a parameter, "layers.3.mlp.up.weight"; for people."""
NodeName = NewType("NodeName", str)
"""Name of an fx node; unique in its graph, so it serves as a key. Never parsed."""
SMALL_BYTES = 64 * KiB
"""Largest size of a small entry. At 10 GB/s it travels in 6 us, and starting its transfer costs
several times that, so small entries rest on the device, even in room that is kept for others."""
ALIGNMENT = 512
"""Bytes. What CUDA's own allocator aligns to; enough for every vector width."""
HELD = "held"
"""Tier of a gradient that stays in the memory that compute made it in, outside the arena."""
ON_DEVICE = frozenset({"device", HELD})
"""Tiers whose entries compute uses in place."""


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to whole `ALIGNMENT`, and at least one."""
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


def row_major(size: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a tensor of this size without gaps, last dimension last.

    As `torch.empty(size)` has them: a dimension of 0 counts as 1.
    """
    strides, step = [], 1
    for n in reversed(size):
        strides.append(step)
        step *= max(1, n)
    return tuple(reversed(strides))


class EntryKind(enum.Enum):
    """The kind of an entry of the store, which decides where it would best rest.

    lasting  the entry outlives the step, so that its next use can be foreseen
    """

    PARAM = "parameter"
    GRAD = "gradient"
    STATE = "optimizer state"
    COPY = "parameter in another dtype"
    RESULT = "result of an optimizer's step, until it is kept as a state"
    ACTIVATION = "value that backward needs, from one call of forward"

    def __init__(self, title: str) -> None:
        # An attribute, since it is asked of each entry of each call.
        self.lasting = self.name in ("PARAM", "STATE", "COPY")


class EntryRole(enum.IntEnum):
    """Which of the entries that go by one number is meant. A number, since its hash is cheap."""

    VALUE = 0
    GRADIENT = 1
    COPY = 2


class EntryRef(NamedTuple):
    """Names an entry in the record of a step and in its plan; the same entry in every step.

    The store knows an entry by its key, which its handle carries. A gradient is a new entry, with
    a new key, in every step: so it is named by its parameter. The kind of an entry is no part of
    its name, for an optimizer makes a state of a result (`EntryFact` says the kind).

    number  key of the entry in the store; of a gradient, or of a copy (in low precision, or of
            the shares of all ranks), the key of its parameter there
    role    whether the entry with that key is meant, the gradient of it, or its copy
    """

    number: int
    role: EntryRole = EntryRole.VALUE

    @property
    def is_gradient(self) -> bool:
        return self.role is EntryRole.GRADIENT

    @property
    def gradient(self) -> "EntryRef":
        """The gradient of this parameter."""
        return EntryRef(self.number, EntryRole.GRADIENT)

    @property
    def is_copy(self) -> bool:
        return self.role is EntryRole.COPY

    @property
    def copy(self) -> "EntryRef":
        """The copy of this parameter: in low precision, or of the shares of all ranks."""
        return EntryRef(self.number, EntryRole.COPY)

    @property
    def owner(self) -> "EntryRef":
        """The parameter that this is the gradient, or the copy, of; anything else owns itself."""
        return EntryRef(self.number)


class CheckpointPolicy(enum.Enum):
    """What a user asks of a value that backward needs; torch.utils.checkpoint has the same names.

    A plain checkpoint asks PREFER_RECOMPUTE of all that it computes.
    """

    MUST_SAVE = "MUST_SAVE"
    PREFER_SAVE = "PREFER_SAVE"
    MUST_RECOMPUTE = "MUST_RECOMPUTE"
    PREFER_RECOMPUTE = "PREFER_RECOMPUTE"
    MUST_CPU_OFFLOAD = "MUST_CPU_OFFLOAD"
    PREFER_CPU_OFFLOAD = "PREFER_CPU_OFFLOAD"


NEVER_RECOMPUTED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_CPU_OFFLOAD)
"""Policies that forbid to compute a value again."""


class Phase(enum.Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


@dataclass(frozen=True)
class Layout:
    """The layout of a tensor in the bytes of its entry.

    size, stride, offset  in elements, as torch has them; offset from the entry's first byte
    dtype                 torch dtype
    conj, neg             it reads as the conjugate, or the negative, of the elements in the bytes,
                          as views do that `conj()` and `.imag` of a complex tensor give
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool = False
    neg: bool = False

    @cached_property
    def numel(self) -> int:
        count = 1
        for n in self.size:
            count *= n
        return count

    @cached_property
    def span(self) -> int:
        """Elements from the first to one past the last that the tensor touches, offset excluded."""
        if self.numel == 0:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the span."""
        return self.span * self.dtype.itemsize

    @cached_property
    def dense(self) -> bool:
        """No gaps and no overlap: every element of the span belongs to exactly one index."""
        if self.span != self.numel:
            return False
        # As many are not yet the same: size (3, 3) with strides (2, 2) touches 5 of its span of 9.
        below = 1
        lying = [(s, n) for n, s in zip(self.size, self.stride, strict=True) if n > 1]
        for stride, count in sorted(lying) if self.numel else ():
            if stride != below:
                return False
            below *= count
        return True

    def covers(self, nbytes: int) -> bool:
        """Whether each byte of an entry of `nbytes` belongs to exactly one element of the tensor,
        and its elements are what the bytes hold.

        To touch the first byte and the last is not to cover: a diagonal does that, and every other
        row. Only what covers may be written without what was there before.
        """
        return self.offset == 0 and self.nbytes == nbytes and self.dense and not self.lazy

    @property
    def lazy(self) -> bool:
        """Whether the elements are computed from the bytes where they are read."""
        return self.conj or self.neg

    def marked(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of `tensor`, which has the elements in the bytes, that shows those of this
        layout."""
        if self.conj:
            tensor = torch.ops.aten._conj.default(tensor)
        return torch.ops.aten._neg_view.default(tensor) if self.neg else tensor

    @cached_property
    def end_bytes(self) -> int:
        """From the entry's first byte to one past the last that the tensor touches."""
        return self.offset * self.dtype.itemsize + self.nbytes

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.size, self.stride, self.offset, self.dtype, self.conj, self.neg))

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Layout":
        size, stride = tuple(tensor.size()), tuple(tensor.stride())
        try:
            return _layout(size, stride, tensor.dtype)
        except TypeError:  # a dynamic size has no hash
            return cls(size, stride, 0, tensor.dtype)

    def view(self, storage: torch.Tensor) -> torch.Tensor:
        """This tensor over bytes that start at the entry's first byte.

        storage  uint8 [n], n at least (offset + span) elements; aligned to the dtype
        """
        end = (self.offset + self.span) * self.dtype.itemsize
        typed = storage[:end].view(self.dtype)
        start = typed.storage_offset() + self.offset
        return self.marked(torch.as_strided(typed, self.size, self.stride, start))


@lru_cache(maxsize=4096)
def _layout(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Layout:
    """One object for equal layouts: gradients have the same ones in each step."""
    return Layout(size, stride, 0, dtype)


class OneOwner(NamedTuple):
    """All of a parameter is with one of several ranks.

    owner        that one
    rank, ranks  this one, of how many
    """

    owner: int
    rank: int
    ranks: int


def flat_layout(numel: int, dtype: torch.dtype) -> Layout:
    """The layout of a contiguous vector, as `Layout.of` it."""
    return _layout((numel,), (1,), dtype)


@dataclass(frozen=True)
class ParamSpec:
    """What the compiler may know of the parameter, or activation, behind a handle of a graph.

    name        of the first call's parameter, for people; identity is a run-time fact
    layout      of this tensor in its entry
    nbytes      bytes of the whole entry, which is what a gather brings
    sink        its gradient is consumed in the graph and becomes `param.grad` (a tiered leaf)
    home        the tier it rested on when the graph was compiled, for people
    activation  a value that forward offloads and backward fetches, new in every call
    share       its bytes that rest on this rank, [begin, end) of `nbytes`, the other ranks have the
                others; None: all
    one_owner   the rank that holds all of it; `share` is then the bytes of this rank's entry, with
                its padding. None: each holds a slice, or all of it
    shared      several ranks train it: its gradient is theirs
    """

    name: ParamName
    layout: Layout
    nbytes: int
    sink: bool
    home: str = "host"
    activation: bool = False
    share: tuple[int, int] | None = None
    shared: bool = False
    one_owner: OneOwner | None = None


@dataclass(frozen=True)
class Work:
    """The work of a region, counted and not measured; a dynamic size as it was when traced.

    flops         of its matrix products, convolutions and attention
    dense_nbytes  read and written by those
    nbytes        read and written by all other ops; a view touches nothing
    dtype         that most of `flops` are done in: "float32", "bfloat16", ...
    ops           kernels: its ops without views
    """

    flops: int = 0
    dense_nbytes: int = 0
    nbytes: int = 0
    dtype: str = "float32"
    ops: int = 0


NO_WORK = Work()


@dataclass(frozen=True)
class Region:
    """Compute between our ops, compiled once per structure.

    key     digest of the structure: ops, arguments, wiring, shapes, strides, dtypes
    text    its ops, for people
    call    values in, a tuple of values out
    work    what it computes and touches, from which its seconds can be predicted
    like    name of the regions that take as long per byte touched; "": there are none
    owns    the values come in one list, which `call` empties, so that they can die inside
    placed  outputs that `call_into` makes in the tensors of a second list, in this order
    body    the code of `call` as an `fx.Graph`, so that it can be joined with others; else None
    parts   the regions that it was joined from, in order; their costs are what it costs
    on_host  the host computes it, on what lies in its own memory, and the device does not
    awaits_compute  it is on the host, which first waits until all compute before is over, for what
                    it reads of the device
    writes  values in, by position, that it is there to change in place: what rows of an optimizer's
            step write
    """

    key: str
    text: str
    call: Callable[..., tuple[Any, ...]]
    work: Work = NO_WORK
    like: str = ""
    owns: bool = False
    placed: tuple[int, ...] = ()
    call_into: Callable[..., tuple[Any, ...]] | None = None
    body: Any = None
    parts: "tuple[Region, ...]" = ()
    on_host: bool = False
    awaits_compute: bool = False
    writes: tuple[int, ...] = ()


class LiveBytes(NamedTuple):
    """Bytes of values that a call has live around one instruction.

    before     when it begins
    peak       at most, while it is carried out
    after      when it is over
    departing  upper bound on gradients in flight once this one, a gradient, is sent; 0: not known
    alone      the gradient is a storage of its own with its parameter's layout, which nobody reads
               later
    carried    bytes of whole storages that are free once this gradient has arrived: it may be a
               part of a larger storage, and the last of several in one; None: as many as travel
    """

    before: int = 0
    peak: int = 0
    after: int = 0
    departing: int = 0
    alone: bool = False
    carried: int | None = None


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes that the calls of a schedule have live outside the arena (`memory/footprint.py`).

    levels       of the instructions that compute or send something off the device, in their order
    registers    whose values count; `given`: those that a call begins with; `lent`: of these, those
                 that torch holds until it has ended, whenever the call lets go of them
    kept         registers of results that are saved for backward
    left_bytes   of gradients that are in flight when a call has ended
    end_bytes    of values when it has ended, those of `left_bytes` included
    kept_bytes   that a forward saves for its backward; `saved_bytes`: that a backward finds
    ahead_bytes  of a forward that a backward follows: peak of both
    sizes        the dynamic sizes that all this was counted at; none, as the graph was traced
    """

    levels: tuple[LiveBytes, ...] = ()
    registers: frozenset[int] = frozenset()
    given: frozenset[int] = frozenset()
    lent: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    left_bytes: int = 0
    end_bytes: int = 0
    kept_bytes: int = 0
    saved_bytes: int = 0
    ahead_bytes: int = 0
    sizes: tuple[int, ...] = ()

    @property
    def peak_bytes(self) -> int:
        return max((level.peak for level in self.levels), default=0)

    @property
    def needed_bytes(self) -> int:
        """Bytes that a call must find room for.

        A forward needs room for its backward too: that would be refused once buffers were changed.
        """
        return max(self.peak_bytes, self.ahead_bytes)


NOTHING_HELD = MemoryProfile()
