"""Proves a schedule safe, without a device.

Compute instructions act in order; a transfer acts at any time between its start and the first
instruction that waits for it. So for every byte of the arena: a fetch may begin only when every
earlier reader and writer of that byte has ended, which its `after` must say; a read may happen
only after the wait for the fetch that wrote. Budgets hold at every instant.
"""

from dataclasses import dataclass, field

from zcompile.errors import ScheduleInvalid
from zcompile.printer import instruction_row
from zcompile.schedule import (
    Borrow,
    Fetch,
    Free,
    Instruction,
    Literal,
    Reduce,
    Register,
    Run,
    Schedule,
    Slot,
    Store,
    Ticket,
    Wait,
)


def verify_schedule(schedule: Schedule) -> None:
    """raises  ScheduleInvalid with the sentence and the instruction, on the first unsafe one"""
    proof = _Proof(schedule)
    for index, instruction in enumerate(schedule.instructions):
        proof.index = index
        proof.step(instruction)
    proof.end()


@dataclass
class _Use:
    """What was last done with a range of the arena.

    reads   index of the last compute that may read it
    stores  tickets of transfers that read it
    """

    slot: Slot
    fetch: Fetch
    reads: int = -1
    stores: list[Ticket] = field(default_factory=list)
    waited: bool = False
    freed: bool = False


@dataclass
class _Proof:
    schedule: Schedule
    index: int = 0
    uses: list[_Use] = field(default_factory=list)
    defined: set[Register] = field(default_factory=set)
    bound: dict[Register, _Use] = field(default_factory=dict)
    made_at: dict[Register, int] = field(default_factory=dict)
    run_of: dict[Ticket, int] = field(default_factory=dict)
    tickets: set[Ticket] = field(default_factory=set)
    taken: int = 0
    peak: int = 0

    def __post_init__(self) -> None:
        self.defined |= {Register(r) for r in range(self.schedule.inputs)}
        self.defined |= {register for register, _ in self.schedule.constants}

    def fail(self, why: str) -> ScheduleInvalid:
        rows = self.schedule.instructions
        start = max(0, self.index - 3)
        shown = [
            f"  {'>' if i == self.index else ' '} {i:>5}  "
            + "  ".join(str(part) for part in instruction_row(rows[i]) if part is not None)
            for i in range(start, min(len(rows), self.index + 2))
        ]
        return ScheduleInvalid(why, "\n".join(shown))

    def step(self, instruction: Instruction) -> None:
        match instruction:
            case Fetch():
                self._fetch(instruction)
            case Wait():
                self._wait(instruction)
            case Run():
                self._run(instruction)
            case Free():
                self._free(instruction)
            case Reduce():
                self._reduce(instruction)
            case Store():
                self._store(instruction)
            case Borrow():
                self._borrow(instruction)

    def _new(self, ticket: Ticket) -> None:
        if ticket in self.tickets:
            raise self.fail(f"ticket {ticket} is given out twice")
        self.tickets.add(ticket)

    def _known(self, after: tuple[Ticket, ...]) -> None:
        for ticket in after:
            if ticket not in self.tickets:
                raise self.fail(f"it waits for ticket {ticket}, which nothing before it gives out")

    def _fetch(self, fetch: Fetch) -> None:
        self._known(fetch.after)
        if fetch.nbytes > fetch.slot.nbytes:
            raise self.fail(f"{fetch.name!r} brings {fetch.nbytes} bytes into {fetch.slot.nbytes}")
        if fetch.slot.end > self.schedule.arena_bytes:
            raise self.fail(f"the slot of {fetch.name!r} ends beyond the arena")
        passed = max((self.run_of.get(t, -1) for t in fetch.after), default=-1)
        for use in self.uses:
            if not use.slot.overlaps(fetch.slot):
                continue
            if not use.freed:
                raise self.fail(f"{fetch.name!r} lies over {use.fetch.name!r}, which is taken")
            if use.reads > passed:
                raise self.fail(
                    f"the fetch of {fetch.name!r} does not wait for the compute that "
                    f"reads {use.fetch.name!r} in the same bytes"
                )
            if not set(use.stores) <= set(fetch.after):
                raise self.fail(
                    f"the fetch of {fetch.name!r} does not wait for the store of "
                    f"{use.fetch.name!r} from the same bytes"
                )
        self._new(fetch.ticket)
        self.uses = [u for u in self.uses if not _covers(fetch.slot, u.slot)]
        self.uses.append(_Use(fetch.slot, fetch))
        self.taken += fetch.slot.nbytes
        self.peak = max(self.peak, self.taken)
        budget = self.schedule.budget_bytes
        if budget is not None and self.taken > budget:
            raise self.fail(f"{self.taken} bytes are taken at once, the budget is {budget}")

    def _use(self, slot: Slot, name: str) -> _Use:
        for use in reversed(self.uses):
            if use.slot == slot and not use.freed:
                return use
        raise self.fail(f"{name!r} has no slot {slot} that is taken here")

    def _wait(self, wait: Wait) -> None:
        use = self._use(wait.slot, wait.name)
        if use.fetch.ticket != wait.ticket:
            raise self.fail(
                f"it waits for ticket {wait.ticket}, the bytes come with {use.fetch.ticket}"
            )
        end = (wait.layout.offset + wait.layout.span) * wait.layout.dtype.itemsize
        if end > use.fetch.nbytes:
            raise self.fail(
                f"{wait.name!r} reads {end} bytes of {use.fetch.nbytes} that were brought"
            )
        use.waited = True
        self.bound[wait.register] = use
        self.defined.add(wait.register)

    def _run(self, run: Run) -> None:
        for register in run.inputs:
            self._read(register)
        for register in run.outputs:
            self.defined.add(register)
            self.made_at[register] = self.index
        for register in run.drops:
            self.defined.discard(register)
        if run.ticket is not None:
            self._new(run.ticket)
            self.run_of[run.ticket] = self.index

    def _read(self, register: Register) -> None:
        if register not in self.defined:
            raise self.fail(
                f"register {register} is read before its wait, or after it was given back"
            )
        if register in self.bound:
            use = self.bound[register]
            if use.stores:
                raise self.fail(f"{use.fetch.name!r} is computed with while its store reads it")
            use.reads = self.index

    def _free(self, free: Free) -> None:
        use = self._use(free.slot, free.name)
        if not use.waited:
            raise self.fail(f"{free.name!r} is given back while its fetch may still write")
        use.freed = True
        # Views of the value may have been read by later regions than the value itself.
        use.reads = max(use.reads, self._last_run())
        self.defined.discard(free.register)
        self.bound.pop(free.register, None)
        self.taken -= free.slot.nbytes

    def _last_run(self) -> int:
        rows = self.schedule.instructions
        return next((i for i in range(self.index, -1, -1) if isinstance(rows[i], Run)), -1)

    def _reduce(self, reduce: Reduce) -> None:
        self._known(reduce.after)
        self._read(reduce.value)
        passed = max((self.run_of.get(t, -1) for t in reduce.after), default=-1)
        if self.made_at.get(reduce.value, -1) > passed:
            raise self.fail(f"the gradient of {reduce.name!r} leaves before it is computed")
        if reduce.drop:
            self.defined.discard(reduce.value)

    def _store(self, store: Store) -> None:
        self._known(store.after)
        use = self._use(store.slot, store.name)
        if not use.waited:
            raise self.fail(f"{store.name!r} is stored before its fetch is waited for")
        passed = max((self.run_of.get(t, -1) for t in store.after), default=-1)
        if use.reads > passed:
            raise self.fail(
                f"the store of {store.name!r} does not wait for the compute that writes it"
            )
        if store.nbytes > use.fetch.nbytes:
            raise self.fail(f"{store.name!r} stores more bytes than were brought")
        self._new(store.ticket)
        use.stores.append(store.ticket)

    def _borrow(self, borrow: Borrow) -> None:
        moved = {i.entry for i in self.schedule.instructions if isinstance(i, Fetch | Store)}
        if borrow.entry in moved:
            raise self.fail(f"{borrow.name!r} is computed with where it rests, and moved as well")
        self.defined.add(borrow.register)

    def end(self) -> None:
        for use in self.uses:
            if not use.freed:
                raise self.fail(f"{use.fetch.name!r} is never given back")
        for result in self.schedule.outputs:
            if not isinstance(result, Literal) and result not in self.defined:
                raise self.fail(f"register {result} is returned, and nothing made it")
        if self.peak != self.schedule.peak_bytes:
            raise self.fail(
                f"the peak is {self.peak} bytes, the schedule says {self.schedule.peak_bytes}"
            )


def _covers(outer: Slot, inner: Slot) -> bool:
    return outer.address <= inner.address and inner.end <= outer.end
