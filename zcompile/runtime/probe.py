"""This machine as a `Machine`: measured in seconds, once, and kept between processes.

What is kept are rates of the hardware. Budgets and throttles belong to a run, so they come in
afterwards: a budget is the capacity of its tier, and no link is faster than its throttle.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from zcompile.config import Config, at_hand
from zcompile.machine.model import Compute, Link, Machine, throttled
from zcompile.runtime.device.base import Device
from zcompile.runtime.device.pages import machine_bytes
from zcompile.runtime.hardware import cores, cpu_model, filesystem, free_disk_bytes
from zcompile.runtime.probe_cache import cached
from zcompile.runtime.probe_compute import compute_of
from zcompile.runtime.probe_lanes import rounded
from zcompile.runtime.probe_links import (
    PACED_BYTES_PER_S,
    copy_links,
    disk_links,
    pacing_seconds,
)

NAME = "probed"


def machine_for(config: Config, device: Device,
                capacities: Mapping[str, int] | None = None) -> Machine:  # fmt: skip
    """What a run of `config` on `device` has: the machine of the config, or else the probed one.

    The first call on a machine measures for some seconds; later ones read a small file.

    capacities  bytes of each tier, where the caller knows them better than the config: there a
                budget that is not given stands for all that is free
    raises      DiskUnusable
    """
    config_disks = disks_of(config)
    machine = config.machine
    if not isinstance(machine, Machine):  # resolved by Config; None: none was given
        machine = probed(device.torch_device, config_disks)
        machine = replace(machine, tiers=_free(device, config_disks))
    budgets = {"device": config.device_memory, "host": config.host_memory}
    given = {tier: int(nbytes) for tier, nbytes in budgets.items() if nbytes is not None}
    machine = replace(machine, tiers={**machine.tiers, **given} if capacities is None
                      else dict(capacities))  # fmt: skip
    rates = {link: float(rate) for link, rate in config.throttle.items()}
    return throttled(machine, rates, _pacing_s(device.torch_device)) if rates else machine


def probed(device: torch.device, disks: Sequence[Path], again: bool = False) -> Machine:
    """The rates of this machine, as kept or measured now. Without tiers.

    What is measured while the machine is busy is used until it is not, and then measured again.

    again   measure, whatever is kept
    raises  DiskUnusable
    """
    measure = partial(probe, device, disks)
    return cached(facts(device, disks), measure, again=again, busy=is_busy())


def probe(device: torch.device, disks: Sequence[Path]) -> Machine:
    """Measure now. raises  DiskUnusable"""
    links = copy_links(device)
    if disks:
        links |= disk_links(disks)
    return Machine(NAME, {}, links, compute_of(device))


def _pacing_s(device: torch.device) -> float:
    """What a throttle adds to each transfer, as kept or measured now."""

    def measure() -> Machine:
        paced = Link("h2d", PACED_BYTES_PER_S, rounded(pacing_seconds()))
        return Machine("pacing", {}, {"h2d": paced}, Compute({}, PACED_BYTES_PER_S))

    kept = cached({**facts(device, ()), "only": "pacing"}, measure, busy=is_busy())
    return kept.links["h2d"].latency_s


def is_busy() -> bool:
    """Whether more is at work than there are cores, so that what is measured is too slow."""
    return os.getloadavg()[0] > cores()


def facts(device: torch.device, disks: Sequence[Path]) -> dict[str, str]:
    """What rates depend on. Another directory of the same filesystem is the same disk."""
    told = {
        "processor": f"{cpu_model()}, {cores()} cores, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "device": device.type,
        "disks": ", ".join(sorted(f"{filesystem(path)} {os.stat(path).st_dev}" for path in disks)),
    }
    if device.type == "cuda":
        told["device"] = f"cuda: {torch.cuda.get_device_name(device)}"
        told["float32"] = torch.get_float32_matmul_precision()
    return told


def disks_of(config: Config) -> tuple[Path, ...]:
    """What can be measured now: a directory that is yet to be made is not made for that."""
    given = config.disk if isinstance(config.disk, tuple) else ()  # a tuple, once it was checked
    return tuple(at_hand(Path(path)) for path in given)


def _free(device: Device, disks: Sequence[Path]) -> dict[str, int]:
    tiers = {"device": device.free_bytes(), "host": machine_bytes()}
    return {**tiers, "disk": free_disk_bytes(disks)} if disks else tiers
