"""The thread that watches other ranks."""

import threading
import time

from zcompile.runtime.ranks import watch
from zcompile.runtime.ranks.watch import Watch


class Slow:
    """A store that is asked, and answers only when this rank has said that it ends."""

    def __init__(self) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()

    def set(self, key: str, value: str) -> None:
        if key.startswith("ended/"):
            self.answers.set()

    def get(self, key: str) -> bytes:
        return b""

    def check(self, keys: list[str]) -> bool:
        self.asked.set()
        assert self.answers.wait(60)
        time.sleep(0.2)  # it is still within torch
        return False


def watching(store) -> Watch:
    return Watch(store, 0, ["here"], 60.0, list, str, lambda error: None)


def test_a_look_that_is_under_way_is_over_when_the_watch_has_ended():
    """The end of a process would end the thread within torch, and so the process by a signal."""
    store = Slow()
    watched = watching(store)
    assert store.asked.wait(60)
    watched.end()
    assert not watched._thread.is_alive()


def test_a_store_that_does_not_answer_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(watch, "LAST_LOOK_S", 0.01)
    store = Slow()
    store.set = lambda key, value: None
    watched = watching(store)
    assert store.asked.wait(60)
    watched.end()
    assert watched._thread.is_alive()
    store.answers.set()
    watched._thread.join()


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

    watched = Watch(store, 0, ["here"], 60.0, list, str, failed)
    assert ended.wait(60)
