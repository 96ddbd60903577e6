"""Ctrl-C waits for the end of a schedule.

Transfers are started from the calling thread; an exception that strikes between two lines of that
would leave a transfer nobody finishes. While a schedule is walked, SIGINT is therefore noted, and
delivered when the walk has ended; a second one is delivered at once.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Hold SIGINT back; outside the main thread, where it never arrives, nothing is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = signal.getsignal(signal.SIGINT)
    if not callable(usual):
        yield
        return
    noted: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            usual(number, frame)
        noted.append(frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if noted:
            usual(signal.SIGINT, noted[0])
