"""Host updates: rows of an optimizer's step that the host computes, where their operands rest.

The plan in force names the parameters (`planner/host_step.py`). A row of one of them is computed by
the thread that walks the step, on the memory of the host tier, by the very op of the optimizer,
while transfers of other rows go on, and the device computes what it was given before. Its
instructions are a `Borrow` of each operand, which waits for transfers of those bytes, and a `Run`.
A row of which an operand rests elsewhere by then goes through the device, as any other.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from zcompile.errors import UpdateBroken
from zcompile.ir.late_updates import is_update, weight_of
from zcompile.ir.optimizer_step import Row
from zcompile.ir.schedule import Borrow, EntryIndex, Register, Run, Schedule
from zcompile.ir.types import EntryKind, EntryRef
from zcompile.runtime.late import LateUpdates, is_number
from zcompile.runtime.store.store import Entry, Lent, Store

NOBODY: frozenset[EntryRef] = frozenset()


class HostUpdates:
    """Which parameters of a session the host updates: those `wanted` by the plan in force."""

    def __init__(self) -> None:
        self.wanted = NOBODY

    def want(self, parameters: frozenset[EntryRef]) -> None:
        """Let the host update these parameters, and no others, from here on."""
        self.wanted = parameters

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
    """What the host computes in one call: values that it was lent, and plain ones as it has
    them."""

    def __init__(self, store: Store, entries: Sequence[Entry], late: LateUpdates) -> None:
        self._store, self._entries, self._late = store, entries, late
        self._lent: dict[Register, tuple[Borrow, Lent]] = {}
        self._begun: set[EntryIndex] = set()
        """Entries that a chunk was written of, or was to be."""
        self._written: Counter[EntryIndex] = Counter()
        """Chunks of each entry that were written."""
        self._plain: dict[int, tuple[Any, Any]] = {}
        """By its id, a plain operand and the same in the host's memory."""

    def lend(self, borrow: Borrow) -> None:
        """Wait until nothing moves the bytes of an operand, and let the host have them.

        raises  what an earlier transfer of the entry failed with
        """
        nbytes, entry = borrow.layout.end_bytes, self._entries[borrow.entry]
        lent = self._store.lend(entry, borrow.begin, nbytes, borrow.writes)
        self._lent[borrow.register] = borrow, lent

    def compute(self, run: Run, values: Sequence[Any]) -> None:
        """Compute a region. raises  whatever it fails with; the call breaks off"""
        lent = {
            register: self._lent.pop(register) for register in run.inputs if register in self._lent
        }
        given = [
            lent[r][0].layout.view(lent[r][1].memory) if r in lent else self._on_host(values[r])
            for r in run.inputs
        ]
        writing = [(borrow, each) for borrow, each in lent.values() if borrow.writes]
        self._begun.update(borrow.entry for borrow, _ in writing)
        run.region.call(*given)
        for _, each in writing:
            each.give_back()
        self._written.update(borrow.entry for borrow, _ in writing)

    def broke_off(self, schedule: Schedule, error: BaseException) -> UpdateBroken | None:
        """The call failed, wherever: refuse every use of what was perhaps written in part, since a
        chunk of a row was begun and its last one is not over; returns the error about it, None if
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

    def _on_host(self, value: Any) -> Any:
        """A plain operand in the host's memory; of one on the device, once that has made it."""
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            return value
        if id(value) not in self._plain:
            self._plain[id(value)] = value, value.cpu()
        return self._plain[id(value)][1]
