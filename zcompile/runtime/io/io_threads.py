"""A ring of threads that call `preadv` and `pwritev`: the one that works everywhere.

Used where the kernel's own rings are refused, and for files without O_DIRECT, on which those
would block. Reads and writes have threads of their own, so a slow write never stands before a read.
"""

import ctypes
import errno
import os
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue
from typing import ClassVar

from zcompile.ir.units import MiB
from zcompile.runtime.io.ring import Outcome, Request
from zcompile.runtime.transfer.workers import several

THREADS = 4
"""Each way. Four requests in flight reach the disk's own speed (measured against fio)."""


class ThreadRing:
    """A `Ring` of 2 * THREADS threads.

    direct  its files are open with O_DIRECT; if not, what was moved is dropped from the page cache
    """

    name: ClassVar[str] = "threads"
    depth = 4 * THREADS
    request_bytes = 16 * MiB

    def __init__(self, direct: bool = True) -> None:
        self._direct = direct
        self._outcomes: SimpleQueue[Outcome | BaseException] = SimpleQueue()
        crashed = self._outcomes.put
        self._workers = several({False: "zinf-read", True: "zinf-write"}, THREADS, crashed)

    def submit(self, requests: Sequence[Request]) -> int:
        for request in requests[: self.depth]:
            self._workers[request.write].submit(
                partial(_serve, request, self._direct, self._outcomes))  # fmt: skip
        return min(len(requests), self.depth)

    def reap(self) -> list[Outcome]:
        outcome = self._outcomes.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return [outcome]

    def close(self) -> None:
        for workers in self._workers.values():
            workers.stop()


def _serve(request: Request, direct: bool,
           outcomes: "SimpleQueue[Outcome | BaseException]") -> None:  # fmt: skip
    view = memoryview((ctypes.c_ubyte * request.nbytes).from_address(request.address))
    try:
        move = os.pwritev if request.write else os.preadv
        result = move(request.fd, [view], request.offset)
        if not direct:
            os.posix_fadvise(request.fd, request.offset, request.nbytes, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        result = -(error.errno or errno.EIO)
    outcomes.put(Outcome(request.key, result))
