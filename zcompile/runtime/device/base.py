"""`Device` is the interface to the place where compute happens, on the CPU and on CUDA.

A device hands out its memory, copies both ways beside compute, and says when compute has passed a
point. Copies of one direction are started in order; each tells its `CopyListener` how it went.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from zcompile.ir.ties import Watch
from zcompile.runtime.device.cores import Cores
from zcompile.runtime.meter import Stamp
from zcompile.runtime.transfer.ticket import Ticket

Direction = Literal["h2d", "d2h"]


class CopyListener(Protocol):
    """Hears of one copy. Its methods are called from any thread, each at most once, in this
    order.

    name  of the entry whose bytes are copied, for people
    """

    @property
    def name(self) -> str: ...

    def enqueued(self, event: object) -> None:
        """The copy is enqueued; `Device.join(event)` makes compute wait for the copy."""

    def landed(self, error: BaseException | None) -> None:
        """The bytes have arrived, or `error` says why not; the copy touches neither memory
        again."""


class Copier(Protocol):
    """Copies on a stream of its own, for one thread, which waits for what the copies come after."""

    def enqueue(self, target: Tensor, source: Tensor) -> Ticket:
        """Enqueue a copy between device memory and pinned memory of the host, behind those before.

        Returns a mark that is complete once the copy is over, until when the caller keeps both.
        target, source  uint8 [n], contiguous
        raises          RuntimeError
        """

    def synchronize(self) -> None:
        """Wait until all copies are over. raises RuntimeError"""


class CopyStreams(Protocol):
    """The streams of a device that orders copies itself, by events."""

    def is_on_host(self, memory: Tensor) -> bool:
        """Whether memory is the host's, and not the device's own."""

    def enqueue(
        self,
        direction: Direction,
        copies: Sequence[tuple[Tensor, Tensor]],
        after: Sequence[Ticket],
        name: str,
    ) -> Ticket:
        """Enqueue copies between host and device memory behind the marks `after`.

        Returns a mark that is complete once they are over; nobody hears of that. The caller keeps
        targets and sources alive until then, or until compute waits for the mark.
        copies  (target, source) of each
        name    of the entry whose bytes are copied, for people
        raises  RuntimeError
        """

    def copier(self, name: str) -> Copier:
        """Copies on a stream beside compute and beside the two directions.

        name  for people
        """

    def host_row(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host that compute copies to without holding the host up: [numel]. It is not
        lent to others while such a copy is on its way."""

    def delay_compute(self, seconds: float) -> None:
        """Let compute that this thread submits from here on begin about so much later, and never
        much more, whatever the host does; nobody waits for that here."""

    def wait_in_thread(self, direction: Direction, job: Callable[[], None]) -> None:
        """Run a job that waits for marks of this direction in the thread that hears of the ends of
        its copies, after those that it was given before."""


class Device(Protocol):
    """The operations that the runtime needs of a compute device."""

    torch_device: torch.device
    reaches_host: bool
    """Whether compute may touch host memory, and no throttled link must show between them."""
    chunk_bytes: int
    """The most bytes per operand and chunk of an optimizer's step."""
    late_chunk_bytes: int
    """The least of an update that joins a forward, where a share of the streaming buffer has room:
    so many that the link takes longer for them than the host to start their transfers."""

    @property
    def cores(self) -> Cores | None:
        """Those of the host, if compute takes them; None: the device has its own."""

    @property
    def streams(self) -> CopyStreams | None:
        """None, where threads of the host copy."""

    def trim_after_compile(self) -> None:
        """Return memory that a compilation left behind to the system."""

    def free_bytes(self) -> int:
        """Bytes that an arena could have now."""

    def allocate(self, nbytes: int) -> Tensor:
        """Memory for the arena: uint8 [nbytes] on the device, which copies may write at once.

        raises  DeviceTooSmall
        """

    def allocate_each(self, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Memory for the step scratch: uint8 [n] for each of `sizes`, which need not lie together;
        as `allocate`."""

    def give_back_unused(self) -> None:
        """Return memory of the device that is free, and kept for what is allocated next, to the
        system: it may be in pieces of no use for what will be."""

    def host_block(self, nbytes: int) -> Tensor:
        """Host memory that copies are fast from and to: uint8 [nbytes], zeroed, 2 MiB aligned."""

    def owning_view(self, memory: Tensor, watch: Watch) -> Tensor:
        """A tensor with a storage of its own over the bytes of `memory`, which that storage keeps
        alive.

        watch  told of an object that dies with the last tensor over that storage
        """

    def mark(self) -> Ticket:
        """A ticket that is complete once all compute is that this thread submitted so far."""

    def copy(
        self,
        direction: Direction,
        target: Tensor,
        source: Tensor,
        after: Sequence[Ticket],
        listener: CopyListener,
    ) -> None:
        """Start a copy between host and device memory once the marks `after` are complete.

        target, source  uint8 [n], contiguous; `listener` keeps them alive until it has heard that
                        the copy is over, or until compute waits for it (`join`)
        """

    def can_bypass_staging(self, direction: Direction) -> bool:
        """Whether a file may be read into host memory, or written from there, without a copy
        between.

        False where the link must show: a throttled one of the emulated device.
        """

    def count_bypass(self, direction: Direction, nbytes: int) -> None:
        """Count a finished transfer between a file and host memory that needed no copy."""

    def clear(self, target: Tensor, after: Sequence[Ticket], listener: CopyListener) -> None:
        """Start zeroing device memory; ordered like a copy to that memory, and not counted as
        traffic."""

    def join(self, event: object) -> None:
        """Compute of this thread waits for an enqueued copy."""

    def mark_of(self, event: object) -> Ticket | None:
        """A mark that is complete once an enqueued copy is over, for other copies to come after;
        None, if only its listener hears of that."""

    def stamp(self) -> Stamp:
        """This moment of compute, for a stopwatch."""

    def close(self) -> None:
        """Stop copying and give host memory back; idempotent."""


class CopyReport:
    """Reports to a listener how the copy in the `with` block went; only interrupts pass on."""

    __slots__ = ("_listener",)

    def __init__(self, listener: CopyListener) -> None:
        self._listener = listener

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None:
            self._listener.enqueued(None)
        self._listener.landed(error)
        return error is None or isinstance(error, Exception)
