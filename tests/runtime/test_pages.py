"""Host memory that is backed before it is pinned."""

import ctypes
import mmap
from types import SimpleNamespace

import pytest
from streams.knowledge import simulated

from zcompile.config import Config
from zcompile.ir.units import MiB
from zcompile.runtime.device import pages
from zcompile.runtime.device.pages import host_pages, touch_pages
from zcompile.runtime.store.store import Store


def backed(address, nbytes):
    """The share of the pages of a range that is in memory."""
    count = -(-nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * count)()
    args = ctypes.c_void_p(address), ctypes.c_size_t(nbytes), found
    assert ctypes.CDLL(None, use_errno=True).mincore(*args) == 0
    return sum(byte & 1 for byte in found) / count


@pytest.fixture(params=[2, 3, 64])
def several_cores(request, monkeypatch):
    monkeypatch.setattr(pages, "cores", lambda: request.param)


@pytest.mark.parametrize("nbytes", [6 * MiB, 21 * MiB + 5, 32 * MiB])
def test_all_pages_are_backed_and_hold_zeros(nbytes, several_cores):
    memory = host_pages(nbytes)
    assert backed(memory.data_ptr(), nbytes) == 0
    touch_pages(memory)
    assert backed(memory.data_ptr(), nbytes) == 1
    assert not memory.any()


def test_what_is_there_stays(several_cores):
    memory = host_pages(8 * MiB)
    memory[3 * MiB] = 7
    touch_pages(memory)
    assert memory[3 * MiB] == 7
    assert memory.sum() == 7


def test_a_kernel_that_cannot_changes_nothing(several_cores, monkeypatch):
    monkeypatch.setattr(pages, "MADV_POPULATE_WRITE", 4711)
    memory = host_pages(8 * MiB)
    touch_pages(memory)
    assert backed(memory.data_ptr(), 8 * MiB) == 0


def test_what_is_pinned_was_backed_before(several_cores):
    shares = {}
    with simulated() as simulation:
        runtime = simulation.cuda.cudart()

        def pinned(address, nbytes, flags):
            shares[address, nbytes] = backed(address, nbytes)
            return runtime.cudaHostRegister(address, nbytes, flags)

        asked = SimpleNamespace(**{**vars(runtime), "cudaHostRegister": pinned})
        simulation.cuda.cudart = lambda: asked
        store = Store(Config(device="cpu", device_memory="8MiB", host_memory="64MiB"))
        block = store.device.host_block(16 * MiB)
        store.close()
    assert shares[block.data_ptr(), 16 * MiB] == 1
