"""No schedule that would hang or mix on a machine of N model ranks is let through.

One rank of the machine walks a mutant, the others what it was made from. A collective of a kind is
over once all ranks have come to the same number of that kind, and carries what each of them
brought: mixed, if these are not of the same weight. What the proof, or the agreement before the
first collective, lets through must end with the same bytes, whatever the ranks' speeds.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from broken_ranks import BACKWARD, BUCKETED, KEEPING, LATE, NARROW, TILED, keeping
from broken_ranks import of_rank as in_phase
from races import recounted
from sampled import crossed

from zcompile.errors import ScheduleInvalid
from zcompile.ir.schedule import (
    Agree,
    Exchange,
    ExchangeBucket,
    Fetch,
    Free,
    Gather,
    LateChunk,
    Reduce,
    Run,
    Schedule,
    Store,
    Wait,
)
from zcompile.ir.types import Phase
from zcompile.verify.schedule import verify_schedule

KINDS = (Agree, Gather, Exchange | ExchangeBucket)
"""Of collectives; those of each kind are carried out one after the other."""
SHARE = 512
"""Bytes of what a rank brings to each gather."""
SPEEDS = 12
"""Orders of events that each mutant is walked in."""


@dataclass
class Rank:
    """One model rank: where its compute is, what has ended, what its memory holds."""

    schedule: Schedule
    at: int = 0
    ended: set[int] = field(default_factory=set)
    """Tickets that are complete."""
    started: list[object] = field(default_factory=list)
    """Transfers that were started and have not ended."""
    turns: dict[type, int] = field(default_factory=dict)
    """Collectives of each kind that are over."""
    shares: dict[int, str] = field(default_factory=dict)
    """Address -> the share of this rank that lies there."""
    slots: dict[int, str] = field(default_factory=dict)
    """Address -> what is read there: a share, or a whole."""
    lies: dict[int, int] = field(default_factory=dict)
    """Register -> the address that it lies at."""
    memory: dict[int, str] = field(default_factory=dict)
    """Address -> what lies there, also once it was given back."""
    bucket: list[str] = field(default_factory=list)
    values: dict[int, str] = field(default_factory=dict)
    result: list[str] = field(default_factory=list)
    """What compute has read, and what went home."""

    def ready(self, transfer: object) -> bool:
        """Whether a transfer may start: all that it waits for is complete."""
        return set(getattr(transfer, "after", ())) <= self.ended

    def first_of(self, kind: type) -> object | None:
        """The collective of a kind that is next, if it is started and may begin."""
        rows = [x for x in self.started if isinstance(x, kind)]
        return rows[0] if rows and self.ready(rows[0]) else None

    def compute(self) -> bool:
        """Go one instruction further; False, if that must wait."""
        if self.at == len(self.schedule.instructions):
            return False
        x = self.schedule.instructions[self.at]
        match x:
            case Wait():
                if x.ticket not in self.ended:
                    return False
                self.values[x.register] = self.slots.get(x.slot.address, "nothing")
                self.lies[x.register] = x.slot.address
            case Run(late=LateChunk()):
                (register,) = x.inputs
                at = self.lies.get(register, -1)
                self.shares[at] = f"new {self.shares.get(at, 'nothing')}"
                self.result.append(f"{self.shares[at]} over {self.slots.get(at)}")
                self.ended |= {x.ticket} - {None}
            case Run():
                self.result.append("+".join(self.values.get(r, "input") for r in x.inputs))
                self.values |= dict.fromkeys(x.outputs, self.result[-1])
                self.ended |= {x.ticket} - {None}
            case Free():
                self.slots.pop(x.slot.address, None)
            case Reduce(bucketed=True):
                self.bucket.append(f"{x.name} of {self.values.get(x.value, 'nothing')}")
            case _:
                self.started.append(x)
        self.at += 1
        return True

    def end(self, x: object, brought: tuple[str, ...] = ()) -> None:
        """A transfer ends; a collective with what each rank has brought."""
        self.started.remove(x)
        match x:
            case Fetch():
                of = x.name if x.tile is None else f"{x.name} at {x.tile.begin + x.offset}"
                share = f"share of {of}" if x.nbytes == SHARE else f"{x.nbytes} of {of}"
                self.slots[x.slot.address] = self.shares[x.slot.address] = share
                self.memory[x.slot.address] = share
            case Store():
                lies = self.shares if x.offset else self.memory
                self.result.append(f"{x.name} becomes {lies.get(x.slot.address)}")
            case ExchangeBucket():
                self.result.append(f"bucket of {' '.join(brought)}")
            case Gather():
                self.memory[x.slot.address] = f"whole of {' '.join(brought)}"
                self.slots[x.slot.address] = self.memory[x.slot.address]
            case Exchange():
                self.values[x.register] = f"parts of {' '.join(brought)}"
            case Reduce():
                self.result.append(f"{x.name} gets {self.values.get(x.parts, 'nothing')}")
        self.ended |= {getattr(x, "ticket", None)} - {None}


def brings(rank: Rank, x: object) -> str:
    """What a rank brings to a collective."""
    if isinstance(x, Gather):
        return rank.shares.get(x.slot.address, "nothing")
    if isinstance(x, ExchangeBucket):
        return " and ".join(rank.bucket)
    return rank.values.get(x.value, "nothing") if isinstance(x, Exchange) else "a record"


def walked(schedules: list[Schedule], order: random.Random) -> list[list[str]] | str:
    """What each rank has read and sent home; "hangs", if they wait for each other for ever."""
    ranks = [Rank(schedule) for schedule in schedules]
    while True:
        acts: list[tuple[object, ...]] = []
        for number, rank in enumerate(ranks):
            acts.append(("compute", number))
            kinds = Fetch | Reduce | Store
            alone = (x for x in rank.started if isinstance(x, kinds) and rank.ready(x))
            acts += [("end", number, x) for x in alone]
        acts += [("together", kind) for kind in KINDS]
        order.shuffle(acts)
        if not any(acted(ranks, act) for act in acts):
            break
    if any(rank.at < len(rank.schedule.instructions) or rank.started for rank in ranks):
        return "hangs"
    return [sorted(rank.result) for rank in ranks]


def acted(ranks: list[Rank], act: tuple[object, ...]) -> bool:
    """Carry out one event, if it can happen."""
    match act:
        case ("compute", int(number)):
            return ranks[number].compute()
        case ("end", int(number), x):
            if x not in ranks[number].started:
                return False
            ranks[number].end(x)
            return True
        case ("together", kind):
            rows = [rank.first_of(kind) for rank in ranks]
            if None in rows:
                return False
            brought = tuple(brings(rank, x) for rank, x in zip(ranks, rows, strict=True))
            for rank, x in zip(ranks, rows, strict=True):
                rank.end(x, brought)
            return True
    raise AssertionError(act)


def mutants(
    rows: tuple[object, ...], of_rank: Callable[[tuple[object, ...]], Schedule]
) -> Iterator[tuple[str, Schedule]]:
    """Every swap of two instructions, every instruction left out, every ticket not waited for."""
    for a in range(len(rows)):
        yield f"without {a}", of_rank((*rows[:a], *rows[a + 1 :]))
        for b in range(a + 1, len(rows)):
            swapped = list(rows)
            swapped[a], swapped[b] = swapped[b], swapped[a]
            yield f"{a} and {b} swapped", of_rank(tuple(swapped))
        for ticket in getattr(rows[a], "after", ()):
            left = tuple(t for t in rows[a].after if t != ticket)
            yield (
                f"{a} without t{ticket}",
                of_rank((*rows[:a], replace(rows[a], after=left), *rows[a + 1 :])),
            )
        if isinstance(rows[a], Fetch):  # as it is in another dtype
            for nbytes in (SHARE // 2, 2 * SHARE):
                other = replace(
                    rows[a], nbytes=nbytes, offset=nbytes // SHARE * SHARE % (2 * SHARE)
                )
                yield f"{a} brings {nbytes}", of_rank((*rows[:a], other, *rows[a + 1 :]))
        if isinstance(rows[a], Gather | Exchange):
            less = replace(rows[a], nbytes=rows[a].nbytes // 2)
            yield f"{a} of half the bytes", of_rank((*rows[:a], less, *rows[a + 1 :]))
            for entry in (0, 1):
                if entry != rows[a].entry:
                    yield (
                        f"{a} of another entry",
                        of_rank((*rows[:a], replace(rows[a], entry=entry), *rows[a + 1 :])),
                    )


def is_let_through(mutant: Schedule, sound: Schedule) -> bool:
    """Whether the proof and the agreement of the ranks let a schedule through."""
    try:
        verify_schedule(mutant)
    except ScheduleInvalid:
        return False
    return mutant.collectives == sound.collectives


EXAMPLES = {
    "gathers and exchanges": (BACKWARD, in_phase, 60),
    "a bucket": (BUCKETED, in_phase, 15),
    "late updates of shares": (LATE, partial(in_phase, phase=Phase.FORWARD), 60),
    "kept for later calls": (KEEPING, keeping, 40),
    "in low precision": (NARROW, in_phase, 60),
    "in tiles": (TILED, in_phase, 60),
}
"""What a rank does; what makes a schedule of it; of how many mutants the machine sees at least that
they are wrong."""


@pytest.mark.parametrize(("kind", "ranks"), crossed(EXAMPLES, (2, 3)))
def test_what_hangs_or_mixes_is_refused(kind, ranks):
    rows, make, least = EXAMPLES[kind]
    sound = make(rows)
    expected = walked([sound] * ranks, random.Random(0))
    assert expected != "hangs"
    through, refused, seen = 0, 0, 0
    for name, mutant in mutants(rows, make):
        bad = [
            found
            for seed in range(SPEEDS)
            if (found := walked([mutant, *[sound] * (ranks - 1)], random.Random(seed))) != expected
        ]
        if is_let_through(mutant, sound):
            assert not bad, f"{name}: {bad[0]}"
            through += 1
        else:
            refused += 1
            seen += bool(bad)
    assert through, "some mutants change nothing"
    assert seen > least, "the machine sees what the proof refuses"
    assert refused > seen


def test_the_machine_sees_that_two_gathers_change_places():
    sound = in_phase(BACKWARD)
    other = list(BACKWARD)
    other[2], other[4] = replace(other[2], after=(1,)), replace(other[4], after=(0, 3))
    other[2], other[4] = other[4], other[2]
    mutant = recounted(sound, (*other[:2], BACKWARD[3], *other[2:3], *other[4:]))
    found = walked([mutant, sound], random.Random(1))
    assert found == "hangs" or any("share of w share of v" in row for rows in found for row in rows)
