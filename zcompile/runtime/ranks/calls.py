"""What ranks compare of a compiled call before its first collective: which there are, over what.

That is up to the schedule, and to the names and partitions of the entries of the call: so the
digest of a call is made once, and known in each later step.

Beside that each rank marks gradients, by facts that may differ from rank to rank and that all of
them follow if any has them.
"""

from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple

from zcompile.ir.rank_mesh import RankMesh
from zcompile.ir.schedule import EntryIndex, Schedule
from zcompile.runtime.ranks.fabric import digest_of
from zcompile.runtime.store.store import Entry

MOST_KEPT = 1024
"""Digests that are remembered: one for each schedule, and each of the layers that it serves."""


class MarkedGradients(NamedTuple):
    """Entries of gradients that ranks mark.

    narrow     made in a narrower dtype, which a rank marks that has hooks of them
    collected  to be summed up within each group of ranks, which a rank marks that has more of them
               to add up before
    """

    narrow: Collection[EntryIndex]
    collected: Collection[EntryIndex]


def marked_gradients(schedule: Schedule, mesh: RankMesh) -> MarkedGradients:
    """The gradients that ranks may mark before a call, in order."""
    shared = sorted(schedule.exchanged_shares) if mesh.replicas > 1 else ()
    return MarkedGradients(tuple(sorted(schedule.narrow_gradients)), tuple(shared))


class CallDigests:
    """The digests of the calls of one session."""

    def __init__(self) -> None:
        self._made: dict[Hashable, bytes] = {}

    def of(self, schedule: Schedule, entries: Sequence[Entry]) -> bytes:
        """A digest of the collectives of a call: kinds, names, bytes, dtypes and owners.

        entries  of the handles of the schedule, and those that it has beside them
        """
        keys, names = [entry.key for entry in entries], [entry.name for entry in entries]
        # An entry has one partition, and may be renamed.
        key: Hashable = (schedule.serial, *keys, *names)
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= MOST_KEPT:
                self._made.clear()
            found = self._made[key] = _made_of(schedule, entries)
        return found


def _made_of(schedule: Schedule, entries: Sequence[Entry]) -> bytes:
    rows = schedule.collectives
    names = [(kind, entries[at].name, nbytes) for kind, at, nbytes in rows]
    crossing = [(kind, entries[at].name, dtype) for kind, at, dtype in schedule.crossing_dtypes]
    parts = [entries[at].partition for _, at, _ in rows]
    owners = [part.owner for part in parts if part is not None and part.owner is not None]
    return digest_of(names, crossing, owners)
