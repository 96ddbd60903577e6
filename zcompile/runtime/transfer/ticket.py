"""Tickets: promises about bytes that are still travelling.

Whoever reads a ticket sees three verbs; whoever keeps a promise has two more, `then` and `finish`.
Nothing in the runtime blocks a thread to learn that a promise was kept: what must follow is hung
on it with `then`, and only a caller that asks for it waits.
"""

import threading
from collections.abc import Callable
from typing import Protocol

from zcompile.runtime.transfer.interrupts import waits

Callback = Callable[[BaseException | None], None]
"""Called once, with what went wrong or None, in the thread that finished the promise."""


class Ticket(Protocol):
    """A promise about bytes."""

    def done(self) -> bool:
        """Whether it is complete, well or badly."""

    def wait(self) -> None:
        """Block the host until it is complete; raises what went wrong in the transfer."""

    def join_compute(self) -> None:
        """From here on compute may touch the bytes.

        Compute is the calling thread on the CPU device, the current stream on CUDA; there the
        host is blocked only until the last copy is enqueued.
        """


class Ready:
    """The ticket of what is already complete."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def join_compute(self) -> None:
        return


class Promise:
    """Finished once, from any thread; the first error given wins."""

    __slots__ = ("_callbacks", "_gate", "_lock", "_over", "error")

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._callbacks: list[Callback] = []
        self._lock = threading.Lock()
        self._over = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def done(self) -> bool:
        return self._over

    @waits
    def settle(self) -> None:
        """Block until finished, well or badly."""
        with self._gate:
            pass

    def wait(self) -> None:
        self.settle()
        if self.error is not None:
            raise self.error

    def join_compute(self) -> None:
        self.wait()

    def then(self, callback: Callback) -> None:
        """Call `callback` when finished; at once, in this thread, if that has been."""
        with self._lock:
            if not self._over:
                self._callbacks.append(callback)
                return
        callback(self.error)

    def finish(self, error: BaseException | None = None) -> None:
        """Complete; callbacks run before waiters wake. A second call changes nothing."""
        with self._lock:
            if self._over:
                return
            self._over = True
            self.error = error if self.error is None else self.error
            callbacks, self._callbacks = self._callbacks, []
        try:
            for callback in callbacks:
                callback(self.error)
        finally:
            self._gate.release()


class Countdown(Promise):
    """A promise kept in parts: finished when every `hold`, and the first, was dropped."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        super().__init__()
        self._held = 1

    def hold(self, parts: int = 1) -> None:
        with self._lock:
            self._held += parts

    def drop(self, error: BaseException | None = None) -> None:
        with self._lock:
            self._held -= 1
            if self.error is None and not self._over:
                self.error = error
            last = self._held == 0
        if last:
            self.finish()
