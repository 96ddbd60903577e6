"""Describes a training step: the schedules it ran on which entries (`StepTrace`), and when
(`Timeline`).

Pure data. A trace is recorded in a real step or in one of a dry run, and all planning of a whole
step starts from it. A timeline is what the simulator predicts and the executor records.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from zcompile.ir.effects import GRADIENT, NEW, HomeAccess, Instruction
from zcompile.ir.schedule import EntryIndex, Schedule
from zcompile.ir.types import EntryKind, EntryRef, Phase


@dataclass(frozen=True)
class EntryFact:
    """One entry of the store, in the step that was recorded.

    ref     names the same entry in every call
    nbytes  of the whole entry
    home    tier it rested on: "device", "held", "host" or "disk"
    pinned  it rests on the device, whatever is planned
    crosses_wide  its gradient, if it is made in a narrower dtype, crosses between ranks in its own:
            a rank has a hook that sees it
    """

    ref: EntryRef
    name: str
    kind: EntryKind
    nbytes: int
    home: str
    pinned: bool = False
    crosses_wide: bool = False


@dataclass(frozen=True)
class Use:
    """How one call uses one entry: bytes its compute reads and writes."""

    ref: EntryRef
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True)
class StepCall:
    """One walk of a schedule.

    entries  the entry behind each of its entry indices
    made     the entries that it made, new in every call
    """

    schedule: Schedule
    entries: tuple[EntryRef, ...]
    made: tuple[EntryRef, ...] = ()

    @property
    def phase(self) -> Phase:
        return self.schedule.phase

    @cached_property
    def gradients(self) -> tuple[EntryRef, ...]:
        """Of the entry behind each of its entry indices, the gradient."""
        return tuple([ref.gradient for ref in self.entries])

    def entry_of(self, home: HomeAccess) -> EntryRef:
        """The entry that an access is about; of a low-precision copy, the one it was cast from."""
        if home.role is GRADIENT:
            return self.gradients[home.entry]
        return self.made[home.entry] if home.role is NEW else self.entries[home.entry]

    def making(self, gradients: Collection[EntryRef]) -> frozenset[EntryIndex]:
        """Of a backward, the entries whose gradients are among these."""
        if self.phase is not Phase.BACKWARD or not gradients:
            return frozenset()
        return frozenset(
            EntryIndex(n)
            for n, (ref, gradient) in enumerate(zip(self.entries, self.gradients, strict=True))
            if gradient in gradients and not (ref.is_gradient or ref.is_copy)
        )

    def with_staying(self, gradients: Collection[EntryRef]) -> "StepCall":
        """As it is if these gradients stay where compute makes them."""
        if self.schedule.updates_late:
            held = (EntryIndex(n) for n, ref in enumerate(self.entries) if ref in gradients)
            return replace(self, schedule=self.schedule.with_held(frozenset(held)))
        return replace(self, schedule=self.schedule.with_staying(self.making(gradients)))

    def uses(self) -> Iterator[Use]:
        """What compute needs of each entry, however the schedule at hand brings it."""
        read: dict[EntryRef, int] = {}
        written: dict[EntryRef, int] = {}
        for x in self.schedule.effects:
            home = x.home
            if home is None or home.role is NEW:
                continue
            ref = self.entry_of(home)
            if home.reads:
                read[ref] = read.get(ref, 0) + home.nbytes
            if home.writes:
                written[ref] = written.get(ref, 0) + home.nbytes
        for ref in dict.fromkeys((*read, *written)):
            yield Use(ref, read.get(ref, 0), written.get(ref, 0))


@dataclass(frozen=True)
class StepTrace:
    """All calls from one end of an optimizer's step to the next, in order.

    micro_batches  backward passes that fed it
    result_bytes   most bytes of results of list ops that were alive at once, as between two ops of
                   an optimizer; arranged: of which rest on the device
    """

    calls: tuple[StepCall, ...]
    facts: Mapping[EntryRef, EntryFact] = field(default_factory=dict)
    micro_batches: int = 1
    result_bytes: int = 0

    @cached_property
    def serials(self) -> frozenset[int]:
        """Serials of the schedules that its calls walk."""
        return frozenset(call.schedule.serial for call in self.calls)

    @cached_property
    def lasting(self) -> frozenset[EntryRef]:
        """The entries that outlive the step; not the copies of them, in low precision or of the
        shares of all ranks, which come and go with plans."""
        return frozenset(r for r, fact in self.facts.items() if fact.kind.lasting and not r.is_copy)


def joined(before: StepTrace, step: StepTrace) -> StepTrace:
    """`step` and the calls of `before`, unless `step` replaces these.

    A generator and its discriminator take turns, and the entries of each must be planned for.
    """
    if before.lasting <= step.facts.keys():
        return step
    facts = {**before.facts, **step.facts}
    return StepTrace(
        (*before.calls, *step.calls),
        facts,
        max(before.micro_batches, step.micro_batches),
        max(before.result_bytes, step.result_bytes),
    )


def without_dead_entries(step: StepTrace, alive: set[EntryRef]) -> StepTrace:
    """The step without the calls that use entries which are gone, such as states of an optimizer
    made anew, or gradients of these."""
    gone = step.lasting - alive
    facts = {r: f for r, f in step.facts.items() if gone.isdisjoint((r, r.owner))}
    calls = tuple(call for call in step.calls if facts.keys() >= {*call.entries})
    return replace(step, calls=calls, facts=facts)


class Moment(NamedTuple):
    """One instruction of a step: `number`-th of call `call`, with its times.

    Seconds from the beginning of the step; negative before it.

    begin_s, end_s     of compute, or of the host for an instruction that it only starts
    stall_s            that compute, or the host before it goes on, waited before `begin_s`
    sent_s, arrived_s  of the transfer it starts, if it does
    together_bytes     peak during it of the arena and of live bytes outside it, at once
    outside_bytes      peak during it of live bytes outside the arena
    """

    call: int
    number: int
    instruction: Instruction
    begin_s: float
    end_s: float
    stall_s: float = 0.0
    sent_s: float | None = None
    arrived_s: float | None = None
    together_bytes: int = 0
    outside_bytes: int = 0

    @property
    def is_work(self) -> bool:
        """Whether it computes."""
        return self.instruction.effects.region is not None


class Passage(NamedTuple):
    """Bytes of an entry that passed a link, which carries one passage at a time.

    name     of the entry
    begin_s  when the link began to carry them, in seconds of the clock of whoever tells
    call, number  of the instruction that sent them, if that is known
    """

    link: str
    name: str
    nbytes: int
    begin_s: float
    end_s: float
    call: int | None = None
    number: int | None = None


@dataclass(frozen=True)
class Timeline:
    """Times and bytes of one step of many alike.

    step_s          from the end of one step to the end of the next
    compute_s       in regions
    stall_s         that compute waited for transfers
    phases          seconds by phase; time between two calls counts to the later one
    nbytes, busy_s  over each link: bytes, and seconds in which it was in use
    peak_bytes      of entries that rest on the device, and of slots
    held_bytes      peak of values between ops, which lie outside the arena
    together_bytes  peak of both
    """

    step_s: float
    compute_s: float
    stall_s: float
    phases: Mapping[Phase, float]
    nbytes: Mapping[str, int]
    busy_s: Mapping[str, float]
    peak_bytes: int
    held_bytes: int
    together_bytes: int
    moments: tuple[Moment, ...] = ()
    passages: tuple[Passage, ...] = ()

    @property
    def least_s(self) -> float:
        """Lower bound, in seconds, on a step of this plan: compute, or a link that is never idle"""
        return max(self.compute_s, *self.busy_s.values()) if self.busy_s else self.compute_s
