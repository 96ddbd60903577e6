"""Writes down a training step as it happens: which schedules ran, on which entries.

What is recorded is as pure as what a plan on paper starts from (`ir/step.py`): no entry, no
tensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zcompile.ir.schedule import Reduce, Schedule
from zcompile.ir.step import EntryFact, Step, StepCall
from zcompile.ir.types import Kind, Phase
from zcompile.runtime.store.store import Entry
from zcompile.runtime.tiers.tiers import TierIO

MOST_CALLS = 20_000
"""Of one step; beyond that, nobody ends it: a loop that updates parameters by itself."""


MOST_KNOWN = 1024
"""Calls of which is remembered what was written down; a step has a few, unless they vary."""


@dataclass(frozen=True)
class _Known:
    """What was written down of one call, on entries that rested and were what `alike` says."""

    alike: tuple[list[TierIO], list[Kind]]
    call: StepCall
    facts: Mapping[int, EntryFact]
    gradients: Mapping[int, EntryFact]


class Recorder:
    """The calls since a step began: with the first forward after an optimizer was done.

    Several optimizers, or one that runs within backward, make one step together. A forward without
    a backward counts once, however often it runs: an evaluation is no part of the step, and a
    frozen piece of a model is. A recorder that is not `on` costs nothing.
    """

    def __init__(self) -> None:
        self.on = False
        self._stepped = False
        self._noted = False
        self._calls: list[StepCall] = []
        self._alone: set[tuple[int, tuple[int, ...]]] = set()
        self._facts: dict[int, EntryFact] = {}
        self._known: dict[tuple[int, tuple[int, ...], tuple[int, ...]], _Known] = {}

    def note(self, schedule: Schedule, entries: Sequence[Entry]) -> None:
        """A schedule is about to run."""
        self._noted = False
        if not self.on:
            return
        if len(self._calls) >= MOST_CALLS:
            return
        known = self._know(schedule, entries)
        call = known.call
        if schedule.phase is Phase.FORWARD and not schedule.trains:
            if (schedule.serial, call.entries) in self._alone:
                return
            self._alone.add((schedule.serial, call.entries))
        self._facts = {**known.gradients, **self._facts, **known.facts}
        self._calls.append(call)
        self._noted = True

    def made(self, entries: Sequence[Entry]) -> None:
        """The schedule that was noted last has run, and made these entries."""
        if self._noted:
            self._calls[-1] = replace(self._calls[-1], made=tuple(key_of(e) for e in entries))
            self._facts |= facts_of(entries)

    def _know(self, schedule: Schedule, entries: Sequence[Entry]) -> "_Known":
        """What there is to write down of a call; as in the last step, while entries are alike."""
        keys = tuple([e.key if e.of is None else -e.of for e in entries])
        alike = [e.place.tier for e in entries], [e.kind for e in entries]
        passing = Kind.ACTIVATION in alike[1]  # these have new keys in every call
        sizes = schedule.holds.sizes
        same = schedule.serial, sizes, _kept(entries, keys) if passing else keys
        known = self._known.get(same)
        if known is None or known.alike != alike:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            call, facts = StepCall(schedule, keys), facts_of(entries)
            known = _Known(alike, call, facts, _gradients(schedule, entries))
            self._known[same] = known
        if passing and known.call.entries != keys:
            known = replace(known, call=StepCall(schedule, keys), facts=facts_of(entries))
        return known

    def stepped(self) -> None:
        """An optimizer is done. What nothing forward came before is not a step to plan for."""
        if any(call.phase is Phase.FORWARD for call in self._calls):
            self._stepped = True
        else:
            self.end()

    def ends_with(self, schedule: Schedule) -> bool:
        """Whether the next step begins with `schedule`."""
        return self._stepped and schedule.phase is Phase.FORWARD

    def end(self) -> Step | None:
        """The step that has just ended; None, if nothing of it was recorded."""
        self._stepped = False
        self._alone.clear()
        calls, facts, self._calls, self._facts = tuple(self._calls), self._facts, [], {}
        return Step(calls, facts, _micro_batches(calls)) if calls else None


def _kept(entries: Sequence[Entry], keys: Sequence[int]) -> tuple[int, ...]:
    """`keys` without those of values that only this call has, whose places stay."""
    pairs = zip(entries, keys, strict=True)
    return tuple([0 if e.kind is Kind.ACTIVATION else key for e, key in pairs])


def _micro_batches(calls: Sequence[StepCall]) -> int:
    """How often the backward of the most walked piece ran."""
    serials = [call.schedule.serial for call in calls if call.phase is Phase.BACKWARD]
    return max((serials.count(serial) for serial in set(serials)), default=1)


def facts_of(entries: Sequence[Entry]) -> dict[int, EntryFact]:
    """Of each entry, by its key in a record."""
    facts = {}
    for entry in entries:
        key = key_of(entry)
        facts[key] = EntryFact(key, entry.name, entry.kind, entry.nbytes, entry.home)
    return facts


def _gradients(schedule: Schedule, entries: Sequence[Entry]) -> dict[int, EntryFact]:
    """Of the gradients that a backward makes, which are entries later on."""
    facts = {}
    for x in schedule.instructions if schedule.phase is Phase.BACKWARD else ():
        if isinstance(x, Reduce):
            param = entries[x.entry]
            fact = EntryFact(
                -param.key, f"{param.name}.grad", Kind.GRAD, x.of_nbytes or x.nbytes, "host"
            )
            facts[fact.key] = fact
    return facts


def key_of(entry: Entry) -> int:
    """Of the entry in a record: a gradient goes by its parameter, since it is new in each step."""
    return -entry.of if entry.of is not None else entry.key
