"""Elementwise ops on tiered tensors, whatever their size, run as a step schedule.

Rows whose operands do not lie alike make the caller take the other road: gather whole, compute,
write back.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zcompile.errors import BudgetExceeded
from zcompile.ir.optimizer_step import Column, Row, lower_step
from zcompile.ir.schedule import EntryIndex, Register, Schedule
from zcompile.ir.torch_compat import Dispatched, trees
from zcompile.ir.types import Layout
from zcompile.runtime.eager.chunked import Chunked
from zcompile.runtime.eager.narrowing import Narrowing, column_of, copy_of
from zcompile.runtime.eager.rows import Application, goes_in_one_call
from zcompile.runtime.eager.unbacked import Unbacked
from zcompile.runtime.session import Session, session_of
from zcompile.runtime.store.deferred import Deferred
from zcompile.runtime.store.near import is_near
from zcompile.runtime.store.store import Entry
from zcompile.runtime.transfer.interrupts import deferred_interrupts


class _Call:
    """Collects the entries and plain inputs of one streamed call."""

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self.entries: list[Entry] = []
        self.inputs: list[Any] = []
        self.signature: list[object] = []
        self.easing: list[tuple[Entry, tuple[Deferred, ...], bool]] = []
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
        columns, plains, places = self._operands(app, leaves, target)
        kinds = [_kind(leaf) for leaf in leaves if not isinstance(leaf, self._cls)]
        numel = next(t.numel() for t in app.tensors() if t.numel() != 1)
        eased = self._ease(columns, plains)
        narrowed = self._narrow(columns, numel)
        joins = goes_in_one_call(app) and target is None
        shapes = [replace(column, entry=EntryIndex(0), name="") for column in columns]
        compute = Chunked(
            app.func, spec, places, len(columns), target is not None, eased, narrowed, joins
        )
        how = app.func, spec, places, target is None, eased, narrowed, joins
        self.signature.append((how, numel, tuple(shapes), tuple(kinds)))
        return Row(numel, tuple(columns), tuple(plains), compute)

    def _operands(
        self, app: Application, leaves: Sequence[Any], target: "Tensor | None"
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
                plains.append(self.input(leaf))
                places.append(-len(plains))
        return columns, plains, tuple(places)

    def _ease(
        self, columns: Sequence[Column], plains: list[Register]
    ) -> tuple[tuple[int, int, Deferred], ...]:
        """(column, plain, change) of what is deferred of the row's operands; adds to `plains`."""
        eased = []
        for index, column in enumerate(columns):
            entry = self.entries[column.entry]
            for change in entry.deferred:
                flat = Layout((1,), (1,), 0, change.layout.dtype)  # as chunks of any row lie
                eased.append((index, len(plains), replace(change, operand=None, layout=flat)))
                plains.append(self.input(change.operand))
            if entry.deferred:
                self.easing.append((entry, entry.deferred, column.writes))
        return tuple(eased)

    def _narrow(self, columns: list[Column], numel: int) -> Narrowing:
        """Copies in other dtypes of what the row writes are written along; adds to `columns`."""
        pairs = []
        for index, column in enumerate(list(columns)):
            entry = self.entries[column.entry]
            if not column.writes or numel * column.dtype.itemsize != entry.nbytes:
                continue  # what is written in part is cast again before it is used
            for dtype in entry.copies:
                copy = copy_of(entry, dtype, numel)
                pairs.append((index, len(columns)))
                made = column_of(copy, self.entry(copy), dtype, writes=True)
                columns.append(replace(made, lasting=False))  # blank; nothing to bring ahead
                self.copying.append((entry, dtype))
        return Narrowing(tuple(pairs))

    def _column(self, leaf: Unbacked, writes: bool) -> Column:
        entry, layout = leaf.entry, leaf.lies
        if is_near(entry) or any(c.layout.dtype != layout.dtype for c in entry.deferred):
            # Changed in place, as anything there; or asked of other elements than pass by here.
            entry.store.deferrals.settle(entry)
        column = column_of(entry, self.entry(entry), layout.dtype, writes=writes)
        begin = layout.offset * layout.dtype.itemsize
        return replace(column, begin=begin, eased=bool(entry.deferred))


def _kind(leaf: object) -> object:
    if isinstance(leaf, Tensor):
        return (leaf.dtype, leaf.device, leaf.numel() == 1)
    return type(leaf)


Learn = Callable[[Schedule, Sequence[Entry], Sequence[Any]], None]
"""Told of a schedule that is about to run, of its entries and of its inputs."""


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
    for app in apps:
        _settle_parts(cls, app)
    call = _Call(cls)
    rows = [call.row(app, target) for app, target in zip(apps, targets, strict=True)]
    session = session_of(call.entries[0])
    room = session.step_room
    key = (room, *call.signature)
    name = func._schema.name.removeprefix("aten::")
    build = partial(lower_step, name, rows, len(call.inputs), len(call.entries), room)
    try:
        schedule = session.step(key, build)
    except BudgetExceeded as error:
        if not session.relieve(error.needed_bytes):
            raise session.split.too_small(error, f"one chunk of {name}", "its operands") from error
        stream(func, apps, targets, cls, learn)  # anew, since operands rest elsewhere now
        return
    if not session.annex_use.open(schedule):
        stream(func, apps, targets, cls)  # anew, through the window
        return
    if learn is not None and not call.easing and not call.copying:
        learn(schedule, call.entries, call.inputs)
    _run_easing(session, schedule, call.inputs, call.entries, call.easing)
    for entry, dtype in call.copying:
        entry.copies[dtype] = (entry.copies[dtype][0], entry.version)


def _settle_parts(cls: type, app: Application) -> None:
    """What is deferred of a whole entry cannot be done by a row that writes a part of it."""
    for tensor in app.written():
        if isinstance(tensor, cls):
            tiered: Any = tensor
            if not tiered.covers:
                tiered.entry.store.deferrals.settle(tiered.entry)


def apply_deferred(entry: Entry) -> None:
    """Make the changes that were deferred of an entry. raises  what a transfer raises"""
    session, layout = session_of(entry), entry.deferred[0].layout
    changes = tuple((0, n, replace(c, operand=None)) for n, c in enumerate(entry.deferred))
    operands = [change.operand for change in entry.deferred]
    here = session.lendable(entry)
    column = Column(EntryIndex(0), 0, layout.dtype, True, False, "a gradient", here)
    plains = tuple(Register(n) for n in range(len(operands)))
    row = Row(layout.numel, (column,), plains, partial(_ease_chunk, changes))
    room = session.step_room
    build = partial(lower_step, "what was deferred", [row], len(operands), 1, room)
    try:
        schedule = session.step(("deferred", room, changes, here), build)
    except BudgetExceeded as error:
        if not session.relieve(error.needed_bytes):
            raise session.split.too_small(error, "what was deferred", "its operands") from error
        apply_deferred(entry)
        return
    if not session.annex_use.open(schedule):
        apply_deferred(entry)  # anew, through the window
        return
    _run_easing(session, schedule, operands, [entry], [(entry, entry.deferred, True)])


def _ease_chunk(
    changes: Sequence[tuple[int, int, Deferred]], first: int, last: int, values: Sequence[Any]
) -> None:
    for _, plain, change in changes:
        change.apply(values[0], values[1 + plain])


def _run_easing(
    session: Session,
    schedule: Schedule,
    inputs: list[Any],
    entries: Sequence[Entry],
    easing: Sequence[tuple[Entry, tuple[Deferred, ...], bool]],
) -> None:
    """Run a step that makes deferred changes itself. What it does not write back stays deferred."""
    written = {entry.key for entry, _, writes in easing if writes}
    with deferred_interrupts():  # one after the last write would leave it deferred once more
        for entry, _, _ in easing:
            entry.deferred = ()
        done = False
        try:
            session.executor.run(schedule, inputs, entries)
            done = True
        finally:
            for entry, changes, _ in easing:
                if not (done and entry.key in written):
                    entry.deferred = changes
