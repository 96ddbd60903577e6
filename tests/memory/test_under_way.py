"""Gradients under way: as many as there is room for below the peak, never one that raises it."""

from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from zcompile.memory.footprint import Departure, JoinPlan, plan_joins

MANY = settings(max_examples=300, deadline=None)


def leaving(*rows: tuple[int, int], alive: int = 0) -> list[Departure]:
    """Gradients of (node, bytes), which others hold for `alive` nodes after."""
    return [Departure(at, nbytes, {n: (nbytes, at + alive)}) for n, (at, nbytes) in enumerate(rows)]


def whole(gradients: list[Departure], held: list[int], joins: JoinPlan) -> list[int]:
    """Bytes per node, counted storage by storage."""
    found = list(held)
    for key, (nbytes, last) in {k: row for g in gradients for k, row in g.holds.items()}.items():
        for node in range(last + 1, joins.until[key] + 1):
            found[node] += nbytes
    return found


def test_twice_the_largest_may_be_under_way_anywhere():
    gradients = leaving((1, 4), (2, 4), (3, 4), (4, 4))
    joins = plan_joins(gradients, [9, 9, 9, 9, 9, 9], fills=True)
    assert joins.most == (8, 8, 8, 8)
    assert joins.until == {0: 3, 1: 4, 2: 5, 3: 5}
    assert joins.left == {2, 3}


def test_small_ones_are_not_let_by_a_large_one_elsewhere():
    gradients = leaving((1, 1), (2, 1), (3, 1), (4, 1), (5, 9))
    joins = plan_joins(gradients, [30, 30, 30, 30, 30, 9, 9], fills=False)
    assert joins.until == {0: 3, 1: 4, 2: 6, 3: 6, 4: 6}
    assert joins.most == (18, 18, 2, 2, 11)


def test_more_may_where_less_is_held_than_at_the_peak():
    gradients = leaving((1, 1), (2, 1), (3, 1), (4, 1), (5, 1))
    joins = plan_joins(gradients, [0, 9, 9, 9, 9, 8, 6], fills=True)
    assert joins.until == {0: 3, 1: 6, 2: 6, 3: 6, 4: 6}
    assert joins.most == (2, 2, 2, 3, 4)
    assert plan_joins(gradients, [0, 9, 9, 9, 9, 8, 6], fills=False).most == (2,) * 5


def test_a_gradient_that_is_held_anyway_takes_no_room():
    gradients = leaving((1, 4), (2, 1), (3, 1), (4, 1), alive=9)
    assert plan_joins(gradients, [9] * 6, fills=True).left == {0, 1, 2, 3}


def test_tiles_of_one_gradient_hold_it_once():
    gradients = [Departure(at, 1, {"whole": (4, 4)}) for at in (1, 2, 3, 4)]
    joins = plan_joins(gradients, [4, 4, 4, 4, 4, 0, 0], fills=True)
    assert joins.most == (2, 2, 3, 4)
    assert joins.left == {"whole"}


@st.composite
def problems(draw):
    """Gradients that are made at a node, leave at the next, and may be read for some nodes more."""
    count = draw(st.integers(1, 8))
    sizes = [draw(st.integers(1, 9)) for _ in range(count)]
    ats = sorted(draw(st.sets(st.integers(1, 20), min_size=count, max_size=count)))
    nodes = ats[-1] + 3
    alive = [draw(st.integers(0, 2)) for _ in range(count)]
    change = [0] * nodes
    for at, size, more in zip(ats, sizes, alive, strict=True):
        change[at] += size
        if at + more + 1 < nodes:
            change[at + more + 1] -= size
    beside = [draw(st.integers(0, 30)) for _ in range(nodes)]
    held = [a + b for a, b in zip(accumulate(change), beside, strict=True)]
    return [
        Departure(at, size, {n: (size, min(at + more, nodes - 1))})
        for n, (at, size, more) in enumerate(zip(ats, sizes, alive, strict=True))
    ], held


@MANY
@given(problems())
def test_the_peak_is_that_of_what_must_be_under_way(problem):
    gradients, held = problem
    least, most = (plan_joins(gradients, held, fills=fills) for fills in (False, True))
    assert max(whole(gradients, held, most)) == max(whole(gradients, held, least))
    assert all(a <= b for a, b in zip(least.most, most.most, strict=True))
    assert all(least.until[key] <= most.until[key] for key in least.until)


@MANY
@given(problems())
def test_whoever_joins_the_oldest_until_so_much_is_under_way_does_as_planned(problem):
    gradients, held = problem
    joins = plan_joins(gradients, held, fills=True)
    under_way: list[Departure] = []
    for gradient, most in zip(gradients, joins.most, strict=True):
        while under_way and sum(g.nbytes for g in under_way) + gradient.nbytes > most:
            (key,) = under_way.pop(0).holds
            assert joins.until[key] == gradient.at
        under_way.append(gradient)
    assert joins.left == {key for g in under_way for key in g.holds}
