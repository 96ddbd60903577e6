"""The store: bytes go home and come back, in order, within the budgets."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zcompile.errors import TierFull, ValueUnset
from zcompile.ir.types import EntryKind
from zcompile.ir.units import Bytes, KiB, MiB
from zcompile.runtime.transfer.ticket import Promise

SMALL = Bytes(256 * KiB)


def random_bytes(nbytes):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def fetched(store, entry, begin=0, nbytes=None):
    target = store.arena.take(entry.nbytes if nbytes is None else nbytes, entry.name)
    store.fetch(entry, target, begin=begin, after=(store.device.mark(),)).join_compute()
    return target.cpu()


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 65_537, 3 * MiB + 5])
def test_what_is_put_is_fetched(store, nbytes):
    entry = store.create("w", EntryKind.PARAM, nbytes)
    values = random_bytes(nbytes)
    store.put(entry, values).wait()
    assert torch.equal(fetched(store, entry), values)
    assert torch.equal(store.read_all(entry), values)


def test_entries_rest_on_the_host_while_there_is_room(open_store):
    store = open_store(host_memory="1MiB", disk=True)
    homes = [store.create(f"w{n}", EntryKind.PARAM, 300 * KiB).home for n in range(4)]
    assert homes == ["host", "host", "disk", "disk"]
    assert store.create("bias", EntryKind.PARAM, 1 * KiB).home == "host"


def test_without_a_disk_a_full_host_is_an_error(open_store):
    store = open_store(host_memory="1MiB")
    with pytest.raises(TierFull, match=r"2\.00 MiB left for 'w'"):
        store.create("w", EntryKind.PARAM, 2 * MiB)


def test_a_new_entry_is_zeros_and_touches_no_disk(store):
    entry = store.create("w", EntryKind.STATE, 1 * MiB)
    assert not fetched(store, entry).any()
    assert not store.read_all(entry).any()
    assert store.meter.bytes()["disk_read"] == 0


def test_recycled_room_does_not_show_through_a_blank_entry(store):
    for fill in (1, 2):
        entry = store.create("g", EntryKind.GRAD, 1 * MiB)
        assert not store.read_all(entry).any()
        store.put(entry, torch.full((100_000,), fill, dtype=torch.uint8), begin=7777)
        values = store.read_all(entry)
        assert values[7777:107_777].eq(fill).all()
        assert not values[:7777].any()
        assert not values[107_777:].any()
        store.handle(entry)  # whose death ends the entry


def test_reading_does_not_make_a_value_of_what_lies_in_blank_room(store):
    old = store.create("g", EntryKind.GRAD, 1 * MiB)
    store.put(old, torch.full((1 * MiB,), 7, dtype=torch.uint8)).wait()
    store.handle(old)  # whose death ends the entry
    entry = store.create("g", EntryKind.GRAD, 1 * MiB)
    for _ in range(2):
        assert not fetched(store, entry, begin=5000, nbytes=70_000).any()
        assert not store.read_all(entry).any()


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "fetch", "add", "zero", "read"]),
            st.integers(0, 150_000),
            st.integers(0, 150_000),
        ),
        max_size=25,
    )
)
def test_operations_on_an_entry_take_effect_in_their_order(store, steps):
    nbytes = 150_000
    entry = store.create("w", EntryKind.STATE, nbytes)
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
    store.handle(entry)  # whose death ends the entry


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_add_is_bit_equal_to_add_(store, dtype):
    a, b = torch.randn(300_001).to(dtype), torch.randn(300_001).to(dtype)
    entry = store.create("g", EntryKind.GRAD, a.nbytes)
    store.put(entry, a.view(torch.uint8))
    store.add(entry, b)
    store.add(entry, a)
    expected = a.clone().add_(b).add_(a)
    assert torch.equal(store.read_all(entry), expected.view(torch.uint8))


def test_adding_to_zeros_gives_positive_zeros_as_eager_does(store):
    entry = store.create("g", EntryKind.GRAD, 400)
    store.add(entry, torch.full((100,), -0.0))
    assert not store.read_all(entry).any()


def test_a_fetch_behind_a_slow_put_sees_it(open_store):
    store = open_store(host_memory=SMALL, disk=True, throttle={"d2h": "4MB/s"})
    entry = store.create("w", EntryKind.PARAM, 1 * MiB)
    source = store.arena.slot(0, 1 * MiB).fill_(5)
    store.put(entry, source)
    ticket = store.fetch(entry, store.arena.slot(2 * MiB, 1 * MiB))
    ticket.join_compute()
    assert store.arena.slot(2 * MiB, 1 * MiB).eq(5).all()


def test_disjoint_parts_of_an_entry_do_not_wait_for_each_other(open_store):
    store = open_store(host_memory=SMALL, disk=True, throttle={"d2h": "2MB/s"})
    entry = store.create("w", EntryKind.PARAM, 1 * MiB)
    slow = store.put(entry, store.arena.slot(0, 512 * KiB))
    store.fetch(entry, store.arena.slot(1 * MiB, 512 * KiB), begin=512 * KiB).join_compute()
    assert not slow.done()


def test_a_fetch_of_nothing_is_over_when_what_it_comes_after_is(store):
    """As of a tile of which a rank has no part: a gather into the slot relies on it."""
    entry, before = store.create("w", EntryKind.PARAM, 1 * KiB), Promise()
    ticket = store.fetch(entry, store.arena.slot(0, 0), after=(before,))
    assert not ticket.done()
    before.finish()
    assert ticket.done()
    ticket.wait()
    before = Promise()
    before.finish(OSError("torn"))
    with pytest.raises(OSError, match="torn"):
        store.fetch(entry, store.arena.slot(0, 0), after=(before,)).wait()


def test_a_fetch_into_a_slot_waits_for_the_put_that_leaves_it(open_store):
    store = open_store(host_memory="16MiB", throttle={"d2h": "20MB/s"})
    old, new = (store.create(name, EntryKind.PARAM, 1 * MiB) for name in ("old", "new"))
    store.put(new, torch.full((1 * MiB,), 2, dtype=torch.uint8)).wait()
    slot = store.arena.slot(0, 1 * MiB).fill_(1)
    left = store.put(old, slot)
    store.fetch(new, slot, after=(left,)).join_compute()
    assert slot.eq(2).all()
    assert store.read_all(old).eq(1).all()


def test_hundreds_of_operations_queue_up_on_one_entry(open_store):
    store = open_store(host_memory="16MiB", throttle={"d2h": "50MB/s"})
    entry = store.create("w", EntryKind.PARAM, 1 * MiB)
    store.put(entry, store.arena.slot(0, 1 * MiB))
    for n in range(1500):
        store.put(entry, torch.tensor([n % 256], dtype=torch.uint8))
    store.drain()
    assert store.read_all(entry)[0] == 1499 % 256


def test_versions_grow_with_each_write(store):
    entry = store.create("w", EntryKind.PARAM, 64)
    store.put(entry, random_bytes(64))
    store.add(entry, torch.ones(16))
    store.zero(entry)
    store.read_all(entry)
    assert entry.version == 3


def test_an_unset_entry_is_read_only_after_all_of_it_was_written(store):
    entry = store.create("w", EntryKind.PARAM, 100, unset=True)
    for verb in (
        store.read_all,
        lambda e: store.add(e, torch.ones(25)),
        lambda e: store.fetch(e, torch.empty(100, dtype=torch.uint8)),
    ):
        with pytest.raises(ValueUnset, match="'w' has no value yet"):
            verb(entry)
    store.put(entry, random_bytes(60))
    assert entry.unset
    store.put(entry, random_bytes(40), begin=60)
    assert store.read_all(entry).numel() == 100
