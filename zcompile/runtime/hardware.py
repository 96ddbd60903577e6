"""This module asks the kernel about the machine: processor, memory, mounts. It needs no torch."""

import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from zcompile.ir.units import KiB
from zcompile.runtime.io.system_calls import KERNEL, SystemCalls


def cpu_model() -> str:
    """The name of the processor, as the kernel tells it."""
    models = (row[1] for row in _rows(Path("/proc/cpuinfo")) if row[0] == "model name")
    return next(models, platform.machine())


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def available_bytes(total_bytes: int) -> int:
    """Bytes of memory that can be used without swapping; all of it, where the kernel does not
    say."""
    for row in _rows(Path("/proc/meminfo")):
        if row[0] == "MemAvailable":
            return int(row[1].split()[0]) * KiB
    return total_bytes


def free_disk_bytes(directories: Iterable[Path], system: SystemCalls = KERNEL) -> int:
    """Room on the filesystems of `directories`, each counted once. raises  OSError"""
    free = {}
    for directory in directories:
        told = system.statvfs(directory)
        free[system.stat(directory, follow=True).st_dev] = told.f_bavail * told.f_frsize
    return sum(free.values())


def filesystem(path: Path) -> str:
    """The type of the mount that holds `path`, as "ext4"; "unknown" where /proc does not say."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return mount_type(path.resolve(), mounts)


def mount_type(path: Path, mounts: Sequence[str]) -> str:
    """The filesystem type from lines of /proc/self/mountinfo: of the deepest mount, the last on
    ties."""
    found, depth = "unknown", -1
    for line in mounts:
        mount, _, rest = line.partition(" - ")
        point = Path(mount.split()[4].replace("\\040", " "))
        if path.is_relative_to(point) and len(point.parts) >= depth:
            found, depth = rest.split()[0], len(point.parts)
    return found


def _rows(path: Path) -> Iterator[tuple[str, str]]:
    """key, value of a file of "key : value" lines; nothing if there is no such file."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            yield key.strip(), value.strip()
