"""How the device is shared between values that wait for backward and slots for what streams. Pure.

A byte of slots lets fetches start earlier, and parameters and their gradients rest on the device; a
byte of values saves making them again, or moving them. So a few windows for slots are tried, from
the smallest that will do to what everything could rest in; for each the values are chosen, and the
fastest is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zcompile.passes.plan_activations.activation_choice import Choice, choose, wishes
from zcompile.passes.plan_activations.activation_problem import BUSY, Problem, answer

WINDOWS = (1.0, 1.5, 2.0, 4.0)
"""Windows that are tried, as parts of the smallest that holds what is read together."""
RESTING = (0.5, 1.0, 2.0, 4.0)
"""Others have room for so many times all parameters, beside twice the smallest: 2 with their
gradients, 4 with two states of each as well, or with what is read back."""
STREAMED_S = 0.5e-3
"""Of the host, for a parameter fetched twice and whose gradient leaves: the order of what it
takes on two cores. The same everywhere, so that a plan does not hang on the hour it was made in."""


@dataclass(frozen=True)
class Streams:
    """compute_s  seconds of forward and of backward
    weights_s    for which links are busy with weights and gradients in each, if none rest
    nbytes       of all weights
    count        of weights whose transfers the host starts in compute's stead
    """

    compute_s: tuple[float, float]
    weights_s: tuple[float, float]
    nbytes: int
    count: int = 0


def split(problem: Problem, streams: Streams, ways: Sequence[str], margin: int = 0) -> Choice:
    """The fastest answer to `problem` over several windows.

    margin  bytes of the budget to leave alone
    """
    problem = replace(problem, budget=problem.budget - margin)
    begin = answer(problem, wishes(problem, ways))
    least = max(begin.slots, default=0)
    rest = problem.budget - max(begin.held, default=0)
    windows = sorted({
        *(int(least * part) for part in WINDOWS), max(rest, least),
        *(2 * least + int(streams.nbytes * part) for part in RESTING),
    })  # fmt: skip
    best: tuple[bool, float, int] | None = None
    for window in windows:
        made = choose(replace(problem, window=window), ways, quickly=True)
        took = (not made.fits, seconds(problem, streams, made), window)
        best = took if best is None else min(best, took)
        if not made.fits:
            break  # a larger window leaves less for values
    assert best is not None, "at least the smallest window is tried"
    return choose(replace(problem, window=best[2]), ways)


def seconds(problem: Problem, streams: Streams, made: Choice) -> float:
    """Of forward and backward together: a phase takes as long as its compute or its links, and as
    both together where no fetch can start before what it follows is read. Besides, what the host
    starts takes its time, and what links do a part of theirs."""
    found = made.answer
    least = max(1, max(found.slots, default=0))
    window = problem.budget - max(found.held, default=0)
    ahead = min(1.0, max(0.0, window / least - 1))
    resting = min(1.0, max(0, window - 2 * least) / max(1, 2 * streams.nbytes))
    total = STREAMED_S * streams.count * (1 - resting)
    for phase in (0, 1):
        compute = streams.compute_s[phase] + (found.again_s if phase else 0.0)
        links = streams.weights_s[phase] * (1 - resting)
        for tier, nbytes in found.moved.items():
            away = problem.tiers[tier]
            links += nbytes * (away.back_s if phase else away.leave_s)
        total += max(compute, links) + (1 - ahead) * min(compute, links) + BUSY * links
    return total
