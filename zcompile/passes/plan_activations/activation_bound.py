"""The linear relaxation of the choice of what is kept for backward, solved by HiGHS.

Every value may be kept, made again and moved in parts, ops may run again in parts:

    minimise    seconds of ops that run again, of transfers that compute does not hide
    such that   a saved value is kept, made again and moved in parts that add up to one
                what is made again needs its op, and that what the op reads
                at every time that is looked at, what is surely held then fits

Times at which something is held that depends on when ops run again are left out, so its optimum is
below that of every answer that fits. scipy, which brings HiGHS, is an optional extra.
"""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zcompile.passes.plan_activations.activation_problem import AGAIN, BUSY, KEEP, Problem, answer

TIMES = 48
"""Times at which memory is looked at: the fullest of as many stretches of the same length."""


@dataclass(frozen=True)
class Relaxed:
    """actions  the largest part of each value
    seconds   the optimum
    """

    actions: tuple[str, ...]
    seconds: float


def is_available() -> bool:
    return importlib.util.find_spec("scipy") is not None


def relaxed(problem: Problem, ways: Sequence[str], begin: Sequence[str]) -> Relaxed | None:
    """The optimum; None without scipy, or if nothing fits.

    ways   what may be done to a value but to keep it: AGAIN, and tiers
    begin  what is done to values that nobody need keep
    """
    if not is_available():
        return None
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    program = _Program(problem, ways)
    rows, columns, numbers, limits = [], [], [], []
    for row, (parts, limit) in enumerate(program.constraints(begin)):
        limits.append(limit)
        for column, number in parts.items():
            rows.append(row)
            columns.append(column)
            numbers.append(number)
    matrix = coo_matrix((numbers, (rows, columns)), shape=(len(limits), program.size))
    found = linprog(program.cost(), A_ub=matrix.tocsr(), b_ub=limits, bounds=program.bounds(),
                    method="highs")  # fmt: skip
    if not found.success:
        return None
    return Relaxed(program.rounded(found.x, begin), max(0.0, float(found.fun)) * program.scale)


Parts = Mapping[int, float]
"""Column -> its factor in a constraint."""


class _Program:
    """Columns: per value one for each action; per op, that it runs again; two for what transfers
    take longer than compute; one for the bytes of slots."""

    def __init__(self, problem: Problem, ways: Sequence[str]) -> None:
        self.problem = problem
        self.actions = (KEEP, *dict.fromkeys(ways))
        self.ops = len(problem.values) * len(self.actions)
        self.over = self.ops + len(problem.makers)
        self.slots = self.over + 2
        self.size = self.slots + 1
        total = sum(maker.seconds for maker in problem.makers)
        self.scale = max(total, 1e-9)
        self.unit = float(max(problem.budget, 1))

    def column(self, value: int, action: str) -> int:
        return value * len(self.actions) + self.actions.index(action)

    def had(self, value: int) -> dict[int, float]:
        """That a value is there in backward."""
        return {self.column(value, action): -1.0 for action in self.actions}

    def tiers(self) -> list[str]:
        return [action for action in self.actions if action in self.problem.tiers]

    def cost(self) -> list[float]:
        problem = self.problem
        cost = [0.0] * self.size
        for number, value in enumerate(problem.values):
            for tier in self.tiers():
                away = problem.tiers[tier]
                seconds = BUSY * value.nbytes * (away.leave_s + away.back_s) + 2 * away.start_s
                cost[self.column(number, tier)] = seconds / self.scale
        for number, maker in enumerate(problem.makers):
            cost[self.ops + number] = maker.seconds / self.scale
        cost[self.over] = cost[self.over + 1] = 1.0
        return cost

    def bounds(self) -> list[tuple[float, float | None]]:
        bounds: list[tuple[float, float | None]] = [
            (0.0, 1.0 if self._may(value.wish, value.may_move, action) else 0.0)
            for value in self.problem.values
            for action in self.actions
        ]
        bounds += [(0.0, 1.0 if maker.may_repeat else 0.0) for maker in self.problem.makers]
        return [*bounds, (0.0, None), (0.0, None), (self.problem.window / self.unit, None)]

    def _may(self, wish: str, may_move: bool, action: str) -> bool:
        if action == AGAIN:
            return wish not in ("MUST_SAVE", "MUST_CPU_OFFLOAD")
        return action == KEEP or may_move

    def constraints(self, begin: Sequence[str]) -> Iterator[tuple[Parts, float]]:
        """Each: a sum over columns that is not more than a limit."""
        problem = self.problem
        for number, value in enumerate(problem.values):
            if value.readers:
                yield self.had(number), -1.0
            if AGAIN in self.actions:
                yield {self.column(number, AGAIN): 1.0, self.ops + value.maker: -1.0}, 0.0
        for number, maker in enumerate(problem.makers):
            for read in maker.reads:
                yield {**self.had(read), self.ops + number: 1.0}, 0.0
        yield from self._memory(begin)
        yield from self._links()

    def _memory(self, begin: Sequence[str]) -> Iterator[tuple[Parts, float]]:
        problem = self.problem
        weights = answer(problem, [KEEP] * len(begin)).slots
        times = self._times(begin)
        for at in sorted({*times, *(v.readers[0] for v in problem.values if v.readers)}):
            coming = {
                self.column(n, tier): v.nbytes / self.unit
                for n, v in enumerate(problem.values)
                for tier in self.tiers()
                if v.readers and v.readers[0] <= at <= v.readers[-1]
            }
            yield {**coming, self.slots: -1.0}, -weights[at] / self.unit
        yield {self.slots: -1.0}, -max(weights, default=0) / self.unit
        for at in times:
            parts: dict[int, float] = {self.slots: 1.0}
            held = problem.other[at]
            for number, value in enumerate(problem.values):
                if value.made <= at <= value.read:
                    held += value.nbytes
                elif value.read < at and at <= (value.readers or (problem.boundary,))[-1]:
                    parts[self.column(number, KEEP)] = value.nbytes / self.unit
            yield parts, (problem.budget - held) / self.unit

    def _times(self, begin: Sequence[str]) -> list[int]:
        held = answer(self.problem, begin).held
        step = max(1, len(held) // TIMES)
        stretches = (range(at, min(at + step, len(held))) for at in range(0, len(held), step))
        return sorted({max(s, key=held.__getitem__) for s in stretches} | {self.problem.boundary})

    def _links(self) -> Iterator[tuple[Parts, float]]:
        problem = self.problem
        for number, slack in enumerate(problem.slack_s):
            parts = {self.over + number: -1.0}
            for tier in self.tiers():
                away = problem.tiers[tier]
                rate = (away.leave_s, away.back_s)[number]
                for n, value in enumerate(problem.values):
                    parts[self.column(n, tier)] = rate * value.nbytes / self.scale
            if number:
                for n, maker in enumerate(problem.makers):
                    parts[self.ops + n] = -maker.seconds / self.scale
            yield parts, max(0.0, slack) / self.scale
        for tier in self.tiers():
            room = {self.column(n, tier): v.nbytes / self.unit
                    for n, v in enumerate(problem.values)}  # fmt: skip
            yield room, problem.tiers[tier].nbytes / self.unit

    def rounded(self, found: Sequence[float], begin: Sequence[str]) -> tuple[str, ...]:
        actions = []
        for number, value in enumerate(self.problem.values):
            parts = {a: float(found[self.column(number, a)]) for a in self.actions}
            largest = max(parts, key=lambda a: (parts[a], a == KEEP))
            wanted = value.readers or sum(parts.values()) > 0.5
            actions.append(largest if wanted else begin[number])
        return tuple(actions)
