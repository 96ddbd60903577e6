"""Lets all ranks keep the same copies of parameters: chosen by a plan, agreed on in each call.

Copies are of the shares of all ranks, so that nothing is gathered; or of this rank's share in low
precision, of which half the bytes are gathered.

What is kept decides what crosses between ranks, while plans, and events that need the device's
room, are those of one rank. So before each forward and backward the ranks tell each other what they
keep of what it gathers, and whether that is up to date: read is what all of them keep, and gathered
what is out of date on any of them. The digest of the call's collectives goes along: where all tell
the same, as nearly always, the call itself has no agreement any more, except where ranks have to
tell each other of hooks on gradients that are made narrow.

With `stage="auto"` rank 0 chooses, at its own costs. The others see what it keeps, and plan their
next step with that; if one of them has no room for it, rank 0 gives it up.

Of copies in low precision a call reads all that its graph has casts for, or none; each rank makes
its own of its share. They are chosen, agreed on and followed likewise. What rank 0 tells counts
graph by graph, as one may have no room to read them where others have. A plan keeps copies of one
kind, so where ranks differ in that, for a step, they read none; and while one of them still keeps
weights whole, none in low precision are given up.

With `stage=2` all keep everything, and what does not fit is an error. That is so for the first
plan, before which nothing was kept. Where room goes later, as to a larger batch of an evaluation,
training goes on: a rank that has no room any more warns and keeps nothing, and the others follow.
"""

import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from typing import NamedTuple

import torch

from zcompile.errors import BudgetExceeded
from zcompile.frontend.rescheduling import Rescheduling
from zcompile.ir.schedule import EntryIndex, Schedule
from zcompile.ir.step import StepTrace
from zcompile.ir.types import EntryRef, Phase
from zcompile.passes.arrange import keeping_wholes
from zcompile.passes.keep_wholes import gathered_by
from zcompile.planner.step_plan import StepPlan
from zcompile.planner.whole_step import NO_WHOLES, GatheredAs, gathered_as, gathered_in
from zcompile.runtime.ranks.calls import marked_gradients
from zcompile.runtime.ranks.fabric import Fabric, digest_of
from zcompile.runtime.session import Session
from zcompile.runtime.store.resident import copies_of
from zcompile.runtime.store.store import Entry

log = logging.getLogger(__name__)


class Kept(IntEnum):
    """What a rank has of a parameter whose shares are gathered, in rising order: what all ranks
    have is the least of what each has. Only `NOT_KEPT` is false. It crosses as a byte."""

    NOT_KEPT = 0
    OUT_OF_DATE = 1
    UP_TO_DATE = 2


MOST_MADE = 256
"""Schedules that are remembered: one for each graph and what of it is out of date."""
PATIENCE = 3
"""Steps in a row after which nobody waits any more for a rank to keep what is to be kept."""
LONG_AGO = 1000
"""What rank 0 has told of a graph counts for so many steps after its last call, of an evaluation
between many steps too: each change costs a plan. Of a graph that is never called again it costs
nothing but the memory of what is kept meanwhile."""
WAITED_FOR = 3 * PATIENCE
"""Steps in a row after which rank 0 waits no more for one that keeps everything whole to give that
up, and copies instead."""


class _Told(NamedTuple):
    """What rank 0 has told in the last call of a graph.

    step    number of the step
    kept    parameters that it keeps, of those that the graph gathers
    copies  whether it keeps the copies in low precision that the graph would read
    """

    step: int
    kept: frozenset[EntryRef]
    copies: bool


class KeptWholes:
    """What one session keeps whole of what its ranks hold shares of."""

    def __init__(self, session: Session, controller: Rescheduling) -> None:
        self._session = weakref.ref(session)
        self._controller = weakref.ref(controller)
        self._read: dict[int, tuple[EntryIndex, ...]] = {}
        self._made: dict[tuple[int, bytes], Schedule] = {}
        self._step = 0
        """Number of the step that is on its way."""
        self._of_first: dict[int, _Told] = {}
        """Of each schedule that was called, what rank 0 keeps of what it reads."""
        self._alone = Counter[EntryRef]()
        """Of each parameter that is to be kept, the steps in a row in which a rank did not."""
        self._seen_alone: set[EntryRef] = set()
        self._gave_up = self._were_kept = False
        self._copies_alone = 0
        """Steps in a row in which rank 0 read copies in low precision, and another rank did not in
        any call."""
        self._beside_wholes = 0
        """Such steps, in which a rank kept everything whole instead."""
        self._readers: set[int] = set()
        """Ranks that have read such copies in a call of this step."""
        self._seen_wholes = self._gave_up_copies = False
        """Whether a rank has kept anything whole in this step; whether no copies are kept."""

    @property
    def session(self) -> Session:
        session = self._session()
        assert session is not None, "a session asks, so it is there"
        return session

    @property
    def _fabric(self) -> Fabric:
        fabric = self.session.fabric
        assert fabric is not None, "several ranks keep the same"
        return fabric

    @property
    def may_keep(self) -> bool:
        """Whether anything is ever kept, which is so on all ranks or on none."""
        session = self.session
        return session.fabric is not None and session.config.may_keep_wholes

    @property
    def agrees(self) -> bool:
        """Whether ranks compare what they keep, which is so on all of them or on none."""
        session = self.session
        return session.fabric is not None and (
            session.config.may_keep_wholes or session.config.may_read_copies
        )

    @property
    def is_asked_for(self) -> bool:
        """Whether the user has asked that everything is kept."""
        return self.may_keep and self.session.config.stage == 2

    @property
    def is_required(self) -> bool:
        """Whether a step may only run with everything kept: nothing was kept so far, so that to go
        on without would not be what was asked for."""
        return self.is_asked_for and not self._were_kept and not self._gave_up

    # What a plan is made for.

    def wanted(self, step: StepTrace) -> frozenset[EntryRef] | None:
        """The parameters that a plan of `step` is to keep; None: it chooses them."""
        if not self.may_keep:
            return NO_WHOLES
        if self._gave_up:
            return NO_WHOLES
        gathered = frozenset(row.ref for row in gathered_in(step))
        if self.is_asked_for:
            return gathered
        if not self._fabric.rank:
            return None
        return gathered & self._kept_by_first

    def wants_copies(self) -> bool | None:
        """Whether a plan is to keep copies in low precision; None: it chooses."""
        if self._gave_up_copies:
            return False
        if self.session.fabric is None or not self._fabric.rank:
            return None
        return self._first_reads_copies

    @property
    def _kept_by_first(self) -> frozenset[EntryRef]:
        """The parameters that rank 0 keeps, as far as it has told."""
        return frozenset(ref for told in self._of_first.values() for ref in told.kept)

    @property
    def _first_reads_copies(self) -> bool:
        """Whether rank 0 reads copies in low precision in any graph: where one has no room to, as
        in an evaluation, others may."""
        return any(told.copies for told in self._of_first.values())

    def give_up_copies(self, because: object) -> None:
        """Keep no copies in low precision from here on.

        because  for people
        """
        if not self._gave_up_copies:
            log.info("no copies of weights in the dtype of autocast are kept: %s", because)
        self._gave_up_copies = True

    def are_kept(self) -> None:
        """A plan is in force that keeps some."""
        self._were_kept = True

    def give_up(self, because: object) -> None:
        """Keep nothing from here on.

        because  of an error, or of what else a person is told, if they have asked for it
        """
        if not self._gave_up and self.is_asked_for:
            log.warning(
                "stage=2 was asked for, and from here on parameters are gathered for every use, as "
                "with stage=3: %s",
                because,
            )
        self._gave_up = True

    def step_ended(self, plan: StepPlan | None) -> bool:
        """Whether the plan in force keeps something else than it should, when a step has ended."""
        changes = plan is not None and any([self._wholes_change(plan), self._copies_change(plan)])
        self._step += 1
        self._seen_alone, self._readers, self._seen_wholes = set(), set(), False
        told = self._of_first.items()
        self._of_first = {n: row for n, row in told if self._step - row.step < LONG_AGO}
        return changes

    def _copies_change(self, plan: StepPlan) -> bool:
        """As `step_ended`, of copies in low precision."""
        if not self.agrees or self._gave_up_copies:
            return bool(plan.reads) and self.agrees
        if self._fabric.rank:
            return not plan.wholes and bool(plan.reads) != self._first_reads_copies
        alone = 0 in self._readers and len(self._readers) < self._fabric.size
        # Who still keeps everything whole keeps no copies, and is waited for otherwise.
        self._copies_alone = self._copies_alone + 1 if alone and not self._seen_wholes else 0
        self._beside_wholes = self._beside_wholes + 1 if alone and self._seen_wholes else 0
        if self._copies_alone >= PATIENCE or self._beside_wholes >= WAITED_FOR:
            self.give_up_copies("another rank has no room for them")
        return self._gave_up_copies

    def _wholes_change(self, plan: StepPlan) -> bool:
        """As `step_ended`, of what is kept whole."""
        if not self.may_keep or self._gave_up:
            return False
        if self._fabric.rank and not self.is_asked_for:
            return plan.wholes != self._kept_by_first & plan.step.facts.keys()
        self._alone = Counter({ref: self._alone[ref] + 1 for ref in self._seen_alone})
        if max(self._alone.values(), default=0) >= PATIENCE:
            self.give_up("another rank has no room for them any more")
        return self._gave_up

    # What a call reads.

    def agreed(self, schedule: Schedule, entries: Sequence[Entry]) -> Schedule:
        """`schedule`, or the one that reads what all ranks keep of these entries, and makes what is
        out of date.

        raises  RanksDiffer, RankFailed
        """
        if not self.agrees or schedule.phase is Phase.STEP or schedule.budget_bytes is None:
            return schedule
        if schedule.serial not in self._read:
            self._read[schedule.serial] = gathered_by(schedule) if self.may_keep else ()
        offers = self.session.config.may_read_copies and self.session.offers_copies(schedule.serial)
        if not (self._read[schedule.serial] or offers):
            return schedule
        wholes = self._own(schedule, entries)
        copies = offers and self._reads_copies(schedule, entries)
        own = bytes([*wholes, copies])
        text = f"of {schedule.name}: copies in low precision are {'' if copies else 'not '}kept"
        if wholes:
            text += f", {sum(map(bool, wholes))} of {len(wholes)} weights are kept whole"
        # With it goes what a call would compare before its first collective: one agreement less.
        read, executor = self._reading(schedule, own), self.session.executor
        detail = executor.digest_of_call(read, (*entries, *copies_of(read, entries)))
        value = digest_of(own, detail)
        told = self._fabric.compare(schedule.call_kind, value, len(own), text=text)
        if len(set(told)) == 1:
            self._note(schedule, entries, [own])
            if not any(marked_gradients(read, self._fabric.mesh)):  # which is told in the call
                executor.agreed_on(detail)
            return read
        rows = self._fabric.rows(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        every = [bytes(row.tolist()) for row in rows]
        self._note(schedule, entries, every)
        least = bytes(map(min, zip(*every, strict=True)))
        # Another rank may ask for more gathers than this one has room for.
        fits = self._too_large(schedule, entries, least[:-1]) is None
        if not self._fabric.rows(torch.tensor([int(fits)])).all():
            return schedule
        return self._reading(schedule, least)

    def _reading(self, schedule: Schedule, told: bytes) -> Schedule:
        """The schedule that reads what all ranks keep: of each weight that is gathered, and at last
        whether copies in low precision are."""
        *wholes, copies = told
        if copies:
            narrow = self.session.reading_copies(schedule.serial)
            assert narrow is not None, "this rank has told that it reads them"
            return narrow
        return self._keeping(schedule, bytes(wholes))

    def _reads_copies(self, schedule: Schedule, entries: Sequence[Entry]) -> bool:
        """Whether this rank keeps all copies in low precision that a call would read, and has room
        to read them."""
        controller = self._controller()
        assert controller is not None, "it asks"
        if not controller.plans_copies:
            return False  # what exists for another graph, which was compiled to read it
        narrow = self.session.reading_copies(schedule.serial)
        if narrow is None or any(
            c.cast.copy_dtype not in entries[c.entry].copies for c in narrow.copies
        ):
            return False
        return controller.too_large(narrow, (*entries, *copies_of(narrow, entries))) is None

    def _own(self, schedule: Schedule, entries: Sequence[Entry]) -> bytes:
        """What this rank keeps of what a call gathers, and has room to read so."""
        controller = self._controller()
        assert controller is not None, "it asks"
        own = self._states(schedule, entries)
        while (error := self._too_large(schedule, entries, own)) is not None:
            if not controller.reclaim(error.needed_bytes):
                break  # which the call itself will say
            own = self._states(schedule, entries)
        return own

    def _states(self, schedule: Schedule, entries: Sequence[Entry]) -> bytes:
        """What this rank keeps of what a call gathers, in the dtype that it is gathered in."""
        if not self._read[schedule.serial]:
            return b""
        reads = gathered_as(schedule)
        return bytes(_state(entries[n], reads[n]) for n in self._read[schedule.serial])

    def _too_large(
        self, schedule: Schedule, entries: Sequence[Entry], states: bytes
    ) -> BudgetExceeded | None:
        """Why a call that reads so has no room; None: it has."""
        if not any(states):
            return None
        made, controller = self._keeping(schedule, states), self._controller()
        assert controller is not None, "it asks"
        return controller.too_large(made, (*entries, *copies_of(made, entries)))

    def _keeping(self, schedule: Schedule, states: bytes) -> Schedule:
        """The schedule for which parameters are kept, and up to date, as `states` says."""
        if not any(states):
            return schedule
        known = schedule.serial, states
        if known not in self._made:
            if len(self._made) >= MOST_MADE:
                self._made.clear()
            rows = list(zip(self._read[schedule.serial], states, strict=True))
            kept = frozenset(n for n, state in rows if state != Kept.NOT_KEPT)
            made = frozenset(n for n, state in rows if state == Kept.OUT_OF_DATE)
            self._made[known] = keeping_wholes(schedule, kept, made)
        found = self._made[known]
        same = found.holds.sizes == schedule.holds.sizes
        return found if same else replace(found, holds=schedule.holds)

    def _note(self, schedule: Schedule, entries: Sequence[Entry], every: Sequence[bytes]) -> None:
        """Remember what the ranks have told; `every`: one row, if all told the same."""
        refs = [entries[n].ref for n in self._read[schedule.serial]]
        if len(every) == 1:
            every = list(every) * self._fabric.size
        *wholes, copies = zip(*every, strict=True)
        self._readers.update(rank for rank, reads in enumerate(copies) if reads)
        kept = frozenset(ref for ref, states in zip(refs, wholes, strict=True) if states[0])
        self._of_first[schedule.serial] = _Told(self._step, kept, bool(copies[0]))
        for ref, states in zip(refs, wholes, strict=True):
            self._seen_wholes |= any(states)
            to_be_kept = self.is_asked_for or ref in kept
            if to_be_kept and any(states) and Kept.NOT_KEPT in states:
                self._seen_alone.add(ref)


def _state(entry: Entry, read: GatheredAs) -> Kept:
    """read  how a call gathers it; what is kept may be of another dtype, that of another call"""
    kept = entry.whole
    if kept is None or (kept.entry.nbytes, kept.dtype) != read:
        return Kept.NOT_KEPT
    return Kept.UP_TO_DATE if entry.has_whole else Kept.OUT_OF_DATE
