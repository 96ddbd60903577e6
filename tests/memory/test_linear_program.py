"""A linear program: optima that can be read off, and rows that nothing keeps to."""

import pytest

from zcompile.memory.linear_program import LinearProgram


def diet() -> LinearProgram:
    """The least of 2 x + 3 y with x + y = 10, x <= 6 and y - x <= 2."""
    program = LinearProgram()
    program.column("x", highest=6.0)
    program.column("y")
    program.exactly(10.0, ("x", 1.0), ("y", 1.0))
    program.at_most(2.0, ("y", 1.0), ("x", -1.0))
    return program


def test_the_optimum_names_every_column_and_what_all_cost():
    found = diet().minimised(("x", 2.0), ("y", 3.0))
    assert found is not None
    assert found.values == pytest.approx({"x": 6.0, "y": 4.0})
    assert found.cost == pytest.approx(24.0)


def test_one_program_is_minimised_again_after_more_rows():
    program = diet()
    assert program.minimised(("x", 2.0), ("y", 3.0)) is not None
    program.at_most(5.0, ("x", 1.0))
    found = program.minimised(("x", 2.0), ("y", 3.0))
    assert found is not None
    assert found.values == pytest.approx({"x": 5.0, "y": 5.0})
    other = program.minimised(("y", 1.0), ("x", 5.0))
    assert other is not None
    assert other.values == pytest.approx({"x": 4.0, "y": 6.0})


def test_factors_of_a_column_that_stands_twice_add_up():
    program = LinearProgram()
    program.column("x")
    program.at_most(-6.0, ("x", -1.0), ("x", -2.0))
    found = program.minimised(("x", 1.0), ("x", 1.0))
    assert found is not None
    assert (found.values["x"], found.cost) == pytest.approx((2.0, 4.0))


def test_a_lowest_value_holds_and_only_columns_that_were_made_are_there():
    program = LinearProgram()
    program.column(("T", 0), lowest=1.5)
    found = program.minimised((("T", 0), 1.0))
    assert found is not None
    assert found.values == {("T", 0): 1.5}
    assert ("T", 0) in program
    assert ("T", 1) not in program


def test_what_cannot_be_has_no_optimum():
    program = diet()
    program.at_most(3.0, ("x", 1.0))
    assert program.minimised(("x", 1.0)) is None


def test_a_name_is_given_once():
    program = diet()
    with pytest.raises(AssertionError, match="x is there already"):
        program.column("x")


def knapsack(*weights: float) -> LinearProgram:
    """The number of pieces of each weight, at most one, that weigh 10 together at most."""
    program = LinearProgram()
    for n in range(len(weights)):
        program.only_whole(program.column(n, highest=1.0))
    program.at_most(10.0, *enumerate(weights))
    return program


def test_whole_numbers_are_found_that_no_rounding_finds():
    program, worth = knapsack(6.0, 5.0, 5.0), [(0, -6.6), (1, -5.0), (2, -5.0)]
    split = program.minimised(*worth)
    assert split is not None
    assert split.values[0] == pytest.approx(1.0), "most for its weight; then there is no room"
    whole = program.minimised_whole(0.0, 100, *worth)
    assert whole is not None
    assert whole.values == pytest.approx({0: 0.0, 1: 1.0, 2: 1.0})
    assert whole.cost == pytest.approx(-10.0)
    assert split.cost < whole.cost


def test_columns_that_need_not_be_whole_are_split_beside_those_that_must():
    program = knapsack(6.0)
    program.column("some", highest=1.0)
    program.at_most(10.0, (0, 6.0), ("some", 8.0))
    found = program.minimised_whole(0.0, 100, (0, -6.0), ("some", -1.0))
    assert found is not None
    assert found.values == pytest.approx({0: 1.0, "some": 0.5})


def test_where_no_whole_numbers_keep_to_all_rows_there_are_none():
    program = knapsack(6.0)
    program.exactly(3.0, (0, 6.0))
    assert program.minimised((0, 1.0)) is not None
    assert program.minimised_whole(0.0, 100, (0, 1.0)) is None
