"""The host's walk over a schedule: where each operand lies, and which events must come first.

The host runs ahead of all events, so only what the list names holds them back: compute acts in
order; a transfer starts after its tickets and ends at any later time; transfers of the same bytes
at home follow each other, and so do gathers, in the order in which they are started. Written
without a look at the verifier, whose word it checks.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

from zcompile.ir.schedule import (
    Agree,
    Borrow,
    Drop,
    Fetch,
    Free,
    Gather,
    Left,
    Literal,
    Offload,
    Reduce,
    Register,
    Run,
    Schedule,
    Slot,
    Store,
    Wait,
)

Event = tuple[int, str]
"""An instruction, and "compute", "start", "end" or "home" (a store's bytes have arrived)."""


class Broken(Exception):
    """What the host would raise as it walks the list."""


@dataclass(frozen=True)
class Place:
    """Where a register's bytes are: in the arena, at home, or made by an instruction (-1: given).

    where  "arena", the key of an entry, or None
    """

    where: Hashable
    begin: int
    end: int
    writes: bool = False
    maker: int = -1
    number: int = 0


@dataclass
class Listing:
    """What the host knows once it has walked the list: where each operand is, and what comes first.

    before  per event, those that must be over
    shares  per gather, in order: the bytes of its slot, begin and end, that this rank brings
    """

    operands: dict[int, list[Place]] = field(default_factory=dict)
    before: dict[Event, list[Event]] = field(default_factory=dict)
    results: list[Place | object] = field(default_factory=list)
    shares: dict[int, tuple[int, int]] = field(default_factory=dict)


def home_of(x: Fetch | Store | Borrow) -> Hashable:
    cast = getattr(x, "cast", None)
    return (int(x.entry), cast.copy_dtype if cast else None)


def extent_of(x: Fetch | Store | Borrow) -> tuple[int, int]:
    if isinstance(x, Borrow):
        return x.begin, x.begin + (x.layout.offset + x.layout.span) * x.layout.dtype.itemsize
    return x.begin, x.begin + x.nbytes


def written_registers(schedule: Schedule) -> frozenset[Register]:
    """The registers that compute changes: those whose slot is stored, or that it may write."""
    found, open_ = set(), {}
    for x in schedule.instructions:
        if isinstance(x, Wait):
            open_[x.slot] = x.register
        elif isinstance(x, Store):
            found.add(open_[x.slot])
        elif isinstance(x, Borrow) and x.writes:
            found.add(x.register)
    return frozenset(found)


def listed(schedule: Schedule, written: frozenset[Register]) -> Listing:
    """Walk the list as the host does. raises  Broken"""
    return _Host(schedule, written).walk()


class _Host:
    def __init__(self, schedule: Schedule, written: frozenset[Register]) -> None:
        self.schedule = schedule
        self.written = written
        self.made = Listing()
        self.registers = {r: Place(None, 0, 32, number=r) for r in range(schedule.inputs)}
        for register in (*(r for r, _ in schedule.constants), *schedule.operands):
            self.registers[register] = Place(None, 0, 32, number=register)
        self.givers: dict[int, Event] = {}
        self.taken: dict[Slot, int] = {}
        self.leaving: dict[int, Register] = {}
        self.moves: list[tuple[Hashable, int, int, bool, Event]] = []
        self.compute: Event | None = None

    def walk(self) -> Listing:
        for i, x in enumerate(self.schedule.instructions):
            match x:
                case Fetch():
                    self._take(x, i)
                    self._transfer(i, x.after, "end", (home_of(x), *extent_of(x), False))
                    self.givers[x.ticket] = (i, "end")
                case Store():
                    if self.taken.get(x.slot) is None:
                        raise Broken("a slot that nobody took goes home")
                    if x.nbytes > x.slot.nbytes:
                        raise Broken("more goes home than a slot holds")
                    self._transfer(i, x.after, "home", (home_of(x), *extent_of(x), True))
                    self.givers[x.ticket] = (i, "end")
                case Agree():
                    self._transfer(i, (), "end", None)
                    self.givers[x.ticket] = (i, "end")
                case Gather():
                    self._gather(i, x)
                case Reduce():
                    self.made.operands[i] = [self._read(x.value)]
                    self._transfer(i, x.after, "end", None)
                    if x.drop:
                        del self.registers[x.value]
                case Offload():
                    self.made.operands[i] = [self._read(x.value)]
                    self._transfer(i, x.after, "end", None)
                    self.givers[x.ticket] = (i, "end")
                    self.leaving[x.ticket] = x.value
                    self.registers[x.register] = Place(None, 0, 32, maker=i)
                case Left():
                    if self.leaving.pop(x.ticket, None) != x.register:
                        raise Broken("it is not under way")
                    self.made.operands[i] = [self._read(x.register)]
                    self._computes(i, [self.givers[x.ticket]])
                    del self.registers[x.register]
                case Wait():
                    self._wait(i, x)
                case Run():
                    self._run(i, x)
                case Borrow():
                    span = (home_of(x), *extent_of(x))
                    self._computes(i, self._blockers(*span, x.writes))
                    self.registers[x.register] = Place(*span, x.register in self.written)
                case Drop():
                    for register in x.registers:
                        self.registers.pop(register, None)
                case Free():
                    if self.taken.pop(x.slot, None) is None:
                        raise Broken("a slot that nobody took is given back")
                    self.registers.pop(x.register, None)
        if self.taken:
            raise Broken("a slot is kept")
        if self.leaving:
            raise Broken("a value is kept")
        self.made.results = [
            r.value if isinstance(r, Literal) else self._read(r) for r in self.schedule.outputs
        ]
        return self.made

    def _take(self, x: Fetch, i: int) -> None:
        if any(slot.overlaps(x.slot) for slot in self.taken):
            raise Broken("two slots overlap")
        if max(x.slot.end, x.slot.address + x.offset + x.nbytes) > self.schedule.arena_bytes:
            raise Broken("a slot lies beyond the arena")
        self.taken[x.slot] = i

    def _gather(self, i: int, x: Gather) -> None:
        if x.slot not in self.taken:
            raise Broken("shares meet in a slot that nobody took")
        if x.nbytes > x.slot.nbytes:
            raise Broken("more is gathered than a slot holds")
        fetch = self.schedule.instructions[self.taken[x.slot]]
        assert isinstance(fetch, Fetch)
        self._transfer(i, x.after, "end", None)
        if self.made.shares:
            self.made.before[i, "start"].append((max(self.made.shares), "end"))
        self.made.shares[i] = fetch.offset, fetch.offset + fetch.nbytes
        self.givers[x.ticket] = (i, "end")

    def _wait(self, i: int, x: Wait) -> None:
        if x.ticket not in self.givers or not self._is_taken(x.slot):
            raise Broken("it waits for what was not started")
        end = (x.layout.offset + x.layout.span) * x.layout.dtype.itemsize
        if x.offset + end > x.slot.nbytes:
            raise Broken("a tensor is larger than its slot")
        self._computes(i, [self.givers[x.ticket]])
        address = x.slot.address + x.offset
        self.registers[x.register] = Place(
            "arena", address, address + end, x.register in self.written
        )

    def _is_taken(self, slot: Slot) -> bool:
        """Whether slots that were taken fill it, side by side."""
        inside = (s for s in self.taken if slot.address <= s.address and s.end <= slot.end)
        return sum(s.nbytes for s in inside) == slot.nbytes

    def _run(self, i: int, x: Run) -> None:
        self.made.operands[i] = [self._read(r) for r in x.inputs]
        self._computes(i, [])
        for register in x.drops:
            self.registers.pop(register, None)
        for number, register in enumerate(x.outputs):
            self.registers[register] = Place(None, 0, 32, maker=i, number=number)
        if x.ticket is not None:
            self.givers[x.ticket] = (i, "compute")

    def _read(self, register: Register) -> Place:
        if register not in self.registers:
            raise Broken("a register is read that holds nothing")
        return self.registers[register]

    def _computes(self, i: int, after: list[Event]) -> None:
        chain = [self.compute] if self.compute else []
        self.compute = (i, "compute")
        self.made.before[self.compute] = [*chain, *after]

    def _transfer(
        self,
        i: int,
        after: tuple[int, ...],
        last: str,
        span: tuple[Hashable, int, int, bool] | None,
    ) -> None:
        if any(t not in self.givers for t in after):
            raise Broken("it waits for a ticket that nobody gave")
        before = [self.givers[t] for t in after]
        before += self._blockers(*span) if span else []
        self.made.before[i, "start"] = before
        self.made.before[i, "end"] = [(i, "start")]
        if last == "home":
            self.made.before[i, "home"] = [(i, "end")]
        if span:
            self.moves.append((*span, (i, last)))

    def _blockers(self, key: Hashable, begin: int, end: int, writes: bool) -> list[Event]:
        return [
            event
            for other, low, high, wrote, event in self.moves
            if other == key and low < end and begin < high and (writes or wrote)
        ]
