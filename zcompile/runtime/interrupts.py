"""Ctrl-C waits for the end of a schedule.

Transfers are started from the calling thread; an exception that strikes between two lines of that
would leave a transfer nobody finishes. While a schedule is walked, SIGINT is therefore noted, and
delivered when the walk has ended; a second one is delivered at once.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

_HELD: ContextVar[bool] = ContextVar("zinf_interrupts_held", default=False)
"""Whether an outer one holds them back: asking the signal module takes microseconds, and a step
asks thousands of times."""


class _Handler:
    """Notes the first interrupt; a second one goes where all went before."""

    def __init__(self, usual: Callable[[int, FrameType | None], Any]) -> None:
        self.usual = usual
        self.noted: list[FrameType | None] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.noted:
            self.usual(number, frame)
        self.noted.append(frame)


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Hold SIGINT back; outside the main thread, where it never arrives, nothing is done.

    Within another one it does nothing, and costs nothing either: the outer one delivers.
    """
    if _HELD.get() or threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = signal.getsignal(signal.SIGINT)
    if not callable(usual) or isinstance(usual, _Handler):
        yield
        return
    handler = _Handler(usual)
    signal.signal(signal.SIGINT, handler)
    held = _HELD.set(True)
    try:
        yield
    finally:
        _HELD.reset(held)
        signal.signal(signal.SIGINT, usual)
        if handler.noted:
            usual(signal.SIGINT, handler.noted[0])
