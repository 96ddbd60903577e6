"""The emulated device: its memory is host memory, its links are worker threads.

Compute happens in the calling thread, so a mark is complete when it is made. A throttled link
holds its worker for as long as the emulated one would take.

Pacing: a link that is slower than the machine it is emulated on.

A link is serial: n bytes keep it for n / rate seconds, one transfer after the other. The real
transfer happens first and counts towards that time.

The vector math of the CPU, settled before two threads need it at once.

Torch hands exp, log, sin, cos, tan, tanh, erf, sqrt and their like on the CPU to MKL, and cuts what
has more than 2048 elements between its threads. MKL looks the processor up at the first of these
calls; meanwhile the variable that says which kernels to take holds another number than in the end
(`mkl_vml_serv_cpu_detect` in MKL 2024.2, which torch 2.13 contains; pytorch/pytorch#188792). A
thread that reads it then computes its part with a kernel of low accuracy: half of the first tanh
of a process is off by up to 5e-5. Between the two writes lies the read of a page that nobody has
touched; where that page comes from disk, the first call fails in every third process or more.

A run that is resumed, or repeated, would then not equal the other one to the bit.
"""

import ctypes
import threading
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
from zcompile.runtime.device.pages import (
    clear_bytes,
    copy_bytes,
    give_back_freed_blocks,
    host_pages,
    machine_bytes,
    trim_heap,
)
from zcompile.runtime.meter import Meter, Stamp
from zcompile.runtime.transfer.ticket import Ready, Ticket, start_workers


class Pace:
    """The throttle of one link; thread-safe. `bytes_per_s` None lets everything pass."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._opened = threading.Event()

    def hold(self, nbytes: int, since: float) -> None:
        """Return once `nbytes` that set out at `since` (perf_counter) may have arrived."""
        if self.bytes_per_s is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, since) + nbytes / self.bytes_per_s
            free_at = self._free_at
        while (left := free_at - time.perf_counter()) > 0 and not self._opened.is_set():
            self._opened.wait(left)

    def open(self) -> None:
        """Hold nobody any longer; the store is closing."""
        self._opened.set()


def settle_vector_math() -> None:
    """Make the first call while this thread is alone at it: one element is never cut. It settles
    all of these functions, in float32 and float64."""
    torch.zeros((), dtype=torch.float32, device="cpu").tanh()


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

    def __init__(
        self, throttle: Mapping[str, float], meter: Meter, crashed: Callable[[BaseException], None]
    ) -> None:
        give_back_freed_blocks()  # the activations of this device lie in malloc's heap
        self._meter = meter
        self.reaches_host = not {"h2d", "d2h"} & throttle.keys()
        self._paces = {link: Pace(throttle.get(link)) for link in ("h2d", "d2h")}
        self._workers = start_workers({link: f"zinf-{link}" for link in self._paces}, 1, crashed)

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

    def copy(
        self,
        direction: Direction,
        target: Tensor,
        source: Tensor,
        after: Sequence[Ticket],
        landing: Landing,
    ) -> None:
        self._start(
            direction,
            target.numel(),
            partial(self._copy, direction, target, source, landing, time.perf_counter()),
        )

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

    def _copy(
        self, direction: Direction, target: Tensor, source: Tensor, landing: Landing, asked: float
    ) -> None:
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
