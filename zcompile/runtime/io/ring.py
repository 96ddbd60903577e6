"""The lowest level of disk transfers: requests go in by one call, outcomes come out in batches.

A ring knows files by descriptor and memory by address. It does not queue, split, retry or know
names: the engine above does, the same for every ring.
"""

import ctypes
import errno
import os
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long


class Request(NamedTuple):
    """Bytes between `nbytes` of memory at `address` and the file at `offset`."""

    key: int
    write: bool
    fd: int
    address: int
    nbytes: int
    offset: int


class Outcome(NamedTuple):
    """result  bytes moved, or an errno negated, as the kernel says it"""

    key: int
    result: int


class Ring(Protocol):
    """One thread submits at a time, and one reaps; the two may be different."""

    name: ClassVar[str]
    depth: int
    """The most requests under way at once."""
    request_bytes: int
    """The size of request that the engine should cut large transfers into."""

    def submit(self, requests: Sequence[Request]) -> int:
        """Start the first so many, and say how many; their memory is in use from here on.

        raises  OSError that refuses the first request; then none was started
        """

    def reap(self) -> list[Outcome]:
        """Block, without the interpreter lock, until some request is over."""

    def close(self) -> None:
        """Give everything back; nothing is under way any more. Idempotent."""


def system_call(number: int, *arguments: int) -> int:
    """A system call by its number; gives up the interpreter lock.

    raises  OSError
    """
    while True:
        result = int(_LIBC.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)))
        if result >= 0:
            return result
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
