"""States the choice of saved values as data, and evaluates an answer. Pure.

Times are indices of the nodes of a joint graph, forward first. A value is saved from where it is
made to its last reader in backward, or is gone from its last reader in forward on: then backward
recomputes it before its first reader there, or reads it back. Recomputing needs the operands of the
op, so that values which backward never read may be wanted too.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from zcompile.ir.types import CheckpointPolicy

KEEP, RECOMPUTE = "keep", "again"
"""Actions besides the tiers that a value may be offloaded to: saved, and recomputed."""
REPEATED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
"""Wishes to recompute a value, which are carried out before anything is searched."""
MOVED = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)
"""Wishes to offload a value, which are carried out before anything is searched."""


@dataclass(frozen=True)
class Value:
    """A storage that forward makes.

    name        for people; values of other names ask for the same choice
    made, read  times: when it is made, and last read in forward
    readers     times of backward at which it is read, ascending; none: it is not saved
    maker       index of its op
    may_move    it can be offloaded
    wish        what the user asked for, if anything
    left        last time at which it takes memory in forward, if it is offloaded, since that is
                given back between two regions; 0: when it was read last
    """

    name: str = field(compare=False)
    nbytes: int
    made: int
    read: int
    readers: tuple[int, ...]
    maker: int
    may_move: bool = True
    wish: CheckpointPolicy | None = None
    left: int = 0

    def gone(self, action: str) -> int:
        """The last time at which forward holds it, if it is given up so."""
        return self.read if action == RECOMPUTE else max(self.read, self.left)


@dataclass(frozen=True)
class Maker:
    """An op of forward. reads: values; makes: values; weights: tiered parameters that it reads."""

    seconds: float
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    may_repeat: bool = True


@dataclass(frozen=True)
class Weight:
    """A tiered parameter: bytes of its slot, and the times at which it is read in each phase."""

    nbytes: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True)
class OffloadTier:
    """A tier that values may be offloaded to.

    leave_s, back_s  seconds per byte, on the link that takes longest
    start_s          of each transfer
    nbytes           that it has room for
    """

    leave_s: float
    back_s: float
    nbytes: int
    start_s: float = 0.0


@dataclass(frozen=True)
class Problem:
    """The choice for one graph.

    other     bytes live at each time of values that forward does not make
    boundary  time at which backward begins
    slack_s   seconds for which links could carry more off the device in forward, and to it in
              backward, while compute goes on
    budget    bytes for values and for the slots of weights and of values read back
    window    lower bound on the part of it for slots; the more, the earlier a fetch may start
    """

    values: tuple[Value, ...]
    makers: tuple[Maker, ...]
    weights: tuple[Weight, ...]
    other: Sequence[int]
    boundary: int
    tiers: Mapping[str, OffloadTier]
    slack_s: tuple[float, float]
    budget: int
    window: int = 0

    @cached_property
    def ops_reading(self) -> tuple[tuple[int, ...], ...]:
        """Per value: the ops that read it."""
        return _readers(len(self.values), (op.reads for op in self.makers))

    @cached_property
    def ops_reading_weight(self) -> tuple[tuple[int, ...], ...]:
        """Per weight: the ops that read it."""
        return _readers(len(self.weights), (op.weights for op in self.makers))


def _readers(count: int, reads: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Of each of `count` things: the ops that read it, by what each op reads."""
    readers: list[list[int]] = [[] for _ in range(count)]
    for op, of in enumerate(reads):
        for thing in of:
            readers[thing].append(op)
    return tuple(map(tuple, readers))


@dataclass(frozen=True)
class Answer:
    """What a list of actions takes.

    held, slots  bytes at each time: of values, and of the slots of weights and values read back
    wanted       per value: the first and last time that backward needs it; None: it does not
    repeats      op -> time at which backward runs it again
    again_s      seconds of compute that is done again
    moved        tier -> bytes that are offloaded there
    exposed_s    seconds of transfers that compute does not hide
    """

    held: list[int]
    slots: list[int]
    wanted: list[tuple[int, int] | None]
    repeats: Mapping[int, int]
    again_s: float
    moved: Mapping[str, int]
    exposed_s: float

    @property
    def seconds(self) -> float:
        return self.again_s + self.exposed_s

    def over(self, problem: Problem) -> int:
        """Bytes that are missing; not more than zero, if the answer fits."""
        slots = max(problem.window, max(self.slots, default=0))
        lacking = max(self.held, default=0) + slots - problem.budget
        rooms = (n - problem.tiers[tier].nbytes for tier, n in self.moved.items())
        return max(lacking, *rooms, -problem.budget)


BUSY = 0.05
"""Cost of a hidden transfer, as part of its seconds: memory and caches that it shares with
compute."""


def answer(problem: Problem, actions: Sequence[str]) -> Answer:
    """What these actions, one per value, take; actions of values that nobody wants do not count."""
    wanted, repeats = _wanted(problem, actions)
    times = len(problem.other)
    held, slots = [0] * (times + 1), [0] * (times + 1)
    moved: dict[str, int] = {}
    starts = 0.0
    # Each value: while forward needs it, and while backward does, by its action.
    for value, action, want in zip(problem.values, actions, wanted, strict=True):
        if want is None or action != KEEP:
            _add(held, value.made, value.gone(action if want else RECOMPUTE), value.nbytes)
        if want is None:
            continue
        if action == KEEP:
            _add(held, value.made, max(value.read, want[1]), value.nbytes)
        elif action == RECOMPUTE:
            if not is_passing(value, want):
                _add(held, *want, value.nbytes)
        else:
            _add(slots, *want, value.nbytes)
            moved[action] = moved.get(action, 0) + value.nbytes
            starts += 2 * problem.tiers[action].start_s
    # What ops that run again hold while they do.
    together: dict[int, list[int]] = {}
    for number in sorted(repeats):
        together.setdefault(repeats[number], []).append(number)
    for at, ops in together.items():
        _add(held, at, at, passing_bytes(problem, actions, wanted, at, ops))
    # Slots of weights; then sums over time.
    _weights(problem, repeats, slots)
    for curve in (held, slots):
        curve[:] = accumulate(curve[:-1])
    held = [a + b for a, b in zip(held, problem.other, strict=True)]
    again_s = sum((problem.makers[number].seconds for number in repeats), 0.0)
    return Answer(
        held,
        slots,
        wanted,
        repeats,
        again_s,
        moved,
        starts + exposed_seconds(problem, moved, again_s),
    )


def is_passing(value: Value, want: tuple[int, int]) -> bool:
    """Whether a value that is recomputed is only read by ops that run again at one time, and dies
    there behind the last of them."""
    return not value.readers and want[0] == want[1]


def passing_bytes(
    problem: Problem,
    actions: Sequence[str],
    wanted: Sequence[tuple[int, int] | None],
    at: int,
    ops: Sequence[int],
) -> int:
    """The most bytes that ops hold which run again at time `at`, beyond what is held once the last
    of them has run.

    They run one after the other, and each value that they make for each other lives from its op to
    its last reader: of a chain of casts, products and sums few are live at once.

    ops  ascending: those of which `repeats` says `at`
    """
    values, makers = problem.values, problem.makers
    dies: dict[int, list[int]] = {}
    seen = set[int]()
    live = most = stays = 0
    chain = set(ops)
    for number in reversed(ops):
        for read in makers[number].reads:
            want = wanted[read]
            if read in seen or actions[read] != RECOMPUTE or want is None:
                continue
            seen.add(read)
            if is_passing(values[read], want):
                dies.setdefault(number, []).append(values[read].nbytes)
                if values[read].maker not in chain:
                    live += values[read].nbytes
    for number in ops:
        beside = 0
        for made in makers[number].makes:
            want, nbytes = wanted[made], values[made].nbytes
            live += nbytes
            if want is None or actions[made] != RECOMPUTE or want[0] != at:
                beside += nbytes
            elif not is_passing(values[made], want):
                stays += nbytes
        most = max(most, live)
        live -= beside + sum(dies.get(number, ()))
    return most - stays


def _add(curve: list[int], first: int, last: int, nbytes: int) -> None:
    curve[first] += nbytes
    curve[last + 1] -= nbytes


def _wanted(
    problem: Problem, actions: Sequence[str]
) -> tuple[list[tuple[int, int] | None], dict[int, int]]:
    """First and last time that backward needs each value, and time at which it repeats each op.

    Last ops come first, since the operands of an op were made before.
    """
    wanted: list[tuple[int, int] | None] = [
        (v.readers[0], v.readers[-1]) if v.readers else None for v in problem.values
    ]
    repeats: dict[int, int] = {}
    for number in range(len(problem.makers) - 1, -1, -1):
        op = problem.makers[number]
        firsts = [
            want[0]
            for made in op.makes
            if actions[made] == RECOMPUTE and (want := wanted[made]) is not None
        ]
        if firsts:
            at = repeats[number] = min(firsts)
            for read in op.reads:
                first, last = wanted[read] or (at, at)
                wanted[read] = (min(first, at), max(last, at))
    return wanted, repeats


def _weights(problem: Problem, repeats: Mapping[int, int], slots: list[int]) -> None:
    """Add the slots of parameters, each from its first reader of a phase to its last."""
    backward = [list(weight.backward) for weight in problem.weights]
    for number, at in repeats.items():
        for read_too in problem.makers[number].weights:
            backward[read_too].append(at)
    for weight, late in zip(problem.weights, backward, strict=True):
        for read in (weight.forward, late):
            if read:
                _add(slots, min(read), max(read), weight.nbytes)


def exposed_seconds(problem: Problem, moved: Mapping[str, int], again_s: float) -> float:
    """Seconds that the links take longer than compute, which recomputing makes longer."""
    leave = sum(n * problem.tiers[tier].leave_s for tier, n in moved.items())
    back = sum(n * problem.tiers[tier].back_s for tier, n in moved.items())
    forward, backward = problem.slack_s
    over = max(0.0, leave - max(0.0, forward)) + max(0.0, back - max(0.0, backward) - again_s)
    return over + BUSY * (leave + back)
