"""Chooses which values are saved for backward, recomputed or offloaded, within budgets. Pure.

The problem (`problem.py`) is a knapsack with precedence: memory at every time is a constraint, and
recomputing wants the operands of the op. It is solved greedily (`Search`): while too many bytes are
live, the value is given up that costs the fewest seconds per byte at the peak; at the end every
value that has come to fit is saved again. Several such searches are tried, one of them from the
rounded solution of the linear relaxation (`relaxed`), whose optimum says how far the best of them
can be from the optimum; where that is far, also from forward cut into segments of which backward
recomputes one at a time (`segments.py`). Of the best, the costliest values are exchanged for others
(`choose`).

In the relaxation every value may be saved, recomputed and offloaded in parts, and ops may run again
in parts:

    minimise    seconds of ops that run again, of transfers that compute does not hide
    such that   a saved value is saved, recomputed and offloaded in parts that add up to one
                a recomputed value needs its op, and that op its operands
                at every time that is looked at, the bytes that are surely live then fit

Bytes whose time depends on when ops run again are left out, so its optimum is below that of every
answer that fits.

The device is shared between values that wait for backward and slots for fetches (`split`). A byte
of slots lets fetches start earlier, and parameters and their gradients rest on the device; a byte
of values saves recomputing or offloading them. So a few windows for slots are tried, from the
smallest that will do to one in which everything could rest; for each the values are chosen, and the
fastest is taken.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zcompile.ir.types import NEVER_RECOMPUTED, CheckpointPolicy
from zcompile.memory.linear_program import Column, LinearProgram, Term
from zcompile.passes.plan_activations.evaluation import Evaluation
from zcompile.passes.plan_activations.problem import (
    BUSY,
    KEEP,
    MOVED,
    RECOMPUTE,
    REPEATED,
    Answer,
    Problem,
    answer,
)
from zcompile.passes.plan_activations.segments import segments

TIMES = 48
"""Times at which the relaxation bounds memory: the peak of each of so many stretches of equal
length."""


@dataclass(frozen=True)
class Relaxed:
    """The optimum of the relaxation.

    actions  the largest part of each value
    seconds  of the optimum
    """

    actions: tuple[str, ...]
    seconds: float


def relaxed(problem: Problem, ways: Sequence[str], begin: Sequence[str]) -> Relaxed | None:
    """The optimum of the relaxation; None if nothing fits.

    ways   actions besides saving a value: RECOMPUTE, and tiers
    begin  actions of values that nobody need save
    """
    relaxation = _Relaxation(problem, ways)
    found = relaxation.program(begin).minimised(*relaxation.costs())
    if found is None:
        return None
    actions = relaxation.rounded(found.values, begin)
    return Relaxed(actions, max(0.0, found.cost) * relaxation.scale)


class _Relaxation:
    """The linear program of the relaxation.

    Columns: (value, action), a part of a value; ("op", n), that it runs again; ("over", phase),
    seconds of transfers that compute does not hide; "slots", bytes for fetches.
    """

    def __init__(self, problem: Problem, ways: Sequence[str]) -> None:
        self.problem = problem
        self.actions = (KEEP, *dict.fromkeys(ways))
        self.tiers = [action for action in self.actions if action in problem.tiers]
        self.scale = max(sum(maker.seconds for maker in problem.makers), 1e-9)
        self.unit = float(max(problem.budget, 1))

    def costs(self) -> Iterator[Term]:
        for number, value in enumerate(self.problem.values):
            for tier in self.tiers:
                away = self.problem.tiers[tier]
                seconds = BUSY * value.nbytes * (away.leave_s + away.back_s) + 2 * away.start_s
                yield (number, tier), seconds / self.scale
        for number, maker in enumerate(self.problem.makers):
            yield ("op", number), maker.seconds / self.scale
        yield from ((("over", phase), 1.0) for phase in (0, 1))

    def program(self, begin: Sequence[str]) -> LinearProgram:
        problem, program = self.problem, LinearProgram()
        for number, value in enumerate(problem.values):
            for action in self.actions:
                may = self._may(value.wish, value.may_move, action)
                program.column((number, action), highest=1.0 if may else 0.0)
        for number, maker in enumerate(problem.makers):
            program.column(("op", number), highest=1.0 if maker.may_repeat else 0.0)
        for phase in (0, 1):
            program.column(("over", phase))
        program.column("slots", lowest=problem.window / self.unit)
        self._what_is_read_is_there(program)
        self._bytes_fit(program, begin)
        self._links_carry(program)
        return program

    def _may(self, wish: CheckpointPolicy | None, may_move: bool, action: str) -> bool:
        if action == RECOMPUTE:
            return wish not in NEVER_RECOMPUTED
        return action == KEEP or may_move

    def _there(self, value: int) -> list[Term]:
        """Terms that sum to minus the parts of a value that are there in backward."""
        return [((value, action), -1.0) for action in self.actions]

    def _what_is_read_is_there(self, program: LinearProgram) -> None:
        for number, value in enumerate(self.problem.values):
            if value.readers:
                program.at_most(-1.0, *self._there(number))
            if RECOMPUTE in self.actions:
                program.at_most(0.0, ((number, RECOMPUTE), 1.0), (("op", value.maker), -1.0))
        for number, maker in enumerate(self.problem.makers):
            for read in maker.reads:
                program.at_most(0.0, *self._there(read), (("op", number), 1.0))

    def _bytes_fit(self, program: LinearProgram, begin: Sequence[str]) -> None:
        problem = self.problem
        weights = answer(problem, [KEEP] * len(begin)).slots
        times = self._times(begin)
        for at in sorted({*times, *(v.readers[0] for v in problem.values if v.readers)}):
            coming = [
                ((n, tier), v.nbytes / self.unit)
                for n, v in enumerate(problem.values)
                for tier in self.tiers
                if v.readers and v.readers[0] <= at <= v.readers[-1]
            ]
            program.at_most(-weights[at] / self.unit, *coming, ("slots", -1.0))
        program.at_most(-max(weights, default=0) / self.unit, ("slots", -1.0))
        for at in times:
            kept: list[Term] = []
            held = problem.other[at]
            for number, value in enumerate(problem.values):
                if value.made <= at <= value.read:
                    held += value.nbytes
                elif value.read < at and at <= (value.readers or (problem.boundary,))[-1]:
                    kept.append(((number, KEEP), value.nbytes / self.unit))
            program.at_most((problem.budget - held) / self.unit, ("slots", 1.0), *kept)

    def _times(self, begin: Sequence[str]) -> list[int]:
        held = answer(self.problem, begin).held
        step = max(1, len(held) // TIMES)
        stretches = (range(at, min(at + step, len(held))) for at in range(0, len(held), step))
        return sorted({max(s, key=held.__getitem__) for s in stretches} | {self.problem.boundary})

    def _links_carry(self, program: LinearProgram) -> None:
        problem = self.problem
        for phase, slack in enumerate(problem.slack_s):
            terms: list[Term] = [(("over", phase), -1.0)]
            for tier in self.tiers:
                away = problem.tiers[tier]
                rate = (away.leave_s, away.back_s)[phase]
                terms += [
                    ((n, tier), rate * v.nbytes / self.scale) for n, v in enumerate(problem.values)
                ]
            if phase:  # what runs again hides transfers too
                terms += [
                    (("op", n), -maker.seconds / self.scale)
                    for n, maker in enumerate(problem.makers)
                ]
            program.at_most(max(0.0, slack) / self.scale, *terms)
        for tier in self.tiers:
            sizes = [((n, tier), v.nbytes / self.unit) for n, v in enumerate(problem.values)]
            program.at_most(problem.tiers[tier].nbytes / self.unit, *sizes)

    def rounded(self, found: Mapping[Column, float], begin: Sequence[str]) -> tuple[str, ...]:
        actions = []
        for number, value in enumerate(self.problem.values):
            parts = {action: found[number, action] for action in self.actions}
            largest = max(parts, key=lambda a: (parts[a], a == KEEP))
            wanted = value.readers or sum(parts.values()) > 0.5
            actions.append(largest if wanted else begin[number])
        return tuple(actions)


DEEPEST = 64
"""Most ops that one value may want recomputed at a time, one from the other."""
PART = 4
"""1/PART of the missing bytes is given up at once, without looking again where the peak is then."""
MOST_RETRIED = 16
"""Number of the largest values given up that are tried with another action, if nothing else is left
to give up."""


class Search:
    """A greedy search that gives up values until the others fit.

    begin    actions it falls back to, one per value
    now      current actions and what they take; at first of `begin`, unless others are given
    frugal   the value that frees most bytes goes first, whatever it costs
    wholly   a value is recomputed with all operands that this wants, not only with those that are
             no smaller; and bytes freed beyond the missing ones do not count
    stays    a value that is not given up
    borders  values that are not recomputed: see `segments.py`
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
        borders: frozenset[int] = frozenset(),
    ) -> None:
        self.frugal, self.wholly = frugal, wholly
        self.problem = problem
        self.ways = ways
        self.begin = begin
        self.now = Evaluation(problem, begin if actions is None else actions)
        self._refused: set[tuple[int, str]] = set()
        self._allowed: dict[int, tuple[str, ...]] = {}
        self._stays, self._borders = stays, borders

    @property
    def actions(self) -> list[str]:
        return self.now.actions

    @property
    def over(self) -> int:
        """Bytes that are missing; not more than zero, if it fits."""
        return self.now.over

    def without(self, number: int, ways: Sequence[str], wished: Sequence[str]) -> "Search":
        """A search from here on that gives `number` its wished action, and gives up others for
        it."""
        actions = [wished[n] if n == number else a for n, a in enumerate(self.actions)]
        return Search(
            self.problem,
            ways,
            wished,
            actions=actions,
            wholly=True,
            stays=number,
            borders=self._borders,
        )

    def run(self, also: Sequence[str] = ()) -> "Search":
        """Give up values until the others fit.

        also  actions for another search, where those of this one are not enough
        """
        while self.over > 0 and (self._give_up_some() or self._change_action()):
            pass
        if self.over > 0 and also:
            self.ways, self._refused, self._allowed = also, set(), {}
            return self.run()
        if self.over <= 0:
            self._save_again()
        return self

    def _give_up_some(self) -> bool:
        """Give up the value that costs least per byte and lowers the peak; False: there is none.

        Where many bytes are missing, several values are given up at once, for a part of the bytes:
        a value too many is saved again at the end.
        """
        now = self.now.measure()
        rows = sorted(self._candidates())
        several: list[tuple[int, str]] = []
        given, gone, over = set[int](), 0, self.over
        for _, number, _, changes in rows:
            nbytes = self.problem.values[number].nbytes
            if number in given or (gone + nbytes) * PART > over:
                continue
            given |= {changed for changed, _ in changes}
            gone += nbytes
            several += changes
        if len(given) > 1 and self._improves(several, now):
            return True
        for _, number, action, changes in rows:
            if self._improves(changes, now):
                return True
            self._refused.add((number, action))
        return False

    def _change_action(self) -> bool:
        """Give up a value in another way than it is given up.

        A value that is read back needs room to come back to, and one that is recomputed its
        operands.
        """
        now, at = self.now.measure(), self.now.peak_time()
        given = [n for n in self.given_up(self.begin) if self.actions[n] != KEEP]
        given.sort(key=lambda n: -self.problem.values[n].nbytes)
        for number, way in ((n, way) for n in given[:MOST_RETRIED] for way in self.ways):
            if way == self.actions[number] or way not in self._ways_of(number):
                continue
            if way != RECOMPUTE and not self._has_room(number, way):
                continue
            _, _, changes = self._changes(number, way, at)
            if self._improves(changes, now):
                self._refused.clear()
                return True
        return False

    def _improves(self, changes: Sequence[tuple[int, str]], now: tuple[int, int, int]) -> bool:
        """Make these changes, if the measure becomes less than `now`; returns whether."""
        other = self.now.changed(changes)
        if other.measure() < now:
            self.now = other
            return True
        return False

    def _candidates(self) -> Iterator[tuple[float, int, str, list[tuple[int, str]]]]:
        """(seconds per byte, value, action, changes) of values that only wait for backward at the
        peak."""
        at, over = self.now.peak_time(), self.over
        actions, wanted = self.actions, self.now.wanted
        moving: dict[tuple[str, int, CheckpointPolicy | None], float] = {}
        """(tier, bytes, wish) -> seconds per byte, the same for many values."""
        for number, value in enumerate(self.problem.values):
            want = wanted[number]
            if want is None or actions[number] != KEEP:
                continue
            if not value.read < at < want[0] or not value.nbytes:
                continue
            for way in self._ways_of(number):
                if at <= value.gone(way) or (number, way) in self._refused:
                    continue
                moves = way != RECOMPUTE
                if moves and not self._has_room(number, way):
                    continue
                kind = (way, value.nbytes, value.wish)
                if moves and kind in moving:
                    yield moving[kind], number, way, [(number, way)]
                    continue
                seconds, gain, changes = self._changes(number, way, at)
                if self.wholly:
                    gain = min(gain, over)
                if gain > 0:
                    cost = 1.0 if self.frugal else seconds * _weight(value.wish, way)
                    if moves:
                        moving[kind] = cost / gain
                    yield cost / gain, number, way, changes

    def _ways_of(self, number: int) -> tuple[str, ...]:
        """The actions that a value may be given where there is room for them."""
        if number not in self._allowed:
            self._allowed[number] = tuple(way for way in self.ways if self._is_allowed(number, way))
        return self._allowed[number]

    def _is_allowed(self, number: int, way: str) -> bool:
        """Whether a value may be given an action, if there is room."""
        value = self.problem.values[number]
        if number == self._stays:
            return False
        if way == RECOMPUTE:
            repeats = self.problem.makers[value.maker].may_repeat
            return repeats and value.wish not in NEVER_RECOMPUTED and number not in self._borders
        moves = way in self.problem.tiers and value.may_move
        return moves and value.wish is not CheckpointPolicy.MUST_RECOMPUTE

    def _has_room(self, number: int, tier: str) -> bool:
        """Whether a tier has room for one more value."""
        nbytes = self.problem.values[number].nbytes
        return self.now.moved.get(tier, 0) + nbytes <= self.problem.tiers[tier].nbytes

    def _changes(self, number: int, way: str, at: int) -> tuple[float, int, list[tuple[int, str]]]:
        """Seconds that an action adds, bytes that are free at time `at`, and the changes it
        makes."""
        if way != RECOMPUTE:
            nbytes = self.problem.values[number].nbytes
            return self.now.offload_seconds(way, nbytes), nbytes, [(number, way)]
        return self._recompute(number, at)

    def _recompute(self, number: int, at: int) -> tuple[float, int, list[tuple[int, str]]]:
        """The same for recomputing `number`, with operands that are no smaller, or all."""
        problem, found = self.problem, self.now
        seconds, gain = 0.0, problem.values[number].nbytes
        changes = [(number, RECOMPUTE)]
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
                if too and len(ops) < DEEPEST and self._is_allowed(read, RECOMPUTE):
                    changes.append((read, RECOMPUTE))
                    queue.append(read)
                else:
                    changes.append((read, KEEP))
                    gain -= source.nbytes if source.read < at else 0
        return seconds, gain, changes

    def _save_again(self) -> None:
        """Undo actions that turned out not to be needed, the most costly first."""
        by_cost = sorted(
            self.given_up(self.begin),
            key=lambda n: -self.seconds_of(n) / max(self.problem.values[n].nbytes, 1),
        )
        for number in by_cost:
            if self.begin[number] == KEEP and self.now.least_over_saving(number) > 0:
                continue
            other = self.now.changed([(number, self.begin[number])])
            if other.over <= 0 and other.seconds <= self.now.seconds:
                self.now = other

    def given_up(self, wished: Sequence[str]) -> list[int]:
        """Values that backward wants and whose action is not as it was wished."""
        wanted = self.now.wanted
        return [n for n, a in enumerate(self.actions) if a != wished[n] and wanted[n] is not None]

    def seconds_of(self, number: int) -> float:
        """Seconds of the action of one value, alone."""
        value, action = self.problem.values[number], self.actions[number]
        if action == RECOMPUTE:
            return self.problem.makers[value.maker].seconds
        away = self.problem.tiers.get(action)
        return 0.0 if away is None else (away.leave_s + away.back_s) * value.nbytes


def _weight(wish: CheckpointPolicy | None, way: str) -> float:
    """Factor of the seconds of an action, by the user's preference."""
    if wish is CheckpointPolicy.PREFER_SAVE and way == RECOMPUTE:
        return 4.0
    return 0.25 if wish is CheckpointPolicy.PREFER_CPU_OFFLOAD and way != RECOMPUTE else 1.0


EXCHANGED = 8
"""Number of the costliest values given up that are saved instead, with others given up for them, if
that costs less."""
NEAR = 1.1
"""Ratio to the bound below which nothing else is tried: each exchange is a search."""
FURTHER = 2
"""Number of cuts into segments that are tried beyond the first that fits: more of them recompute
less at a time, and have more to offload."""


@dataclass(frozen=True)
class Choice:
    """A choice of actions.

    actions        one per value
    answer         what they take
    least_seconds  lower bound by the linear relaxation; None: not known
    fits           within all budgets; else it is the choice that needs least
    """

    actions: tuple[str, ...]
    answer: Answer
    least_seconds: float | None
    fits: bool

    @property
    def gap(self) -> float | None:
        """Upper bound on the excess over the optimum, as a part of it; None: not known."""
        if self.least_seconds is None or not self.fits:
            return None
        if self.answer.seconds <= self.least_seconds:
            return 0.0
        return self.answer.seconds / max(self.least_seconds, 1e-12) - 1


def choose(problem: Problem, ways: Sequence[str]) -> Choice:
    """The best answer found.

    ways  actions besides saving a value: RECOMPUTE, and tiers
    """
    return _Choosing(problem, ways).best()


def as_wished(problem: Problem) -> Choice:
    """Everything saved, but for what the user asked for."""
    wished = wishes(problem)
    found = answer(problem, wished)
    return Choice(tuple(wished), found, None, found.over(problem) <= 0)


class _Choosing:
    """Searches for an answer to one problem: quickly at first, and then for the best one, which
    goes on from the searches that were made before."""

    def __init__(self, problem: Problem, ways: Sequence[str]) -> None:
        self.problem, self.ways = problem, ways
        self.wished = wishes(problem)
        first = Search(problem, ways, self.wished)
        self._fits_as_wished = first.over <= 0
        self._first = first if self._fits_as_wished else first.run()
        self._cuts = segments(problem, self.wished)
        self._in_cuts: list[Search] = []
        """A search from each cut into segments that was asked for."""

    def quickly(self) -> Choice:
        """An answer of few searches, and without a bound."""
        if self._fits_as_wished:
            return self._choice(self._first, None)
        tried = [self._first]
        if self._first.over > 0 and RECOMPUTE in self.ways:
            tried += self._in_segments(further=0)
        return self._choice(self._nearest(tried), None)

    def best(self) -> Choice:
        """The best answer found."""
        problem, ways, wished = self.problem, self.ways, self.wished
        if self._fits_as_wished:
            return self._choice(self._first, None)
        bound = relaxed(problem, ways, wished)
        tried = [self._first]
        if len(ways) > 1:
            tried += [Search(problem, [way], wished, wholly=True).run(also=ways) for way in ways]
        tried.append(Search(problem, ways, wished, wholly=True).run())
        if bound is not None:
            tried.append(Search(problem, ways, bound.actions).run())
        least = None if bound is None else bound.seconds
        if RECOMPUTE in ways and not any(_is_near(search, least) for search in tried):
            tried += self._in_segments(further=FURTHER)
        best = self._nearest(tried)
        if best.over <= 0 and not _is_near(best, least):
            best = _exchanged(best, ways, wished)
        return self._choice(best, least)

    def _choice(self, search: Search, least: float | None) -> Choice:
        actions = tuple(search.actions)
        return Choice(actions, answer(self.problem, actions), least, search.over <= 0)

    def _in_segments(self, further: int) -> list[Search]:
        """Searches from forward in ever more segments, up to the first that fits and `further`
        ones."""
        tried: list[Search] = []
        for search in self._from_cuts():
            tried.append(search)
            if search.over <= 0:
                if not further:
                    break
                further -= 1
        return tried

    def _from_cuts(self) -> Iterator[Search]:
        """A search from each cut into segments, made when it is asked for, and only once."""
        yield from self._in_cuts
        for cut in self._cuts:
            self._in_cuts.append(
                Search(
                    self.problem,
                    self.ways,
                    self.wished,
                    actions=cut.actions,
                    borders=cut.borders,
                ).run()
            )
            yield self._in_cuts[-1]

    def _nearest(self, tried: list[Search]) -> Search:
        """The least costly of the searches that fit.

        Where none does, another one that only looks at bytes is tried too: the choice that needs
        least is found without a look at seconds, which are measured.
        """
        if all(search.over > 0 for search in tried):
            tried = [*tried, self._frugal]
        return min(tried, key=lambda search: (max(0, search.over), search.now.seconds))

    @cached_property
    def _frugal(self) -> Search:
        return Search(self.problem, self.ways, self.wished, frugal=True).run()


def _is_near(search: Search, least: float | None) -> bool:
    """Whether a search fits and is near the bound."""
    return search.over <= 0 and least is not None and search.now.seconds <= NEAR * least


def _exchanged(best: Search, ways: Sequence[str], wished: Sequence[str]) -> Search:
    """The search with its costliest values saved after all, and others given up for them, where
    that costs less.

    Greed, which gives up one by one, takes a large value for the few bytes missing at last.
    """
    seen = set[int]()
    while len(seen) < EXCHANGED:
        given = [n for n in best.given_up(wished) if n not in seen]
        if not given:
            break
        number = max(given, key=best.seconds_of)
        seen.add(number)
        other = best.without(number, ways, wished).run()
        if other.over <= 0 and other.now.seconds < best.now.seconds:
            best = other
    return best


def wishes(problem: Problem) -> list[str]:
    """The actions that a search begins with: everything is saved, but for what the user asked
    for."""
    actions = []
    for value in problem.values:
        action = KEEP
        if value.wish in REPEATED and problem.makers[value.maker].may_repeat:
            action = RECOMPUTE
        elif value.wish in MOVED and value.may_move and "host" in problem.tiers:
            action = "host"
        actions.append(action)
    return actions


WINDOWS = (1.0, 1.5, 2.0, 4.0)
"""Windows that are tried, as multiples of the smallest that holds parameters read together."""
RESTING = (0.5, 1.0, 2.0, 4.0)
"""Further windows: twice the smallest, and room for so many times all parameters: 2 with their
gradients, 4 with two states of each as well, or with values read back."""
UPDATED = 3
"""Bytes that an update writes, per byte of its weight: that, and two states, as Adam's. Which
optimizer it will be is not known when activations are chosen."""
STREAMED_S = 0.5e-3
"""Seconds of the host for a parameter that is fetched twice and whose gradient is sent: the order
of what it takes on two cores. The same everywhere, so that a plan does not depend on the hour it
was made in."""


@dataclass(frozen=True)
class StreamingLoad:
    """Transfers of weights, gradients and states in forward and backward.

    compute_s  seconds of compute in each
    weights_s  seconds that links are busy in each, if no weights rest on the device
    nbytes     of all weights
    count      of weights whose transfers the host starts in compute's stead
    updates_s  seconds that links to the device and off it are busy with updates in forward, beside
               its weights, if nothing rests on the device
    apart      links to the device and off it carry at once
    """

    compute_s: tuple[float, float]
    weights_s: tuple[float, float]
    nbytes: int
    count: int = 0
    updates_s: tuple[float, float] = (0.0, 0.0)
    apart: bool = False

    def streamed(self, room: int) -> float:
        """The part of the weights that streams, where so many bytes may rest on the device: they
        rest with their gradients."""
        return 1 - min(1.0, room / max(1, 2 * self.nbytes))

    def links_s(self, phase: int, room: int) -> tuple[float, float]:
        """Seconds that links to the device and off it are busy in a phase, where so many bytes may
        rest there."""
        weights_s = self.weights_s[phase] * self.streamed(room)
        if phase:
            return weights_s, 0.0
        moving = 1 - min(1.0, room / max(1, UPDATED * self.nbytes))
        return weights_s + self.updates_s[0] * moving, self.updates_s[1] * moving

    def slack_s(self, room: int) -> tuple[float, float]:
        """As in `Problem`, where so many bytes may rest on the device."""
        ahead, off = self.links_s(0, room)
        back, _ = self.links_s(1, room)
        forward = off if self.apart else ahead + off
        return self.compute_s[0] - forward, self.compute_s[1] - back


def split(problem: Problem, streams: StreamingLoad, ways: Sequence[str], margin: int = 0) -> Choice:
    """The fastest answer to `problem` over several windows.

    What the links can carry beside comes from `streams`: the more rests in the window, the more.

    margin  bytes of the budget to leave free
    """
    problem = replace(problem, budget=problem.budget - margin)
    begin = answer(problem, wishes(problem))
    least = max(begin.slots, default=0)
    rest = problem.budget - max(begin.held, default=0)
    windows = sorted(
        {
            *(int(least * part) for part in WINDOWS),
            max(rest, least),
            *(2 * least + int(streams.nbytes * part) for part in RESTING),
        }
    )

    def choosing(window: int) -> _Choosing:
        slack_s = streams.slack_s(max(0, window - 2 * least))
        return _Choosing(replace(problem, window=window, slack_s=slack_s), ways)

    best: tuple[bool, float, int] | None = None
    made: Choice | None = None
    begun: dict[int, _Choosing] = {}
    for window in windows:
        if made is None or window > max(made.answer.slots, default=0):
            begun[window] = choosing(window)
            made = begun[window].quickly()
        took = (not made.fits, seconds(problem, streams, made), window)
        best = took if best is None else min(best, took)
        if not made.fits:
            break  # a larger window leaves less for values
    assert best is not None, "at least the smallest window is tried"
    window = best[2]
    return (begun.get(window) or choosing(window)).best()


class Solved:
    """Choices that were made: an equal problem has the same, and is not searched again.

    What is cut in a trial is cut equally in the graph itself, and asks again what the trial asked.
    """

    def __init__(self) -> None:
        self._made: list[tuple[object, Choice]] = []
        """What was asked, and what was chosen."""

    def split(
        self, problem: Problem, streams: StreamingLoad, ways: Sequence[str], margin: int = 0
    ) -> Choice:
        """As `split`."""
        asked = (problem, streams, tuple(ways), margin)
        for before, choice in self._made:
            if before == asked:
                return choice
        self._made.append((asked, split(problem, streams, ways, margin)))
        return self._made[-1][1]


def seconds(problem: Problem, streams: StreamingLoad, made: Choice) -> float:
    """Seconds of forward and backward together.

    A phase takes as long as its compute or its links, and as both together where no fetch can start
    before the reader of the parameter before it. Besides, transfers that the host starts take its
    time, and hidden transfers a part of theirs.
    """
    found = made.answer
    least = max(1, max(found.slots, default=0))
    window = problem.budget - max(found.held, default=0)
    ahead = min(1.0, max(0.0, window / least - 1))
    room = max(0, window - 2 * least)
    total = STREAMED_S * streams.count * streams.streamed(room)
    for phase in (0, 1):
        compute = streams.compute_s[phase] + (found.again_s if phase else 0.0)
        to, off = streams.links_s(phase, room)
        for tier, nbytes in found.moved.items():
            away = problem.tiers[tier]
            to += nbytes * away.back_s if phase else 0.0
            off += 0.0 if phase else nbytes * away.leave_s
        links = max(to, off) if streams.apart else to + off
        total += max(compute, links) + (1 - ahead) * min(compute, links) + BUSY * (to + off)
    return total
