"""The thread that watches other ranks."""

import json
import queue
import threading
import time

import pytest

from zcompile.runtime.ranks import watch
from zcompile.runtime.ranks.asking import Asker
from zcompile.runtime.ranks.watch import Keeper, RunningTime, Waiting, Watch


class Slow:
    """A store that is asked, and does not answer until it is let."""

    def __init__(self) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()
        self.said: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.said[key] = value

    def get(self, key: str) -> bytes:
        return b""

    def check(self, keys: list[str]) -> bool:
        self.asked.set()
        assert self.answers.wait(60)
        return False


def watching(store, timeout_s=60.0, waiting=list, failed=lambda error: None, rank=0) -> Watch:
    asker = Asker(lambda: store, None)
    hosts = ["here", "there"]
    return Watch(asker, "", Keeper(0, "rank 0", ""), rank, hosts, timeout_s, waiting, str, failed)


def test_a_look_that_is_under_way_is_over_when_the_watch_has_ended():
    """The end of a process would end the thread within torch, and so the process by a signal."""
    store = Slow()
    watched = watching(store)
    assert store.asked.wait(60)
    threading.Timer(0.2, store.answers.set).start()
    watched.end()
    assert not watched._thread.is_alive()
    assert not watched._asker.is_alive
    assert store.said["ended/0"] == "has ended its run after nothing yet"


def test_a_store_that_does_not_answer_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(watch, "ANSWER_S", 0.01)
    store = Slow()
    watched = watching(store)
    assert store.asked.wait(60)
    watched.end()
    watched._thread.join(60)
    assert not watched._thread.is_alive()
    assert watched._asker.is_alive
    store.answers.set()
    watched._asker._thread.join(60)
    assert not watched._asker.is_alive


def test_a_store_that_does_not_answer_is_a_cause_where_somebody_waits():
    store, found, waits = Slow(), queue.SimpleQueue(), []
    watched = watching(store, 0.2, lambda: waits, found.put, rank=1)
    assert store.asked.wait(60)
    with pytest.raises(queue.Empty):
        found.get(timeout=0.5)
    waits.append(Waiting("agree on forward", time.monotonic(), 0))
    text = str(found.get(timeout=60))
    assert "rank 0 on here has not answered for" in text
    assert "its process keeps the store of torch.distributed" in text
    store.answers.set()
    watched.end()


class Kept:
    """A store in the process of a rank, which answers until that process is gone."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}
        self.looked, self.gone = threading.Semaphore(0), False

    def set(self, key: str, value: str) -> None:
        self.said[key] = value

    def get(self, key: str) -> bytes:
        return self.said[key].encode()

    def check(self, keys: list[str]) -> bool:
        if self.gone:
            raise RuntimeError("the connection was closed")
        self.looked.release()
        return all(key in self.said for key in keys)


@pytest.mark.parametrize("says_so", [True, False])
def test_what_the_rank_with_the_store_says_at_its_end_is_told_when_it_is_gone(says_so):
    """With its process the store ends, and what is in it."""
    store, found = Kept(), queue.SimpleQueue()
    watched = watching(store, failed=found.put, rank=1)
    if says_so:
        store.set("ended/0", "has ended its run after step 3")
    while store.looked.acquire(blocking=False):
        pass  # looks before that
    for _ in range(8):  # two looks and more
        assert store.looked.acquire(timeout=60)
    store.gone = True
    text = str(found.get(timeout=60))
    expected = "has ended its run after step 3" if says_so else "is gone"
    assert f"rank 0 on here {expected}: its process keeps the store" in text
    watched.end()


@pytest.mark.parametrize(("timeout_s", "busy"), [(60.0, True), (11.0, False), (1.0, False)])
def test_a_rank_that_is_busy_may_be_silent_for_as_long_as_it_is_waited_for(
    timeout_s, busy, monkeypatch
):
    """It may be stopped meanwhile, and compile on; ten seconds at least."""
    store = Kept()
    watched = watching(store, timeout_s)
    store.set("state/1", json.dumps([3, "forward", "compiling", 5.0]))
    assert watched._is_busy(1)  # the first beat that is seen
    monkeypatch.setattr(watched._running, "since", lambda begun: 12.0)
    assert watched._is_busy(1) == busy
    watched.end()


def test_time_for_which_a_process_stands_still_is_no_wait():
    """All ranks are stopped, as by Ctrl-Z, and go on: none of them is late."""
    times = [100.0, 100.1, 100.2, 160.2, 160.3]  # of the turn that took long a second counts
    running = RunningTime(iter(times).__next__)
    for _ in times[1:]:
        running.turn()
    assert running.since(100.0) == pytest.approx(1.3)
    assert running.since(150.0) == pytest.approx(0.1)
    assert running.since(160.2) == pytest.approx(0.1)
    assert running.just_stood_still() == pytest.approx(60.0)


def test_the_watch_may_end_itself():
    store, ended = Slow(), threading.Event()
    store.answers.set()
    store.check = lambda keys: (_ for _ in ()).throw(RuntimeError("gone"))
    watched = None

    def failed(error: BaseException) -> None:
        while watched is None:
            time.sleep(0.01)
        watched.end()
        ended.set()

    watched = watching(store, failed=failed)
    assert ended.wait(60)
