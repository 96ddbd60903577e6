"""Device memory on its way home: held until a planned point, not until a copy happens to end.

Gradients lie in memory that compute made, outside the arena. Before one leaves, the oldest of
those under way are joined until all of them take no more than the schedule allows. When memory
comes back does then not depend on how fast a link is, so what is held at once can be counted
before it happens (`memory/footprint.py`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from zcompile.runtime.holding import Holding, Row, Rows
from zcompile.runtime.transfer.ticket import Ticket


@dataclass(frozen=True)
class _Departure:
    """nbytes   that count against what may be under way at once
    tickets  complete once nothing reads `sources` any more
    rows     of the storages that `sources` hold
    """

    nbytes: int
    tickets: Sequence[Ticket]
    sources: Sequence[Tensor | Row]
    rows: Rows


class Leaving:
    """What is under way, oldest first.

    waited_s  how long joins have waited, in all
    """

    def __init__(self, holding: Holding) -> None:
        self.waited_s = 0.0
        self._holding = holding
        self._departures: deque[_Departure] = deque()
        self._nbytes = 0
        self._sent: list[tuple[Ticket, Tensor | Row]] | None = None

    def crowded(self, nbytes: int, most_bytes: int) -> bool:
        """Whether some are to be joined before so many bytes leave."""
        return bool(self._departures) and self._nbytes + nbytes > most_bytes

    def expect(self, nbytes: int, most_bytes: int) -> None:
        """So many bytes are about to leave: join the oldest until all fit into `most_bytes`.

        From here to `sent`, whatever `note` is told of leaves with them.
        raises  what a transfer that is joined failed with until it had read; what fails later is
                raised by the next use of its entry, and by `drain`
        """
        while self.crowded(nbytes, most_bytes):
            self._join()
        self._sent = []

    def note(self, source: Tensor | Row, ticket: Ticket) -> None:
        """`ticket` is complete once nothing reads `source` any more."""
        if self._sent is not None:
            self._sent.append((ticket, source))

    def sent(self, nbytes: int, instead_of: Rows, stays: bool = False) -> None:
        """What was expected is under way, and held for that; `instead_of` no more.

        stays  it is held by more than that until it dies: it was made where it is at home
        """
        sent, self._sent = self._sent or [], None
        sources = [source for _, source in sent]
        (rows,) = self._holding.exchange([instead_of], [sources])
        if stays:
            self._holding.keep(sources)
        self._departures.append(_Departure(nbytes, [t for t, _ in sent], sources, rows))
        self._nbytes += nbytes

    def join(self, most_bytes: int = 0) -> None:
        """No more than `most_bytes` are under way any more. raises  what a transfer failed with"""
        while self._departures and (self._nbytes > most_bytes or not most_bytes):
            self._join()

    def abandon(self) -> None:
        """After an error: whatever was under way is not waited for here."""
        self._holding.exchange([d.rows for d in self._departures], ())
        self._departures.clear()
        self._nbytes, self._sent = 0, None

    def _join(self) -> None:
        departure = self._departures.popleft()
        self._nbytes -= departure.nbytes
        self._holding.exchange([departure.rows], ())
        since = perf_counter()
        for ticket in departure.tickets:
            ticket.wait()
        self.waited_s += perf_counter() - since
