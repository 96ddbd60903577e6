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
TELL_S = 10.0
"""Seconds for which the end of a process waits for a silent store that is to tell the others why
this rank has failed."""
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
        self._has_to_tell = False
        """Whether others are to know what was asked last, and the store has not answered since."""
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

    def must_tell(self) -> None:
        """Others are to know what was asked last: who ends waits longer for it, should the store
        still be silent."""
        self._has_to_tell = True

    @property
    def is_alive(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> None:
        """End the thread after what it was asked; idempotent.

        timeout_s  for which the store may take to answer, unless it is silent already, and nobody
                   is to know what it was asked
        """
        self._has_stopped = True
        self._asked.put(None)
        if self._thread is threading.current_thread():
            return
        if self._has_to_tell:
            timeout_s = TELL_S
        elif self.is_silent:
            timeout_s = 0.0
        self._thread.join(timeout_s)
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
            if self._asked.empty():
                self._has_to_tell = False


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
    tell. None is touched: a socket of Python made of one would set its mode for all who have it."""
    found, connected = [], _connected_to(port)
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed meanwhile
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode) and status.st_ino in connected:
                    found.append(_Socket(int(name), status.st_ino))
    return frozenset(found)


def _connected_to(port: int) -> frozenset[int]:
    """Inodes of the TCP sockets of this machine of which the other end has a port (proc(5))."""
    found = []
    for table in ("tcp", "tcp6"):
        with suppress(OSError), open(f"/proc/self/net/{table}") as rows:
            next(rows, None)  # names of the columns
            for row in rows:
                columns = row.split()
                if int(columns[2].rpartition(":")[2], 16) == port:
                    found.append(int(columns[9]))
    return frozenset(found)


def _cut(sockets: frozenset[_Socket]) -> None:
    """Let whoever reads from these hear that they have ended."""
    for fd, _ in sockets:
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            copy.shutdown(socket.SHUT_RDWR)


_ASKERS: WeakSet[Asker] = WeakSet()
"""Of this process."""
_ASK_BY_TORCH: list[tuple[threading.Thread, int]] = []
"""Threads that may wait for a store by a connection of torch's own, and its port."""


def ends_with_process(thread: threading.Thread, port: int) -> None:
    """Let a thread that waits for the store within torch come back before the interpreter is taken
    down."""
    _ASK_BY_TORCH[:] = [row for row in _ASK_BY_TORCH if row[0].is_alive()]
    _ASK_BY_TORCH.append((thread, port))


def _stop_all() -> None:
    """End the threads of all askers, with the process."""
    for asker in list(_ASKERS):
        if asker.is_alive:
            asker.stop(ANSWER_S)
    for thread, port in _ASK_BY_TORCH:
        if thread.is_alive():
            _cut(_sockets_to(port))
            thread.join(CUT_S)


call_last(_stop_all)
