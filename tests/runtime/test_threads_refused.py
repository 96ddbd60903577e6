"""A system that gives no more threads: what was opened before is closed, and opens again later."""

import errno
import os
import threading
from itertools import count

import pytest
from failed_calls import open_below

from zcompile.config import Config
from zcompile.runtime.io import trial
from zcompile.runtime.store.store import Store

FIELDS = {"device": "cpu", "device_memory": "1MiB", "host_memory": "256KiB"}


def refusing(monkeypatch, most):
    """No more than `most` threads of ours are started from here on."""
    left, start = [None] * most, threading.Thread.start

    def started(thread):
        if thread.name.startswith("zinf-"):
            if not left:
                raise RuntimeError("can't start new thread")
            left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)


def no_ring():
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "threads"])
@pytest.mark.parametrize("durable", [False, True])
def test_a_thread_that_cannot_be_started_leaves_nothing_open(
    tmp_path, monkeypatch, own_threads, durable, kernel
):
    """Whichever of them it is. The next try succeeds, so that no directory is locked."""
    if not kernel:
        monkeypatch.setattr(trial, "RINGS", {**trial.RINGS, "aio": no_ring})
    (disk := tmp_path / "disk").mkdir()
    throttle = {"disk_read": 1e9, "disk_write": 1e9}
    config = Config(**FIELDS, disk=disk, durable=durable, throttle=throttle)
    for most in count():
        with monkeypatch.context() as patch:
            refusing(patch, most)
            try:
                Store(config).close()
            except RuntimeError:
                # It holds the frames it was raised in, and so what they worked on.
                assert own_threads() == [], most
                assert open_below(tmp_path) == [], most
                assert list(disk.iterdir()) == [], most
            else:
                break
        Store(config).close()
    assert most >= 8 + durable
    assert own_threads() == []
