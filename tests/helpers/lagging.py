"""A device whose copies to the host lag behind it, as on CUDA.

A copy is enqueued at once. Compute that waits for it finds its bytes read, and the host goes on;
that the copy is over the host learns only when it waits for some promise itself, and not before.
Nothing depends on a clock.
"""

import threading
from collections import deque
from collections.abc import Callable

import pytest
from torch import Tensor

from zcompile.runtime import open
from zcompile.runtime.device.base import CopyListener
from zcompile.runtime.device.cpu import CpuDevice
from zcompile.runtime.device.pages import copy_bytes
from zcompile.runtime.transfer.queue import TransferQueue
from zcompile.runtime.transfer.ticket import Promise


class _Copy:
    """One that was enqueued; `made`: its bytes have moved."""

    def __init__(self, target: Tensor, source: Tensor, listener: CopyListener) -> None:
        self.target, self.source, self.listener, self.made = target, source, listener, False

    def make(self):
        if not self.made:
            self.made = True
            copy_bytes(self.target, self.source, self.target.numel())


class Lagging(CpuDevice):
    """Of one direction, from the device."""

    asked: Callable[[], object] = staticmethod(lambda: None)
    """Called when a copy to the host was asked for."""

    def __init__(self, *given):
        super().__init__(*given)
        self.reaches_host = False
        self._copies: deque[_Copy] = deque()
        self._changed = threading.Condition()

    @property
    def sources(self) -> list[Tensor]:
        """What copies hold that are not over, for all that the host knows."""
        return [copy.source for copy in [*self._copies]]

    def copy(self, direction, target, source, after, listener):
        if direction == "h2d":
            super().copy(direction, target, source, after, listener)
            return
        copy = _Copy(target, source, listener)
        with self._changed:
            self._copies.append(copy)
            self._changed.notify_all()
        listener.enqueued(copy)
        self.asked()

    def join(self, event):
        if isinstance(event, _Copy) and not event.made:
            for copy in [*self._copies]:
                copy.make()
                if copy is event:
                    return

    def let_copies_end_until(self, promise):
        """The host waits for `promise`: one copy after the other is over, until it is kept."""
        promise.then(self._tell)
        while not promise.done():
            with self._changed:
                self._changed.wait_for(lambda: self._copies or promise.done())
                copy = self._copies.popleft() if self._copies and not promise.done() else None
            if copy is not None:
                copy.make()
                copy.target = copy.source = None
                copy.listener.landed(None)

    def _tell(self, error):
        with self._changed:
            self._changed.notify_all()


def lagging(patch: pytest.MonkeyPatch) -> list[Lagging]:
    """From here on models are offloaded to lagging devices; those that were made."""
    made: list[Lagging] = []
    settle, drain = Promise.wait_finished, TransferQueue.drain

    def make(*given):
        made.append(Lagging(*given))
        return made[-1]

    def wait_for_it(promise):
        for device in made:
            device.let_copies_end_until(promise)
        settle(promise)

    def wait_for_all(mover):
        while transfers := [*mover._in_flight]:
            transfers[0].home.wait_finished()
        drain(mover)

    patch.setattr(open, "CpuDevice", make)
    patch.setattr(Promise, "wait_finished", wait_for_it)
    patch.setattr(TransferQueue, "drain", wait_for_all)
    return made
