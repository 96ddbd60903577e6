"""Which values are kept for backward, which are made again, which are moved: chosen within budgets.

A knapsack with precedence: memory at every time is a constraint, and what is made again wants what
its op reads. It is solved greedily: while too much is held, the value is given up that costs the
fewest seconds per byte at the time at which the most is held; at the end whatever has come to fit
is kept again. Several such ways are tried, one of them from the rounded solution of the linear
relaxation (`activation_bound.py`), whose optimum says how far the best of them can be from the
least.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zcompile.activation_bound import relaxed
from zcompile.activation_problem import AGAIN, BUSY, KEEP, Answer, Problem, answer

DEEPEST = 64
"""Ops that one value may want made again, one from the other, at a time."""
PART = 4
"""Of what is missing, so much is given up without looking again where the most is held then."""
SAVED, REPEATED = ("MUST_SAVE", "PREFER_SAVE"), ("MUST_RECOMPUTE", "PREFER_RECOMPUTE")
MOVED = ("MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD")


@dataclass(frozen=True)
class Choice:
    """actions    one per value
    answer        what they take
    least_seconds of the linear relaxation: nothing that fits takes less; None: not known
    fits          within all budgets; else it is what needs least
    """

    actions: tuple[str, ...]
    answer: Answer
    least_seconds: float | None
    fits: bool

    @property
    def gap(self) -> float | None:
        """By how much more than the least it may take, as a part of it, at most."""
        if self.least_seconds is None or not self.fits:
            return None
        if self.answer.seconds <= self.least_seconds:
            return 0.0
        return self.answer.seconds / max(self.least_seconds, 1e-12) - 1


def choose(problem: Problem, ways: Sequence[str], quickly: bool = False) -> Choice:
    """The best answer found.

    ways     what may be done to a value but to keep it: AGAIN, and tiers
    quickly  look in one way only, and without a bound
    """
    wished = wishes(problem, ways)
    first = _Search(problem, ways, wished)
    if first.over <= 0:
        return Choice(tuple(wished), first.answer, None, True)
    if quickly:
        best = _nearest([first.run()], problem, ways, wished)
        return Choice(tuple(best.actions), best.answer, None, best.over <= 0)
    bound = relaxed(problem, ways, wished)
    tried = [first.run()]
    tried += [_Search(problem, [way], wished).run() for way in ways if len(ways) > 1]
    if bound is not None:
        tried.append(_Search(problem, ways, bound.actions).run())
    best = _nearest(tried, problem, ways, wished)
    least = None if bound is None else bound.seconds
    return Choice(tuple(best.actions), best.answer, least, best.over <= 0)


def _nearest(
    tried: "list[_Search]", problem: Problem, ways: Sequence[str], wished: Sequence[str]
) -> "_Search":
    """The least costly of those that fit. Where none does, another that only looks at bytes is
    tried too; what needs least is found without a look at seconds, which are measured."""
    if all(search.over > 0 for search in tried):
        tried = [*tried, _Search(problem, ways, wished, frugal=True).run()]
    return min(tried, key=lambda search: (max(0, search.over), search.answer.seconds))


def wishes(problem: Problem, ways: Sequence[str]) -> list[str]:
    """Where a search begins: everything is kept, but for what the user asked for."""
    actions = []
    for value in problem.values:
        action = KEEP
        if value.wish in REPEATED and problem.makers[value.maker].may_repeat:
            action = AGAIN
        elif value.wish in MOVED and value.may_move and "host" in problem.tiers:
            action = "host"
        actions.append(action)
    return actions


class _Search:
    """One way of giving up values until what is left fits.

    frugal  what frees most goes first, whatever it costs
    """

    def __init__(
        self, problem: Problem, ways: Sequence[str], begin: Sequence[str], frugal: bool = False
    ) -> None:
        self.frugal = frugal
        self.problem = problem
        self.ways = ways
        self.begin = begin
        self.actions = list(begin)
        self.answer = answer(problem, self.actions)
        self._refused: set[tuple[int, str]] = set()

    @property
    def over(self) -> int:
        return self.answer.over(self.problem)

    def run(self) -> "_Search":
        while self.over > 0 and self._give_up_some():
            pass
        if self.over <= 0:
            self._keep_again()
        return self

    def _give_up_some(self) -> bool:
        """What costs least per byte, of what makes the peak lower; False: nothing does.

        Where much is missing several go at once, a part of it: what is too many is kept again.
        """
        now = self._measure()
        rows = sorted(self._candidates(), key=lambda row: row[:3])
        several: list[tuple[int, str]] = []
        given, gone = set[int](), 0
        for _, number, _, changes in rows:
            nbytes = self.problem.values[number].nbytes
            if number in given or (gone + nbytes) * PART > self.over:
                continue
            given |= {changed for changed, _ in changes}
            gone += nbytes
            several += changes
        if len(given) > 1 and self._takes(several, now):
            return True
        for _, number, action, changes in rows:
            if self._takes(changes, now):
                return True
            self._refused.add((number, action))
        return False

    def _takes(self, changes: Sequence[tuple[int, str]], now: tuple[int, int, int]) -> bool:
        """Make these changes, if what is measured becomes less than `now`."""
        before, was = list(self.actions), self.answer
        for changed, to in changes:
            self.actions[changed] = to
        self.answer = answer(self.problem, self.actions)
        if self._measure() < now:
            return True
        self.actions, self.answer = before, was
        return False

    def _measure(self) -> tuple[int, int, int]:
        """Falls with each step: what is missing, and how often as much as most is held."""
        held = self.answer.held
        most = max(held)
        return self.over, most, held.count(most)

    def _candidates(self) -> Iterator[tuple[float, int, str, list[tuple[int, str]]]]:
        """(seconds per byte, value, action, changes) of what only waits at the peak."""
        found = self.answer
        at = found.held.index(max(found.held))
        for number, value in enumerate(self.problem.values):
            want = found.wanted[number]
            if want is None or self.actions[number] != KEEP:
                continue
            if not value.read < at < want[0] or not value.nbytes:
                continue
            for way in self.ways:
                if (number, way) in self._refused or not self._may(number, way):
                    continue
                made = self._changes(number, way, at)
                if made is not None:
                    seconds, gain, changes = made
                    if gain > 0:
                        cost = 1.0 if self.frugal else seconds * _weight(value.wish, way)
                        yield cost / gain, number, way, changes

    def _may(self, number: int, way: str) -> bool:
        value = self.problem.values[number]
        if way == AGAIN:
            repeats = self.problem.makers[value.maker].may_repeat
            return repeats and value.wish not in ("MUST_SAVE", *MOVED[:1])
        away = self.problem.tiers.get(way)
        if away is None or not value.may_move or value.wish == "MUST_RECOMPUTE":
            return False
        return self.answer.moved.get(way, 0) + value.nbytes <= away.nbytes

    def _changes(
        self, number: int, way: str, at: int
    ) -> tuple[float, int, list[tuple[int, str]]] | None:
        """Seconds it adds, bytes that are gone at time `at`, and what changes."""
        value = self.problem.values[number]
        if way != AGAIN:
            moved = dict(self.answer.moved)
            moved[way] = moved.get(way, 0) + value.nbytes
            away = self.problem.tiers[way]
            return self._moved_s(moved) + 2 * away.start_s, value.nbytes, [(number, way)]
        return self._again(number, at)

    def _moved_s(self, moved: dict[str, int]) -> float:
        tiers = self.problem.tiers
        added = 0.0
        for rate, slack in (("leave_s", self.problem.slack_s[0]),
                            ("back_s", self.problem.slack_s[1] + self.answer.again_s)):  # fmt: skip
            now, then = (
                sum(n * float(getattr(tiers[tier], rate)) for tier, n in each.items())
                for each in (self.answer.moved, moved)
            )
            slack = max(0.0, slack)
            added += max(0.0, then - slack) - max(0.0, now - slack) + BUSY * (then - now)
        return added

    def _again(self, number: int, at: int) -> tuple[float, int, list[tuple[int, str]]] | None:
        """`number` is made again, and of what that wants whatever is not smaller than it."""
        problem, found = self.problem, self.answer
        seconds, gain = 0.0, problem.values[number].nbytes
        changes = [(number, AGAIN)]
        queue, seen = [number], {number}
        ops: set[int] = set()
        while queue:
            maker = problem.values[queue.pop()].maker
            if maker in found.repeats or maker in ops:
                continue
            ops.add(maker)
            seconds += problem.makers[maker].seconds
            for read in problem.makers[maker].reads:
                if read in seen or found.wanted[read] is not None:
                    continue
                seen.add(read)
                source = problem.values[read]
                large = source.nbytes >= problem.values[number].nbytes
                if large and problem.makers[source.maker].may_repeat and len(ops) < DEEPEST:
                    changes.append((read, AGAIN))
                    queue.append(read)
                else:
                    changes.append((read, KEEP))
                    gain -= source.nbytes if source.read < at else 0
        return seconds, gain, changes

    def _keep_again(self) -> None:
        """Undo what need not have been done, the most costly first."""
        by_cost = sorted(
            (n for n, action in enumerate(self.actions)
             if action != self.begin[n] and self.answer.wanted[n] is not None),
            key=lambda n: -self._cost(n),
        )  # fmt: skip
        for number in by_cost:
            before, was = self.actions[number], self.answer
            self.actions[number] = self.begin[number]
            self.answer = answer(self.problem, self.actions)
            if self.over > 0 or self.answer.seconds > was.seconds:
                self.actions[number], self.answer = before, was

    def _cost(self, number: int) -> float:
        value, action = self.problem.values[number], self.actions[number]
        if action == AGAIN:
            return self.problem.makers[value.maker].seconds / max(value.nbytes, 1)
        away = self.problem.tiers.get(action)
        return 0.0 if away is None else away.leave_s + away.back_s


def _weight(wish: str, way: str) -> float:
    """What a preference makes a second count."""
    if wish == "PREFER_SAVE" and way == AGAIN:
        return 4.0
    return 0.25 if wish == "PREFER_CPU_OFFLOAD" and way != AGAIN else 1.0


__all__ = ["Choice", "choose", "wishes"]
