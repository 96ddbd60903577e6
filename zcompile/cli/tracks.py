"""Turns the record of a step into tracks, for `zinf report` and `zinf timeline --perfetto`.

A side, measured or predicted, has the instructions of compute in order, what passed each link, and
for each passage the instruction that sent it. Both sides begin with their first call, so that one
can be laid over the other; seconds before that are negative.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from zcompile.ir.serialize import MomentRecord, PassageRecord, StepRecord, TimelineRecord

LINKS = ("h2d", "d2h", "disk_read", "disk_write")
INBOUND = frozenset({"h2d", "disk_read"})
EPSILON_S = 1e-6
"""Two clocks of one host are read within this."""


@dataclass(frozen=True)
class Slice:
    """One instruction on the track of compute: `moment`-th of the record.

    stall_begin_s, stall_s  where compute, or the host, waited for it
    levels                  peaks of bytes, as in `MomentRecord`
    """

    moment: int
    begin_s: float
    end_s: float
    stall_begin_s: float
    stall_s: float
    levels: tuple[int, ...]


@dataclass(frozen=True)
class Hop:
    """A passage over a link.

    sender  moment that sent it; None: not known
    user    moment that first computes with what it brought; None: not known, or nothing did
    """

    link: str
    name: str
    nbytes: int
    begin_s: float
    end_s: float
    sender: int | None
    user: int | None


@dataclass(frozen=True)
class Span:
    """One call of the step."""

    call: int
    phase: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Side:
    """A step, measured or predicted: seconds since its first call began."""

    name: str
    step: StepRecord
    slices: tuple[Slice, ...]
    hops: tuple[Hop, ...]
    spans: tuple[Span, ...]


def sides(record: TimelineRecord) -> tuple[Side, ...]:
    """The predicted side, if there is one, and the measured one."""
    made = [_measured(record)]
    if record.predicted is not None and any(
        m.predicted_begin_s is not None for m in record.moments
    ):
        made.insert(0, _predicted(record, record.predicted))
    return tuple(made)


def _measured(record: TimelineRecord) -> Side:
    slices = tuple(
        Slice(n, m.begin_s, m.end_s, m.begin_s, min(m.stall_s, m.end_s - m.begin_s), m.levels)
        for n, m in enumerate(record.moments)
    )
    return _side("measured", record.measured, record.moments, slices, record.passages, 0.0)


def _predicted(record: TimelineRecord, step: StepRecord) -> Side:
    begun = min(m.predicted_begin_s for m in record.moments if m.predicted_begin_s is not None)
    slices = tuple(
        Slice(
            n,
            m.predicted_begin_s - begun,
            (m.predicted_end_s or m.predicted_begin_s) - begun,
            m.predicted_begin_s - begun - (m.predicted_stall_s or 0.0),
            m.predicted_stall_s or 0.0,
            m.predicted_levels,
        )
        for n, m in enumerate(record.moments)
        if m.predicted_begin_s is not None
    )
    return _side("predicted", step, record.moments, slices, record.predicted_passages, begun)


def _side(
    name: str,
    step: StepRecord,
    moments: Sequence[MomentRecord],
    slices: tuple[Slice, ...],
    passages: Sequence[PassageRecord],
    begun: float,
) -> Side:
    begins = {s.moment: s.begin_s + begun for s in slices}
    by_index = {(m.call, m.index): n for n, m in enumerate(moments)}
    senders = _senders(moments, begins, by_index, passages)
    hops = []
    for row, sender in zip(passages, senders, strict=True):
        used_by = moments[sender].used_by if sender is not None else None
        user = None
        if sender is not None and used_by is not None:
            user = by_index.get((moments[sender].call, used_by))
        times = row.begin_s - begun, row.end_s - begun
        hops.append(Hop(row.link, row.name, row.nbytes, *times, sender, user))
    return Side(name, step, slices, tuple(hops), tuple(_spans(moments, slices)))


def _spans(moments: Sequence[MomentRecord], slices: Sequence[Slice]) -> Iterator[Span]:
    for call, rows in groupby(slices, key=lambda s: moments[s.moment].call):
        several = list(rows)
        begin = min(s.begin_s for s in several)
        end = max(s.end_s for s in several)
        yield Span(call, moments[several[0].moment].phase, begin, end)


def _senders(
    moments: Sequence[MomentRecord],
    begins: Mapping[int, float],
    by_index: Mapping[tuple[int, int], int],
    passages: Sequence[PassageRecord],
) -> list[int | None]:
    """The moment that sent each passage.

    What was measured knows only the entry. Transfers of one entry keep their order, so the
    passages of a name, in their order, belong to the instructions that move it, in theirs: as many
    as have its bytes. What a fetch brings arrives before it is used, and what a store sends leaves
    after it. A passage that fits none was started for another step.
    """
    found: list[int | None] = [None] * len(passages)
    waiting: dict[tuple[str, str], deque[int]] = defaultdict(deque)
    for at, row in enumerate(passages):
        if row.call is not None and row.index is not None:
            found[at] = by_index.get((row.call, row.index))
        elif row.call is None:
            waiting[row.link, row.name].append(at)
    if not waiting or any(sender is not None for sender in found):
        return found
    for number, m in enumerate(moments):
        if not m.nbytes or number not in begins:
            continue
        inwards = m.stream in INBOUND
        if not (inwards or m.stream in LINKS):
            continue
        limit = begins[number]
        if inwards:
            user = by_index.get((m.call, m.used_by)) if m.used_by is not None else None
            limit = begins.get(user, limit) if user is not None else limit
        for link in LINKS:
            if (link in INBOUND) is inwards:
                for at in _taken(waiting[link, m.entry], passages, m.nbytes, limit, inwards):
                    found[at] = number
    return found


def _taken(
    rows: "deque[int]", passages: Sequence[PassageRecord], nbytes: int, limit: float, inwards: bool
) -> Iterator[int]:
    """The passages at the head of `rows` that carry `nbytes`, on the right side of `limit`."""
    while nbytes > 0 and rows:
        row = passages[rows[0]]
        if inwards and row.end_s > limit + EPSILON_S:
            return  # for a later use
        at = rows.popleft()
        if not inwards and row.end_s < limit - EPSILON_S:
            continue  # left over from the step before
        nbytes -= row.nbytes
        yield at
