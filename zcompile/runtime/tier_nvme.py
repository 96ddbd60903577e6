"""The disk tier: entries rest in files, one per directory, reached through I/O engines.

Entries are spread over the directories by bytes. Directories that are reached in the same way
share one engine, so that one system call serves them all.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from zcompile.errors import DiskUnusable, ParameterChanged, TierFull
from zcompile.runtime import ring_choice
from zcompile.runtime.claim import Claim
from zcompile.runtime.engine import Engine
from zcompile.runtime.lanes import Move
from zcompile.runtime.meter import Meter
from zcompile.runtime.pace import Pace
from zcompile.runtime.ring import Ring
from zcompile.runtime.ticket import Promise
from zcompile.runtime.tier_file import ALIGNMENT, TierFile
from zcompile.runtime.tiers import Buffer, Extent, Stretch
from zcompile.runtime.workers import Workers

logger = logging.getLogger("zcompile.runtime.tier_nvme")


class DiskTier:
    """Files in `directories`, which are owned from here to `close`.

    throttle  "disk_read", "disk_write" -> bytes per second
    rings     names of `ring_choice.DIRECT` to try, in order; for benchmarks and tests
    open_file  the file of a directory, which is ours by then
    raises    DiskOwned, DiskUnusable
    """

    name = "disk"
    alignment = ALIGNMENT

    def __init__(self, directories: Sequence[Path], throttle: Mapping[str, float], meter: Meter,
                 crashed: Callable[[BaseException], None],
                 rings: Sequence[str] = ring_choice.DIRECT,
                 open_file: Callable[[Path], TierFile] = TierFile) -> None:  # fmt: skip
        self._meter = meter
        self._lock = threading.Lock()
        self._claims: list[Claim] = []
        self._files: list[TierFile] = []
        try:
            for directory in directories:
                self._claims.append(Claim(directory))
                self._files.append(open_file(directory))
            chosen = _chosen(self._files, rings)
        except (OSError, RuntimeError):
            self._close_files()
            raise
        different = {id(ring): ring for ring in chosen}
        engines = {key: Engine(ring, crashed, _closed) for key, ring in different.items()}
        self._engines = [engines[id(ring)] for ring in chosen]
        self._links = {link: _Link(link, throttle.get(link), meter, crashed)
                       for link in ("disk_read", "disk_write")}  # fmt: skip

    @property
    def granule(self) -> int:
        return max(file.granule for file in self._files)

    @property
    def rings(self) -> tuple[str, ...]:
        """How each directory is reached."""
        return tuple(engine.ring.name for engine in self._engines)

    def reserve(self, nbytes: int, name: str) -> Extent:
        with self._lock:
            order = sorted(range(len(self._files)),
                           key=lambda n: self._files[n].extents.used_bytes)  # fmt: skip
            for n in order:
                file = self._files[n]
                if (offset := file.take(nbytes)) is not None:
                    self._measure()
                    return Extent(n, offset, file.extents.aligned(nbytes), name)
        raise TierFull(name, nbytes, [self.usage()])

    def release(self, extent: Extent) -> None:
        with self._lock:
            self._files[extent.file].extents.give(extent.offset, extent.nbytes)

    def read(self, extent: Extent, begin: int, into: Buffer) -> Promise:
        return self._start(False, extent, begin, into)

    def write(self, extent: Extent, begin: int, source: Buffer) -> Promise:
        return self._start(True, extent, begin, source)

    def stretches(self, extent: Extent, begin: int, end: int) -> Sequence[Stretch]:
        file = self._files[extent.file]
        return (Stretch(file.at(0).fd, extent.offset + begin, end - begin),)

    def usage(self) -> tuple[str, int, int]:
        used = sum(file.extents.used_bytes for file in self._files)
        return self.name, used, sum(file.room_bytes() for file in self._files)

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
        for link in self._links.values():
            link.close()
        self._close_files()

    def _measure(self) -> None:
        occupied = sum(file.occupied_bytes() for file in self._files)
        self._meter.disk.change(occupied - self._meter.disk.now)

    def _start(self, write: bool, extent: Extent, begin: int, buffer: Buffer) -> Promise:
        file = self._files[extent.file]
        assert begin % file.granule == 0, begin
        assert buffer.nbytes % file.granule == 0, buffer.nbytes
        assert buffer.memory.data_ptr() % file.granule == 0, "a transfer off granules"
        assert begin + buffer.nbytes <= extent.nbytes, "a transfer beyond its extent"
        promise = Promise()
        link = self._links["disk_write" if write else "disk_read"]
        over = partial(link.arrived, promise, buffer.nbytes, time.perf_counter())
        target = file.at(extent.offset + begin)
        self._engines[extent.file].start(Move(write, target, buffer, extent.name, over))
        return promise

    def _close_files(self) -> None:
        for file in self._files:
            file.close()
        for claim in self._claims:
            try:
                claim.release()
            except OSError as error:
                logger.warning("%s is let go, but %s", claim.directory, error)
                claim.forget()


class _Link:
    """One direction of the disk: counts what has travelled, and paces it where asked to."""

    def __init__(self, name: str, bytes_per_s: float | None, meter: Meter,
                 crashed: Callable[[BaseException], None]) -> None:  # fmt: skip
        self._name = name
        self._meter = meter
        self._pace = Pace(bytes_per_s)
        self._pacer = Workers(f"zinf-{name}", 1, crashed) if bytes_per_s is not None else None

    def arrived(self, promise: Promise, nbytes: int, since: float,
                error: BaseException | None) -> None:  # fmt: skip
        """`nbytes` that set out at `since` have really been moved, or failed."""
        if error is None:
            self._meter.moved(self._name, nbytes)
        if error is None and self._pacer is not None:
            self._pacer.submit(partial(self._hold, promise, nbytes, since))
        else:
            promise.finish(error)

    def close(self) -> None:
        """What is still held back never arrives: its store is closing."""
        self._pace.open()
        if self._pacer is not None:
            self._pacer.stop()

    def _hold(self, promise: Promise, nbytes: int, since: float) -> None:
        self._pace.hold(nbytes, since)
        promise.finish()


def _closed(name: str) -> ParameterChanged:
    return ParameterChanged(name, "is gone: its store was closed", "offload the model again")


def _chosen(files: Sequence[TierFile], rings: Sequence[str]) -> list[Ring]:
    """raises  DiskUnusable"""
    try:
        return ring_choice.choose([(file.path.parent, file.direct) for file in files], rings)
    except OSError as error:
        raise DiskUnusable(files[0].path.parent, f"cannot be read and written ({error.strerror})",
                           "give another directory") from error  # fmt: skip
