"""The disk tier: entries rest in files, one per directory, reached by threads.

Reads and writes have threads of their own, so a slow write never stands before a read. Entries
are spread over the directories by bytes.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from zcompile.errors import TierFull
from zcompile.runtime.claim import Claim
from zcompile.runtime.meter import Meter
from zcompile.runtime.pace import Pace
from zcompile.runtime.ticket import Promise
from zcompile.runtime.tier_file import ALIGNMENT, TierFile
from zcompile.runtime.tiers import Buffer, Extent
from zcompile.runtime.workers import Workers

THREADS = 4
"""Each way. Four requests of 4 MiB in flight reach the disk's own speed (measured against fio)."""

Move = Callable[[int, memoryview, str], None]


class DiskTier:
    """Files in `directories`, which are owned from here to `close`.

    throttle  "disk_read", "disk_write" -> bytes per second
    raises    DiskOwned, DiskUnusable
    """

    name = "disk"
    alignment = ALIGNMENT

    def __init__(self, directories: Sequence[Path], throttle: Mapping[str, float], meter: Meter,
                 crashed: Callable[[BaseException], None]) -> None:  # fmt: skip
        self._meter = meter
        self._lock = threading.Lock()
        self._claims: list[Claim] = []
        self._files: list[TierFile] = []
        try:
            for directory in directories:
                self._claims.append(Claim(directory))
                self._files.append(TierFile(directory))
        except (OSError, RuntimeError):
            self._close_files()
            raise
        self._paces = {link: Pace(throttle.get(link)) for link in ("disk_read", "disk_write")}
        self._workers = {link: Workers(f"zinf-{link}", THREADS, crashed) for link in self._paces}

    @property
    def granule(self) -> int:
        return ALIGNMENT

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
        return self._start("disk_read", self._files[extent.file].read, extent, begin, into)

    def write(self, extent: Extent, begin: int, source: Buffer) -> Promise:
        return self._start("disk_write", self._files[extent.file].write, extent, begin, source)

    def usage(self) -> tuple[str, int, int]:
        used = sum(file.extents.used_bytes for file in self._files)
        return self.name, used, sum(file.room_bytes() for file in self._files)

    def close(self) -> None:
        for pace in self._paces.values():
            pace.open()
        for workers in self._workers.values():
            workers.stop()
        self._close_files()

    def _measure(self) -> None:
        occupied = sum(file.occupied_bytes() for file in self._files)
        self._meter.disk.change(occupied - self._meter.disk.now)

    def _start(self, link: str, move: Move, extent: Extent, begin: int,
               buffer: Buffer) -> Promise:  # fmt: skip
        assert begin % ALIGNMENT == 0, begin
        assert buffer.nbytes % ALIGNMENT == 0, buffer.nbytes
        assert begin + buffer.nbytes <= extent.nbytes, "a transfer beyond its extent"
        promise = Promise()
        self._workers[link].submit(partial(self._transfer, link, move, extent, begin, buffer,
                                           promise))  # fmt: skip
        return promise

    def _transfer(self, link: str, move: Move, extent: Extent, begin: int, buffer: Buffer,
                  promise: Promise) -> None:  # fmt: skip
        with _Keeping(promise):
            since = time.perf_counter()
            move(extent.offset + begin, buffer.view, extent.name)
            self._meter.moved(link, buffer.nbytes)
            self._paces[link].hold(buffer.nbytes, since)

    def _close_files(self) -> None:
        for file in self._files:
            file.close()
        for claim in self._claims:
            claim.release()


class _Keeping:
    """Finishes a promise with the outcome of a block."""

    __slots__ = ("_promise",)

    def __init__(self, promise: Promise) -> None:
        self._promise = promise

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> bool:  # fmt: skip
        self._promise.finish(error)
        return True
