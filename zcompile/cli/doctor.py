"""`zinf doctor`: what this machine offers, and what would stop zcompile from working on it."""

import importlib.metadata
import os
import platform
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zcompile.cli.answer import Answer
from zcompile.cli.disk_probe import Disk, probe_disk
from zcompile.cli.machines import rows
from zcompile.errors import DiskUnusable, TorchUnsupported
from zcompile.ir.units import show_size
from zcompile.machine.model import Machine
from zcompile.runtime.probe import available_bytes, cores, cpu_model, free_disk_bytes


@dataclass(frozen=True)
class Device:
    """A compute device; the CPU is one too, its memory is the machine's."""

    name: str
    model: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Finding:
    """`stops`: zcompile does not work until this is mended."""

    stops: bool
    text: str


@dataclass(frozen=True)
class Examined:
    """What was found. Versions are None for what is not installed.

    machine  what a run plans for: the budgets it takes by default, what is free on all disks
             together, and rates over them
    kept     where its rates are kept
    """

    python: str
    torch: str
    torch_tested: str
    triton: str | None
    devices: tuple[Device, ...]
    cores: int
    huge_pages: str
    disks: tuple[Disk, ...]
    machine: Machine | None
    kept: Path | None
    findings: tuple[Finding, ...]


def doctor(disks: Sequence[Path], measure: bool = False) -> Answer:
    """Exit code 1 if a finding stops zcompile from working.

    measure  measure rates, also if those of an earlier time are kept
    """
    found = examine(disks, measure)
    stopped = any(finding.stops for finding in found.findings)
    return Answer("\n".join(_lines(found)), found, 1 if stopped else 0)


def examine(disks: Sequence[Path], measure: bool) -> Examined:
    """Look at everything once; what cannot be used becomes a finding, not an error."""
    import torch  # takes seconds; the commands that read a dump do without

    from zcompile.ir.torch_compat import TESTED

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
        devices=devices,
        cores=cores(),
        huge_pages=_huge_pages(),
        disks=tuple(disks_found),
        machine=machine,
        kept=kept,
        findings=tuple(findings),
    )


def _rates(devices: Sequence[Device], disks: Sequence[Path],
           measure: bool) -> tuple[Machine, Path | None]:  # fmt: skip
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
        yield Finding(False, "this machine is at work on other things: rates that are measured now "
                      "are too low, and are measured again when it is not")  # fmt: skip


def _buffered(disk: Disk) -> Finding:
    return Finding(False, f"{disk.path} ({disk.filesystem}) has no O_DIRECT: transfers go through "
                   "the page cache, which costs memory and time")  # fmt: skip


def _installation(cuda: bool) -> Iterator[Finding]:
    from zcompile.ir.torch_compat import check_torch

    try:
        check_torch()
    except TorchUnsupported as error:
        yield Finding(True, str(error))
    if "zinf" not in _backends():
        yield Finding(True, "torch.compile does not know backend='zinf': zcompile is not "
                      "installed; run `pip install .` where its pyproject.toml is")  # fmt: skip
    if not cuda:
        yield Finding(False, "torch sees no CUDA device: compute runs on the CPU, and the device "
                      "arena is emulated in host memory")  # fmt: skip


def _backends() -> Container[str]:
    """What `torch.compile(backend=...)` knows by name from installed packages."""
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
    yield f"cores       {found.cores}"
    yield f"huge pages  {found.huge_pages}"
    for device in found.devices:
        size = f"{show_size(device.free_bytes)} free of {show_size(device.total_bytes)}"
        yield f"device      {device.name}, {device.model}: {size}"
    for disk in found.disks:
        direct = f"O_DIRECT by {disk.granule} bytes" if disk.direct else "no O_DIRECT"
        yield f"disk        {disk.path}: {disk.filesystem}, {show_size(disk.free_bytes)} free"
        yield f"            {direct}, read {_rate(disk.read_bytes_per_s)}, " \
              f"write {_rate(disk.write_bytes_per_s)} (one request at a time)"  # fmt: skip
        yield "            " + ", ".join(
            f"{way.name}: {way.verdict}" + (f" ({way.why})" if way.why else "")
            for way in disk.ways)  # fmt: skip
    if found.machine is not None:
        yield from rows(found.machine)
        yield f"{'tiers':<12}are what a run takes unless device_memory and host_memory are given"
        yield f"{'rates':<12}kept in {found.kept or 'no place'}; --measure measures again"
    for finding in found.findings:
        yield f"{'STOP' if finding.stops else 'note':<12}{finding.text}"


def _rate(bytes_per_s: float | None) -> str:
    return "not measured" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f} GB/s"
