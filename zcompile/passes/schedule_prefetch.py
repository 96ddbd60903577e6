"""Starts each fetch early enough to be there in time, and no earlier than the budget allows."""

from collections.abc import Mapping, Sequence

from zcompile.ir.schedule import ReadValue, RegionProgram, Register
from zcompile.ir.types import aligned
from zcompile.memory.allocator import fits_quickly, live_peak
from zcompile.memory.earliest import earliest_places
from zcompile.memory.window import Need, blocks_of, check_fits, in_place

NEARLY_ALL = 0.95
"""Starts are not searched for where those that go with the earliest places fetch so much ahead, of
what could be fetched if addresses were no matter."""


def schedule_prefetch(program: RegionProgram, max_lead: int) -> RegionProgram:
    """Start fetches ahead of the regions that they can hide behind.

        a: read by region 0, starts before 0          a: read by region 0, starts before 0
        b: read by region 1, starts before 1    ->    b: read by region 1, starts before 0

    Of a tensor that ranks hold shares of, all are gathered as soon as this rank's is there, and
    updated, but not before those that are read earlier. A part of a value comes with what is read
    beside it, once the slot of the whole is taken.

    max_lead  regions that a fetch may start ahead of its first reader; 0 leaves each right there
    raises    BudgetExceeded, if what regions read together does not fit the arena
    """
    needs = [Need(v.name, v.first, v.last, v.nbytes) for v in program.slotted]
    where = program.outline.phase.value
    starts = iter(choose_starts(needs, program.budget_bytes, max_lead, where))
    slotted = {v.register: next(starts) for v in program.slotted}
    values = [v._replace(start=slotted.get(v.register, v.start)) for v in program.values]
    values = _parts_beside(values, slotted)
    gathers = _in_order_of_readers(values)
    return program.with_values(
        v if v.share is None else v._replace(gather=gathers[v.share.order]) for v in values
    )


def choose_starts(
    needs: Sequence[Need], budget_bytes: int | None, max_lead: int, where: str
) -> tuple[int, ...]:
    """For each fetch the region before which it starts: that of its first reader, or up to
    `max_lead` earlier.

    Needs come in the order of their first readers. Soonest first, each is moved as early as the
    bytes of the window permit. Where addresses do not fit then, each starts as soon as there is a
    place for it (`memory/earliest.py`), or as early as the bytes allowed in flight permit, which
    are as many, found by bisection, as addresses still fit for: whichever fetches more ahead.

    where   phase, for the error
    raises  BudgetExceeded, if they do not fit even without any lead
    """
    latest = in_place(needs)
    if budget_bytes is None:
        return tuple(max(0, first - max_lead) for first in latest)
    if not fits_quickly(blocks_of(needs, latest), budget_bytes):
        check_fits(needs, budget_bytes, where)
        return latest  # addresses are hard enough to find as it is
    best, low, high = latest, live_peak(blocks_of(needs, latest)), budget_bytes
    starts = _leads(needs, high, max_lead)
    if fits_quickly(blocks_of(needs, starts), budget_bytes):
        return starts
    soonest = _soonest(needs, budget_bytes, max_lead)
    if _ahead(needs, soonest) >= NEARLY_ALL * _ahead(needs, starts):
        return soonest
    fit = {latest: True, starts: False}  # a little more allowed seldom changes anything
    for _ in range(12):
        allowance = (low + high) // 2
        starts = _leads(needs, allowance, max_lead)
        if starts not in fit:
            fit[starts] = fits_quickly(blocks_of(needs, starts), budget_bytes)
        if fit[starts]:
            best, low = starts, allowance
        else:
            high = allowance
    return max(best, soonest, key=lambda starts: _ahead(needs, starts))


def _soonest(needs: Sequence[Need], budget_bytes: int, max_lead: int) -> tuple[int, ...]:
    """For each fetch the earliest start for which there is a place; the latest starts, where some
    value finds none."""
    places = earliest_places(needs, budget_bytes)
    if places is None:
        return in_place(needs)
    rows = zip(needs, places, strict=True)
    return tuple(max(0, need.first - max_lead, place.free_from) for need, place in rows)


def _ahead(needs: Sequence[Need], starts: Sequence[int]) -> int:
    """Bytes that are fetched ahead, each as often as there are regions between."""
    rows = zip(needs, starts, strict=True)
    return sum(need.nbytes * (need.first - start) for need, start in rows)


def _parts_beside(values: Sequence[ReadValue], slotted: Mapping[Register, int]) -> list[ReadValue]:
    """The values, of which parts start with the earliest value that is read first by the same
    region, but not before the whole; where there is none, with the whole, whose slot is there.

    slotted  register of a value with a slot of its own -> the region before which it starts
    """
    soonest: dict[int, int] = {}
    for v in values:
        if v.register in slotted:
            soonest[v.first] = min(v.start, soonest.get(v.first, v.start))

    def placed(v: ReadValue) -> ReadValue:
        if v.in_place or v.part_of is None:
            return v
        whole = slotted[v.part_of]
        return v._replace(start=max(whole, soonest.get(v.first, whole)))

    return list(map(placed, values))


def _in_order_of_readers(values: Sequence[ReadValue]) -> dict[int, int]:
    """The region before which each gather starts, by its order in the graph.

    All ranks gather in that order, which is up to the graph alone, and not to what a rank has room
    for, or updates late. A gather starts no later than its first reader, since those that it waits
    for are read before it.
    """
    made, latest = dict[int, int](), 0
    rows = [(v.share, v.start) for v in values if v.share is not None]
    for share, start in sorted(rows, key=lambda row: row[0].order):
        made[share.order] = latest = max(start, share.updated, latest)
    return made


def _leads(needs: Sequence[Need], allowance: int, max_lead: int) -> tuple[int, ...]:
    """For each fetch the earliest start with which at most `allowance` bytes are taken at once."""
    last = max((need.last for need in needs), default=0)
    alive = [0] * (last + 1)
    sizes = [aligned(need.nbytes) for need in needs]
    for need, size in zip(needs, sizes, strict=True):
        for region in range(need.first, need.last + 1):
            alive[region] += size
    starts = []
    for need, size in zip(needs, sizes, strict=True):
        start, earliest, most = need.first, max(0, need.first - max_lead), allowance - size
        while start > earliest and alive[start - 1] <= most:
            start -= 1
            alive[start] += size
        starts.append(start)
    return tuple(starts)
