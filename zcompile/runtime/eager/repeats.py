"""List ops that come again in every step: their schedule is known, and only the operands are new.

An optimizer calls `_fused_adamw_` on the same parameters and states in each step, with new
gradients and another learning rate. What its rows and their schedule depend on is compared with
what it was when they were made: how each tensor lies, in which kind of entry, and where that rests;
dtype, device and shape of plain tensors; the type of everything else; what there is to stream
through. If any of it has changed, or something is deferred, the rows are made anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from zcompile.ir.schedule import EntryIndex, Schedule
from zcompile.ir.torch_compat import Dispatched
from zcompile.runtime.eager.rows import counts_in_kernels, leaves_of
from zcompile.runtime.session import Repeat, Session, session_of
from zcompile.runtime.store.store import Entry

LISTS = ("aten::_foreach", "aten::_fused")
MOST = 8
"""Repeats kept of calls with as many operands each: of groups of parameters of one size."""


@dataclass(frozen=True)
class ListCall:
    """A call of a list op whose tiered operands are all different, of one store, and at rest.

    func      the op
    kind      the op, how many operands it has where, and how often each row takes turns
    leaves    its operands, lists taken apart
    entries   those behind tiered operands: position -> entry
    """

    session: Session
    func: Dispatched
    kind: tuple[object, ...]
    counts: tuple[int, ...]
    leaves: list[Any]
    entries: dict[int, Entry]
    said: tuple[object, ...]

    def again(self) -> bool:
        """Run it as a call like it was run before; False: there was none."""
        known = self.session.repeats.get(self.kind, ())
        found = next((repeat for repeat in known if repeat.said == self.said), None)
        if found is None or not self.session.annex_use.open(found.schedule):
            return False
        leaves = self.leaves
        written = [leaves[at] for at in found.written]
        increment_version([leaf._handle for leaf in written])
        if counts_in_kernels(self.func):
            increment_version(written)
        inputs = [leaves[at] for at in found.inputs]
        entries = [self.entries[at] for at in found.entries]
        self.session.executor.run(found.schedule, inputs, entries)
        return True

    def learn(self, schedule: Schedule, entries: Sequence[Entry], inputs: Sequence[Any]) -> None:
        """It is about to run as one `schedule`, with these."""
        tiered, plain = self._in_rows()
        alike = len(tiered) == len(entries) and len(plain) == len(inputs)
        if not alike or not all(
            a is b
            for a, b in (
                *zip((self.entries[at] for at in tiered), entries, strict=True),
                *zip((self.leaves[at] for at in plain), inputs, strict=True),
            )
        ):
            return  # it took something else along
        writes = {c.entry for row in schedule.rows for c in row.columns if c.writes}
        written = tuple(at for n, at in enumerate(tiered) if EntryIndex(n) in writes)
        known = self.session.repeats.setdefault(self.kind, [])
        known.append(Repeat(self.said, schedule, tuple(tiered), tuple(plain), written))
        if len(known) > MOST:
            known.pop(0)

    def _in_rows(self) -> tuple[list[int], list[int]]:
        """Positions of tiered and of other operands, row after row."""
        rows = max(self.counts)
        tiered: list[int] = []
        plain: list[int] = []
        for row in range(rows):
            begin = 0
            for count in self.counts:
                taken = [row] if count == rows else range(abs(count))
                for at in (begin + n for n in taken):
                    (tiered if at in self.entries else plain).append(at)
                begin += abs(count)
        return tiered, plain


def list_call(
    cls: type, func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]
) -> ListCall | None:
    """The call, if one like it may be repeated; None for all that need be looked at closely."""
    schema = func._schema
    if not schema.is_mutable or schema.returns or not schema.name.startswith(LISTS):
        return None
    values = (*args, *kwargs.values())
    counts = tuple(len(v) if type(v) is list else -1 for v in values)
    if any(type(v) in (tuple, dict) for v in values) or max(counts) < 1:
        return None
    leaves = leaves_of(args, kwargs)
    entries: dict[int, Entry] = {}
    said: list[object] = []
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, cls):
            tiered: Any = leaf
            entry = entries[at] = tiered.entry
            if entry.deferred or entry.copies:
                return None
            place = entry.place
            near = place.tier.on_device or entry.store.lendable(entry)
            said.append((tiered.lies, place.nbytes, entry.kind, near))
        elif isinstance(leaf, Tensor):
            said.append((type(leaf), leaf.dtype, leaf.device, leaf.size(), leaf.stride()))
        else:
            said.append(type(leaf))
    keys = {entry.key for entry in entries.values()}
    stores = {entry.store.key: entry for entry in entries.values()}
    if len(keys) < len(entries) or len(stores) != 1:
        return None
    session = session_of(next(iter(stores.values())))
    said.append(session.step_room)
    kind = func, counts, tuple(kwargs)
    return ListCall(session, func, kind, counts, leaves, entries, tuple(said))
