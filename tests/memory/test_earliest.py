"""Values get the places that are free soonest: never two at once in one, and a window is filled."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zcompile.ir.types import ALIGNMENT, aligned
from zcompile.memory import earliest
from zcompile.memory.allocator import fits_quickly, live_peak
from zcompile.memory.earliest import LARGE_PART, Place, earliest_places
from zcompile.memory.window import Need, blocks_of
from zcompile.passes import allocate_arena
from zcompile.passes.schedule_prefetch import NEARLY_ALL, choose_starts

KB = 2 * ALIGNMENT


def need(first: int, last: int, nbytes: int) -> Need:
    return Need(f"p{first}", first, last, nbytes)


SMALL = 2 * LARGE_PART * KB
"""A window in which 1 KiB is small."""


@pytest.mark.parametrize(
    ("rows", "budget", "places"),
    [
        ((), KB, []),
        (((0, 0, 0),), ALIGNMENT, [(0, 0)]),  # what has no bytes takes the least there is
        (((0, 0, 0),), 0, None),
        (((0, 0, KB), (1, 1, KB), (2, 2, KB)), SMALL, [(0, 0), (KB, 0), (2 * KB, 0)]),
        # Half of the window each: the third lies where the first lay, since that is free sooner.
        (((0, 0, KB), (1, 1, KB), (2, 2, KB)), 2 * KB, [(KB, 0), (0, 0), (KB, 1)]),
        # A large value at the top, small ones below it; the next large one where these lay.
        (
            ((0, 4, SMALL // 2), (1, 1, KB), (5, 5, SMALL // 2)),
            SMALL,
            [(SMALL // 2, 0), (0, 0), (0, 2)],
        ),
        # Two neighbours make room for one value, once both are free.
        (((0, 0, KB), (0, 1, KB), (3, 3, 2 * KB)), 2 * KB, [(KB, 0), (0, 0), (0, 2)]),
        (((0, 2, KB), (1, 1, KB)), KB, None),  # read at once, and room for one
        (((0, 0, 2 * KB),), KB, None),
        (((0, 0, KB),), 2 * KB - 1, [(ALIGNMENT, 0)]),  # places begin and end where slots may
    ],
)
def test_earliest_places(rows, budget, places):
    found = earliest_places([need(*row) for row in rows], budget)
    assert found == (None if places is None else [Place(*place) for place in places])


@st.composite
def some_needs(draw) -> tuple[Need, ...]:
    """Large and small values, in the order of their first readers."""
    firsts = sorted(draw(st.lists(st.integers(0, 20), max_size=40)))
    sizes = st.one_of(st.integers(0, 3 * KB), st.integers(8 * KB, 12 * KB))
    return tuple(need(first, first + draw(st.integers(0, 5)), draw(sizes)) for first in firsts)


@settings(max_examples=300, deadline=None)
@given(some_needs(), st.integers(0, 40 * KB))
def test_no_two_values_are_at_one_place_at_once(needs, budget):
    places = earliest_places(needs, budget)
    if places is None:
        return
    rows = [(p, n, aligned(n.nbytes)) for p, n in zip(places, needs, strict=True)]
    for i, (place, need_, size) in enumerate(rows):
        assert place.address % ALIGNMENT == 0
        assert place.address >= 0
        assert place.address + size <= budget
        assert place.free_from <= need_.first
        for other, before, other_size in rows[:i]:
            apart = place.address + size <= other.address or (
                other.address + other_size <= place.address
            )
            assert apart or before.last < place.free_from


@settings(max_examples=100, deadline=None)
@given(some_needs(), st.integers(1, 4))
def test_a_window_of_all_bytes_has_a_place_for_each_at_once(needs, times):
    places = earliest_places(needs, times * sum(aligned(n.nbytes) for n in needs))
    assert places is not None
    assert all(place.free_from == 0 for place in places)


LAYERS, CHUNKS = 6, 24
WEIGHT, CHUNK = 24 * KB, KB


def stream() -> list[Need]:
    """A late update of each layer: a weight that is there until its layer has read it, and chunk
    after chunk of two states. Every other weight rests on the device."""
    rows, region = [], 0
    for layer in range(LAYERS):
        if layer % 2 == 0:
            rows.append(need(region, region + CHUNKS, WEIGHT))
        for n in range(CHUNKS):
            rows += [need(region + n, region + n, CHUNK)] * 2
        region += CHUNKS + 1
    return rows


def test_a_stream_of_weights_and_chunks_fills_its_window():
    """Starts that are chosen first leave holes in it, for which no addresses are found."""
    needs, budget = stream(), 2 * WEIGHT - 3 * KB
    greedy = choose_starts(needs, None, 1000, "forward")
    assert not fits_quickly(blocks_of(needs, greedy), budget)
    starts = choose_starts(needs, budget, 1000, "forward")
    assert live_peak(blocks_of(needs, starts)) >= NEARLY_ALL * budget
    places = earliest_places(needs, budget)
    assert places is not None
    assert starts == tuple(place.free_from for place in places)


def test_no_fetch_starts_earlier_than_it_may():
    needs, lead = stream(), 3
    starts = choose_starts(needs, 2 * WEIGHT - 3 * KB, lead, "forward")
    assert all(start >= need.first - lead for need, start in zip(needs, starts, strict=True))
    assert any(start < need.first for need, start in zip(needs, starts, strict=True))


@pytest.mark.parametrize(("start", "fits"), [(2, True), (1, False)])
def test_places_that_are_free_later_than_a_fetch_starts_are_not_taken(start, fits):
    """Of two values that are there at once, each has its own."""
    needs = [need(0, 0, KB), need(0, 1, KB), need(1, 1, KB), need(3, 3, 2 * KB)]
    places = earliest_places(needs, 3 * KB)
    assert places is not None
    assert [place.free_from for place in places] == [0, 0, 0, 2]
    values = [
        SimpleNamespace(name=n.name, first=n.first, last=n.last, nbytes=n.nbytes, start=at)
        for n, at in zip(needs, (0, 0, 0, start), strict=True)
    ]
    found = allocate_arena._earliest(values, 3 * KB)
    assert found == (tuple(place.address for place in places) if fits else None)


def test_what_would_take_long_is_not_looked_for(monkeypatch):
    needs = stream()
    monkeypatch.setattr(earliest, "WORK", len(needs) - 1)
    assert earliest_places(needs, sum(aligned(n.nbytes) for n in needs)) is None
