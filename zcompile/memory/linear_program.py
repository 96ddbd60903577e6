"""Builds a linear program row by row, and finds its optimum by HiGHS, through scipy.

Three questions of the compiler are linear programs: what waits for backward, is made again or moves
(`passes/plan_activations/solve.py`), where entries of a step rest (`planner/placement.py`), and the
least that a step takes (`planner/bounds.py`). Each tells its columns by names of its own.

The module lies here because passes and planner may both import `memory`, and because what all three
programs divide is the room of a tier.
"""

import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

Column = Hashable
"""A name: what is asked for, such as ("T", Phase.STEP)."""
Term = tuple[Column, float]
"""A column and its factor."""


@dataclass(frozen=True)
class Optimum:
    """values  of every column
    cost       of all of them, which no other values go below
    """

    values: Mapping[Column, float]
    cost: float


class LinearProgram:
    """Columns are numbers that are asked for; rows are sums of them that keep to a limit."""

    def __init__(self) -> None:
        self._columns: dict[Column, int] = {}
        self._whole: set[int] = set()
        self._bounds: list[tuple[float, float | None]] = []
        self._upper: list[tuple[tuple[Term, ...], float]] = []
        self._equal: list[tuple[tuple[Term, ...], float]] = []

    def column(self, name: Column, lowest: float = 0.0, highest: float | None = None) -> Column:
        """One more number, between these two; returns its name."""
        assert name not in self._columns, f"{name} is there already"
        self._columns[name] = len(self._columns)
        self._bounds.append((lowest, highest))
        return name

    def only_whole(self, name: Column) -> None:
        """Let a column be a whole number, in `minimised_whole`."""
        self._whole.add(self._columns[name])

    def __contains__(self, name: Column) -> bool:
        return name in self._columns

    def at_most(self, limit: float, *terms: Term) -> None:
        """The sum of factor x column over `terms` is no more than `limit`."""
        self._upper.append((terms, limit))

    def exactly(self, total: float, *terms: Term) -> None:
        """The sum of factor x column over `terms` is `total`."""
        self._equal.append((terms, total))

    def minimised(self, *costs: Term) -> Optimum | None:
        """Where the sum of factor x column over `costs` is least; None, if no values keep to all
        rows, or the solver finds none."""
        # Here, since it takes 0.8 s, and a graph that fits its budget asks for no optimum.
        from scipy.optimize import linprog

        found = linprog(
            self._weights(costs),
            A_ub=self._matrix([terms for terms, _ in self._upper]),
            b_ub=[limit for _, limit in self._upper],
            A_eq=self._matrix([terms for terms, _ in self._equal]),
            b_eq=[total for _, total in self._equal],
            bounds=self._bounds,
            method="highs",
        )
        if not found.success:
            log.info("a linear program has no optimum: %s", found.message)
            return None
        return self._told(found)

    def minimised_whole(self, gap: float, nodes: int, *costs: Term) -> Optimum | None:
        """The same with whole numbers where those are asked for (`only_whole`): the least, or what
        is known to be within `gap` of it; after so many nodes of the search the best that was seen.
        None, if none was.

        gap    part of the least
        nodes  of a tree of linear programs; no clock ends the search, so that the answer is the
               same on each machine
        """
        from scipy.optimize import Bounds, LinearConstraint, milp

        upper, equal = [x for _, x in self._upper], [x for _, x in self._equal]
        rows = [
            LinearConstraint(self._matrix([terms for terms, _ in of]), low, high)
            for of, low, high in (
                (self._upper, [-math.inf] * len(upper), upper),
                (self._equal, equal, equal),
            )
            if of
        ]
        found = milp(
            self._weights(costs),
            integrality=[int(n in self._whole) for n in range(len(self._columns))],
            bounds=Bounds(
                [low for low, _ in self._bounds],
                [math.inf if high is None else high for _, high in self._bounds],
            ),
            constraints=rows,
            options={"mip_rel_gap": gap, "node_limit": nodes},
        )
        if found.x is None:
            log.info("no whole numbers were found that keep to all rows: %s", found.message)
            return None
        return self._told(found)

    def _weights(self, costs: Sequence[Term]) -> list[float]:
        """The factor of each column in what is least."""
        weights = [0.0] * len(self._columns)
        for name, factor in costs:
            weights[self._columns[name]] += factor
        return weights

    def _told(self, found: Any) -> Optimum:
        """What a solver of scipy found."""
        values = {name: float(found.x[n]) for name, n in self._columns.items()}
        return Optimum(values, float(found.fun))

    def _matrix(self, rows: list[tuple[Term, ...]]) -> Any:
        """(rows, columns), sparse: factors of a column that stands twice in a row add up."""
        from scipy.sparse import csr_array

        cells = [(r, self._columns[name], x) for r, terms in enumerate(rows) for name, x in terms]
        at = [r for r, _, _ in cells], [c for _, c, _ in cells]
        return csr_array(([x for _, _, x in cells], at), shape=(len(rows), len(self._columns)))
