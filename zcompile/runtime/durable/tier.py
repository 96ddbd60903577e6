"""The durable tier keeps the last commit on disk intact while entries change.

It stands before a disk tier and hands out extents of its own, which know versions. A write goes to
another extent than the committed one; a read goes where the bytes are. Neither transfers nor places
know of that. When the index has been switched (`commit.py`), the old extents are given back.

    before the first commit     an entry is written in place
    committed, unchanged        one extent, never written again
    committed, changed          the fresh ranges lie in another extent, the rest where it was
    next commit                 the rest is copied over; when the index is switched, the old extent
                                is free
"""

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from zcompile.errors import DiskUnusable, TierFull
from zcompile.runtime.durable.files import DurableFiles
from zcompile.runtime.durable.index import BEST, SUMS, Pieces
from zcompile.runtime.tiers.base import Buffer, Extent, FileRange, TierIO
from zcompile.runtime.tiers.extents import WrittenRanges
from zcompile.runtime.transfer.ticket import Countdown, Promise, Workers

logger = logging.getLogger("zcompile.runtime.durable.tier")


@dataclass
class Versions:
    """The committed and the working version of one entry. Guarded by the lock of its tier.

    committed  the extent that the last index names; None before there was one
    working    the extent that is written; None while nothing was written since
    fresh      which ranges of the entry lie in `working`
    pieces     checksums of the entry as it is now, wherever its bytes lie
    step       at which it was last committed with other bytes than before
    """

    committed: Extent | None = None
    working: Extent | None = None
    fresh: WrittenRanges = field(default_factory=WrittenRanges)
    pieces: Pieces = field(default_factory=Pieces)
    step: int = 0

    @property
    def current(self) -> Extent:
        """The extent with all of the entry; only between `complete` and the next write."""
        extent = self.working or self.committed
        assert extent is not None, "an entry that lies nowhere"
        return extent

    def where(self, begin: int, end: int) -> list[tuple[int, int, Extent]]:
        """[begin, end) cut into (begin, end, the extent that holds it now)."""
        if self.working is None or self.committed is None:
            return [(begin, end, self.current)]
        return [
            (low, high, self.working if fresh else self.committed)
            for low, high, fresh in self.fresh.pieces(begin, end)
        ]


class DurableTier:
    """A tier of entries with versions, in the extents of `disk`, whose files are `files`.

    raises  what opening the files raises
    """

    name = "disk"
    in_memory = False
    on_device = False

    def __init__(
        self, disk: TierIO, files: DurableFiles, crashed: Callable[[BaseException], None]
    ) -> None:
        self.disk = disk
        self.files = files
        self.alignment = disk.alignment
        self._lock = threading.Lock()
        self._keys = itertools.count(1)
        self._versions: dict[int, Versions] = {}
        self._replaced: list[Extent] = []
        self._frozen: BaseException | None = None
        if BEST == "crc32":
            logger.warning("xxhash is not installed: checksums are CRC-32, at a fifth of the speed")
        self._summing = Workers("zinf-sum", 1, crashed)

    @property
    def granule(self) -> int:
        return self.disk.granule

    def reserve(self, nbytes: int, name: str) -> Extent:
        extent = self.disk.reserve(nbytes, name)
        return self._enter(Versions(working=extent), extent.nbytes, name)

    def adopt(self, versions: Versions, nbytes: int, name: str) -> Extent:
        """An extent with the versions that another one had, or that a commit names."""
        return self._enter(versions, nbytes, name)

    def pieces(self, extent: Extent, begin: int, end: int) -> Sequence[tuple[int, Tensor]]:
        return ()

    def release(self, extent: Extent) -> None:
        with self._lock:
            versions = self._versions.pop(extent.file)
            if versions.committed is not None:
                self._replaced.append(versions.committed)
        if versions.working is not None:
            self.disk.release(versions.working)

    def read(self, extent: Extent, begin: int, into: Buffer) -> Promise:
        with self._lock:
            found = self._versions[extent.file].where(begin, begin + into.nbytes)
        if len(found) == 1:
            return self.disk.read(_with_name_of(found[0][2], extent), begin, into)
        whole = Countdown()
        whole.hold(len(found))
        for low, high, holder in found:
            part = into.part(low - begin, high - begin)
            self.disk.read(_with_name_of(holder, extent), low, part).then(whole.drop)
        whole.drop()
        return whole

    def write(self, extent: Extent, begin: int, source: Buffer) -> Promise:
        end = begin + source.nbytes
        whole = Countdown()
        with self._lock:
            versions = self._versions[extent.file]
            if self._frozen is not None:
                whole.finish(self._frozen)
                return whole
            try:
                working = self._working(versions, extent)
            except (TierFull, DiskUnusable) as error:
                whole.finish(error)
                return whole
            versions.fresh.add(begin, end)
            versions.pieces.add(begin, end)
        whole.hold(2)
        self._summing.submit(partial(self._sum, versions, begin, end, source, whole))
        self.disk.write(_with_name_of(working, extent), begin, source).then(whole.drop)
        whole.drop()
        return whole

    def file_ranges(self, extent: Extent, begin: int, end: int) -> Sequence[FileRange]:
        with self._lock:
            found = self._versions[extent.file].where(begin, end)
        return [
            stretch
            for low, high, holder in found
            for stretch in self.disk.file_ranges(holder, low, high)
        ]

    def usage(self) -> tuple[str, int, int]:
        return self.disk.usage()

    def close(self) -> None:
        self._summing.stop()
        self.disk.close()

    def versions_of(self, extent: Extent) -> Versions:
        with self._lock:
            return self._versions[extent.file]

    def bytes_to_come(self, extents: Iterable[Extent]) -> int:
        """Bytes that writes to `extents` will reserve outside the committed versions."""
        with self._lock:
            found = [self._versions[extent.file] for extent in extents]
        return sum(
            v.committed.nbytes for v in found if v.committed is not None and v.working is None
        )

    def release_at_next_commit(self, extents: Sequence[Extent]) -> None:
        """Give extents back that nobody holds, once the next index does not name them."""
        with self._lock:
            self._replaced.extend(extents)

    def release_replaced(self) -> None:
        """Give replaced extents back: the index that named them is gone."""
        with self._lock:
            replaced, self._replaced = self._replaced, []
        for extent in replaced:
            self.disk.release(extent)

    def freeze(self, error: BaseException) -> None:
        """Fail all writes from now on: whether the index names what was written last is not
        known."""
        with self._lock:
            self._frozen = error

    def note_commit(self, versions: Versions) -> None:
        """Make the working version the committed one: the index names it now."""
        with self._lock:
            old, versions.committed = versions.committed, versions.working or versions.committed
            replaced = versions.working is not None and old is not None
            versions.working = None
            versions.fresh.clear()
            if replaced and old is not None:
                self._replaced.append(old)

    def _working(self, versions: Versions, extent: Extent) -> Extent:
        """The extent that is written, reserved at the first write after a commit."""
        if versions.working is None:
            versions.working = self.disk.reserve(extent.nbytes, extent.name)
            versions.fresh.clear()
        return versions.working

    def _enter(self, versions: Versions, nbytes: int, name: str) -> Extent:
        """An extent of this tier with these versions."""
        with self._lock:
            key = next(self._keys)
            self._versions[key] = versions
        return Extent(key, 0, nbytes, name)

    def _sum(
        self, versions: Versions, begin: int, end: int, source: Buffer, whole: Countdown
    ) -> None:
        """Compute the checksum of a write, in a thread of its own."""
        checksum = SUMS[BEST](source.view)
        with self._lock:
            versions.pieces.set_checksum(begin, end, checksum)
        whole.drop()


def _with_name_of(holder: Extent, extent: Extent) -> Extent:
    """`holder`, under the name that `extent` has now."""
    return holder if holder.name == extent.name else holder._replace(name=extent.name)
