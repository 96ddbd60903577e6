"""Lowers a region program to the schedule that the executor walks."""

from collections import defaultdict
from dataclasses import replace

from zcompile.ir.byte_ranges import ByteRanges
from zcompile.ir.schedule import (
    SERIALS,
    Agree,
    Borrow,
    Departure,
    Drop,
    Exchange,
    ExchangeBucket,
    Fetch,
    Free,
    Gather,
    Instruction,
    Left,
    Offload,
    Piece,
    ReadValue,
    Reduce,
    RegionProgram,
    Register,
    Run,
    Schedule,
    Share,
    Slot,
    Store,
    Ticket,
    Wait,
)
from zcompile.ir.types import SMALL_BYTES, Layout


def lower(program: RegionProgram) -> Schedule:
    """Write the instructions of a program down, and the tickets by which they wait for each other.

    a: [0, 4K), starts before 0, read by 0        fetch a -> [0, 4K)
    b: [4K, 12K), starts before 0, read by 1      fetch b -> [4K, 12K)
    c: read in place by 1                         wait a; run 0; free a
                                            ->    wait b; borrow c; run 1; free b

    What a late update has written is stored behind that, while others read it. A value that comes
    in parts has one slot for each, side by side, over which the whole is read:

    a: [0, 8K), of parts [0, 4K), [4K, 8K)        fetch a -> [0, 4K); fetch a -> [4K, 8K)
       updated by 0 and 1, read by 2        ->    wait the first; run 0; store it
                                                  wait the other; run 1; store it
                                                  wait [0, 8K); run 2; free both

    Where ranks hold shares, a fetch brings this rank's, and all ranks gather the others behind it;
    a gradient is exchanged before it goes home:

    a: a share of [0, 2K)                         agree; fetch a -> [0, 2K)
    after 0: the gradient of a, shared      ->    gather a -> [0, 4K)
                                                  wait a; run 0; free a; exchange a; reduce a

    Gradients of small entries, which every rank has whole, are put into one bucket, and exchanged
    when the call ends.

    What is gathered may be kept for later calls, which read it where it rests: it is stored there
    before its slot is given back.

    A late update of a share is computed before it is gathered:

    a: a share of [0, 2K), updated by 0,          agree; fetch a -> [0, 2K)
       read by 1                            ->    wait the share of a; run 0; store it
                                                  gather a -> [0, 4K); wait a; run 1; free a
    """
    lowering = _Lowering(program)
    instructions = tuple(lowering.instructions())
    return replace(
        program.outline,
        instructions=instructions,
        serial=next(SERIALS),
        registers=lowering.registers,
        arena_bytes=max((v.slot.end for v in program.values if v.slot is not None), default=0),
        peak_bytes=lowering.peak_bytes,
        budget_bytes=program.budget_bytes,
        program=program,
    )


class _Lowering:
    """Emits the instructions of a program, region by region.

    marked   region -> the ticket that is complete once compute has passed it
    emitted  region -> the index of its instruction
    read     byte of the arena -> the last region that read what lay there
    stored   byte of the arena -> the last store from there

    agreed   ticket of the agreement, for the first collective of each kind; None: not yet
    waits    kinds of collectives of which none was emitted

    peak_bytes  largest sum of slots taken at once
    registers   those of the program, and one for the parts of each gradient that is exchanged
    """

    def __init__(self, program: RegionProgram) -> None:
        self._program = program
        self.registers = program.outline.registers
        self._agreed: Ticket | None = None
        self._waits: set[type] = {Gather, Exchange}
        self._rows: list[Instruction] = []
        self._tickets = 0
        self._taken_bytes = self.peak_bytes = 0
        self._marked: dict[int, Ticket] = {}
        self._emitted: list[int] = []
        self._read: ByteRanges[int] = ByteRanges()
        self._stored: ByteRanges[Ticket] = ByteRanges()
        self._bucket: list[Piece] = []
        self._offloads: dict[Ticket, Ticket] = {}
        """Number of an offload -> its ticket."""

    def instructions(self) -> list[Instruction]:
        starting: dict[int, list[ReadValue]] = defaultdict(list)
        arriving: dict[int, list[ReadValue]] = defaultdict(list)
        leaving: dict[int, list[ReadValue]] = defaultdict(list)
        in_place: dict[int, list[ReadValue]] = defaultdict(list)
        shares: dict[int, list[ReadValue]] = defaultdict(list)
        written: dict[int, list[ReadValue]] = defaultdict(list)
        parts: dict[Register, list[ReadValue]] = defaultdict(list)
        for value in self._program.values:
            if value.in_place:
                in_place[value.read_whole].append(value)
            else:
                arriving[value.read_whole].append(value)
                if value.part_of is None:
                    leaving[value.last].append(value)
                else:
                    parts[value.part_of].append(value)
                if not value.in_parts:
                    starting[value.start].append(value)
                if value.written is not None:
                    written[value.written].append(value)
                if value.share is not None and value.share.register is not None:
                    shares[value.first].append(value)
        gathering = self._gathers()
        arrived: dict[int, Ticket] = {}
        rows = self._rows
        if _is_agreed_on(self._program):
            self._agreed = self._ticket()
            rows.append(Agree(self._agreed, self._program.outline.call_kind))
        for n, run in enumerate(self._program.regions):
            self._depart(n)
            for value in starting[n]:
                fetch = self._fetch(value)
                rows.append(fetch)
                self._taken_bytes += fetch.slot.nbytes
                arrived[value.register] = fetch.ticket
            self.peak_bytes = max(self.peak_bytes, self._taken_bytes)
            for value in shares[n]:
                rows.append(_wait_for_share(value, arrived[value.register]))
            for value in gathering[n]:
                gather = self._gather(value, arrived[value.register])
                rows.append(gather)
                arrived[value.register] = gather.ticket
            for value in sorted(arriving[n], key=_order):
                brought, slot = parts.get(value.register, [value])[-1], _slot_of(value)
                ticket = arrived[brought.register]
                rows.append(Wait(ticket, slot, value.layout, value.register, value.name))
            for v in in_place[n]:
                rows.append(Borrow(v.entry, v.begin, v.layout, v.register, v.writes, v.name))
            self._emitted.append(len(rows))
            rows.append(run)
            for value in written[n]:
                self._store(value, _slot_of(value), n)
            for value in leaving[n]:
                slot = _slot_of(value)
                if value.kept_in is not None:
                    self._keep(value, slot, n)
                # The registers of parts keep views until the call ends, which have no bytes of
                # their own.
                for part in parts.get(value.register, [value]):
                    rows.append(Free(_slot_of(part), value.register, value.name))
                self._read.put(slot.address, slot.end, n)
                self._taken_bytes -= slot.nbytes
        self._depart(len(self._program.regions))
        if self._bucket:
            after = (*self._after_agreement(Exchange), self._mark(len(self._program.regions) - 1))
            rows.append(ExchangeBucket(tuple(self._bucket), self._ticket(), after))
        return rows

    def _ticket(self) -> Ticket:
        self._tickets += 1
        return Ticket(self._tickets - 1)

    def _mark(self, region: int) -> Ticket:
        """The ticket of a region that was emitted, given out if it has none."""
        if region not in self._marked:
            self._marked[region] = ticket = self._ticket()
            at = self._emitted[region]
            run = self._rows[at]
            assert isinstance(run, Run)
            self._rows[at] = replace(run, ticket=ticket)
        return self._marked[region]

    def _fetch(self, value: ReadValue) -> Fetch:
        """The fetch of a value, after the last region that read its bytes of the arena, and stores
        from there."""
        slot = _slot_of(value)
        last = max(self._read.over(slot.address, slot.end), default=None)
        stores = set(self._stored.over(slot.address, slot.end))
        after = () if last is None else (self._mark(last), *sorted(stores))
        share = value.share or Share(0, value.nbytes)
        return Fetch(
            value.entry,
            value.begin,
            share.nbytes,
            slot,
            self._ticket(),
            after,
            value.name,
            value.lasting,
            value.cast,
            share.begin,
            share.tile,
        )

    def _gathers(self) -> dict[int, list[ReadValue]]:
        """The values of which the shares of all ranks are gathered before each region, in the
        order of the graph."""
        found: dict[int, list[ReadValue]] = defaultdict(list)
        for value in sorted((v for v in self._program.fetched if v.share), key=_order):
            found[value.gather].append(value)
        return found

    def _gather(self, value: ReadValue, fetched: Ticket) -> Gather:
        """The gather that makes a share whole, once it is there, and updated."""
        assert value.share is not None, "ranks hold shares of it"
        updated = () if value.share.register is None else (self._mark(value.share.updated - 1),)
        after = (*self._after_agreement(Gather), fetched, *updated)
        slot, tile = _slot_of(value), value.share.tile
        return Gather(value.entry, value.nbytes, slot, self._ticket(), after, value.name, tile)

    def _after_agreement(self, kind: type) -> tuple[Ticket, ...]:
        """The ticket of the agreement, if this is the first collective of its kind."""
        if kind not in self._waits:
            return ()
        self._waits.discard(kind)
        assert self._agreed is not None, "it comes first"
        return (self._agreed,)

    def _store(self, value: ReadValue, slot: Slot, region: int) -> None:
        """Send a value home that was written, once its last writer is done with it."""
        ticket, after = self._ticket(), (self._mark(region),)
        nbytes, offset = value.nbytes, 0
        if value.share is not None:
            nbytes, offset = value.share.written, value.share.begin
        self._rows.append(
            Store(value.entry, value.begin, nbytes, slot, ticket, after, value.name, offset)
        )
        self._stored.put(slot.address, slot.end, ticket)

    def _keep(self, value: ReadValue, slot: Slot, region: int) -> None:
        """Keep what was gathered for later calls, once its last reader is done with it."""
        assert value.kept_in is not None, "it is kept"
        ticket, after = self._ticket(), (self._mark(region),)
        self._rows.append(Store(value.kept_in, 0, value.nbytes, slot, ticket, after, value.name))
        self._stored.put(slot.address, slot.end, ticket)

    def _depart(self, n: int) -> None:
        """What leaves between region n - 1, which may have made it, and region n."""
        for x in self._program.departures[n]:
            after = (self._mark(n - 1),) if n else ()
            if isinstance(x, Reduce) and _is_small(x):
                self._bucket.append(Piece(x.entry, x.nbytes))
                x = replace(x, bucketed=True)
            elif isinstance(x, Reduce) and x.shared:
                exchange = self._exchange(x, after)
                self._rows.append(exchange)
                x = replace(x, parts=exchange.register)
                after = (*after, exchange.ticket)
            self._rows.append(self._departure(x, after))

    def _exchange(self, x: Reduce, after: tuple[Ticket, ...]) -> Exchange:
        """The exchange of a gradient between ranks, before it goes home."""
        self.registers += 1
        after = (*self._after_agreement(Exchange), *after)
        register = Register(self.registers - 1)
        ticket = self._ticket()
        return Exchange(
            x.value,
            register,
            x.entry,
            x.nbytes,
            ticket,
            after,
            x.name,
            x.shares,
            x.tile,
            is_tile=bool(x.of_nbytes),
            wide_nbytes=_wide_nbytes(x),
        )

    def _departure(self, x: Departure, after: tuple[Ticket, ...]) -> Departure:
        if isinstance(x, Drop):
            return x
        if isinstance(x, Left):
            return replace(x, ticket=self._offloads[x.ticket])
        if isinstance(x, Offload):
            self._offloads[x.ticket] = ticket = self._ticket()
            return replace(x, ticket=ticket, after=after)
        return replace(x, after=after)


def _is_agreed_on(program: RegionProgram) -> bool:
    """Whether ranks compare the call: anything crosses between them, or would if they were not all
    within `no_sync`."""
    if program.outline.no_sync_of is not None:
        return True
    leaving = (x for rows in program.departures for x in rows)
    return any(v.share is not None for v in program.fetched) or any(
        isinstance(x, Reduce) and x.shared for x in leaving
    )


def _is_small(x: Reduce) -> bool:
    """Whether a gradient crosses in a bucket: each by itself would cost more than its bytes."""
    whole = not (x.share_nbytes or x.of_nbytes)
    return x.shared and whole and x.nbytes <= SMALL_BYTES


def _wide_nbytes(x: Reduce) -> int:
    """Bytes of a gradient in its parameter's dtype; 0, if it is made in that."""
    return 0 if x.cast is None else x.nbytes // x.cast.copy_dtype.itemsize * x.cast.dtype.itemsize


def _order(value: ReadValue) -> int:
    """Of what is gathered, before what is not: ranks gather in the order in which they read."""
    return -1 if value.share is None else value.share.order


def _wait_for_share(value: ReadValue, fetched: Ticket) -> Wait:
    """Let compute wait for the share of this rank alone, which a late update is to write."""
    share = value.share
    assert share is not None and share.register is not None, "it is updated"  # noqa: PT018
    dtype = value.layout.dtype
    layout = Layout((share.written // dtype.itemsize,), (1,), 0, dtype)
    return Wait(fetched, _slot_of(value), layout, share.register, value.name, share.begin)


def _slot_of(value: ReadValue) -> Slot:
    assert value.slot is not None, f"{value.name} has no address yet"
    return value.slot
