"""What a directory offers as a disk tier: filesystem, space, ways to reach it, a quick bandwidth.

Tried rather than looked up, in the way that the disk tier itself does at its start.
"""

import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zcompile.errors import DiskUnusable
from zcompile.ir.units import MiB
from zcompile.runtime.io.files import found_at, is_directory
from zcompile.runtime.io.system_calls import KERNEL, SystemCalls
from zcompile.runtime.probe import filesystem, free_disk_bytes

PROBE_BYTES = 64 * MiB
REQUEST_BYTES = 16 * MiB
ROUNDS = 3


@dataclass(frozen=True)
class Way:
    """How requests may reach the disk. verdict: "used", "works" or "refused"; why, if refused"""

    name: str
    verdict: str
    why: str | None


@dataclass(frozen=True)
class Disk:
    """A directory as measured.

    direct              a 4 KiB write with O_DIRECT came back equal
    granule             what transfers come in multiples of
    ways                in the order in which the disk tier tries them
    *_bytes_per_s       best of three, 16 MiB requests, one at a time, on a 64 MiB file; None if
                        there was no room for it. Buffered reads come from memory: None.
    """

    path: Path
    filesystem: str
    free_bytes: int
    direct: bool
    granule: int
    ways: tuple[Way, ...]
    read_bytes_per_s: float | None
    write_bytes_per_s: float | None


def probe_disk(path: Path, system: SystemCalls = KERNEL) -> Disk:
    """raises  DiskUnusable, if one cannot write there"""
    from zcompile.runtime.io import backends  # torch comes along
    from zcompile.runtime.io.files import Directory

    try:
        if not is_directory(found := found_at(system, path)):
            why = "does not exist" if found is None else "is not a directory"
            raise DiskUnusable(path, why, "create it or give another directory")
        free_bytes = free_disk_bytes([path], system)
        with Directory(path, system) as directory:
            direct = backends.takes_direct(directory)
            trials = backends.try_all(directory, direct)
            used = next((trial for trial in trials if trial.refused is None), None)
            ways = tuple(_way(trial.ring, trial.refused, trial is used) for trial in trials)
            read = write = None
            with backends.nameless_file(directory, direct) as file:
                granule = backends.direct_granule(system, file) if direct else 1
                if free_bytes > 2 * PROBE_BYTES:
                    write, read = _bandwidth(system, file, direct)
    except DiskUnusable:
        raise
    except OSError as error:
        todo = "give a directory that one may write to, with 64 MiB free"
        raise DiskUnusable(path, f"cannot be probed: {error.strerror}", todo) from error
    return Disk(path.resolve(), filesystem(path), free_bytes, direct, granule, ways, read, write)


def _way(name: str, refused: str | None, used: bool) -> Way:
    return Way(name, "refused" if refused else "used" if used else "works", refused)


def _bandwidth(system: SystemCalls, file: int, direct: bool) -> tuple[float, float | None]:
    """Bytes per second of writing and, if it would not come from memory, of reading."""
    buffer = mmap.mmap(-1, REQUEST_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        buffer.madvise(mmap.MADV_HUGEPAGE)  # 4 KiB pages halve the bandwidth
    buffer.write(os.urandom(4096) * (REQUEST_BYTES // 4096))
    view = memoryview(buffer)

    def write(offset: int) -> None:
        system.pwrite(file, view, offset)

    def read(offset: int) -> None:
        system.pread(file, view, offset)

    # The first write also allocates; a store writes each place many times.
    _seconds(write, system, file)
    writes = [_seconds(write, system, file) for _ in range(ROUNDS)]
    reads = [_seconds(read, system, file) for _ in range(ROUNDS)] if direct else []
    return PROBE_BYTES / min(writes), PROBE_BYTES / min(reads) if reads else None


def _seconds(move: Callable[[int], None], system: SystemCalls, file: int) -> float:
    started = time.perf_counter()
    for offset in range(0, PROBE_BYTES, REQUEST_BYTES):
        move(offset)
    system.fdatasync(file)
    return time.perf_counter() - started
