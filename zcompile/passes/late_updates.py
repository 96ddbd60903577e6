"""Writes late updates into the region program of the forward that computes them."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from zcompile.ir.late_updates import LateRows, LateUpdate
from zcompile.ir.optimizer_step import (
    CHUNK_ELEMENTS,
    ChunkFunction,
    Column,
    Row,
    chunk_elements,
    chunk_region,
    set_bytes,
)
from zcompile.ir.schedule import (
    Drop,
    EntryIndex,
    LateChunk,
    ReadValue,
    RegionProgram,
    Register,
    Run,
    Share,
)
from zcompile.ir.types import Layout, Region, aligned

LANES = 16
"""Chunks of states and gradient take at most one part in so many of the streaming buffer: they come
beside parameters, some of them ahead."""
GATHER_LEAD = 1
"""Regions before its first reader that a share is updated: one more holds all of the parameter for
one region longer."""
FEWEST_LANES = 4
"""The same of chunks of the least bytes that pay for their transfers."""


def reads_once(program: RegionProgram, entry: EntryIndex, row: Row, weight: Column) -> bool:
    """Whether the values that a forward reads of a parameter are all of it, each byte once, in the
    dtype in which it is updated, or all of the copy that the update writes along."""
    values = sorted((v for v in program.values if v.entry == entry), key=lambda v: v.begin)
    if any(v.share is not None for v in values):
        return len(values) == 1 and _is_of_share(values[0], row, weight)
    ends = [0, *(v.begin + v.nbytes for v in values)]
    read, cast = weight, None
    if values and values[0].cast is not None:
        cast, copies = values[0].cast, [c for c in row.columns if c.blank]
        if cast.dtype != weight.dtype or [c.dtype for c in copies] != [cast.copy_dtype]:
            return False
        (read,) = copies
    return (
        bool(values)
        and weight.begin == read.begin == 0
        and ends[-1] == row.numel * read.dtype.itemsize
        and all(v.begin == end for v, end in zip(values, ends, strict=False))
        and all(
            v.cast == cast and v.layout.dtype == read.dtype and v.layout.covers(v.nbytes)
            for v in values
        )
        and all(v.begin % (CHUNK_ELEMENTS * read.dtype.itemsize) == 0 for v in values)
    )


def _is_of_share(value: ReadValue, row: Row, weight: Column) -> bool:
    """Whether an update is one of what this rank holds of a parameter, but for padding."""
    nbytes = row.numel * weight.dtype.itemsize
    return (
        nbytes > 0
        and value.share is not None
        and (value.share.tile is None or value.share.tile.owner is not None)
        and weight.begin == 0
        and value.share.nbytes >= nbytes
        and value.cast is None
        and value.layout.dtype == weight.dtype
        and value.layout.dense
    )


def bytes_at_once(program: RegionProgram, room_bytes: int) -> Iterator[tuple[EntryIndex, int]]:
    """The entry of each value that a region of `program` reads, and the bytes of the arena that the
    value takes while it is read, if the entry does not rest on the device: its slot, and where its
    update is late, one chunk of the other operands beside it.

    Left out are values that take a slot wherever their entries rest (copies in another dtype, and
    what is gathered from shares), and those of entries that do not outlive a step.

    room_bytes  that everything streams through
    """
    rows = LateRows() if program.late is None else program.late
    late = {update.entry: update for update in rows.updates}
    for value in program.slotted:
        if value.cast is not None or value.share is not None or not value.lasting:
            continue
        nbytes = aligned(value.nbytes)
        if (update := late.get(value.entry)) is not None:
            row = _streamed(update.row)
            others = _other_operands(row, update.weight, row.numel)
            elements = _chunk_elements(others, room_bytes, rows)
            nbytes += set_bytes(others, min(elements, others.numel))
        yield value.entry, nbytes


def with_late_updates(program: RegionProgram, room_bytes: int | None) -> RegionProgram:
    """The program of a forward, with its late updates right before the first readers of their
    parameters.

        region 0: mm reads w                     late 0: adamw a chunk of w, g, m, v
                                                 that of w, m, v goes home
                                      ->         late 1: adamw the other chunk
                                                 that goes home
                                                 region 2: mm reads w

    The chunks of an update are regions of their own, which read a chunk of each operand. Those of
    the parameter are parts of the value that the forward reads: each comes with the other operands
    of its chunk, and goes home with them, so that no link is busy with a whole parameter while
    chunks wait for it. Where the forward reads a copy of the parameter in another dtype, the update
    writes that, and the parameter is one of the others.
    Of a parameter that ranks hold shares of they update this rank's, before it is
    gathered: one region earlier, so that the gather has that region to hide behind.

        region 0: mm                               region 0: adamw w, g, m, v (shares)
        region 1: mm reads w              ->       w, m, v go home, w is gathered
                                                   region 1: mm
                                                   region 2: mm reads w

    room_bytes  that everything streams through; None: unbounded
    """
    if program.late is None:
        return program
    return _Joining(program, program.late, room_bytes).program()


@dataclass
class _Joining:
    """Builds the program, region after region.

    number     region of the forward -> its number by now
    gradients  entry of each gradient -> the last chunk that reads it, and the registers of it
    """

    before: RegionProgram
    late: LateRows
    room_bytes: int | None
    regions: list[Run] = field(default_factory=list)
    values: list[ReadValue] = field(default_factory=list)
    number: list[int] = field(default_factory=list)
    gradients: dict[EntryIndex, tuple[int, tuple[Register, ...]]] = field(default_factory=dict)

    def program(self) -> RegionProgram:
        before, outline = self.before, self.before.outline
        update_of = {update.entry: number for number, update in enumerate(self.late.updates)}
        self.registers = outline.registers + self.late.plains
        own = len(outline.handles) + len(outline.copies)
        names = {own + n: name for n, name in enumerate(self.late.names)}
        reading: dict[int, list[ReadValue]] = {}
        for value in before.values:
            if value.entry in update_of:
                ahead = 0 if value.share is None else GATHER_LEAD
                reading.setdefault(max(0, value.first - ahead), []).append(value)
        updates: dict[Register, int] = {}
        """Of what is updated, the first region of that."""
        shares: dict[Register, Share] = {}
        departures = []
        for n, run in enumerate(before.regions):
            begin = len(self.regions)
            for value in reading.get(n, ()):
                first = len(self.regions)
                late = update_of[value.entry]
                if value.share is None:
                    self._update(late, value)
                else:
                    shares[value.register] = self._update_share(late, value, value.share)
                updates[value.register] = first
            self.number.append(len(self.regions))
            departures += [before.departures[n], *[()] * (len(self.regions) - begin)]
            self.regions.append(run)
        departures.append(before.departures[-1])
        rows = [(c, update.row) for update in self.late.updates for c in update.row.columns]
        nbytes = {column.entry: row.numel * column.dtype.itemsize for column, row in rows}
        for entry, (last, registers) in self.gradients.items():
            drop = Drop(entry, registers, nbytes[entry], name=names[entry])
            departures[last + 1] = (*departures[last + 1], drop)
        for value in before.values:
            reader = self.number[value.first]
            updated = value.register in updates
            in_parts = updated and value.share is None
            if in_parts:
                value = self._as_updated(update_of[value.entry], value)
            share = shares.get(value.register, value.share)
            self.values.append(
                value._replace(
                    first=updates.get(value.register, reader),
                    last=self.number[value.last],
                    start=self.number[value.start],
                    written=share.updated - 1 if share is not None and updated else None,
                    share=share,
                    gather=self.number[value.gather],
                    reader=reader if in_parts or share is not None else None,
                    in_parts=in_parts,
                )
            )
        self.values.sort(key=lambda value: value.first)
        plains = range(outline.registers, outline.registers + self.late.plains)
        outline = replace(
            outline,
            names={**outline.names, **names},
            registers=self.registers,
            operands=tuple(map(Register, plains)),
        )
        return replace(
            before,
            outline=outline,
            regions=tuple(self.regions),
            departures=tuple(departures),
            late=None,
        ).with_values(self.values)

    def _register(self) -> Register:
        self.registers += 1
        return Register(self.registers - 1)

    @staticmethod
    def _place(update: LateUpdate, value: ReadValue) -> int:
        """Which column the forward reads by `value`: the parameter, or its copy."""
        if value.cast is None:
            return update.weight
        return next(n for n, column in enumerate(update.row.columns) if column.blank)

    def _as_updated(self, number: int, value: ReadValue) -> ReadValue:
        """`value` of what an update writes: of the copy, if the forward reads that."""
        if value.cast is None:
            return value
        update = self.late.updates[number]
        copy = update.row.columns[self._place(update, value)]
        return value._replace(entry=copy.entry, name=copy.name, cast=None)

    def _update(self, number: int, value: ReadValue) -> None:
        """Add the chunks of an update, by its number, of the elements of `value`."""
        update = self.late.updates[number]
        place = self._place(update, value)
        width = update.row.columns[place].dtype.itemsize
        whole = self._as_updated(number, value)
        self._chunks(number, place, whole, value.begin // width, value.nbytes // width)

    def _update_share(self, number: int, value: ReadValue, share: Share) -> Share:
        """Add the chunks of an update of this rank's share; returns that with a register, from
        which it is updated, and to be gathered, on."""
        update = self.late.updates[number]
        itemsize = update.row.columns[update.weight].dtype.itemsize
        own = self._register()
        self._chunks(number, update.weight, own, 0, update.row.numel)
        written = update.row.numel * itemsize
        return share._replace(register=own, updated=len(self.regions), written=written)

    def _chunks(
        self, number: int, place: int, updated: ReadValue | Register, begin: int, count: int
    ) -> None:
        """Add the chunks of an update of `count` elements from `begin` on.

        updated  what column `place` is: a value, of which each chunk is a part; or a share, which
                 all chunks read in this register
        """
        row = _streamed(self.late.updates[number].row)
        others = _other_operands(row, place, count)
        elements = _chunk_elements(others, self.room_bytes, self.late)
        for first in range(begin, begin + count, elements):
            last = min(begin + count, first + elements)
            self._chunk(number, row, place, updated, first, last)

    def _chunk(
        self, late: int, row: Row, place: int, updated: ReadValue | Register, first: int, last: int
    ) -> None:
        """Add the update of elements [first, last) of a row; `updated` as of `_chunks`."""
        update, number = self.late.updates[late], len(self.regions)
        in_parts = isinstance(updated, ReadValue)
        registers = []
        for n, column in enumerate(row.columns):
            if n == place and not isinstance(updated, ReadValue):
                registers.append(updated)
                continue
            registers.append(self._register())
            whole = updated if n == place and isinstance(updated, ReadValue) else None
            width = column.dtype.itemsize
            lasting = column.lasting or column.blank or whole is not None
            if not lasting:
                _, others = self.gradients.get(column.entry, (0, ()))
                self.gradients[column.entry] = number, (*others, registers[-1])
            self.values.append(
                ReadValue(
                    column.entry,
                    column.name,
                    registers[-1],
                    Layout((last - first,), (1,), 0, column.dtype),
                    column.begin + first * width,
                    (last - first) * width,
                    number,
                    number,
                    lasting,
                    written=number if column.writes else None,
                    reach=whole is None and not column.eased,
                    start=number,
                    part_of=None if whole is None else whole.register,
                )
            )
        plains = [Register(self.before.outline.registers + plain) for plain in row.plains]
        region = _region(update, row, None if in_parts else place, first, last)
        self.regions.append(
            Run(region, (*registers, *plains), (), late=LateChunk(late, first, last))
        )


def _streamed(row: Row) -> Row:
    """A row of which nothing rests on the device."""
    return replace(row, columns=tuple(replace(column, resident=False) for column in row.columns))


def _other_operands(row: Row, place: int, count: int) -> Row:
    """What comes in chunks to update `count` elements of column `place`: all columns but that."""
    others = tuple(column for n, column in enumerate(row.columns) if n != place)
    return replace(row, numel=count, columns=others)


def _chunk_elements(row: Row, room_bytes: int | None, late: LateRows) -> int:
    """Elements of a chunk of a row of `late`; `room_bytes` as above."""
    share = set_bytes(row, row.numel)
    if room_bytes is not None:
        widest = max(column.dtype.itemsize for column in row.columns)
        least = set_bytes(row, min(row.numel, late.least_bytes // widest))
        share = max(room_bytes // LANES, min(least, room_bytes // FEWEST_LANES))
    return chunk_elements(row, share, late.chunk_bytes) or CHUNK_ELEMENTS


def _region(update: LateUpdate, row: Row, whole: int | None, first: int, last: int) -> Region:
    """The region of a chunk of a late update. It takes as long as that chunk in a step, and its
    costs are the same.

    row    of the update, streamed
    whole  which column is given whole; None: of each it is given the chunk
    """
    made, text = chunk_region(update.name, row, first, last), row.columns[update.weight].name
    if whole is None:
        return replace(made, text=text)
    within = partial(_update_within, row.compute, whole, first, last)
    return replace(made, text=text, call=within)


def _update_within(
    compute: ChunkFunction, place: int, first: int, last: int, *values: Any
) -> tuple[Any, ...]:
    """Compute elements [first, last) of a row, of one of whose columns all are given."""
    given = list(values)
    whole: Tensor = given[place]
    given[place] = whole.as_strided((last - first,), (1,), whole.storage_offset() + first)
    compute(first, last, given)
    return ()
