"""Threads of the runtime are on the card of their device, threads of the user where they were."""

from threading import Thread
from types import SimpleNamespace

import pytest
import torch

from zcompile.runtime.device import cuda
from zcompile.runtime.device.cuda import CudaCopier, CudaDevice, Mark
from zcompile.runtime.transfer.ticket import Promise, Workers


class Event:
    def query(self):
        return True

    def synchronize(self):
        return None


@pytest.fixture
def device(monkeypatch):
    made = CudaDevice.__new__(CudaDevice)
    made.torch_device, made._card = torch.device("cuda", 3), 3
    made.chosen, made.events = [], []
    stands_in = SimpleNamespace(Event=lambda **given: Event(), set_device=made.chosen.append)
    monkeypatch.setattr(cuda, "_CUDA", stands_in)
    return made


ASKED = {
    "whether a mark is complete": lambda device: Mark(device).done(),
    "to wait for a mark": lambda device: Mark(device).wait(),
    "to wait for a stream": lambda device: CudaCopier(device, Event(), "a lane").synchronize(),
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_thread_of_the_runtime_takes_the_card_before_it_asks_for_anything(device, asked):
    workers, over = Workers("test", 1, lambda error: None), Promise()

    def job():
        ASKED[asked](device)
        ASKED[asked](device)
        over.finish()

    workers.submit(job)
    over.wait()
    workers.stop()
    assert device.chosen == [device.torch_device], "once"


def test_a_thread_of_the_user_stays_on_its_card(device):
    thread = Thread(target=device.enter_thread)
    thread.start()
    thread.join()
    assert device.chosen == []
