"""Host updates: rows of an optimizer's step that the host computes, where their operands rest.

The plan in force names the parameters (`planner/host_step.py`). A row of one of them is computed on
the memory of the host tier, by the very op of the optimizer. Its instructions are a `Borrow` of
each operand and a `Run`. The step submits the row and goes on: a thread of the host computes it
when nothing moves its operands any more, beside the transfers and the compute of what comes next,
those that the next forward needs first before others (`transfer/host_work.py`). Whoever asks for an
operand meanwhile waits for it, so that nobody finds the parameter as it was before. What the row
reads of the program, as a learning rate, is what it was when the step was made. A row of which an
operand rests elsewhere by then goes through the device, as any other.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor

from zcompile.errors import UpdateBroken
from zcompile.ir.late_updates import is_update, weight_of
from zcompile.ir.optimizer_step import Row
from zcompile.ir.schedule import Borrow, EntryIndex, Register, Run, Schedule
from zcompile.ir.types import EntryKind, EntryRef, Region
from zcompile.runtime.late import LateUpdates, is_number, told_of
from zcompile.runtime.store.store import Entry, Store
from zcompile.runtime.transfer.host_work import HostUse, HostWork

NOBODY: frozenset[EntryRef] = frozenset()
AT_ONCE: Mapping[EntryRef, int] = MappingProxyType({})

Took = Callable[[Region, float], None]
"""Told what a region took, in seconds, by any thread."""


class HostUpdates:
    """Which parameters of a session the host updates: those `wanted` by the plan in force."""

    def __init__(self) -> None:
        self.wanted = NOBODY
        self._order = AT_ONCE

    def want(
        self, parameters: frozenset[EntryRef], order: Mapping[EntryRef, int] = AT_ONCE
    ) -> None:
        """Let the host update these parameters, and no others, from here on.

        order  of their rows: those of the least number come first
        """
        self.wanted, self._order = parameters, order

    def urgency(self, parameter: EntryRef) -> int:
        """The place of a parameter in the order in which rows are computed that may be."""
        return self._order.get(parameter, len(self._order))

    def reaches(self, entry: Entry) -> bool:
        """Whether the host may compute with an entry: the plan has host updates, and it rests
        there."""
        return bool(self.wanted) and entry.home == "host" and entry.partition is None

    def computes(self, row: Row, entries: Sequence[Entry], plains: Sequence[Any]) -> bool:
        """Whether the host computes a row.

        entries  of its columns
        plains   its plain operands: each is one number, or no tensor
        """
        kinds = [entry.kind for entry in entries]
        if not all(map(self.reaches, entries)) or not is_update(kinds, row):
            return False
        weight = entries[[int(c.entry) for c in row.columns].index(weight_of(kinds, row).entry)]
        return weight.ref in self.wanted and all(map(is_number, plains))


class HostWalk:
    """What one call has the host compute.

    took  told the seconds of each region
    """

    def __init__(
        self,
        store: Store,
        entries: Sequence[Entry],
        late: LateUpdates,
        updates: HostUpdates,
        took: Took,
    ) -> None:
        self._store, self._entries, self._late = store, entries, late
        self._updates, self._took = updates, took
        self._lent: dict[Register, tuple[Borrow, HostUse]] = {}
        self._begun: set[EntryIndex] = set()
        """Entries that a chunk was submitted of, or was to be."""
        self._written: Counter[EntryIndex] = Counter()
        """Chunks of each entry that were submitted."""
        self._plain: dict[int, tuple[Any, Any]] = {}
        """By its id, a plain operand and its value."""

    def lend(self, borrow: Borrow) -> None:
        """Let the host have the bytes of an operand once nothing moves them.

        raises  what an earlier transfer of the entry failed with
        """
        nbytes, entry = borrow.layout.end_bytes, self._entries[borrow.entry]
        use = self._store.use_on_host(entry, borrow.begin, nbytes, borrow.writes)
        self._lent[borrow.register] = borrow, use

    def compute(self, run: Run, values: Sequence[Any]) -> None:
        """Have the host compute a region, which need not be over when this returns.

        What it fails with is told to who uses an entry that it writes, as `UpdateBroken`.
        raises  what an earlier transfer of an operand failed with; the call breaks off
        """
        lent = {r: self._lent.pop(r) for r in run.inputs if r in self._lent}
        borrows = [borrow for borrow, _ in lent.values()]
        given = [lent[r][0] if r in lent else self._value(values[r]) for r in run.inputs]
        written = {borrow.entry for borrow in borrows if borrow.writes}
        named = [self._entries[at] for at in written]
        weight = next(entry for entry in named if entry.kind is EntryKind.PARAM)
        work = HostWork(
            [use for _, use in lent.values()],
            partial(_compute, run.region, borrows, given),
            self._updates.urgency(weight.ref),
            partial(_broken, weight.name, self._late.steps),
            partial(self._took, run.region),
        )
        self._begun |= written
        self._store.submit_to_host(work)
        self._written.update(written)

    def broke_off(self, schedule: Schedule, error: BaseException) -> UpdateBroken | None:
        """The call failed, wherever: refuse every use of what was perhaps written in part, since a
        chunk of a row was submitted and its last one was not; returns the error about it, None if
        there is no such row."""
        if not self._begun:
            return None
        lent = [x for x in schedule.instructions if isinstance(x, Borrow) and x.on_host]
        chunks = Counter(x.entry for x in lent if x.writes)
        torn = [self._entries[at] for at in sorted(self._begun) if self._written[at] < chunks[at]]
        if not torn:
            return None
        named = [*(e for e in torn if e.kind is EntryKind.PARAM), *torn]
        broken = self._late.broke_off({named[0].name: torn}, error)
        return UpdateBroken(broken.name, broken.step, broken.why)

    def _value(self, value: Any) -> Any:
        """The value of a plain operand, whatever becomes of that; of one on the device, once that
        has made it."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._plain:
            made = value.clone() if value.device.type == "cpu" else value.cpu()
            self._plain[id(value)] = value, made
        return self._plain[id(value)][1]


def _compute(
    region: Region, borrows: Sequence[Borrow], given: Sequence[Any], memory: Sequence[Tensor]
) -> None:
    """Compute a region.

    borrows  of what it was lent, of which `memory` has the bytes
    given    its operands; in the place of what it was lent the borrow
    """
    lent = {id(b): b.layout.view(m) for b, m in zip(borrows, memory, strict=True)}
    region.call(*(lent[id(x)] if isinstance(x, Borrow) else x for x in given))


def _broken(name: str, step: int, error: BaseException, begun: bool) -> UpdateBroken:
    return UpdateBroken(name, step, told_of(error), begun, error)
