"""The I/O engine: what it asks of a ring, in which order, and what it makes of each outcome."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from zcompile.errors import IOFault
from zcompile.runtime.device.pages import host_pages
from zcompile.runtime.io import engine as engine_module
from zcompile.runtime.io.rings import KernelAio, ThreadRing
from zcompile.runtime.tiers.base import Buffer
from zcompile.runtime.tiers.disk import DiskTier

UNIT = 4096


@pytest.fixture
def tier(faulty_tier):
    return faulty_tier


@pytest.fixture
def small_requests(monkeypatch):
    """Moves are cut into requests of 4 KiB, so that small ones have many."""
    for ring in (KernelAio, ThreadRing):
        monkeypatch.setattr(ring, "request_bytes", UNIT)


def filled(nbytes: int, value: int = 0) -> Buffer:
    return Buffer.over(host_pages(nbytes).fill_(value))


def noise(nbytes: int) -> Buffer:
    return Buffer.over(host_pages(nbytes).random_(0, 255))


def roundtrip(tier: DiskTier, nbytes: int) -> bool:
    """Whether what is written is read, right now."""
    extent, source, into = tier.reserve(nbytes, "w"), noise(nbytes), filled(nbytes)
    tier.write(extent, 0, source).wait()
    tier.read(extent, 0, into).wait()
    return torch.equal(into.memory, source.memory)


@contextmanager
def held(faults) -> Iterator[None]:
    """Nothing comes back from the ring within the block."""
    faults.gate.clear()
    try:
        yield
    finally:
        faults.gate.set()


def test_a_large_move_is_one_call_of_several_requests(small_requests, tier, faults, monkeypatch):
    extent = tier.reserve(20 * UNIT, "w")
    calls = []
    ring = tier._engines[0].ring
    submit = ring.submit
    monkeypatch.setattr(
        ring, "submit", lambda requests: calls.append(len(requests)) or submit(requests)
    )
    tier.write(extent, 0, filled(20 * UNIT, 1)).wait()
    assert calls == [20]
    assert [r.nbytes for r in faults.seen[-20:]] == [UNIT] * 20


def test_short_transfers_go_on_where_they_stopped(tier, faults):
    faults.cut(UNIT)
    assert roundtrip(tier, 5 * UNIT)


def test_outcomes_in_any_order_are_the_same(small_requests, tier, faults):
    faults.reverse = True
    assert roundtrip(tier, 50 * UNIT)


def test_a_ring_that_accepts_few_at_a_time_gets_the_rest_later(small_requests, tier, faults):
    faults.most = 3
    assert roundtrip(tier, 20 * UNIT)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EINTR, errno.ENOMEM])
def test_a_call_that_is_refused_for_now_is_repeated(tier, faults, code):
    faults.refusals = [code, 0, code, code]
    assert roundtrip(tier, UNIT)


def test_a_request_that_cannot_be_served_now_is_repeated(tier, faults):
    answers = iter([-errno.EAGAIN, -errno.EINTR, None, -errno.EAGAIN])
    faults.decide = lambda request: next(answers, None)
    assert roundtrip(tier, UNIT)


def test_one_that_can_never_be_served_is_an_error(tier, faults, monkeypatch):
    monkeypatch.setattr(engine_module, "MOST_TRIES", 3)
    faults.fail("write", errno.EAGAIN)
    extent = tier.reserve(UNIT, "w")
    with pytest.raises(IOFault, match="write of 'w' failed: Resource temporarily unavailable"):
        tier.write(extent, 0, filled(UNIT)).wait()
    faults.none()
    faults.refusals = [errno.EAGAIN] * 10
    with pytest.raises(IOFault, match="write of 'w' failed: Resource temporarily unavailable"):
        tier.write(extent, 0, filled(UNIT)).wait()


def test_a_call_that_is_refused_for_good_fails_its_first_request_only(tier, faults):
    extent = tier.reserve(UNIT, "w")
    faults.refusals = [errno.EBADF]
    with pytest.raises(IOFault, match="write of 'w' failed: Bad file descriptor") as caught:
        tier.write(extent, 0, filled(UNIT)).wait()
    assert caught.value.errno == errno.EBADF
    assert roundtrip(tier, UNIT)


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("nth", [0, 3, 7])
def test_one_bad_request_fails_its_move_and_no_other(small_requests, tier, faults, verb, nth):
    extent, other = tier.reserve(8 * UNIT, "layers.0.weight"), tier.reserve(UNIT, "other")
    source = noise(8 * UNIT)
    tier.write(extent, 0, source).wait()
    tier.write(other, 0, filled(UNIT, 7)).wait()
    faults.fail(verb, nth=nth)
    move = tier.read if verb == "read" else tier.write
    with pytest.raises(IOFault) as caught:
        move(extent, 0, source).wait()
    assert caught.value.errno == errno.EIO
    assert f"{verb} of 'layers.0.weight' failed: Input/output error" in str(caught.value)
    assert str(tier._files[0].path) in str(caught.value)
    faults.none()
    into = filled(UNIT)
    tier.read(other, 0, into).wait()
    assert into.memory.eq(7).all()


def test_an_error_is_told_when_no_request_touches_the_memory_any_more(small_requests, tier, faults):
    extent = tier.reserve(4 * UNIT, "w")
    faults.fail("write", nth=0)
    with held(faults):
        promise = tier.write(extent, 0, filled(4 * UNIT))
        assert not promise.done()
    promise.wait_finished()
    assert not tier._engines[0]._in_flight


def test_no_progress_is_an_error(tier, faults):
    extent = tier.reserve(UNIT, "w")
    faults.decide = lambda request: 0
    with pytest.raises(IOFault, match="read of 'w' failed: the file ends before the data"):
        tier.read(extent, 0, filled(UNIT)).wait()
    with pytest.raises(IOFault, match="write of 'w' failed: the device takes no more"):
        tier.write(extent, 0, filled(UNIT)).wait()


@pytest.mark.parametrize("left", [0, 100, 5 * UNIT, 5 * UNIT + 1000])
def test_a_truncated_file_is_an_error_that_says_so(tier, left):
    extent = tier.reserve(8 * UNIT, "layers.1.bias")
    tier.write(extent, 0, noise(8 * UNIT)).wait()
    os.truncate(tier._files[0].path, left)
    with pytest.raises(IOFault) as caught:
        tier.read(extent, 0, filled(8 * UNIT)).wait()
    assert "read of 'layers.1.bias' failed: the file ends before the data" in str(caught.value)
    assert f"({left // tier.granule * tier.granule} of 32768 bytes at offset 0" in str(caught.value)


def test_reads_go_before_writes_that_wait(small_requests, tier, faults, monkeypatch):
    for lane in tier._engines[0]._lanes.values():
        monkeypatch.setattr(lane, "_most_bytes", 2 * UNIT)
    extent, mark = tier.reserve(16 * UNIT, "w"), len(faults.seen)
    faults.decide = lambda request: request.nbytes  # so that all that is told comes at once
    with held(faults):
        promises = [tier.write(extent, n * UNIT, filled(UNIT)) for n in range(8)]
        promises += [tier.read(extent, n * UNIT, filled(UNIT)) for n in range(8, 12)]
    for promise in promises:
        promise.wait()
    order = ["write" if request.write else "read" for request in faults.seen[mark:]]
    assert order == ["write"] * 2 + ["read"] * 4 + ["write"] * 6


def test_the_bytes_in_flight_are_bounded_each_way(small_requests, tier, faults, monkeypatch):
    for lane in tier._engines[0]._lanes.values():
        monkeypatch.setattr(lane, "_most_bytes", 10 * UNIT)
    extent = tier.reserve(64 * UNIT, "w")
    mark = len(faults.seen)
    with held(faults):
        promises = [
            tier.write(extent, 0, filled(64 * UNIT)),
            tier.read(extent, 0, filled(64 * UNIT)),
        ]
        assert [r.write for r in faults.seen[mark:]].count(True) == 10
        assert [r.write for r in faults.seen[mark:]].count(False) == 10
    for promise in promises:
        promise.wait()


def test_many_threads_move_many_things(tier):
    def work(seed: int) -> None:
        results.extend([roundtrip(tier, (1 + (seed * 7 + n) % 9) * UNIT) for n in range(20)])

    results: list[bool] = []
    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [True] * 160
