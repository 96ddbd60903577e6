"""The rules that a safe schedule keeps, applied to one instruction after the other.

Every access of every byte can be read off the list: a fetch writes a slot, compute touches it at
the runs that read its register, and through views at any run until it is given back; a store or a
gradient reads it; a borrow touches an entry where it rests. Two accesses of the same bytes, one of
them writing, must be ordered by `happens_before`, the way that was meant. What the runtime promises
beyond the list:

    a fetch comes after all compute that was submitted before its walk began
    a fetch comes after what earlier walks still move out of the bytes it will lie in, and after
    gradients that leave from there, whose end has no ticket
    transfers of the same bytes of an entry take effect at home in the order of their submission,
    and a borrow waits for those before it

That the memory of a gradient that stays is its own is read off its level (`memory/storages.py`);
the runtime looks once more at its bytes and strides, before it keeps it.
"""

from collections.abc import Mapping

from zcompile.ir.schedule import (
    Borrow,
    Fetch,
    Free,
    Left,
    Literal,
    Offload,
    Reduce,
    Run,
    Store,
    Ticket,
    Wait,
)
from zcompile.ir.types import ALIGNMENT, Level, aligned
from zcompile.verify.byte_ranges import ByteRanges
from zcompile.verify.happens_before import BEGUN, start
from zcompile.verify.home_bytes import HomeBytes, Span
from zcompile.verify.walks import Called, Use, Walk


class Proof:
    """Of one walk, or of several that follow each other.

    now    counts what is submitted; a moment of compute is the count of its instruction
    taken  bytes of the slots that are taken
    peak   the most of them in the walk at hand
    """

    def __init__(self) -> None:
        self.now = BEGUN
        self.taken = self.peak = 0
        self._walks = 0
        self._arena: ByteRanges[Use] = ByteRanges()
        self._homes: HomeBytes[Use] = HomeBytes()

    def begin(self, called: Called, given: Mapping[Ticket, Use]) -> Walk:
        self._walks += 1
        self.peak = self.taken
        walk = Walk(called, self._walks, self.now, given)
        self._homes.watch(walk.written())
        return walk

    def step(self, walk: Walk, index: int) -> None:
        """The next instruction of `walk`. raises  ScheduleInvalid"""
        walk.index = index
        self.now += 1
        match walk.schedule.instructions[index]:
            case Fetch() as fetch:
                self._fetch(walk, fetch)
            case Wait() as wait:
                self._wait(walk, wait)
            case Run() as run:
                self._run(walk, run)
            case Free() as free:
                self._free(walk, free)
            case Reduce() as reduce:
                self._reduce(walk, reduce)
            case Store() as store:
                self._store(walk, store)
            case Borrow() as borrow:
                self._borrow(walk, borrow)
            case Offload() as offload:
                self._offload(walk, offload)
            case Left() as left:
                _left(walk, left, self.now)

    def end(self, walk: Walk) -> None:
        """All of `walk` was stepped through. raises  ScheduleInvalid"""
        for use in walk.taken.values():
            raise walk.fail(f"{use.fetch.name!r} is never given back")
        for offload in walk.leaving.values():
            raise walk.fail(f"nobody waits until {offload.name!r} has left")
        walk.all_tiles_left()
        for result in walk.schedule.outputs:
            if not isinstance(result, Literal) and result not in walk.made_at:
                raise walk.fail(f"register {result} is returned, and nothing made it")
            if result in walk.borrowed:
                raise walk.fail(f"register {result} is returned, and lies in an entry's own bytes")

    def hand(self, walk: Walk, fetch: Fetch, span: Span) -> Use:
        """`fetch`, which is of the walk after `walk`, starts here. raises  ScheduleInvalid"""
        moment = self.now
        self.now += 1
        use = Use(walk.number + 1, fetch, span, self.now, start([moment], ()))
        self._take(walk, use)
        return use

    def _fetch(self, walk: Walk, fetch: Fetch) -> None:
        moments, transfers = walk.after(fetch.after)
        walk.new(fetch.ticket)
        if fetch.ticket in walk.given:
            walk.transfers[fetch.ticket] = walk.given[fetch.ticket].brought
            return
        brought = start([walk.begun, *moments], transfers)
        use = Use(walk.number, fetch, walk.span, self.now, brought)
        self._take(walk, use)
        walk.transfers[fetch.ticket] = brought
        walk.taken[fetch.slot] = use

    def _take(self, walk: Walk, use: Use) -> None:
        """The bytes of a fetch's slot are its own from here on, if nothing else is at them."""
        fetch, slot = use.fetch, use.fetch.slot
        # A read from disk may fill whole granules, so that it reaches into the padding.
        if fetch.nbytes and aligned(fetch.nbytes) > slot.nbytes:
            raise walk.fail(f"{fetch.name!r} brings {fetch.nbytes} bytes into {slot.nbytes}")
        if slot.address % ALIGNMENT:
            raise walk.fail(
                f"the slot of {fetch.name!r} begins at {slot.address}, between two multiples "
                f"of {ALIGNMENT}"
            )
        if use.walk == walk.number and slot.end > walk.schedule.arena_bytes:
            raise walk.fail(f"the slot of {fetch.name!r} ends beyond the arena")
        if use.walk == walk.number and slot.address < walk.schedule.annex_at:
            raise walk.fail(f"the slot of {fetch.name!r} begins before the annex")
        for old in self._arena.over(slot.address, slot.end):
            self._may_overwrite(walk, use, old)
        self._arena.put(slot.address, slot.end, use)
        self.taken += slot.nbytes
        self.peak = max(self.peak, self.taken)
        budget = walk.schedule.budget_bytes
        if budget is not None and self.taken > budget:
            raise walk.fail(f"{self.taken} bytes are taken at once, the budget is {budget}")

    def _may_overwrite(self, walk: Walk, use: Use, old: Use) -> None:
        new, name = use.fetch.name, old.fetch.name
        if not old.freed:
            raise walk.fail(f"{new!r} lies over {name!r}, which is taken")
        if not use.brought.starts_after(old.touched):
            raise walk.fail(
                f"the fetch of {new!r} does not wait for the compute that "
                f"reads {name!r} in the same bytes"
            )
        if not use.brought.starts_after_end_of(old.brought):
            raise walk.fail(
                f"the fetch of {new!r} does not wait for the fetch of {name!r} into the same bytes"
            )
        if old.walk == use.walk and not all(map(use.brought.starts_after_end_of, old.stores)):
            raise walk.fail(
                f"the fetch of {new!r} does not wait for the store of {name!r} from the same bytes"
            )

    def _wait(self, walk: Walk, wait: Wait) -> None:
        use = walk.use_of(wait.slot, wait.name)
        if use.fetch.ticket != wait.ticket:
            raise walk.fail(
                f"it waits for ticket {wait.ticket}, the bytes come with {use.fetch.ticket}"
            )
        end = (wait.layout.offset + wait.layout.span) * wait.layout.dtype.itemsize
        if end > use.fetch.nbytes:
            raise walk.fail(
                f"{wait.name!r} reads {end} bytes of {use.fetch.nbytes} that were brought"
            )
        use.brought.wait_at(self.now)
        walk.define(wait.register, self.now)
        walk.bound[wait.register] = use

    def _run(self, walk: Walk, run: Run) -> None:
        for register in run.inputs:
            if register not in walk.made_at:
                raise walk.fail(
                    f"register {register} is read before its wait, or after it was given back"
                )
            if register in walk.bound:
                self._touch(walk, walk.bound[register])
            elif register in walk.written_in_place:
                self._homes.write_in_place(walk.written_in_place[register], self.now)
        for register in run.drops:
            walk.forget(register)
        for register in run.outputs:
            walk.define(register, self.now)
        walk.last_run = self.now
        if run.ticket is not None:
            walk.new(run.ticket)
            walk.moments[run.ticket] = self.now

    def _touch(self, walk: Walk, use: Use) -> None:
        """Compute reads and, in an optimizer's step, writes a slot."""
        name = use.fetch.name
        if not all(store.ended_by(self.now) for store in use.stores):
            raise walk.fail(f"{name!r} is computed with while its store reads it")
        if not self._homes.read(use.span, use, use.at, self.now):
            raise walk.fail(f"{name!r} was brought before what earlier compute made of it")
        use.touched = self.now

    def _free(self, walk: Walk, free: Free) -> None:
        use = walk.use_of(free.slot, free.name)
        if not use.brought.ended_by(self.now):
            raise walk.fail(f"{free.name!r} is given back while its fetch may still write")
        use.freed = True
        # Views of the value may have been read by later regions than the value itself.
        use.touched = max(use.touched, walk.last_run)
        walk.forget(free.register)
        for register in [r for r, bound in walk.bound.items() if bound is use]:
            walk.forget(register)
        del walk.taken[free.slot]
        self.taken -= free.slot.nbytes

    def _reduce(self, walk: Walk, reduce: Reduce) -> None:
        if reduce.value not in walk.made_at:
            raise walk.fail(f"register {reduce.value} is sent home, and nothing made it")
        if reduce.value in walk.borrowed:
            raise walk.fail(
                f"the gradient of {reduce.name!r} lies in an entry's own bytes, "
                "which may change while it leaves"
            )
        leaves = start(*walk.after(reduce.after))
        if not leaves.starts_after(walk.made_at[reduce.value]):
            raise walk.fail(f"the gradient of {reduce.name!r} leaves before it is computed")
        if reduce.of_nbytes:
            walk.tile_leaves(reduce)
        if reduce.stays:
            _stays(walk, reduce)
        if reduce.drop:
            walk.forget(reduce.value)

    def _offload(self, walk: Walk, offload: Offload) -> None:
        value, name = offload.value, offload.name
        if value not in walk.made_at:
            raise walk.fail(f"register {value} is offloaded, and nothing made it")
        if value in walk.borrowed or value in walk.bound:
            raise walk.fail(f"{name!r} is offloaded, and lies in bytes of an entry or of the arena")
        leaves = start(*walk.after(offload.after))
        if not leaves.starts_after(walk.made_at[value]):
            raise walk.fail(f"{name!r} leaves before it is computed")
        walk.new(offload.ticket)
        walk.transfers[offload.ticket] = leaves
        walk.leaving[offload.ticket] = offload
        walk.define(offload.register, self.now)

    def _store(self, walk: Walk, store: Store) -> None:
        use = walk.use_of(store.slot, store.name)
        leaves = start(*walk.after(store.after))
        if not use.brought.ended_by(self.now):
            raise walk.fail(f"{store.name!r} is stored before its fetch is waited for")
        if not leaves.starts_after(use.touched):
            raise walk.fail(
                f"the store of {store.name!r} does not wait for the compute that writes it"
            )
        if not leaves.starts_after_end_of(use.brought):
            raise walk.fail(f"the store of {store.name!r} does not wait for its fetch")
        if store.nbytes > use.fetch.nbytes:
            raise walk.fail(f"{store.name!r} stores more bytes than were brought")
        if not self._homes.store(walk.span, use, use.touched, self.now):
            raise walk.fail(f"{store.name!r} goes home after later compute read it from there")
        walk.new(store.ticket)
        walk.transfers[store.ticket] = leaves
        use.stores.append(leaves)

    def _borrow(self, walk: Walk, borrow: Borrow) -> None:
        if walk.span in walk.torn:
            raise walk.fail(f"{borrow.name!r} is computed with where it rests, and moved as well")
        walk.define(borrow.register, self.now)
        walk.borrowed[borrow.register] = walk.span
        if borrow.writes:
            walk.written_in_place[borrow.register] = walk.span


def _stays(walk: Walk, reduce: Reduce) -> None:
    """It becomes an entry as it is: all that comes for one, which the call reads no more, and in
    memory of its own."""
    if reduce.entry not in walk.schedule.lone_gradients:
        raise walk.fail(f"the gradient of {reduce.name!r} stays, and is not all that comes for it")
    if not reduce.drop:
        raise walk.fail(f"the gradient of {reduce.name!r} stays, and is read later as a value")
    if not walk.schedule.level_at.get(walk.index, Level()).alone:
        raise walk.fail(f"the gradient of {reduce.name!r} stays, in memory that is not its own")


def _left(walk: Walk, left: Left, now: int) -> None:
    """The memory of a value that was offloaded is given back."""
    offload = walk.leaving.pop(left.ticket, None)
    if offload is None or offload.value != left.register:
        raise walk.fail(f"register {left.register} does not leave with ticket {left.ticket}")
    if left.register not in walk.made_at:
        raise walk.fail(f"the memory of {left.name!r} was given back before")
    walk.transfers[left.ticket].wait_at(now)
    walk.forget(left.register)
