"""Defines late updates: rows of an optimizer's step that the next forward computes.

A step fetches each parameter with its gradient and states, and stores what it has written; the
forward behind it fetches the parameter again, and nothing computes meanwhile that could hide the
step. A *late update* is computed where the next forward has the parameter on the device, right
before the first region that reads it. So it is brought once for both, and its states come and go
behind the regions of other parameters.

Late are updates of one row (`ir/optimizer_step.py`), all of whose operands are the parameter, its
gradient and its states, and which is all that a step does to these. `passes/late_updates.py` writes
them into a forward, `planner/late_step.py` into the record of a step; at run time they wait in
`runtime/late.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from zcompile.ir.optimizer_step import CHUNK_BYTES, LEAST_PACED_BYTES, Column, Row
from zcompile.ir.schedule import EntryIndex, Register
from zcompile.ir.types import EntryKind

TAKING_PART = (EntryKind.PARAM, EntryKind.GRAD, EntryKind.STATE, EntryKind.COPY)
"""Kinds of entries that a late update reads or writes."""


@dataclass(frozen=True)
class LateUpdate:
    """An update that joins a forward.

    name    of the op
    row     its columns name entries by the forward's indices, or by larger ones; its plains are
            numbers among the plain operands of all late updates of the call
    weight  which column is the parameter
    """

    name: str
    row: Row
    weight: int

    @property
    def entry(self) -> EntryIndex:
        """The parameter."""
        return self.row.columns[self.weight].entry


@dataclass(frozen=True)
class LateRows:
    """The late updates of a call of a forward, in terms of that call.

    updates      in the order of the step
    entries      those that the forward does not name itself: their indices follow its own
    names        of these
    plains       number of plain operands
    chunk_bytes  of an operand, at most
    least_bytes  of an operand in a chunk, where a share of what it streams through has room: less
                 is mostly overhead
    """

    updates: tuple[LateUpdate, ...] = ()
    entries: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()
    plains: int = 0
    chunk_bytes: int = CHUNK_BYTES
    least_bytes: int = LEAST_PACED_BYTES

    def with_rows(
        self, name: str, rows: Sequence[Row], inputs: int, of: Sequence[Any], call: Sequence[Any]
    ) -> "LateRows":
        """These, and rows of one more call of a step.

        inputs  number of plain operands of that call
        of      what its rows name by their indices: entries, or what stands for them
        call    what the forward names by its own, in the same terms
        """
        index: dict[Any, int] = {}
        for n, entry in enumerate(call):  # which may name one twice
            index.setdefault(entry, n)
        entries, names, updates = [*self.entries], [*self.names], [*self.updates]
        index |= {entry: len(call) + n for n, entry in enumerate(entries)}
        for row in rows:
            columns = []
            for column in row.columns:
                entry = of[column.entry]
                if entry not in index:
                    index[entry] = len(call) + len(entries)
                    entries.append(entry)
                    names.append(column.name)
                columns.append(replace(column, entry=EntryIndex(index[entry])))
            plains = tuple(Register(self.plains + plain) for plain in row.plains)
            (weight,) = (n for n, c in enumerate(columns) if c.entry < len(call))
            made = replace(row, columns=tuple(columns), plains=plains)
            updates.append(LateUpdate(name, made, weight))
        return replace(
            self,
            updates=tuple(updates),
            entries=tuple(entries),
            names=tuple(names),
            plains=self.plains + inputs,
        )


def is_update(kinds: Sequence[EntryKind], row: Row) -> bool:
    """Whether a row writes one parameter, reads a gradient, and else reads or writes states. It may
    write the gradient too, as where a scaler of losses has it unscaled, and a copy of the parameter
    in another dtype along.

    kinds  of the entry of each of its columns
    """
    written = [kind for kind, column in zip(kinds, row.columns, strict=True) if column.writes]
    read = [kind for kind, column in zip(kinds, row.columns, strict=True) if not column.writes]
    return (
        written.count(EntryKind.PARAM) == 1
        and EntryKind.GRAD in kinds
        and EntryKind.PARAM not in read
        and EntryKind.COPY not in read
        and written.count(EntryKind.COPY) <= 1
        and all(kind in TAKING_PART for kind in kinds)
    )


def weight_of(kinds: Sequence[EntryKind], row: Row) -> Column:
    """The column of the parameter that an update writes."""
    return next(
        column
        for kind, column in zip(kinds, row.columns, strict=True)
        if column.writes and kind is EntryKind.PARAM
    )
