"""Evaluates changes of an answer step by step: what a search asks thousands of times.

`problem.answer` says what a list of actions takes, from nothing: its time grows with the number of
values, ops and times. A search changes a few values at a time, so `Evaluation.changed` copies the
curves and takes out and puts in only what those change: the values themselves, the ops that make
them, and what those ops read, from the last op to the first. Both give the same numbers, to the
bit. A change that a search does not take costs nothing more: what was before it is still there.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from zcompile.passes.plan_activations.problem import (
    BUSY,
    KEEP,
    RECOMPUTE,
    Problem,
    exposed_seconds,
    is_passing,
    passing_bytes,
)

Wanted = tuple[int, int] | None
Curve = NDArray[np.int64]


@dataclass
class Curves:
    """Bytes over time.

    held        of values, at each time: int64 [times]
    most_held   the largest of them
    most_slots  the most bytes that slots take, of weights and of values that are read back
    moved       tier -> bytes, in the order of the first value that is moved to each
    over        as `Answer.over`, once somebody has asked
    again_s     seconds of compute that is done again, once somebody has asked
    offload_s   as `Evaluation.offload_seconds`, of what somebody has asked
    """

    held: Curve
    most_held: int
    most_slots: int
    moved: Mapping[str, int]
    over: int | None = None
    again_s: float | None = None
    offload_s: dict[tuple[str, int], float] = field(default_factory=dict)


class Evaluation:
    """What a list of actions takes; other actions are another evaluation (`changed`).

    actions  one per value
    wanted   per value: first and last time at which backward needs it; None: it does not
    repeats  op -> time at which backward runs it again
    moved    tier -> bytes that are moved there
    """

    def __init__(self, problem: Problem, actions: Sequence[str]) -> None:
        self.problem = problem
        self.actions = list(actions)
        self.wanted: list[Wanted] = [
            (v.readers[0], v.readers[-1]) if v.readers else None for v in problem.values
        ]
        self.repeats: dict[int, int] = {}
        self.moved: dict[str, int] = {}
        times = len(problem.other)
        self._held: Curve = np.zeros(times + 1, np.int64)
        self._slots: Curve = np.zeros(times + 1, np.int64)
        """Bytes that begin to be held at a time, less those that end to be."""
        self._most_slots: int | None = None
        """The most bytes that slots take; None: to be found anew."""
        self._other: Curve = np.array(problem.other, np.int64)
        self._passing: Curve = np.zeros(times, np.int64)
        """Bytes that ops which run again at a time hold while they do, beside."""
        self._chains: dict[int, tuple[int, ...]] = {}
        """Time -> the ops that run again then, ascending."""
        self._stale: set[int] = set()
        """Times of which `_passing` is to be found anew."""
        self._repeated: list[int] = []
        """Negated numbers of the ops in `repeats`, ascending: the last op comes first."""
        self._away: list[int] = []
        """Values that are moved, ascending."""
        self._curves: Curves | None = None
        for number in range(len(problem.values)):
            self._put_value(number, 1)
        for number in range(len(problem.weights)):
            self._put_weight(number, 1)
        self._update(range(len(problem.makers)))

    def changed(self, changes: Iterable[tuple[int, str]]) -> "Evaluation":
        """What is taken once the actions of some values are changed."""
        other = self._copied()
        makers = set()
        for number, action in changes:
            if other.actions[number] != action:
                other._put_value(number, -1)
                other.actions[number] = action
                other._put_value(number, 1)
                makers.add(self.problem.values[number].maker)
        other._update(makers)
        return other

    def asked_of(self, problem: Problem) -> "Evaluation":
        """The same actions in a problem of another window, budget or links."""
        other = self._copied()
        other.problem = problem
        return other

    def _copied(self) -> "Evaluation":
        other = copy(self)
        other.actions, other.wanted = self.actions.copy(), self.wanted.copy()
        other.repeats, other.moved = self.repeats.copy(), self.moved.copy()
        other._held, other._slots = self._held.copy(), self._slots.copy()
        other._passing, other._stale = self._passing.copy(), self._stale.copy()
        other._chains, other._repeated = self._chains.copy(), self._repeated.copy()
        other._away, other._curves = self._away.copy(), None
        return other

    def _update(self, makers: Iterable[int]) -> None:
        """Bring `repeats` and `wanted` up to date, from the last op of `makers` to the first; what
        an op reads was made before it.
        """
        queue = [-number for number in makers]
        heapq.heapify(queue)
        queued = set(queue)
        while queue:
            number = heapq.heappop(queue)
            queued.discard(number)
            for read in self._rerun(-number):
                maker = -self.problem.values[read].maker
                if maker not in queued:
                    queued.add(maker)
                    heapq.heappush(queue, maker)

    def _rerun(self, number: int) -> list[int]:
        """When op `number` runs again, by now. Returns  the values whose `wanted` that changes"""
        op = self.problem.makers[number]
        firsts = [
            want[0]
            for made in op.makes
            if self.actions[made] == RECOMPUTE and (want := self.wanted[made]) is not None
        ]
        at = min(firsts) if firsts else None
        if at == self.repeats.get(number):
            return []
        for weight in op.weights:
            self._put_weight(weight, -1)
        if (was := self.repeats.pop(number, None)) is not None:
            del self._repeated[bisect_left(self._repeated, -number)]
            chain = self._chains[was]
            place = bisect_left(chain, number)
            self._chains[was] = chain[:place] + chain[place + 1 :]
            self._stale.add(was)
        if at is not None:
            self.repeats[number] = at
            insort(self._repeated, -number)
            chain = self._chains.get(at, ())
            place = bisect_left(chain, number)
            self._chains[at] = (*chain[:place], number, *chain[place:])
            self._stale.add(at)
        for weight in op.weights:
            self._put_weight(weight, 1)
        changed = []
        for read in op.reads:
            want = self._wanted_of(read)
            if want != self.wanted[read]:
                self._put_value(read, -1)
                self.wanted[read] = want
                self._put_value(read, 1)
                changed.append(read)
        return changed

    def _wanted_of(self, number: int) -> Wanted:
        readers = self.problem.values[number].readers
        times = [self.repeats[op] for op in self.problem.ops_reading[number] if op in self.repeats]
        if readers:
            times += (readers[0], readers[-1])
        return (min(times), max(times)) if times else None

    def _put_value(self, number: int, sign: int) -> None:
        value, action, want = self.problem.values[number], self.actions[number], self.wanted[number]
        nbytes = sign * value.nbytes
        if want is not None:
            self._stale.add(want[0])
        if value.maker in self.repeats:
            self._stale.add(self.repeats[value.maker])
        if want is None or action != KEEP:
            _add(self._held, value.made, value.gone(action if want else RECOMPUTE), nbytes)
        if want is None:
            return
        if action == KEEP:
            _add(self._held, value.made, max(value.read, want[1]), nbytes)
        elif action == RECOMPUTE:
            if not is_passing(value, want):
                _add(self._held, *want, nbytes)
        else:
            self._add_slot(*want, nbytes)
            left = self.moved.get(action, 0) + nbytes
            if sign > 0:
                insort(self._away, number)
            else:
                del self._away[bisect_left(self._away, number)]
            self.moved[action] = left
            if not left and not any(self.actions[n] == action for n in self._away):
                del self.moved[action]

    def _put_weight(self, number: int, sign: int) -> None:
        weight = self.problem.weights[number]
        late = [
            self.repeats[op] for op in self.problem.ops_reading_weight[number] if op in self.repeats
        ]
        late += weight.backward
        for read in (weight.forward, late):
            if read:
                self._add_slot(min(read), max(read), sign * weight.nbytes)

    def _add_slot(self, first: int, last: int, nbytes: int) -> None:
        _add(self._slots, first, last, nbytes)
        self._most_slots = None

    def curves(self) -> Curves:
        """The curves of bytes, and their highest points; kept until something changes."""
        if self._curves is None:
            held = np.cumsum(self._held[:-1]) + self._other + self._beside()
            if self._most_slots is None:
                self._most_slots = int(self.slots.max(initial=0))
            order = dict.fromkeys(self.actions[number] for number in self._away)
            moved = {tier: self.moved[tier] for tier in order}
            most_held = int(held.max(initial=0))
            self._curves = Curves(held, most_held, self._most_slots, moved)
        return self._curves

    def _beside(self) -> Curve:
        """`_passing`, up to date."""
        for at in self._stale:
            ops = self._chains.get(at)
            self._passing[at] = (
                passing_bytes(self.problem, self.actions, self.wanted, at, ops) if ops else 0
            )
        self._stale.clear()
        return self._passing

    @property
    def slots(self) -> Curve:
        """Bytes that slots take at each time: int64 [times]."""
        return np.cumsum(self._slots[:-1])

    @property
    def over(self) -> int:
        """As `Answer.over`: bytes that are missing; not more than zero, if it fits."""
        if (found := self.curves().over) is None:
            problem, curves = self.problem, self.curves()
            lacking = curves.most_held + max(problem.window, curves.most_slots) - problem.budget
            rooms = (n - problem.tiers[tier].nbytes for tier, n in self.moved.items())
            found = curves.over = max(lacking, *rooms, -problem.budget)
        return found

    def least_over_saving(self, number: int) -> int:
        """A lower bound on `over` once a value that is given up is saved, without changing it.

        It looks at the times at which the value would wait for backward. Its bytes come to what is
        held there, and only what its op is run again with may go.
        """
        problem, want = self.problem, self.wanted[number]
        value = problem.values[number]
        begin = value.gone(self.actions[number]) + 1
        if want is None or begin >= want[0]:
            return -problem.budget
        held = int(self.curves().held[begin : want[0]].max()) + value.nbytes
        return held - self._held_for(number) + problem.window - problem.budget

    def _held_for(self, number: int) -> int:
        """No less than the bytes held before `number` is wanted, so that it can be recomputed.

        Of the ops that run again for it alone, all at the time at which it is wanted: what they
        read, where backward needs it no longer than that.
        """
        values, makers = self.problem.values, self.problem.makers
        unwanted, shorter, over = {number}, set[int](), set[int]()
        queue = [values[number].maker]
        while queue:
            op = queue.pop()
            made = (m for m in makers[op].makes if m not in unwanted)
            if op not in self.repeats or op in over or any(map(self._is_recomputed, made)):
                continue
            over.add(op)
            for read in makers[op].reads:
                want, readers = self.wanted[read], values[read].readers
                if want is None or want[1] > self.repeats[op]:
                    continue
                wanting = self.problem.ops_reading[read]
                if not readers and all(r in over or r not in self.repeats for r in wanting):
                    unwanted.add(read)
                    queue.append(values[read].maker)
                if self.actions[read] != RECOMPUTE or want[0] < want[1]:
                    shorter.add(read)
        return sum(values[read].nbytes for read in shorter)

    def _is_recomputed(self, number: int) -> bool:
        return self.actions[number] == RECOMPUTE and self.wanted[number] is not None

    def measure(self) -> tuple[int, int, int]:
        """Falls with each step of a search: what is missing, the most bytes that are held, and at
        how many times as many are."""
        curves = self.curves()
        return self.over, curves.most_held, int((curves.held == curves.most_held).sum())

    def peak_time(self) -> int:
        """The first time at which the most bytes are held."""
        return int(self.curves().held.argmax())

    @property
    def again_s(self) -> float:
        """Seconds of compute that is done again."""
        curves, makers = self.curves(), self.problem.makers
        if curves.again_s is None:
            curves.again_s = sum((makers[-number].seconds for number in self._repeated), 0.0)
        return curves.again_s

    def offload_seconds(self, tier: str, nbytes: int) -> float:
        """Seconds that offloading so many bytes more to a tier adds."""
        known = self.curves().offload_s
        if (tier, nbytes) not in known:
            known[tier, nbytes] = self._offload_seconds(tier, nbytes)
        return known[tier, nbytes]

    def _offload_seconds(self, tier: str, nbytes: int) -> float:
        tiers, before = self.problem.tiers, self.curves().moved
        moved = dict(before)
        moved[tier] = moved.get(tier, 0) + nbytes
        added = 0.0
        for rate, slack in (
            ("leave_s", self.problem.slack_s[0]),
            ("back_s", self.problem.slack_s[1] + self.again_s),
        ):
            now, then = (
                sum(n * float(getattr(tiers[tier], rate)) for tier, n in each.items())
                for each in (before, moved)
            )
            slack = max(0.0, slack)
            added += max(0.0, then - slack) - max(0.0, now - slack) + BUSY * (then - now)
        return added + 2 * tiers[tier].start_s

    @property
    def seconds(self) -> float:
        """As `Answer.seconds`."""
        curves, starts = self.curves(), 0.0
        for number in self._away:
            starts += 2 * self.problem.tiers[self.actions[number]].start_s
        exposed_s = starts + exposed_seconds(self.problem, curves.moved, self.again_s)
        return self.again_s + exposed_s


def _add(curve: Curve, first: int, last: int, nbytes: int) -> None:
    curve[first] += nbytes
    curve[last + 1] -= nbytes
