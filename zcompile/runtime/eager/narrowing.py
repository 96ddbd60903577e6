"""Making the narrow copies of parameters, and keeping them fresh in an optimizer's step."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zcompile.errors import BudgetExceeded
from zcompile.ir.optimizer_step import Column, Row, lower_step
from zcompile.ir.schedule import Cast, EntryIndex
from zcompile.ir.types import Kind
from zcompile.runtime.session import session_of
from zcompile.runtime.store.store import Entry


@dataclass(frozen=True)
class Narrowing:
    """Casts one column of a chunk into another: (from, to), as indices of columns."""

    pairs: tuple[tuple[int, int], ...]

    def __call__(self, first: int, last: int, values: Sequence[Any]) -> None:
        for wide, narrow in self.pairs:
            values[narrow].copy_(values[wide])


def make_copy(entry: Entry, cast: Cast) -> None:
    """Make `entry.copies[cast.narrow]`, or make it again. raises  TierFull, and what a transfer
    raises"""
    session, numel = session_of(entry), entry.nbytes // cast.wide.itemsize
    copy = copy_of(entry, cast.narrow, numel)
    version = entry.version
    columns = (
        column_of(entry, EntryIndex(0), cast.wide, writes=False),
        column_of(copy, EntryIndex(1), cast.narrow, writes=True),
    )
    row = Row(numel, columns, (), Narrowing(((0, 1),)))
    build = partial(lower_step, "a copy in another dtype", [row], 0, 2, session.window_room)
    kind = ("copy", numel, cast, tuple(column.resident for column in columns))
    try:
        schedule = session.step(kind, build)
    except BudgetExceeded as error:
        if not session.relieve(error.needed_bytes):
            raise
        make_copy(entry, cast)  # anew, since they rest elsewhere now
        return
    session.executor.run(schedule, [], [entry, copy])
    entry.copies[cast.narrow] = (copy, version)


def copy_of(entry: Entry, dtype: torch.dtype, numel: int) -> Entry:
    """The entry of a copy, blank, so that what will be written over is not read before."""
    if dtype in entry.copies:
        copy, _ = entry.copies[dtype]
        entry.copies[dtype] = (copy, -1)  # not fresh until it is written, also if that fails
        entry.store.zero(copy)
        return copy
    name = f"{entry.name} in {str(dtype).removeprefix('torch.')}"
    return entry.store.create(name, Kind.COPY, numel * dtype.itemsize)


def column_of(entry: Entry, index: EntryIndex, dtype: torch.dtype, *, writes: bool) -> Column:
    """All of an entry as an operand."""
    resident = entry.store.lendable(entry) and not entry.deferred
    far = entry.home == "disk"
    return Column(index, 0, dtype, writes, entry.kind.lasting, entry.name, resident, far)
