"""A ring hands requests for reads and writes to the system, and their outcomes back, in batches.

A ring knows files by descriptor and memory by address. A ring does not queue, split, retry or know
names: the engine above does, the same for every ring. There are two. Kernel AIO by raw system calls
needs neither a thread nor a compiler, and is asynchronous for files opened with O_DIRECT only.
Threads that call `preadv` and `pwritev` work everywhere, also on files without O_DIRECT; reads and
writes have threads of their own, so that a slow write never stands before a read.
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue
from typing import ClassVar, NamedTuple, Protocol

from zcompile.ir.units import MiB
from zcompile.runtime.transfer.ticket import start_workers


class Request(NamedTuple):
    """A read or write of `nbytes` between memory at `address` and the file at `offset`."""

    key: int
    write: bool
    fd: int
    address: int
    nbytes: int
    offset: int


class Outcome(NamedTuple):
    """The end of the request `key`.

    result  bytes moved, or an errno negated, as the kernel says it
    """

    key: int
    result: int


class Ring(Protocol):
    """What the engine needs of a ring. One thread submits at a time, and one reaps; the two may
    differ."""

    name: ClassVar[str]
    depth: int
    """The most requests in flight at once."""
    request_bytes: int
    """The size of request that the engine should cut large transfers into."""

    def submit(self, requests: Sequence[Request]) -> int:
        """Start the first requests and return how many; their memory is in use from here on.

        raises  OSError that refuses the first request; then none was started
        """

    def reap(self) -> list[Outcome]:
        """Block, without the interpreter lock, until some request is over."""

    def close(self) -> None:
        """Give everything back; nothing is in flight any more. Idempotent."""


# --- Kernel AIO ---


class _Numbers(NamedTuple):
    """System call numbers of one architecture (asm/unistd.h)."""

    setup: int
    destroy: int
    getevents: int
    submit: int


_NUMBERS = {"x86_64": _Numbers(206, 207, 208, 209), "aarch64": _Numbers(0, 1, 4, 2)}
_PREAD, _PWRITE = 0, 1
_IOCB = struct.Struct("<QIiHhIQQqQII")
"""data, key, flags, opcode, priority, fd, address, nbytes, offset, and three unused (aio_abi.h)."""
_EVENT = struct.Struct("<QQqq")
"""data, iocb, result, second result."""


class KernelAio:
    """A `Ring` over one AIO context of the kernel.

    raises  OSError, if this machine or its administrator has no context to give
    """

    name: ClassVar[str] = "aio"
    request_bytes = 16 * MiB

    def __init__(self, depth: int = 512) -> None:
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None:
            raise OSError(errno.ENOSYS, f"its system calls on {platform.machine()} are not known")
        self._numbers = numbers
        self.depth = depth
        self._iocbs = ctypes.create_string_buffer(depth * _IOCB.size)
        base = ctypes.addressof(self._iocbs)
        self._pointers = (ctypes.c_void_p * depth)(*(base + n * _IOCB.size for n in range(depth)))
        self._events = ctypes.create_string_buffer(depth * _EVENT.size)
        context = ctypes.c_ulong(0)
        system_call(numbers.setup, depth, ctypes.addressof(context))
        self._context = context.value

    def submit(self, requests: Sequence[Request]) -> int:
        count = min(len(requests), self.depth)
        for n, (key, write, fd, address, nbytes, offset) in enumerate(requests[:count]):
            _IOCB.pack_into(
                self._iocbs,
                n * _IOCB.size,
                key,
                0,
                0,
                _PWRITE if write else _PREAD,
                0,
                fd,
                address,
                nbytes,
                offset,
                0,
                0,
                0,
            )
        return system_call(
            self._numbers.submit, self._context, count, ctypes.addressof(self._pointers)
        )

    def reap(self) -> list[Outcome]:
        count = system_call(
            self._numbers.getevents, self._context, 1, self.depth, ctypes.addressof(self._events), 0
        )
        return [
            Outcome(key, result)
            for key, _, result, _ in _EVENT.iter_unpack(
                memoryview(self._events)[: count * _EVENT.size]
            )
        ]

    def close(self) -> None:
        if self._context:
            system_call(self._numbers.destroy, self._context)
            self._context = 0


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long


def system_call(number: int, *arguments: int) -> int:
    """Make a system call by its number, without the interpreter lock; interrupted calls are
    repeated.

    raises  OSError
    """
    while True:
        result = int(_LIBC.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)))
        if result >= 0:
            return result
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


# --- Threads ---

THREADS = 4
"""Threads for each direction. Four requests in flight reach the disk's own speed (measured against
fio)."""


class ThreadRing:
    """A `Ring` of 2 * THREADS threads.

    direct  the files are open with O_DIRECT; if not, moved bytes are dropped from the page cache
    """

    name: ClassVar[str] = "threads"
    depth = 4 * THREADS
    request_bytes = 16 * MiB

    def __init__(self, direct: bool = True) -> None:
        self._direct = direct
        self._outcomes: SimpleQueue[Outcome | BaseException] = SimpleQueue()
        crashed = self._outcomes.put
        self._workers = start_workers({False: "zinf-read", True: "zinf-write"}, THREADS, crashed)

    def submit(self, requests: Sequence[Request]) -> int:
        for request in requests[: self.depth]:
            self._workers[request.write].submit(
                partial(_serve, request, self._direct, self._outcomes)
            )
        return min(len(requests), self.depth)

    def reap(self) -> list[Outcome]:
        outcome = self._outcomes.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return [outcome]

    def close(self) -> None:
        for workers in self._workers.values():
            workers.stop()


def _serve(
    request: Request, direct: bool, outcomes: "SimpleQueue[Outcome | BaseException]"
) -> None:
    """Carry out one request in a thread of a `ThreadRing`."""
    view = memoryview((ctypes.c_ubyte * request.nbytes).from_address(request.address))
    try:
        move = os.pwritev if request.write else os.preadv
        result = move(request.fd, [view], request.offset)
        if not direct:
            os.posix_fadvise(request.fd, request.offset, request.nbytes, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        result = -(error.errno or errno.EIO)
    outcomes.put(Outcome(request.key, result))
