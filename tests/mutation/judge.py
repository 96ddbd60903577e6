"""What the verifier says of a mutant, and what running it says."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mutation.host import Broken, listed, written_registers
from mutation.machine import run
from mutation.mutants import MUTATIONS
from mutation.orders import ORDERS

from zcompile.errors import ScheduleInvalid
from zcompile.ir.schedule import Schedule
from zcompile.verify.schedule import verify_schedule


@dataclass(frozen=True)
class Verdict:
    """rule     the verifier's sentence without what varies in it; "" if it accepts
    changed  how it shows, when run, that the mutant means something else; "" if it does not;
             None if it was not run
    """

    mutation: str
    what: str
    rule: str
    changed: str | None


def rule_of(schedule: Schedule) -> str:
    try:
        verify_schedule(schedule)
    except ScheduleInvalid as error:
        return re.sub(r"Slot\(.*?\)|'[^']*'|\d+", "_", error.why)
    return ""


def meaning(schedule: Schedule) -> bytes:
    """What comes out of it; the same in every order, or it is no schedule to mutate."""
    listing = listed(schedule, written_registers(schedule))
    (result,) = {run(schedule, listing, order) for order in ORDERS.values()}
    return result


def changed(schedule: Schedule, mutant: Schedule, expected: bytes) -> str:
    """The first order in which it gives something else, or what breaks; "" if nothing does."""
    try:
        listing = listed(mutant, written_registers(schedule))
    except Broken as broken:
        return str(broken)
    for name, order in ORDERS.items():
        if run(mutant, listing, order) != expected:
            return name
    return ""


def verdicts(
    schedule: Schedule,
    about: int | None = None,
    run_all: bool = False,
) -> Iterator[Verdict]:
    """Of all mutants, or of `about` so many of each mutation where there are more, evenly spread.
    Those the verifier catches are run only if `run_all`."""
    expected = meaning(schedule)
    for mutation, mutants in MUTATIONS.items():
        found = list(mutants(schedule))
        # An odd stride meets every way of changing an instruction in turn.
        stride = 1 if about is None or len(found) <= about else len(found) // about | 1
        for what, make in found[::stride]:
            if (mutant := make()).instructions == schedule.instructions:
                continue
            rule = rule_of(mutant)
            ran = run_all or not rule
            yield Verdict(
                mutation, what, rule, changed(schedule, mutant, expected) if ran else None
            )
