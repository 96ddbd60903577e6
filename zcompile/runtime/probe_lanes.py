"""How fast two lanes between the same two places are: each alone, and whether they take turns.

A lane starts pieces of a size of its own; it does not matter here what they travel through.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

from zcompile.machine.model import Link
from zcompile.runtime.transfer.ticket import Ticket

SPAN_S = 0.05
"""Of one batch: a hundred times what starting it costs."""
LEAST_ROUNDS, MOST_ROUNDS = 5, 12
ENOUGH_S = 0.5
SETTLED = 1.05
"""The best round counts, since whatever else runs on the machine only ever slows one. It is found
when the next best is as good within this factor, after MOST_ROUNDS, or after ENOUGH_S."""
SHORT_ROUNDS = 15
TAKES_TURNS = 1.5
"""Both lanes at once, each with work for the same time: 1 if they are apart, 2 if they take turns.
"""


@dataclass(frozen=True)
class Lane:
    """start  begins piece number n of `piece_bytes`; any n is allowed
    short  begins a transfer of `short_bytes`, elsewhere for each n
    least, most  pieces of a batch
    """

    name: str
    piece_bytes: int
    start: Callable[[int], Ticket]
    short_bytes: int
    short: Callable[[int], Ticket]
    least: int = 2
    most: int = 64


def measure_lanes(there: Lane, back: Lane) -> dict[str, Link]:
    """Both as links by name, `shares` set where they take turns."""
    pieces = {lane.name: _batch(lane) for lane in (there, back)}
    alone = {lane.name: best_of(partial(_seconds, (lane, pieces[lane.name])))
             for lane in (there, back)}  # fmt: skip
    both = best_of(partial(_seconds, *((lane, pieces[lane.name]) for lane in (there, back))))
    turns = both > TAKES_TURNS * max(alone.values())
    links = {}
    for lane, other in ((there, back), (back, there)):
        rate = rounded(pieces[lane.name] * lane.piece_bytes / alone[lane.name])
        shares = other.name if turns else None
        links[lane.name] = Link(lane.name, rate, _latency(lane, rate), shares)
    return links


def _batch(lane: Lane) -> int:
    """Pieces that take about SPAN_S."""
    once = min(_seconds((lane, 1)) for _ in range(2))  # the first one may find things cold
    return min(max(round(SPAN_S / once), lane.least), lane.most)


def best_of(seconds: Callable[[], float]) -> float:
    """The least that repeated rounds take."""
    rounds: list[float] = []
    while len(rounds) < MOST_ROUNDS and sum(rounds) < ENOUGH_S:
        rounds = sorted((*rounds, seconds()))
        if len(rounds) >= LEAST_ROUNDS and rounds[1] <= SETTLED * rounds[0]:
            break
    return rounds[0]


def _seconds(*batches: tuple[Lane, int]) -> float:
    since = time.perf_counter()
    tickets = [lane.start(n) for round_ in zip_longest(*(
        [(lane, n) for n in range(pieces)] for lane, pieces in batches))
        for lane, n in filter(None, round_)]  # fmt: skip
    for ticket in tickets:
        ticket.wait()
    return time.perf_counter() - since


def _latency(lane: Lane, bytes_per_s: float) -> float:
    """The lower quartile: the best one may have found its bytes in a cache."""
    rounds = []
    for n in range(SHORT_ROUNDS):
        since = time.perf_counter()
        lane.short(n).wait()
        rounds.append(time.perf_counter() - since)
    return rounded(max(statistics.quantiles(rounds)[0] - lane.short_bytes / bytes_per_s, 0.0))


def rounded(value: float) -> float:
    """Three digits: what follows is noise, and nobody wants to read it."""
    return float(f"{value:.3g}")
