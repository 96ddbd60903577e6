"""Joins neighbouring regions between which nothing moves."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import TypeGuard

from zcompile.ir.joined_levels import SentGradient, joins_of
from zcompile.ir.regions import Link, join
from zcompile.ir.schedule import (
    Departure,
    EntryIndex,
    ReadValue,
    Reduce,
    RegionProgram,
    Register,
    Run,
)
from zcompile.ir.types import LiveBytes


def join_regions(program: RegionProgram, levels: Sequence[LiveBytes]) -> RegionProgram:
    """Make one region of neighbours between which no fetch starts or is waited for, no slot is
    given back, and nothing leaves but gradients that stay on the device.

        region 0: mm                              region 0: mm relu mm
        after it the gradient of a stays   ->     after it the gradients of a, b stay
        region 1: relu mm
          reads w in place                          reads w in place
        after it the gradient of b stays

    Where everything rests on the device nothing needs the borders that parameters and gradients
    have cut, and each region costs the host about as much as a kernel does. The ops are the same in
    the same order. A gradient that stays takes its bytes whether it is sent at once or behind the
    joined region.

    levels  live bytes of the program, one region at a time (`Schedule.holds`)
    """
    numbers = _LevelNumbers.of(program)
    borders = _borders(program, numbers, levels)
    groups: list[list[int]] = []
    for n in range(len(program.regions)):
        if n in borders:
            groups.append([])
        groups[-1].append(n)
    if len(groups) == len(program.regions):
        return program
    group_of = [group for group, regions in enumerate(groups) for _ in regions]
    stays = frozenset(x.entry for x in chain(*program.departures) if _stays(x))
    behind = [[n + 1 for n in regions] for regions in groups]
    order: list[tuple[int, ...]] = [(number,) for number in numbers.sent[0]]
    for regions, after in zip(groups, behind, strict=True):
        if ran := tuple(number for n in regions if (number := numbers.ran[n]) is not None):
            order.append(ran)
        order += [(number,) for n in after for number in numbers.sent[n]]
    return replace(
        program,
        outline=replace(program.outline, level_order=tuple(order)),
        regions=tuple(_joined([program.regions[n] for n in g], stays) for g in groups),
        departures=(
            program.departures[0],
            *(tuple(chain(*(program.departures[n] for n in after))) for after in behind),
        ),
    ).with_values(_renumbered(value, group_of) for value in program.values)


# --- Borders that remain ---


@dataclass(frozen=True)
class _LevelNumbers:
    """Which of the levels of a program is whose.

    ran   of each region; None of a late update, which changes no live bytes
    sent  sent[n]: of what leaves before region n
    """

    ran: list[int | None]
    sent: list[list[int]]

    @classmethod
    def of(cls, program: RegionProgram) -> "_LevelNumbers":
        number, ran, sent = count(), list[int | None](), list[list[int]]()
        for n, leaving in enumerate(program.departures):
            sent.append([next(number) for x in leaving if x.effects.changes_live])
            if n < len(program.regions):
                ran.append(next(number) if program.regions[n].late is None else None)
        return cls(ran, sent)


def _stays(x: Departure) -> TypeGuard[Reduce]:
    """Whether a departure is a gradient that stays on the device, and that nobody reads later."""
    return isinstance(x, Reduce) and x.stays and x.drop and not x.of_nbytes


def _borders(
    program: RegionProgram, numbers: _LevelNumbers, levels: Sequence[LiveBytes]
) -> frozenset[int]:
    """The regions that stay apart from the one before."""
    borders = {0}
    for value in program.fetched:
        borders |= {value.start, value.first, value.read_whole, value.last + 1}
        if value.written is not None:
            borders.add(value.written + 1)
        if value.share is not None:
            borders |= {value.gather, value.share.updated}
    for n, run in enumerate(program.regions):
        if run.region.body is None:  # nothing is known of its code
            borders |= {n, n + 1}
    for n, leaving in enumerate(program.departures):
        if not all(map(_stays, leaving)):
            borders.add(n)
    return frozenset(borders.union(_joining(program, numbers, levels)))


def _joining(
    program: RegionProgram, numbers: _LevelNumbers, levels: Sequence[LiveBytes]
) -> Iterator[int]:
    """The regions before which gradients are joined that do not stay: these take room until they
    are, so that must not be later."""
    sent = [
        (n, SentGradient(number, x.nbytes, x.stays))
        for n, leaving in enumerate(program.departures)
        for number, x in zip(
            numbers.sent[n], (x for x in leaving if x.effects.changes_live), strict=True
        )
        if isinstance(x, Reduce)
    ]
    joined, _ = joins_of(levels, [gradient for _, gradient in sent])
    for (_, gradient), position in zip(sent, joined, strict=True):
        if not gradient.stays and position < len(sent):
            yield sent[position][0]


# --- Joining ---


def _joined(runs: Sequence[Run], stays: frozenset[EntryIndex]) -> Run:
    """One region that computes what these do; the gradients of `stays` have no address to be
    computed into."""
    if len(runs) == 1:
        return runs[0]
    made = {
        register: name
        for run in runs
        for register, name in zip(run.outputs, run.names, strict=True)
    }
    dropped = [register for run in runs for register in run.drops]
    inputs = dict.fromkeys(r for run in runs for r in run.inputs if r not in made)
    outputs = [r for r in made if r not in set(dropped)]
    # Registers become numbers in the order in which they are met, so that equal blocks are equal.
    numbers: dict[Register, int] = {}

    def numbered(registers: Sequence[Register]) -> tuple[int, ...]:
        return tuple(numbers.setdefault(register, len(numbers)) for register in registers)

    into: dict[Register, EntryIndex] = {}
    links = []
    for run in runs:
        placed = [run.outputs[at] for at in run.region.placed]
        if stays.isdisjoint(run.into):
            into |= zip(placed, run.into, strict=True)
        else:
            placed = []
        links.append(
            Link(run.region, numbered(run.inputs), numbered(run.outputs), numbered(placed))
        )
    region = join(tuple(links), numbered([*inputs]), numbered(outputs))
    return Run(
        region,
        tuple(inputs),
        tuple(outputs),
        tuple(r for r in dropped if r in inputs),
        names=tuple(made[r] for r in outputs),
        into=tuple(into[outputs[at]] for at in region.placed),
    )


def _renumbered(value: ReadValue, group_of: Sequence[int]) -> ReadValue:
    """The value, read by joined regions."""
    share = value.share
    return value._replace(
        first=group_of[value.first],
        last=group_of[value.last],
        written=None if value.written is None else group_of[value.written],
        start=group_of[value.start],
        gather=group_of[value.gather],
        reader=None if value.reader is None else group_of[value.reader],
        share=None if share is None else share._replace(updated=group_of[share.updated]),
    )
