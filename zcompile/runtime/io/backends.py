"""Which ring serves a directory: the first of a list that works there, chosen once, at start.

What a directory takes: tried there rather than looked up.

A filesystem may accept the O_DIRECT flag and refuse the write; a container may have the system
call and forbid it. The file of a trial has no name, so that nothing is left behind if we are
killed; where the filesystem knows no such files it has one for a moment, which `reclaim` in
`runtime/tiers/claim.py` knows.

Kernel AIO by raw system calls: a ring that needs neither a thread nor a compiler.

Works where containers forbid io_uring. It is asynchronous for files opened with O_DIRECT only.

A ring of threads that call `preadv` and `pwritev`: the one that works everywhere.

Used where the kernel's own rings are refused, and for files without O_DIRECT, on which those
would block. Reads and writes have threads of their own, so a slow write never stands before a read.
"""

import ctypes
import errno
import logging
import mmap
import os
import platform
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue
from typing import ClassVar, NamedTuple

import torch

from zcompile.ir.units import MiB
from zcompile.runtime.io.files import Directory
from zcompile.runtime.io.ring import Outcome, Request, Ring, system_call
from zcompile.runtime.io.system_calls import SystemCalls
from zcompile.runtime.io.uring import IoUring
from zcompile.runtime.transfer.ticket import several

BLOCK_BYTES = 4096
"""Extents of the disk tier begin and end at multiples of this; every disk takes such blocks."""
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_NOT_NAMELESS = (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)
"""Of O_TMPFILE; the last two of kernels that do not know it. The first may be of O_DIRECT."""


@contextmanager
def nameless_file(directory: Directory, direct: bool) -> Iterator[int]:
    """A descriptor of a new file that nobody else can open.

    raises  OSError
    """
    flags, system = os.O_RDWR | (os.O_DIRECT if direct else 0), directory.system
    try:
        fd = directory.open(".", flags | os.O_TMPFILE | os.O_EXCL)
    except OSError as error:
        if error.errno not in _NOT_NAMELESS:
            raise
    else:
        try:
            yield fd
        finally:
            system.close(fd)
        return
    with _named_for_a_moment(directory, flags) as fd:
        yield fd


@contextmanager
def _named_for_a_moment(directory: Directory, flags: int) -> Iterator[int]:
    name, system = f"zinf-trial-{secrets.token_hex(8)}", directory.system
    with ExitStack() as opened:  # all of it is undone, also where undoing some of it fails
        made = directory.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        opened.callback(system.close, made)
        with ExitStack() as named:
            named.callback(directory.unlink, name)
            fd = directory.open(name, flags)
            opened.callback(system.close, fd)
        yield fd


def takes_direct(directory: Directory) -> bool:
    """Whether a block that is written with O_DIRECT comes back.

    raises  OSError, for other reasons than O_DIRECT
    """
    try:
        with nameless_file(directory, direct=True) as fd:
            _probe(directory.system, fd)
    except OSError as error:
        if error.errno in _NOT_DIRECT:
            return False
        raise
    return True


def takes_blocks(directory: Directory) -> None:
    """raises  OSError, if a block cannot be written and read back through the page cache"""
    with nameless_file(directory, direct=False) as fd:
        _probe(directory.system, fd)


def direct_granule(system: SystemCalls, fd: int) -> int:
    """What address, offset and size of a direct transfer must be multiples of: 512 to 4096."""
    told = system.direct_alignment(fd)
    return BLOCK_BYTES if told is None else min(max(*told, 512), BLOCK_BYTES)


def try_ring(ring: Ring, fd: int) -> None:
    """Through `ring`, on which nothing else goes on.

    raises  OSError, if a block does not come back as it was written
    """
    blocks = torch.full((3 * BLOCK_BYTES,), 0xA5, dtype=torch.uint8)
    begin = -blocks.data_ptr() % BLOCK_BYTES
    for write in (True, False):
        ring.submit([Request(0, write, fd, blocks.data_ptr() + begin, BLOCK_BYTES, 0)])
        (outcome,) = ring.reap()
        if outcome.result != BLOCK_BYTES:
            code = max(-outcome.result, 0) or errno.EIO
            raise OSError(code, os.strerror(code))
        if write:
            blocks.zero_()
    if not blocks[begin : begin + BLOCK_BYTES].eq(0xA5).all():
        raise OSError(errno.EIO, "a block did not come back as it was written")


def _probe(system: SystemCalls, fd: int) -> None:
    # Mapped, as it has to begin at a page.
    page = memoryview(mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    page[:] = b"\xa5" * BLOCK_BYTES
    wrote = system.pwrite(fd, page, 0)
    page[:] = bytes(BLOCK_BYTES)
    if wrote != BLOCK_BYTES or system.pread(fd, page, 0) != BLOCK_BYTES or page[-1] != 0xA5:
        raise OSError(errno.EIO, "a block did not come back as it was written")


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


logger = logging.getLogger("zcompile.runtime.io.backends")

RINGS: Mapping[str, Callable[[], Ring]] = {
    "aio": KernelAio,
    "io_uring": IoUring,
    "threads": ThreadRing,
    "buffered": partial(ThreadRing, direct=False),
}
DIRECT = ("aio", "io_uring", "threads")
"""In the order in which they are tried. benchmarks/disk.py compares them."""
BUFFERED = ("buffered",)
"""For files without O_DIRECT, on which the kernel's rings would block whoever submits."""


class Trial(NamedTuple):
    """refused  why this ring cannot be used in a directory; None if it can"""

    ring: str
    refused: str | None


def try_all(directory: Directory, direct: bool) -> tuple[Trial, ...]:
    """How every ring fares in `directory`; the first that is not refused would be used."""
    return tuple(_trial(name, directory, direct) for name in (DIRECT if direct else BUFFERED))


def choose(
    directories: Sequence[tuple[Directory, bool]], names: Sequence[str] = DIRECT
) -> list[Ring]:
    """One ring for each (directory, whether direct), shared by those that choose the same.

    raises  OSError of the last one tried, if none works; then nothing stays open
    """
    opened: dict[str, Ring] = {}
    try:
        return [_first(directory, names if direct else BUFFERED, direct, opened)
                for directory, direct in directories]  # fmt: skip
    except BaseException:  # a thread that cannot be started is none of the system's
        for ring in opened.values():
            ring.close()
        raise


def _first(directory: Directory, names: Sequence[str], direct: bool,
           opened: dict[str, Ring]) -> Ring:  # fmt: skip
    refusal = OSError(errno.ENOSYS, "there is no way to read and write")
    for name in names:
        try:
            ring = opened.get(name) or directory.system.ring(RINGS[name])
        except OSError as error:
            refusal = error
            continue
        try:
            with nameless_file(directory, direct) as fd:
                try_ring(ring, fd)
        except OSError as error:
            refusal = error
            if name not in opened:
                ring.close()
            continue
        opened[name] = ring
        logger.info("%s is reached through %s", directory.path, name)
        return ring
    raise refusal


def _trial(name: str, directory: Directory, direct: bool) -> Trial:
    try:
        choose([(directory, direct)], (name,))[0].close()
    except OSError as error:
        return Trial(name, error.strerror or str(error))
    return Trial(name, None)
