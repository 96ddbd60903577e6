"""Late updates wait here for the forward that computes them, or for somebody who asks for them
first.

Where the plan in force says so, a call of an optimizer leaves rows of it waiting
(`ir/late_updates.py`): their operands as they are, and plain ones by value, so that a learning rate
that changes afterwards changes nothing. The forward that the plan names takes them along. Whoever
else reads or writes an operand before finds it updated: all that waits is computed first, as the
step would have done it (`LateUpdates.settle`).

A forward that fails has computed some of its updates, or chunks of them. What these wrote goes
home, the rest waits on. Only where a chunk itself fails that changes its operands where they rest,
every use of these is refused from then on.
"""

import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from zcompile.errors import BudgetExceeded, Unsupported, UpdateBroken
from zcompile.ir.late_updates import LateRows, is_update, weight_of
from zcompile.ir.optimizer_step import Row, StepRoom, lower_step
from zcompile.ir.schedule import (
    SERIALS,
    Borrow,
    LateChunk,
    Register,
    Run,
    Schedule,
    Slot,
    Store,
    Ticket,
    Wait,
)
from zcompile.ir.types import HELD, EntryKind, EntryRef, Phase
from zcompile.runtime.store.store import Deferred, Entry, as_they_rest
from zcompile.runtime.transfer.interrupts import deferred_interrupts, uninterrupted

log = logging.getLogger(__name__)

NO_FORWARD = -1
"""The serial of no schedule."""
OFTEN = 3
"""Times in a row that what waits is asked for before the next forward: from then on nothing waits
any more."""

Changing = Sequence[tuple[Entry, tuple[Deferred, ...], bool]]
"""Entries whose deferred changes a call makes on its way, these, and whether it writes them."""


class Runner(Protocol):
    """What late updates need of a session."""

    @property
    def is_walking(self) -> bool:
        """Whether a schedule is being walked."""

    @property
    def is_updating(self) -> bool:
        """Whether an optimizer makes its step now, and no call of the model is on its way."""

    @property
    def step_room(self) -> StepRoom:
        """The room that an optimizer's step streams through now."""

    @property
    def window_room(self) -> StepRoom:
        """The same, of the arena."""

    def step(self, key: Hashable, build: Callable[[], Schedule]) -> Schedule:
        """The step schedule of `key`; built once."""

    def run_noted_ops(self) -> None:
        """Run the ops of a step that wait for the others."""

    def can_open(self, schedule: Schedule) -> bool:
        """Whether the slots of a step are there."""

    def walk(
        self, schedule: Schedule, inputs: list[Any], entries: Sequence[Entry], of: Schedule | None
    ) -> None:
        """Walk a part of the call `of`, which is recorded in its place; None: nothing is."""

    def note_call(self, schedule: Schedule, entries: Sequence[Entry]) -> None:
        """Record a call of which nothing is walked yet."""

    def holds(self, entry: Entry) -> bool:
        """Whether an entry is alive."""

    def reclaim(self, needed_bytes: int) -> bool:
        """Make room in the arena."""

    def updates_in_the_way(self) -> None:
        """Step after step, what waits is asked for before the next forward."""


# --- Deferred changes on the way ---


@contextmanager
def changes_made(changing: Changing) -> Iterator[None]:
    """Within, a call makes deferred changes itself. What it does not write back stays deferred."""
    for entry, _, _ in changing:
        entry.defer_only(())
    done = False
    try:
        yield
        done = True
    finally:
        for entry, changes, writes in changing:
            if not (done and writes):
                entry.defer_only(changes)


Copying = Sequence[tuple[Entry, torch.dtype]]
"""Parameters, and the dtypes of copies of them, which a call that writes the parameters makes."""


@contextmanager
def copies_made(copying: Copying) -> Iterator[None]:
    """Within, a call makes copies anew: they are blank until then, so that their bytes need not be
    read, and stale, also if the call fails."""
    for entry, dtype in copying:
        entry.blank_copy(dtype)
    yield
    for entry, dtype in copying:
        entry.copy_made(dtype, entry.version)


# --- What waits ---


@dataclass
class WaitingRows:
    """Rows of one call of an optimizer.

    schedule  of the whole call
    rows      numbers of the rows that wait
    inputs    its plain operands; those of rows that wait are copies
    entries   by the indices of the rows
    changing  entries whose deferred changes the rows make on their way
    forward   serial of the forward that is to compute them
    step      number of the optimizer's step
    kept      keeps gradients and states alive, whoever drops them: by their keys
    """

    schedule: Schedule
    rows: tuple[int, ...]
    inputs: list[Any]
    entries: Sequence[Entry]
    changing: Changing
    forward: int
    step: int
    kept: dict[int, object] = field(default_factory=dict)

    def entries_of(self, row: int) -> list[Entry]:
        """The operands of a row."""
        return [self.entries[column.entry] for column in self.schedule.rows[row].columns]

    def copying(self, rows: Collection[int]) -> Copying:
        """The copies that rows make of their parameters, whole."""
        if self.forward == NO_FORWARD:
            return []  # of a part, perhaps: the copy stays stale
        writing = (n for n in rows if any(c.blank for c in self.schedule.rows[n].columns))
        return [(e, dtype) for n in writing for e in self.entries_of(n) for dtype in e.copies]

    @cached_property
    def weights(self) -> Mapping[int, int]:
        """Row -> the index of the parameter that it updates."""
        found = {}
        for row in self.rows:
            kinds = [entry.kind for entry in self.entries_of(row)]
            found[row] = int(weight_of(kinds, self.schedule.rows[row]).entry)
        return found

    def weight(self, row: int) -> Entry:
        """The parameter that a row updates."""
        return self.entries[self.weights[row]]

    def alone_keeps(self, entry: Entry) -> bool:
        """Whether nobody else keeps an operand alive: no `.grad`, no list of the user, no graph."""
        key = entry.key
        return key in self.kept and _references_to_value(self.kept, key) == _ONE_REFERENCE

    def changes_of(self, rows: Collection[int]) -> Changing:
        """Those of `changing` that these rows make."""
        keys = {entry.key for row in rows for entry in self.entries_of(row)}
        return [change for change in self.changing if change[0].key in keys]


@dataclass(frozen=True)
class Broken:
    """Stands in an entry that was written in part; every use of it raises."""

    name: str
    step: int
    why: str

    def settle(self) -> None:
        """raises  UpdateBroken"""
        raise UpdateBroken(self.name, self.step, self.why)


def told_of(error: BaseException) -> str:
    """An error that is told within another: its type and what it says."""
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class JoiningRows:
    """All that waits for one forward.

    late     in terms of the call: its entries are (group, index there)
    groups   the groups, and their rows that wait
    entries  those that the forward does not name itself
    key      equal where `late` is
    """

    late: LateRows
    groups: tuple[WaitingRows, ...]
    entries: tuple[Entry, ...]
    key: Hashable

    @property
    def inputs(self) -> list[Any]:
        return [value for group in self.groups for value in group.inputs]

    def drop(self, entry: Entry) -> None:
        """Keep an entry alive no longer: it was used."""
        for group in self.groups:
            group.kept.pop(entry.key, None)

    def update(self, number: int) -> tuple[WaitingRows, int]:
        """The group and the row of one of the updates, in order."""
        return [(group, row) for group in self.groups for row in group.rows][number]


class LateUpdates:
    """The late updates of a session.

    wanted  parameter whose update is to be late -> serial of the forward that is to compute it
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = weakref.ref(runner)
        self.wanted: Mapping[EntryRef, int] = {}
        self._waiting: list[WaitingRows] = []
        self._steps = self._asked_times = 0
        self._stepped = False
        self._broken = False
        self._joining: tuple[Hashable, LateRows] = ((), LateRows())

    @property
    def runner(self) -> Runner:
        runner = self._runner()
        assert runner is not None, "it asks, so it is there"
        return runner

    def want(self, forwards: Mapping[EntryRef, int]) -> None:
        """Let the updates of these parameters, and of no others, be late from here on."""
        self.wanted = forwards

    def whole_rows(self) -> list[tuple[Row, list[Entry], list[Any]]] | None:
        """Each row that waits, with the entries of its columns and its plain operands; None, if a
        forward has computed a part of one."""
        if any(group.forward == NO_FORWARD for group in self._waiting):
            return None
        return [
            (row, group.entries_of(number), [group.inputs[plain] for plain in row.plains])
            for group in self._waiting
            for number in group.rows
            if self.runner.holds(group.weight(number))
            for row in (group.schedule.rows[number],)
        ]

    def has(self, entries: Sequence[Entry]) -> bool:
        """Whether one of these waits here."""
        return any(entry.waits is self for entry in entries)

    def alone_keep(self, entry: Entry) -> bool:
        """Whether an entry is alive for late updates only."""
        return any(group.alone_keeps(entry) for group in self._waiting)

    @property
    def steps(self) -> int:
        """Number of steps of optimizers before this one."""
        return self._steps

    @property
    def rows(self) -> int:
        """Number of updates that wait."""
        return sum(len(group.rows) for group in self._waiting)

    # A call of an optimizer.

    def run(
        self,
        schedule: Schedule,
        inputs: list[Any],
        entries: Sequence[Entry],
        changing: Changing = (),
        may_wait: bool = True,
        copying: Copying = (),
    ) -> None:
        """Run a call of an optimizer, but for the rows whose updates are late.

        may_wait  False: nobody may wait, since somebody asks for what the call writes
        raises    what a transfer raises
        """
        may = may_wait and self.wanted and self.runner.is_updating
        late = self._late_rows(schedule, inputs, entries) if may else {}
        if not late:
            with deferred_interrupts(), changes_made(changing), copies_made(copying):
                self.runner.walk(schedule, inputs, entries, schedule)
            return
        with deferred_interrupts():
            rest = tuple(n for n in range(len(schedule.rows)) if n not in late)
            inputs = [*inputs]
            groups = self._put_off(schedule, late, inputs, entries, changing)
            if rest:
                self._run_others(groups, rest, schedule)
            else:
                self.runner.note_call(schedule, entries)
            if self.wanted:
                self._wait(groups)
                return
            self._run_after_all(groups)

    def _run_after_all(self, groups: Sequence[WaitingRows]) -> None:
        """Run what was to wait: the plan was withdrawn to make room for the other rows."""
        left = [replace(group, forward=NO_FORWARD) for group in groups]
        while left:
            try:
                self._run_rows(left[0], left[0].rows, None)
            except (BudgetExceeded, Unsupported):  # before anything of it was computed
                self._wait(left)
                raise
            except BaseException as error:
                self._break(left[0], left[0].rows, error)
                self._wait(left[1:])
                raise
            left.pop(0)

    def _run_others(
        self, groups: Sequence[WaitingRows], rest: tuple[int, ...], of: Schedule
    ) -> None:
        """Run the rows of a call that do not wait; the others wait also where that fails."""
        try:
            self._run_rows(groups[0], rest, of)
        except (BudgetExceeded, Unsupported):  # before anything was computed: there was no call
            raise
        except BaseException:
            self._wait([g if self.wanted else replace(g, forward=NO_FORWARD) for g in groups])
            raise

    def broke_off(self, written: Mapping[str, Sequence[Entry]], error: BaseException) -> Broken:
        """Refuse every use of entries that a call of an optimizer has perhaps written in part.

        written  by the name of what is updated; those that wait were not touched
        """
        broken = Broken("", self._steps, told_of(error))
        for name, entries in written.items():
            broken = replace(broken, name=name)
            for entry in entries:
                if entry.waits is None:
                    self._broken = True
                    entry.wait_for(broken)
        return broken

    def _late_rows(
        self, schedule: Schedule, inputs: Sequence[Any], entries: Sequence[Entry]
    ) -> dict[int, int]:
        """Number of each row that may wait -> serial of the forward that it waits for."""
        found = {}
        used = Counter(entries[c.entry].key for row in schedule.rows for c in row.columns)
        for n, row in enumerate(schedule.rows):
            of = [entries[column.entry] for column in row.columns]
            if any(used[entry.key] > 1 for entry in of):
                continue  # as gradients that two parameters share
            kinds = [entry.kind for entry in of]
            if not is_update(kinds, row) or any(e.waits is not None for e in of):
                continue
            weight = entries[weight_of(kinds, row).entry]
            if any(e.copies for e in of if e is not weight):
                continue
            if len(weight.copies) != sum(column.blank for column in row.columns):
                continue  # copies that the row does not write along
            ref = weight.ref
            if ref in self.wanted and all(is_number(inputs[plain]) for plain in row.plains):
                found[n] = self.wanted[ref]
        return found

    def _put_off(
        self,
        schedule: Schedule,
        late: Mapping[int, int],
        inputs: list[Any],
        entries: Sequence[Entry],
        changing: Changing,
    ) -> list[WaitingRows]:
        """What is to wait, by the forward that it waits for."""
        for row in late:
            for plain in schedule.rows[row].plains:
                value = inputs[plain]
                inputs[plain] = value.clone() if isinstance(value, Tensor) else value
        groups = []
        for forward in dict.fromkeys(late.values()):
            rows = tuple(row for row, serial in late.items() if serial == forward)
            group = WaitingRows(schedule, rows, inputs, entries, changing, forward, self._steps)
            group.kept = {
                entry.key: entry.tie()
                for row in rows
                for entry in group.entries_of(row)
                if entry is not group.weight(row) and entry.tie is not None
            }
            groups.append(group)
        return groups

    def _wait(self, groups: Sequence[WaitingRows]) -> None:
        for group in groups:
            for row in group.rows:
                columns = group.schedule.rows[row].columns
                for column, entry in zip(columns, group.entries_of(row), strict=True):
                    entry.wait_for(self)
                    if column.writes and entry.kind is EntryKind.GRAD:
                        entry.written()  # what was measured of it is of before
        self._waiting += groups

    def step_ended(self) -> None:
        """An optimizer is done, perhaps not the only one of the step."""
        self._stepped = True

    # Whoever asks first.

    @uninterrupted
    def settle(self) -> None:
        """Compute all that waits: somebody uses an operand.

        raises  what a transfer raises; from then on each use of what is written in part raises
                UpdateBroken
        """
        if not self._waiting:
            return
        self.finish()
        self._asked_times += 1
        if self._asked_times >= OFTEN and self.wanted:
            self.wanted = {}
            self.runner.updates_in_the_way()

    @uninterrupted
    def finish(self) -> None:
        """As `settle`, when entries are about to move."""
        self.runner.run_noted_ops()
        if self._waiting and self.runner.is_walking:
            raise Unsupported(
                "a parameter, gradient or state whose update is late is used while a call of its "
                "model is running",
                "use it before the call, or after it",
            )
        waiting, self._waiting = self._waiting, []
        for group in waiting:
            _wait_no_more(group, group.rows)
        while waiting:
            group = waiting.pop(0)
            alive = tuple(row for row in group.rows if self.runner.holds(group.weight(row)))
            try:
                if alive:
                    self._run_rows(group, alive, None)
            except (BudgetExceeded, Unsupported):  # before anything was computed
                self._wait([replace(group, rows=alive), *waiting])
                raise
            except BaseException as error:
                self._break(group, alive, error)
                self._wait(waiting)
                raise

    def _run_rows(self, group: WaitingRows, rows: tuple[int, ...], of: Schedule | None) -> None:
        """Run some rows of a call now, where their operands rest now."""
        runner, schedule = self.runner, group.schedule
        chosen = [_as_it_rests(schedule.rows[n], group.entries) for n in rows]
        rests = tuple(column.resident for row in chosen for column in row.columns)

        def build(room: StepRoom) -> Schedule:
            lowered = partial(
                lower_step,
                schedule.name,
                chosen,
                schedule.inputs,
                len(schedule.names),
                room,
            )
            return runner.step(("rows", schedule.serial, rows, rests, room), lowered)

        try:
            made = build(runner.step_room)
            if not runner.can_open(made):
                made = build(runner.window_room)
        except BudgetExceeded as error:
            if not runner.reclaim(error.needed_bytes):
                raise
            self._run_rows(group, rows, of)  # anew, since operands rest elsewhere now
            return
        changes, copies = changes_made(group.changes_of(rows)), copies_made(group.copying(rows))
        with changes, copies, as_they_rest(group.entries):
            runner.walk(made, [*group.inputs], group.entries, of)

    # The forward that computes them.

    def prepare(self, schedule: Schedule, entries: Sequence[Entry]) -> None:
        """A call is about to run on these entries: settle, unless it computes what waits of
        them."""
        if schedule.phase is not Phase.STEP:
            self.runner.run_noted_ops()
        if self._stepped and schedule.phase is Phase.FORWARD:
            self._steps, self._stepped = self._steps + 1, False
        if self._broken:
            for entry in entries:
                if entry.waits is not None and entry.waits is not self:
                    entry.settle()
        if not self._waiting:
            return
        if schedule.gathers_inside:
            self.settle()
        asked = {entry.key for entry in entries if entry.waits is not None}
        if schedule.phase is Phase.FORWARD and asked:
            joining = self.joining(schedule, entries)
            if joining is None or len(asked) > len(joining.late.updates):
                self.settle()
        elif asked or schedule.phase is Phase.BACKWARD:
            self.settle()

    def joining(self, schedule: Schedule, entries: Sequence[Entry]) -> JoiningRows | None:
        """What waits for a forward, if all of its parameters are among these entries, each once."""
        groups = tuple(group for group in self._waiting if group.forward == schedule.serial)
        if not groups:
            return None
        index: dict[int, int] = {}
        for n, entry in enumerate(entries):
            index[entry.key] = n if entry.key not in index else -1
        weights = [[group.weight(row) for row in group.rows] for group in groups]
        places = [[index.get(entry.key, -1) for entry in of] for of in weights]
        if any(place < 0 for of in places for place in of):
            return None
        key = tuple(
            (group.schedule.serial, group.rows, tuple(of))
            for group, of in zip(groups, places, strict=True)
        )
        if self._joining[0] != key:
            self._joining = key, _joined(groups, places, len(entries))
        late = self._joining[1]
        extra = tuple(groups[group].entries[at] for group, at in late.entries)
        return JoiningRows(late, groups, extra, key)

    def held_bytes(self, schedule: Schedule, entries: Sequence[Entry]) -> int:
        """Bytes of gradients that stayed where backward made them, and that a call will let go
        of."""
        if not self._waiting or schedule.phase is not Phase.FORWARD:
            return 0
        joining = self.joining(schedule, entries)
        return sum(
            entry.place.nbytes
            for group in (() if joining is None else joining.groups)
            for row in group.rows
            for entry in group.entries_of(row)
            if entry.home == HELD and group.alone_keeps(entry)
        )

    @contextmanager
    def computed(self, joining: JoiningRows, made: "Progress") -> Iterator[None]:
        """Within, a forward computes what waits for it; `made` says how far it came."""
        changing = [c for group in joining.groups for c in group.changes_of(group.rows)]
        self._waiting = [g for g in self._waiting if all(g is not own for own in joining.groups)]
        for group in joining.groups:
            _wait_no_more(group, group.rows)
        copying = [c for group in joining.groups for c in group.copying(group.rows)]
        try:
            with (
                changes_made(changing),
                copies_made(copying),
                as_they_rest(joining.entries),
            ):
                yield
        except BaseException as error:
            self._fall_back(joining, made, error)
            raise
        self._asked_times = 0
        for group in joining.groups:
            group.kept.clear()

    def _fall_back(self, joining: JoiningRows, made: "Progress", error: BaseException) -> None:
        """A forward broke off: what it has not computed waits on."""
        left: dict[int, list[int]] = {}
        for number in range(len(joining.late.updates)):
            group, row = joining.update(number)
            ranges = made.left(number)
            if made.is_torn(number):
                self._break(group, (row,), error)
            elif made.has_begun(number) and ranges:
                self._wait([_rest_of(group, row, ranges)])
            elif ranges:
                left.setdefault(id(group), []).append(row)
        self._wait(
            [
                replace(group, rows=tuple(left[id(group)]))
                for group in joining.groups
                if id(group) in left
            ]
        )

    def _break(self, group: WaitingRows, rows: Sequence[int], error: BaseException) -> None:
        for row in rows:
            broken = Broken(group.weight(row).name, group.step, told_of(error))
            self._broken = True
            for entry in group.entries_of(row):
                entry.wait_for(broken)


def _rest_of(group: WaitingRows, row: int, ranges: Sequence[tuple[int, int]]) -> WaitingRows:
    """The elements of a row that are still to be computed, which no forward does."""
    whole = group.schedule.rows[row]
    rows = tuple(
        replace(
            whole,
            numel=last - first,
            columns=tuple(
                replace(c, begin=c.begin + first * c.dtype.itemsize) for c in whole.columns
            ),
        )
        for first, last in ranges
    )
    schedule = replace(group.schedule, rows=rows, serial=next(SERIALS))
    numbers = tuple(range(len(rows)))
    return replace(group, schedule=schedule, rows=numbers, forward=NO_FORWARD)


def _references_to_value(kept: Mapping[int, object], key: int) -> int:
    return sys.getrefcount(kept[key])


_ONE_REFERENCE = _references_to_value({0: object()}, 0)
"""As many as Python counts of an object that a mapping alone holds."""


def is_number(value: Any) -> bool:
    """Whether a plain operand is one number, or no tensor at all."""
    return not isinstance(value, Tensor) or (type(value) is torch.Tensor and value.numel() == 1)


def _wait_no_more(group: WaitingRows, rows: Sequence[int]) -> None:
    for row in rows:
        for entry in group.entries_of(row):
            entry.wait_for(None)


def _as_it_rests(row: Row, entries: Sequence[Entry]) -> Row:
    """A row with its operands where they rest now."""
    columns = []
    if row.on_host:
        return row
    for column in row.columns:
        entry = entries[column.entry]
        resident = entry.on_device or (
            entry.store.can_view_in_place(entry)
            and not (column.eased or (entry.deferred and entry.narrow is None))
        )
        columns.append(replace(column, resident=resident, far=entry.home == "disk"))
    return replace(row, columns=tuple(columns))


def _joined(groups: Sequence[WaitingRows], places: Sequence[Sequence[int]], named: int) -> LateRows:
    """The rows of groups in terms of a call that names so many entries.

    places  of each row of each group, the index that its parameter has in the call
    """
    late = LateRows()
    for number, (group, of) in enumerate(zip(groups, places, strict=True)):
        call: list[tuple[int, int]] = [(-1, n) for n in range(named)]
        for row, place in zip(group.rows, of, strict=True):
            call[place] = number, group.weights[row]
        tokens = [(number, n) for n in range(len(group.entries))]
        rows = [group.schedule.rows[n] for n in group.rows]
        schedule = group.schedule
        late = late.with_rows(schedule.name, rows, schedule.inputs, tokens, call)
    return late


# --- How far a forward came ---


class Progress:
    """The chunks of late updates that a walk has computed.

    chunks  how many, in their order
    within  whether the next one has begun
    lost    whether something that they have written could not be sent home
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.chunks, self.within, self.lost = 0, False, False

    @cached_property
    def _runs(self) -> list[Run]:
        return _chunks_of(self._schedule)

    def begins(self) -> None:
        """The next chunk is computed."""
        self.within = True

    def ends(self) -> None:
        """The chunk was computed."""
        self.within = False
        self.chunks += 1

    def sends(self, started: Callable[[Ticket], bool]) -> Iterator[Store]:
        """The stores of `unsent`; what is lost if one of them fails is noted."""
        self.lost = True
        yield from self.unsent(started)
        self.lost = False

    def has_begun(self, update: int) -> bool:
        """Whether a chunk of an update, by its number, was computed."""
        return any(x.update == update for x in _late(self._runs[: self.chunks]))

    def left(self, update: int) -> list[tuple[int, int]]:
        """The elements [first, last) of an update that were not computed."""
        ranges: list[tuple[int, int]] = []
        for x in sorted(x for x in _late(self._runs[self.chunks :]) if x.update == update):
            if ranges and ranges[-1][1] == x.first:
                ranges[-1] = ranges[-1][0], x.last
            else:
                ranges.append((x.first, x.last))
        return ranges

    def is_torn(self, update: int) -> bool:
        """Whether a chunk of an update has failed that changes an operand where it rests, or what
        it has written is lost."""
        if self.lost and self.has_begun(update):
            return True
        if not self.within:
            return False
        run = self._runs[self.chunks]
        assert run.late is not None
        in_place = {
            x.register for x in self._schedule.instructions if isinstance(x, Borrow) and x.writes
        }
        return run.late.update == update and not in_place.isdisjoint(run.inputs)

    def unsent(self, started: Callable[[Ticket], bool]) -> list[Store]:
        """What was written and has not been sent: stores, shortened to what is whole.

        started  whether a store, by its ticket, has
        """
        writers: dict[Register, list[tuple[LateChunk, bool]]] = {}
        for number, run in enumerate(self._runs):
            assert run.late is not None
            for register in run.inputs:
                writers.setdefault(register, []).append((run.late, number < self.chunks))
        lies: dict[Slot, Register] = {}
        found = []
        for x in self._schedule.instructions:
            if isinstance(x, Wait):
                lies[x.slot] = x.register
            elif isinstance(x, Store) and not started(x.ticket):
                chunks = writers[lies[x.slot]]
                written = sum(chunk.last - chunk.first for chunk, done in chunks if done)
                width = x.nbytes // sum(chunk.last - chunk.first for chunk, _ in chunks)
                if written:
                    found.append(replace(x, nbytes=written * width))
        return found


def _late(runs: Sequence[Run]) -> Iterator[LateChunk]:
    return (run.late for run in runs if run.late is not None)


def _chunks_of(schedule: Schedule) -> list[Run]:
    return [x for x in schedule.instructions if isinstance(x, Run) and x.late is not None]
