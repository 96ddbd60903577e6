"""List ops that come again in every step reuse their schedule.

An optimizer calls `_fused_adamw_` on the same parameters and states in each step, with new
gradients and another learning rate. What its rows and their schedule depend on is compared with
what it was when they were made: the layout of each tensor, the kind of its entry, where that rests,
and which changes are deferred of it, as clipping does, whether it rests narrow, and which copies in
other dtypes are written along with it; dtype, device and shape of plain tensors; the type of
everything else; what there is to stream through. If any of it has changed, the rows are
made anew. The number that clipping multiplies by is another one in each step, so it is an operand
of the rows.

Of a step whose plan is settled most of that need not be asked of each operand again: while
`CHANGES` has the mark that it had then, the entries of parameters and states are what they were,
and what shows them shows them still (`KeptOperands`). That the operands are the very same is looked
at, and so is all of the gradients, which are new, and of plain operands.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zcompile.ir.optimizer_step import StepRoom
from zcompile.ir.schedule import Cast, EntryIndex, Schedule
from zcompile.ir.ties import Same
from zcompile.ir.torch_compat import Dispatched
from zcompile.ir.types import EntryKind, Layout
from zcompile.runtime.changes import CHANGES
from zcompile.runtime.eager.rows import counts_writes_in_kernels, leaves_of
from zcompile.runtime.host_updates import HostUpdates
from zcompile.runtime.session import Place, Repeat, Session, session_of
from zcompile.runtime.store.store import Entry, as_they_rest

_NAMED = attrgetter("_known", "entry_layout")
"""What is compared of a parameter. The reference to an entry is one object for as long as somebody
has the entry, as those do who keep what a call was. A parameter itself is not referred to, since
torch would not make another tensor of it then (`swap_tensors`)."""
_LAYOUT = attrgetter("entry_layout")
_STATE = attrgetter(
    "store", "_kind", "_nbytes", "_waits", "_narrow", "_unexchanged", "_place.tier.on_device"
)
"""What is compared of an entry that does not outlive the step."""
_DEFERRED, _COPIES = attrgetter("_deferred"), attrgetter("copies")
_NUMBER = attrgetter("ndim", "dtype", "device")
"""What is compared of a plain tensor of one number."""
LIST_OPS = ("aten::_foreach", "aten::_fused")
MOST_REPEATS = 8
"""Repeats kept of calls with as many operands each: of groups of parameters of one size."""


@dataclass(frozen=True)
class ListCall:
    """A call of a list op whose tiered operands are all different, of one store, and at rest.

    func      the op
    kind      the op, how many operands it has where, and how often each row takes turns
    leaves    its operands, lists taken apart; behind them those of deferred changes
    entries   those behind tiered operands: position -> entry
    changing  of those of which changes are deferred: position -> those of the changes' operands
    narrow    of those that rest in a narrower dtype: position -> how
    copies    those that have copies in other dtypes: position -> the dtype and entry of each
    known     what the rows and their schedule depend on
    mark      of `CHANGES`, before that was looked at
    before    the call that this one is a repeat of, if that is known
    """

    session: Session
    func: Dispatched
    kind: tuple[object, ...]
    counts: tuple[int, ...]
    leaves: list[Any]
    entries: dict[int, Entry]
    changing: dict[int, range]
    known: tuple[object, ...]
    mark: object
    before: Repeat | None = None
    narrow: dict[int, Cast] = field(default_factory=dict)
    copies: dict[int, list[tuple[torch.dtype, Entry]]] = field(default_factory=dict)

    def rerun(self) -> bool:
        """Run the call as an equal one was run before; False, if there was none."""
        found = self.before
        if found is None:
            known = self.session.repeats.get(self.kind, ())
            found = next((repeat for repeat in known if repeat.known == self.known), None)
        if found is None or not self.session.scratch_use.open(found.schedule):
            return False
        if self.before is None and not self.copies:  # these change in every step
            found.keep(_kept_operands(self))
        leaves = self.leaves
        written = [leaves[at] for at in found.written]
        increment_version([leaf._handle for leaf in written])
        if counts_writes_in_kernels(self.func):
            increment_version(written)
        inputs = [leaves[at] for at in found.inputs]
        copying = [
            (self.entries[at], dtype) for at, kept in self.copies.items() for dtype, _ in kept
        ]
        entries = self._entries_at(found.entries)
        changing = [
            (entry, entry.deferred, at in found.written)
            for at, entry in ((at, self.entries[at]) for at in self.changing)
        ]
        with as_they_rest(entries):
            self.session.late.run(found.schedule, inputs, entries, changing, copying=copying)
        return True

    def learn(self, schedule: Schedule, entries: Sequence[Entry], inputs: Sequence[Any]) -> None:
        """Remember that the call is about to run as one `schedule`, with these."""
        tiered, plain = self._in_rows()
        alike = len(tiered) == len(entries) and len(plain) == len(inputs)
        if not alike or not all(
            a is b
            for a, b in (
                *zip(self._entries_at(tiered), entries, strict=True),
                *zip((self.leaves[at] for at in plain), inputs, strict=True),
            )
        ):
            return  # it took something else along
        if any(self.entries[at].narrow != cast for at, cast in self.narrow.items()):
            return  # it was widened, to be written
        writes = {c.entry for row in schedule.rows for c in row.columns if c.writes}
        written = tuple(
            place.at
            for n, place in enumerate(tiered)
            if place.copy is None and EntryIndex(n) in writes
        )
        known = self.session.repeats.setdefault(self.kind, [])
        known.append(Repeat(self.known, schedule, tuple(tiered), tuple(plain), written))
        if len(known) > MOST_REPEATS:
            known.pop(0)

    def _entries_at(self, places: Sequence[Place]) -> list[Entry]:
        """The entries of operands, and of copies."""
        if not self.copies:
            entries = self.entries
            return [entries[at] for at, _ in places]
        return [
            self.entries[at] if copy is None else self.copies[at][copy][1] for at, copy in places
        ]

    def _in_rows(self) -> tuple[list[Place], list[int]]:
        """Positions of tiered and of other operands, row after row; of a row the operands of
        deferred changes come last, and so do copies."""
        rows = max(self.counts)
        tiered: list[Place] = []
        plain: list[int] = []
        for row in range(rows):
            begin, changes, copies = 0, list[int](), list[Place]()
            for count in self.counts:
                taken = [row] if count == rows else range(abs(count))
                for at in (begin + n for n in taken):
                    if at in self.entries:
                        tiered.append(Place(at))
                    else:
                        plain.append(at)
                    changes += self.changing.get(at, ())
                    copies += [Place(at, copy) for copy in range(len(self.copies.get(at, ())))]
                begin += abs(count)
            plain += changes
            tiered += copies
        return tiered, plain


class _Passing(NamedTuple):
    """What is known of the operands whose entries are others in each step, as a gradient's are.

    at        their positions, in order; each of what follows is of these
    layouts   theirs
    states    as `_STATE` tells them
    far       of those that are not on the device: which of them, whether compute reaches the entry
              where it rests, and whether the host may update what rests there
    changes   what is deferred, as `_changes_of` tells it
    changing  positions of those of which something is
    """

    at: Sequence[int]
    layouts: Sequence[Layout]
    states: Sequence[tuple[object, ...]]
    far: Sequence[tuple[int, bool, bool]]
    changes: Sequence[tuple[object, ...]]
    changing: Sequence[int]


@dataclass(frozen=True)
class KeptOperands:
    """The operands of a call, by their positions, as long as `CHANGES` has the same mark.

    room     that the step streams through
    on_host  the plan lets the host update something
    entries  those over entries that outlive steps: the entry of each
    params   positions of the parameters among those
    named    what `_NAMED` tells of each
    states   positions of the others
    same     tells whether operands are those
    passing  those over other entries
    numbers  positions of plain tensors without dimensions, and what `_NUMBER` tells of each
    others   what is known of each of the others
    """

    mark: object
    room: StepRoom
    on_host: bool
    entries: dict[int, Entry]
    params: Sequence[int]
    named: Sequence[tuple[object, ...]]
    states: Sequence[int]
    same: Same
    passing: _Passing
    numbers: tuple[Sequence[int], Sequence[tuple[object, ...]]]
    others: Sequence[tuple[int, object]]

    def entries_of(
        self, cls: Any, session: Session, leaves: Sequence[Any]
    ) -> dict[int, Entry] | None:
        """The entries behind the operands of another call, by position, if it is a repeat of this
        one; else None. A step has hundreds: they are compared list by list, and not one by one."""
        params = [leaves[at] for at in self.params]
        if {*map(type, params)} - {cls} or [*map(_NAMED, params)] != self.named:
            return None
        if not self.same.are([leaves[at] for at in self.states]):
            return None
        passing = self._passing_of(cls, session, [leaves[at] for at in self.passing.at])
        if passing is None:
            return None
        where, known = self.numbers
        numbers = [leaves[at] for at in where]
        if {*map(type, numbers)} - {Tensor} or [*map(_NUMBER, numbers)] != known:
            return None
        for at, known_of in self.others:
            leaf = leaves[at]
            if isinstance(leaf, cls) or _known_of(leaf) != known_of:
                return None
        return {**self.entries, **dict(zip(self.passing.at, passing, strict=True))}

    def _passing_of(self, cls: Any, session: Session, leaves: Sequence[Any]) -> list[Entry] | None:
        """The entries behind operands that are those of `passing`; None, if they are not as
        before."""
        if {*map(type, leaves)} - {cls}:
            return None
        # Not `leaf.entry`: of a tensor that is traced nothing is asked.
        named = [leaf._known for leaf in leaves]
        if not all(named):
            return None
        entries: list[Any] = [known() for known in named]
        if not all(entries) or len({*map(id, entries)}) < len(entries):
            return None
        layouts, states, far, changes, changing = self.passing[1:]
        if [*map(_STATE, entries)] != states or [*map(_LAYOUT, leaves)] != layouts:
            return None
        if any(map(_COPIES, entries)):
            return None
        if changing or any(map(_DEFERRED, entries)):
            for leaf, entry, known in zip(leaves, entries, changes, strict=True):
                if _changes_of(leaf, entry) != known:
                    return None
        updates = session.host_updates
        for n, in_place, on_host in far:
            if session.can_view_in_place(entries[n]) is not in_place:
                return None
            if _is_for_host(updates, entries[n]) is not on_host:
                return None
        return entries


def _kept_operands(call: ListCall) -> KeptOperands:
    """What the next call is compared with."""
    session, updates, leaves = call.session, call.session.host_updates, call.leaves
    operands = range(len(leaves) - sum(map(len, call.changing.values())))
    lasting = {at: e for at, e in call.entries.items() if e.kind.lasting}
    params = [at for at, entry in lasting.items() if entry.kind is EntryKind.PARAM]
    states = [at for at in lasting if at not in {*params}]
    passing = [at for at in call.entries if at not in lasting]
    entries = [call.entries[at] for at in passing]
    changes = [_changes_of(leaves[at], call.entries[at]) or () for at in passing]
    plain = [at for at in operands if at not in call.entries]
    numbers = [at for at in plain if type(leaves[at]) is Tensor and not leaves[at].dim()]
    others = [at for at in plain if at not in {*numbers}]
    return KeptOperands(
        call.mark,
        session.step_room,
        bool(updates.wanted),
        lasting,
        params,
        [_NAMED(leaves[at]) for at in params],
        states,
        Same([leaves[at] for at in states]),
        _Passing(
            passing,
            [leaves[at].entry_layout for at in passing],
            [*map(_STATE, entries)],
            [
                (n, session.can_view_in_place(entry), _is_for_host(updates, entry))
                for n, entry in enumerate(entries)
                if not entry.on_device
            ],
            changes,
            [at for at, found in zip(passing, changes, strict=True) if found],
        ),
        (numbers, [_NUMBER(leaves[at]) for at in numbers]),
        [(at, _known_of(leaves[at])) for at in others],
    )


def call_as_before(
    cls: Any, func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any], leaves: list[Any]
) -> ListCall | None:
    """The call, if it is a repeat of one whose operands are kept; None, if that is to be looked at.

    leaves  the operands, lists taken apart
    """
    first: Any = leaves[0] if args and type(args[0]) is list and leaves else None
    session: Any = first._store if type(first) is cls else None
    if session is None or session.fabric is not None or torch.is_grad_enabled():
        return None  # that parameters are used is noted where autograd records that
    values = (*args, *kwargs.values())
    counts = tuple([len(v) if type(v) is list else -1 for v in values])
    kind = func, counts, tuple(kwargs)
    for repeat in session.repeats.get(kind, ()):
        kept: KeptOperands | None = repeat.operands
        if kept is None or kept.mark is not CHANGES.mark:
            continue
        entries = kept.entries_of(cls, session, leaves)
        wanted = bool(session.host_updates.wanted)
        if entries is None or wanted != kept.on_host or session.step_room != kept.room:
            continue
        operands, changing = _with_changes(leaves, entries, kept.passing.changing)
        return ListCall(
            session,
            func,
            kind,
            counts,
            operands,
            entries,
            changing,
            repeat.known,
            kept.mark,
            repeat,
        )
    return None


# --- What rows depend on ---


def _changes_of(leaf: Any, entry: Entry) -> tuple[object, ...] | None:
    """What the rows of a call, or their schedule, depend on of the changes that are deferred of an
    operand; None, if rows do not make them on their way (`StreamedCall`)."""
    layout = leaf.entry_layout
    if not entry.deferred:
        return ()
    if entry.kind.lasting or not leaf.covers:
        return None
    if entry.on_device and entry.narrow is None:
        return None
    if any(change.layout.dtype != layout.dtype for change in entry.deferred):
        return None
    return tuple([(c.func, c.lists, _known_of(c.operand)) for c in entry.deferred])


def _with_changes(
    leaves: list[Any], entries: dict[int, Entry], deferred: Sequence[int]
) -> tuple[list[Any], dict[int, range]]:
    """The operands of a call, and behind them those of deferred changes; and where those of each
    tiered operand are.

    deferred  positions of the tiered operands of which there are any, in order
    """
    if not deferred:
        return leaves, {}
    operands, changing = [*leaves], dict[int, range]()
    for at in deferred:
        begin = len(operands)
        operands += [change.operand for change in entries[at].deferred]
        changing[at] = range(begin, len(operands))
    return operands, changing


def _is_for_host(updates: HostUpdates, entry: Entry) -> bool:
    """Whether the host may update an entry where it rests."""
    return bool(updates.wanted) and updates.reaches(entry)


def _known_of(leaf: object) -> object:
    """What the rows of a call, or their schedule, depend on of a plain operand."""
    if isinstance(leaf, Tensor):
        return (type(leaf), leaf.dtype, leaf.device, leaf.size(), leaf.stride())
    return type(leaf)


def list_call(
    cls: type, func: Dispatched, args: Sequence[Any], kwargs: dict[str, Any]
) -> ListCall | None:
    """The call, if one like it may be repeated; None for all that need be looked at closely."""
    schema = func._schema
    if not schema.is_mutable or schema.returns or not schema.name.startswith(LIST_OPS):
        return None
    values = (*args, *kwargs.values())
    counts = tuple(len(v) if type(v) is list else -1 for v in values)
    if any(type(v) in (tuple, dict) for v in values) or max(counts) < 1:
        return None
    mark = CHANGES.mark
    # What the rows depend on, operand by operand; with a copy in another dtype that varies.
    leaves = leaves_of(args, kwargs)
    entries: dict[int, Entry] = {}
    narrow: dict[int, Cast] = {}
    copies: dict[int, list[tuple[torch.dtype, Entry]]] = {}
    known: list[object] = []
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, cls):
            tiered: Any = leaf
            entry = entries[at] = tiered.entry
            if entry.waits is not None:
                if entry.waits is session_of(entry).noted_ops:
                    return None  # the op may be noted with those
                entry.settle_updates()  # before it is looked at where it rests
            changes = _changes_of(tiered, entry)
            if changes is None:
                return None
            if (cast := entry.narrow) is not None:
                if entry.kind.lasting or not tiered.covers:
                    return None
                narrow[at] = cast
            if entry.copies:
                copies[at] = [(dtype, copy) for dtype, (copy, _) in entry.copies.items()]
            in_place = entry.store.can_view_in_place(entry)
            on_host = _is_for_host(session_of(entry).host_updates, entry)
            layout = tiered.entry_layout
            known.append((layout, entry.nbytes, entry.kind, in_place, on_host, changes, cast))
            known += [
                (dtype, copy.home, entry.store.can_view_in_place(copy))
                for dtype, copy in copies.get(at, ())
            ]
        else:
            known.append(_known_of(leaf))
    # All entries are different, and of one store.
    keys = {entry.key for entry in entries.values()}
    stores = {entry.store.key: entry for entry in entries.values()}
    if len(keys) < len(entries) or len(stores) != 1:
        return None
    session = session_of(next(iter(stores.values())))
    known.append(session.step_room)
    kind = func, counts, tuple(kwargs)
    deferred = [at for at, entry in entries.items() if entry.deferred]
    operands, changing = _with_changes(leaves, entries, deferred)
    return ListCall(
        session,
        func,
        kind,
        counts,
        operands,
        entries,
        changing,
        tuple(known),
        mark,
        narrow=narrow,
        copies=copies,
    )
