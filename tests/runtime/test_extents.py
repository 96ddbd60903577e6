"""Ranges handed out and taken back, and ranges written, each against a model made of bytes."""

from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from zcompile.runtime.tiers.extents import RangeAllocator, WrittenRanges

UNIT = 64


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 700)), max_size=60))
def test_extents_never_overlap_and_all_room_is_found_again(steps):
    space = RangeAllocator(UNIT, 4096)
    held: list[tuple[int, int]] = []
    for take, n in steps:
        if take or not held:
            offset = space.take(n)
            taken = {b for o, m in held for b in range(o, o + space.aligned(m))}
            if offset is None:
                free = [b not in taken for b in range(0, 4096, UNIT)]
                runs = "".join("x" if f else " " for f in free).split()
                assert max(map(len, runs), default=0) * UNIT < n
                continue
            assert offset % UNIT == 0
            assert offset + n <= 4096
            assert taken.isdisjoint(range(offset, offset + n))
            held.append((offset, n))
        else:
            space.give(*held.pop(n % len(held)))
        assert space.used_bytes == sum(space.aligned(n) for _, n in held)
    for extent in held:
        space.give(*extent)
    assert space.take(4096) == 0


def test_a_space_grows_and_knows_what_is_spare_at_its_end():
    space = RangeAllocator(UNIT, 128)
    assert space.take(128) == 0
    assert space.spare_at_end() == 0
    assert space.take(64) is None
    space.grow(128)
    assert space.spare_at_end() == 128
    assert space.take(64) == 128


def test_room_within_a_part_is_at_the_beginning_of_it_or_at_its_end():
    space = RangeAllocator(UNIT, 10 * UNIT)
    for taken in (0, 4, 9):  # holes of 3 and of 4
        assert space.take_at(taken * UNIT, UNIT)
    whole = 0, 10 * UNIT
    assert space.take_within(UNIT - 1, *whole) == UNIT
    assert space.take_within(UNIT, *whole, last=True) == 8 * UNIT
    assert space.take_within(3 * UNIT, *whole) == 5 * UNIT  # the first hole has 2 left
    assert space.take_within(2 * UNIT, *whole, last=True) == 2 * UNIT
    assert space.take_within(1, *whole) is None
    space.give(2 * UNIT, 2 * UNIT)
    assert space.take_within(2 * UNIT, 3 * UNIT, 10 * UNIT) is None
    assert space.take_within(UNIT, 3 * UNIT, 10 * UNIT) == 3 * UNIT


RANGES = [(begin, end) for begin, end in product(range(5), repeat=2) if begin <= end]


def test_every_way_to_write_two_ranges_is_known_to_the_byte():
    """Of a block that was thought to hold nothing the bytes beside a write would be lost."""
    for ranges in product(RANGES, repeat=2):
        written, model = WrittenRanges(), set()
        for a, b in ranges:
            written.add(a, b)
            model |= set(range(a, b))
        for begin, end in RANGES:
            inside = set(range(begin, end))
            assert written.touches(begin, end) == bool(inside & model)
            assert written.covers(begin, end) == (inside <= model)
            pieces = written.pieces(begin, end)
            assert all(low < high for low, high, _ in pieces)
            assert {n for low, high, held in pieces if held for n in range(low, high)} == (
                inside & model
            )
            assert not (written.holds(begin, end) and not inside <= model)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=20),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_written_ranges_are_those_that_were_added(ranges, begin, end):
    written, model = WrittenRanges(), set()
    for a, b in ranges:
        written.add(a, b)
        model |= set(range(a, b))
    pieces = written.pieces(begin, end)
    assert [n for low, high, _ in pieces for n in range(low, high)] == list(range(begin, end))
    for low, high, held in pieces:
        assert all((n in model) == held for n in range(low, high))
    assert all(a[2] != b[2] for a, b in pairwise(pieces))
    assert written.covers(begin, end) == (set(range(begin, end)) <= model)
    assert written.touches(begin, end) == bool(set(range(begin, end)) & model)
