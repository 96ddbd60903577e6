"""Writes late updates into the region program of the forward that computes them."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from zcompile.ir.late_updates import LateRows, LateUpdate
from zcompile.ir.optimizer_step import (
    CHUNK_ELEMENTS,
    LEAST_PACED_BYTES,
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
)
from zcompile.ir.types import Layout, Region

LANES = 16
"""Chunks of states and gradient take at most one part in so many of the streaming buffer: they come
beside parameters, some of them ahead."""
FEWEST_LANES = 4
"""The same of chunks of `LEAST_PACED_BYTES`: smaller ones are mostly overhead."""


def reads_once(program: RegionProgram, entry: EntryIndex, row: Row, weight: Column) -> bool:
    """Whether the values that a forward reads of a parameter are all of it, each byte once, in the
    dtype in which it is updated."""
    values = sorted((v for v in program.values if v.entry == entry), key=lambda v: v.begin)
    ends = [0, *(v.begin + v.nbytes for v in values)]
    return (
        bool(values)
        and weight.begin == 0
        and ends[-1] == row.numel * weight.dtype.itemsize
        and all(v.begin == end for v, end in zip(values, ends, strict=False))
        and all(
            v.cast is None and v.layout.dtype == weight.dtype and v.layout.covers(v.nbytes)
            for v in values
        )
        and all(v.begin % (CHUNK_ELEMENTS * weight.dtype.itemsize) == 0 for v in values)
    )


def with_late_updates(program: RegionProgram, room_bytes: int | None) -> RegionProgram:
    """The program of a forward, with its late updates right before the first readers of their
    parameters.

        region 0: mm reads w                     late 0: adamw w, g, m, v
                                      ->         region 1: mm reads w
                                                 w, m, v go home

    The chunks of an update are regions of their own, which read the parameter, and a chunk of each
    other operand.

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
        update_of = {
            update.row.columns[update.weight].entry: number
            for number, update in enumerate(self.late.updates)
        }
        self.registers = outline.registers + self.late.plains
        own = len(outline.handles) + len(outline.copies)
        names = {own + n: name for n, name in enumerate(self.late.names)}
        reading: dict[int, list[ReadValue]] = {}
        for value in before.values:
            if value.entry in update_of:
                reading.setdefault(value.first, []).append(value)
        first_update: dict[Register, int] = {}
        departures = []
        for n, run in enumerate(before.regions):
            begin = len(self.regions)
            for value in reading.get(n, ()):
                first_update[value.register] = len(self.regions)
                self._update(update_of[value.entry], value)
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
            first = first_update.get(value.register)
            self.values.append(
                value._replace(
                    first=self.number[value.first] if first is None else first,
                    last=self.number[value.last],
                    start=self.number[value.start],
                    writes=first is not None,
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

    def _update(self, number: int, value: ReadValue) -> None:
        """Add the chunks of an update, by its number, of the elements of `value`."""
        update = self.late.updates[number]
        row = update.row
        begin = value.begin // row.columns[update.weight].dtype.itemsize
        count = value.nbytes // row.columns[update.weight].dtype.itemsize
        others = replace(
            row,
            numel=count,
            columns=tuple(
                replace(c, resident=False) for n, c in enumerate(row.columns) if n != update.weight
            ),
        )
        elements = chunk_elements(others, self._share(others), self.late.chunk_bytes)
        elements = elements or CHUNK_ELEMENTS
        for first in range(begin, begin + count, elements):
            last = min(begin + count, first + elements)
            self._chunk(number, value, first, last, begin)

    def _share(self, row: Row) -> int:
        """Bytes for one chunk of all operands of a row."""
        if self.room_bytes is None:
            return set_bytes(row, row.numel)
        widest = max(column.dtype.itemsize for column in row.columns)
        least = set_bytes(row, min(row.numel, LEAST_PACED_BYTES // widest))
        return max(self.room_bytes // LANES, min(least, self.room_bytes // FEWEST_LANES))

    def _chunk(self, late: int, value: ReadValue, first: int, last: int, begin: int) -> None:
        """Add the update of elements [first, last), where those of `value` begin at `begin`."""
        update, number = self.late.updates[late], len(self.regions)
        row = update.row
        registers = []
        for n, column in enumerate(row.columns):
            if n == update.weight:
                registers.append(value.register)
                continue
            registers.append(self._register())
            width = column.dtype.itemsize
            if not column.lasting:
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
                    column.lasting,
                    writes=column.writes,
                    reach=not column.eased,
                    start=number,
                )
            )
        plains = [Register(self.before.outline.registers + plain) for plain in row.plains]
        region = _region(update, first, last, begin)
        self.regions.append(
            Run(region, (*registers, *plains), (), late=LateChunk(late, first, last))
        )


def _region(update: LateUpdate, first: int, last: int, begin: int) -> Region:
    """The region of a chunk of a late update. It takes as long as that chunk in a step, and its
    costs are the same."""
    columns = tuple(replace(column, resident=False) for column in update.row.columns)
    made = chunk_region(update.name, replace(update.row, columns=columns), first, last)
    call = partial(_update_within, update.row.compute, update.weight, first, last, begin)
    return replace(made, text=update.row.columns[update.weight].name, call=call)


def _update_within(
    compute: ChunkFunction, weight: int, first: int, last: int, begin: int, *values: Any
) -> tuple[Any, ...]:
    """Compute elements [first, last) of a row, of whose parameter a value is given that begins at
    element `begin`."""
    given = list(values)
    whole: Tensor = given[weight]
    offset = whole.storage_offset() + first - begin
    given[weight] = whole.as_strided((last - first,), (1,), offset)
    compute(first, last, given)
    return ()
