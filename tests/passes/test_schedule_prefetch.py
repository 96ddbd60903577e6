"""Fetches start early enough to be there in time, and no earlier than the budget allows."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from programs import least_window, programs
from sampled import sampled
from small_models import SMALL_MODELS, UNALIKE

from zcompile.errors import BudgetExceeded, more_device_memory
from zcompile.ir import printer
from zcompile.ir.schedule import RegionProgram
from zcompile.ir.types import ALIGNMENT
from zcompile.memory.allocator import Block, pack, packed_bytes
from zcompile.memory.window import Need
from zcompile.passes.schedule_prefetch import choose_starts, schedule_prefetch

KB = 2 * ALIGNMENT


def scheduled(model: str, lead: int, room: float = 4) -> list[RegionProgram]:
    """With `room` times the arena that each phase needs at least."""
    return [
        schedule_prefetch(replace(p, budget_bytes=int(least_window(p) * room)), lead)
        for p in programs(model)
    ]


def need(first: int, last: int | None = None, nbytes: int = KB) -> Need:
    return Need(f"p{first}", first, first if last is None else last, nbytes)


CHAIN = tuple(need(region) for region in range(4))


@pytest.mark.parametrize(
    ("needs", "budget", "lead", "starts"),
    [
        ((), 0, 4, ()),
        (CHAIN, None, 0, (0, 1, 2, 3)),  # no lead: each where it is read
        (CHAIN, None, 8, (0, 0, 0, 0)),  # no budget: as early as the lead allows
        (CHAIN, None, 1, (0, 0, 1, 2)),
        (CHAIN, 4 * KB, 8, (0, 0, 0, 0)),  # everything fits
        (CHAIN, 3 * KB, 8, (0, 0, 0, 1)),  # the soonest go first
        (CHAIN, 2 * KB, 8, (0, 0, 1, 2)),  # one is read while the next arrives
        (CHAIN, 2 * KB, 1, (0, 0, 1, 2)),
        (CHAIN, 1 * KB, 8, (0, 1, 2, 3)),  # room for one: nothing moves
        ((need(0, 3), need(1), need(3)), 2 * KB, 8, (0, 0, 2)),  # a long one takes room throughout
        ((need(0), need(1, nbytes=4 * KB), need(2)), 5 * KB, 8, (0, 0, 1)),
        ((need(0), need(1, nbytes=4 * KB), need(2)), 4 * KB, 8, (0, 1, 2)),
        ((need(0, nbytes=0), need(1, nbytes=0)), 2 * ALIGNMENT, 8, (0, 0)),
    ],
)
def test_choose_starts(needs, budget, lead, starts):
    assert choose_starts(needs, budget, lead, "forward") == starts


def packed(needs, starts) -> int:
    blocks = [Block(s, n.last, n.nbytes) for n, s in zip(needs, starts, strict=True)]
    return packed_bytes(blocks, pack(blocks))


@st.composite
def some_needs(draw) -> tuple[Need, ...]:
    count = draw(st.integers(1, 14))
    firsts = sorted(draw(st.lists(st.integers(0, 10), min_size=count, max_size=count)))
    return tuple(
        need(first, first + draw(st.integers(0, 4)), draw(st.integers(0, 9000))) for first in firsts
    )


# What is packed quickly takes 512 bytes more than there are, the least takes no more.
HARD = tuple(
    need(*row)
    for row in (
        (0, 0, 0),
        (0, 0, 0),
        (0, 1, 0),
        (0, 1, 0),
        (1, 2, 0),
        (1, 3, 0),
        (2, 3, 0),
        (3, 4, 513),
        (4, 4, 0),
    )
)


@settings(deadline=None, derandomize=True)
@given(some_needs(), st.integers(0, 60_000), st.integers(0, 12))
@example(HARD, 0, 0)
def test_starts_keep_the_budget_and_the_lead(needs, spare, lead):
    budget = packed(needs, [n.first for n in needs]) + spare
    starts = choose_starts(needs, budget, lead, "forward")
    assert packed(needs, starts) <= budget
    for one, start in zip(needs, starts, strict=True):
        assert max(0, one.first - lead) <= start <= one.first


@settings(deadline=None, derandomize=True)
@given(some_needs())
def test_a_budget_that_cannot_do_is_refused_with_one_that_can(needs):
    least = packed(needs, [n.first for n in needs])
    with pytest.raises(BudgetExceeded) as caught:
        choose_starts(needs, least - 1, 4, "forward")
    assert more_device_memory(least) in str(caught.value)
    assert caught.value.needed_bytes == least
    choose_starts(needs, least, 4, "forward")


def test_the_refusal_names_what_is_alive_at_the_peak():
    needs = (need(0), need(2, nbytes=3 * KB), replace(need(2, 5, 2 * KB), name="up.weight"))
    with pytest.raises(BudgetExceeded) as caught:
        choose_starts(needs, 4 * KB, 4, "backward")
    text = str(caught.value)
    assert text.startswith("backward pass of the model needs 5.00 KiB on the device")
    assert "up.weight" in text
    assert "p0" not in text


def test_the_next_fetch_starts_before_the_compute_it_hides_behind(golden):
    assert "".join(map(printer.program_text, scheduled("mlp", 8))) == golden


def test_no_lead_leaves_every_fetch_right_before_its_first_reader():
    for program in scheduled("mlp", 0):
        assert all(value.start == value.first for value in program.fetched)


def test_in_the_smallest_arena_a_fetch_waits_for_what_makes_its_room(golden):
    assert "".join(map(printer.program_text, scheduled("mlp", 8, room=1))) == golden


@pytest.mark.parametrize("model", sampled(SMALL_MODELS, *UNALIKE))
@pytest.mark.parametrize("lead", [0, 1, 8])
def test_a_fetch_stays_within_its_lead_and_is_there_when_it_is_read(model, lead):
    for program in scheduled(model, lead):
        for value in program.fetched:
            assert max(0, value.first - lead) <= value.start <= value.first <= value.last
            assert value.last < len(program.regions)
