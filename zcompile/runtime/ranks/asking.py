"""Asks the store of torch.distributed, and gives up where that does not answer.

The store lies in the process of rank 0, or in that of torchrun. While that is stopped, as by a
debugger or with its container, no call of torch comes back, whatever timeout it is given: some
know none, and `wait`, when its time is over, tells the store so and waits for the answer. So one
thread makes all calls, and who has asked waits for it in turns, after each of which it may give up.
What was asked is done all the same, once the store answers.

A thread that is within torch when the interpreter is taken down, and comes back from there, ends
the process by a signal ("terminate called"). So its connection is cut before, if the store is
still silent by then.
"""

import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

from zcompile.runtime.closing import call_last
from zcompile.runtime.transfer.ticket import Reporting

TURN_S = 0.1
"""Seconds after which who has asked may give up, each time."""
LONGEST_TURN_S = 1.0
"""Seconds that a turn counts for at most: what is more than that, this process itself stood
still."""
ANSWER_S = 1.0
"""Seconds for which the store is waited for by who has other things to do, as to end."""
CUT_S = 1.0
"""Seconds for which the thread may take to hear that its connection is cut."""

Turn = Callable[[float], None]
"""Called after each turn with the seconds that were waited for so far; raises to give up."""


class Store(Protocol):
    """What is used of a store of torch.distributed."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, wanted: str) -> bytes: ...


class StoreSilent(RuntimeError):
    """The store has not answered for as long as it was waited for."""


class _Asked:
    """What the thread is to do with the store, and what came of it, once that is `over`."""

    def __init__(self, act: Callable[[Store], Any]) -> None:
        self._act, self.over = act, threading.Event()
        self._found: Any = None
        self._error: BaseException | None = None

    def answer(self, store: Store) -> None:
        with Reporting(self.fail):
            self._found = self._act(store)
        self.over.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self.over.set()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._found


class Asker:
    """The thread that makes all calls of one connection to the store.

    connect  makes the connection, in the thread, since that may never come back either
    port     of the store, whose connection is cut at the end; None: none is, as of a store that
             others use too
    """

    def __init__(self, connect: Callable[[], Store], port: int | None) -> None:
        self._connect, self._port = connect, port
        self._before = frozenset() if port is None else _sockets_to(port)
        self._own: frozenset[_Socket] | None = None
        """The sockets of the connection; None: it is not made yet."""
        self._asked: SimpleQueue[_Asked | None] = SimpleQueue()
        self.is_silent = False
        """Whether somebody has waited longer than `ANSWER_S`, and nothing was answered since."""
        self._has_stopped = False
        self._thread = threading.Thread(target=self._run, name="zinf-ranks-store", daemon=True)
        self._thread.start()
        _ASKERS.add(self)

    def ask(self, act: Callable[[Store], Any], turn: Turn) -> Any:
        """What `act` makes of the store.

        raises  what that raises, and `turn`; StoreSilent, if the thread has been stopped
        """
        if self._has_stopped:
            raise StoreSilent("it is asked no more")
        asked = _Asked(act)
        self._asked.put(asked)
        waited, before = 0.0, time.monotonic()
        while not asked.over.wait(TURN_S):
            now = time.monotonic()
            waited, before = waited + min(now - before, LONGEST_TURN_S), now
            if waited > ANSWER_S:
                self.is_silent = True
            turn(waited)
        return asked.result()

    @property
    def is_alive(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> None:
        """End the thread after what it was asked; idempotent.

        timeout_s  for which the store may take to answer, unless it is silent already
        """
        self._has_stopped = True
        self._asked.put(None)
        if self._thread is threading.current_thread():
            return
        self._thread.join(0.0 if self.is_silent else timeout_s)
        if self._thread.is_alive() and self._port is not None:
            own = _sockets_to(self._port) - self._before if self._own is None else self._own
            _cut(own & _sockets_to(self._port))
            self._thread.join(CUT_S)

    def _run(self) -> None:
        failed: list[BaseException] = []
        with Reporting(failed.append):
            store = self._connect()
            if self._port is not None:
                self._own = _sockets_to(self._port) - self._before
        while (asked := self._asked.get()) is not None:
            if failed:
                asked.fail(failed[0])
            else:
                asked.answer(store)
            self.is_silent = False


class AskedStore:
    """The store of an `Asker`, for one who asks; as torch's own, but for what `turn` raises.

    below  what all keys begin with
    """

    def __init__(self, asker: Asker, turn: Turn, below: str = "") -> None:
        self._asker, self._turn, self._below = asker, turn, below

    def set(self, key: str, value: str) -> None:
        self._asker.ask(lambda store: store.set(self._below + key, value), self._turn)

    def get(self, key: str) -> bytes:
        found: bytes = self._asker.ask(lambda store: store.get(self._below + key), self._turn)
        return found

    def check(self, keys: list[str]) -> bool:
        names = [self._below + key for key in keys]
        found: bool = self._asker.ask(lambda store: store.check(names), self._turn)
        return found

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        found: bytes = self._asker.ask(
            lambda store: store.compare_set(self._below + key, expected, wanted), self._turn
        )
        return found


class _Socket(NamedTuple):
    """An open socket: a number may be another one's later, both together are not."""

    fd: int
    inode: int


def _sockets_to(port: int) -> frozenset[_Socket]:
    """The sockets of this process that are connected to a port; none where the system does not
    tell."""
    found = []
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed meanwhile, or connected to nothing
                status = os.fstat(int(name))
                if not stat.S_ISSOCK(status.st_mode):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    is_of_network = copy.family in (socket.AF_INET, socket.AF_INET6)
                    peer = copy.getpeername()
                if is_of_network and peer[1] == port:
                    found.append(_Socket(int(name), status.st_ino))
    return frozenset(found)


def _cut(sockets: frozenset[_Socket]) -> None:
    """Let whoever reads from these hear that they have ended."""
    for fd, _ in sockets:
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            copy.shutdown(socket.SHUT_RDWR)


_ASKERS: WeakSet[Asker] = WeakSet()
"""Of this process."""


def _stop_all() -> None:
    """End the threads of all askers, with the process."""
    for asker in list(_ASKERS):
        if asker.is_alive:
            asker.stop(ANSWER_S)


call_last(_stop_all)
