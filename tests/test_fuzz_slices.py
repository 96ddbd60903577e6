"""Models that nobody wrote have the same numbers over slices as they have whole.

What is broken on purpose is found by them. `make fuzz` goes on for as long as one likes.
"""

import pytest
from fuzz.slices.check import check, failure, hunt
from fuzz.slices.drawing import drawn
from fuzz.slices.injected import INJECTED
from sampled import sampled

PROGRAMS = 3
"""Of each seed."""


@pytest.mark.parametrize("number", sampled([1, 2], 1))
def test_drawn_models_have_the_same_numbers_over_slices(number):
    found = hunt(number, PROGRAMS)
    assert found is None, found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", range(100, 104))
def test_many_drawn_models_have_the_same_numbers_over_slices(number):
    found = hunt(number, 50)
    assert found is None, found


@pytest.mark.slow
def test_most_drawn_models_run_in_slices():
    """A program of which nothing is sliced compares a graph with itself."""
    made = [check(drawn(f"1.{n}")) for n in range(12)]
    assert sum(sliced.batch for sliced in made) > 8
    assert any(sliced.tokens for sliced in made)


def test_the_same_seed_draws_the_same_programs():
    assert drawn("3.0") == drawn("3.0") != drawn("3.1")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("defect", INJECTED)
def test_what_is_broken_on_purpose_is_found(defect):
    with INJECTED[defect]():
        found = hunt(1, 200)
        assert found is not None
        assert len(found.program.lines) <= 3, found
    assert failure(found.program) is None, "it fails for another reason"
