"""The store: bytes go home and come back, in order, within the budgets."""

import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zcompile.errors import BudgetExceeded, ConfigInvalid, DeviceTooSmall, TierFull, ValueUnset
from zcompile.runtime.staging import staging_size
from zcompile.specs import Kind
from zcompile.units import KiB, MiB

HOMES = (("cpu", "host"), ("cpu", "disk"),
         pytest.param(("cuda", "host"), marks=pytest.mark.gpu),
         pytest.param(("cuda", "disk"), marks=pytest.mark.gpu))  # fmt: skip
SMALL = 256 * KiB
"""The least host budget: all of it is staging, so entries rest on disk."""


@pytest.fixture(params=HOMES, ids=str)
def store(request, open_store):
    """A store on the device and with entries on the tier of the test's parameter."""
    device, home = request.param
    if home == "host":
        return open_store(device=device, host_memory="16MiB")
    return open_store(device=device, host_memory=SMALL, disk=True)


def random_bytes(nbytes):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def fetched(store, entry, begin=0, nbytes=None):
    target = store.arena.take(entry.nbytes if nbytes is None else nbytes, entry.name)
    store.fetch(entry, target, begin=begin, after=(store.device.mark(),)).join_compute()
    return target.cpu()


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 65_537, 3 * MiB + 5])
def test_what_is_put_is_fetched(store, nbytes):
    entry = store.create("w", Kind.PARAM, nbytes)
    values = random_bytes(nbytes)
    store.put(entry, values).wait()
    assert torch.equal(fetched(store, entry), values)
    assert torch.equal(store.read_all(entry), values)


def test_entries_rest_on_the_host_while_there_is_room(open_store):
    store = open_store(host_memory="1MiB", disk=True)
    homes = [store.create(f"w{n}", Kind.PARAM, 300 * KiB).home for n in range(4)]
    assert homes == ["host", "host", "disk", "disk"]
    assert store.create("bias", Kind.PARAM, 1 * KiB).home == "host"


def test_without_a_disk_a_full_host_is_an_error(open_store):
    store = open_store(host_memory="1MiB")
    with pytest.raises(TierFull, match=r"2\.00 MiB left for 'w'"):
        store.create("w", Kind.PARAM, 2 * MiB)


def test_a_new_entry_is_zeros_and_touches_no_disk(store):
    entry = store.create("w", Kind.STATE, 1 * MiB)
    assert not fetched(store, entry).any()
    assert not store.read_all(entry).any()
    assert store.meter.bytes()["disk_read"] == 0


def test_recycled_room_does_not_show_through_a_blank_entry(store):
    for fill in (1, 2):
        entry = store.create("g", Kind.GRAD, 1 * MiB)
        assert not store.read_all(entry).any()
        store.put(entry, torch.full((100_000,), fill, dtype=torch.uint8), begin=7777)
        values = store.read_all(entry)
        assert values[7777:107_777].eq(fill).all()
        assert not values[:7777].any()
        assert not values[107_777:].any()
        store.free_later(entry.key)


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(
    st.sampled_from(["put", "fetch", "add", "zero", "read"]),
    st.integers(0, 150_000), st.integers(0, 150_000)), max_size=25))  # fmt: skip
def test_operations_on_an_entry_take_effect_in_their_order(store, steps):
    nbytes = 150_000
    entry = store.create("w", Kind.STATE, nbytes)
    model = torch.zeros(nbytes, dtype=torch.uint8)
    seen = []
    compute = store.device.torch_device
    for verb, a, b in steps:
        begin, end = min(a, b), max(a, b)
        values = random_bytes(nbytes)
        source = values.to(compute) if a % 2 else values
        if verb == "put":
            store.put(entry, source[begin:end], begin=begin, after=(store.device.mark(),))
            model[begin:end] = values[begin:end]
        elif verb == "add":
            store.add(entry, source, after=(store.device.mark(),))
            model += values
        elif verb == "zero":
            store.zero(entry)
            model.zero_()
        elif verb == "fetch":
            target = torch.empty(end - begin, dtype=torch.uint8, device=compute)
            ticket = store.fetch(entry, target, begin=begin, after=(store.device.mark(),))
            seen.append((ticket, target, model[begin:end].clone()))
        else:
            assert torch.equal(store.read_all(entry), model)
    for ticket, target, expected in seen:
        ticket.join_compute()
        assert torch.equal(target.cpu(), expected)
    assert torch.equal(store.read_all(entry), model)
    store.free_later(entry.key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_add_is_bit_equal_to_add_(store, dtype):
    a, b = torch.randn(300_001).to(dtype), torch.randn(300_001).to(dtype)
    entry = store.create("g", Kind.GRAD, a.nbytes)
    store.put(entry, a.view(torch.uint8))
    store.add(entry, b)
    store.add(entry, a)
    expected = a.clone().add_(b).add_(a)
    assert torch.equal(store.read_all(entry), expected.view(torch.uint8))


def test_adding_to_zeros_gives_positive_zeros_as_eager_does(store):
    entry = store.create("g", Kind.GRAD, 400)
    store.add(entry, torch.full((100,), -0.0))
    assert not store.read_all(entry).any()


def test_a_fetch_behind_a_slow_put_sees_it(open_store):
    store = open_store(host_memory=SMALL, disk=True, throttle={"d2h": "20MB/s"})
    entry = store.create("w", Kind.PARAM, 1 * MiB)
    source = store.arena.slot(0, 1 * MiB).fill_(5)
    began = time.perf_counter()
    store.put(entry, source)
    ticket = store.fetch(entry, store.arena.slot(2 * MiB, 1 * MiB))
    assert time.perf_counter() - began < 0.04
    assert not ticket.done()
    ticket.join_compute()
    assert store.arena.slot(2 * MiB, 1 * MiB).eq(5).all()


def test_disjoint_parts_of_an_entry_do_not_wait_for_each_other(open_store):
    store = open_store(host_memory=SMALL, disk=True, throttle={"d2h": "2MB/s"})
    entry = store.create("w", Kind.PARAM, 1 * MiB)
    slow = store.put(entry, store.arena.slot(0, 512 * KiB))
    store.fetch(entry, store.arena.slot(1 * MiB, 512 * KiB), begin=512 * KiB).join_compute()
    assert not slow.done()


def test_a_fetch_into_a_slot_waits_for_the_put_that_leaves_it(open_store):
    store = open_store(host_memory="16MiB", throttle={"d2h": "20MB/s"})
    old, new = (store.create(name, Kind.PARAM, 1 * MiB) for name in ("old", "new"))
    store.put(new, torch.full((1 * MiB,), 2, dtype=torch.uint8)).wait()
    slot = store.arena.slot(0, 1 * MiB).fill_(1)
    left = store.put(old, slot)
    store.fetch(new, slot, after=(left,)).join_compute()
    assert slot.eq(2).all()
    assert store.read_all(old).eq(1).all()


def test_hundreds_of_operations_queue_up_on_one_entry(open_store):
    store = open_store(host_memory="16MiB", throttle={"d2h": "50MB/s"})
    entry = store.create("w", Kind.PARAM, 1 * MiB)
    store.put(entry, store.arena.slot(0, 1 * MiB))
    for n in range(1500):
        store.put(entry, torch.tensor([n % 256], dtype=torch.uint8))
    store.drain()
    assert store.read_all(entry)[0] == 1499 % 256


def test_versions_grow_with_each_write(store):
    entry = store.create("w", Kind.PARAM, 64)
    store.put(entry, random_bytes(64))
    store.add(entry, torch.ones(16))
    store.zero(entry)
    store.read_all(entry)
    assert entry.version == 3


def test_an_unset_entry_is_read_only_after_all_of_it_was_written(store):
    entry = store.create("w", Kind.PARAM, 100, unset=True)
    for verb in (store.read_all, lambda e: store.add(e, torch.ones(25)),
                 lambda e: store.fetch(e, torch.empty(100, dtype=torch.uint8))):  # fmt: skip
        with pytest.raises(ValueUnset, match="'w' has no value yet"):
            verb(entry)
    store.put(entry, random_bytes(60))
    assert entry.unset
    store.put(entry, random_bytes(40), begin=60)
    assert store.read_all(entry).numel() == 100


def test_a_gathered_value_has_the_layout_and_leaves_the_arena_with_its_last_view(store):
    value = torch.randn(40, 30)
    entry = store.create("w", Kind.PARAM, value.nbytes)
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
    entry = store.create("w", Kind.PARAM, 128 * KiB)
    with pytest.raises(BudgetExceeded, match="gathering 'w' needs 128 KiB on the device"):
        entry.gather((32 * KiB,), (1,), 0, torch.float32)


def test_a_gradient_goes_where_the_optimizer_side_says(store):
    entry = store.create("w", Kind.PARAM, 16)
    told = []
    store.on_gradient = lambda e, grad: told.append((e, grad))
    grad = torch.ones(4)
    entry.reduce_grad(grad)
    assert told[0][0] is entry
    assert told[0][1] is grad


def test_room_of_a_freed_entry_is_used_again_once_its_transfers_ended(open_store):
    store = open_store(host_memory=SMALL, disk=True, throttle={"d2h": "20MB/s"})
    first = store.create("a", Kind.GRAD, 1 * MiB)
    put = store.put(first, store.arena.slot(0, 1 * MiB))
    store.free_later(first.key)
    second = store.create("b", Kind.GRAD, 1 * MiB)
    assert second.place.extent.offset != first.place.extent.offset
    put.wait()
    store.drain()
    assert store.create("c", Kind.GRAD, 1 * MiB).place.extent.offset == first.place.extent.offset


def test_streaming_much_more_than_the_host_budget_stays_within_it(open_store):
    store = open_store(host_memory="1MiB", device_memory="4MiB", disk=True)
    values = [random_bytes(1 * MiB + n) for n in range(24)]
    entries = [store.create(f"w{n}", Kind.PARAM, len(v)) for n, v in enumerate(values)]
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
    entries = [store.create(f"g{n}", Kind.GRAD, 512 * KiB) for n in range(4)]
    began = time.perf_counter()
    for entry in entries:
        store.put(entry, random_bytes(512 * KiB))
    assert time.perf_counter() - began >= 2 * 512 * KiB / 20e6


def test_throttled_links_pace_the_device(open_store):
    store = open_store(host_memory="16MiB", throttle={"h2d": "40MB/s", "d2h": "20MB/s"})
    entry = store.create("w", Kind.PARAM, 1 * MiB)
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
        entry = store.create(f"w{n}", Kind.PARAM, 200_000)
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


@pytest.mark.parametrize(("budget", "has_disk", "chunk", "chunks"), [
    (256 * KiB, True, 64 * KiB, 4),
    (1 * MiB, True, 64 * KiB, 4),
    (16 * MiB, True, 512 * KiB, 8),
    (128 * MiB, True, 4 * MiB, 8),
    (64 << 30, True, 4 * MiB, 64),
    (16 * MiB, False, 128 * KiB, 8),
])  # fmt: skip
def test_the_ring_is_about_a_quarter_of_the_host_budget(budget, has_disk, chunk, chunks):
    assert staging_size(budget, has_disk) == (chunk, chunks)


def test_a_host_budget_below_the_least_ring_says_the_minimum(open_store):
    with pytest.raises(ConfigInvalid, match=r"host_memory=1024 is too small.* at least 256 KiB"):
        open_store(host_memory="1KiB")


def test_budgets_beyond_the_machine_are_refused(open_store):
    with pytest.raises(DeviceTooSmall, match="lower device_memory"):
        open_store(device_memory="900TiB")
    with pytest.raises(ConfigInvalid, match="more than this machine has"):
        open_store(host_memory="900TiB")


def test_budgets_not_given_are_an_eighth_of_the_machine(open_store):
    store = open_store(device_memory=None, host_memory=None)
    assert store.device_budget == store.host_budget > 1 * MiB


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["host", "disk"])
def test_on_cuda_compute_and_transfers_keep_their_order_without_blocking(open_store, home):
    """A slot is fetched into, computed on, put back and reused; compute is kept busy, so that a
    copy which does not wait for it would win the race."""
    store = open_store(device="cuda", device_memory="64MiB", disk=True,
                       host_memory="256MiB" if home == "host" else "8MiB")  # fmt: skip
    nbytes, busy = 16 * MiB, torch.randn(4096, 4096, device="cuda")
    entries = [store.create(f"w{n}", Kind.PARAM, nbytes) for n in range(6)]
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
    entries = [store.create(f"g{n}", Kind.GRAD, 1 * MiB) for n in range(32)]
    for n, entry in enumerate(entries):
        grad = torch.full((1 * MiB,), n, dtype=torch.uint8, device="cuda")
        store.put(entry, grad, after=(store.device.mark(),))
        del grad
        torch.full((1 * MiB,), 255, dtype=torch.uint8, device="cuda")
    for n, entry in enumerate(entries):
        assert store.read_all(entry).eq(n).all()
