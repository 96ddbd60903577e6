"""Chunks in the staging ring: their bytes at odd offsets, and their buffers when one fails."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zcompile.errors import IOFault
from zcompile.ir.types import EntryKind
from zcompile.ir.units import Bytes, KiB
from zcompile.machine.staging import lane_bytes
from zcompile.runtime.io.trial import BLOCK_BYTES
from zcompile.runtime.tiers.disk import DiskTier
from zcompile.runtime.transfer.transfer import Add, Fetch, Put, Transfer

RING = Bytes(256 * KiB)
"""The least host budget: all of it is the ring, so entries rest on disk."""
WHOLE = 150_000
"""Bytes of an entry: some chunks of a ring that small."""
DTYPES = (torch.uint8, torch.bfloat16, torch.float32)
EVEN_IF = settings(deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))


@pytest.fixture(params=["of the disk", BLOCK_BYTES])
def store(request, open_store, monkeypatch):
    """One whose disk moves blocks as it likes, and one that takes the largest there are."""
    if request.param == BLOCK_BYTES:
        monkeypatch.setattr(DiskTier, "granule", BLOCK_BYTES)
    return open_store(host_memory=RING, disk=True)


def values_of(dtype, numel, seed):
    made = torch.Generator().manual_seed(seed)
    if dtype is torch.uint8:
        return torch.randint(0, 256, (numel,), dtype=dtype, generator=made)
    return torch.randn(numel, generator=made).to(dtype)


def span(data, numel):
    """Elements [begin, end) of so many, mostly near the borders of blocks."""
    edges = [
        n
        for n in (0, 1, 3, 511, 513, 4095, 4097, 32_767, 32_769, numel - 1, numel)
        if 0 <= n <= numel
    ]
    one = st.one_of(st.sampled_from(edges), st.integers(0, numel))
    begin, end = sorted((data.draw(one), data.draw(one)))
    return begin, end


@EVEN_IF
@given(data=st.data(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_sums_at_odd_offsets_are_those_of_plain_tensors(store, data, dtype, seed):
    numel = WHOLE // dtype.itemsize
    entry = store.create("g", EntryKind.GRAD, numel * dtype.itemsize)
    expected = torch.zeros(numel, dtype=dtype)
    begin, end = span(data, numel)
    was = values_of(dtype, end - begin, seed)
    store.put(entry, was.view(torch.uint8), begin=begin * dtype.itemsize)
    expected[begin:end] = was
    for number in range(2):
        begin, end = span(data, numel)
        more = values_of(dtype, end - begin, seed + 100 + number)
        store.add(entry, more, begin=begin * dtype.itemsize)
        expected[begin:end] += more
    assert torch.equal(store.read_all(entry), expected.view(torch.uint8))
    store.handle(entry)  # whose death ends the entry


@pytest.fixture
def chunks(monkeypatch):
    """(transfer, begin, end, buffer) of each chunk that is handed a buffer."""
    seen = []
    begin_chunk = Transfer.begin_chunk

    def noted(self, begin, end, buffer):
        seen.append((self, begin, end, buffer))
        begin_chunk(self, begin, end, buffer)

    monkeypatch.setattr(Transfer, "begin_chunk", noted)
    return seen


@EVEN_IF
@given(data=st.data(), kind=st.sampled_from([Put, Add, Fetch]))
def test_a_buffer_has_room_for_whole_blocks_once_or_twice(store, chunks, data, kind):
    entry = store.create("w", EntryKind.STATE, WHOLE)
    store.put(entry, torch.ones(WHOLE, dtype=torch.uint8)).wait()
    chunks.clear()
    begin, end = span(data, WHOLE)
    verb = {Put: store.put, Add: store.add, Fetch: store.fetch}[kind]
    verb(entry, odd(end - begin), begin=begin).wait()
    reached = begin
    for transfer, low, high, buffer in chunks:
        assert low == reached
        reached = high
        first, last = entry.place.blocks(low, high)
        times = 2 if kind is Add else 1
        assert (
            buffer.nbytes == transfer.buffer_bytes(low, high) <= store._context.staging.chunk_bytes
        )
        assert last - first <= buffer.nbytes // times < last - first + BLOCK_BYTES
        assert buffer.nbytes // times % BLOCK_BYTES == 0, "each half begins at a block"
    assert reached == end
    store.handle(entry)  # whose death ends the entry


def odd(nbytes):
    """Zeros that lie off granules, so that they do not go straight."""
    return torch.zeros(nbytes + 1, dtype=torch.uint8)[1:]


FAILING = {
    "a fetch that cannot read": ("read", lambda store, entry: store.fetch(entry, odd(WHOLE))),
    "a put that cannot write": ("write", lambda store, entry: store.put(entry, odd(WHOLE))),
    "a put that cannot read the rest of its blocks": (
        "read",
        lambda store, entry: store.put(entry, odd(WHOLE - 10), begin=5),
    ),
    "a sum that cannot read": ("read", lambda store, entry: store.add(entry, odd(WHOLE))),
    "a sum that cannot write": ("write", lambda store, entry: store.add(entry, odd(WHOLE))),
    "a sum at an odd offset that cannot read": (
        "read",
        lambda store, entry: store.add(entry, odd(WHOLE - 10), begin=5),
    ),
}


@pytest.mark.parametrize("nth", [None, 0, 1], ids=["all", "the first", "the second"])
@pytest.mark.parametrize("case", FAILING)
def test_a_chunk_that_fails_gives_its_whole_buffer_back(faults, open_store, case, nth):
    store = open_store(host_memory=RING, disk=True)
    failing, others = (store.create(name, EntryKind.STATE, WHOLE) for name in ("failing", "others"))
    for entry in (failing, others):
        store.put(entry, odd(WHOLE)).wait()
    before = store.meter.host.now
    verb, start = FAILING[case]
    faults.fail(verb, nth=nth)
    with pytest.raises(IOFault, match=f"{verb} of 'failing' failed"):
        start(store, failing).wait()
    faults.none()
    assert store.meter.host.now == before == 0
    for lane in (store.fetch, store.put):
        assert fills_its_lane(store, faults, lane)


def fills_its_lane(store, faults, verb):
    """Whether a new transfer is handed all that its lane has, and then gets through."""
    entry = store.create("more", EntryKind.STATE, 2 * RING)
    store.put(entry, odd(2 * RING)).wait()
    faults.gate.clear()
    ticket = verb(entry, odd(2 * RING))
    held = store.meter.host.now
    faults.gate.set()
    ticket.wait()
    store.handle(entry)  # whose death ends the entry
    return held == lane_bytes(RING) and store.meter.host.now == 0
