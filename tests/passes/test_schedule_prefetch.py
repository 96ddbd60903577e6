"""Fetches start early enough to be there in time, and no earlier than the budget allows."""

from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from joint import captured, least_budget
from small_models import SMALL_MODELS

from zcompile.config import Config
from zcompile.errors import BudgetExceeded
from zcompile.ir import ops
from zcompile.ir.graph import find, phase_of, positions, region_of
from zcompile.ir.types import ALIGNMENT
from zcompile.memory.allocator import Block, pack, packed_bytes
from zcompile.memory.window import Need
from zcompile.passes.pipeline import pipeline
from zcompile.passes.schedule_prefetch import SchedulePrefetch, choose_starts

KB = 2 * ALIGNMENT
BEFORE = tuple(
    takewhile(lambda p: not isinstance(p, SchedulePrefetch), pipeline(Config(device="cpu")))
)


def scheduled(model: str, lead: int = 8, budget_bytes: int | None = None):
    return captured(model).copy(budget_bytes).through(*BEFORE, SchedulePrefetch(lead))


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
    assert f"device_memory={least} or more" in str(caught.value)
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
    assert scheduled("mlp").text == golden


def test_no_lead_leaves_every_fetch_in_place(golden):
    joint = scheduled("mlp", lead=0)
    assert joint.text == golden
    where = positions(joint.graph)
    for fetch in find(joint.graph, ops.fetch):
        (wait,) = fetch.users
        between = list(joint.graph.nodes)[where[fetch] + 1 : where[wait]]
        assert all(n.target in (ops.fetch, ops.wait) for n in between)


def test_under_the_smallest_budget_a_fetch_follows_the_releases_that_make_its_room(golden):
    tight = scheduled("mlp", budget_bytes=least_budget(captured("mlp")))
    assert tight.text == golden


@pytest.mark.parametrize("model", SMALL_MODELS)
@pytest.mark.parametrize("lead", [0, 1, 8])
def test_between_two_regions_releases_precede_fetches(model, lead):
    graph = scheduled(model, lead).graph
    fetched_since_compute = False
    for node in graph.nodes:
        if region_of(node) is not None:
            fetched_since_compute = False
        elif node.target is ops.fetch:
            fetched_since_compute = True
        elif node.target is ops.release:
            assert not fetched_since_compute, f"{node} comes after a fetch"


@pytest.mark.parametrize("model", SMALL_MODELS)
def test_a_fetch_stays_in_its_phase_and_within_its_lead(model):
    graph = scheduled(model, lead=2).graph
    regions_of = {phase: [] for phase in ("forward", "backward")}
    starts: dict[object, int] = {}
    for node in graph.nodes:
        seen = regions_of.get(phase_of(node).value, [])
        if (region := region_of(node)) is not None and region not in seen:
            seen.append(region)
        elif node.target is ops.fetch:
            starts[node] = len(seen)
        elif node.target is ops.wait:
            assert len(seen) - starts[node.args[0]] <= 2
