"""Schedules of one of several ranks: a safe one, and those that would hang, mix or race."""

from dataclasses import replace

import torch
from written import NOTHING, free, schedule, wait

from zcompile.ir.partition import SharedRange
from zcompile.ir.schedule import (
    Agree,
    Borrow,
    Cast,
    CopyRead,
    EntryIndex,
    Exchange,
    ExchangeBucket,
    Fetch,
    Gather,
    Instruction,
    LateChunk,
    Piece,
    Reduce,
    Register,
    Run,
    Schedule,
    Slot,
    Store,
    Ticket,
)
from zcompile.ir.types import Layout, Phase

WIDE, NEXT = Slot(0, 1024), Slot(1024, 1024)
"""Slots of two shares of 512 bytes; this rank holds the second of each."""
WHOLE = Layout((256,), (1,), 0, torch.float32)


def share(slot: Slot, ticket: int, entry: int, name: str, *after: int) -> Fetch:
    return Fetch(EntryIndex(entry), 0, 512, slot, Ticket(ticket), after, name, offset=512)  # type: ignore[arg-type]


def gather(slot: Slot, ticket: int, entry: int, name: str, *after: int) -> Gather:
    return Gather(EntryIndex(entry), 1024, slot, Ticket(ticket), after, name)  # type: ignore[arg-type]


def whole(slot: Slot, ticket: int, register: int, name: str = "w") -> Instruction:
    return replace(wait(slot, ticket, register, WHOLE), name=name)


def computed(*inputs: int, out: tuple[int, ...] = (), ticket: int | None = None) -> Run:
    return Run(NOTHING, inputs, out, (), ticket)  # type: ignore[arg-type]


def exchange(value: int, parts: int, entry: int, ticket: int, name: str, *after: int) -> Exchange:
    waits = tuple(map(Ticket, after))
    made = Register(value), Register(parts), EntryIndex(entry)
    return Exchange(*made, 1024, Ticket(ticket), waits, name)


def home(value: int, parts: int, entry: int, name: str, *after: int) -> Reduce:
    row = Reduce(Register(value), EntryIndex(entry), tuple(map(Ticket, after)), True, name, 1024)
    return replace(row, parts=Register(parts), shared=True)


BACKWARD: tuple[Instruction, ...] = (
    Agree(Ticket(0), "backward"),
    share(WIDE, 1, 0, "w"),
    gather(WIDE, 2, 0, "w", 0, 1),
    share(NEXT, 3, 1, "v"),
    gather(NEXT, 4, 1, "v", 3),
    whole(WIDE, 2, 1),
    computed(0, 1, out=(2,), ticket=5),
    free(WIDE, 1),
    exchange(2, 10, 0, 6, "w", 0, 5),
    home(2, 10, 0, "w", 5, 6),
    whole(NEXT, 4, 3, "v"),
    computed(0, 3, out=(4,), ticket=7),
    free(NEXT, 3),
    exchange(4, 11, 1, 8, "v", 7),
    home(4, 11, 1, "v", 7, 8),
)
"""Two weights are gathered, read one after the other, and their gradients exchanged."""


def of_rank(rows: tuple[Instruction, ...], phase: Phase = Phase.BACKWARD) -> Schedule:
    outputs = (Register(8),) if phase is Phase.FORWARD else ()
    return schedule(*rows, phase=phase, outputs=outputs)


def _but(at: int, *instead: Instruction) -> Schedule:
    return of_rank((*BACKWARD[:at], *instead, *BACKWARD[at + 1 :]))


def small(value: int, entry: int, name: str, *after: int) -> Reduce:
    row = Reduce(Register(value), EntryIndex(entry), tuple(map(Ticket, after)), True, name, 64)
    return replace(row, shared=True, bucketed=True)


def bucket(ticket: int, *after: int, entries: tuple[int, ...] = (2, 3)) -> ExchangeBucket:
    pieces = tuple(Piece(EntryIndex(entry), 64) for entry in entries)
    return ExchangeBucket(pieces, Ticket(ticket), tuple(map(Ticket, after)))


BUCKETED: tuple[Instruction, ...] = (
    Agree(Ticket(0), "backward"),
    computed(0, out=(1, 4), ticket=1),
    small(1, 2, "b", 1),
    exchange(4, 10, 0, 2, "w", 0, 1),
    home(4, 10, 0, "w", 1, 2),
    computed(0, out=(5,), ticket=3),
    small(5, 3, "c", 3),
    bucket(4, 3),
)
"""The gradients of two small entries cross together, beside that of a large one."""


def own(slot: Slot, ticket: int, register: int, name: str = "w") -> Instruction:
    half = Layout((128,), (1,), 0, torch.float32)
    return replace(wait(slot, ticket, register, half), name=name, offset=512)


def updated(register: int, ticket: int, update: int = 0) -> Run:
    region = replace(NOTHING, writes=(0,))
    return Run(region, (register,), (), (), ticket, late=LateChunk(update, 0, 128))  # type: ignore[arg-type]


def stored(slot: Slot, ticket: int, entry: int, name: str, *after: int) -> Store:
    return Store(EntryIndex(entry), 0, 512, slot, Ticket(ticket), after, name, 512)  # type: ignore[arg-type]


LATE: tuple[Instruction, ...] = (
    Agree(Ticket(0), "forward"),
    share(WIDE, 1, 0, "w"),
    own(WIDE, 1, 5),
    updated(5, 2),
    stored(WIDE, 3, 0, "w", 2),
    share(NEXT, 4, 1, "v"),
    gather(WIDE, 5, 0, "w", 0, 1, 2),
    own(NEXT, 4, 6, "v"),
    updated(6, 6, 1),
    stored(NEXT, 7, 1, "v", 6),
    gather(NEXT, 8, 1, "v", 4, 6),
    whole(WIDE, 5, 1),
    computed(0, 1, out=(7,)),
    free(WIDE, 1),
    whole(NEXT, 8, 3, "v"),
    computed(7, 3, out=(8,)),
    free(NEXT, 3),
)
"""The shares of two weights are updated, each before it is gathered, and then read."""


READ_FIRST: tuple[Instruction, ...] = (
    Agree(Ticket(0), "forward"),
    share(WIDE, 1, 0, "w"),
    gather(WIDE, 2, 0, "w", 0, 1),
    whole(WIDE, 2, 1),
    computed(0, 1, out=(8,), ticket=3),
    free(WIDE, 1),
    share(NEXT, 4, 0, "w"),
    own(NEXT, 4, 5),
    updated(5, 5),
    stored(NEXT, 6, 0, "w", 4, 5),
    free(NEXT, 5),
)
"""A weight is read whole; then its share is brought once more, and updated."""


def _in_part() -> Schedule:
    """Half of a share is updated and sent home before the share is brought and gathered."""
    half = replace(NEXT, nbytes=512)
    rows = (
        Agree(Ticket(0), "forward"),
        replace(share(half, 1, 0, "w"), nbytes=256, offset=0),
        replace(own(half, 1, 5), layout=Layout((64,), (1,), 0, torch.float32), offset=0),
        updated(5, 2),
        replace(stored(half, 3, 0, "w", 1, 2), nbytes=256, offset=0),
        free(half, 5),
        share(WIDE, 4, 0, "w"),
        gather(WIDE, 5, 0, "w", 0, 4),
        whole(WIDE, 5, 1),
        computed(0, 1, out=(8,)),
        free(WIDE, 1),
    )
    return of_rank(rows, Phase.FORWARD)


def kept(slot: Slot, ticket: int, name: str, *after: int) -> Store:
    return Store(EntryIndex(1), 0, 1024, slot, Ticket(ticket), after, name)  # type: ignore[arg-type]


KEEPING: tuple[Instruction, ...] = (
    Agree(Ticket(0), "forward"),
    share(WIDE, 1, 0, "w"),
    gather(WIDE, 2, 0, "w", 0, 1),
    share(NEXT, 3, 2, "v"),
    gather(NEXT, 4, 2, "v", 3),
    whole(WIDE, 2, 1),
    computed(0, 1, out=(7,), ticket=5),
    kept(WIDE, 6, "w", 5),
    free(WIDE, 1),
    whole(NEXT, 4, 3, "v"),
    computed(7, 3, out=(8,)),
    free(NEXT, 3),
)
"""Two weights are gathered and read; all of the first is kept for later calls."""


def keeping(rows: tuple[Instruction, ...], phase: Phase = Phase.FORWARD) -> Schedule:
    """As `of_rank`; all of entry 0 is kept in entry 1."""
    same = Cast(torch.float32, torch.float32)
    copy = CopyRead(EntryIndex(0), same, 1024, 256, whole=True, made=True)
    return replace(of_rank(rows, phase), copies=(copy,), names={0: "w", 1: "all of w"})


def _keeping(at: int, *instead: Instruction) -> Schedule:
    return keeping((*KEEPING[:at], *instead, *KEEPING[at + 1 :]))


def _late(at: int, *instead: Instruction) -> Schedule:
    return of_rank((*LATE[:at], *instead, *LATE[at + 1 :]), Phase.FORWARD)


NARROW: tuple[Instruction, ...] = (
    Agree(Ticket(0), "backward"),
    replace(share(WIDE, 1, 0, "w"), cast=Cast(torch.float32, torch.bfloat16)),
    gather(WIDE, 2, 0, "w", 0, 1),
    share(NEXT, 3, 1, "v"),
    gather(NEXT, 4, 1, "v", 3),
    replace(wait(WIDE, 2, 1, Layout((512,), (1,), 0, torch.bfloat16)), name="w"),
    computed(0, 1, out=(2,), ticket=5),
    free(WIDE, 1),
    exchange(2, 10, 0, 6, "w", 0, 5),
    replace(home(2, 10, 0, "w", 5, 6), cast=Cast(torch.float32, torch.bfloat16), share_nbytes=1024),
    *BACKWARD[10:],
)
"""Of two weights the first is gathered in low precision, and its gradient exchanged so."""


def _narrow(at: int, *instead: Instruction) -> Schedule:
    return of_rank((*NARROW[:at], *instead, *NARROW[at + 1 :]))


FRONT, BACK = Slot(0, 1536), Slot(1536, 512)
"""Slots of two tiles of a weight of 2048 bytes, of which this rank holds the second half."""
HEAD, TAIL = SharedRange(0, 1536, 1024, 1, 2), SharedRange(1536, 512, 1024, 1, 2)


def tile(slot: Slot, ticket: int, begin: int, offset: int, of: SharedRange) -> Fetch:
    made = Ticket(ticket), (), "w"
    return Fetch(EntryIndex(0), begin, 512, slot, *made, offset=offset, tile=of)


def sent(row: Exchange | Reduce, of: SharedRange) -> Instruction:
    if isinstance(row, Exchange):
        return replace(row, nbytes=of.nbytes, tile=of, is_tile=True)
    return replace(row, nbytes=of.nbytes, tile=of, begin=of.begin, of_nbytes=2048)


TILED: tuple[Instruction, ...] = (
    Agree(Ticket(0), "backward"),
    tile(FRONT, 1, 0, 1024, HEAD),
    replace(gather(FRONT, 2, 0, "w", 0, 1), nbytes=1536, tile=HEAD),
    tile(BACK, 3, 512, 0, TAIL),
    replace(gather(BACK, 4, 0, "w", 3), nbytes=512, tile=TAIL),
    replace(wait(FRONT, 2, 1, Layout((384,), (1,), 0, torch.float32)), name="w"),
    computed(0, 1, out=(2,), ticket=5),
    free(FRONT, 1),
    sent(exchange(2, 10, 0, 6, "w", 0, 5), HEAD),
    sent(home(2, 10, 0, "w", 5, 6), HEAD),
    replace(wait(BACK, 4, 3, Layout((128,), (1,), 0, torch.float32)), name="w"),
    computed(0, 3, out=(4,), ticket=7),
    free(BACK, 3),
    sent(exchange(4, 11, 0, 8, "w", 7), TAIL),
    sent(home(4, 11, 0, "w", 7, 8), TAIL),
)
"""A weight is gathered in two tiles, of each of which this rank has a part, and its gradient leaves
in two."""


def _tiled(at: int, *instead: Instruction) -> Schedule:
    return of_rank((*TILED[:at], *instead, *TILED[at + 1 :]))


def _of_another_rank() -> Schedule:
    """The second tile as the first rank has it, which holds nothing of that."""
    other = replace(TAIL, rank=0)
    fetch = replace(TILED[3], tile=other, nbytes=0, begin=0)  # type: ignore[arg-type]
    rows = (*TILED[:3], fetch, replace(TILED[4], tile=other), *TILED[5:])  # type: ignore[arg-type]
    return of_rank(rows)


HALF = Cast(torch.float32, torch.float16)

BROKEN_RANKS = {
    "a part of a tile from elsewhere in the share": (
        lambda: _tiled(3, tile(BACK, 3, 0, 0, TAIL)),
        "bytes 0 to 512 of 'w' are brought to 0, and are not what this rank holds of the tile",
    ),
    "a part of a tile that lies elsewhere in it": (
        lambda: _tiled(1, tile(FRONT, 1, 0, 512, HEAD)),
        "bytes 0 to 512 of 'w' are brought to 512, and are not what this rank holds of the tile",
    ),
    "a tile that is gathered as another": (
        lambda: _tiled(4, replace(TILED[4], tile=replace(TAIL, begin=1024))),
        "'w' is gathered as another range than what was brought of it",
    ),
    "a tile of which less is gathered": (
        lambda: _tiled(2, replace(TILED[2], nbytes=1024)),
        "'w' is gathered as another range than what was brought of it",
    ),
    "a tile as another rank has it": (
        _of_another_rank,
        "'w' is gathered with this rank's share as number 0 of 2, and 'w' as number 1 of 2",
    ),
    "a gradient that goes home as another tile": (
        lambda: _tiled(9, replace(TILED[9], tile=TAIL)),
        "the gradient of 'w' goes home as another tile of it",
    ),
    "a gradient of which a tile never leaves": (
        lambda: of_rank(TILED[:13]),
        "512 bytes of the gradient of None never leave",
    ),
    "a wide share of what is gathered in low precision": (
        lambda: _narrow(3, replace(share(NEXT, 3, 1, "v"), nbytes=1024, offset=0)),
        "'v' is gathered with this rank's share as number 0 of 1, and 'w' as number 1 of 2",
    ),
    "a copy that is read in another dtype, all by itself": (
        lambda: of_rank((*NARROW[:1], replace(NARROW[1], cast=HALF), NARROW[2], NARROW[5])),
        "'w' is read as torch.bfloat16, and is a copy in torch.float16",
    ),
    "a copy that is read wide": (
        lambda: _narrow(5, whole(WIDE, 2, 1)),
        "'w' is read as torch.float32, and is a copy in torch.bfloat16",
    ),
    "a share of a rank that is not there": (
        lambda: _narrow(2, replace(NARROW[2], nbytes=512)),
        "'w' is gathered with this rank's share as number 1 of 1",
    ),
    "a share that is none": (
        lambda: _narrow(2, replace(NARROW[2], nbytes=768)),
        "512 bytes of 'w' from 512 on are no share of the 768 that are gathered",
    ),
    "a gradient of which less is exchanged": (
        lambda: _narrow(8, replace(NARROW[8], nbytes=512)),
        "1024 bytes are the gradient of 'w', and 512 are exchanged of it",
    ),
    "what is to be kept is not": (
        lambda: _keeping(7),
        "all of 'w' is out of date, and the call does not keep it",
    ),
    "another weight is kept": (
        lambda: keeping(
            (
                *KEEPING[:7],
                *KEEPING[8:10],
                computed(7, 3, out=(8,), ticket=7),
                kept(NEXT, 6, "v", 7),
                KEEPING[11],
            )
        ),
        "'v' is kept for later calls, and is not what ranks have gathered of it",
    ),
    "a share is kept": (
        lambda: _keeping(7, replace(kept(WIDE, 6, "w", 5), nbytes=512, offset=512)),
        "of 'w' only a part is kept for later calls",
    ),
    "a weight is kept before it is whole": (
        lambda: keeping((*KEEPING[:5], kept(WIDE, 6, "w", 2), *KEEPING[5:7], *KEEPING[8:])),
        "'w' is read from its slot before its fetch is over",
    ),
    "a weight is read where it rests before it is kept": (
        lambda: _keeping(5, KEEPING[5], Borrow(EntryIndex(1), 0, WHOLE, Register(9), False, "w")),
        "'w' is read where it rests before it is kept there",
    ),
    "a weight is written where all of it rests": (
        lambda: _keeping(9, KEEPING[9], Borrow(EntryIndex(1), 0, WHOLE, Register(9), True, "w")),
        "'w' is written where all of it rests, on this rank alone",
    ),
    "a gather that does not wait for the late update": (
        lambda: _late(6, gather(WIDE, 5, 0, "w", 0, 1)),
        "the gather of 'w' does not wait for the compute that reads 'w' in the same bytes",
    ),
    "a late update that is not stored": (
        lambda: of_rank((*LATE[:4], *LATE[5:]), Phase.FORWARD),
        "'w' is gathered, and its late update was not sent home",
    ),
    "a late update of what was gathered": (
        lambda: of_rank((*LATE[:3], LATE[6], LATE[3], *LATE[4:6], *LATE[7:]), Phase.FORWARD),
        "it waits for ticket 2, which nothing before it gives out",
    ),
    "a late update behind the gather": (
        lambda: of_rank(
            (*LATE[:3], gather(WIDE, 5, 0, "w", 0, 1), LATE[3], *LATE[4:6], *LATE[7:]),
            Phase.FORWARD,
        ),
        "'w' is updated after it is gathered",
    ),
    "a late update of a share that was read as part of a whole": (
        lambda: of_rank(READ_FIRST, Phase.FORWARD),
        "'w' is updated after compute has read it",
    ),
    "a share of which a part is updated, and all is gathered": (
        _in_part,
        "'w' is read, and only a part of it is updated",
    ),
    "a share that is read while it is gathered": (
        lambda: of_rank((*LATE[:7], computed(0, 5), *LATE[7:]), Phase.FORWARD),
        "'w' is computed with while it is gathered",
    ),
    "a share that is read beyond its end": (
        lambda: _late(2, replace(own(WIDE, 1, 5), offset=256)),
        "'w' reads 512 bytes from 256 on, and only its share, 512 to 1024, was brought",
    ),
    "a store of more than the share": (
        lambda: _late(4, replace(LATE[4], nbytes=1024, offset=0)),
        "'w' reads 1024 bytes of it, and only its share, 512 to 1024, was brought",
    ),
    "a small gradient that is not exchanged": (
        lambda: of_rank(BUCKETED[:-1]),
        "2 gradients stay in the bucket: they never go home",
    ),
    "a bucket with another order of gradients": (
        lambda: of_rank((*BUCKETED[:-1], bucket(4, 3, entries=(3, 2)))),
        "what is exchanged is not what was put into the bucket",
    ),
    "a bucket that leaves too early": (
        lambda: of_rank((*BUCKETED[:-1], bucket(4, 1))),
        "the bucket leaves before what is in it was computed",
    ),
    "a collective that nobody can wait for": (
        lambda: _but(4, replace(BACKWARD[4], ticket=None)),
        "nobody can wait for the gather of 'v'",
    ),
    "a call that is agreed on too late": (
        lambda: of_rank((*BACKWARD[:5], Agree(Ticket(9), "backward"), *BACKWARD[5:])),
        "the ranks agree on the call after its first collective",
    ),
    "a call that is not agreed on": (
        lambda: _but(2, gather(WIDE, 2, 0, "w", 1)),
        "the gather of 'w' does not wait until the ranks agree on the call",
    ),
    "an exchange that is not agreed on": (
        lambda: of_rank(
            (
                BACKWARD[0],
                computed(0, out=(2,), ticket=5),
                exchange(2, 10, 0, 6, "w", 5),
                BACKWARD[9],
            )
        ),
        "the exchange of 'w' does not wait until the ranks agree on the call",
    ),
    "a gather that does not wait for its share": (
        lambda: _but(2, gather(WIDE, 2, 0, "w", 0)),
        "the gather of 'w' does not wait for the fetch of 'w' into the same bytes",
    ),
    "a gather of more than there is room for": (
        lambda: _but(2, replace(BACKWARD[2], nbytes=1536)),
        "'w' gathers 1536 bytes into 1024",
    ),
    "a gather of another weight than was fetched": (
        lambda: _but(2, gather(WIDE, 2, 1, "v", 0, 1)),
        "'v' is gathered where 'w' lies",
    ),
    "a weight that is gathered twice": (
        lambda: of_rank((*BACKWARD[:3], gather(WIDE, 9, 0, "w", 2), *BACKWARD[3:])),
        "'w' is gathered twice",
    ),
    "a share that nobody fetched": (
        lambda: of_rank((*BACKWARD[:10], gather(WIDE, 9, 0, "w", 2), *BACKWARD[10:])),
        "'w' has no slot Slot(address=0, nbytes=1024) that is taken here",
    ),
    "gathers in another order than they are read": (
        lambda: of_rank(
            (
                *BACKWARD[:2],
                BACKWARD[3],
                gather(NEXT, 4, 1, "v", 0, 3),
                gather(WIDE, 2, 0, "w", 1),
                *BACKWARD[5:],
            )
        ),
        "'w' is gathered after 'v', and read before: the order of gathers is not that of their "
        "readers, as it is on other ranks",
    ),
    "a weight that is read before it is whole": (
        lambda: _but(5, whole(WIDE, 1, 1)),
        "it waits for ticket 1, the bytes come with 1",
    ),
    "a weight of which only a share is there": (
        lambda: of_rank((BACKWARD[0], BACKWARD[1], whole(WIDE, 1, 1), free(WIDE, 1))),
        "'w' reads 1024 bytes of it, and only its share, 512 to 1024, was brought",
    ),
    "a share between two multiples": (
        lambda: _but(1, replace(BACKWARD[1], offset=256)),
        "the share of 'w' lies between two multiples of 512",
    ),
    "a share that ends beyond its slot": (
        lambda: _but(1, replace(BACKWARD[1], offset=1024)),
        "'w' brings 512 bytes into 1024",
    ),
    "an exchange before the gradient is made": (
        lambda: _but(8, exchange(2, 10, 0, 6, "w", 0)),
        "'w' leaves before it is computed",
    ),
    "a gradient that goes home before it is exchanged": (
        lambda: _but(9, home(2, 10, 0, "w", 5)),
        "the gradient of 'w' goes home before it is exchanged",
    ),
    "a gradient that goes home as another": (
        lambda: of_rank(
            (*BACKWARD[:9], *BACKWARD[10:14], home(4, 10, 1, "v", 7, 6, 8), BACKWARD[9])
        ),
        "the gradient of 'v' goes home as the exchanged one of 'w'",
    ),
    "a gradient that never goes home": (
        lambda: of_rank((*BACKWARD[:9], *BACKWARD[10:])),
        "the exchanged gradient of 'w' never goes home",
    ),
    "parts that are computed with": (
        lambda: of_rank((*BACKWARD[:9], computed(0, 10), *BACKWARD[9:])),
        "register 10 is exchanged, and computed with as a value",
    ),
}
"""What is wrong -> the schedule, and the sentence of the proof."""
