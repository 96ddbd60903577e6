"""Which way fits a budget, and which budget is told where none does; on made-up ways."""

import itertools
from dataclasses import replace

import pytest

from zcompile.errors import BudgetExceeded, more_device_memory
from zcompile.passes.trial import FAR, STRIDE, BudgetSearch, between


def search(needs, tried=None):
    """Ways are numbers; way n needs `needs[n]` bytes."""

    def try_out(way, budget):
        if tried is not None:
            tried.append((way, budget))
        if needs[way] <= budget:
            return None
        return BudgetExceeded("device", budget, needs[way], f"way {way}", [("a", 1)], "-")

    return BudgetSearch(lambda budget: range(len(needs)), try_out)


@pytest.mark.parametrize(
    ("needs", "budget", "way"),
    [
        ([100], 100, 0),
        ([200, 90], 100, 1),
        ([200, 150, 100, 50], 100, 2),
    ],
)
def test_the_first_that_fits_is_taken(needs, budget, way):
    assert search(needs).best(budget, 300) == way


def test_only_the_last_way_is_tried_once_one_needs_no_less():
    tried = []
    with pytest.raises(BudgetExceeded):
        search([300, 300, 1, 200], tried).best(100, 300)
    assert [way for way, budget in tried if budget == 100] == [0, 1, 3]
    assert search([300, 300, 200, 90]).best(100, 300) == 3


def test_a_way_of_another_kind_is_tried_all_the_same():
    def try_out(way, budget):
        _, needed = way
        if needed <= budget:
            return None
        return BudgetExceeded("device", budget, needed, "somewhere", [("a", 1)], "-")

    def found(*ways):
        return BudgetSearch(lambda budget: ways, try_out, lambda a, b: a[0] == b[0]).best(100, 300)

    assert found(("a", 300), ("a", 310), ("b", 320), ("b", 90)) == ("b", 90)
    with pytest.raises(BudgetExceeded):
        found(("a", 300), ("a", 310), ("a", 90), ("a", 200))


def test_ways_without_hope_are_passed_over_but_for_the_last():
    tried = []
    of = replace(search([300, 90, 200, 80], tried), hopeless=lambda way, budget: way != 1)
    assert of.first(100) == 1
    assert of.first(85) == 3
    assert [way for way, _ in tried] == [1, 1, 3]


@pytest.mark.parametrize("needs", [[150], [1000, 400, 150], [101], [100_000]])
@pytest.mark.parametrize("roomy", [160, 500, 3000])
def test_a_refusal_names_a_budget_that_does(needs, roomy):
    with pytest.raises(BudgetExceeded) as caught:
        search(needs).best(100, roomy)
    told = caught.value
    assert told.needed_bytes == min(needs), "what the nearest way needs is tried, and does"
    assert more_device_memory(told.needed_bytes) in str(told)
    assert search(needs).best(told.needed_bytes, roomy) == needs.index(min(needs))
    assert told.where == f"way {needs.index(min(needs))}"
    assert "budget is 100 B" in str(told)


@pytest.mark.parametrize("roomy", [420, 100_000])
@pytest.mark.parametrize("grows", [1.0, 1.05, 1.3])
def test_the_budget_that_is_told_is_near_the_least(grows, roomy):
    """Of passes that need more under a larger budget, as those do that choose what is kept."""

    def try_out(way, budget):
        needed = int(500 + (grows - 1) * budget)
        return None if needed <= budget else BudgetExceeded("device", budget, needed, "-", [], "-")

    tried = []

    def noted(way, budget):
        tried.append(budget)
        return try_out(way, budget)

    with pytest.raises(BudgetExceeded) as caught:
        BudgetSearch(lambda budget: [0], noted).best(400, roomy)
    told = caught.value.needed_bytes
    assert try_out(0, told) is None
    least = next(n for n in range(400, 2000) if try_out(0, n) is None)
    assert told <= least * 1.15
    assert len(tried) < 14
    assert len(set(tried)) == len(tried), "none twice"


def test_where_nothing_does_that_is_said():
    def never(way, budget):
        return BudgetExceeded("device", budget, budget + 1, "somewhere", [], "-")

    with pytest.raises(BudgetExceeded, match="more device_memory than"):
        BudgetSearch(lambda budget: [0], never).best(100, 200)


def test_what_is_needed_may_be_told_wrongly_and_what_is_tried_out_counts():
    """As of passes that need another amount under another budget."""

    def try_out(way, budget):
        if budget >= 250:
            return None
        return BudgetExceeded("device", budget, budget + 1, "somewhere", [], "-")

    found = BudgetSearch(lambda budget: [0], try_out)
    with pytest.raises(BudgetExceeded) as caught:
        found.best(100, 200)
    assert 250 <= caught.value.needed_bytes < 320
    assert found.best(caught.value.needed_bytes, 200) == 0


def test_a_small_part_of_a_roomy_budget_is_come_down_to():
    assert between(100, 100 * FAR) == []
    down = between(100, 100 * FAR + 1)
    assert down == sorted(down, reverse=True)
    assert down[-1] == 100 * STRIDE
    assert all(before == STRIDE * after for before, after in itertools.pairwise(down))
    tried = []
    assert search([50], tried).best(100, 100 * FAR + 1) == 0
    assert [budget for _, budget in tried] == [*down, 100]


def test_a_hopeless_budget_is_not_tried_itself():
    tried = []
    with pytest.raises(BudgetExceeded):
        search([90_000], tried).best(10, 100_000)
    assert min(budget for _, budget in tried) > 10
