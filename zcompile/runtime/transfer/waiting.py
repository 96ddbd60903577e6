"""Threads that wait for others are known, so that what gives way to others can tell when to stop.

Work of the host gives way to compute (`runtime/device/cores.py`). But the thread that computes may
come to wait for that very work, within code of the user that it runs (a signal handler, an op), or
for a thread that does. So nothing gives way while any thread waits.

No lock is held here at any time: a handler of a signal may wait wherever it strikes.
"""

import threading
from contextlib import suppress
from queue import SimpleQueue

Bell = SimpleQueue[None]
"""Something is in it once it was rung."""


class Waits:
    """The threads that wait now: each enters this as a context, as often as it likes.

    bells  of threads that give way now; rung when another begins to wait
    """

    def __init__(self) -> None:
        self.bells: list[Bell] = []
        self._waiting: list[object] = []

    def __bool__(self) -> bool:
        """Whether a thread waits."""
        return bool(self._waiting)

    def ring(self) -> None:
        """Let all that give way look again."""
        for bell in tuple(self.bells):
            bell.put(None)

    def begins(self, waiter: object) -> None:
        """A thread begins to wait, for `waiter`, an object of its own."""
        self._waiting.append(waiter)  # first: who gives way shows its bell before it looks
        self.ring()

    def ends(self, waiter: object) -> None:
        """It waits no more. An interrupt may have struck before it had begun."""
        with suppress(ValueError):
            self._waiting.remove(waiter)

    def __enter__(self) -> None:
        self.begins(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        self.ends(threading.get_ident())


WAITS = Waits()
"""Of this process, for whatever."""
