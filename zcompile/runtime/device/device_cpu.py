"""The emulated device: its memory is host memory, its links are worker threads.

Compute happens in the calling thread, so a mark is complete when it is made. A throttled link
holds its worker for as long as the emulated one would take.
"""

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zcompile.errors import DeviceTooSmall
from zcompile.ir.ties import Watch
from zcompile.ir.units import KiB, MiB
from zcompile.runtime.device.base import Arriving, Direction, Landing
from zcompile.runtime.device.pace import Pace
from zcompile.runtime.device.pages import (
    clear_bytes,
    copy_bytes,
    give_back_freed_blocks,
    host_pages,
    machine_bytes,
    trim_heap,
)
from zcompile.runtime.device.vector_math import settle_vector_math
from zcompile.runtime.meter import Meter, Stamp
from zcompile.runtime.transfer.ticket import Ready, Ticket
from zcompile.runtime.transfer.workers import several

settle_vector_math()  # at import, before a model computes: tiered or as its own reference

INLINE_BYTES = 128 * KiB
"""Copied by whoever asks: at 8 GB/s this takes 16 us, less than waking a worker and being woken."""


@dataclass(frozen=True)
class CpuStamp:
    seconds: float

    def until(self, later: Stamp) -> float:
        assert isinstance(later, CpuStamp)
        return later.seconds - self.seconds


class CpuDevice:
    """A `Device` on the CPU. `throttle` maps "h2d" and "d2h" to bytes per second."""

    torch_device = torch.device("cpu")
    chunk_bytes = 16 * MiB
    """At 2 GB/s of a disk 8 ms, many times what starting a transfer costs; three chunks of four
    operands are under way, which keeps a disk busy."""

    def __init__(self, throttle: Mapping[str, float], meter: Meter,
                 crashed: Callable[[BaseException], None]) -> None:  # fmt: skip
        give_back_freed_blocks()  # the activations of this device lie in malloc's heap
        self._meter = meter
        self.reaches_host = not {"h2d", "d2h"} & throttle.keys()
        self._paces = {link: Pace(throttle.get(link)) for link in ("h2d", "d2h")}
        self._workers = several({link: f"zinf-{link}" for link in self._paces}, 1, crashed)

    def compiled(self) -> None:
        trim_heap()

    def free_bytes(self) -> int:
        return machine_bytes()

    def allocate(self, nbytes: int) -> Tensor:
        if nbytes > machine_bytes():
            raise DeviceTooSmall("cpu", nbytes, machine_bytes())
        return host_pages(nbytes)

    def host_block(self, nbytes: int) -> Tensor:
        return host_pages(nbytes)

    def lend(self, memory: Tensor, watch: Watch) -> Tensor:
        array: Any = (ctypes.c_ubyte * max(memory.numel(), 1)).from_address(memory.data_ptr())
        array.memory = memory  # which lives as long as this does
        watch(array)
        return torch.frombuffer(array, dtype=torch.uint8, count=memory.numel())

    def mark(self) -> Ticket:
        return Ready()

    def copy(self, direction: Direction, target: Tensor, source: Tensor,
             after: Sequence[Ticket], landing: Landing) -> None:  # fmt: skip
        self._start(direction, target.numel(),
                    partial(self._copy, direction, target, source, landing,
                            time.perf_counter()))  # fmt: skip

    def straight(self, direction: Direction) -> bool:
        return self._paces[direction].bytes_per_s is None

    def went_straight(self, direction: Direction, nbytes: int) -> None:
        """Device memory is host memory here, so such bytes have passed this link as well."""
        self._meter.moved(direction, nbytes)

    def clear(self, target: Tensor, after: Sequence[Ticket], landing: Landing) -> None:
        self._start("h2d", target.numel(), partial(_clear, target, landing))

    def join(self, event: object) -> None:
        return

    def stamp(self) -> Stamp:
        return CpuStamp(time.perf_counter())

    def close(self) -> None:
        for pace in self._paces.values():
            pace.open()
        for workers in self._workers.values():
            workers.stop()

    def _start(self, direction: Direction, nbytes: int, job: Callable[[], None]) -> None:
        if nbytes <= INLINE_BYTES and self._paces[direction].bytes_per_s is None:
            job()
        else:
            self._workers[direction].submit(job)

    def _copy(self, direction: Direction, target: Tensor, source: Tensor,
              landing: Landing, asked: float) -> None:  # fmt: skip
        """A paced link begins when it is asked to, not when its thread has woken up."""
        with Arriving(landing):
            pace, nbytes = self._paces[direction], target.numel()
            since = time.perf_counter() if pace.bytes_per_s is None else asked
            copy_bytes(target, source, nbytes)
            self._meter.moved(direction, nbytes)
            pace.hold(nbytes, since)
            self._meter.busy(direction, nbytes, since, time.perf_counter())


def _clear(target: Tensor, landing: Landing) -> None:
    with Arriving(landing):
        clear_bytes(target, target.numel())
