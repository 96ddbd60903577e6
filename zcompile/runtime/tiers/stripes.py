"""Stripes: one tensor over several disks, so that all of them carry it at once."""

from collections.abc import Iterator
from typing import NamedTuple

from zcompile.ir.units import MiB

STRIPE_BYTES = 16 * MiB
"""One request of the engine: shorter stripes would cut requests, longer ones leave disks idle at
the ends of a tensor."""


class Stretched(NamedTuple):
    """Bytes [begin, end) of a tensor, which lie in part `part` from `offset` on."""

    part: int
    offset: int
    begin: int
    end: int


def share_of(part: int, parts: int, nbytes: int) -> int:
    """Bytes of a tensor of `nbytes` that lie in one of its parts."""
    rows, rest = divmod(nbytes, STRIPE_BYTES * parts)
    return rows * STRIPE_BYTES + min(max(rest - part * STRIPE_BYTES, 0), STRIPE_BYTES)


def stretches(parts: int, begin: int, end: int) -> Iterator[Stretched]:
    """[begin, end) of a tensor cut where stripes end; stripe n lies in part n % parts."""
    while begin < end:
        stripe, inside = divmod(begin, STRIPE_BYTES)
        row, part = divmod(stripe, parts)
        stop = min(end, (stripe + 1) * STRIPE_BYTES)
        yield Stretched(part, row * STRIPE_BYTES + inside, begin, stop)
        begin = stop
