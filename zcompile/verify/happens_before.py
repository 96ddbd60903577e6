"""What surely happens before what, while a schedule runs.

Compute acts in order, so a moment of compute is a number. A transfer has a start and an end. An
order between the two is given by what both devices guarantee, and by nothing else:

    a transfer starts after the moments of compute, and after the ends of the transfers, that it
    is told to wait for
    compute that waits for a transfer goes on after its end, and so after all that it waited for

That an instruction stands above another orders compute with compute alone: the host runs ahead of
the device, copies of one link may overtake each other on their way through the disk, and links run
beside each other.
"""

from collections.abc import Iterable
from dataclasses import dataclass

NEVER = -2
"""Before every moment: of a transfer that waits for no compute at all."""
BEGUN = -1
"""The moment that a call begins: all compute that was submitted before it."""


@dataclass(eq=False, slots=True)
class Transfer:
    """passed  the last moment of compute that surely lies before its start
    after      transfers that surely end before its start, but for those that compute had seen by
               `passed`, so that a chain of transfers stays as long as what is under way
    seen       the moment from which on compute surely comes after its end; None: not yet
    """

    passed: int
    after: frozenset["Transfer"]
    seen: int | None = None

    def starts_after(self, moment: int) -> bool:
        return moment <= self.passed

    def starts_after_end_of(self, other: "Transfer") -> bool:
        return other.ended_by(self.passed) or other in self.after

    def ended_by(self, moment: int) -> bool:
        """Whether compute at `moment` surely comes after its end."""
        return self.seen is not None and self.seen <= moment

    def wait_at(self, moment: int) -> None:
        """Compute waits for it here."""
        for transfer in (self, *self.after):
            if transfer.seen is None:
                transfer.seen = moment


def start(moments: Iterable[int], transfers: Iterable[Transfer]) -> Transfer:
    """A transfer that is told to wait for these moments of compute and these transfers."""
    before = set[Transfer]()
    passed = max(moments, default=NEVER)
    for transfer in transfers:
        passed = max(passed, transfer.passed)
        before |= {transfer, *transfer.after}
    return Transfer(passed, frozenset(t for t in before if not t.ended_by(passed)))
