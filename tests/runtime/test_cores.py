"""Compute and work of the host take turns for the cores, but never wait for each other both."""

import gc
import threading

import pytest

from zcompile.runtime.device import cores as cores_module
from zcompile.runtime.device.cores import Cores
from zcompile.runtime.transfer import ticket
from zcompile.runtime.transfer.ticket import Promise, Workers
from zcompile.runtime.transfer.waiting import Waits

pytestmark = pytest.mark.timeout(60)


def joined(thread: threading.Thread) -> None:
    thread.start()
    thread.join()


class WaitsOfThisTest(Waits):
    """Not those of a thread that was there before, or of the runtime: one of another test may wait
    for ever, and what closes a model of another test waits at any time."""

    def __init__(self) -> None:
        super().__init__()
        self._others = set(threading.enumerate()) - {threading.current_thread()}

    def begins(self, waiter: object) -> None:
        thread = threading.current_thread()
        if thread not in self._others and not thread.name.startswith("zinf-"):
            super().begins(waiter)


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    gc.collect()
    gc.disable()  # else this thread may come to wait for what it collects
    made = WaitsOfThisTest()
    for module in (cores_module, ticket):
        monkeypatch.setattr(module, "WAITS", made)
    yield made
    gc.enable()


@pytest.fixture
def cores(waits):
    made = Cores()
    assert made.take_at_once()  # a region is computed
    yield made
    made.give_back()
    assert not waits
    assert not waits.bells


@pytest.fixture
def lane(cores):
    """A thread, and what it promises to compute as soon as it has the cores."""
    made = Workers("lane", 1, pytest.fail)
    over = Promise()

    def work():
        with cores.for_host():
            over.finish()

    made.submit(work)
    yield made, over
    made.stop()


def until_it_gives_way() -> None:
    while not cores_module.WAITS.bells:
        pass


WAYS = {
    "by a wait": lambda lane, over: over.wait(),
    "in a thread": lambda lane, over: joined(threading.Thread(target=over.wait_finished)),
    "until the lane is over": lambda lane, over: lane.stop(timeout_s=50.0),
}


@pytest.mark.parametrize("gives_way_first", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_who_waits_in_the_midst_of_a_region_hears_of_the_work(lane, way, gives_way_first):
    workers, over = lane
    if gives_way_first or way == "until the lane is over":  # else the work may be dropped
        until_it_gives_way()
    assert not over.done() or not gives_way_first
    WAYS[way](workers, over)
    assert over.done()


def test_a_region_that_waits_comes_before_the_next_work_of_the_host():
    cores, order = Cores(), []
    inside, go = threading.Event(), threading.Event()

    def lane():
        for number in range(3):
            with cores.for_host():
                order.append(number)
                inside.set()
                go.wait()

    def region():
        cores.take()
        order.append("region")
        cores.give_back()

    threads = [threading.Thread(target=each) for each in (lane, region)]
    threads[0].start()
    inside.wait()
    assert not cores.take_at_once()
    threads[1].start()
    while not cores._region_waits:
        pass
    go.set()
    for thread in threads:
        thread.join()
    assert order == [0, "region", 1, 2]
    assert cores.waited_s > 0
    assert cores.take_at_once()


def test_a_wait_that_is_interrupted_before_it_has_begun_leaves_no_waiter(waits, monkeypatch):
    def strikes():
        raise KeyboardInterrupt

    monkeypatch.setattr(waits, "ring", strikes)
    with pytest.raises(KeyboardInterrupt):
        Promise().wait_finished()
    assert not waits
