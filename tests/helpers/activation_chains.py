"""Chains of values that a backward needs."""

from zcompile.passes.plan_activations.problem import (
    Maker,
    Problem,
    Value,
)


def chain(*sizes, seconds=1.0, read_back=True, **fields):
    """Ops one after the other; op n reads value n - 1 and makes value n, of `sizes[n]` bytes. All
    are read in backward, the last first; or only every second one is saved."""
    count = len(sizes)
    values, makers = [], []
    for n, size in enumerate(sizes):
        readers = (2 * count - n,) if read_back or n % 2 == 0 else ()
        values.append(Value(f"v{n}", size, n, min(n + 1, count - 1), readers, n))
        cost = seconds if isinstance(seconds, float) else seconds[n]
        makers.append(Maker(cost, (n - 1,) if n else (), (n,)))
    given = {"tiers": {}, "slack_s": (0.0, 0.0), "budget": sum(sizes), **fields}
    return Problem(tuple(values), tuple(makers), (), [0] * (2 * count + 2), count, **given)
