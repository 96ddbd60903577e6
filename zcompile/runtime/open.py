"""Resources are what a store runs on: device, tiers, staging ring and threads, opened and closed
together.

They know nothing of the store, so that they can be closed after the store has died.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from zcompile.config import Config
from zcompile.errors import ConfigInvalid, DeviceTooSmall, ParameterChanged
from zcompile.ir.handles import REBUILD_ADVICE
from zcompile.ir.units import show_size
from zcompile.machine.staging import backlog_bytes, staging_size
from zcompile.runtime.device.base import Device
from zcompile.runtime.device.cpu import CpuDevice
from zcompile.runtime.device.cuda import CudaDevice
from zcompile.runtime.device.pages import machine_bytes
from zcompile.runtime.durable.files import DurableFiles
from zcompile.runtime.durable.tier import DurableTier
from zcompile.runtime.io.system_calls import KERNEL, SystemCalls
from zcompile.runtime.meter import Meter
from zcompile.runtime.tiers.base import TierIO
from zcompile.runtime.tiers.disk import DiskTier
from zcompile.runtime.tiers.host import HostTier
from zcompile.runtime.transfer.host_work import HostLane
from zcompile.runtime.transfer.queue import TransferQueue
from zcompile.runtime.transfer.staging import Staging
from zcompile.runtime.transfer.ticket import Workers
from zcompile.runtime.transfer.transfer import TransferContext

SHARE_OF_MACHINE = 8
"""A budget that is not given is this part of the machine's memory (`Config`)."""


@dataclass(frozen=True)
class Resources:
    """Everything that a store runs on.

    tiers          in the order in which entries are offered to them
    host_lane      computes where entries rest
    backlog_bytes  the most bytes of gradients in flight
    system         makes all calls on files
    """

    pid: int
    device_budget: int
    host_budget: int
    backlog_bytes: int
    mover: TransferQueue
    context: TransferContext
    tiers: tuple[TierIO, ...]
    host_lane: HostLane
    system: SystemCalls = KERNEL

    @property
    def durable(self) -> DurableTier | None:
        return next((tier for tier in self.tiers if isinstance(tier, DurableTier)), None)


Opening = Callable[[Config, Meter], Resources]
"""`open_resources`, or its stand-in of a dry run."""


def open_resources(config: Config, meter: Meter, system: SystemCalls = KERNEL) -> Resources:
    """Open what `config` asks for.

    system  makes all calls on files, of the disk tier and of checkpoints; another in tests
    raises  ConfigInvalid, DeviceTooSmall, DiskOwned, DiskUnusable; then nothing stays open
    """
    host_budget = _host_budget(config)
    with ExitStack() as undo:
        mover = TransferQueue()
        undo.callback(mover.close, closed_error(""))
        device = _open_device(config, meter, mover)
        undo.callback(device.close)
        straight = device.torch_device.type == "cpu" and device.can_bypass_staging("h2d")
        size = staging_size(host_budget, straight and bool(config.disk))
        device_budget = _device_budget(config, device)
        on_host = device.torch_device.type == "cpu"
        host = HostTier(host_budget - size.nbytes, device.host_block, meter.host, whole=on_host)
        ring = Staging(device.host_block(size.nbytes), size, meter.host)
        tiers: tuple[TierIO, ...] = (host, *_disk_tier(config, meter, mover, system))
        for tier in tiers:
            undo.callback(tier.close)
        context = TransferContext(device, ring, Workers("zinf-add", 1, mover.abandon))
        undo.callback(context.adder.stop)
        lane = HostLane(device.cores, mover.abandon)
        undo.pop_all()
    meter.planned_host.change(size.nbytes)
    backlog = backlog_bytes(host_budget, straight)
    return Resources(
        os.getpid(), device_budget, host_budget, backlog, mover, context, tiers, lane, system
    )


def close_resources(resources: Resources) -> None:
    """Stop transfers, close and remove the files. A forked child leaves all as it is."""
    if os.getpid() != resources.pid:
        return
    error = closed_error("")
    resources.mover.close(error)
    resources.context.device.close()
    resources.context.adder.stop()
    resources.host_lane.stop()
    for tier in resources.tiers:
        tier.close()
    resources.mover.abandon(error)
    resources.context.staging.close()


def forked_error(name: str, pid: int) -> ParameterChanged:
    return ParameterChanged(
        name,
        f"rests in process {pid}, this is a child that was forked from it",
        "use the model in its own process, or start the child with 'spawn'",
    )


def closed_error(name: str) -> ParameterChanged:
    return ParameterChanged(name, "is gone: its store was closed", REBUILD_ADVICE)


def _disk_tier(
    config: Config, meter: Meter, mover: TransferQueue, system: SystemCalls
) -> tuple[TierIO, ...]:
    if not config.disk:
        return ()
    given = config.disk if isinstance(config.disk, tuple) else (config.disk,)
    rates = {link: float(rate) for link, rate in config.throttle.items()}
    paths = [Path(path) for path in given]
    if not config.durable:
        return (DiskTier(paths, rates, meter, mover.abandon, system=system),)
    files = DurableFiles(paths)
    disk = DiskTier(
        paths, rates, meter, mover.abandon, open_file=files.open, striped=False, system=system
    )
    with ExitStack() as undo:
        undo.callback(disk.close)
        durable = DurableTier(disk, files, mover.abandon)
        undo.pop_all()
    return (durable,)


def _open_device(config: Config, meter: Meter, mover: TransferQueue) -> Device:
    """The device that `config` names. CUDA is not touched unless it does."""
    device = torch.device(config.device or "cpu")
    if device.type == "cuda":
        return CudaDevice(device, meter, mover.abandon)
    return CpuDevice({k: float(v) for k, v in config.throttle.items()}, meter, mover.abandon)


def default_budgets(kind: str, free_bytes: int) -> dict[str, int]:
    """Bytes of device and host that a run takes unless its config says otherwise.

    kind        of device, "cuda" or "cpu"
    free_bytes  there; on the CPU device that is the memory of the machine
    """
    device = free_bytes * 8 // 10 if kind == "cuda" else free_bytes // SHARE_OF_MACHINE
    return {"device": device, "host": machine_bytes() // SHARE_OF_MACHINE}


def settled(config: Config) -> Config:
    """`config` with percentages as bytes of what this machine has."""
    device = torch.device(config.device or "cpu")
    on_cuda = device.type == "cuda"
    total = torch.cuda.mem_get_info(device)[1] if on_cuda else machine_bytes()
    return config.in_bytes({"device": total, "host": machine_bytes()})


def _host_budget(config: Config) -> int:
    budget = config.budgets.get("host", machine_bytes() // SHARE_OF_MACHINE)
    if budget > machine_bytes():
        raise ConfigInvalid(
            "host_memory",
            show_size(budget),
            f"is more than the {show_size(machine_bytes())} that this machine has",
        )
    return budget


def _device_budget(config: Config, device: Device) -> int:
    free, budget = device.free_bytes(), config.budgets.get("device")
    if budget is None:
        return default_budgets(device.torch_device.type, free)["device"]
    if budget > free:
        raise DeviceTooSmall(str(device.torch_device), budget, free)
    return budget
