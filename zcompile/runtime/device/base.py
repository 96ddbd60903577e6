"""Where compute happens: the verbs that the CPU and CUDA devices share.

A device hands out its memory, copies both ways beside compute, and says when compute has passed
a point. Copies of one direction are started in order; each tells its `Landing` how it went.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Literal, Protocol

import torch
from torch import Tensor

from zcompile.ir.ties import Watch
from zcompile.runtime.meter import Stamp
from zcompile.runtime.transfer.ticket import Ticket

Direction = Literal["h2d", "d2h"]


class Landing(Protocol):
    """Who is told about one copy. Called from any thread, each at most once, in this order."""

    def enqueued(self, event: object) -> None:
        """The copy is enqueued; `Device.join(event)` makes compute wait for it."""

    def landed(self, error: BaseException | None) -> None:
        """The bytes have arrived, or `error` says why not; neither memory is touched again."""


class Device(Protocol):
    torch_device: torch.device
    reaches_host: bool
    """Whether compute may touch host memory, and no throttled link must show between them."""
    chunk_bytes: int
    """Most bytes per operand and chunk of an optimizer's step."""

    def compiled(self) -> None:
        """Something was compiled: let go of memory that this left behind."""

    def free_bytes(self) -> int:
        """Bytes that an arena could have now."""

    def allocate(self, nbytes: int) -> Tensor:
        """Arena memory: uint8 [nbytes] on the device. raises DeviceTooSmall"""

    def host_block(self, nbytes: int) -> Tensor:
        """Host memory that copies are fast from and to: uint8 [nbytes], zeroed, 2 MiB aligned."""

    def lend(self, memory: Tensor, watch: Watch) -> Tensor:
        """A tensor with a storage of its own over `memory`'s bytes, which it keeps alive.

        watch  told of an object that dies with the last tensor over that storage
        """

    def mark(self) -> Ticket:
        """Complete once all compute that this thread submitted so far is."""

    def copy(
        self,
        direction: Direction,
        target: Tensor,
        source: Tensor,
        after: Sequence[Ticket],
        landing: Landing,
    ) -> None:
        """Start a copy between host and device memory once the marks `after` are complete.

        target, source  uint8 [n], contiguous
        """

    def straight(self, direction: Direction) -> bool:
        """Whether a file may be read into host memory, or written from it, without a copy between.

        False where the link must show: a throttled one of the emulated device.
        """

    def went_straight(self, direction: Direction, nbytes: int) -> None:
        """A transfer between a file and host memory that was not copied is over."""

    def clear(self, target: Tensor, after: Sequence[Ticket], landing: Landing) -> None:
        """Start zeroing device memory; ordered like a copy to it, and no traffic."""

    def join(self, event: object) -> None:
        """Compute of this thread waits for an enqueued copy."""

    def stamp(self) -> Stamp:
        """This moment of compute, for a stopwatch."""

    def close(self) -> None:
        """Stop copying and let go of host memory; idempotent."""


class Arriving:
    """Runs a copy and tells its landing the outcome, whatever that is."""

    __slots__ = ("_landing",)

    def __init__(self, landing: Landing) -> None:
        self._landing = landing

    def __enter__(self) -> None:
        return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            self._landing.enqueued(None)
        self._landing.landed(error)
        return error is None or isinstance(error, Exception)
