"""Elementwise ops on tiered tensors, whatever their size, run as a step schedule.

Where the operands of a row have different layouts, the caller takes another path (`dispatch.py`):
gather whole tensors, compute, write back. A row computes on a range of its elements (`Chunked`), or
many rows compute at once (`_JointCall`).

List ops that come again in every step reuse their schedule (`repeats.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zcompile.errors import BudgetExceeded
from zcompile.ir.optimizer_step import ChunkFunction, Column, Row, lower_step
from zcompile.ir.partition import Partition
from zcompile.ir.schedule import EntryIndex, Register, Schedule
from zcompile.ir.torch_compat import Dispatched, trees
from zcompile.ir.types import Layout
from zcompile.runtime.eager.own_kernels import computes
from zcompile.runtime.eager.rows import (
    Application,
    CopyCasts,
    can_run_as_lists,
    column_of,
)
from zcompile.runtime.eager.unbacked import Unbacked
from zcompile.runtime.late import changes_made
from zcompile.runtime.session import session_of
from zcompile.runtime.store.store import Deferred, Entry, as_they_rest
from zcompile.runtime.transfer.interrupts import deferred_interrupts
from zcompile.runtime.widening import batches, most_wide
from zcompile.runtime.widening import widened as widened_together

# --- Streaming ---

Learn = Callable[[Schedule, Sequence[Entry], Sequence[Any]], None]
"""Called with a schedule that is about to run, its entries and its inputs."""


def stream(
    func: Dispatched,
    apps: Sequence[Application],
    targets: Sequence["Tensor | None"],
    cls: type,
    learn: Learn | None = None,
) -> None:
    """Run the rows, in order; all their tiered operands belong to one store.

    raises  BudgetExceeded, and what a transfer raises
    """
    for app in apps:  # before anything is read of an operand: what is deferred of it may change
        for tensor in app.tensors():
            if isinstance(tensor, cls):
                tiered: Any = tensor
                tiered.entry.settle_updates()
    for app in apps:
        settle_unless_read_whole(cls, app)
        _apply_where_written_in_part(cls, app)
    call = StreamedCall(cls)
    rows = [call.row(app, target) for app, target in zip(apps, targets, strict=True)]
    session = session_of(call.entries[0])
    room = session.step_room
    key = (room, *call.signature)
    name = func._schema.name.removeprefix("aten::")
    build = partial(lower_step, name, rows, len(call.inputs), len(call.entries), room)
    try:
        schedule = session.step(key, build)
    except BudgetExceeded as error:
        if not session.reclaim(error.needed_bytes):
            raise session.split.too_small(error, f"one chunk of {name}", "its operands") from error
        stream(func, apps, targets, cls)  # anew, since operands rest elsewhere now
        return
    if not session.scratch_use.open(schedule):
        stream(func, apps, targets, cls)  # anew, through the window
        return
    if learn is not None:
        learn(schedule, call.entries, call.inputs)
    with as_they_rest(call.entries):
        session.late.run(schedule, call.inputs, call.entries, call.changing, copying=call.copying)


def settle_unless_read_whole(cls: type, app: Application) -> None:
    """Widen what rests narrow, unless the row only reads it, and all of it: then chunks are widened
    as they pass."""
    written = {id(tensor) for tensor in app.written()}
    for tensor in app.tensors():
        if isinstance(tensor, cls):
            tiered: Any = tensor
            if tiered.entry.narrow is not None and (id(tensor) in written or not tiered.covers):
                tiered.entry.settle()


def _apply_where_written_in_part(cls: type, app: Application) -> None:
    """Apply what is deferred of whole entries that a row writes in part: the row cannot do it."""
    for tensor in app.written():
        if isinstance(tensor, cls):
            tiered: Any = tensor
            if not tiered.covers:
                tiered.entry.store.deferrals.apply(tiered.entry)


class StreamedCall:
    """Collects the entries and plain inputs of one streamed call."""

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self.entries: list[Entry] = []
        self.inputs: list[Any] = []
        self.signature: list[object] = []
        self.changing: list[tuple[Entry, tuple[Deferred, ...], bool]] = []
        """Entries whose deferred changes the call makes on its way, and whether it writes them."""
        self.copying: list[tuple[Entry, torch.dtype]] = []
        """Copies in another dtype that the call makes, of entries it writes."""

    def entry(self, entry: Entry) -> EntryIndex:
        self.entries.append(entry)
        return EntryIndex(len(self.entries) - 1)

    def input(self, value: Any) -> Register:
        self.inputs.append(value)
        return Register(len(self.inputs) - 1)

    def row(self, app: Application, target: "Tensor | None") -> Row:
        """target  receives the result of an op that makes a new tensor; None for in-place ops"""
        leaves: list[Any]
        leaves, spec = trees.tree_flatten((app.args, app.kwargs))
        part = self._partition_of(leaves)
        columns, plains, places = self._operands(app, leaves, target, part)
        kinds = [signature_of(leaf) for leaf in leaves if not isinstance(leaf, self._cls)]
        if part is not None:
            numel = part.own_count
        else:
            numel = next(t.numel() for t in app.tensors() if t.numel() != 1)
        changes = self._deferred_changes(columns, plains)
        wide = self._widened(columns)
        narrowed = self._narrow(columns, numel)
        joins = can_run_as_lists(app) and target is None
        on_host = self._is_for_host(columns, plains)
        kernels = session_of(self.entries[0]).config.steps_by_kernels and not on_host
        func = computes(app, kernels)
        lent = lent_for_reading(columns) if on_host else ()
        compute = Chunked(
            func,
            spec,
            places,
            len(columns),
            target is not None,
            changes,
            narrowed,
            joins,
            wide,
            lent,
            most_wide(session_of(self.entries[0]).device_budget),
        )
        return self._row(numel, columns, plains, compute, len(narrowed.pairs), kinds, on_host)

    def _row(
        self,
        numel: int,
        columns: Sequence[Column],
        plains: Sequence[Register],
        compute: ChunkFunction,
        copies: int,
        kinds: Sequence[object],
        on_host: bool,
    ) -> Row:
        """The row, whose schedule depends on what is added to the signature."""
        values = [self.inputs[plain] for plain in plains]
        awaits = session_of(self.entries[0]).any_on_device(values)
        row = Row(numel, tuple(columns), tuple(plains), compute, copies, awaits_compute=awaits)
        if on_host:
            row = row.resting_on_host()
        shapes = tuple(replace(column, entry=EntryIndex(0), name="") for column in row.columns)
        self.signature.append((compute, numel, shapes, tuple(kinds), on_host, awaits))
        return row

    def _is_for_host(self, columns: Sequence[Column], plains: Sequence[Register]) -> bool:
        """Whether the plan lets the host compute a row with these operands, and all of them rest
        there."""
        updates = session_of(self.entries[0]).host_updates
        if not updates.wanted:
            return False
        row = Row(0, tuple(columns), tuple(plains), _never)
        entries = [self.entries[column.entry] for column in columns]
        return updates.computes(row, entries, [self.inputs[plain] for plain in plains])

    def _partition_of(self, leaves: Sequence[Any]) -> Partition | None:
        """How all tiered operands of a row are divided over ranks; None, if they are not."""
        first: Any = next(leaf for leaf in leaves if isinstance(leaf, self._cls))
        part: Partition | None = first.entry.partition
        return part

    def _operands(
        self,
        app: Application,
        leaves: Sequence[Any],
        target: "Tensor | None",
        part: Partition | None,
    ) -> tuple[list[Column], list[Register], tuple[int, ...]]:
        """Tiered operands, plain ones, and which each is: n >= 0 a column, n < 0 plain -(n + 1)."""
        found: list[Any] = [t for t in app.written() if isinstance(t, self._cls)]
        written = {t.entry.key for t in found}
        columns: list[Column] = []
        plains: list[Register] = []
        places: list[int] = []
        seen: dict[int, int] = {}  # in p.mul_(p) both operands are one column
        for leaf in leaves if target is None else (*leaves, target):
            if isinstance(leaf, self._cls):
                tiered: Any = leaf
                key = tiered.entry.key
                if key not in seen:
                    seen[key] = len(columns)
                    columns.append(self._column(tiered, key in written or leaf is target))
                places.append(seen[key])
            else:
                if part is not None and isinstance(leaf, Tensor) and leaf.numel() == part.numel:
                    leaf = part.cut(leaf.detach().as_strided((part.numel,), (1,)))
                plains.append(self.input(leaf))
                places.append(-len(plains))
        return columns, plains, tuple(places)

    def _deferred_changes(
        self, columns: Sequence[Column], plains: list[Register]
    ) -> tuple[tuple[int, int, Deferred], ...]:
        """(column, plain, change) of what is deferred of the row's operands; adds to `plains`."""
        changes = []
        for index, column in enumerate(columns):
            entry = self.entries[column.entry]
            for change in entry.deferred:
                flat = Layout((1,), (1,), 0, change.layout.dtype)  # as chunks of any row lie
                changes.append((index, len(plains), replace(change, operand=None, layout=flat)))
                plains.append(self.input(change.operand))
            if entry.deferred:
                self.changing.append((entry, entry.deferred, column.writes))
        return tuple(changes)

    def _widened(self, columns: Sequence[Column]) -> "Widened":
        """Which operands rest narrow, and the dtypes that they are of."""
        rests = ((n, self.entries[column.entry].narrow) for n, column in enumerate(columns))
        return tuple((n, cast.dtype) for n, cast in rests if cast is not None)

    def _narrow(self, columns: list[Column], numel: int) -> CopyCasts:
        """Low-precision copies of what the row writes are written along; adds to `columns`."""
        pairs = []
        for index, column in enumerate(list(columns)):
            entry = self.entries[column.entry]
            part = entry.partition
            whole = entry.nbytes // column.dtype.itemsize if part is None else part.own_count
            if not column.writes or numel != whole:
                continue  # what is written in part is cast again before it is used
            for dtype in entry.copies:
                copy, _ = entry.copies[dtype]
                pairs.append((index, len(columns)))
                made = column_of(copy, self.entry(copy), dtype, writes=True)
                columns.append(replace(made, lasting=False, blank=True))  # nothing to bring ahead
                self.copying.append((entry, dtype))
        return CopyCasts(tuple(pairs))

    def _column(self, leaf: Unbacked, writes: bool) -> Column:
        entry, layout = leaf.entry, leaf.entry_layout
        others = any(c.layout.dtype != layout.dtype for c in entry.deferred)
        if others or (entry.on_device and entry.narrow is None):
            # Changed in place, as anything there; or asked of other elements than pass by here.
            entry.store.deferrals.apply(entry)
        narrow = entry.narrow
        dtype = layout.dtype if narrow is None else narrow.copy_dtype
        column = column_of(entry, self.entry(entry), dtype, writes=writes)
        begin = layout.offset * layout.dtype.itemsize
        # What is widened on its way is changed there, wherever it rests.
        return replace(column, begin=begin, eased=bool(entry.deferred) and narrow is None)


def signature_of(leaf: object) -> object:
    """What a schedule depends on of a plain operand."""
    if isinstance(leaf, Tensor):
        return (leaf.dtype, leaf.device, leaf.numel() == 1)
    return type(leaf)


# --- Deferred changes ---


def apply_deferred(entry: Entry) -> None:
    """Apply the changes that were deferred of an entry. raises  what a transfer raises"""
    session, layout = session_of(entry), entry.deferred[0].layout
    changes = tuple((0, n, replace(c, operand=None)) for n, c in enumerate(entry.deferred))
    operands = [change.operand for change in entry.deferred]
    here = session.can_view_in_place(entry)
    column = Column(EntryIndex(0), 0, layout.dtype, True, False, "a gradient", here)
    plains = tuple(Register(n) for n in range(len(operands)))
    numel = layout.numel if entry.partition is None else entry.partition.own_count
    row = Row(numel, (column,), plains, partial(_apply_changes, changes))
    room = session.step_room
    build = partial(lower_step, "what was deferred", [row], len(operands), 1, room)
    try:
        schedule = session.step(("deferred", room, numel, changes, here), build)
    except BudgetExceeded as error:
        if not session.reclaim(error.needed_bytes):
            raise session.split.too_small(error, "what was deferred", "its operands") from error
        apply_deferred(entry)
        return
    if not session.scratch_use.open(schedule):
        apply_deferred(entry)  # anew, through the window
        return
    with deferred_interrupts(), changes_made([(entry, entry.deferred, True)]):
        session.executor.run(schedule, operands, [entry])


def _apply_changes(
    changes: Sequence[tuple[int, int, Deferred]], first: int, last: int, values: Sequence[Any]
) -> None:
    """Apply deferred changes to one chunk."""
    for _, plain, change in changes:
        change.apply(values[0], values[1 + plain])


# --- Computing ---

Widened = tuple[tuple[int, torch.dtype], ...]
"""Columns that rest narrow, and the dtypes that they are computed in."""


def widened(values: Sequence[Any], columns: Widened) -> Sequence[Any]:
    """The values of a chunk, with those of `columns` in the dtype that they are of."""
    if not columns:
        return values
    found = [*values]
    for column, dtype in columns:
        found[column] = found[column].to(dtype)
    return found


Changes = tuple[tuple[int, int, Deferred], ...]
"""Deferred changes of operands: (column, which plain is the change's operand, change)."""


def changed(
    values: Sequence[Any], columns: int, wide: Widened, changes: Changes, lent: Sequence[int]
) -> Sequence[Any]:
    """The values of a chunk as its row is to read them, widened and with deferred changes made.

    columns  how many of the values are tiered operands; plain ones follow
    lent     columns that are read where they rest, so that changes are made in a copy
    """
    values = widened(values, wide)
    if not changes:
        return values
    made = {column for column, _ in wide}
    copied = [*values]
    for column in {column for column, _, _ in changes}:
        if column in lent and column not in made:
            copied[column] = copied[column].clone()
    for column, plain, change in changes:
        change.apply(copied[column], copied[columns + plain])
    return copied


def lent_for_reading(columns: Sequence[Column]) -> tuple[int, ...]:
    """Which operands are read, and not written."""
    return tuple(n for n, column in enumerate(columns) if not column.writes)


def _never(first: int, last: int, values: Sequence[Any]) -> None:
    raise AssertionError("a row that is only looked at is not computed")


@dataclass(frozen=True)
class Chunked:
    """Applies an op to a range of elements: columns are chunks already, plain tensors are cut.

    func      the op, or a kernel of ours in its place
    changes   deferred changes to apply before: (column, which plain is the operand, change)
    narrowed  casts to make afterwards
    widened   columns that are narrower than they are computed with, and the dtypes of that
    in_lists  rows that differ in their operands only are computed in one call
    lent      columns that are read where they rest: changes are made in a copy of the chunk
    most      bytes of rows that may be wide at once, if one alone does not take more
    """

    func: Callable[..., Any]
    spec: Any
    places: tuple[int, ...]
    columns: int
    to_target: bool
    changes: Changes
    narrowed: CopyCasts
    in_lists: bool
    widened: Widened = ()
    lent: tuple[int, ...] = ()
    most: int = 0

    def joins(self, other: object) -> bool:
        """Whether rows with these two computations may be computed in one call."""
        return self.in_lists and self == other

    def joint(self, rows: Sequence[Row]) -> Callable[..., tuple[Any, ...]]:
        """The computation of many such rows: at once, or, of operands that are widened for it, of
        as many at once as may be wide together."""
        if not self.widened:
            return self._joint_call(rows)
        itemsize = sum(dtype.itemsize for _, dtype in self.widened)
        sizes = [row.numel * itemsize for row in rows]
        found = [self._joint_call(rows[x]) for x in batches(sizes, self.most)]
        return found[0] if len(found) == 1 else _JointCalls(tuple(found))

    def _joint_call(self, rows: Sequence[Row]) -> "_JointCall":
        columns, width = self.columns, self.columns + len(rows[0].plains)
        starts = range(0, width * len(rows), width)
        numbers: tuple[list[Any], dict[str, Any]] = trees.tree_unflatten(
            range(len(self.places)), self.spec
        )

        def where(leaf: int) -> list[int]:
            place = self.places[leaf]
            return [first + (place if place >= 0 else columns - place - 1) for first in starts]

        def filled(number: Any) -> _Operand:
            if isinstance(number, list):
                found = [where(leaf) for leaf in number]
                chosen = [each[row] for row in range(len(rows)) for each in found]
                return _Operand(True, any(self.places[n] < 0 for n in number), tuple(chosen))
            return _Operand(False, self.places[number] < 0, (where(number)[0],))

        args, kwargs = numbers
        return _JointCall(
            self.func,
            tuple(filled(number) for number in args),
            {name: filled(number) for name, number in kwargs.items()},
            tuple(row.numel for row in rows),
            columns,
            width,
            self.changes,
            self.narrowed,
            self.widened,
        )

    def __call__(self, first: int, last: int, values: Sequence[Any]) -> None:
        values = changed(values, self.columns, self.widened, self.changes, self.lent)
        leaves = []
        for place in self.places:
            if place >= 0:
                leaves.append(values[place])
            else:
                leaves.append(range_of(values[self.columns - place - 1], first, last))
        target = leaves.pop() if self.to_target else None
        args, kwargs = trees.tree_unflatten(leaves, self.spec)
        result = self.func(*args, **kwargs)
        if target is not None:
            target.copy_(result[0] if isinstance(result, list | tuple) else result)
        self.narrowed(first, last, values)


@dataclass(frozen=True)
class _Operand:
    """An operand of a call for many rows.

    listed  a list with so many items of each row; else one value, that of the first row
    plain   no column, so that it is still as wide as its row
    where   indices of the values
    """

    listed: bool
    plain: bool
    where: tuple[int, ...]

    def of(self, values: Sequence[Any], numels: Sequence[int]) -> Any:
        """The operand, taken from the values of all rows."""
        found = [values[at] for at in self.where]
        if self.plain:
            each = max(1, len(found) // len(numels))
            found = [range_of(value, 0, numels[n // each]) for n, value in enumerate(found)]
        return found if self.listed else found[0]


@dataclass(frozen=True)
class _JointCall:
    """Applies a list op to many whole rows at once, as it was called.

    columns  how many of the values of a row are tiered operands; plain ones follow
    width    how many values a row has
    changes  deferred changes of what is widened, made in the wide values. Those of other operands
             are applied before such rows rest in reach, so that only a simulated step joins them
    """

    func: Callable[..., Any]
    args: tuple[_Operand, ...]
    kwargs: dict[str, _Operand]
    numels: tuple[int, ...]
    columns: int
    width: int
    changes: Changes
    narrowed: CopyCasts
    widened: Widened

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        given = self._changed(values) if self.widened or self.changes else values
        numels = self.numels
        kwargs = {name: operand.of(given, numels) for name, operand in self.kwargs.items()}
        self.func(*(operand.of(given, numels) for operand in self.args), **kwargs)
        if self.narrowed.pairs:
            for row, numel in enumerate(numels):
                self.narrowed(0, numel, values[row * self.width : (row + 1) * self.width])
        return ()

    def _changed(self, values: Sequence[Any]) -> Sequence[Any]:
        """As `changed`, of all rows."""
        found, end, wide = [*values], len(self.numels) * self.width, dict[int, list[Tensor]]()
        for column, dtype in self.widened:
            wide[column] = widened_together(values[column : end : self.width], dtype)
            found[column : end : self.width] = wide[column]
        for column, plain, change in self.changes:
            assert column in wide, "a change waits for what is computed where it rests"
            operands = values[self.columns + plain : end : self.width]
            change.apply_to_each(wide[column], operands)
        return found


@dataclass(frozen=True)
class _JointCalls:
    """One after the other, each with the values of its rows."""

    calls: tuple[_JointCall, ...]

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        begin = 0
        for call in self.calls:
            end = begin + call.width * len(call.numels)
            call(*values[begin:end])
            begin = end
        return ()


def range_of(value: Any, first: int, last: int) -> Any:
    """Elements [first, last) of a plain operand; of a scalar, itself."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.numel() == 1:
        return value.reshape(1)
    return value.as_strided((last - first,), (1,), value.storage_offset() + first)
