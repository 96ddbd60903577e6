"""The staging ring: buffers as large as their chunks, lanes that take turns, no byte twice."""

import itertools
import threading
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zcompile.ir.units import KiB
from zcompile.machine.staging import StagingSize
from zcompile.planner.links import RING_BLOCK
from zcompile.runtime.meter import Gauge
from zcompile.runtime.transfer.staging import Staging

CHUNK, CHUNKS = 64 * KiB, 4


class Asks:
    """A transfer that keeps the buffers it is handed; chunks are (begin, end) of its bytes."""

    def __init__(self, ring, lane):
        self.ring, self.lane = ring, lane
        self.held = []

    def buffer_bytes(self, begin, end):
        return end - begin

    def begin_chunk(self, begin, end, buffer):
        self.held.append(buffer)

    def ask(self, *sizes):
        self.ring.request(self.lane, self, deque((0, size) for size in sizes))
        return self

    def give_one(self):
        self.ring.give(self.held.pop(0))


def ring(chunks=CHUNKS):
    size = StagingSize(CHUNK, chunks)
    return Staging(torch.zeros(size.nbytes, dtype=torch.uint8), size, Gauge())


def test_small_writes_take_little_of_the_ring_so_that_many_are_under_way():
    writes = Asks(ring(), "write").ask(*[4 * KiB] * 100)
    assert len(writes.held) == 3 * CHUNKS // 4 * CHUNK // (4 * KiB)
    assert {buffer.nbytes for buffer in writes.held} == {4 * KiB}


def test_a_buffer_is_whole_blocks_as_the_simulator_counts_them():
    (buffer,) = Asks(ring(), "read").ask(5000).held
    assert buffer.nbytes == 2 * RING_BLOCK


def test_neither_lane_holds_all_of_the_ring():
    shared = ring()
    reads, writes = Asks(shared, "read").ask(*[CHUNK] * 9), Asks(shared, "write").ask(*[CHUNK] * 9)
    assert (len(reads.held), len(writes.held)) == (3, 1)


def test_a_read_is_served_before_a_write_that_waits_longer():
    shared = ring()
    reads, writes = Asks(shared, "read").ask(CHUNK), Asks(shared, "write").ask(*[CHUNK] * 3)
    more_writes, more_reads = Asks(shared, "write").ask(CHUNK), Asks(shared, "read").ask(CHUNK)
    reads.give_one()
    assert (len(more_reads.held), len(more_writes.held)) == (1, 0)
    writes.give_one()
    assert len(more_writes.held) == 1


@given(st.lists(st.integers(1, CHUNK), min_size=20, max_size=60), st.data())
@settings(max_examples=60, deadline=None)
def test_however_writes_lie_a_read_is_served_at_once(sizes, data):
    shared = ring()
    writes = Asks(shared, "write").ask(*sizes)
    for _ in range(10):  # not in the order in which they were handed out
        if writes.held:
            shared.give(writes.held.pop(data.draw(st.integers(0, len(writes.held) - 1))))
    assert len(Asks(shared, "read").ask(CHUNK).held) == 1


@given(st.lists(st.integers(1, CHUNK), min_size=20, max_size=60), st.data())
@settings(max_examples=60, deadline=None)
def test_however_reads_lie_a_write_is_served_at_once(sizes, data):
    shared = ring()
    reads = Asks(shared, "read").ask(*sizes)
    for _ in range(10):
        if reads.held:
            shared.give(reads.held.pop(data.draw(st.integers(0, len(reads.held) - 1))))
    assert len(Asks(shared, "write").ask(CHUNK).held) == 1


def test_a_transfer_that_gives_its_buffer_back_at_once_does_not_pile_up_calls():
    shared = ring()

    class Fails(Asks):
        def begin_chunk(self, begin, end, buffer):
            super().begin_chunk(begin, end, buffer)
            self.give_one()

    fails = Fails(shared, "read").ask(*[CHUNK] * 5000)
    assert not fails.held
    assert len(Asks(shared, "write").ask(*[CHUNK] * 9).held) == 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, CHUNK), st.integers(0, 3)), max_size=60))
def test_no_byte_is_handed_out_twice_and_everyone_is_served(rows):
    shared = ring()
    lanes = {True: Asks(shared, "read"), False: Asks(shared, "write")}
    asked = 0
    for reads, nbytes, given_back in rows:
        lanes[reads].ask(nbytes)
        asked += 1
        taken = sorted(
            (b.memory.data_ptr(), b.memory.data_ptr() + b.nbytes)
            for lane in lanes.values()
            for b in lane.held
        )
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(taken))
        for lane in lanes.values():
            for _ in range(min(given_back, len(lane.held))):
                lane.give_one()
                asked -= 1
    while any(lane.held for lane in lanes.values()):
        for lane in lanes.values():
            while lane.held:
                lane.give_one()
                asked -= 1
    assert asked == 0


@pytest.mark.parametrize("threads", [4])
def test_several_threads_share_it(threads):
    shared, returned = ring(), []

    class Returns(Asks):
        def begin_chunk(self, begin, end, buffer):
            threading.Timer(0.001, self.back, (buffer,)).start()

        def back(self, buffer):
            self.ring.give(buffer)
            returned.append(buffer)

    def work(lane):
        Returns(shared, lane).ask(*[CHUNK // 3] * 25)

    workers = [
        threading.Thread(target=work, args=("read" if n % 2 else "write",)) for n in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    pause = threading.Event()
    for _ in range(500):
        if len(returned) == 25 * threads:
            break
        pause.wait(0.01)
    assert len(returned) == 25 * threads
    assert len(Asks(shared, "read").ask(CHUNK, CHUNK, CHUNK).held) == 3, "all was given back"
