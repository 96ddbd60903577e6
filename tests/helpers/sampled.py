"""Parameters of which `make test` runs a sample, and `make test-all` every one."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def sampled(values: Iterable[Any], *sample: Any) -> list[Any]:
    """`values` as parameters of a test; all but those of `sample` are slow."""
    values = list(values)
    assert all(value in values for value in sample), f"not all of {sample} are among {values}"
    return [v if v in sample else pytest.param(v, marks=pytest.mark.slow) for v in values]


def sampled_rows(rows: Iterable[tuple[Any, ...]], *sample: tuple[Any, ...]) -> list[Any]:
    """As `sampled`, of a test with several parameters: one row is a value of each."""
    rows = list(rows)
    assert all(row in rows for row in sample), f"not all of {sample} are among {rows}"
    return [pytest.param(*row, marks=() if row in sample else pytest.mark.slow) for row in rows]


def crossed(*axes: Iterable[Any]) -> list[Any]:
    """Every combination of the values of `axes`, as parameters of a test.

    Of these a diagonal is quick: each value of each axis is in it at least once, the longest axis
    goes through its values once. `crossed("abc", "xy")` runs a-x, b-y and c-x; a-y, b-x and c-y
    are slow.
    """
    lists: Sequence[list[Any]] = [list(axis) for axis in axes]
    longest = max(map(len, lists))
    quick = [tuple(at % len(values) for values in lists) for at in range(longest)]
    return [
        pytest.param(
            *(values[at] for values, at in zip(lists, place, strict=True)),
            marks=() if place in quick else pytest.mark.slow,
        )
        for place in itertools.product(*(range(len(values)) for values in lists))
    ]
