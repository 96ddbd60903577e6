"""Steps written by hand, whose least time is known."""

from zcompile.ir.schedule import SERIALS, Schedule
from zcompile.ir.types import Phase
from zcompile.machine.model import Link
from zcompile.planner.bounds import Demand, Segment

F, B, S = Phase.FORWARD, Phase.BACKWARD, Phase.STEP


P = 1_000
"""Bytes of the weights, of their gradients, and of each of two states."""


def links(**rates):
    given = {"h2d": 100.0, "d2h": 100.0, **rates}
    return {name: Link(name, rate) for name, rate in given.items()}


def training(compute_s=(1.0, 2.0, 0.0), micro_batches=1):
    """Weights, gradients and states of a step, as `demand_of` would find them."""
    ahead = [
        Segment(F, compute_s[0], (P, 0, 0), (0, 0, 0), (True, True, True)),
        Segment(B, compute_s[1], (P, 0, 0), (0, P, 0), (True, True, True)),
    ]
    last = Segment(S, compute_s[2], (P, P, 2 * P), (P, 0, 2 * P), (True, False, True))
    return Demand((P, P, 2 * P), (*ahead * micro_batches, last))


def schedule(phase, *instructions):
    return Schedule(
        phase, phase.value, instructions, (), 0, (), (), 0, (), next(SERIALS), 0, 0, None, {}
    )
