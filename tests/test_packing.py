"""Addresses: nothing alive overlaps, no packing needs less than what is alive, and it is quick."""

from time import perf_counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zcompile.packing import ALIGNMENT, Block, aligned, live_peak, pack, packed_bytes


@st.composite
def some_blocks(draw) -> list[Block]:
    spans = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12),
                                    st.integers(0, 20_000)), max_size=25))  # fmt: skip
    return [Block(first, first + length, nbytes) for first, length, nbytes in spans]


@settings(deadline=None, derandomize=True)
@given(some_blocks())
def test_blocks_that_are_alive_together_lie_apart(blocks):
    addresses = pack(blocks)
    for i, one in enumerate(blocks):
        assert addresses[i] % ALIGNMENT == 0
        for j, other in enumerate(blocks[:i]):
            if {*range(one.first, one.last + 1)} & {*range(other.first, other.last + 1)}:
                ends = addresses[i] + aligned(one.nbytes), addresses[j] + aligned(other.nbytes)
                assert ends[0] <= addresses[j] or ends[1] <= addresses[i]


@settings(deadline=None, derandomize=True)
@given(some_blocks())
def test_the_live_peak_is_the_most_that_is_alive_at_one_time(blocks):
    times = range(max((b.last for b in blocks), default=0) + 1)
    alive = [sum(aligned(b.nbytes) for b in blocks if b.first <= t <= b.last) for t in times]
    assert live_peak(blocks) == max(alive)


@settings(deadline=None, derandomize=True)
@given(some_blocks())
def test_no_packing_is_smaller_than_what_is_alive(blocks):
    assert live_peak(blocks) <= packed_bytes(blocks, pack(blocks))
    assert pack(blocks) == pack(list(blocks))


@pytest.mark.parametrize(("blocks", "addresses"), [
    ([], ()),
    ([Block(0, 0, 1)], (0,)),
    ([Block(0, 1, 512), Block(1, 2, 512)], (0, 512)),            # they meet at time 1
    ([Block(0, 1, 512), Block(2, 3, 512)], (0, 0)),
    ([Block(0, 3, 512), Block(0, 1, 1024)], (1024, 0)),          # the largest lies lowest
    ([Block(0, 9, 1024), Block(0, 2, 600), Block(3, 5, 1000)], (0, 1024, 1024)),
])  # fmt: skip
def test_pack(blocks, addresses):
    assert pack(blocks) == addresses


def test_two_thousand_blocks_are_packed_while_one_waits(record_property):
    blocks = [Block(i, i + 1 + i * 7919 % 40, 1 + i * 104729 % 100_000) for i in range(2000)]
    since = perf_counter()
    addresses = pack(blocks)
    record_property("seconds", round(perf_counter() - since, 3))
    record_property("packed over alive", packed_bytes(blocks, addresses) / live_peak(blocks))
