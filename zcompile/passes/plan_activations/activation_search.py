"""One way of giving up values until what is left fits: greed, and what it may take back."""

from collections.abc import Iterator, Sequence

from zcompile.passes.plan_activations.activation_problem import AGAIN, BUSY, KEEP, Problem, answer

DEEPEST = 64
"""Ops that one value may want made again, one from the other, at a time."""
PART = 4
"""Of what is missing, so much is given up without looking again where the most is held then."""
TURNED = 16
"""The largest of what is given up, of which so many are given up in another way, if nothing else is
left to give up."""


class Search:
    """One way of giving up values until what is left fits.

    begin    actions it falls back to, one per value
    actions  where it stands; at first `begin`, unless it is told otherwise
    frugal   what frees most goes first, whatever it costs
    wholly   what is made again is so with all that it wants, not only with what is no smaller; of
             bytes freed, only as many count as are missing
    stays    a value that is not given up
    """

    def __init__(
        self,
        problem: Problem,
        ways: Sequence[str],
        begin: Sequence[str],
        *,
        actions: Sequence[str] | None = None,
        frugal: bool = False,
        wholly: bool = False,
        stays: int | None = None,
    ) -> None:
        self.frugal, self.wholly = frugal, wholly
        self.problem = problem
        self.ways = ways
        self.begin = begin
        self.actions = list(begin if actions is None else actions)
        self.answer = answer(problem, self.actions)
        self._refused: set[tuple[int, str]] = set()
        self._stays = stays

    @property
    def over(self) -> int:
        return self.answer.over(self.problem)

    def without(self, number: int, ways: Sequence[str], wished: Sequence[str]) -> "Search":
        """From here on, but with `number` as it is wished, and others given up for it."""
        actions = [wished[n] if n == number else a for n, a in enumerate(self.actions)]
        return Search(self.problem, ways, wished, actions=actions, wholly=True, stays=number)

    def run(self, also: Sequence[str] = ()) -> "Search":
        """Give up until it fits; in other ways too, where the first are not enough."""
        while self.over > 0 and (self._give_up_some() or self._otherwise()):
            pass
        if self.over > 0 and also:
            self.ways, self._refused = also, set()
            return self.run()
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

    def _otherwise(self) -> bool:
        """Give up in another way what is given up: what comes back needs room to come back to, and
        what is made again that of which it is made."""
        now, at = self._measure(), self._fullest()
        given = [n for n in self.given_up(self.begin) if self.actions[n] != KEEP]
        given.sort(key=lambda n: -self.problem.values[n].nbytes)
        for number, way in ((n, way) for n in given[:TURNED] for way in self.ways):
            if way != self.actions[number] and self._may(number, way):
                made = self._changes(number, way, at)
                if made is not None and self._takes(made[2], now):
                    self._refused.clear()
                    return True
        return False

    def _fullest(self) -> int:
        """The time at which most is held."""
        return self.answer.held.index(max(self.answer.held))

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
        at = self._fullest()
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
                    if self.wholly:
                        gain = min(gain, self.over)
                    if gain > 0:
                        cost = 1.0 if self.frugal else seconds * _weight(value.wish, way)
                        yield cost / gain, number, way, changes

    def _may(self, number: int, way: str) -> bool:
        value = self.problem.values[number]
        if number == self._stays:
            return False
        if way == AGAIN:
            repeats = self.problem.makers[value.maker].may_repeat
            return repeats and value.wish not in ("MUST_SAVE", "MUST_CPU_OFFLOAD")
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
        """`number` is made again, and of what that wants whatever is not smaller, or all."""
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
                too = self.wholly or source.nbytes >= problem.values[number].nbytes
                if too and self._may(read, AGAIN) and len(ops) < DEEPEST:
                    changes.append((read, AGAIN))
                    queue.append(read)
                else:
                    changes.append((read, KEEP))
                    gain -= source.nbytes if source.read < at else 0
        return seconds, gain, changes

    def _keep_again(self) -> None:
        """Undo what need not have been done, the most costly first."""
        by_cost = sorted(
            self.given_up(self.begin),
            key=lambda n: -self.seconds_of(n) / max(self.problem.values[n].nbytes, 1),
        )  # fmt: skip
        for number in by_cost:
            before, was = self.actions[number], self.answer
            self.actions[number] = self.begin[number]
            self.answer = answer(self.problem, self.actions)
            if self.over > 0 or self.answer.seconds > was.seconds:
                self.actions[number], self.answer = before, was

    def given_up(self, wished: Sequence[str]) -> list[int]:
        """What somebody wants back, and is not as it was wished."""
        wanted = self.answer.wanted
        return [n for n, a in enumerate(self.actions) if a != wished[n] and wanted[n] is not None]

    def seconds_of(self, number: int) -> float:
        """What it takes to have the value back as it is chosen, alone."""
        value, action = self.problem.values[number], self.actions[number]
        if action == AGAIN:
            return self.problem.makers[value.maker].seconds
        away = self.problem.tiers.get(action)
        return 0.0 if away is None else (away.leave_s + away.back_s) * value.nbytes


def _weight(wish: str, way: str) -> float:
    """What a preference makes a second count."""
    if wish == "PREFER_SAVE" and way == AGAIN:
        return 4.0
    return 0.25 if wish == "PREFER_CPU_OFFLOAD" and way != AGAIN else 1.0
