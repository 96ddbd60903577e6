"""What every device does: the same sentences over the CPU device and, where there is one, CUDA."""

import time
import weakref

import pytest
import torch
from streams.cuda import SimulatedCuda, Simulation

from zcompile.errors import DeviceTooSmall
from zcompile.ir.ties import Dead, tie_to
from zcompile.ir.units import MiB
from zcompile.runtime.device import cuda
from zcompile.runtime.device.cpu import CpuDevice
from zcompile.runtime.device.cuda import CudaDevice
from zcompile.runtime.device.pages import HUGE_PAGE_BYTES
from zcompile.runtime.meter import Meter
from zcompile.runtime.transfer.ticket import Countdown


def fail(error):
    raise error


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    meter = Meter()
    if request.param == "cpu":
        device = CpuDevice({}, meter, fail)
    else:
        device = CudaDevice(torch.device("cuda"), meter, fail)
    device.meter = meter
    yield device
    device.close()


class Landed:
    """A landing that can be waited for."""

    name = "w"

    def __init__(self):
        self.queued, self.over = Countdown(), Countdown()
        self.event = None

    def enqueued(self, event):
        self.event = event
        self.queued.drop()

    def landed(self, error):
        self.over.drop(error)


def copied(device, direction, target, source, after=()):
    landing = Landed()
    device.copy(direction, target, source, after, landing)
    landing.over.wait()
    return landing


def test_host_blocks_are_zeroed_and_huge_page_aligned(device):
    block = device.host_block(3 * MiB + 5)
    assert block.dtype == torch.uint8
    assert block.shape == (3 * MiB + 5,)
    assert block.data_ptr() % HUGE_PAGE_BYTES == 0
    assert not block.any()
    assert device.host_block(0).numel() == 0


@pytest.mark.parametrize("nbytes", [1, 4096, 5 * MiB + 3])
def test_copies_go_there_and_back_and_are_counted(device, nbytes):
    host, back = device.host_block(nbytes), device.host_block(nbytes)
    host.random_(0, 255)
    memory = device.allocate(nbytes)
    copied(device, "h2d", memory, host)
    copied(device, "d2h", back, memory, after=(device.mark(),))
    assert torch.equal(host, back)
    moved = device.meter.bytes()
    assert (moved["h2d"], moved["d2h"]) == (nbytes, nbytes)


def test_clearing_is_no_traffic(device):
    memory = device.allocate(5 * MiB).fill_(3)
    landing = Landed()
    device.clear(memory, (device.mark(),), landing)
    landing.over.wait()
    assert not memory.any()
    assert device.meter.bytes()["h2d"] == 0


def test_compute_that_joins_an_enqueued_copy_sees_it(device):
    host = device.host_block(64 * MiB).fill_(9)
    memory = device.allocate(64 * MiB).zero_()
    landing = Landed()
    device.copy("h2d", memory, host, (device.mark(),), landing)
    landing.queued.wait()
    device.join(landing.event)
    assert memory.eq(9).all()
    landing.over.wait()


def test_lent_memory_has_its_own_storage_and_says_when_it_dies(device):
    memory = device.allocate(1024)
    freed = Dead()
    ties = []
    tied = memory[256:768]
    lent = device.owning_view(tied, lambda owner: ties.append(tie_to(owner, freed, "that")))
    lent.fill_(5)
    assert memory.tolist() == memory[:256].tolist() + [5] * 512 + memory[768:].tolist()
    assert lent.device == memory.device
    assert lent.data_ptr() == memory.data_ptr() + 256
    assert lent.untyped_storage().nbytes() == 512
    view = lent.view(torch.float32)[5:]
    del lent
    assert not freed
    del view
    assert [gone.mark for gone in freed] == ["that"]


def test_lent_memory_stays_while_it_is_lent(device):
    memory = device.allocate(1 * MiB).fill_(4)
    gone = weakref.ref(memory)
    lent = device.owning_view(memory, lambda owner: None)
    del memory
    assert gone() is not None
    assert lent.eq(4).all()
    del lent
    assert gone() is None


def test_marks_and_stamps_tell_where_compute_is(device):
    before = device.stamp()
    mark = device.mark()
    mark.join_compute()
    mark.wait()
    assert mark.done()
    assert before.until(device.stamp()) >= 0


@pytest.mark.gpu
def test_compute_that_is_delayed_comes_later_and_the_host_goes_on():
    device = CudaDevice(torch.device("cuda"), Meter(), fail)
    device.delay_compute(1e-4)  # its kernel is loaded
    device.mark().wait()
    before, begun = device.stamp(), time.perf_counter()
    device.delay_compute(0.1)
    after = device.stamp()
    assert time.perf_counter() - begun < 0.05
    assert not after.passed()
    assert 0.05 < before.until(after) < 1.0
    device.close()


def test_a_device_that_is_too_small_says_so(device):
    with pytest.raises(DeviceTooSmall, match=r"asks for 900 TiB on (cpu|cuda:0), which has"):
        device.allocate(900 << 40)


def test_the_cpu_device_paces_a_throttled_link():
    device = CpuDevice({"h2d": 20e6}, Meter(), fail)
    memory, host = device.allocate(1 * MiB), device.host_block(1 * MiB)
    began = time.perf_counter()
    copied(device, "h2d", memory, host)
    assert time.perf_counter() - began >= MiB / 20e6
    device.close()


def test_memory_is_not_resident_before_it_is_used():
    before = resident_bytes()
    device = CpuDevice({}, Meter(), fail)
    memory = device.allocate(256 * MiB)
    assert resident_bytes() - before < 32 * MiB
    memory[: 64 * MiB].fill_(1)
    assert resident_bytes() - before < 96 * MiB
    device.close()


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_the_cuda_device_keeps_no_memory_of_a_copy(monkeypatch):
    simulation = Simulation()
    monkeypatch.setattr(cuda, "_CUDA", simulation.cuda)
    device = type("Device", (SimulatedCuda,), {"simulation": simulation})({}, Meter(), fail)
    target, source = torch.zeros(8, dtype=torch.uint8), torch.ones(8, dtype=torch.uint8)
    dead, landing = [weakref.ref(target), weakref.ref(source)], Landed()
    device.copy("d2h", target, source, (device.mark(),), landing)
    assert target.eq(1).all()
    del target, source
    assert [memory() for memory in dead] == [None, None], "who listens keeps it"
    assert not landing.over.done()
    simulation.held.work_until(landing.over.done)
    device.close()
