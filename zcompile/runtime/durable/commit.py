"""A commit saves what a training is at this instant, so that a killed run resumes from there.

    transfers in flight end; entries on the host are written; half-new entries are completed
    the data files are synced
    the index is written beside the old one, synced, and takes its name: this is the commit
    extents that only the old index named are free

Of several ranks none renames its index before all have synced theirs (`worlds.py`); what the old
ones named may then be written, on each rank by itself.

An error before the rename leaves the last commit as it was; after one that comes with the rename,
or later, only the disk knows which of the two is the last.

The bytes that a commit moves go through the staging ring, which is idle then:

    write_from_host    host tier -> buffer -> the entry's copy on disk
    copy_committed     committed extent -> buffer -> the new one: what the step did not write
    compute_checksums  new extent -> buffer -> checksum: what was written in parts
"""

import errno
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zcompile.errors import CommitFailed, DurableHeld, TierFull
from zcompile.ir.types import EntryKind, Layout
from zcompile.ir.units import KiB
from zcompile.runtime.device.pages import copy_bytes
from zcompile.runtime.durable import index as durable_index
from zcompile.runtime.durable.index import BEST, Piece, RunningChecksum
from zcompile.runtime.durable.tier import DurableTier, Versions
from zcompile.runtime.durable.worlds import Sharing, World, given_for, newest_in
from zcompile.runtime.store.store import Entry, Store
from zcompile.runtime.tiers.base import Buffer, Extent, Place
from zcompile.runtime.tiers.extents import WrittenRanges
from zcompile.runtime.transfer.interrupts import deferred_interrupts
from zcompile.runtime.transfer.staging import Staging
from zcompile.runtime.transfer.ticket import Countdown, Promise

# --- Commits ---

MOST_SMALL_BYTES = 64 * KiB
"""A tensor on the host of at most this size goes into the index: a request each would cost more."""
_INTERRUPTED = OSError(errno.EINTR, "it was broken off")
Named = Mapping[str, tuple[Entry, Layout]]
"""Name of a tensor -> its entry, and its layout there."""


@dataclass
class _DiskCopy:
    """The copy on disk of an entry that rests on the host, or on the device.

    version  of the entry when it was last copied to `extent`; -1 before
    """

    extent: Extent
    version: int


class CommitLog:
    """The commits of one store.

    step        optimizer steps so far, those before a resume included
    resumed     what the directory held when it was opened was put back, or there was nothing
    recovering  entries have begun to take over what the directory held
    optimizer   the optimizer whose states are committed
    unresumed   class of the optimizer whose states the commit holds, and which was not resumed
    extra       what the user adds to each commit
    extra_step  the step at which `extra` was given
    training    of several ranks: what the commits of all call it
    """

    def __init__(self, store: Store, tier: DurableTier, staging: Staging) -> None:
        self._store = store
        self._staging = staging
        self.tier = tier
        self.files = tier.files
        self.step = self.serial = 0
        self.resumed = self.files.index is None
        self.recovering = False
        self.optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self.unresumed: str | None = None
        self.extra: dict[str, Any] = {}
        self.extra_step = 0
        self.training = ""
        self._copies: dict[int, _DiskCopy] = {}
        self._looked = False
        """Whether commits of other numbers of ranks were looked for."""
        self._failed: CommitFailed | None = None
        """Whether the index was switched may not be known then, so nothing is written after it."""

    @property
    def given(self) -> Path:
        """The directory that the user gave; several ranks each have one below it."""
        return given_for(self.files.home.path) if self._store.fabric else self.files.home.path

    def newest(self) -> World | None:
        """A commit below the directory that was given which is later than this run's own; by
        another number of ranks. raises  Unsupported, DurableDamaged, DiskUnusable"""
        if self.serial:
            return None
        own = self.files.index
        after = -1 if own is None else own.serial
        return newest_in(self.given, self.files.home.system, after)

    def check(self, changing: Iterable[Entry] = ()) -> None:
        """Check before a step that its changes can be committed.

        changing  the entries that the step will change
        raises    DurableHeld, if a commit would be lost; TierFull, if the disk has no room for the
                  new versions; CommitFailed, if an earlier commit did
        """
        if self._failed is not None:
            raise self._failed
        if not self.resumed and self.files.index is not None:
            raise DurableHeld(self.given, f"holds step {self.files.index.step} of an earlier run")
        if not self.serial and not self._looked:
            if (found := self.newest()) is not None:
                ranks = len(found.paths)
                raise DurableHeld(
                    self.given,
                    f"holds step {found.index.step} of an earlier run of {ranks} "
                    f"rank{'s' if ranks > 1 else ''}",
                )
            self._looked = True
        needed = self._bytes_to_come(changing)
        _, used, most = self.tier.usage()
        if used + needed > most:
            raise TierFull("the new version of what this step changes", needed, [self.tier.usage()])

    def has_room(self, changing: Iterable[Entry], more_bytes: int) -> bool:
        """Whether the disk has room for new versions of these, and for so much beside."""
        _, used, most = self.tier.usage()
        return used + self._bytes_to_come(changing) + more_bytes <= most

    def _bytes_to_come(self, changing: Iterable[Entry]) -> int:
        """Bytes that new versions of these will reserve, and copies of those in memory that have
        none yet."""
        extents, first = list[Extent](), 0
        for entry in changing:
            extent = self._extent_of(entry)
            if extent is not None:
                extents.append(extent)
            elif entry.nbytes > MOST_SMALL_BYTES:
                first += entry.nbytes
        return self.tier.bytes_to_come(extents) + first

    def complete(self) -> None:
        """Compute the late updates that wait: the commit will hold what they make."""
        self._store.settle()

    def commit(
        self, named: Named, smalls: Mapping[str, Tensor], meta: Mapping[str, object], step: int
    ) -> None:
        """Make a commit. raises  DurableHeld, TierFull, CommitFailed, and what a transfer failed
        with"""
        self.check()
        for entry, _ in named.values():
            if entry.waits is None:  # a late update makes what is deferred of its operands
                self._store.deferrals.apply(entry)
        self._store.drain()
        with deferred_interrupts():  # there is no going on from half of a commit
            try:
                self._commit(named, smalls, meta, step)
            finally:
                if self._failed is not None:
                    self.tier.freeze(self._failed)

    def _commit(
        self, named: Named, smalls: Mapping[str, Tensor], meta: Mapping[str, object], step: int
    ) -> None:
        # Until the end, and after an error, nobody knows which copies and which index are good.
        self._failed = CommitFailed(self.files.home.path, step, self.step, _INTERRUPTED)
        large, small = _split_by_size(named)
        try:
            # Large tensors are completed on disk, the files synced, and the index switched.
            extents = self._write_changes(large)
            versions = {name: self.tier.versions_of(extent) for name, extent in extents.items()}
            for one in versions.values():
                one.step = step if one.working is not None else one.step
            content = self._content(large, versions, {**smalls, **small}, meta, step)
            self.files.sync()
            self.files.switch(content, self._agreement(step))
        except BaseException as error:
            why = error if isinstance(error, OSError) else _INTERRUPTED
            self._failed = CommitFailed(
                self.files.home.path, step, self.step, why, self.files.outcome_unknown
            )
            if why is error:
                raise self._failed from error
            raise
        for one in versions.values():
            self.tier.note_commit(one)
        in_memory = (e for e, _ in large.values() if e.place.tier.in_memory)
        self._drop_copies_except({entry.key for entry in in_memory})
        self.tier.release_replaced()
        self.step, self.serial = step, self.serial + 1
        self._failed = None

    def _agreement(self, step: int) -> Callable[[], None] | None:
        """What waits until all ranks have prepared this commit; None for one process alone."""
        fabric = self._store.fabric
        if fabric is None:
            return None
        text = f"number {self.serial}, of step {step}"
        return partial(fabric.agree, "commit", self.serial, step, self.training, text=text)

    def _sharing(self, named: Named) -> Sharing | None:
        """Whose part of a commit this rank makes; None: all of it."""
        fabric = self._store.fabric
        if fabric is None:
            return None
        parts = {
            name: entry.partition
            for name, (entry, _) in named.items()
            # A gradient is named for an update that is to come, over the elements of this rank.
            if entry.partition is not None and entry.kind is not EntryKind.GRAD
        }
        owners = {n: part.owner for n, part in parts.items() if part.owner is not None}
        shares = frozenset(parts)
        at, replicas = (fabric.rank, fabric.size), fabric.mesh.replicas
        return Sharing(*at, self.training, shares, fabric.hosts, owners, replicas)

    def take_name(self, training: str) -> None:
        """Let the commits of this rank be of `training`, as those of all are."""
        self.training = training

    def continue_from(self, index: durable_index.Index, unresumed: str | None) -> None:
        """Note that entries hold what `index` names, which lies elsewhere, and which comes after
        what this directory may hold; `unresumed` as in `resume`."""
        self.step, self.serial, self.resumed = index.step, index.serial + 1, True
        self.unresumed = unresumed
        if (own := self.files.index) is not None:
            extents = [Extent(t.file, t.offset, t.room, t.name) for t in own.tensors]
            self.tier.release_at_next_commit(extents)

    def begin_recovery(self) -> None:
        """Entries begin to take over what the directory held."""
        self.recovering = True

    def resume(
        self, index: durable_index.Index, left: Sequence[Extent], unresumed: str | None
    ) -> None:
        """Note that entries hold what `index` names, but for the extents `left`, which nobody
        wanted, and for states of an optimizer that is `unresumed`."""
        self.step, self.serial, self.resumed = index.step, index.serial + 1, True
        self.unresumed = unresumed
        self.tier.release_at_next_commit(left)

    def follow(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Commit the states of this optimizer from here on."""
        self.optimizer = None if optimizer is None else weakref.ref(optimizer)

    def keep_extra(self, extra: dict[str, Any], step: int) -> None:
        """Add `extra`, which was given at `step`, to each commit from here on."""
        self.extra, self.extra_step = extra, step

    def keep_copy(self, entry: Entry, versions: Versions) -> None:
        """Note that an entry on the host is, as of now, what a commit names."""
        self._drop_copy(entry.key)
        room = versions.current.nbytes
        self._copies[entry.key] = _DiskCopy(
            self.tier.adopt(versions, room, entry.name), entry.version
        )

    def _write_changes(self, named: Named) -> dict[str, Extent]:
        """The extent on disk of each entry, with all of its value in one extent."""
        transfers = CommitTransfers(self._staging, self.tier)
        extents = {
            name: self._extent_with_value(name, entry, transfers)
            for name, (entry, _) in named.items()
        }
        transfers.wait()
        for extent in extents.values():
            self._complete(extent, transfers)
        return extents

    def _extent_of(self, entry: Entry) -> Extent | None:
        """The extent of an entry on disk, or of its copy there; None without one."""
        if not entry.place.tier.in_memory:
            return entry.place.extent
        copy = self._copies.get(entry.key)
        return None if copy is None else copy.extent

    def _extent_with_value(self, name: str, entry: Entry, transfers: "CommitTransfers") -> Extent:
        """The extent of an entry on disk; what rests on the host is sent there."""
        if not entry.place.tier.in_memory:
            return entry.place.extent
        copy = self._copies.get(entry.key)
        if copy is None:
            copy = _DiskCopy(self.tier.reserve(entry.nbytes, name), -1)
            self._copies[entry.key] = copy
        if copy.version != entry.version:
            transfers.write_from_host(entry.place, copy.extent)
            copy.version = entry.version
        return copy.extent

    def _complete(self, extent: Extent, transfers: "CommitTransfers") -> None:
        """Bring all of an entry into one extent, and complete the checksums of its pieces."""
        versions = self.tier.versions_of(extent)
        if versions.working is None:
            return
        left = [
            (low, high)
            for piece in versions.pieces.all()
            for low, high, holder in versions.where(piece.begin, piece.end)
            if holder is not versions.working
        ]
        transfers.copy_committed(versions, left)
        transfers.compute_checksums(
            extent, versions, [p for p in versions.pieces.all() if p.checksum is None]
        )

    def _content(
        self,
        named: Named,
        versions: Mapping[str, Versions],
        smalls: Mapping[str, Tensor],
        meta: Mapping[str, object],
        step: int,
    ) -> bytes:
        """The content of the new index file."""
        rows, raw = pack_smalls(smalls)
        tensors = tuple(
            _stored_tensor(name, entry, layout, versions[name])
            for name, (entry, layout) in named.items()
        )
        if (sharing := self._sharing(named)) is not None:
            meta = {**meta, **sharing.to_meta()}
        index = durable_index.Index(
            self.files.run,
            step,
            self.serial,
            time.strftime("%F %T"),
            self.tier.granule,
            self.files.named,
            tensors,
            rows,
            meta,
        )
        return durable_index.encode(index, raw)

    def _drop_copies_except(self, alive: set[int]) -> None:
        """Give back the copies on disk of entries that are not in the commit."""
        for key in [key for key in self._copies if key not in alive]:
            self._drop_copy(key)

    def _drop_copy(self, key: int) -> None:
        if (copy := self._copies.pop(key, None)) is not None:
            self.tier.release(copy.extent)


def _split_by_size(named: Named) -> tuple[Named, Mapping[str, Tensor]]:
    """What gets extents, and the values of what goes into the index: small, or named twice."""
    large: dict[str, tuple[Entry, Layout]] = {}
    small: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, (entry, layout) in named.items():
        if _is_small(entry, layout):
            small[name] = _value(entry, layout)
        elif entry.key in seen:
            small[name] = layout.view(entry.store.read_all(entry))
        else:
            large[name] = (entry, layout)
            seen.add(entry.key)
    return large, small


def _is_small(entry: Entry, layout: Layout) -> bool:
    """Whether a tensor goes into the index. Operands of late updates do not: what computes them
    reads them as they lie."""
    on_host = entry.place.tier.in_memory and entry.waits is None and entry.partition is None
    return on_host and entry.nbytes <= MOST_SMALL_BYTES and layout.offset == 0


def _value(entry: Entry, layout: Layout) -> Tensor:
    """The value of a small entry on the host; nothing is in flight on it."""
    tier, place = entry.place.tier, entry.place
    assert tier.in_memory
    pieces = list(tier.pieces(place.extent, 0, entry.nbytes))
    if len(pieces) == 1 and place.written.covers(0, entry.nbytes):
        return layout.view(pieces[0][1])
    return layout.view(entry.store.read_all(entry))


def _stored_tensor(
    name: str, entry: Entry, layout: Layout, versions: Versions
) -> durable_index.StoredTensor:
    """The row of the index for one tensor."""
    extent = versions.current
    written = tuple(
        (low, high) for low, high, held in entry.place.written.pieces(0, entry.nbytes) if held
    )
    return durable_index.StoredTensor(
        name=name,
        kind=entry.kind.value,
        dtype=str(layout.dtype).removeprefix("torch."),
        size=layout.size,
        stride=layout.stride,
        start=layout.offset,
        nbytes=entry.nbytes,
        file=extent.file,
        offset=extent.offset,
        room=extent.nbytes,
        step=versions.step,
        written=written,
        sum=BEST,
        pieces=versions.pieces.all(),
    )


def pack_smalls(
    smalls: Mapping[str, Tensor],
) -> tuple[tuple[durable_index.SmallTensor, ...], bytes]:
    """Small tensors as rows of the index and the bytes that follow its text."""
    rows, parts, at = [], [], 0
    for name, tensor in smalls.items():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        part = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        rows.append(
            durable_index.SmallTensor(
                name,
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                at,
                at + len(part),
            )
        )
        parts.append(part)
        at += len(part)
    return tuple(rows), b"".join(parts)


# --- What a commit moves ---

Begin = Callable[[int, int, Buffer], Promise]
"""Starts moving bytes [begin, end) through the buffer."""


class CommitTransfers:
    """The transfers of one commit."""

    def __init__(self, staging: Staging, tier: DurableTier) -> None:
        self._staging = staging
        self._tier = tier
        self._over = Countdown()

    def wait(self) -> None:
        """Wait for all that was begun. raises  what a transfer failed with"""
        over, self._over = self._over, Countdown()
        over.drop()
        over.wait()

    def write_from_host(self, place: Place, extent: Extent) -> None:
        """Start writing what `place`, on the host, holds to `extent` of the durable tier."""
        unit = self._tier.granule
        blocks = WrittenRanges()
        for begin, end, held in place.written.pieces(0, place.nbytes):
            if held:
                blocks.add(begin // unit * unit, min(-(-end // unit) * unit, extent.nbytes))
        ranges = [(low, high) for low, high, held in blocks.pieces(0, extent.nbytes) if held]
        self._begin(ranges, partial(self._write, place, extent))

    def copy_committed(self, versions: Versions, ranges: Sequence[tuple[int, int]]) -> None:
        """Copy `ranges` from the committed version to the working one; blocks."""
        self._begin(ranges, partial(self._copy, versions))
        self.wait()
        for begin, end in ranges:
            versions.fresh.add(begin, end)

    def compute_checksums(
        self, extent: Extent, versions: Versions, pieces: Sequence[Piece]
    ) -> None:
        """Read pieces back for their checksums; blocks, one request at a time: they are rare."""
        for piece in pieces:
            running = RunningChecksum(BEST)
            for begin, end in self._chunks([(piece.begin, piece.end)]):
                self._begin([(begin, end)], partial(self._add, extent, running))
                self.wait()
            versions.pieces.set_checksum(piece.begin, piece.end, running.value())

    def _begin(self, ranges: Sequence[tuple[int, int]], begin: Begin) -> None:
        """Send `ranges` through the ring, in chunks."""
        chunks = deque(self._chunks(ranges))
        self._over.hold(len(chunks))
        self._staging.request("write", _StagedRanges(begin, self._over, self._staging), chunks)

    def _chunks(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """`ranges` cut into chunks of the ring."""
        size = self._staging.chunk_bytes
        return [
            (low, min(low + size, end)) for begin, end in ranges for low in range(begin, end, size)
        ]

    def _write(self, place: Place, extent: Extent, begin: int, end: int, buffer: Buffer) -> Promise:
        for at, memory in place.tier.pieces(place.extent, begin, min(end, place.extent.nbytes)):
            source = memory if memory.is_cpu else memory.cpu()  # of an entry on the device
            copy_bytes(buffer.memory[at - begin :], source, source.numel())
        return self._tier.write(extent, begin, buffer.part(0, end - begin))

    def _copy(self, versions: Versions, begin: int, end: int, buffer: Buffer) -> Promise:
        part = buffer.part(0, end - begin)
        over = Countdown()
        assert versions.working is not None
        assert versions.committed is not None
        write = partial(self._copied, versions.working, begin, part, over)
        self._tier.disk.read(versions.committed, begin, part).then(write)
        return over

    def _copied(
        self,
        working: Extent,
        begin: int,
        part: Buffer,
        over: Countdown,
        error: BaseException | None,
    ) -> None:
        if error is not None:
            over.drop(error)
        else:
            self._tier.disk.write(working, begin, part).then(over.drop)

    def _add(
        self, extent: Extent, running: RunningChecksum, begin: int, end: int, buffer: Buffer
    ) -> Promise:
        part = buffer.part(0, end - begin)
        over = Countdown()

        def add(error: BaseException | None) -> None:
            if error is None:
                running.update(part.view)
            over.drop(error)

        self._tier.read(extent, begin, part).then(add)
        return over


class _StagedRanges:
    """The chunks of one transfer, each with a buffer of the ring: a `Staged`."""

    def __init__(self, begin: Begin, over: Countdown, staging: Staging) -> None:
        self._begin = begin
        self._over = over
        self._staging = staging

    def buffer_bytes(self, begin: int, end: int) -> int:
        return end - begin

    def begin_chunk(self, begin: int, end: int, buffer: Buffer) -> None:
        self._begin(begin, end, buffer).then(partial(self._ended, buffer))

    def _ended(self, buffer: Buffer, error: BaseException | None) -> None:
        self._staging.give(buffer)
        self._over.drop(error)
