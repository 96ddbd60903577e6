"""A step without a device: the instructions of the executor, walked on a clock.

The host starts what comes next and waits where the executor would; compute goes on in order, on the
host's own thread or beside it; transfers travel as `traffic.py` says. A step is walked several
times in a row, since what one begins with was started while the one before still ran, and the last
walk is the answer.
"""

from collections.abc import Mapping

from zcompile.ir.step import Step, Timeline
from zcompile.machine.cost import Costs
from zcompile.planner.simulated_steps import SimulatedSteps

REPEATS = 3
"""Walks of a step. The first begins with idle links and nothing ahead; by the third what one step
leaves behind for the next is what it was left itself."""


def simulate(
    step: Step, costs: Costs, homes: Mapping[int, str] | None = None, repeats: int = REPEATS
) -> Timeline:
    """What a step will take, in the middle of a long run of the same.

    homes   key of an entry -> "device", "held", "host" or "disk"; where silent, as it was recorded
    raises  Unsupported, if a transfer needs a link that the machine does not have
    """
    walk = SimulatedSteps(step, costs, homes or {})
    for _ in range(repeats - 1):
        walk.step()
    return walk.timeline()


def step_seconds(
    step: Step, costs: Costs, homes: Mapping[int, str] | None = None, repeats: int = REPEATS
) -> float:
    """`step_s` of what `simulate` says, sooner: for one of many that are compared."""
    walk = SimulatedSteps(step, costs, homes or {}, tells=False)
    for _ in range(repeats - 1):
        walk.step()
    return walk.seconds()
