"""What a step was predicted to take, as plain numbers beside those that were measured."""

from collections.abc import Mapping
from typing import Any

from zcompile.ir.step import Step, Timeline
from zcompile.ir.types import Phase
from zcompile.machine.cost import Costs
from zcompile.planner.simulate import simulate


def predicted(step: Step, costs: Costs, homes: Mapping[int, str] | None = None) -> dict[str, Any]:
    """One step of many alike, simulated; in the words of `zcompile.stats`.

    step_s   seconds of it
    bound_s  seconds that no step of the same plan can be below: its compute, or its busiest link
    seconds  `compute` of forward and backward, `stall`, `optimizer` (compute of the step phase)
    phases   seconds of each, all that the host does between two calls counted to the later one
    bytes    over each link
    busy     seconds that each link is in use
    peak     bytes of the `device`

    raises  Unsupported, if the machine lacks a link that the step needs
    """
    return told(simulate(step, costs, homes), step)


def told(timeline: Timeline, step: Step) -> dict[str, Any]:
    """A timeline of `step` as plain numbers."""
    optimizer_s = sum(
        moment.end_s - moment.begin_s
        for moment in timeline.moments
        if moment.is_work and step.calls[moment.call].phase is Phase.STEP
    )
    return {
        "step_s": timeline.step_s,
        "bound_s": timeline.least_s,
        "seconds": {
            "compute": timeline.compute_s - optimizer_s,
            "stall": timeline.stall_s,
            "optimizer": optimizer_s,
        },
        "phases": {phase.value: seconds for phase, seconds in timeline.phases.items()},
        "bytes": dict(timeline.nbytes),
        "busy": dict(timeline.busy_s),
        "peak": {
            "device": timeline.peak_bytes,
            "activations": timeline.held_bytes,
            "together": timeline.together_bytes,
        },
    }
