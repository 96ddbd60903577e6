"""The CUDA device: a stream per direction beside compute, events in between.

A copy is enqueued by whoever asks for it, and a reaper thread per direction learns from its event
that it has landed. Nothing here touches CUDA before a `CudaDevice` is made.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zcompile.errors import ConfigInvalid, DeviceTooSmall
from zcompile.ir.ties import Watch
from zcompile.ir.units import MiB
from zcompile.runtime.device.base import Arriving, Direction, Landing
from zcompile.runtime.device.pages import copy_bytes, host_pages
from zcompile.runtime.meter import Meter, Stamp
from zcompile.runtime.transfer.ticket import Ticket, start_workers

_CUDA: Any = torch.cuda
"""Its streams and events carry no annotations in some of the torch versions we support."""


@dataclass(frozen=True)
class CudaStamp:
    event: Any

    def until(self, later: Stamp) -> float:
        assert isinstance(later, CudaStamp)
        later.event.synchronize()
        return float(self.event.elapsed_time(later.event)) / 1e3


@dataclass(frozen=True)
class Mark:
    """Complete once a stream has passed `event`."""

    event: Any
    device: torch.device

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def join_compute(self) -> None:
        _CUDA.current_stream(self.device).wait_event(self.event)


@dataclass(frozen=True)
class _Borrowed:
    """Device memory in the form that `torch.as_tensor` adopts without a copy."""

    memory: Tensor

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.memory.numel(),),
            "typestr": "|u1",
            "version": 2,
            "data": (self.memory.data_ptr(), False),
        }


class CudaDevice:
    """A `Device` on CUDA."""

    reaches_host = False
    chunk_bytes = 32 * MiB
    """Starting a transfer costs about 100 us of Python on either side; at the 50 GB/s of a PCIe 5
    link 32 MiB takes 0.6 ms, so that the link and not the interpreter sets the pace."""

    def compiled(self) -> None:
        """Nothing that counts: activations do not lie in malloc's heap."""

    def __init__(
        self, device: torch.device, meter: Meter, crashed: Callable[[BaseException], None]
    ) -> None:
        index = _CUDA.current_device() if device.index is None else device.index
        self.torch_device = torch.device("cuda", index)
        self._meter = meter
        self._streams = {link: _CUDA.Stream(self.torch_device) for link in ("h2d", "d2h")}
        self._locks = {link: threading.Lock() for link in self._streams}
        workers = start_workers({of: f"zinf-{of}" for of in ("h2d", "d2h", "host")}, 1, crashed)
        self._host = workers.pop("host")
        self._reapers = workers
        self._pinned: list[Tensor] = []

    def free_bytes(self) -> int:
        return int(_CUDA.mem_get_info(self.torch_device)[0])

    def allocate(self, nbytes: int) -> Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            raise DeviceTooSmall(str(self.torch_device), nbytes, self.free_bytes()) from error

    def host_block(self, nbytes: int) -> Tensor:
        block = host_pages(nbytes)
        if nbytes:
            with _CUDA.device(self.torch_device):
                status = int(_CUDA.cudart().cudaHostRegister(block.data_ptr(), nbytes, 0))
            if status != 0:
                raise ConfigInvalid(
                    "host_memory",
                    nbytes,
                    "cannot be pinned (cudaHostRegister "
                    f"gave error {status}); lower it, or raise the limit on "
                    "locked memory (ulimit -l)",
                )
            self._pinned.append(block)
        return block

    def lend(self, memory: Tensor, watch: Watch) -> Tensor:
        borrowed = _Borrowed(memory)
        watch(borrowed)
        if memory.numel() == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.torch_device)
        return torch.as_tensor(borrowed, device=self.torch_device)

    def mark(self) -> Ticket:
        event = _CUDA.Event(blocking=True)
        event.record(_CUDA.current_stream(self.torch_device))
        return Mark(event, self.torch_device)

    def copy(
        self,
        direction: Direction,
        target: Tensor,
        source: Tensor,
        after: Sequence[Ticket],
        landing: Landing,
    ) -> None:
        if target.device == source.device:  # a gradient that is on the host already
            self._host.submit(partial(_copy_on_host, target, source, landing))
        else:
            self._enqueue(
                direction,
                partial(target.copy_, source, non_blocking=True),
                after,
                landing,
                [target, source],
                target.numel(),
            )

    def straight(self, direction: Direction) -> bool:
        return True

    def went_straight(self, direction: Direction, nbytes: int) -> None:
        """Between a file and host memory: no link of the device was used."""

    def clear(self, target: Tensor, after: Sequence[Ticket], landing: Landing) -> None:
        self._enqueue("h2d", target.zero_, after, landing, [target], 0)

    def join(self, event: object) -> None:
        if event is not None:
            assert isinstance(event, torch.cuda.Event)
            _CUDA.current_stream(self.torch_device).wait_event(event)

    def stamp(self) -> Stamp:
        event = _CUDA.Event(enable_timing=True, blocking=True)
        event.record(_CUDA.current_stream(self.torch_device))
        return CudaStamp(event)

    def close(self) -> None:
        for workers in (*self._reapers.values(), self._host):
            workers.stop()
        if self._pinned:
            for stream in self._streams.values():
                stream.synchronize()
        while self._pinned:
            _CUDA.cudart().cudaHostUnregister(self._pinned.pop().data_ptr())

    def _enqueue(
        self,
        direction: Direction,
        work: Callable[[], object],
        after: Sequence[Ticket],
        landing: Landing,
        alive: list[Tensor],
        nbytes: int,
    ) -> None:
        stream = self._streams[direction]
        event = _CUDA.Event(blocking=True)
        try:
            # Under the lock, so that the last event a landing hears of is the last on the stream.
            with self._locks[direction], _CUDA.stream(stream):
                for mark in after:
                    assert isinstance(mark, Mark)
                    stream.wait_event(mark.event)
                work()
                event.record(stream)
                landing.enqueued(event)
        except RuntimeError as error:
            landing.landed(error)
            return
        self._reapers[direction].submit(
            partial(self._reap, direction, event, landing, alive, nbytes)
        )

    def _reap(
        self, direction: Direction, event: Any, landing: Landing, alive: list[Tensor], nbytes: int
    ) -> None:
        """`alive` is held until the copy is over, so that no allocator reuses it under that, and no
        longer: whoever waits for the copy may count on the memory then."""
        error: RuntimeError | None = None
        try:
            if not event.query():  # asking is cheaper than sleeping, if it is over already
                event.synchronize()
        except RuntimeError as failed:
            error = failed
        if error is None and nbytes:
            self._meter.moved(direction, nbytes)
        alive.clear()
        landing.landed(error)


def _copy_on_host(target: Tensor, source: Tensor, landing: Landing) -> None:
    with Arriving(landing):
        copy_bytes(target, source, target.numel())
