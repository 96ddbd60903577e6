"""Budgets are real: gathers and transfers stay within them, and say so when they cannot."""

import gc
import threading
import time

import pytest
import torch
from torch import nn

import zcompile
from zcompile.errors import BudgetExceeded, ConfigInvalid, DeviceTooSmall
from zcompile.ir.types import EntryKind
from zcompile.ir.units import Bytes, GiB, KiB, MiB
from zcompile.machine.staging import backlog_bytes, staging_size
from zcompile.runtime.transfer import queue
from zcompile.runtime.transfer.ticket import Promise

SMALL = Bytes(256 * KiB)


def random_bytes(nbytes):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def fetched(store, entry):
    target = store.arena.take(entry.nbytes, entry.name)
    store.fetch(entry, target, after=(store.device.mark(),)).join_compute()
    return target.cpu()


def test_a_gathered_value_has_the_layout_and_leaves_the_arena_with_its_last_view(store):
    value = torch.randn(40, 30)
    entry = store.create("w", EntryKind.PARAM, value.nbytes)
    store.put(entry, value.view(torch.uint8).flatten())
    turned = entry.gather((30, 40), (1, 30), 0, torch.float32)
    assert torch.equal(turned.cpu(), value.T)
    assert store.meter.snapshot()["gathers"] == 1
    row = turned[0]
    del turned
    assert store.arena.used_bytes > 0
    del row
    assert store.arena.used_bytes == 0


def test_a_gather_beyond_the_budget_is_refused(open_store):
    store = open_store(device_memory="64KiB")
    entry = store.create("w", EntryKind.PARAM, 128 * KiB)
    with pytest.raises(BudgetExceeded, match="gathering 'w' needs 128 KiB on the device"):
        entry.gather((32 * KiB,), (1,), 0, torch.float32)


def test_gathers_that_need_the_whole_arena_follow_each_other(store):
    entry = store.create("w", EntryKind.PARAM, store.device_budget)
    for _ in range(30):
        value = entry.gather((store.device_budget,), (1,), 0, torch.uint8)
        del value


def test_a_gather_waits_for_a_put_that_still_holds_the_arena(open_store):
    store = open_store(host_memory="16MiB", throttle={"d2h": "40MB/s"})
    entry = store.create("w", EntryKind.PARAM, 5 * MiB)
    value = entry.gather((5 * MiB,), (1,), 0, torch.uint8)
    store.put(entry, value)
    del value
    assert entry.gather((5 * MiB,), (1,), 0, torch.uint8).numel() == 5 * MiB


def test_a_gradient_goes_where_the_optimizer_side_says(store):
    entry = store.create("w", EntryKind.PARAM, 16)
    told = []
    store.take_gradient = lambda e, grad, offset: told.append((e, grad))
    grad = torch.ones(4)
    entry.reduce_grad(grad)
    assert told[0][0] is entry
    assert told[0][1] is grad


def test_room_of_a_freed_entry_is_used_again_once_its_transfers_ended(open_store):
    store = open_store(host_memory=SMALL, disk=True, throttle={"d2h": "20MB/s"})
    first = store.create("a", EntryKind.GRAD, 1 * MiB)
    put = store.put(first, store.arena.slot(0, 1 * MiB))
    store.handle(first)  # whose death ends the entry
    second = store.create("b", EntryKind.GRAD, 1 * MiB)
    assert second.place.extent.offset != first.place.extent.offset
    put.wait()
    store.drain()
    assert (
        store.create("c", EntryKind.GRAD, 1 * MiB).place.extent.offset == first.place.extent.offset
    )


def test_streaming_much_more_than_the_host_budget_stays_within_it(open_store):
    store = open_store(host_memory="1MiB", device_memory="4MiB", disk=True)
    values = [random_bytes(1 * MiB + n) for n in range(24)]
    entries = [store.create(f"w{n}", EntryKind.PARAM, len(v)) for n, v in enumerate(values)]
    for entry, value in zip(entries, values, strict=True):
        store.put(entry, value)
    for entry, value in zip(entries, values, strict=True):
        assert torch.equal(fetched(store, entry), value)
    store.drain()
    peak, planned = store.meter.peak(), store.meter.planned_peak()
    assert 0 < peak["host"] <= planned["host"] <= store.host_budget
    assert 0 < peak["device"] <= store.device_budget
    assert planned["disk"] <= peak["disk"] <= planned["disk"] + 8 * MiB
    assert store.meter.host.now == sum(e.place.extent.nbytes for e in entries if e.home == "host")


def test_sources_outside_the_arena_do_not_pile_up(open_store):
    store = open_store(host_memory=SMALL, disk=True, throttle={"disk_write": "20MB/s"})
    entries = [store.create(f"g{n}", EntryKind.GRAD, 512 * KiB) for n in range(4)]
    began = time.perf_counter()
    for entry in entries:
        store.put(entry, random_bytes(512 * KiB))
    assert time.perf_counter() - began >= 2 * 512 * KiB / 20e6


def test_the_backlog_takes_as_much_as_it_may_and_not_a_byte_more(monkeypatch):
    waits = []

    class Less(Promise):
        """Whoever waits for it finds that four bytes leave in the meantime."""

        def wait_finished(self):
            waits.append(self.done())
            backlog.leave(4)
            super().wait_finished()

    monkeypatch.setattr(queue, "Promise", Less)
    backlog = queue.Backlog(10)
    backlog.enter(4)
    backlog.enter(6)
    assert waits == []
    backlog.leave(6)
    backlog.enter(7)
    assert waits == [False]
    backlog.leave(7)
    backlog.enter(99)  # alone
    assert waits == [False]


def test_throttled_links_pace_the_device(open_store):
    store = open_store(host_memory="16MiB", throttle={"h2d": "40MB/s", "d2h": "20MB/s"})
    entry = store.create("w", EntryKind.PARAM, 1 * MiB)
    began = time.perf_counter()
    store.put(entry, store.arena.slot(0, 1 * MiB)).wait()
    left = time.perf_counter()
    store.fetch(entry, store.arena.slot(0, 1 * MiB)).wait()
    assert left - began >= MiB / 20e6
    assert time.perf_counter() - left >= MiB / 40e6


def test_many_threads_may_use_one_store(open_store):
    store = open_store(host_memory="512KiB", disk=True)
    wrong = []

    def work(n):
        entry = store.create(f"w{n}", EntryKind.PARAM, 200_000)
        for _ in range(5):
            values = random_bytes(200_000)
            store.put(entry, values)
            if not torch.equal(store.read_all(entry), values):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("budget", "chunk", "chunks"),
    [
        (256 * KiB, 64 * KiB, 4),
        (1 * MiB, 64 * KiB, 4),
        (4 * MiB, 64 * KiB, 8),
        (16 * MiB, 256 * KiB, 8),
        (64 * MiB, 256 * KiB, 8),
        (1 * GiB, 1 * MiB, 8),
        (64 * GiB, 4 * MiB, 64),
    ],
)
def test_the_ring_is_a_small_part_of_the_host_budget(budget, chunk, chunks):
    assert staging_size(budget) == (chunk, chunks)


def test_a_host_budget_below_the_least_ring_says_the_minimum(open_store):
    with pytest.raises(ConfigInvalid, match=r"host_memory=1024 is too small.* at least 256 KiB"):
        open_store(host_memory="1KiB")


def test_budgets_beyond_the_machine_are_refused(open_store):
    with pytest.raises(DeviceTooSmall, match="lower device_memory"):
        open_store(device_memory="900TiB")
    with pytest.raises(ConfigInvalid, match="that this machine has"):
        open_store(host_memory="900TiB")


def test_budgets_not_given_are_an_eighth_of_the_machine(open_store):
    store = open_store(device_memory=None, host_memory=None)
    assert store.device_budget == store.host_budget > 1 * MiB


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["host", "disk"])
def test_on_cuda_compute_and_transfers_keep_their_order_without_blocking(open_store, home):
    """A slot is fetched into, computed on, put back and reused; compute is kept busy, so that a
    copy which does not wait for it would win the race."""
    store = open_store(
        device="cuda",
        device_memory="64MiB",
        disk=True,
        host_memory="256MiB" if home == "host" else "8MiB",
    )
    nbytes, busy = 16 * MiB, torch.randn(4096, 4096, device="cuda")
    entries = [store.create(f"w{n}", EntryKind.PARAM, nbytes) for n in range(6)]
    for n, entry in enumerate(entries):
        store.put(entry, torch.full((nbytes,), n, dtype=torch.uint8))
    left = [[], []]
    for turn in range(18):
        slot = store.arena.slot(turn % 2 * nbytes, nbytes)
        ticket = store.fetch(entries[turn % 6], slot, after=left[turn % 2])
        for _ in range(8):
            busy = busy @ busy.softmax(0)
        ticket.join_compute()
        slot += 1
        left[turn % 2] = [store.put(entries[turn % 6], slot, after=(store.device.mark(),))]
    store.drain()
    for n, entry in enumerate(entries):
        assert store.read_all(entry).eq(n + 3).all()


@pytest.mark.gpu
def test_on_cuda_a_put_source_is_not_reused_before_it_has_left(open_store):
    store = open_store(device="cuda", host_memory="64MiB")
    entries = [store.create(f"g{n}", EntryKind.GRAD, 1 * MiB) for n in range(32)]
    for n, entry in enumerate(entries):
        grad = torch.full((1 * MiB,), n, dtype=torch.uint8, device="cuda")
        store.put(entry, grad, after=(store.device.mark(),))
        del grad
        torch.full((1 * MiB,), 255, dtype=torch.uint8, device="cuda")
    for n, entry in enumerate(entries):
        assert store.read_all(entry).eq(n).all()


def test_room_on_the_host_is_kept_for_gradients_where_there_is_a_disk(open_store):
    store = open_store(host_memory="2MiB", disk=True)
    store.homes.foresee(1 * MiB, 1 * MiB)
    homes = [store.create(f"w{n}", EntryKind.PARAM, 300 * KiB).home for n in range(3)]
    assert homes == ["host", "disk", "disk"]
    assert store.create("bias", EntryKind.PARAM, 1 * KiB).home == "host"
    grads = [store.create(f"w{n}.grad", EntryKind.GRAD, 300 * KiB) for n in range(3)]
    assert [grad.home for grad in grads] == ["host"] * 3
    store.handle(grads[0])  # whose death ends the entry
    assert store.create("state", EntryKind.STATE, 300 * KiB).home == "disk"
    assert store.create("w0.grad", EntryKind.GRAD, 300 * KiB).home == "host"


def test_what_gradients_take_is_kept_for_them_no_more(open_store):
    store = open_store(host_memory="2MiB", disk=True)
    store.homes.foresee(1 * MiB, 1 * MiB)
    held = [store.create(f"w{n}.grad", EntryKind.GRAD, 500 * KiB) for n in range(2)]
    assert store.create("w0", EntryKind.PARAM, 500 * KiB).home == "host"
    assert [grad.home for grad in held] == ["host"] * 2


def test_without_a_disk_no_room_is_kept(open_store):
    store = open_store(host_memory="2MiB")
    store.homes.foresee(64 * MiB, 64 * MiB)
    assert store.create("w", EntryKind.PARAM, 1 * MiB).home == "host"


def test_the_ring_is_small_where_transfers_go_past_it():
    assert staging_size(16 * GiB, straight=True).nbytes == 32 * MiB
    assert staging_size(8 * MiB, straight=True).nbytes == 2 * MiB
    assert staging_size(16 * MiB, straight=True).nbytes == 4 * MiB
    assert staging_size(64 * MiB, straight=True).nbytes == 4 * MiB
    assert staging_size(128 * MiB, straight=True).nbytes == 8 * MiB
    assert staging_size(16 * GiB, straight=False).nbytes == 128 * MiB
    assert staging_size(32 * GiB, straight=False).nbytes == 256 * MiB


def test_gradients_on_their_way_are_bounded_by_the_host_and_the_largest_ring():
    assert backlog_bytes(256 * KiB) == 256 * KiB
    assert backlog_bytes(64 * MiB) == 16 * MiB
    assert backlog_bytes(64 * GiB) == 256 * MiB
    assert backlog_bytes(64 * GiB, straight=True) == 32 * MiB


def test_results_in_dead_reference_cycles_give_their_room_to_a_call_that_needs_it():
    model = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(64, 64), nn.Tanh())))
    zcompile.offload(model, device="cpu", device_memory="384KiB", host_memory="16MiB")
    run = torch.compile(model, backend="zinf")
    gc.disable()
    try:
        for _ in range(6):
            cycle = [run(torch.randn(64, 64))]
            cycle.append(cycle)
            del cycle
    finally:
        gc.enable()
    kept = [run(torch.randn(64, 64))]
    with pytest.raises(BudgetExceeded, match="let go of results whose backward never comes"):
        kept.extend(run(torch.randn(64, 64)) for _ in range(6))
