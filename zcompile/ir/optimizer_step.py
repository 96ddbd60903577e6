"""Lowers an optimizer step to a schedule: updates of entries, streamed through the device by
chunks.

An optimizer step reads every state once and writes most of them. Whole tensors need not fit: a row
(one parameter with its gradient and states) is cut into chunks of elements, and while chunk k
computes, chunk k+1 arrives and chunk k-1 is stored. Operands that rest where compute can reach them
are updated in place. Chunks that come over a slow link are spread among the others, so that every
link is busy all the time and none for all of the arena.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import torch

from zcompile.errors import BudgetExceeded, more_device_memory
from zcompile.ir.byte_ranges import ByteRanges
from zcompile.ir.schedule import (
    SERIALS,
    Borrow,
    EntryIndex,
    Fetch,
    Free,
    Instruction,
    Register,
    Run,
    Schedule,
    Slot,
    Store,
    Ticket,
    Wait,
)
from zcompile.ir.types import Layout, Phase, Region, Work, aligned
from zcompile.ir.units import KiB, MiB

ChunkFunction = Callable[[int, int, Sequence[Any]], None]
"""Computes, in place, elements [first, last) of a row: (first, last, values of its operands)."""


@dataclass(frozen=True)
class Column:
    """A tiered operand of a row: `numel` elements, from byte `begin` of its entry on.

    writes    whether the chunk is stored back
    lasting   the entry outlives the step (a gradient does not)
    resident  compute uses it where it rests; nothing moves
    far       it rests behind a slower link than the other operands
    eased     an update that was put off is applied to it as it passes: on the device it is applied
              before, elsewhere the operand is fetched for it
    blank     a copy of the parameter in another dtype, written whole and not read
    """

    entry: EntryIndex
    begin: int
    dtype: torch.dtype
    writes: bool
    lasting: bool
    name: str
    resident: bool = False
    far: bool = False
    eased: bool = False
    blank: bool = False


@dataclass(frozen=True)
class Row:
    """One elementwise update of `numel` elements.

    plains   input registers that every chunk is handed whole, after the columns
    copies   so many columns, the last ones, are low-precision copies that are made of others
    on_host  the host computes it, where all its operands rest; in the record of a step that is
             planned: it may (`planner/host_step.py`)
    awaits_compute  a plain operand is on the device, as a factor of clipping or the steps of a
                    fused optimizer are there: where the host computes the row, it first waits until
                    all compute before is over
    """

    numel: int
    columns: tuple[Column, ...]
    plains: tuple[Register, ...]
    compute: ChunkFunction
    copies: int = 0
    on_host: bool = False
    awaits_compute: bool = False

    def resting_on_host(self) -> "Row":
        """The row as the host computes it: all operands where they rest."""
        columns = tuple(replace(c, resident=True, far=False) for c in self.columns)
        return replace(self, columns=columns, on_host=True)


Part = tuple[Row, int, int]
"""A chunk: elements [first, last) of a row."""


def spread(rows: Sequence[Row], sizes: Sequence[int]) -> list[Part]:
    """All chunks of `rows`, with those of each kind spread evenly over the whole.

    The kind of a chunk is the set of its far operands, and whether the host computes it. If all are
    of one kind, row follows row.

    sizes  elements of a chunk of each row
    """
    kinds: dict[tuple[bool, tuple[int, ...]], list[Part]] = {}
    for row, elements in zip(rows, sizes, strict=True):
        far = tuple(n for n, c in enumerate(row.columns) if c.far and not c.resident)
        chunks = kinds.setdefault((row.on_host, far), [])
        chunks += [
            (row, first, min(row.numel, first + elements))
            for first in range(0, row.numel, elements)
        ]
    placed = []
    for chunks in kinds.values():
        total, done = sum(last - first for _, first, last in chunks), 0
        for row, first, last in chunks:
            placed.append(((done + (last - first) / 2) / total, (row, first, last)))
            done += last - first
    return [chunk for _, chunk in sorted(placed, key=lambda pair: pair[0])]


@runtime_checkable
class Joining(Protocol):
    """A `ChunkFunction` that can also compute many whole rows in one call, as list ops do."""

    def joins(self, other: object) -> bool:
        """Whether one call may compute a row of this function together with a row of `other`."""

    def joint(self, rows: Sequence[Row]) -> Callable[..., tuple[Any, ...]]:
        """The function that computes all `rows`: of each in turn the columns, then the plains."""


def together(parts: Sequence[Part]) -> Iterator[Sequence[Part]]:
    """The chunks in order, in groups that one call computes.

    Only rows whose operands are all resident, which are whole rows, form groups: other chunks come
    and go one by one.
    """
    group: list[Part] = []
    for part in parts:
        if group and not _joins(group[-1][0], part[0]):
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def _joins(before: Row, row: Row) -> bool:
    """Whether `row` may be computed in one call with `before`."""
    return (
        all(c.resident for c in (*before.columns, *row.columns))
        and not (before.on_host or row.on_host)
        and _kinds(before) == _kinds(row)
        and isinstance(before.compute, Joining)
        and before.compute.joins(row.compute)
    )


def _kinds(row: Row) -> object:
    return [(c.dtype, c.writes) for c in row.columns], len(row.plains)


def resting_regions(name: str, rows: Sequence[Row]) -> Iterator[Region]:
    """The regions of a step of that name if all operands are resident, and the device computes."""
    resting = [
        replace(
            row,
            columns=tuple(replace(c, resident=True, far=False) for c in row.columns),
            on_host=False,
        )
        for row in rows
    ]
    for group in together([(row, 0, row.numel) for row in resting]):
        alone = len(group) == 1
        yield chunk_region(name, *group[0]) if alone else joint_region(name, [g[0] for g in group])


def joint_region(name: str, rows: Sequence[Row]) -> Region:
    """The region that computes several rows at once. Equal sizes take equal time, and give equal
    keys."""
    compute = rows[0].compute
    assert isinstance(compute, Joining), "rows are grouped by this"
    alone = [chunk_region(name, row, 0, row.numel) for row in rows]
    digest = sha256("\n".join(region.key for region in alone).encode()).hexdigest()[:16]
    work = Work(nbytes=sum(region.work.nbytes for region in alone), ops=len(rows))
    key, text = f"{name} of {len(rows)} rows {digest}", f"{len(rows)} rows"
    inputs = [len(row.columns) + len(row.plains) for row in rows]
    begins = accumulate(inputs, initial=0)
    writes = [begin + at for begin, one in zip(begins, alone, strict=False) for at in one.writes]
    return Region(key, text, compute.joint(rows), work, alone[0].like, writes=tuple(writes))


ON_HOST = "on the host: "
"""Begins the keys of regions that the host computes; behind it stands that of the same on the
device."""


def chunk_region(name: str, row: Row, first: int, last: int) -> Region:
    """The region that computes elements [first, last) of `row`, in a step of that name.

    Chunks that take the same time have the same key: op, elements, dtypes of the operands.
    """
    kinds = (f"{'=' if c.resident else ''}{c.dtype}{'!' if c.writes else ''}" for c in row.columns)
    key = f"{name} {last - first} {' '.join(kinds)} +{len(row.plains)}"
    widths = (c.dtype.itemsize * (1 + c.writes) for c in row.columns)
    work = Work(nbytes=(last - first) * sum(widths), ops=1)
    call = partial(_call, row.compute, first, last)
    alike = row.columns[: len(row.columns) - row.copies]  # with copies it takes as long per byte
    like = " ".join((name, *(f"{c.dtype}{'!' if c.writes else ''}" for c in alike)))
    text = f"chunk [{first}, {last})"
    if row.on_host:
        key, like, text = f"{ON_HOST}{key}", f"{ON_HOST}{like}", f"{text} on the host"
    awaits = row.on_host and row.awaits_compute
    writes = tuple([at for at, column in enumerate(row.columns) if column.writes])
    return Region(
        key, text, call, work, like, on_host=row.on_host, awaits_compute=awaits, writes=writes
    )


def _call(compute: ChunkFunction, first: int, last: int, *values: Any) -> tuple[Any, ...]:
    compute(first, last, values)
    return ()


CHUNK_BYTES = 32 * MiB
"""Per operand and chunk, unless the device says otherwise. Small arenas lead to smaller chunks by
themselves."""
HOST_CHUNK_BYTES = 16 * MiB
"""Per operand and chunk that the host computes: large for all of its threads, and small enough
for what a chunk takes for itself, as where a gradient that is read is scaled before."""
DEPTH = 3
"""Chunks on the device at once: one arrives, one computes, one leaves."""
DEEP = 8
"""Chunks on the device at once if operands come over links of different speed: more in flight even
them out."""
DEEPER = 16
"""Chunks at once in the step scratch, where bytes are plenty."""
LEAST_PACED_BYTES = 128 * KiB
"""Lower bound of `paced_bytes`."""
PACE_S = 0.02
"""Time of a chunk on the slowest link: short to wait for when the first arrives and the last
leaves, and long against the start of a transfer."""
CHUNK_ELEMENTS = 1024
"""Chunks begin at multiples of this, so that an element keeps its place in every vector loop."""


@dataclass(frozen=True)
class StepRoom:
    """The memory of the device that chunks are streamed through, and how they are cut.

    begin        address: 0, or beyond the arena, in the step scratch
    nbytes       from there on
    chunk_bytes  of an operand, at most
    depth        most chunks at once
    """

    begin: int = 0
    nbytes: int = 0
    chunk_bytes: int = CHUNK_BYTES
    depth: int = DEPTH


NO_ROOM = StepRoom()


def paced_bytes(bytes_per_s: Iterable[float], most: int) -> int:
    """Bytes of a chunk that suits links of these speeds; at most `most`."""
    slowest = min(bytes_per_s, default=most / PACE_S)
    return min(most, max(LEAST_PACED_BYTES, int(slowest * PACE_S)))


def set_bytes(row: Row, elements: int) -> int:
    """Arena bytes of one chunk: a slot for each operand that moves."""
    return sum(aligned(elements * c.dtype.itemsize) for c in row.columns if not c.resident)


def chunk_elements(row: Row, share_bytes: int, chunk_bytes: int) -> int | None:
    """Most elements of a chunk whose slots fit the share; None if not even `CHUNK_ELEMENTS` do.

    share_bytes  of the arena, for one chunk
    chunk_bytes  of an operand, at most
    """
    if row.on_host:
        chunk = HOST_CHUNK_BYTES // max(column.dtype.itemsize for column in row.columns)
        return min(row.numel, chunk)
    widths = [column.dtype.itemsize for column in row.columns if not column.resident]
    if not widths:
        return row.numel
    most = chunk_bytes // max(widths)
    if row.numel <= most and set_bytes(row, row.numel) <= share_bytes:
        return row.numel
    # So many elements fill whole multiples of ALIGNMENT, whatever the dtype.
    return min(most, share_bytes // sum(widths)) // CHUNK_ELEMENTS * CHUNK_ELEMENTS or None


def lower_step(
    name: str,
    rows: Sequence[Row],
    inputs: int,
    entries: int,
    room: StepRoom,
) -> Schedule:
    """The schedule that computes `rows`, the chunks of each in order.

    inputs   number of registers that the call fills
    entries  number of entries that the call names
    room     the memory that chunks are streamed through
    raises   BudgetExceeded, if not even the smallest chunk of a row fits
    """
    depth, sizes = _sizes(rows, room, name)
    lane_bytes = max(set_bytes(row, n) for row, n in zip(rows, sizes, strict=True))
    builder = _Builder(name, inputs, depth, lane_bytes, room.begin)
    # Chunk by chunk; whole rows that rest in reach are computed together.
    for group in together(spread(rows, sizes)):
        if len(group) > 1:
            builder.add_joint([row for row, _, _ in group])
        else:
            builder.add(*group[0])
    builder.finish()
    return Schedule(
        phase=Phase.STEP,
        name=name,
        instructions=tuple(builder.instructions),
        handles=(),
        inputs=inputs,
        constants=(),
        outputs=(),
        registers=builder.registers,
        sinks=(),
        serial=next(SERIALS),
        arena_bytes=builder.arena_bytes,
        peak_bytes=builder.peak_bytes,
        budget_bytes=room.begin + room.nbytes,
        names=_names(rows, entries),
        rows=tuple(rows),
        scratch_at=room.begin if builder.arena_bytes else 0,
    )


def _names(rows: Sequence[Row], entries: int) -> dict[int, str]:
    names = {int(c.entry): c.name for row in rows for c in row.columns}
    return {index: names.get(index, "") for index in range(entries)}


def _sizes(rows: Sequence[Row], room: StepRoom, name: str) -> tuple[int, list[int]]:
    """Chunks on the device at once, and the elements of a chunk of each row."""
    for depth in range(room.depth, 0, -1):
        share = room.nbytes // depth
        sizes = [chunk_elements(row, share, room.chunk_bytes) for row in rows]
        if None not in sizes:
            return depth, [n or 1 for n in sizes]
    smallest = [min(row.numel, CHUNK_ELEMENTS) for row in rows]
    row, elements = max(zip(rows, smallest, strict=True), key=lambda pair: set_bytes(*pair))
    least = set_bytes(row, elements)
    raise BudgetExceeded(
        "device",
        room.nbytes,
        least,
        f"one chunk of {name}",
        [(c.name, aligned(elements * c.dtype.itemsize)) for c in row.columns if not c.resident],
        more_device_memory(least),
    )


@dataclass(frozen=True)
class _Chunk:
    """A chunk that was fetched and waits to be computed; None in place of the fetch of a resident
    operand."""

    row: Row
    first: int
    last: int
    fetches: tuple[Fetch | None, ...]


@dataclass(frozen=True)
class _Joint:
    """Whole rows of resident operands that one region computes."""

    rows: tuple[Row, ...]


class _Builder:
    """Emits chunks as a software pipeline over `depth` lanes of the arena, taken in turn."""

    def __init__(self, name: str, inputs: int, depth: int, lane_bytes: int, begin: int) -> None:
        self._name, self._begin = name, begin
        self._depth = depth
        self._lane_bytes = lane_bytes
        self._chunks = 0
        self.instructions: list[Instruction] = []
        self.registers = inputs
        self.arena_bytes = self.peak_bytes = 0
        self._tickets = 0
        self._taken = 0
        self._waiting: list[_Chunk | _Joint] = []
        self._busy: ByteRanges[tuple[Ticket, ...]] = ByteRanges()
        """Tickets of the last compute and store of each byte."""

    def add(self, row: Row, first: int, last: int) -> None:
        self._make_room()
        self._waiting.append(self._fetch(row, first, last))

    def add_joint(self, rows: Sequence[Row]) -> None:
        self._make_room()
        self._waiting.append(_Joint(tuple(rows)))

    def _make_room(self) -> None:
        if len(self._waiting) >= max(1, self._depth - 1):
            self._compute(self._waiting.pop(0))

    def finish(self) -> None:
        while self._waiting:
            self._compute(self._waiting.pop(0))

    def _ticket(self) -> Ticket:
        self._tickets += 1
        return Ticket(self._tickets - 1)

    def _fetch(self, row: Row, first: int, last: int) -> _Chunk:
        address = self._begin + self._chunks % self._depth * self._lane_bytes
        self._chunks += any(not column.resident for column in row.columns)
        fetches: list[Fetch | None] = []
        # A slot of the lane for each operand that moves.
        for column in row.columns:
            if column.resident:
                fetches.append(None)
                continue
            width = column.dtype.itemsize
            slot = Slot(address, aligned((last - first) * width))
            address = slot.end
            fetch = Fetch(
                column.entry,
                column.begin + first * width,
                (last - first) * width,
                slot,
                self._ticket(),
                self._after(slot),
                column.name,
                column.lasting,
            )
            fetches.append(fetch)
            self.instructions.append(fetch)
            self._taken += slot.nbytes
            self.arena_bytes = max(self.arena_bytes, slot.end)
        self.peak_bytes = max(self.peak_bytes, self._taken)
        return _Chunk(row, first, last, tuple(fetches))

    def _after(self, slot: Slot) -> tuple[Ticket, ...]:
        """Tickets of the last computes and stores over `slot`, which must be over before it is
        overwritten."""
        return tuple(sorted({t for busy in self._busy.over(slot.address, slot.end) for t in busy}))

    def _compute(self, chunk: _Chunk | _Joint) -> None:
        if isinstance(chunk, _Joint):
            self._compute_joint(chunk.rows)
            return
        registers = [self._operand(chunk, n) for n in range(len(chunk.fetches))]
        region = chunk_region(self._name, chunk.row, chunk.first, chunk.last)
        if chunk.row.on_host:  # whoever uses its operands waits for it: no ticket does
            self.instructions.append(Run(region, (*registers, *chunk.row.plains), ()))
            return
        done = self._ticket()
        self.instructions.append(
            Run(region, (*registers, *chunk.row.plains), (), ticket=done, names=())
        )
        for column, fetch, register in zip(
            chunk.row.columns, chunk.fetches, registers, strict=True
        ):
            if fetch is not None:
                self._leave(column, fetch, register, done)

    def _compute_joint(self, rows: Sequence[Row]) -> None:
        inputs: list[Register] = []
        for row in rows:
            inputs += [self._borrow(row, column, 0, row.numel) for column in row.columns]
            inputs += row.plains
        region = joint_region(self._name, rows)
        self.instructions.append(Run(region, tuple(inputs), (), ticket=self._ticket()))

    def _operand(self, chunk: _Chunk, index: int) -> Register:
        """The register of an operand of the chunk: waited for, or a view in place."""
        column, fetch = chunk.row.columns[index], chunk.fetches[index]
        if fetch is None:
            return self._borrow(chunk.row, column, chunk.first, chunk.last)
        layout = Layout((chunk.last - chunk.first,), (1,), 0, column.dtype)
        register = self._register()
        self.instructions.append(Wait(fetch.ticket, fetch.slot, layout, register, column.name))
        return register

    def _borrow(self, row: Row, column: Column, first: int, last: int) -> Register:
        layout = Layout((last - first,), (1,), 0, column.dtype)
        begin, register = column.begin + first * column.dtype.itemsize, self._register()
        self.instructions.append(
            Borrow(column.entry, begin, layout, register, column.writes, column.name, row.on_host)
        )
        return register

    def _register(self) -> Register:
        self.registers += 1
        return Register(self.registers - 1)

    def _leave(self, column: Column, fetch: Fetch, register: Register, done: Ticket) -> None:
        """After the compute: store the operand, if it was written, and give its slot back."""
        busy: tuple[Ticket, ...] = (done,)
        if column.writes:
            ticket = self._ticket()
            busy = (done, ticket)
            self.instructions.append(
                Store(
                    column.entry,
                    fetch.begin,
                    fetch.nbytes,
                    fetch.slot,
                    ticket,
                    (done,),
                    column.name,
                )
            )
        slot = fetch.slot
        self._busy.put(slot.address, slot.end, busy)
        self.instructions.append(Free(fetch.slot, register, column.name))
        self._taken -= fetch.slot.nbytes
