"""The registers of a call: filled from its arguments, computed with, read for its results."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from zcompile.ir.schedule import Literal, Run, Schedule


def compute_only(schedule: Schedule, args: list[Any]) -> list[Any]:
    """A schedule that moves nothing, of a graph without tiered parameters."""
    values = registers_of(schedule, args)
    for run in schedule.instructions:
        assert isinstance(run, Run)
        compute(run, values)
    return results_of(schedule, values)


def registers_of(schedule: Schedule, args: list[Any]) -> list[Any]:
    """The values a call begins with; `args` is emptied, so that they can die early."""
    values: list[Any] = [*args, *[None] * (schedule.registers - len(args))]
    args.clear()
    for register, constant in schedule.constants:
        values[register] = constant
    return values


def compute(run: Run, values: list[Any], targets: Sequence[Tensor] = ()) -> None:
    """The results of a region, in their registers; what it places, in `targets`, if given."""
    given = [values[r] for r in run.inputs]
    for register in run.drops:  # the region owns them: each dies after its last reader inside
        values[register] = None
    if targets:
        assert run.region.call_into is not None
        results = run.region.call_into(given, targets)
    else:
        results = run.region.call(given) if run.region.owns else run.region.call(*given)
    for register, result in zip(run.outputs, results, strict=True):
        values[register] = result


def results_of(schedule: Schedule, values: list[Any]) -> list[Any]:
    """What a call gives."""
    return [r.value if isinstance(r, Literal) else values[r] for r in schedule.outputs]
