"""A store's resources are closed once: when the store is closed, when it has died, or with the
process.

A store that dies is closed by a thread of its own: a finalizer in the main thread would swallow an
interrupt, and might run within a lock of whoever happened to drop the store.
"""

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from zcompile.runtime.transfer.interrupts import cleanup, uninterrupted
from zcompile.runtime.transfer.ticket import Promise, Worker

Job = Callable[[], None]


class Closing(weakref.ref[Any]):
    """A weak reference to a store that calls `shut` at most once; a call returns when that is done.

    submit  hands a job to a thread, and is written in C; called with this when `owner` dies
    """

    __slots__ = ("_begun", "_over", "_pid", "_shut", "_thread", "alive")

    _begun: threading.Lock
    _over: Promise
    _pid: int
    _shut: Job
    _thread: threading.Thread | None
    alive: bool
    """Whether `shut` has not begun."""

    def __new__(cls, owner: object, submit: Callable[[Any], None], shut: Job) -> "Closing":
        made = super().__new__(cls, owner, submit)
        made._over, made._shut, made._thread, made.alive = Promise(), shut, None, True
        made._begun, made._pid = threading.Lock(), os.getpid()
        _OPEN.add(made)
        return made

    def __init__(self, owner: object, submit: Callable[[Any], None], shut: Job) -> None:
        """All is done: a weak reference would refuse three arguments."""

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __call__(self) -> None:
        if not self._begun.acquire(blocking=False):  # the end of the process meets our own thread
            return
        self.alive = False
        if isinstance(threading.current_thread(), Worker):
            # It is one of the threads that are to be stopped, and may hold any of their locks.
            thread = threading.Thread(target=self._close, name="zinf-closing", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread can be had: whoever waits for the dead does it
                self._begun.release()
                raise
            self._thread = thread
        else:
            self._close()

    def _close(self) -> None:
        try:
            self._shut()
        finally:
            _OPEN.discard(self)
            self._over.finish()

    @property
    def is_open(self) -> bool:
        """Whether the store can be used: it is this process's, and nobody closes it."""
        return self.alive and os.getpid() == self._pid

    @property
    def owner(self) -> Any:
        """The store, or None once it has died."""
        return super().__call__()

    def wait(self) -> None:
        if os.getpid() != self._pid:  # a fork has no thread that would do it, and nothing to shut
            return
        self._over.wait_finished()
        if self._thread is not None:
            self._thread.join()


_OPEN: set[Closing] = set()
_LAST: list[Job] = []


def call_last(job: Job) -> None:
    """Call a job at the end of the process, when all stores are closed."""
    _LAST.append(job)


def open_stores() -> list[Any]:
    """The stores of this process that are alive and not closed."""
    stores = [closing.owner for closing in list(_OPEN) if closing.is_open]
    return [store for store in stores if store is not None]


@uninterrupted
def wait_for_dead_stores() -> None:
    """Return when stores that have died are closed: their directories are free."""
    for closing in list(_OPEN):
        if closing.owner is None:
            _finish(closing)


@uninterrupted
@cleanup
def _close_all() -> None:
    """Close all stores at the end of the process.

    Closing that a daemon has begun is waited for: the interpreter would stop it half-way, and files
    that it had not removed yet would look like a killed run's.
    """
    with ExitStack() as every:  # whatever one of them raises
        for job in _LAST:
            every.callback(job)  # what was put on the stack first is called last
        for closing in list(_OPEN):
            every.callback(_finish, closing)


def _finish(closing: Closing) -> None:
    closing()
    closing.wait()


atexit.register(_close_all)
