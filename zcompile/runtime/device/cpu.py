"""The emulated device uses host memory as device memory and worker threads as links.

Compute happens in the calling thread, so a mark is complete when it is made. A throttled link holds
its worker for as long as the emulated link would take.

Importing this module makes the vector math of the CPU ready (`initialize_vector_math`), so that two
runs of a model are equal to the bit.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from zcompile.errors import DeviceTooSmall
from zcompile.ir.optimizer_step import LEAST_PACED_BYTES
from zcompile.ir.ties import Watch
from zcompile.ir.units import KiB, MiB
from zcompile.runtime.device.base import CopyListener, CopyReport, Direction
from zcompile.runtime.device.cores import Cores
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

# --- The device ---

INLINE_BYTES = 128 * KiB
"""Copies up to this size are made by the calling thread: at 8 GB/s this takes 16 us, less than
waking a worker and being woken."""


class CpuDevice:
    """A `Device` on the CPU. `throttle` maps "h2d" and "d2h" to bytes per second."""

    torch_device = torch.device("cpu")
    streams = None
    chunk_bytes = 16 * MiB
    """At 2 GB/s of a disk 8 ms, many times what starting a transfer costs; three chunks of four
    operands are in flight, which keeps a disk busy."""
    late_chunk_bytes = LEAST_PACED_BYTES

    def __init__(
        self, throttle: Mapping[str, float], meter: Meter, crashed: Callable[[BaseException], None]
    ) -> None:
        give_back_freed_blocks()  # the activations of this device lie in malloc's heap
        self._meter = meter
        self.cores = Cores()
        self.reaches_host = not {"h2d", "d2h"} & throttle.keys()
        self._throttles = {link: Throttle(throttle.get(link)) for link in ("h2d", "d2h")}
        self._workers = start_workers(
            {link: f"zinf-{link}" for link in self._throttles}, 1, crashed
        )

    def trim_after_compile(self) -> None:
        trim_heap()

    def free_bytes(self) -> int:
        return machine_bytes()

    def allocate(self, nbytes: int) -> Tensor:
        if nbytes > machine_bytes():
            raise DeviceTooSmall("cpu", nbytes, machine_bytes())
        return host_pages(nbytes)

    def allocate_each(self, sizes: Sequence[int]) -> Sequence[Tensor]:
        together = self.allocate(sum(sizes))
        return [together[end - n : end] for n, end in zip(sizes, accumulate(sizes), strict=True)]

    def give_back_unused(self) -> None:
        """Nothing to do: memory goes back to the system when it is freed."""

    def host_block(self, nbytes: int) -> Tensor:
        return host_pages(nbytes)

    def owning_view(self, memory: Tensor, watch: Watch) -> Tensor:
        array: Any = (ctypes.c_ubyte * max(memory.numel(), 1)).from_address(memory.data_ptr())
        array.memory = memory  # which lives as long as this does
        watch(array)
        with torch.inference_mode(False):  # as of `host_pages`
            return torch.frombuffer(array, dtype=torch.uint8, count=memory.numel())

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
        self._start(
            direction,
            target.numel(),
            partial(self._copy, direction, target, source, listener, time.perf_counter()),
        )

    def can_bypass_staging(self, direction: Direction) -> bool:
        return self._throttles[direction].bytes_per_s is None

    def count_bypass(self, direction: Direction, nbytes: int) -> None:
        """Device memory is host memory here, so such bytes have passed this link as well."""
        self._meter.moved(direction, nbytes)

    def clear(self, target: Tensor, after: Sequence[Ticket], listener: CopyListener) -> None:
        self._start("h2d", target.numel(), partial(_clear, target, listener))

    def join(self, event: object) -> None:
        return

    def mark_of(self, event: object) -> Ticket | None:
        return None

    def stamp(self) -> Stamp:
        return CpuStamp(time.perf_counter())

    def close(self) -> None:
        for throttle in self._throttles.values():
            throttle.stop()
        for workers in self._workers.values():
            workers.stop()

    def _start(self, direction: Direction, nbytes: int, job: Callable[[], None]) -> None:
        """Run `job` here if it is short, else in the worker of its link."""
        if nbytes <= INLINE_BYTES and self._throttles[direction].bytes_per_s is None:
            job()
        else:
            self._workers[direction].submit(job)

    def _copy(
        self,
        direction: Direction,
        target: Tensor,
        source: Tensor,
        listener: CopyListener,
        asked: float,
    ) -> None:
        """A throttled link begins when it was asked to, not when its thread has woken up."""
        with CopyReport(listener):
            throttle, nbytes = self._throttles[direction], target.numel()
            since = time.perf_counter() if throttle.bytes_per_s is None else asked
            copy_bytes(target, source, nbytes)
            self._meter.moved(direction, nbytes)
            throttle.delay(nbytes, since)
            self._meter.busy(direction, nbytes, since, time.perf_counter(), listener.name)


@dataclass(frozen=True)
class CpuStamp:
    """A moment on the host's clock."""

    seconds: float

    def until(self, later: Stamp) -> float:
        assert isinstance(later, CpuStamp)
        return later.seconds - self.seconds

    def passed(self) -> bool:
        return True


def _clear(target: Tensor, listener: CopyListener) -> None:
    """Zero `target` and report that."""
    with CopyReport(listener):
        clear_bytes(target, target.numel())


class Throttle:
    """Slows one link down to `bytes_per_s`, or not at all if that is None; thread-safe.

    A link is serial: n bytes occupy it for n / rate seconds, one transfer after the other. The real
    transfer happens first and counts towards that time.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def delay(self, nbytes: int, since: float) -> None:
        """Return once `nbytes` that set out at `since` (perf_counter) may have arrived."""
        if self.bytes_per_s is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, since) + nbytes / self.bytes_per_s
            free_at = self._free_at
        while (left := free_at - time.perf_counter()) > 0 and not self._stopped.is_set():
            self._stopped.wait(left)

    def stop(self) -> None:
        """End all delays; the store is closing."""
        self._stopped.set()


# --- Vector math ---


def initialize_vector_math() -> None:
    """Make the first call to vector math while no other thread computes.

    Torch hands exp, log, sin, cos, tan, tanh, erf, sqrt and their like on the CPU to MKL, and cuts
    what has more than 2048 elements between its threads. MKL looks the processor up at the first of
    these calls; meanwhile the variable that says which kernels to take holds another number than in
    the end (`mkl_vml_serv_cpu_detect` in MKL 2024.2, which torch 2.13 contains;
    pytorch/pytorch#188792). A thread that reads it then computes its part with a kernel of low
    accuracy: half of the first tanh of a process is off by up to 5e-5. Between the two writes lies
    the read of a page that nobody has touched; where that page comes from disk, the first call
    fails in every third process or more. A run that is resumed, or repeated, would then not equal
    the other one to the bit.

    One element is never cut, so this call is safe; it initializes all of these functions, in
    float32 and float64.
    """
    torch.zeros((), dtype=torch.float32, device="cpu").tanh()


initialize_vector_math()  # at import: before any model computes, tiered or not
