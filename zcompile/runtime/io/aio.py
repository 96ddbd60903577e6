"""Kernel AIO by raw system calls: a ring that needs neither a thread nor a compiler.

Works where containers forbid io_uring. It is asynchronous for files opened with O_DIRECT only.
"""

import ctypes
import errno
import platform
import struct
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from zcompile.ir.units import MiB
from zcompile.runtime.io.ring import Outcome, Request, system_call


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
    """A `Ring` over one AIO context.

    raises  OSError, if this machine or its administrator has none to give
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
        self._pointers = (ctypes.c_void_p * depth)(
            *(base + n * _IOCB.size for n in range(depth)))  # fmt: skip
        self._events = ctypes.create_string_buffer(depth * _EVENT.size)
        context = ctypes.c_ulong(0)
        system_call(numbers.setup, depth, ctypes.addressof(context))
        self._context = context.value

    def submit(self, requests: Sequence[Request]) -> int:
        count = min(len(requests), self.depth)
        for n, (key, write, fd, address, nbytes, offset) in enumerate(requests[:count]):
            _IOCB.pack_into(self._iocbs, n * _IOCB.size, key, 0, 0, _PWRITE if write else _PREAD,
                            0, fd, address, nbytes, offset, 0, 0, 0)  # fmt: skip
        return system_call(self._numbers.submit, self._context, count,
                           ctypes.addressof(self._pointers))  # fmt: skip

    def reap(self) -> list[Outcome]:
        count = system_call(self._numbers.getevents, self._context, 1, self.depth,
                            ctypes.addressof(self._events), 0)  # fmt: skip
        return [
            Outcome(key, result)
            for key, _, result, _ in _EVENT.iter_unpack(
                memoryview(self._events)[: count * _EVENT.size])
        ]  # fmt: skip

    def close(self) -> None:
        if self._context:
            system_call(self._numbers.destroy, self._context)
            self._context = 0
