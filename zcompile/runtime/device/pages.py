"""Host memory comes in huge pages, and copies of it by one thread without the interpreter lock.

Transfers through 4 KiB pages reach about 0.6 of the speed of 2 MiB pages and cost several times the
CPU time, so every arena on the host is an anonymous mapping, aligned to 2 MiB and advised huge.
Nothing is touched here: resident memory grows with use, unless it is to be pinned.
"""

import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from zcompile.ir.units import MiB
from zcompile.runtime.hardware import cores

# --- Mappings ---

HUGE_PAGE_BYTES = 2 * MiB


def machine_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def host_pages(nbytes: int) -> Tensor:
    """Zeroed host memory in a mapping of its own, unmapped when its last tensor dies.

    returns  uint8 [nbytes], 2 MiB aligned, to be written in any mode of torch
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    # Private, since Python's default, a shared mapping, is backed by shmem without huge pages.
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with torch.inference_mode(False):  # torch lets nobody write later to what that mode has made
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE_BYTES
    whole_pages = nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if hasattr(mmap, "MADV_DONTFORK"):
        # A child that is forked while O_DIRECT reads into private memory may take the page along.
        mapping.madvise(mmap.MADV_DONTFORK)
    if whole_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE, start, whole_pages)
    return memory[start : start + nbytes]


MADV_POPULATE_WRITE = 23
"""A constant of Linux, from 5.14 on: the kernel backs pages as if each was written."""
MOST_TOUCHING = 8
"""Threads: so many zero memory about as fast as any number does."""


def touch_pages(memory: Tensor) -> None:
    """Have the kernel back memory of `host_pages` with pages now, by several threads.

    Pinning backs what is not, by the one thread that calls it, which zeroes page after page. Where
    the kernel does not do it, nothing happens: who pins meets the same, and tells.
    """
    address, nbytes = memory.data_ptr(), memory.numel()
    count = min(MOST_TOUCHING, cores(), -(-nbytes // HUGE_PAGE_BYTES))
    if count < 2:
        return
    share = -(-nbytes // (count * HUGE_PAGE_BYTES)) * HUGE_PAGE_BYTES
    libc = ctypes.CDLL(None)  # whose calls are made without the interpreter lock

    def touch(begin: int) -> None:
        length = min(share, nbytes - begin)
        libc.madvise(ctypes.c_void_p(address + begin), ctypes.c_size_t(length), MADV_POPULATE_WRITE)

    with ThreadPoolExecutor(count, "zinf-touch") as threads:
        for _ in threads.map(touch, range(0, nbytes, share)):
            pass


# --- The heap of the process ---

RETURNED_BYTES = 1 * MiB
"""Freed blocks of this size and more go back to the system on the emulated device."""
_M_MMAP_THRESHOLD = -3
"""A constant of glibc's malloc.h."""


def give_back_freed_blocks() -> None:
    """Let malloc return large blocks to the system when they are freed, for this whole process.

    By itself glibc raises the size from which a block is a mapping of its own, up to 32 MiB, and
    what is freed below that stays resident: 2 to 3 times the activations of a small GPT. A C
    library without the call keeps its own ways.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, RETURNED_BYTES)


def trim_heap() -> None:
    """Return the free memory of malloc to the system; a compilation leaves much of that behind."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# --- Copies by address ---


def copy_bytes(target: Tensor, source: Tensor, nbytes: int) -> None:
    """Copy between host memories: one thread, the GIL released.

    `Tensor.copy_` would start a team of OpenMP threads in every worker that calls it.
    """
    ctypes.memmove(address_of(target, nbytes), address_of(source, nbytes), nbytes)


def clear_bytes(target: Tensor, nbytes: int) -> None:
    """Zero host memory: one thread, the GIL released."""
    ctypes.memset(address_of(target, nbytes), 0, nbytes)


def check_memory(dense: Tensor) -> None:
    """Check a tensor whose address will be handed out, as to a disk.

    raises  RuntimeError, if its elements do not lie one after the other in memory
    """
    if dense.numel() and (not dense.data_ptr() or not dense.is_contiguous()):
        raise _no_memory(dense.nbytes, dense)


def address_of(memory: Tensor, nbytes: int) -> int:
    """The address from which `nbytes` bytes may be read and written.

    raises  RuntimeError, if the tensor has no memory there: a copy by address would end the process
    """
    address, item = memory.data_ptr(), memory.element_size()
    if nbytes and not (
        address
        and memory.is_cpu
        and 0 <= nbytes <= memory.untyped_storage().nbytes() - memory.storage_offset() * item
    ):
        raise _no_memory(nbytes, memory)
    return address


def _no_memory(nbytes: int, memory: Tensor) -> RuntimeError:
    """The error for a tensor without `nbytes` bytes of memory."""
    return RuntimeError(
        f"{nbytes} bytes were to be copied where a tensor of {tuple(memory.size())} "
        f"{memory.dtype} on {memory.device} has no memory; please report this to zcompile"
    )
