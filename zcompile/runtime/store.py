"""The store of one model: which entry rests where, and every way its bytes can travel.

An entry is a parameter, a gradient or an optimizer state: raw bytes with a name. The store places
it on the host while there is room, else on disk, and moves it to and from the device on request.
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zcompile import handles
from zcompile.config import Config
from zcompile.errors import (
    ConfigInvalid,
    DeviceTooSmall,
    ParameterChanged,
    TierFull,
    Unsupported,
    ValueUnset,
    ZinfError,
)
from zcompile.runtime.arena import Arena
from zcompile.runtime.device import Device, open_device
from zcompile.runtime.meter import Meter
from zcompile.runtime.mover import Mover, marks_of
from zcompile.runtime.pages import machine_bytes
from zcompile.runtime.place import Place
from zcompile.runtime.staging import Staging, staging_size
from zcompile.runtime.ticket import Ticket
from zcompile.runtime.tier_disk import DiskTier
from zcompile.runtime.tier_host import HostTier
from zcompile.runtime.tiers import TierIO
from zcompile.runtime.transfers import Add, Fetch, Means, Put, ReadBack, Transfer
from zcompile.runtime.workers import Workers
from zcompile.specs import Kind, Layout

SHARE_OF_MACHINE = 8
"""A budget that is not given is this part of the machine's memory (`Config`)."""


class Entry:
    """Bytes that the store holds. Reads give zeros until something is written.

    version  grows at each submission of a write
    home     name of the tier it rests on, "host" or "disk"
    unset    has no value, not even zeros: reading raises until all of it was written
    owner    the parameter whose gradient this is, if it is one
    """

    def __init__(self, store: "Store", name: str, kind: Kind, place: Place, unset: bool) -> None:
        self.key = handles.new_key()
        self.name = name
        self.kind = kind
        self.nbytes = place.nbytes
        self.store = store
        self.place = place
        self.unset = unset
        self.version = 0
        self.owner: weakref.ref[Tensor] | None = None

    @property
    def home(self) -> str:
        return self.place.tier.name

    def gather(self, size: Sequence[int], stride: Sequence[int], offset: int,
               dtype: torch.dtype) -> Tensor:  # fmt: skip
        """The full value in the arena, gathered now. raises BudgetExceeded, ValueUnset"""
        store = self.store
        memory = store.arena.take(self.nbytes, self.name)
        store.fetch(self, memory, after=(store.device.mark(),)).join_compute()
        store.meter.count("gathers")
        return Layout(tuple(size), tuple(stride), offset, dtype).view(memory)

    def reduce_grad(self, grad: Tensor) -> None:
        self.store.on_gradient(self, grad)


@dataclass(frozen=True)
class _Plant:
    """All that runs or is open; knows nothing of the store, so that it can be closed after it."""

    pid: int
    mover: Mover
    device: Device
    workers: tuple[Workers, ...]
    tiers: tuple[TierIO, ...]


class Store:
    """Opens what `config` asks for.

    on_gradient  what becomes of a gradient given to `Entry.reduce_grad`; set by the optimizer's
                 side of the house

    raises  ConfigInvalid, DeviceTooSmall, DiskOwned, DiskUnusable
    """

    def __init__(self, config: Config) -> None:
        self.key = handles.new_key()
        self.config = config
        self.meter = Meter()
        self.on_gradient: Callable[[Entry, Tensor], None] = _nobody_takes_gradients
        self.host_budget = _host_budget(config)
        staging = staging_size(self.host_budget, has_disk=bool(config.disk))
        mover = Mover()
        self.device = open_device(config, self.meter, mover.abandon)
        self.device_budget = _device_budget(config, self.device)
        self.arena = Arena(self.device, self.device_budget, self.meter.device)
        self._host = HostTier(self.host_budget - staging.nbytes, self.device.host_block,
                              self.meter.host)  # fmt: skip
        self._tiers: tuple[TierIO, ...] = (self._host,)
        if config.disk:
            rates = {link: float(rate) for link, rate in config.throttle.items()}
            disk = DiskTier(_directories(config), rates, self.meter, mover.abandon)
            self._tiers = (self._host, disk)
        ring = Staging(self.device.host_block(staging.nbytes), staging, self.meter.host)
        self.meter.planned_host.change(staging.nbytes)
        adder = Workers("zinf-add", 1, mover.abandon)
        self._means = Means(self.device, ring, adder)
        self._mover = mover
        self._backlog = Backlog(staging.nbytes)
        self._entries: dict[int, Entry] = {}
        self._dead: deque[int] = deque()
        self._pid = os.getpid()
        plant = _Plant(self._pid, mover, self.device, (adder,), self._tiers)
        self._close = weakref.finalize(self, _shut, plant)

    def create(self, name: str, kind: Kind, nbytes: int, *, unset: bool = False) -> Entry:
        """A new, blank entry, on the host while there is room, else on disk. raises TierFull"""
        self._enter(name)
        rows = []
        for tier in self._tiers:
            try:
                extent = tier.reserve(nbytes, name)
            except TierFull:
                rows.append(tier.usage())
                continue
            planned = self.meter.planned_host if tier is self._host else self.meter.planned_disk
            planned.change(extent.nbytes)
            entry = Entry(self, name, kind, Place(name, nbytes, tier, extent), unset)
            self._entries[entry.key] = entry
            handles.bind(entry)
            return entry
        raise TierFull(name, nbytes, rows)

    def free_later(self, key: int) -> None:
        """The entry is not needed any more. Takes no lock: may be called by a finalizer."""
        self._dead.append(key)

    def fetch(self, entry: Entry, target: Tensor, *, begin: int = 0,
              after: Sequence[Ticket] = ()) -> Ticket:  # fmt: skip
        """Start moving bytes of `entry`, from `begin` on, into `target`; returns at once.

        target  uint8 [n], contiguous, on the compute device; must not be touched before the ticket
        after   the copies into `target` come after these
        raises  ValueUnset, and what an earlier transfer of this entry failed with
        """
        self._enter(entry.name)
        if entry.unset:
            raise ValueUnset(entry.name)
        return self._submit(Fetch(entry.place, begin, target, marks_of(after), self._means), after)

    def put(self, entry: Entry, source: Tensor, *, begin: int = 0,
            after: Sequence[Ticket] = ()) -> Ticket:  # fmt: skip
        """Start moving `source` to the bytes of `entry` from `begin` on.

        Returns at once, unless sources outside the arena pile up: their memory is bounded by the
        staging ring, so then it waits for earlier ones to leave.

        source  uint8 [n], contiguous, on the compute device or in host memory; kept alive, and
                must not be changed before the ticket's `join_compute`
        after   complete before `source` is read; on CUDA, `device.mark()` of what computed it
        """
        self._enter(entry.name)
        put = Put(entry.place, begin, source, marks_of(after), self._means)
        return self._submit_write(entry, put, source, after)

    def add(self, entry: Entry, source: Tensor, *, after: Sequence[Ticket] = ()) -> Ticket:
        """Start adding `source` to `entry`, element by element in `source`'s dtype.

        source  1-D, contiguous; otherwise as in `put`. The result is that of `Tensor.add_`.
        """
        self._enter(entry.name)
        if entry.unset:
            raise ValueUnset(entry.name)
        raw = source.view(torch.uint8)
        add = Add(entry.place, 0, raw, marks_of(after), self._means, source.dtype)
        return self._submit_write(entry, add, raw, after)

    def zero(self, entry: Entry) -> None:
        """Make it blank again; moves nothing."""
        self._enter(entry.name)
        self._mover.blank(entry.place)
        entry.unset = False
        entry.version += 1

    def read_all(self, entry: Entry) -> Tensor:
        """The bytes in ordinary host memory: uint8 [entry.nbytes]; blocks. raises ValueUnset"""
        self._enter(entry.name)
        if entry.unset:
            raise ValueUnset(entry.name)
        memory = torch.empty(entry.nbytes, dtype=torch.uint8)
        self._submit(ReadBack(entry.place, 0, memory, (), self._means), ()).wait()
        return memory

    def drain(self) -> None:
        """All transfers are done; raises the first error that any had."""
        self._enter("the model")
        self._mover.drain()

    def close(self) -> None:
        """Stop what is under way, remove the files; idempotent."""
        self._close()

    def _enter(self, name: str) -> None:
        """The door of every verb: the store is this process's, and open; the dead are buried."""
        if os.getpid() != self._pid:
            raise ParameterChanged(name, f"rests in process {self._pid}, this is a child that was "
                                   "forked from it", "use the model in its own process, or start "
                                   "the child with 'spawn'")  # fmt: skip
        if not self._close.alive:
            raise _closed(name)
        while self._dead:
            entry = self._entries.pop(self._dead.popleft(), None)
            if entry is not None:
                on_host = entry.place.tier is self._host
                planned = self.meter.planned_host if on_host else self.meter.planned_disk
                planned.change(-entry.place.extent.nbytes)
                self._mover.free(entry.place)

    def _submit(self, transfer: Transfer, after: Sequence[Ticket]) -> Transfer:
        assert 0 <= transfer.begin <= transfer.end <= transfer.place.nbytes, "outside the entry"
        self._mover.submit(transfer, after)
        return transfer

    def _submit_write(self, entry: Entry, transfer: Transfer, source: Tensor,
                      after: Sequence[Ticket]) -> Transfer:  # fmt: skip
        nbytes = 0 if self.arena.holds(source) else source.numel()
        self._backlog.enter(nbytes)
        try:
            self._submit(transfer, after)
        except ZinfError:
            self._backlog.leave(nbytes)
            raise
        transfer.over.then(lambda error: self._backlog.leave(nbytes))
        entry.version += 1
        if entry.unset and entry.place.written.covers(0, entry.nbytes):
            entry.unset = False
        return transfer


class Backlog:
    """Bytes of put sources that live outside the arena: a bounded sum."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._now = 0
        self._less = threading.Condition()

    def enter(self, nbytes: int) -> None:
        """Wait until `nbytes` more fit; one that is larger than all waits until it is alone."""
        with self._less:
            self._less.wait_for(lambda: not self._now or self._now + nbytes <= self._most)
            self._now += nbytes

    def leave(self, nbytes: int) -> None:
        with self._less:
            self._now -= nbytes
            self._less.notify_all()


def _shut(plant: _Plant) -> None:
    if os.getpid() != plant.pid:  # a forked child must not remove its parent's files
        return
    error = _closed("the model")
    plant.mover.close(error)
    plant.device.close()
    for workers in plant.workers:
        workers.stop()
    for tier in plant.tiers:
        tier.close()
    plant.mover.abandon(error)


def _closed(name: str) -> ParameterChanged:
    return ParameterChanged(name, "is gone: its store was closed", "offload the model again")


def _nobody_takes_gradients(entry: Entry, grad: Tensor) -> None:
    raise Unsupported(f"a gradient of {entry.name!r} arrived at a store without an optimizer side",
                      "set store.on_gradient")  # fmt: skip


def _directories(config: Config) -> tuple[Path, ...]:
    given = config.disk
    return tuple(Path(d) for d in (given if isinstance(given, tuple) else (given,)) if d)


def _host_budget(config: Config) -> int:
    budget = int(config.host_memory or machine_bytes() // SHARE_OF_MACHINE)
    if budget > machine_bytes():
        raise ConfigInvalid("host_memory", budget, f"is more than this machine has "
                            f"({machine_bytes()} bytes)")  # fmt: skip
    return budget


def _device_budget(config: Config, device: Device) -> int:
    free = device.free_bytes()
    if config.device_memory is None:
        share = free * 8 // 10 if device.torch_device.type == "cuda" else free // SHARE_OF_MACHINE
        return int(share)
    budget = int(config.device_memory)
    if budget > free:
        raise DeviceTooSmall(str(device.torch_device), budget, free)
    return budget
