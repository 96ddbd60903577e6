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


def residual_blocks(layers, **fields):
    """Blocks of a residual stream; of each, backward reads what it makes within and the stream.

    What a block adds to the stream has half its bytes, so a sum is made again of the sum before
    and of that half at next to no cost; but each of them is made again of the one before.
    """
    values, makers = [["stream", 4, 0, 0, ()]], [Maker(0.0, (), (0,))]

    def made(name, nbytes, reads, seconds):
        number = len(values)
        makers.append(Maker(seconds, reads, (number,)))
        values.append([name, nbytes, number, number, ()])
        for read in reads:
            values[read][3] = number
        return number

    stream, saved = 0, []
    for layer in range(layers):
        within = made(f"within{layer}", 8, (stream,), 1.0)
        added = made(f"added{layer}", 2, (within,), 1.0)
        saved += [stream, within]
        stream = made(f"sum{layer}", 4, (stream, added), 0.01)
    boundary = len(makers)
    for at, number in enumerate(reversed(saved), boundary):
        values[number][4] = (at,)
    found = tuple(Value(*row, maker) for maker, row in enumerate(values))
    other = [0] * (boundary + len(saved))
    return Problem(found, tuple(makers), (), other, boundary, slack_s=(1.0, 1.0), **fields)
