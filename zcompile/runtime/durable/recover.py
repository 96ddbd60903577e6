"""Recovery lets entries take over what a commit holds: on disk its extents, on the host its
values."""

from collections.abc import Sequence

import torch
from torch import Tensor

from zcompile.runtime.changes import CHANGES
from zcompile.runtime.durable.check import DataReader
from zcompile.runtime.durable.commit import CommitLog
from zcompile.runtime.durable.index import (
    BEST,
    Index,
    Pieces,
    StoredTensor,
)
from zcompile.runtime.durable.tier import Versions
from zcompile.runtime.io.files import Directory
from zcompile.runtime.io.trial import BLOCK_BYTES
from zcompile.runtime.store.sources import before_write
from zcompile.runtime.store.store import Entry
from zcompile.runtime.tiers.base import Extent


class Copier:
    """Reads tensors of a commit in `directories`, which keep all they have."""

    def __init__(self, directories: Sequence[Directory]) -> None:
        self._directories = directories

    def adopt(self, kept: StoredTensor, entry: Entry) -> bool:
        """Let `entry` take over the extent of `kept`; False if its bytes have to be read and
        written anew."""
        return False

    def read(self, kept: StoredTensor) -> Tensor:
        """The bytes of a tensor in ordinary host memory: uint8 [nbytes]."""
        memory = torch.zeros(kept.nbytes, dtype=torch.uint8, device="cpu")
        with DataReader(self._directories) as data:
            for begin, end in kept.written:
                low, high = _blocks(kept, begin, end)
                for at, view in data.chunks(kept, low, high):
                    first, last = max(at, begin), min(at + len(view), end)
                    part = torch.frombuffer(view, dtype=torch.uint8)
                    memory[first:last] = part[first - at : last - at]
        return memory


class Recovery(Copier):
    """Hands out the extents of one commit, each to one entry."""

    def __init__(self, commit_log: CommitLog, index: Index) -> None:
        super().__init__(commit_log.files.directories)
        self._commit_log = commit_log
        self._index = index
        self._adopted: set[str] = set()

    def adopt(self, kept: StoredTensor, entry: Entry) -> bool:
        same = self._index.granule % self._commit_log.tier.granule == 0 and kept.sum == BEST
        if not same or kept.nbytes != entry.nbytes or kept.name in self._adopted:
            return False
        self._adopted.add(kept.name)
        self._commit_log.begin_recovery()
        versions = Versions(committed=_extent(kept), pieces=Pieces(kept.pieces), step=kept.step)
        written = [(begin, end) for begin, end in kept.written]
        if entry.place.tier.in_memory:
            entry.store.zero(entry)
            with DataReader(self._directories) as data:
                for begin, end in written:
                    self._to_host(data, kept, entry, begin, end)
            self._commit_log.keep_copy(entry, versions)
        else:
            entry.store.drain()
            before_write(entry)  # what may fail does so while the extent is not taken
            extent = self._commit_log.tier.adopt(versions, kept.room, entry.name)
            _rest_in(entry, extent, written)
        return True

    def untaken(self) -> list[Extent]:
        """The extents that no entry took over; the next commit does not name them."""
        return [_extent(kept) for kept in self._index.tensors if kept.name not in self._adopted]

    def _to_host(
        self, data: DataReader, kept: StoredTensor, entry: Entry, begin: int, end: int
    ) -> None:
        """Read bytes [begin, end) of a tensor into an entry on the host."""
        low, high = _blocks(kept, begin, end)
        for at, view in data.chunks(kept, low, high):
            first, last = max(at, begin), min(at + len(view), end)
            part = torch.frombuffer(view, dtype=torch.uint8)[first - at : last - at]
            entry.store.put(entry, part, begin=first).wait()


def _extent(kept: StoredTensor) -> Extent:
    """The extent of the disk tier where a tensor of the commit lies."""
    return Extent(kept.file, kept.offset, kept.room, kept.name)


def _rest_in(entry: Entry, extent: Extent, written: Sequence[tuple[int, int]]) -> None:
    """Let `entry`, of which no transfer is under way, rest in `extent` of its tier from here on,
    where the `written` ranges hold a value."""
    place, old = entry.place, entry.place.extent
    place.rest(place.tier, extent)
    place.written.clear()
    CHANGES.note()
    for begin, end in written:
        place.written.add(begin, end)
    entry.overwritten()
    entry.written()
    place.tier.release(old)


def _blocks(kept: StoredTensor, begin: int, end: int) -> tuple[int, int]:
    """Whole blocks of the file that hold the bytes, inside the extent."""
    return begin // BLOCK_BYTES * BLOCK_BYTES, min(-(-end // BLOCK_BYTES) * BLOCK_BYTES, kept.room)
