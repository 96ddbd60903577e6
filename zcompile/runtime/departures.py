"""Bytes that are still on their way out of the arena.

A store that ends a schedule reads its slot while the next schedule already begins. Within one
schedule the `after` of a fetch says what to wait for; between schedules this does: a fetch waits
for every departure that it would overwrite.
"""

from collections.abc import Sequence

from torch import Tensor

from zcompile.runtime.transfer.ticket import Ticket

MANY = 64
"""Departures kept before those that ended are forgotten; a step has a few under way at once."""


class Departures:
    """The transfers out of device memory that have not ended."""

    def __init__(self) -> None:
        self._leaving: list[tuple[int, int, Ticket]] = []

    def leave(self, source: Tensor, ticket: Ticket) -> None:
        """`ticket` is complete once nothing reads `source` any more."""
        if len(self._leaving) > MANY:
            self._leaving = [row for row in self._leaving if not row[2].done()]
        begin = source.data_ptr()
        self._leaving.append((begin, begin + source.nbytes, ticket))

    def under(self, target: Tensor) -> Sequence[Ticket]:
        """What must end before `target` is overwritten."""
        self._leaving = [row for row in self._leaving if not row[2].done()]
        begin = target.data_ptr()
        end = begin + target.nbytes
        return [ticket for low, high, ticket in self._leaving if low < end and begin < high]
