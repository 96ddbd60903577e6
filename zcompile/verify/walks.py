"""One walk of a schedule as the proof sees it: registers, tickets, the slots that are taken."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from zcompile.errors import ScheduleInvalid
from zcompile.ir.printer import instruction_row
from zcompile.ir.schedule import (
    Borrow,
    EntryIndex,
    Fetch,
    Instruction,
    Offload,
    Reduce,
    Register,
    Schedule,
    Slot,
    Store,
    Ticket,
)
from zcompile.verify.byte_ranges import ByteRanges
from zcompile.verify.happens_before import NEVER, Transfer
from zcompile.verify.home_bytes import Copies, Span, moved_and_borrowed, span_of


@dataclass(frozen=True)
class Called:
    """A schedule and what its call is about.

    entries  what stands for the entry behind each index, the same in every call; empty: the index
    copies   the entries that hold copies in other dtypes
    """

    schedule: Schedule
    entries: Sequence[Hashable] = ()
    copies: Copies = field(default_factory=dict)

    def spans(self) -> list[Span | None]:
        """Per instruction, the bytes at home that it reads or writes."""
        rows = self.schedule.instructions
        most = max((int(x.entry) for x in rows if isinstance(x, Fetch | Store | Borrow)), default=0)
        entries = self.entries or range(most + 1)
        return [
            span_of(x, entries, self.copies) if isinstance(x, Fetch | Store | Borrow) else None
            for x in rows
        ]


@dataclass(eq=False)
class Use:
    """A slot, from the fetch that takes it to its release.

    walk     number of the walk that it belongs to
    span     the bytes at home that it brings
    at       when the fetch was submitted
    brought  the fetch itself
    touched  the last moment of compute that may have read or written it
    stores   transfers home that read it
    """

    walk: int
    fetch: Fetch
    span: Span
    at: int
    brought: Transfer
    touched: int = NEVER
    stores: list[Transfer] = field(default_factory=list)
    freed: bool = False


class _Tiles:
    """What left of one contribution to a gradient of `nbytes`."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = self.missing = nbytes
        self.left: ByteRanges[bool] = ByteRanges()


class Walk:
    """number  tells it from those before it
    begun   the moment it began
    given   fetches of it that were under way by then
    """

    def __init__(
        self, called: Called, number: int, begun: int, given: Mapping[Ticket, Use]
    ) -> None:
        self.schedule = schedule = called.schedule
        self.number = number
        self.begun = begun
        self.index = 0
        """Of the instruction at hand."""
        self.spans = called.spans()
        self.torn = moved_and_borrowed(schedule, self.spans)
        self.given = given
        self.last_run = NEVER
        self.transfers: dict[Ticket, Transfer] = {}
        self.moments: dict[Ticket, int] = {}
        self.leaving: dict[Ticket, Offload] = {}
        """Values whose departure compute has not waited for."""
        self.taken = {use.fetch.slot: use for use in given.values()}
        self.made_at = {Register(r): begun for r in range(schedule.inputs)}
        self.made_at |= {register: begun for register, _ in schedule.constants}
        self.bound: dict[Register, Use] = {}
        self.borrowed: dict[Register, Span] = {}
        self.written_in_place: dict[Register, Span] = {}
        self._leaving: dict[EntryIndex, _Tiles] = {}

    @property
    def span(self) -> Span:
        """The bytes at home of the instruction at hand."""
        span = self.spans[self.index]
        assert span is not None
        return span

    def written(self) -> list[Hashable]:
        """The entries whose bytes at home it writes."""
        rows = zip(self.schedule.instructions, self.spans, strict=True)
        return [s.entry for x, s in rows if s is not None and _writes(x)]

    def new(self, ticket: Ticket) -> None:
        if ticket in self.transfers or ticket in self.moments:
            raise self.fail(f"ticket {ticket} is given out twice")

    def after(self, tickets: Sequence[Ticket]) -> tuple[list[int], list[Transfer]]:
        """The moments of compute and the transfers that these stand for."""
        for ticket in tickets:
            if ticket not in self.transfers and ticket not in self.moments:
                raise self.fail(f"it waits for ticket {ticket}, which nothing before it gives out")
        return (
            [self.moments[t] for t in tickets if t in self.moments],
            [self.transfers[t] for t in tickets if t in self.transfers],
        )

    def use_of(self, slot: Slot, name: str) -> Use:
        if slot not in self.taken:
            raise self.fail(f"{name!r} has no slot {slot} that is taken here")
        return self.taken[slot]

    def forget(self, register: Register) -> None:
        """It is not to be read any more."""
        self.made_at.pop(register, None)
        self.bound.pop(register, None)
        self.borrowed.pop(register, None)
        self.written_in_place.pop(register, None)

    def define(self, register: Register, moment: int) -> None:
        self.forget(register)
        self.made_at[register] = moment

    def tile_leaves(self, reduce: Reduce) -> None:
        """A tile of a gradient: none of its bytes left before in the same contribution."""
        begin, end = reduce.begin, reduce.begin + reduce.nbytes
        tiles = self._leaving.setdefault(reduce.entry, _Tiles(reduce.of_nbytes))
        if not reduce.nbytes or end > reduce.of_nbytes or tiles.nbytes != reduce.of_nbytes:
            raise self.fail(
                f"bytes {begin} to {end} of the gradient of {reduce.name!r}, which has "
                f"{tiles.nbytes}, are no tile of it"
            )
        if tiles.left.over(begin, end):
            raise self.fail(
                f"bytes {begin} to {end} of the gradient of {reduce.name!r} leave before the "
                "contribution that they left in is whole"
            )
        tiles.left.put(begin, end, True)
        tiles.missing -= reduce.nbytes
        if not tiles.missing:
            del self._leaving[reduce.entry]

    def all_tiles_left(self) -> None:
        for entry, tiles in self._leaving.items():
            raise self.fail(
                f"{tiles.missing} bytes of the gradient of {self.schedule.names.get(entry)!r} "
                "never leave"
            )

    def fail(self, why: str) -> ScheduleInvalid:
        """The sentence, and the instructions around the one it is about."""
        rows = self.schedule.instructions
        first = max(0, self.index - 3)
        shown = [
            f"  {'>' if i == self.index else ' '} {i:>5}  "
            + "  ".join(str(part) for part in instruction_row(rows[i]) if part is not None)
            for i in range(first, min(len(rows), self.index + 2))
        ]
        return ScheduleInvalid(why, "\n".join(shown))


def _writes(x: Instruction) -> bool:
    return isinstance(x, Store) or (isinstance(x, Borrow) and x.writes)
