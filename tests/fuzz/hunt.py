"""Programs are drawn until one fails; what fails is shrunk."""

from collections.abc import Callable
from typing import Any

from fuzz.program import Different, Program, shrunk
from fuzz.rules import Machine
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.stateful import run_state_machine_as_test

STEPS = 25
"""Rules that are drawn for a program, at most; some add several steps."""

Told = Callable[[Program, str], None]
"""Told of each step before it is run."""


def hunt(
    budget: str, number: int, programs: int, told: Told | None = None, **fields: Any
) -> Different | None:
    """The first of so many programs that fails, shrunk; the same for the same `number`.

    fields  of `Machine`
    """
    if told is not None:
        fields["told"] = staticmethod(told)
    machine = type(f"{budget.title()}Machine", (Machine,), {"budget": budget, **fields})
    once = settings(
        max_examples=programs,
        stateful_step_count=STEPS,
        database=None,
        deadline=None,
        # Programs are shrunk by leaving out steps, which takes seconds where Hypothesis takes
        # minutes: each attempt offloads a model.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
    )
    try:
        run_state_machine_as_test(seed(number)(machine), settings=once)
    except Different as found:
        return shrunk(found)
    return None
