"""The CUDA device copies on one stream per direction beside compute, with events in between.

Whoever asks for a copy enqueues it. Of its end, an event tells: a reaper thread per direction waits
for it and reports (`copy`, `clear`), or whoever was given its mark asks, or has that thread wait
(`enqueue`, `wait_in_thread`). Nothing here touches CUDA before a `CudaDevice` is made.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zcompile.errors import ConfigInvalid, DeviceTooSmall, Unsupported
from zcompile.ir.ties import Watch
from zcompile.ir.torch_compat import spin, use_expandable_segments
from zcompile.ir.units import MiB
from zcompile.runtime.device.base import CopyListener, CopyReport, Direction
from zcompile.runtime.device.pages import copy_bytes, host_pages, touch_pages
from zcompile.runtime.meter import Meter, Stamp
from zcompile.runtime.transfer.ticket import Ticket, Worker, start_workers

_CUDA: Any = torch.cuda
"""`torch.cuda`, whose streams and events carry no annotations in some torch versions we support."""


SPIN_CYCLES_PER_S = 2e9
"""Of a card's clock, which `spin` counts: an H100 has at most 1.98e9 a second, and no card twice
that."""


class _Here(threading.local):
    """The card that each thread was last found to be for; None: it has not been asked."""

    card: int | None = None


_HERE = _Here()


class CudaDevice:
    """A `Device` on CUDA.

    All compute is on the stream that is current when compute is asked for first, or waits for
    something: memory goes back to it when it waits for the copies, and to no other.
    """

    reaches_host = False
    cores = None
    chunk_bytes = 32 * MiB
    """Starting a transfer costs 40 to 50 us of Python on either side, and what CUDA takes; at the
    50 GB/s of a PCIe 5 link 32 MiB takes 0.6 ms, so that the link and not the interpreter sets the
    pace."""
    late_chunk_bytes = 16 * MiB
    """At 50 GB/s 0.3 ms for each operand, and some 0.02 ms of Python."""

    def trim_after_compile(self) -> None:
        """Nothing to do: activations do not lie in malloc's heap."""

    def __init__(
        self, device: torch.device, meter: Meter, crashed: Callable[[BaseException], None]
    ) -> None:
        # Before the arena is allocated: what lies beside it then leaves no gaps that stay reserved.
        use_expandable_segments()
        index = _CUDA.current_device() if device.index is None else device.index
        self.torch_device, self._card = torch.device("cuda", index), index
        self._meter = meter
        self._streams = {link: _CUDA.Stream(self.torch_device) for link in ("h2d", "d2h")}
        self._own_streams: list[Any] = []
        """Of copiers."""
        self._compute: Any = None
        self._locks = {link: threading.Lock() for link in self._streams}
        workers = start_workers({of: f"zinf-{of}" for of in ("h2d", "d2h", "host")}, 1, crashed)
        self._host = workers.pop("host")
        self._reapers = workers
        self._pinned: list[Tensor] = []
        self.events: list[Any] = []
        """Those that no mark has now."""
        self._timing_events: list[Any] = []

    @property
    def streams(self) -> "CudaDevice":
        return self

    def free_bytes(self) -> int:
        return int(_CUDA.mem_get_info(self.torch_device)[0])

    def allocate(self, nbytes: int) -> Tensor:
        (memory,) = self.allocate_each([nbytes])
        return memory

    def allocate_each(self, sizes: Sequence[int]) -> Sequence[Tensor]:
        compute = self.compute_stream()
        try:
            with torch.inference_mode(False):  # as of `host_pages`
                memory = [
                    torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
                    for nbytes in sizes
                ]
        except torch.OutOfMemoryError as error:
            raise DeviceTooSmall(str(self.torch_device), sum(sizes), self.free_bytes()) from error
        # Torch hands out memory again before compute is done that had it before: what compute does
        # next comes after that, and so have the copies to.
        for stream in (*self._streams.values(), *self._own_streams):
            stream.wait_stream(compute)
        return memory

    def give_back_unused(self) -> None:
        _CUDA.empty_cache()

    def host_block(self, nbytes: int) -> Tensor:
        block = host_pages(nbytes)
        if nbytes:
            touch_pages(block)
            with _CUDA.device(self.torch_device):
                status = int(_CUDA.cudart().cudaHostRegister(block.data_ptr(), nbytes, 0))
            if status != 0:
                raise ConfigInvalid(
                    "host_memory",
                    nbytes,
                    "cannot be pinned (cudaHostRegister "
                    f"gave error {status}); lower it, or raise the memory limit of the container",
                )
            self._pinned.append(block)
        return block

    def is_on_host(self, memory: Tensor) -> bool:
        """Whether memory is the host's, and not the device's own."""
        return memory.is_cpu

    def owning_view(self, memory: Tensor, watch: Watch) -> Tensor:
        borrowed = _ArrayInterface(memory)
        watch(borrowed)
        if memory.numel() == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.torch_device)
        with torch.inference_mode(False):  # as of `host_pages`
            return torch.as_tensor(borrowed, device=self.torch_device)

    def mark(self) -> Ticket:
        made = Mark(self)
        made.event.record(self.compute_stream())
        return made

    def copy(
        self,
        direction: Direction,
        target: Tensor,
        source: Tensor,
        after: Sequence[Ticket],
        listener: CopyListener,
    ) -> None:
        if self.is_on_host(target) and self.is_on_host(source):  # a gradient that is there already
            self._host.submit(partial(_copy_on_host, target, source, after, listener))
        else:
            self._enqueue(
                direction,
                partial(target.copy_, source, non_blocking=True),
                after,
                listener,
                target.numel(),
            )

    def enter_thread(self) -> None:
        """Let CUDA be on this card in the thread that calls, if it is one of the runtime's. A new
        thread is on card 0, and whatever it asks of CUDA makes a context of some hundred MiB there:
        one for each rank, on the card of the first. Threads of the user stay where they are."""
        if _HERE.card != self._card:
            _HERE.card = self._card
            if isinstance(threading.current_thread(), Worker):
                _CUDA.set_device(self.torch_device)

    def can_bypass_staging(self, direction: Direction) -> bool:
        return True

    def count_bypass(self, direction: Direction, nbytes: int) -> None:
        """Nothing to count: between a file and host memory no link of the device is used."""

    def clear(self, target: Tensor, after: Sequence[Ticket], listener: CopyListener) -> None:
        self._enqueue("h2d", target.zero_, after, listener, 0)

    def join(self, event: object) -> None:
        if isinstance(event, Mark):
            event.join_compute()

    def mark_of(self, event: object) -> Ticket | None:
        return event if isinstance(event, Mark) else None

    def compute_stream(self) -> Any:
        """The current stream of this thread, which is that of all compute. raises Unsupported"""
        stream = _CUDA.current_stream(self.torch_device)
        if self._compute is None:
            self._compute = stream
        elif stream != self._compute:
            raise Unsupported(
                f"tensors that are elsewhere were used on {stream} of {self.torch_device}, and "
                f"before on {self._compute}: copies are ordered with one stream of compute alone, "
                "so memory could be given to others while it is read",
                "offload the model, run forward, backward and the optimizer under the same "
                "torch.cuda.stream(...), or under none",
            )
        return stream

    def stamp(self) -> Stamp:
        made = CudaStamp(self._timing_events)
        made.event.record(self.compute_stream())
        return made

    def close(self) -> None:
        for workers in (*self._reapers.values(), self._host):
            workers.stop()
        if self._pinned:
            for stream in (*self._streams.values(), *self._own_streams):
                stream.synchronize()
        while self._pinned:
            _CUDA.cudart().cudaHostUnregister(self._pinned.pop().data_ptr())

    def _enqueue(
        self,
        direction: Direction,
        work: Callable[[], object],
        after: Sequence[Ticket],
        listener: CopyListener,
        nbytes: int,
    ) -> None:
        """Enqueue `work` on the stream of a direction, after the marks `after`, and hand its end to
        a reaper."""
        try:
            # Under the lock, so that the last mark a listener hears of is the last on the stream.
            with self._locks[direction]:
                mark = self._on_stream(direction, work, after, listener.name)
                listener.enqueued(mark)
        except RuntimeError as error:
            listener.landed(error)
            return
        self._reapers[direction].submit(partial(self._reap, direction, mark, listener, nbytes))

    def _on_stream(
        self, direction: Direction, work: Callable[[], object], after: Sequence[Ticket], name: str
    ) -> "Mark":
        """Enqueue `work` behind the marks `after`; returns the mark of its end.

        name  of the entry it is about, for people
        """
        self.enter_thread()
        stream, made = self._streams[direction], Mark(self)
        with stream:
            for mark in after:
                assert isinstance(mark, Mark)
                stream.wait_event(mark.event)
            work()
            made.event.record(stream)
        return made

    def enqueue(
        self,
        direction: Direction,
        copies: Sequence[tuple[Tensor, Tensor]],
        after: Sequence[Ticket],
        name: str,
    ) -> Ticket:
        with self._locks[direction]:
            try:
                mark = self._on_stream(direction, partial(_copy_each, copies), after, name)
            except RuntimeError:
                # Those before the one that failed may be on their way, with nobody to wait for
                # them; on purpose silent, since what went wrong is raised here.
                with suppress(RuntimeError):
                    self._streams[direction].synchronize()
                raise
        self._meter.moved(direction, sum([target.numel() for target, _ in copies]))
        return mark

    def copier(self, name: str) -> "CudaCopier":
        stream = _CUDA.Stream(self.torch_device)
        # It may be given memory that was allocated before there was this stream to wait.
        stream.wait_stream(self.compute_stream())
        self._own_streams.append(stream)
        return CudaCopier(self, stream, name)

    def host_row(self, numel: int, dtype: torch.dtype) -> Tensor:
        self.enter_thread()
        # Of torch's allocator of pinned memory, which waits for copies that did not block.
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)

    def delay_compute(self, seconds: float) -> None:
        with _CUDA.device(self.torch_device):
            spin(int(seconds * SPIN_CYCLES_PER_S))

    def wait_in_thread(self, direction: Direction, job: Callable[[], None]) -> None:
        self._reapers[direction].submit(job)

    def _reap(
        self, direction: Direction, mark: Ticket, listener: CopyListener, nbytes: int
    ) -> None:
        """Wait for `mark`, count the bytes, and report."""
        error: RuntimeError | None = None
        try:
            if not mark.done():  # asking is cheaper than sleeping, if it is over already
                mark.wait()
        except RuntimeError as failed:
            error = failed
        if error is None and nbytes:
            self._meter.moved(direction, nbytes)
        listener.landed(error)


def _copy_each(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    for target, source in copies:
        target.copy_(source, non_blocking=True)


class CudaCopier:
    """A `Copier` on a stream.

    name  of whose it is, for people
    """

    def __init__(self, device: CudaDevice, stream: Any, name: str) -> None:
        self.name = name
        self._device, self._stream = device, stream

    def enqueue(self, target: Tensor, source: Tensor) -> "Mark":
        self._device.enter_thread()
        made = Mark(self._device)
        with self._stream:
            target.copy_(source, non_blocking=True)
            made.event.record(self._stream)
        return made

    def synchronize(self) -> None:
        self._device.enter_thread()
        self._stream.synchronize()


class _Pooled:
    """Has an event of a pool for itself alone, which goes back when nobody has this any more.

    Work that waits for the event on a stream waits for what had been recorded when it was enqueued:
    the event may be recorded anew meanwhile, but nobody may ask for it who means the old record.
    Therefore only this object has it, and gives it to nobody.
    """

    __slots__ = ("_pool", "event")
    timing = False

    def __init__(self, pool: list[Any]) -> None:
        self._pool = pool
        try:
            self.event = pool.pop()
        except IndexError:
            self.event = _CUDA.Event(enable_timing=self.timing, blocking=True)

    def __del__(self) -> None:
        self._pool.append(self.event)


class CudaStamp(_Pooled):
    """A moment on a stream of the device."""

    __slots__ = ()
    timing = True

    def until(self, later: Stamp) -> float:
        assert isinstance(later, CudaStamp)
        later.event.synchronize()
        return float(self.event.elapsed_time(later.event)) / 1e3

    def passed(self) -> bool:
        return bool(self.event.query())


class Mark(_Pooled):
    """A ticket that is complete once a stream has passed `event`."""

    __slots__ = ("device",)

    def __init__(self, device: CudaDevice) -> None:
        super().__init__(device.events)
        self.device = device

    def done(self) -> bool:
        self.device.enter_thread()
        return bool(self.event.query())

    def wait(self) -> None:
        self.device.enter_thread()
        self.event.synchronize()

    def join_compute(self) -> None:
        self.device.compute_stream().wait_event(self.event)


@dataclass(frozen=True)
class _ArrayInterface:
    """Device memory in the form that `torch.as_tensor` takes over without a copy."""

    memory: Tensor

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.memory.numel(),),
            "typestr": "|u1",
            "version": 2,
            "data": (self.memory.data_ptr(), False),
        }


def _copy_on_host(
    target: Tensor, source: Tensor, after: Sequence[Ticket], listener: CopyListener
) -> None:
    """Copy between host memories once the marks `after` are complete, and report."""
    with CopyReport(listener):
        for mark in after:
            mark.wait()
        copy_bytes(target, source, target.numel())
