"""Stands in for a device in a dry run: addresses without memory, tiers that only count.

A training step is walked as on a real device, but nothing is computed and nothing moves: a tensor
here has a shape and an address of a range that is reserved and never touched. Its torch device is
the CPU, for which autograd and tracing know every op; on `meta` some have no gradient.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from zcompile.config import Config
from zcompile.errors import Unsupported
from zcompile.ir.ties import Watch
from zcompile.ir.units import GiB, KiB, TiB, show_size
from zcompile.machine.staging import staging_size
from zcompile.runtime.device.base import CopyListener, Direction
from zcompile.runtime.meter import Gauge, Meter, Stamp
from zcompile.runtime.open import Resources
from zcompile.runtime.tiers.base import Buffer, Extent, FileRange
from zcompile.runtime.transfer.host_work import HostLane
from zcompile.runtime.transfer.queue import TransferQueue
from zcompile.runtime.transfer.staging import Staging
from zcompile.runtime.transfer.ticket import Promise, Ready, Ticket, Workers
from zcompile.runtime.transfer.transfer import TransferContext

CPU = torch.device("cpu")
NO_LIMIT = 1 << 62
"""Bytes of a tier of a dry run: the placement finds what is missing on a machine, not the tier."""
MOST_BYTES = 8 * TiB
"""Most bytes of one tensor; the address space of a process has 128 TiB."""


class _Range:
    """A reserved range of addresses. Reading it gives zeros; nobody should."""

    def __init__(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        size = MOST_BYTES
        while True:
            try:
                self.memory = mmap.mmap(-1, size, flags=flags)
                break
            except OSError:  # a limit on addresses, or a kernel that promises no more than it has
                size //= 2
                if size < GiB:
                    raise
        self.nbytes = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


@cache
def _range() -> _Range:
    """The one range of the process: only addresses are taken, and tensors of a dry run share
    them."""
    return _Range()


def blank(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of a shape without memory, with a storage of its own.

    raises  Unsupported, if it is larger than the addresses there are
    """
    span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    nbytes = 0 if 0 in size else span * dtype.itemsize
    if nbytes == 0:
        return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype)
    if nbytes > _range().nbytes:
        raise Unsupported(
            f"a tensor of {show_size(nbytes)} cannot be part of a dry run: this process may have "
            f"{show_size(_range().nbytes)} of addresses",
            "raise its limit (ulimit -v), or plan a smaller shape",
        )
    array = (ctypes.c_ubyte * nbytes).from_address(_range().address)
    storage = torch.frombuffer(array, dtype=torch.uint8).untyped_storage()
    return torch.empty((), dtype=dtype).set_(storage, 0, tuple(size), tuple(stride))


def is_blank(tensor: Tensor) -> bool:
    """Whether a plain tensor has no memory.

    tensor  on the CPU
    """
    return tensor.untyped_storage().data_ptr() == _range().address


def blank_like(tensor: Tensor) -> Tensor:
    """A blank of the shape, strides and dtype of a tensor of any device."""
    size = tuple(int(n) for n in tensor.size())
    stride = tuple(int(n) for n in tensor.stride())
    return blank(size, stride, tensor.dtype)


@dataclass(frozen=True)
class DryRunStamp:
    """A moment of a dry run, in which no time passes."""

    def until(self, later: Stamp) -> float:
        return 0.0

    def passed(self) -> bool:
        return True


class DryRunDevice:
    """A `Device` whose copies are over when they are asked for.

    emulates      plans for the emulated device, where compute reaches entries on the host
    torch_device  other than the CPU only in a stand-in for a device that is asked about
    """

    streams = None
    cores = None

    def __init__(
        self,
        chunk_bytes: int,
        late_chunk_bytes: int,
        emulates: bool,
        torch_device: torch.device = CPU,
    ) -> None:
        self.torch_device = torch_device
        self.chunk_bytes = chunk_bytes
        self.late_chunk_bytes = late_chunk_bytes
        self.reaches_host = emulates
        self._emulates = emulates

    def trim_after_compile(self) -> None:
        return

    def free_bytes(self) -> int:
        return NO_LIMIT

    def allocate(self, nbytes: int) -> Tensor:
        return blank((nbytes,), (1,), torch.uint8)

    def allocate_each(self, sizes: Sequence[int]) -> Sequence[Tensor]:
        return [self.allocate(nbytes) for nbytes in sizes]

    def give_back_unused(self) -> None:
        return

    def host_block(self, nbytes: int) -> Tensor:
        return blank((nbytes,), (1,), torch.uint8)

    def owning_view(self, memory: Tensor, watch: Watch) -> Tensor:
        """Given back at once: eager code in a dry run takes no room from schedules."""
        watch(set())
        return blank_like(memory)

    def mark(self) -> Ticket:
        return Ready()

    def copy(
        self,
        direction: Direction,
        target: Tensor,
        source: Tensor,
        after: Sequence[Ticket],
        listener: CopyListener,
    ) -> None:
        _land(listener)

    def can_bypass_staging(self, direction: Direction) -> bool:
        return self._emulates

    def count_bypass(self, direction: Direction, nbytes: int) -> None:
        return

    def clear(self, target: Tensor, after: Sequence[Ticket], listener: CopyListener) -> None:
        _land(listener)

    def join(self, event: object) -> None:
        return

    def mark_of(self, event: object) -> Ticket | None:
        return None

    def stamp(self) -> Stamp:
        return DryRunStamp()

    def close(self) -> None:
        return


class DryRunTier:
    """A `TierIO` that counts the bytes it was given and holds none of them."""

    on_device = False

    alignment = 64
    granule = 1

    def __init__(self, name: str, in_memory: bool, in_use: Gauge) -> None:
        self.name = name
        self.in_memory = in_memory
        self._in_use = in_use

    def pieces(self, extent: Extent, begin: int, end: int) -> Sequence[tuple[int, Tensor]]:
        return ((begin, blank((end - begin,), (1,), torch.uint8)),) if self.in_memory else ()

    def reserve(self, nbytes: int, name: str) -> Extent:
        self._in_use.change(nbytes)
        return Extent(0, 0, nbytes, name)

    def release(self, extent: Extent) -> None:
        self._in_use.change(-extent.nbytes)

    def read(self, extent: Extent, begin: int, into: Buffer) -> Promise:
        return _kept()

    def write(self, extent: Extent, begin: int, source: Buffer) -> Promise:
        return _kept()

    def file_ranges(self, extent: Extent, begin: int, end: int) -> Sequence[FileRange]:
        return ()

    def usage(self) -> tuple[str, int, int]:
        return self.name, self._in_use.now, NO_LIMIT

    def close(self) -> None:
        return


def open_dry_run(
    config: Config, meter: Meter, *, device_bytes: int, emulates: bool, has_disk: bool
) -> Resources:
    """Resources of a machine in a dry run.

    Entries rest on a host without end until they are placed, or on such a disk, where that is asked
    for.

    device_bytes  of the device that graphs and schedules are planned for
    """
    mover = TransferQueue()
    device = DryRunDevice(NO_LIMIT, NO_LIMIT, emulates)
    size = staging_size(256 * KiB)
    ring = Staging(torch.empty(size.nbytes, dtype=torch.uint8), size, Gauge())
    means = TransferContext(device, ring, Workers("zinf-paper", 1, mover.abandon))
    tiers = [DryRunTier("host", in_memory=True, in_use=meter.host)]
    if has_disk:
        tiers.append(DryRunTier("disk", in_memory=False, in_use=meter.disk))
    lane = HostLane(None, mover.abandon)
    return Resources(
        os.getpid(), device_bytes, NO_LIMIT, size.nbytes, mover, means, tuple(tiers), lane
    )


def _land(listener: CopyListener) -> None:
    listener.enqueued(None)
    listener.landed(None)


def _kept() -> Promise:
    promise = Promise()
    promise.finish()
    return promise
