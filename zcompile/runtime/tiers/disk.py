"""The disk tier keeps entries in files, one per directory, and reaches them through I/O engines.

Large entries are striped over the directories, so that all disks carry one tensor at once; small
ones are spread by bytes. Directories that are reached in the same way share one engine, so that one
system call serves them all. Files are grown before use. Transfers bypass the page cache
(`O_DIRECT`) where a real write and read back show that this works; elsewhere they go through it,
and a warning says so once per directory.
"""

import errno
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from zcompile.errors import DiskUnusable, ParameterChanged, TierFull, ZinfError
from zcompile.ir.handles import REBUILD_ADVICE
from zcompile.ir.units import GiB, MiB
from zcompile.runtime.device.cpu import Throttle
from zcompile.runtime.io import trial
from zcompile.runtime.io.engine import Engine, Move, Target
from zcompile.runtime.io.files import Directory, close_or_warn, make_directory, unusable_error
from zcompile.runtime.io.rings import Ring
from zcompile.runtime.io.system_calls import KERNEL, SystemCalls
from zcompile.runtime.io.trial import BLOCK_BYTES, check_buffered, direct_granule, supports_direct
from zcompile.runtime.meter import Meter
from zcompile.runtime.tiers.base import Buffer, Extent, FileRange
from zcompile.runtime.tiers.directory_lock import DirectoryLock
from zcompile.runtime.tiers.extents import RangeAllocator
from zcompile.runtime.transfer.ticket import Countdown, Promise, Workers

logger = logging.getLogger(__name__)
ALIGNMENT = BLOCK_BYTES


# --- Stripes ---

STRIPE_BYTES = 16 * MiB
"""One request of the engine: shorter stripes would cut requests, longer ones leave disks idle at
the ends of a tensor."""


class StripePiece(NamedTuple):
    """Bytes [begin, end) of a tensor, which lie in part `part` from `offset` on."""

    part: int
    offset: int
    begin: int
    end: int


def share_of(part: int, parts: int, nbytes: int) -> int:
    """Bytes of a tensor of `nbytes` that lie in one of its parts."""
    rows, rest = divmod(nbytes, STRIPE_BYTES * parts)
    return rows * STRIPE_BYTES + min(max(rest - part * STRIPE_BYTES, 0), STRIPE_BYTES)


def stripe_pieces(parts: int, begin: int, end: int) -> Iterator[StripePiece]:
    """[begin, end) of a tensor cut where stripes end; stripe n lies in part n % parts."""
    while begin < end:
        stripe, inside = divmod(begin, STRIPE_BYTES)
        row, part = divmod(stripe, parts)
        stop = min(end, (stripe + 1) * STRIPE_BYTES)
        yield StripePiece(part, row * STRIPE_BYTES + inside, begin, stop)
        begin = stop


# --- Files ---

GROWTH_BYTES = 4 * MiB
MOST_GROWTH_BYTES = 1 * GiB
NOT_ALLOCATED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Errors of filesystems that cannot reserve room. The last is glibc's, which writes single bytes
there instead, and O_DIRECT refuses those."""
_KEYS = itertools.count(1)


class TierFile:
    """A file of aligned extents, removed on close.

    name     by default a new one
    direct   whether transfers bypass the page cache
    granule  transfers come in multiples of this
    raises   DiskUnusable
    """

    new = os.O_CREAT | os.O_EXCL
    """How it is opened; a file that is there already is never taken for a new one."""

    def __init__(self, directory: Directory, name: str | None = None) -> None:
        self.directory = directory
        self.system = directory.system
        self.name = name or f"zinf-{os.getpid()}-{next(_KEYS)}.tier"
        self.extents = RangeAllocator(ALIGNMENT)
        try:
            self.direct = self._opens_direct()
            flags = os.O_RDWR | self.new | (os.O_DIRECT if self.direct else 0)
            self._fd = directory.open(self.name, flags)
        except DiskUnusable:
            raise
        except OSError as error:
            raise DiskUnusable(
                directory.path,
                f"takes no files ({error.strerror or error})",
                "free space on it or give another directory",
            ) from error
        self.granule = direct_granule(self.system, self._fd) if self.direct else 1

    @property
    def path(self) -> Path:
        """The path of the file, for people."""
        return self.directory.path / self.name

    def at(self, offset: int) -> Target:
        """The position `offset` of the file, for the engine."""
        return Target(self.path, self._fd, offset, self.granule)

    def take(self, nbytes: int) -> int | None:
        """Offset of an extent, growing the file if need be; None when the disk has no room."""
        offset = self.extents.take(nbytes)
        if offset is not None:
            return offset
        least = self.extents.aligned(nbytes) - self.extents.spare_at_end()
        step = min(max(GROWTH_BYTES, self.extents.capacity // 16), MOST_GROWTH_BYTES)
        generous = -(-max(least, step) // GROWTH_BYTES) * GROWTH_BYTES
        if self._grow(generous) or self._grow(least):
            return self.extents.take(nbytes)
        return None

    def occupied_bytes(self) -> int:
        """Bytes that the file really takes on its disk. raises DiskUnusable"""
        try:
            return self.system.fstat(self._fd).st_blocks * 512
        except OSError as error:
            raise unusable_error(self.directory.path, error) from error

    def room_bytes(self) -> int:
        """Bytes of the file and what it could still grow by, for an error message. raises
        DiskUnusable"""
        try:
            disk = self.system.statvfs(self._fd)
        except OSError as error:
            raise unusable_error(self.directory.path, error) from error
        return self.extents.capacity + disk.f_bavail * disk.f_frsize

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            remove_or_warn(self.directory, self.name)
            self.system.close(fd)

    def _opens_direct(self) -> bool:
        if supports_direct(self.directory):
            return True
        check_buffered(self.directory)
        logger.warning(
            "%s does not take O_DIRECT: transfers go through the page cache, which is slower and "
            "uses memory beyond host_memory",
            self.directory.path,
        )
        return False

    def _grow(self, nbytes: int) -> bool:
        """Make the file longer by `nbytes`; False if the disk is full."""
        try:
            try:
                self.system.allocate(self._fd, self.extents.capacity, nbytes)
            except OSError as error:
                if error.errno not in NOT_ALLOCATED:
                    raise
                logger.warning(
                    "%s reserves no room: a disk that is full is noticed when it is written to",
                    self.directory.path,
                )
                self.system.truncate(self._fd, self.extents.capacity + nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise DiskUnusable(
                    self.directory.path,
                    f"cannot be grown into ({error.strerror})",
                    "give another directory",
                ) from error
            return False
        self.extents.grow(nbytes)
        return True


def remove_or_warn(directory: Directory, name: str) -> None:
    """Remove a file that is not needed any more; if the disk refuses, log a warning."""
    try:
        directory.unlink(name)
    except OSError as error:
        logger.warning("%s stays behind: %s", directory.path / name, error.strerror or error)


# --- The tier ---


class DiskTier:
    """Files in `directories`, which are made where missing, and owned from here to `close`.

    throttle  "disk_read", "disk_write" -> bytes per second
    rings     names of `trial.DIRECT` to try, in order; for benchmarks and tests
    open_file  the file of a directory, which is ours by then
    striped   False keeps every entry in one directory
    system    makes all calls on files
    raises    DiskOwned, DiskUnusable
    """

    name = "disk"
    alignment = ALIGNMENT
    in_memory = False
    on_device = False

    def __init__(
        self,
        directories: Sequence[Path],
        throttle: Mapping[str, float],
        meter: Meter,
        crashed: Callable[[BaseException], None],
        rings: Sequence[str] = trial.DIRECT,
        open_file: Callable[[Directory], TierFile] = TierFile,
        striped: bool = True,
        system: SystemCalls = KERNEL,
    ) -> None:
        self._meter = meter
        self._striped = striped and len(directories) > 1
        self._keys = itertools.count(len(directories))
        self._parts: dict[int, tuple[Extent, ...]] = {}  # of striped extents, by `Extent.file`
        self._lock = threading.Lock()
        self._directories: list[Directory] = []
        self._locks: list[DirectoryLock] = []
        self._files: list[TierFile] = []
        self._links: dict[str, _DiskLink] = {}
        with ExitStack() as undo:
            undo.callback(self._close_files)
            try:
                for path in directories:
                    self._directories.append(directory := make_directory(path, system))
                    self._locks.append(DirectoryLock(directory))
                    self._files.append(open_file(directory))
                chosen = _choose_rings(self._files, rings)
            except OSError as error:
                if isinstance(error, ZinfError):
                    raise
                raise unusable_error(path, error) from error
            for ring in chosen:
                undo.callback(ring.close)
            engines: dict[int, Engine] = {}
            for ring in chosen:  # several directories may share one
                if id(ring) not in engines:
                    engines[id(ring)] = engine = Engine(ring, crashed, _closed_error)
                    undo.callback(engine.close)
            for name in ("disk_read", "disk_write"):
                self._links[name] = link = _DiskLink(name, throttle.get(name), meter, crashed)
                undo.callback(link.close)
            undo.pop_all()
        self._engines = [engines[id(ring)] for ring in chosen]

    @property
    def granule(self) -> int:
        return max(file.granule for file in self._files)

    @property
    def rings(self) -> tuple[str, ...]:
        """How each directory is reached."""
        return tuple(engine.ring.name for engine in self._engines)

    def reserve(self, nbytes: int, name: str) -> Extent:
        with self._lock:
            extent = self._reserve_striped(nbytes, name) or self._reserve_in_one_file(nbytes, name)
            if extent is None:
                raise TierFull(name, nbytes, [self.usage()])
            try:
                self._count_occupied()
            except BaseException:
                self._give(extent)
                raise
            return extent

    def pieces(self, extent: Extent, begin: int, end: int) -> Sequence[tuple[int, Tensor]]:
        return ()

    def release(self, extent: Extent) -> None:
        with self._lock:
            self._give(extent)

    def _give(self, extent: Extent) -> None:
        for part in self._parts.pop(extent.file, (extent,)):
            self._files[part.file].extents.give(part.offset, part.nbytes)

    def read(self, extent: Extent, begin: int, into: Buffer) -> Promise:
        return self._start(False, extent, begin, into)

    def write(self, extent: Extent, begin: int, source: Buffer) -> Promise:
        return self._start(True, extent, begin, source)

    def file_ranges(self, extent: Extent, begin: int, end: int) -> Sequence[FileRange]:
        return [
            FileRange(self._files[part.file].at(0).fd, part.offset + at, high - low)
            for part, at, low, high in self._file_pieces(extent, begin, end)
        ]

    def usage(self) -> tuple[str, int, int]:
        used = sum(file.extents.used_bytes for file in self._files)
        return self.name, used, sum(file.room_bytes() for file in self._files)

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
        for link in self._links.values():
            link.close()
        self._close_files()

    def _count_occupied(self) -> None:
        """Tell the meter what the files take on their disks."""
        occupied = sum(file.occupied_bytes() for file in self._files)
        self._meter.disk.change(occupied - self._meter.disk.now)

    def _reserve_in_one_file(self, nbytes: int, name: str) -> Extent | None:
        """An extent in the file that holds least, or in another if that has no room; None if none
        has."""
        order = sorted(range(len(self._files)), key=lambda n: self._files[n].extents.used_bytes)
        return next((found for n in order if (found := self._reserve_in(n, nbytes, name))), None)

    def _reserve_in(self, number: int, nbytes: int, name: str) -> Extent | None:
        """An extent in the file of this number; None if that has no room."""
        file = self._files[number]
        offset = file.take(nbytes)
        if offset is None:
            return None
        return Extent(number, offset, file.extents.aligned(nbytes), name)

    def _reserve_striped(self, nbytes: int, name: str) -> Extent | None:
        """An extent over all directories; None if `nbytes` are too few for that, or one has no
        room."""
        if not self._striped or nbytes < 2 * STRIPE_BYTES:
            return None
        parts: list[Extent] = []
        with ExitStack() as taken:
            for number in range(len(self._files)):
                part = self._reserve_in(number, share_of(number, len(self._files), nbytes), name)
                if part is None:
                    return None
                taken.callback(self._give, part)
                parts.append(part)
            taken.pop_all()
        key = next(self._keys)
        self._parts[key] = tuple(parts)
        return Extent(key, 0, -(-nbytes // ALIGNMENT) * ALIGNMENT, name)

    def _file_pieces(
        self, extent: Extent, begin: int, end: int
    ) -> Iterator[tuple[Extent, int, int, int]]:
        """(extent in a file, offset in it, begin, end) of each piece of [begin, end) that lies in
        one file."""
        parts = self._parts.get(extent.file)
        if parts is None:
            yield extent, begin, begin, end
            return
        for piece in stripe_pieces(len(parts), begin, end):
            yield parts[piece.part], piece.offset, piece.begin, piece.end

    def _start(self, write: bool, extent: Extent, begin: int, buffer: Buffer) -> Promise:
        """Read or write `buffer` at byte `begin` of an extent, in as many moves as it has
        pieces."""
        end = begin + buffer.nbytes
        assert end <= extent.nbytes, "a transfer beyond its extent"
        pieces = list(self._file_pieces(extent, begin, end))
        if len(pieces) == 1:
            return self._move(write, pieces[0][0], pieces[0][1], buffer, extent.name)
        whole = Countdown()
        whole.hold(len(pieces))
        for part, at, low, high in pieces:
            piece = buffer.part(low - begin, high - begin)
            self._move(write, part, at, piece, extent.name).then(whole.drop)
        whole.drop()
        return whole

    def _move(self, write: bool, part: Extent, at: int, buffer: Buffer, name: str) -> Promise:
        """Start one move of the engine."""
        file = self._files[part.file]
        assert at % file.granule == 0, at
        assert buffer.nbytes % file.granule == 0, buffer.nbytes
        assert buffer.memory.data_ptr() % file.granule == 0, "a transfer off granules"
        promise = Promise()
        link = self._links["disk_write" if write else "disk_read"]
        over = partial(link.arrived, promise, buffer.nbytes, time.perf_counter(), name)
        move = Move(write, file.at(part.offset + at), buffer, name, over)
        self._engines[part.file].start(move)
        return promise

    def _close_files(self) -> None:
        """Close each file, lock and directory, whatever becomes of the others.

        Nothing is lost if one fails: what a file was to keep was synced when it was committed.
        """
        for file in self._files:
            close_or_warn(file.path, file.close)
        for lock in self._locks:
            close_or_warn(lock.directory.path, lock.release)
        for directory in self._directories:
            close_or_warn(directory.path, directory.close)


def _choose_rings(files: Sequence[TierFile], rings: Sequence[str]) -> list[Ring]:
    """A ring for each file. raises  DiskUnusable"""
    try:
        return trial.choose_rings([(file.directory, file.direct) for file in files], rings)
    except OSError as error:
        why = f"cannot be read and written ({error.strerror})"
        raise DiskUnusable(files[0].directory.path, why, "give another directory") from error


def _closed_error(name: str) -> ParameterChanged:
    return ParameterChanged(name, "is gone: its store was closed", REBUILD_ADVICE)


class _DiskLink:
    """One direction of the disk: counts the bytes that have travelled, and throttles them where
    asked to."""

    def __init__(
        self,
        name: str,
        bytes_per_s: float | None,
        meter: Meter,
        crashed: Callable[[BaseException], None],
    ) -> None:
        self._name = name
        self._meter = meter
        self._throttle = Throttle(bytes_per_s)
        self._pacer = Workers(f"zinf-{name}", 1, crashed) if bytes_per_s is not None else None

    def arrived(
        self, promise: Promise, nbytes: int, since: float, name: str, error: BaseException | None
    ) -> None:
        """`nbytes` of entry `name` that set out at `since` have really been moved, or failed."""
        if error is None:
            self._meter.moved(self._name, nbytes)
        if error is None and self._pacer is not None:
            self._pacer.submit(partial(self._hold, promise, nbytes, since, name))
        else:
            if error is None:
                self._meter.busy(self._name, nbytes, since, time.perf_counter(), name)
            promise.finish(error)

    def close(self) -> None:
        """Stop throttling: transfers that are still held back never arrive, as their store is
        closing."""
        self._throttle.stop()
        if self._pacer is not None:
            self._pacer.stop()

    def _hold(self, promise: Promise, nbytes: int, since: float, name: str) -> None:
        self._throttle.delay(nbytes, since)
        self._meter.busy(self._name, nbytes, since, time.perf_counter(), name)
        promise.finish()
