"""Foresight starts the first fetches of the next call while this one still computes.

A model that graph-breaks, and the step from forward to backward to optimizer, are calls of several
schedules. Each schedule was planned alone. Once a call has been seen to follow another, the fetches
that open the follower are started as soon as this schedule no longer needs the bytes they will lie
in. A wrong guess costs a transfer and nothing else: what was started is waited for and given back,
and a value that was written in between is fetched again.
"""

from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from zcompile.errors import BudgetExceeded, ZinfError
from zcompile.ir.handover import Handover, handover, last_writes, passes_by
from zcompile.ir.schedule import Fetch, Schedule
from zcompile.ir.types import Phase
from zcompile.memory.step_footprint import device_peak
from zcompile.runtime.changes import CHANGES
from zcompile.runtime.store.resident import source_of
from zcompile.runtime.store.sources import check_sources
from zcompile.runtime.store.store import Entry, Store, call_key, others_than
from zcompile.runtime.transfer.interrupts import cleanup, uninterrupted
from zcompile.runtime.transfer.ticket import Ticket
from zcompile.verify.happens_before import Copies
from zcompile.verify.schedule import ScheduleCall, verify_handover

MOST_REMEMBERED = 4096
"""Calls remembered; a model with more pieces than this forgets the oldest, and only loses time."""

MOST_PASSED = MOST_REMEMBERED // 4
"""Calls passed by one after the other that are remembered. Each takes two places among the calls
that are remembered at all, so together at most half of those."""

MOST_TURNS = 256
"""Calls of one kind in a step that are told apart, as those of so many micro-batches."""
LATEST = -1
"""Stands for a turn: whichever call came last."""


class Identity:
    """A schedule and the entries that it is called with, told apart by `known`: there is one object
    for each, so that the keys of hundreds of entries are compared once a call."""

    __slots__ = ("known",)

    def __init__(self, known: tuple[int, tuple[int, ...]]) -> None:
        self.known = known


@dataclass(frozen=True)
class Call:
    """A schedule about to run on certain entries."""

    schedule: Schedule
    entries: tuple[Entry, ...]
    identity: Identity

    @property
    def called(self) -> ScheduleCall:
        """The call as the proof of a handover sees it."""
        copies: Copies = {
            (entry.key, dtype): copy.key
            for entry in self.entries
            for dtype, (copy, _) in entry.copies.items()
        }
        return ScheduleCall(self.schedule, [entry.key for entry in self.entries], copies)

    def written_in(self, before: "Call") -> Mapping[int, int]:
        """Ticket of a fetch of this call -> the instruction of `before` after which what it brings
        is written; for what `before` writes at all."""
        written = last_writes(before.schedule, lambda index: before.entries[index].key)
        return {
            fetch.ticket: written[key]
            for fetch in self.schedule.fetches()
            if (fetch.cast is None or fetch.cast.copy_dtype in self.entries[fetch.entry].copies)
            and (key := source_of(fetch, self.entries).key) in written
        }


@dataclass
class _Prefetched:
    """Fetches of `call` that are in flight before it begins: (fetch, entry version, ticket)."""

    call: Call
    started: list[tuple[Fetch, int, Ticket]] = field(default_factory=list)


class Foresight:
    """Remembers which call followed which, and starts the first fetches of the next one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._followers: OrderedDict[tuple[Identity, int], Call] = OrderedDict()
        self._last: tuple[Identity, int] | None = None
        self._passed: OrderedDict[tuple[Identity, int], None] = OrderedDict()
        """The latest calls that were passed by since: a step that only ever follows itself is
        passed by each time."""
        self._turns: dict[Identity, int] = {}
        self._stepped = False
        self._prefetched: _Prefetched | None = None
        self._ready: dict[int, Sequence[Fetch]] = {}
        self._plans: OrderedDict[tuple[Identity, Identity], Handover] = OrderedDict()
        self._passed_by: dict[tuple[Identity, Identity], bool] = {}
        """Whether a call is passed by on the way to the next."""
        self._next: Call | None = None
        self._identities: dict[tuple[int, tuple[int, ...]], Identity] = {}
        self._kept: dict[object, tuple[object, Sequence[Entry | None], Identity]] = {}
        """By `call_key`: the mark of `CHANGES`, entries that outlive steps, and what this is."""

    def call(self, schedule: Schedule, entries: Sequence[Entry]) -> Call:
        """A call of `schedule`. Gradients are new entries in every step, so they do not count."""
        key, mark = call_key(schedule.serial, entries), CHANGES.mark
        before, lasted, identity = self._kept.get(key, (None, (), None))
        if identity is not None and before is mark:
            others = others_than(lasted, entries)
            if others is not None and not any([entries[at]._kind.lasting for at in others]):
                return Call(schedule, tuple(entries), identity)
        lasting = [entry if entry.kind.lasting else None for entry in entries]
        known = schedule.serial, tuple([entry.key for entry in lasting if entry is not None])
        if len(self._identities) > MOST_REMEMBERED:
            self._identities.clear()
            self._kept.clear()
        made = self._identities.setdefault(known, Identity(known))
        if len(self._kept) >= MOST_REMEMBERED:
            self._kept.clear()
        self._kept[key] = mark, lasting, made
        return Call(schedule, tuple(entries), made)

    @property
    def ready(self) -> Container[int]:
        """The instructions of the call that has begun after which there is something to start."""
        return self._ready

    def begin(self, call: Call, others: int) -> dict[int, Ticket]:
        """`call` starts: learn, and return the tickets of fetches that are already in flight.

        others  live bytes outside the arena that are not of this call
        """
        place = call.identity, self._turn(call)
        then = self._follower(place)
        if then is not None and self._passes_by(call, then):
            self._pass_by(place)
            self._ready = {}
            if self._prefetched is None:  # or it was given back, for an eager gather say
                self._next, self._ready = then, dict(self._plan(call, then, others))
            return {}
        before = [*self._passed] if self._last is None else [*self._passed, self._last]
        for known in (known for last in before for known in (last, (last[0], LATEST))):
            self._followers[known] = call
            self._followers.move_to_end(known)
            if len(self._followers) > MOST_REMEMBERED:
                self._followers.popitem(last=False)
        self._last = place
        self._passed.clear()
        given = self._take_over(call)
        self._next = self._follower(place)
        self._ready = dict(self._plan(call, self._next, others)) if self._next else {}
        return given

    def _follower(self, place: tuple[Identity, int]) -> Call | None:
        """The call that came behind this one last, but for those that were passed by."""
        return self._followers.get(place) or self._followers.get((place[0], LATEST))

    def _passes_by(self, call: Call, then: Call) -> bool:
        """Whether `call` is passed by on the way to `then`, which has followed it."""
        pair = call.identity, then.identity
        if pair not in self._passed_by:
            if len(self._passed_by) >= MOST_REMEMBERED:
                self._passed_by.clear()
            written = then.written_in(call)
            self._passed_by[pair] = passes_by(call.schedule, then.schedule, written)
        return self._passed_by[pair]

    def _pass_by(self, place: tuple[Identity, int]) -> None:
        """Remember that this call came between the last one that was not passed by and its
        follower."""
        self._passed[place] = None
        self._passed.move_to_end(place)
        if len(self._passed) > MOST_PASSED:
            self._passed.popitem(last=False)

    def stepped(self) -> None:
        """An optimizer's step was called, and all of it waits."""
        self._stepped = True

    def _turn(self, call: Call) -> int:
        """How often a call like `call` came before in this step.

        A step ends with the next forward after an optimizer's step: a backward is followed by
        another micro-batch, and the last one is not.
        """
        phase = call.schedule.phase
        if (self._stepped and phase is Phase.FORWARD) or len(self._turns) > MOST_REMEMBERED:
            self._turns.clear()
        self._stepped = phase is Phase.STEP
        turn = self._turns.get(call.identity, 0)
        self._turns[call.identity] = min(turn + 1, MOST_TURNS)
        return turn

    def _plan(self, now: Call, then: Call, others: int) -> Mapping[int, Sequence[Fetch]]:
        """The fetches of `then` to start after instructions of `now`, proven and remembered."""
        pair = now.identity, then.identity
        if pair not in self._plans:
            made = handover(now.schedule, then.schedule, then.written_in(now))
            verify_handover(now.called, then.called, made)
            self._plans[pair] = made
            self._store.homes.plan_device(made.peak_bytes)
            self._store.homes.plan_together(device_peak(now.schedule, made.starts) + others)
            if len(self._plans) > MOST_REMEMBERED:
                self._plans.popitem(last=False)
        return {
            index: [x for x in rows if isinstance(x, Fetch)]
            for index, rows in self._plans[pair].starts.items()
        }

    def passed(self, index: int) -> None:
        """Instruction `index` of the call that has begun is done: start what may start from here
        on."""
        fetches = self._ready.pop(index, None)
        if fetches is None or self._next is None:
            return
        if self._prefetched is None:
            self._prefetched = _Prefetched(self._next)
        after = [self._store.device.mark()]
        for fetch in fetches:
            named = self._next.entries[fetch.entry]
            if not self._store.holds(named):
                continue
            if fetch.cast is not None and fetch.cast.copy_dtype not in named.copies:
                continue
            entry = source_of(fetch, self._next.entries)
            arena, slot = self._store.arena, fetch.slot
            if slot.end > arena.budget_bytes:  # the follower was made for a larger arena
                return
            try:
                arena.take_slot(slot.address, slot.nbytes, entry.name)
            except BudgetExceeded:  # an eager gather lies there; the follower will see for itself
                return
            try:
                ticket = self._store.fetch(
                    entry,
                    arena.slot(slot.address + fetch.offset, fetch.nbytes),
                    begin=fetch.begin,
                    after=after,
                    ahead=True,
                )
            except BaseException as error:
                arena.give_slot(slot.address, slot.nbytes)
                if not isinstance(error, ZinfError | OSError):
                    raise
                return  # the follower, which may never come, will see for itself
            self._store.meter.count("gathers", int(self._next.schedule.phase is not Phase.STEP))
            self._prefetched.started.append((fetch, entry.version, ticket))

    @uninterrupted
    def abandon(self) -> None:
        """Nothing that was prefetched will be used: wait for it and give the slots back."""
        prefetched, self._prefetched = self._prefetched, None
        self._ready, self._next = {}, None
        for fetch, _, ticket in prefetched.started if prefetched else ():
            self._give_back(fetch, ticket)

    def _give_back(self, fetch: Fetch, ticket: Ticket) -> None:
        wait_quietly(ticket)
        self._store.arena.give_slot(fetch.slot.address, fetch.slot.nbytes)

    def clear(self) -> None:
        """The next calls will have other schedules: learn anew what follows what."""
        self.abandon()
        self._followers.clear()
        self._plans.clear()
        self._passed_by.clear()
        self._kept.clear()
        self._last = None
        self._passed.clear()

    @uninterrupted
    def _take_over(self, call: Call) -> dict[int, Ticket]:
        """The tickets of prefetched values that `call` can use; the others are given back.

        raises  ParameterChanged, if what an entry took its values from was written since
        """
        prefetched = self._prefetched
        if prefetched is None:
            return {}
        if prefetched.call.identity != call.identity:
            self.abandon()
            return {}
        try:
            for fetch, _, _ in prefetched.started:
                check_sources(call.entries[fetch.entry])  # nobody has, of what came ahead
        except BaseException:
            self.abandon()
            raise
        self._prefetched = None
        given: dict[int, Ticket] = {}
        for fetch, version, ticket in prefetched.started:
            entry = source_of(fetch, call.entries)
            then = source_of(fetch, prefetched.call.entries)
            if entry.key == then.key and entry.version == version:
                given[fetch.ticket] = ticket
            else:
                self._give_back(fetch, ticket)
        return given


@cleanup
def wait_quietly(ticket: Ticket) -> None:
    """Wait for a transfer whose result nobody wants; its error was or will be raised elsewhere."""
    try:
        ticket.wait()
    except (ZinfError, OSError):
        return
