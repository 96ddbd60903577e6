"""Counts the bytes that the calls of a step have live outside the arena, from call to call.

Within a call the levels of its schedule say what is live; `StepFootprint` adds values saved for
backward and gradients in flight of other calls. The runtime measures the same
(`runtime/live_memory.py`).

`staying` chooses the gradients that stay where backward makes them until the optimizer has read
them. Live bytes fall as backward goes on, and in the room that activations leave, gradients may
rest that need not travel to their entry and back: neither over a bus nor to a disk. The last
gradients stay, since the first ones are made while the device is still full.

    live beside them      9 8 6 4 2      of 11, after each of five gradients of 2
    if all of them stay  11 12 12 12 12  too much
    if the last four do   9 10 10 10 10

A gradient is the user's until it is set to None, so this is for steps after which it is: the next
forward needs the room again.
"""

import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

from zcompile.ir.effects import Effects, HomeAccess, Instruction
from zcompile.ir.schedule import Schedule
from zcompile.ir.step import StepCall, StepTrace
from zcompile.ir.types import SMALL_BYTES, EntryRef, LiveBytes, Phase


def most_inherited(schedule: Schedule) -> int:
    """Upper bound, in bytes, on gradients of earlier calls in flight when a call of `schedule`
    begins.

    There is no bound in the step of an optimizer, which has nothing of its own live outside the
    arena. Where gradients that stay wait for the end of a joined region, none of others is in
    flight beside them.
    """
    if schedule.phase is Phase.STEP:
        return sys.maxsize
    if schedule.level_order:
        return 0
    return schedule.departing_bytes if schedule.phase is Phase.BACKWARD else 0


class StepFootprint:
    """Walks the calls of a step, in order, any number of times, and counts live bytes.

    others  bytes of other calls than the current one
    now     all live bytes, after the last instruction
    """

    def __init__(self) -> None:
        self._kept = self._stayed = 0
        self._inherited, self._own = _Row(), _Row()
        self._level = LiveBytes()
        self.now = 0

    @property
    def others(self) -> int:
        return self._kept + self._stayed + self._inherited.held_bytes

    def begin(self, schedule: Schedule) -> int:
        """Begin a call; returns how many gradients in flight are joined before.

        Gradients that stayed are gone when a forward begins, but for those of its late updates:
        none is told to stay where that is not so.
        """
        self._schedule = schedule
        joined, most = 0, most_inherited(schedule)
        while self._inherited.rows and (not most or self._inherited.nbytes > most):
            self._join(self._inherited)
            joined += 1
        if schedule.phase is Phase.FORWARD:
            self._stayed = schedule.held_bytes
        self._kept -= schedule.holds.saved_bytes
        levels = schedule.levels
        self._levels = iter(levels)
        self.now = self.others + (levels[0].before if levels else 0)
        return joined

    def rise(self) -> int:
        """Peak of live bytes during the next instruction that changes them."""
        level = self._level = next(self._levels, LiveBytes())
        most = self.others + level.peak
        self.now = self.others + level.after
        return most

    def leave(self, gradient: Effects) -> int:
        """Send a gradient: join the oldest in flight until it fits; returns how many."""
        joined, most = 0, self._level.departing or self._schedule.departing_bytes
        for row in (self._inherited, self._own):
            while row.rows and self._under_way + gradient.nbytes > most:
                self._join(row)
                joined += 1
        carried = self._level.carried
        self._own.append(gradient, gradient.nbytes if carried is None else carried)
        self.now = self.others + self._level.after
        return joined

    def let_go(self, nbytes: int) -> None:
        """Drop so many bytes of gradients that stayed."""
        self._stayed -= nbytes
        self.now -= nbytes

    def _join(self, row: "_Row") -> None:
        """End the flight of the oldest gradient of `row`; it stays live if it stays on the
        device."""
        gradient, held_bytes = row.popleft()
        if gradient.stays:
            self._stayed += held_bytes

    def through(self, schedule: Schedule) -> int:
        """Walk a call from its beginning to its end; returns the peak of live bytes."""
        most = self.now
        for x in schedule.effects:
            if x.changes_live:
                most = max(most, self.rise())
                if x.is_gradient:
                    self.leave(x)
            elif x.lets_go:
                self.let_go(x.lets_go)
        return max(most, self.now)

    def end(self, then: Phase) -> int:
        """End a call, which one of phase `then` follows; returns how many gradients in flight are
        joined.

        After an optimizer's step, which may be several calls, nothing is in flight any more.
        """
        self._kept += self._schedule.holds.kept_bytes
        while self._own.rows:
            self._inherited.append(*self._own.popleft())
        over = self._schedule.phase is Phase.STEP and then is not Phase.STEP
        joined = len(self._inherited.rows) if over else 0
        for _ in range(joined):
            self._join(self._inherited)
        self.now = self.others
        return joined

    @property
    def _under_way(self) -> int:
        return self._inherited.nbytes + self._own.nbytes


class _Row:
    """Gradients in flight, the oldest first, each with the bytes that are free once it has arrived.

    nbytes      that travel, which decides how many may be in flight
    held_bytes  of whole storages, which is what the device lacks
    """

    def __init__(self) -> None:
        self.rows: deque[tuple[Effects, int]] = deque()
        self.nbytes = self.held_bytes = 0

    def append(self, gradient: Effects, held_bytes: int) -> None:
        self.rows.append((gradient, held_bytes))
        self.nbytes += gradient.nbytes
        self.held_bytes += held_bytes

    def popleft(self) -> tuple[Effects, int]:
        gradient, held_bytes = self.rows.popleft()
        self.nbytes -= gradient.nbytes
        self.held_bytes -= held_bytes
        return gradient, held_bytes


def held_peak(schedule: Schedule) -> int:
    """Peak of the live bytes of a call of `schedule`, with its own gradients that stay, and those
    that are held for its late updates."""
    walk = StepFootprint()
    walk.begin(schedule)
    kept = walk.others - schedule.held_bytes  # what a forward would have left
    return walk.through(schedule) - kept


def held_in_steps(calls: Sequence[StepCall]) -> int:
    """Peak of live bytes outside the arena when an optimizer goes on, if `calls` come again and
    again.

    These are gradients in flight, or that stay, and values saved for a backward that never came.
    """
    walk, most = StepFootprint(), 0
    for number in range(-len(calls), len(calls)):
        call, after = calls[number], calls[(number + 1) % len(calls)]
        walk.begin(call.schedule)
        if call.phase is Phase.STEP:
            most = max(most, walk.now)
        walk.through(call.schedule)
        walk.end(after.phase)
    return most


PATTERN = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)
"""Phases of a step in which gradients may stay: with more than one backward pass, they are added
to. If all updates are late, there is no third."""


def staying(
    step: StepTrace,
    room_bytes: int,
    scratch_bytes: int = 0,
    kept: frozenset[EntryRef] = frozenset(),
) -> frozenset[EntryRef]:
    """The gradients that stay on the device until the optimizer, or a late update, has read them.

    Candidates come once, whole, and in memory of their own. Of them as many of the last stay as
    leave at most `room_bytes` live at any time, and `scratch_bytes` less while the optimizer goes
    on; or no more than is live anyway, by gradients in flight.

    kept  refs of gradients that are not gone when the next forward begins, none of which stays
    """
    phases = tuple(phase for phase, _ in groupby(call.phase for call in step.calls))
    if phases != PATTERN[: max(2, len(phases))]:
        return frozenset()
    may = [ref for ref in _candidates(step) if ref not in kept]
    anyway, anyway_in_steps = _held(step, frozenset())
    room, in_steps = max(room_bytes, anyway), max(room_bytes - scratch_bytes, anyway_in_steps)
    fewest, most = 0, len(may)
    while fewest < most:  # the more stay, the more is held
        some = (fewest + most + 1) // 2
        held, then = _held(step, frozenset(may[-some:]))
        if held <= room and then <= in_steps:
            fewest = some
        else:
            most = some - 1
    return frozenset(may[len(may) - fewest :])


def can_stay(
    step: StepTrace, gradients: frozenset[EntryRef], room_bytes: int, kept: frozenset[EntryRef]
) -> bool:
    """Whether these gradients may stay on the device until they are read, as in `staying`."""
    if not gradients:
        return True
    held, _ = _held(step, gradients)
    anyway, _ = _held(step, frozenset())
    return gradients.isdisjoint(kept) and held <= max(room_bytes, anyway)


def staying_bytes(step: StepTrace, gradients: frozenset[EntryRef]) -> int:
    """Bytes of these gradients."""
    return sum(step.facts[ref].nbytes for ref in gradients)


def most_held(step: StepTrace, room_bytes: int) -> int | None:
    """Upper bound, in bytes, on the gradients that are live when backward ends, if no more than
    `room_bytes` are live outside the arena at any time; None, if none is known.

    While a region goes on, what it makes and what is there beside leaves the rest of the room to
    gradients that were made before, each of which is live as a whole until it has left. Those of
    them for which there was room, and all that are made later, are live in the end at most.

        room 11, gradients of 4; the last is made beside 2    of two before it 1 fits in 11 - 4 - 2
    """
    phases = [phase for phase, _ in groupby(call.phase for call in step.calls)]
    backwards = [call.schedule for call in step.calls if call.phase is Phase.BACKWARD]
    if phases.count(Phase.BACKWARD) != 1 or any(made.level_order for made in backwards):
        return None
    room = max(room_bytes, _held(step, frozenset())[0])
    made, rows = list[int](), list[tuple[int, int]]()
    """Bytes of gradients so far; (how many were made before a region, what is live beside them)."""
    for schedule in backwards:
        flying = 0
        for index, x in enumerate(schedule.effects):
            level = schedule.level_at.get(index)
            if level is None:
                continue
            if x.is_gradient:
                made.append(x.nbytes)
                flying = level.departing or schedule.departing_bytes
            elif x.region is not None:
                rows.append((len(made), max(0, level.peak - flying)))
    least = sum(made)
    loose = ((min(sum(made[:n]), room - beside) + sum(made[n:]), n, beside) for n, beside in rows)
    for _, count, beside in sorted(loose)[:MOST_REGIONS]:
        before = _most_that_fit(made[:count], room - beside)
        least = min(least, before + sum(made[count:]))
    return least


MOST_REGIONS, MOST_SUMS = 4, 512
"""Regions that are looked at, those first that leave least room; and sums of sizes that are told
apart, of which there are few where layers are alike."""


def _most_that_fit(sizes: Sequence[int], room: int) -> int:
    """The largest sum of some of these sizes within `room`, or a little more: small ones are not
    told apart, and where there are too many sums, nothing is."""
    small = sum(nbytes for nbytes in sizes if nbytes <= SMALL_BYTES)
    sums = {0}
    for nbytes in sizes:
        if nbytes > SMALL_BYTES:
            sums |= {total + nbytes for total in sums if total + nbytes <= room}
            if len(sums) > MOST_SUMS:
                return min(sum(sizes), max(0, room))
    return min(sum(sizes), max(0, room), max(sums) + small)


def _candidates(step: StepTrace) -> Iterator[EntryRef]:
    """The gradients that could stay, in the order in which they are made."""
    made = [
        (call.gradients[home.entry], _whole_and_alone(call.schedule, index, home))
        for call in step.calls
        if call.phase is Phase.BACKWARD
        for index, x in enumerate(call.schedule.effects)
        if (home := x.home) is not None and x.is_gradient
    ]
    times = Counter(ref for ref, _ in made)
    return (ref for ref, may in made if may and times[ref] == 1)


def _whole_and_alone(schedule: Schedule, index: int, gradient: HomeAccess) -> bool:
    return not gradient.of_nbytes and schedule.level_at.get(index, LiveBytes()).alone


def _held(step: StepTrace, gradients: frozenset[EntryRef]) -> tuple[int, int]:
    """Peak of live bytes from backward on, and while the optimizer goes on, if these gradients
    stay.

    When a call begins, all live bytes of others are counted beside its own peak, as a run does.
    """
    walk, most, in_steps = StepFootprint(), 0, 0
    calls = [call.with_staying(gradients) for call in step.calls]
    for call, after in zip(calls, [*calls[1:], calls[0]], strict=True):
        walk.begin(call.schedule)
        if call.phase is Phase.BACKWARD:
            most = max(most, walk.others + held_peak(call.schedule))
            walk.through(call.schedule)
        elif call.schedule.updates_late:
            most = max(most, walk.through(call.schedule))
        elif call.phase is Phase.STEP:
            in_steps = max(in_steps, walk.now)
        walk.end(after.phase)
    return max(most, in_steps), in_steps


NOTHING_STARTS: Mapping[int, Sequence[Instruction]] = MappingProxyType({})


def device_peak(
    schedule: Schedule, starts: Mapping[int, Sequence[Instruction]] = NOTHING_STARTS
) -> int:
    """Peak of bytes of the device that slots and values of a call take together.

    starts  instruction -> fetches of the next schedule that start after it
    """
    walk, taken, peak = StepFootprint(), 0, 0
    walk.begin(schedule)
    kept = walk.others - schedule.held_bytes  # a forward would have left as much
    for index, x in enumerate(schedule.effects):
        taken += x.taken_bytes
        if x.changes_live:
            peak = max(peak, taken + walk.rise() - kept)
            if x.is_gradient:
                walk.leave(x)
        elif x.lets_go:
            walk.let_go(x.lets_go)
        taken += sum(fetch.effects.taken_bytes for fetch in starts.get(index, ()))
        peak = max(peak, taken + walk.now - kept)
    return peak
