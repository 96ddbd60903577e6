"""io_uring by raw system calls: a ring of shared memory, read and written through ctypes.

Only on x86-64, whose stores and loads stay in order without fences; Python has none to offer.
"""

import ctypes
import errno
import mmap
import os
import platform
import struct
from collections.abc import Sequence
from typing import ClassVar

from zcompile.ir.units import MiB
from zcompile.runtime.io.ring import Outcome, Request, system_call

_SETUP, _ENTER = 425, 426
_GETEVENTS = 1
_READ, _WRITE = 22, 23
_RINGS_AT, _ENTRIES_AT = 0, 0x10000000
_ONE_MAPPING = 1
"""IORING_FEAT_SINGLE_MMAP: both rings lie in one mapping (kernel 5.4)."""
_SQE = struct.Struct("<BBHiQQIIQ24x")
"""opcode, flags, priority, fd, offset, address, nbytes, request's flags, data (io_uring.h)."""
_CQE = struct.Struct("<QiI")
_PARAMS = struct.Struct("<4I I 5I 8IQ 8IQ")


class IoUring:
    """A `Ring` over one io_uring.

    raises  OSError, if this machine or its administrator has none to give
    """

    name: ClassVar[str] = "io_uring"
    request_bytes = 16 * MiB

    def __init__(self, depth: int = 512) -> None:
        if platform.machine() != "x86_64":
            raise OSError(errno.ENOSYS, f"it is not used on {platform.machine()}")
        params = ctypes.create_string_buffer(_PARAMS.size)
        self._fd = system_call(_SETUP, depth, ctypes.addressof(params))
        told = _PARAMS.unpack(params.raw)
        try:
            if not told[5] & _ONE_MAPPING:
                raise OSError(errno.ENOSYS, "this kernel's io_uring is too old")
            self._map(told)
        except OSError:
            os.close(self._fd)
            raise

    def _map(self, told: tuple[int, ...]) -> None:
        """told  io_uring_params: sizes, then offsets of the submission and completion rings"""
        self.depth, completions = told[0], told[1]
        submission, completion = told[10:19], told[19:28]
        nbytes = max(submission[6] + self.depth * 4, completion[5] + completions * _CQE.size)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self._rings = mmap.mmap(self._fd, nbytes, flags=flags, offset=_RINGS_AT)
        self._sqes = mmap.mmap(self._fd, self.depth * 64, flags=flags, offset=_ENTRIES_AT)
        self._word = ctypes.c_uint32.from_buffer
        self._sq_tail = self._word(self._rings, submission[1])
        self._sq_mask = self._word(self._rings, submission[2]).value
        self._cq_head = self._word(self._rings, completion[0])
        self._cq_tail = self._word(self._rings, completion[1])
        self._cq_mask = self._word(self._rings, completion[2]).value
        self._cqes_at = completion[5]
        for slot in range(self.depth):
            self._word(self._rings, submission[6] + slot * 4).value = slot

    def submit(self, requests: Sequence[Request]) -> int:
        tail = self._sq_tail.value
        count = min(len(requests), self.depth)
        for n, (key, write, fd, address, nbytes, offset) in enumerate(requests[:count]):
            _SQE.pack_into(self._sqes, (tail + n & self._sq_mask) * 64, _WRITE if write else _READ,
                           0, 0, fd, offset, address, nbytes, 0, key)  # fmt: skip
        self._sq_tail.value = (tail + count) & 0xFFFFFFFF
        try:
            taken = system_call(_ENTER, self._fd, count, 0, 0, 0, 0)
        except OSError:
            self._sq_tail.value = tail
            raise
        self._sq_tail.value = (tail + taken) & 0xFFFFFFFF
        return taken

    def reap(self) -> list[Outcome]:
        while (head := self._cq_head.value) == (tail := self._cq_tail.value):
            system_call(_ENTER, self._fd, 0, 1, _GETEVENTS, 0, 0)
        outcomes = []
        while head != tail:
            at = self._cqes_at + (head & self._cq_mask) * _CQE.size
            key, result, _ = _CQE.unpack_from(self._rings, at)
            outcomes.append(Outcome(key, result))
            head = (head + 1) & 0xFFFFFFFF
        self._cq_head.value = head
        return outcomes

    def close(self) -> None:
        if self._fd >= 0:
            del self._sq_tail, self._cq_head, self._cq_tail, self._word
            self._rings.close()
            self._sqes.close()
            os.close(self._fd)
            self._fd = -1
