"""Cuts forwards and backwards of a step's demand between regions, for a sharper bound.

`demand_of` (`planner/bounds.py`) takes a forward as one segment, beside all of whose compute all of
its bytes may travel. But a region begins once what it reads is there, so what comes last does not
travel beside what is computed behind it:

    forward       update w1 (g1, m1), mm 1 | update w2 (g2, m2), mm 2
    one segment   the longer of its bytes and its compute
    two pieces    what the update of w2 reads has come by the cut, and mm 2 is still to be done

So a segment is cut right before regions that are the first to read a large entry. The order of
regions is that of the graph, whatever a plan does, so what holds of a segment holds of each piece:
it lasts at least as long as its compute, and as each link takes for the bytes that pass it
meanwhile. Besides,

    what the region behind a cut reads is on the device at that cut (`Segment.needs`);
    an update is computed before the first region that reads its parameter: right before it, if it
    is late (`passes/late_updates.py`), else in a step of its own before the forward. So its
    operands are read and written in any of the pieces from the beginning of the forward to there
    (`Segment.since`), and until a cut there are at least the seconds of all updates that are
    computed by then (`Demand.together`).

Entries of up to 64 KiB are left out, which only makes the bound smaller. Not cut are steps of
several ranks, who gather in the order of the graph and ahead of it, and those in which the host
updates beside the device. Pure.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from zcompile.ir.effects import NEW, Effects, Register, Ticket
from zcompile.ir.step import StepCall, StepTrace
from zcompile.ir.types import SMALL_BYTES, EntryRef, Phase
from zcompile.machine.model import Machine
from zcompile.memory.step_footprint import most_held
from zcompile.planner.bounds import (
    MOST_SEGMENTS,
    Demand,
    Segment,
    demand_of,
    distinct_bytes,
    least_compute,
    outlives,
    segmented,
)
from zcompile.planner.placement import operands_of_host_updates

CUTS = 2
"""Most cuts of a segment, spread evenly over the bytes that regions are the first to read, the last
of them behind all. Each makes the program that is solved larger, and three times as many gave the
same bound of the cases of `benchmarks/plan_table.py`: it is what is computed behind the last one
that tells."""


def demand_in_pieces(
    step: StepTrace,
    region_seconds: Callable[..., float],
    machine: Machine | None = None,
    held_bytes: int | None = None,
) -> Demand:
    """`demand_of` a step with all updates late that may be, so that it bounds plans in which others
    are late as well; and the same in pieces, where it can be cut.

    held_bytes  most that is live outside the arena; None: it is not known
    """
    demand = demand_of(step, region_seconds, together=True, machine=machine)
    every = (x for call in step.calls for x in call.schedule.effects)
    if operands_of_host_updates(step) or any(x.is_collective for x in every):
        return demand
    most = None if held_bytes is None else most_held(step, held_bytes)
    cut = _in_pieces(step, region_seconds)
    pieces = None if cut is None else replace(cut, held_bytes=most)
    return replace(demand, pieces=pieces, held_bytes=most)


@dataclass(frozen=True)
class _Access:
    """Bytes [begin, end) of an entry that compute reads, or writes, or both.

    at      the region of its segment that uses it, or the one behind, if `between`
    between it is used between two regions
    update  by an update
    """

    ref: EntryRef
    begin: int
    end: int
    at: int
    reads: bool = False
    writes: bool = False
    between: bool = False
    update: bool = False


@dataclass
class _Walk:
    """A segment, region by region, call after call.

    seconds   of each region of a graph
    updates   (the region behind it, its seconds) of each chunk of an update
    before_s  seconds of what an optimizer computes before all of them
    opens     region -> bytes of each entry that it is the first to read
    whole     regions that no plan takes apart: others were joined, each from several
    """

    region_seconds: Callable[..., float]
    seconds: list[float] = field(default_factory=list)
    updates: list[tuple[int, float]] = field(default_factory=list)
    before_s: float = 0.0
    accesses: list[_Access] = field(default_factory=list)
    opens: dict[int, dict[EntryRef, int]] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    _read: set[EntryRef] = field(default_factory=set)

    def add(self, call: StepCall) -> None:
        """Walk one more call."""
        if call.phase is Phase.STEP:
            self.before_s += least_compute(call.schedule, self.region_seconds)
            for x in call.schedule.effects:
                self._note(call, x, writes=True, reads=True)
            return
        coming: dict[Ticket, Effects] = {}
        lent: dict[Register, tuple[Effects, int]] = {}
        """Register -> the access that it is a view of, and the bytes that it views."""
        unused: dict[int, Effects] = {}
        for x in call.schedule.effects:
            home = x.home
            if home is not None and _counts(call, x):
                if home.writes:
                    self._note(call, x, writes=True)
                if home.reads:
                    unused[id(x)] = x
                    if x.ticket is not None:
                        coming[x.ticket] = x
                    if home.in_place:
                        lent |= dict.fromkeys(x.defines, (x, x.nbytes))
            elif x.defines and x.region is None:
                given = [coming[ticket] for ticket in x.after if ticket in coming]
                lent |= {register: (y, x.nbytes) for register in x.defines for y in given}
            if x.region is None:
                continue
            views = [lent[register] for register in x.reads if register in lent]
            for y, _ in views:
                if unused.pop(id(y), None) is not None:
                    self._note(call, y, reads=True, region=not x.updates, update=x.updates)
            if x.updates:
                self.updates.append((len(self.seconds), self.region_seconds(x.region)))
                continue
            if not x.region.parts:
                self.whole.add(len(self.seconds))
            self._open({call.entry_of(y.home): n for y, n in views if y.home is not None})
            self.seconds.append(self.region_seconds(x.region))
        for x in unused.values():
            self._note(call, x, reads=True)

    def _open(self, read: dict[EntryRef, int]) -> None:
        """Note the entries that the next region is the first to read."""
        new = {ref: nbytes for ref, nbytes in read.items() if ref not in self._read}
        if new:
            self.opens[len(self.seconds)] = new
            self._read |= new.keys()

    def _note(
        self,
        call: StepCall,
        x: Effects,
        reads: bool = False,
        writes: bool = False,
        region: bool = False,
        update: bool = False,
    ) -> None:
        """Note what an instruction accesses, of what counts."""
        home = x.home
        if home is None or not _counts(call, x):
            return
        ref, reads, writes = call.entry_of(home), reads and home.reads, writes and home.writes
        updates = update or (writes and call.phase is Phase.FORWARD)
        if reads or writes:
            at = len(self.seconds)
            self.accesses.append(
                _Access(ref, home.begin, home.end, at, reads, writes, not region, updates)
            )

    def cuts(self, large: Callable[[EntryRef], int]) -> list[int]:
        """The regions before which the segment is cut.

        large  bytes of an entry; 0 of those that are left out
        """
        rows = [(n, sum(map(large, self.opens[n]))) for n in sorted(self.opens.keys() & self.whole)]
        rows = [(n, nbytes) for n, nbytes in rows if nbytes]
        if len(rows) <= CUTS:
            return [n for n, _ in rows]
        sums = list(accumulate(nbytes for _, nbytes in rows))
        wanted = (sums[-1] * k / CUTS for k in range(1, CUTS + 1))
        return sorted({rows[bisect_left(sums, nbytes)][0] for nbytes in wanted})


def _counts(call: StepCall, x: Effects) -> bool:
    """Whether an access is of bytes that are bounded: none of a copy, which compute may make of
    its master, nor of what does not last and is no gradient."""
    home = x.home
    if home is None or home.role is NEW or home.copy_dtype is not None:
        return False
    ref = call.entry_of(home)
    lasts = home.lasting or call.phase is Phase.STEP or ref.is_gradient
    return lasts and not ref.is_copy


@dataclass
class _Uses:
    """What one piece does with an entry: bytes, as in `Segment`, and since which piece."""

    reads: list[tuple[int, int]] = field(default_factory=list)
    writes: list[tuple[int, int]] = field(default_factory=list)
    needs: int = 0
    since: int = 0


def _in_pieces(step: StepTrace, region_seconds: Callable[..., float]) -> Demand | None:
    """The demand by pieces; None, if nothing is cut, or into too many."""

    def large(ref: EntryRef) -> int:
        fact = step.facts.get(ref)
        return fact.nbytes if fact is not None and fact.nbytes > SMALL_BYTES else 0

    phases, seconds, late = list[Phase](), list[float](), list[bool]()
    together = list[tuple[tuple[int, ...], float]]()
    uses: dict[EntryRef, dict[int, _Uses]] = {}
    for phase, calls in segmented(step, together=True):
        walk = _Walk(region_seconds)
        for call in calls:
            walk.add(call)
        cuts = [] if phase is Phase.STEP else walk.cuts(large)
        first, count = len(phases), len(cuts) + 1
        phases += [phase] * count
        seconds += [
            (walk.before_s if n == 0 else 0.0) + sum(walk.seconds[begin:end])
            for n, (begin, end) in enumerate(zip([0, *cuts], [*cuts, None], strict=True))
        ]
        late += _cut_at(walk, cuts, first, large, uses)
        together += _updates_by(walk, cuts, first, seconds)
    if len(phases) == len(segmented(step, together=True)) or len(phases) > MOST_SEGMENTS:
        return None
    return _demand(phases, seconds, late, together, uses)


def _cut_at(
    walk: _Walk,
    cuts: Sequence[int],
    first: int,
    large: Callable[[EntryRef], int],
    uses: dict[EntryRef, dict[int, _Uses]],
) -> list[bool]:
    """Note what each piece of a segment uses; returns of each whether it may compute updates.

    first  number of the first of the pieces, of all of a step
    """
    written = set[EntryRef]()
    last_update = -1
    for access in walk.accesses:
        if not large(access.ref):
            continue
        find = bisect_left if access.between else bisect_right
        piece = find(cuts, access.at)
        row = uses.setdefault(access.ref, {}).setdefault(first + piece, _Uses())
        span = access.begin, access.end
        if access.reads and (access.update or access.ref not in written):
            row.reads.append(span)
        if access.writes:
            row.writes.append(span)
            written.add(access.ref)
        if access.update:
            row.since, last_update = piece, max(last_update, piece)
    for n, cut in enumerate(cuts):
        for ref, nbytes in walk.opens[cut].items():
            if large(ref):
                row = uses.setdefault(ref, {}).setdefault(first + n + 1, _Uses())
                row.needs = min(nbytes, large(ref))
    return [n <= last_update for n in range(len(cuts) + 1)]


def _updates_by(
    walk: _Walk, cuts: Sequence[int], first: int, seconds: Sequence[float]
) -> Iterator[tuple[tuple[int, ...], float]]:
    """For each piece of a segment with updates, all up to it and the least seconds of these."""
    for n in range(len(cuts) + 1) if walk.updates else ():
        done_s = sum(s for at, s in walk.updates if bisect_left(cuts, at) <= n)
        several = tuple(range(first, first + n + 1))
        yield several, done_s + sum(seconds[m] for m in several)


def _demand(
    phases: Sequence[Phase],
    seconds: Sequence[float],
    late: Sequence[bool],
    together: Sequence[tuple[tuple[int, ...], float]],
    uses: dict[EntryRef, dict[int, _Uses]],
) -> Demand:
    """The demand of pieces whose entries are used so; of entries with like uses as one group."""
    every = range(len(phases))
    alike: dict[object, tuple[int, bool, list[tuple[int, int, bool, int, int]]]] = {}
    for ref, of in uses.items():
        rows = [of.get(n, _Uses()) for n in every]
        sizes = [(distinct_bytes(row.reads), distinct_bytes(row.writes)) for row in rows]
        if not any(read for read, _ in sizes):
            continue
        most = max(max(max(pair), row.needs) for pair, row in zip(sizes, rows, strict=True))
        within = {m for n in every if rows[n].since for m in range(n - rows[n].since, n + 1)}
        lives = [
            outlives(phases, sizes, n, ref.is_gradient) and not (ref.is_gradient and n in within)
            for n in every
        ]
        found = [
            (read, written if lives[n] else 0, lives[n], row.needs, row.since)
            for n, (row, (read, written)) in enumerate(zip(rows, sizes, strict=True))
        ]
        shares = ((r / most, w / most, alive, n / most, since) for r, w, alive, n, since in found)
        key = ref.is_gradient, *shares
        size, _, sums = alike.get(key, (0, ref.is_gradient, [(0, 0, False, 0, 0)] * len(phases)))
        added = [
            (a[0] + b[0], a[1] + b[1], b[2], a[3] + b[3], b[4])
            for a, b in zip(sums, found, strict=True)
        ]
        alike[key] = size + most, ref.is_gradient, added
    groups = list(alike.values())
    segments = tuple(
        Segment(
            phases[n],
            seconds[n],
            tuple(rows[n][0] for _, _, rows in groups),
            tuple(rows[n][1] for _, _, rows in groups),
            tuple(rows[n][2] for _, _, rows in groups),
            late[n],
            needs=tuple(rows[n][3] for _, _, rows in groups),
            since=tuple(rows[n][4] for _, _, rows in groups),
        )
        for n in every
    )
    gradients = frozenset(k for k, (_, is_gradient, _) in enumerate(groups) if is_gradient)
    return Demand(
        tuple(size for size, _, _ in groups), segments, gradients, together=tuple(together)
    )
