"""Prints what this machine offers, and what would stop zcompile from working on it: `zinf doctor`.

Of a directory for the disk tier: filesystem, space, ways to reach it, a quick bandwidth, tried
rather than looked up, in the way that the disk tier itself does at its start. Of a machine: its
figures under the names of its file.
"""

import importlib.metadata
import mmap
import os
import platform
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zcompile.cli.format import Answer
from zcompile.errors import DiskUnusable
from zcompile.ir.units import MiB, show_flops, show_rate, show_size
from zcompile.ir.version import TESTED
from zcompile.machine.files import find, names
from zcompile.machine.model import Machine
from zcompile.runtime.hardware import available_bytes, cores, cpu_model, filesystem, free_disk_bytes
from zcompile.runtime.io.files import is_directory, stat_through_links
from zcompile.runtime.io.system_calls import KERNEL, SystemCalls


def described(name_or_path: str) -> Answer:
    """A machine as text; without a name, the names there are.

    raises  MachineUnknown, MachineUnreadable, MachineInvalid
    """
    if not name_or_path:
        return Answer("\n".join(names()), names())
    machine = find(name_or_path)
    return Answer("\n".join(rows(machine)), machine)


def rows(machine: Machine) -> Iterator[str]:
    """One figure of a machine a line, under the names that its file has for them."""
    yield f"{'machine':<12}{machine.name}"
    if machine.note:
        yield f"{'note':<12}{machine.note}"
    if machine.ranks > 1:
        per_node = f"{machine.ranks_per_node} on each of {machine.nodes} nodes"
        yield f"{'ranks':<12}{machine.ranks}, {per_node}; figures are those of one rank"
    for tier, nbytes in machine.tiers.items():
        yield f"{'tier':<12}{tier:<12} {show_size(nbytes):>12}"
    for link in machine.links.values():
        turns = f", takes turns with {link.shares}" if link.shares else ""
        after = f"after {link.latency_s * 1e6:.0f} us{turns}"
        yield f"{'link':<12}{link.name:<12} {show_rate(link.bytes_per_s):>12}  {after}"
    for dtype, rate in machine.compute.flops_per_s.items():
        yield f"{'compute':<12}{dtype:<12} {show_flops(rate):>12}"
    memory = show_rate(machine.compute.memory_bytes_per_s)
    yield f"{'compute':<12}{'memory':<12} {memory:>12}  after {_micro(machine.compute.launch_s)}"
    yield f"{'host':<12}{'updates':<12} {show_rate(machine.host_update_bytes_per_s):>12}"


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us, the least an op costs"


PROBE_BYTES = 64 * MiB
REQUEST_BYTES = 16 * MiB
ROUNDS = 3


@dataclass(frozen=True)
class Way:
    """How requests may reach the disk. verdict: "used", "works" or "refused"; why, if refused."""

    name: str
    verdict: str
    why: str | None


@dataclass(frozen=True)
class Disk:
    """A directory as measured.

    direct         a 4 KiB write with O_DIRECT came back equal
    granule        block size of transfers
    ways           in the order in which the disk tier tries them
    *_bytes_per_s  best of three, 16 MiB requests, one at a time, on a 64 MiB file; None if there
                   was no room for it, and for buffered reads, which come from memory
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
    """Measure a directory.

    raises  DiskUnusable, if one cannot write there
    """
    from zcompile.runtime.io import trial  # torch comes along
    from zcompile.runtime.io.files import Directory

    try:
        if not is_directory(found := stat_through_links(system, path)):
            why = "does not exist" if found is None else "is not a directory"
            raise DiskUnusable(path, why, "create it or give another directory")
        free_bytes = free_disk_bytes([path], system)
        with Directory(path, system) as directory:
            direct = trial.supports_direct(directory)
            trials = trial.try_rings(directory, direct)
            used = next((trial for trial in trials if trial.refused is None), None)
            ways = tuple(_way(trial.ring, trial.refused, trial is used) for trial in trials)
            read = write = None
            with trial.nameless_file(directory, direct) as file:
                granule = trial.direct_granule(system, file) if direct else 1
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


@dataclass(frozen=True)
class Device:
    """A compute device; the CPU is one too, its memory is the machine's."""

    name: str
    model: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Finding:
    """A defect of the installation. stops: zcompile does not work until it is mended."""

    stops: bool
    text: str


@dataclass(frozen=True)
class Examined:
    """What was found on this machine. Versions are None for packages that are not installed.

    kernels  why those of our own do not run here; "" if they do
    machine  that a run plans for: the budgets it takes by default, free bytes on all disks
             together, and rates over them
    kept     path of the file with its rates
    """

    python: str
    torch: str
    torch_tested: str
    triton: str | None
    kernels: str
    devices: tuple[Device, ...]
    cores: int
    huge_pages: str
    disks: tuple[Disk, ...]
    machine: Machine | None
    kept: Path | None
    findings: tuple[Finding, ...]


def doctor(disks: Sequence[Path], measure: bool = False) -> Answer:
    """Examine this machine; exit code 1 if a finding stops zcompile from working.

    measure  measure rates, also if earlier ones are kept
    """
    found = examine(disks, measure)
    stopped = any(finding.stops for finding in found.findings)
    return Answer("\n".join(_lines(found)), found, 1 if stopped else 0)


def examine(disks: Sequence[Path], measure: bool) -> Examined:
    """Look at everything once; what cannot be used becomes a finding, not an error."""
    import torch  # takes seconds; the commands that read a dump do without

    from triton_kernels import missing

    findings = [*_installation(torch.cuda.is_available())]
    disks_found = []
    for path in disks:
        try:
            disks_found.append(probe_disk(path))
        except DiskUnusable as error:
            findings.append(Finding(True, str(error)))
    findings += (_buffered(disk) for disk in disks_found if not disk.direct)
    devices = tuple(_devices())
    machine = kept = None
    findings += _busy()
    try:
        machine, kept = _rates(devices, [disk.path for disk in disks_found], measure)
    except DiskUnusable as error:
        findings.append(Finding(False, str(error)))
    return Examined(
        python=platform.python_version(),
        torch=torch.__version__,
        torch_tested=" to ".join(".".join(map(str, release)) for release in TESTED),
        triton=_version("triton"),
        kernels=missing(devices[0].name),
        devices=devices,
        cores=cores(),
        huge_pages=_huge_pages(),
        disks=tuple(disks_found),
        machine=machine,
        kept=kept,
        findings=tuple(findings),
    )


def _rates(
    devices: Sequence[Device], disks: Sequence[Path], measure: bool
) -> tuple[Machine, Path | None]:
    """The machine that a run plans for by default, and where its rates are kept.

    raises  DiskUnusable
    """
    import torch

    from zcompile.runtime.open import default_budgets
    from zcompile.runtime.probe import cache_file, facts, probed

    device = torch.device(devices[0].name)
    free = devices[0].free_bytes if device.type == "cuda" else devices[0].total_bytes
    tiers = default_budgets(device.type, free)
    if disks:
        tiers["disk"] = free_disk_bytes(disks)
    machine = replace(probed(device, disks, measure), tiers=tiers)
    return machine, cache_file(facts(device, disks))


def _busy() -> Iterator[Finding]:
    from zcompile.runtime.probe import is_busy

    if is_busy():
        yield Finding(
            False,
            "this machine is at work on other things: rates that are measured now "
            "are too low, and are measured again when it is not",
        )


def _buffered(disk: Disk) -> Finding:
    return Finding(
        False,
        f"{disk.path} ({disk.filesystem}) has no O_DIRECT: transfers go through "
        "the page cache, which costs memory and time",
    )


def _installation(cuda: bool) -> Iterator[Finding]:
    if "zinf" not in _backends():
        yield Finding(
            True,
            "torch.compile does not know backend='zinf': zcompile is not "
            "installed; run `pip install .` where its pyproject.toml is",
        )
    if not cuda:
        yield Finding(
            False,
            "torch sees no CUDA device: compute runs on the CPU, and the device "
            "arena is emulated in host memory",
        )


def _backends() -> Container[str]:
    """Names for `torch.compile(backend=...)` from installed packages."""
    return importlib.metadata.entry_points(group="torch_dynamo_backends").names


def _devices() -> Iterator[Device]:
    import torch

    for index in range(torch.cuda.device_count()):
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Device(f"cuda:{index}", name, total_bytes, free_bytes)
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    total_bytes = page_bytes * os.sysconf("SC_PHYS_PAGES")
    yield Device("cpu", cpu_model(), total_bytes, available_bytes(total_bytes))


def _huge_pages() -> str:
    """The kernel's setting: "always", "madvise" or "never"; elsewhere "unknown"."""
    file = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    text = file.read_text(encoding="utf-8") if file.exists() else "[unknown]"
    return text.partition("[")[2].partition("]")[0]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _lines(found: Examined) -> Iterator[str]:
    yield f"python      {found.python}"
    yield f"torch       {found.torch} (tested: {found.torch_tested})"
    yield f"triton      {found.triton or 'not installed'}"
    own = f"none: {found.kernels}" if found.kernels else "for tiles of a loss, and AdamW"
    yield f"kernels     {own}"
    yield f"cores       {found.cores}"
    yield f"huge pages  {found.huge_pages}"
    for device in found.devices:
        size = f"{show_size(device.free_bytes)} free of {show_size(device.total_bytes)}"
        yield f"device      {device.name}, {device.model}: {size}"
    for disk in found.disks:
        direct = f"O_DIRECT by {disk.granule} bytes" if disk.direct else "no O_DIRECT"
        yield f"disk        {disk.path}: {disk.filesystem}, {show_size(disk.free_bytes)} free"
        yield (
            f"            {direct}, read {_rate(disk.read_bytes_per_s)}, "
            f"write {_rate(disk.write_bytes_per_s)} (one request at a time)"
        )
        yield "            " + ", ".join(
            f"{way.name}: {way.verdict}" + (f" ({way.why})" if way.why else "") for way in disk.ways
        )
    if found.machine is not None:
        yield from rows(found.machine)
        yield f"{'tiers':<12}are what a run takes unless device_memory and host_memory are given"
        yield f"{'rates':<12}kept in {found.kept or 'no place'}; --measure measures again"
    for finding in found.findings:
        yield f"{'STOP' if finding.stops else 'note':<12}{finding.text}"


def _rate(bytes_per_s: float | None) -> str:
    return "not measured" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f} GB/s"
