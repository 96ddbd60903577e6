"""How a store ends: closed, forgotten, or with its process; never with files or threads left."""

import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch

from zcompile.config import Config
from zcompile.ir.types import EntryKind
from zcompile.ir.units import MiB
from zcompile.runtime import closing
from zcompile.runtime.closing import wait_for_dead_stores
from zcompile.runtime.store.store import Store
from zcompile.runtime.transfer.transfer import Put

ROOT = Path(__file__).parents[2]

TRAIN = """
import os, sys
import torch
from zcompile.config import Config
from zcompile.runtime.store.store import Store
from zcompile.ir.types import EntryKind
store = Store(Config(device="cpu", device_memory="8MiB", host_memory="1MiB", disk=sys.argv[1],
                     throttle={"disk_write": "2MB/s"}))
entry = store.create("w", EntryKind.PARAM, 4 << 20)
ticket = store.put(entry, store.arena.slot(0, 4 << 20))
ticket = store.fetch(entry, store.arena.slot(4 << 20, 4 << 20))
sys.stdout.write(f"{len(os.listdir(sys.argv[1]))} files")
"""


SLOWLY_FORGOTTEN = """
import gc, threading, time
begun, shut = threading.Event(), store._close._shut
def slowly():
    begun.set()
    time.sleep(0.5)
    shut()
store._close._shut = slowly
del store, entry, ticket
gc.collect()
begun.wait()
"""


INTERRUPTED = """
import signal
from zcompile.runtime.transfer.ticket import Workers
stop = Workers.stop
def interrupted(*given):
    stop(*given)
    os.kill(os.getpid(), signal.SIGINT)
Workers.stop = interrupted
"""


@pytest.mark.timeout(330)
@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0),
        pytest.param(INTERRUPTED, 0, marks=pytest.mark.slow),
        pytest.param(SLOWLY_FORGOTTEN, 0, marks=pytest.mark.slow),
        pytest.param("raise SystemExit(3)", 3, marks=pytest.mark.slow),
        pytest.param("raise ValueError", 1, marks=pytest.mark.slow),
        pytest.param(
            "import threading; threading.Thread(target=ticket.wait).start(); store.close()",
            0,
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.slow
def test_a_process_that_ends_in_the_middle_neither_hangs_nor_leaves_files(tmp_path, ending, code):
    done = subprocess.run(
        [sys.executable, "-c", TRAIN + ending, str(tmp_path)],
        cwd=ROOT,
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert done.stdout == "2 files"
    assert list(tmp_path.iterdir()) == []


def test_when_the_process_ends_one_that_fails_holds_no_other_back(monkeypatch):
    monkeypatch.setattr(closing, "_OPEN", set())
    owners, shut = [type("Owner", (), {})() for _ in range(3)], []

    def failing(number):
        shut.append(number)
        raise OSError(f"number {number}")

    for number, owner in enumerate(owners):
        closing.Closing(owner, lambda job: None, partial(failing, number))
    with pytest.raises(OSError, match="number"):
        closing._close_all()
    assert sorted(shut) == [0, 1, 2]


def test_a_forgotten_store_closes_itself(tmp_path, own_threads):
    before = own_threads()
    store = Store(Config(device="cpu", device_memory="8MiB", host_memory="1MiB", disk=tmp_path))
    entry = store.create("w", EntryKind.PARAM, 1 * MiB)
    store.put(entry, torch.ones(1 * MiB, dtype=torch.uint8))
    gone = weakref.ref(store)
    del store, entry
    gc.collect()
    assert gone() is None
    wait_for_dead_stores()
    assert own_threads() == before
    assert list(tmp_path.iterdir()) == []


def test_a_forgotten_store_that_gets_no_thread_is_closed_by_who_waits(tmp_path, monkeypatch):
    store = Store(Config(device="cpu", device_memory="8MiB", host_memory="1MiB", disk=tmp_path))
    closing, asked = store._close, threading.Event()

    def refuse(self):
        asked.set()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    store._context.adder.submit(closing)
    asked.wait()
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) != []
    del store
    gc.collect()
    wait_for_dead_stores()
    assert list(tmp_path.iterdir()) == []


def test_a_store_may_die_in_one_of_its_own_threads(tmp_path, own_threads):
    before = own_threads()
    store = Store(Config(device="cpu", device_memory="8MiB", host_memory="1MiB", disk=tmp_path))
    store._context.adder.submit(store._close)
    deadline = time.monotonic() + 20
    while own_threads() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert own_threads() == before
    assert list(tmp_path.iterdir()) == []


def test_a_gathered_value_outlives_its_store(open_store):
    store = open_store(host_memory="16MiB")
    entry = store.create("w", EntryKind.PARAM, 1 * MiB)
    store.put(entry, torch.full((1 * MiB,), 7, dtype=torch.uint8))
    value = entry.gather((1 * MiB,), (1,), 0, torch.uint8)
    store.close()
    del store, entry
    gc.collect()
    assert value.eq(7).all()


def test_what_cannot_open_leaves_nothing(tmp_path, open_store, own_threads):
    before = own_threads()
    store = open_store(disk=tmp_path)
    during = own_threads()
    with pytest.raises(RuntimeError, match="another model of this process"):
        Store(Config(device="cpu", device_memory="8MiB", host_memory="1MiB", disk=tmp_path))
    assert own_threads() == during
    store.close()
    assert own_threads() == before


@pytest.mark.timeout(60)
def test_an_interrupt_while_a_transfer_is_submitted_leaves_nothing_half_done(tmp_path, monkeypatch):
    config = Config(device="cpu", device_memory="8MiB", host_memory="1MiB", disk=tmp_path)
    store = Store(config)
    entry = store.create("w", EntryKind.PARAM, 1 * MiB)
    prepare = Put.prepare

    def interrupted(put):
        signal.raise_signal(signal.SIGINT)
        prepare(put)

    with monkeypatch.context() as patch:
        patch.setattr(Put, "prepare", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.put(entry, torch.ones(1 * MiB, dtype=torch.uint8))
    store.drain()
    assert entry.version == 1
    store.close()
