"""Programs that nobody wrote do on tiered tensors what they do on plain ones.

What is broken on purpose is found by them.

`make fuzz` goes on for as long as one likes.
"""

import pytest
from fuzz.hunt import hunt
from fuzz.injected import INJECTED
from fuzz.program import fails
from fuzz.setting import BUDGETS
from sampled import crossed

SEEDS = (1, 2)
PROGRAMS = 4
"""Of each seed and budget."""


@pytest.mark.parametrize(("budget", "number"), crossed(BUDGETS, SEEDS))
def test_drawn_programs_do_what_torch_does(budget, number):
    found = hunt(budget, number, PROGRAMS)
    assert found is None, found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", range(100, 110))
@pytest.mark.parametrize("budget", BUDGETS)
def test_many_drawn_programs_do_what_torch_does(budget, number):
    found = hunt(budget, number, 20)
    assert found is None, found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("budget", BUDGETS)
def test_drawn_programs_that_compile_do_what_torch_does(budget):
    found = hunt(budget, 1, 5, compiled=True)
    assert found is None, found


@pytest.mark.slow
def test_the_same_seed_draws_the_same_programs():
    drawn = []
    for _ in range(2):
        seen = []
        hunt("roomy", 3, 2, lambda program, step, seen=seen: seen.append(step))
        drawn.append(seen)
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) > 10


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("defect", INJECTED)
def test_what_is_broken_on_purpose_is_found(defect):
    """Within as many programs as take well under two minutes."""
    with INJECTED[defect]():
        found = next(f for number in range(12) if (f := hunt("roomy", number, 6)) is not None)
        assert len(found.steps) <= 4, found
    assert fails("roomy", found.steps, looks=True) is None, "it fails for another reason"
