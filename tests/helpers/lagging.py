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

CHANGED = threading.Condition()
"""Of copies that devices have."""


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

    @property
    def sources(self) -> list[Tensor]:
        """What copies hold that are not over, for all that the host knows."""
        return [copy.source for copy in [*self._copies]]

    def copy(self, direction, target, source, after, listener):
        if direction == "h2d":
            super().copy(direction, target, source, after, listener)
            return
        copy = _Copy(target, source, listener)
        with CHANGED:
            self._copies.append(copy)
            CHANGED.notify_all()
        listener.enqueued(copy)
        self.asked()

    def join(self, event):
        if isinstance(event, _Copy) and not event.made:
            for copy in [*self._copies]:
                copy.make()
                if copy is event:
                    return

    def has_copies(self):
        return bool(self._copies)

    def end_oldest_copy(self):
        with CHANGED:
            copy = self._copies.popleft() if self._copies else None
        if copy is None:
            return  # another thread waits as well
        copy.make()
        copy.target = copy.source = None
        copy.listener.landed(None)


def let_copies_end_until(promise: Promise, devices: list[Lagging]) -> None:
    """The host waits for `promise`: one copy after the other is over, until it is kept. All devices
    are looked at, since links may be measured on one of their own."""

    def tell(error):
        with CHANGED:
            CHANGED.notify_all()

    promise.then(tell)
    while not promise.done():
        with CHANGED:
            CHANGED.wait_for(lambda: promise.done() or any(d.has_copies() for d in devices))
        for device in devices:
            if not promise.done():
                device.end_oldest_copy()


def lagging(patch: pytest.MonkeyPatch) -> list[Lagging]:
    """From here on models are offloaded to lagging devices; those that were made."""
    made: list[Lagging] = []
    settle, drain = Promise.wait_finished, TransferQueue.drain

    def make(*given):
        made.append(Lagging(*given))
        return made[-1]

    def wait_for_it(promise):
        let_copies_end_until(promise, made)
        settle(promise)

    def wait_for_all(mover):
        while transfers := [*mover._in_flight]:
            transfers[0].home.wait_finished()
        drain(mover)

    patch.setattr(open, "CpuDevice", make)
    patch.setattr(Promise, "wait_finished", wait_for_it)
    patch.setattr(TransferQueue, "drain", wait_for_all)
    return made
