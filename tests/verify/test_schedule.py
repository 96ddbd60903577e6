"""The proof of a schedule: the sentence for each fault, and no mutant that goes through unseen."""

import ast
import inspect
import re
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from broken_host import BROKEN_HOST, HOST_ROW
from broken_pairs import BROKEN_PAIRS, STEP
from broken_ranks import BROKEN_RANKS
from broken_staying import BROKEN_STAYING
from broken_tiles import BROKEN_TILES
from departing import BROKEN_DEPARTURES, LEAVING
from placed import BROKEN_PLACES, MADE
from races import faults
from written import HIGH, LOW, borrow, fetch, free, run, schedule, store, wait

from zcompile.errors import ScheduleInvalid
from zcompile.ir.optimizer_step import CHUNK_ELEMENTS, Column, Row, StepRoom, lower_step
from zcompile.ir.schedule import (
    Cast,
    EntryIndex,
    Fetch,
    Instruction,
    LateChunk,
    Literal,
    Reduce,
    Register,
    Run,
    Schedule,
    Slot,
    Store,
    Ticket,
)
from zcompile.ir.types import Layout, Phase
from zcompile.verify import schedule as proofs
from zcompile.verify.schedule import verify_schedule

SAFE = (
    fetch(LOW, 0),
    wait(LOW, 0, 1),
    run(0, 1, out=(2,), ticket=1),
    free(LOW, 1),
    fetch(LOW, 2, 1),
    wait(LOW, 2, 3),
    run(2, 3, out=(4,), ticket=3, drops=(2,)),
    Reduce(Register(4), EntryIndex(0), (Ticket(3),), True, "w"),
    free(LOW, 3),
)


def but(rows: tuple[Instruction, ...], at: int, *instead: Instruction) -> tuple[Instruction, ...]:
    return (*rows[:at], *instead, *rows[at + 1 :])


def late(update: Run) -> Run:
    return replace(update, late=LateChunk(0, 0, 128))


def writing(update: Run, *positions: int) -> Run:
    """A late update that writes the operands at these positions."""
    return late(replace(update, region=replace(update.region, writes=positions)))


def part(slot: Slot, ticket: int, begin: int = -1, nbytes: int = 512) -> Fetch:
    """The part of a value that belongs into a slot; or that from `begin` on."""
    begin = slot.address if begin < 0 else begin
    return replace(fetch(slot, ticket, nbytes=nbytes), begin=begin)


BF16 = Cast(torch.float32, torch.bfloat16)
PAIR = Layout((256,), (1,), 0, torch.float32)
SECOND, BOTH = part(HIGH, 1), Slot(0, 1024)


def parts(second: Fetch = SECOND, both: Slot = BOTH) -> tuple[Instruction, ...]:
    """A value in two parts, of which the first is updated, and goes home while the whole is
    read."""
    return (
        part(LOW, 0),
        second,
        wait(LOW, 0, 1),
        wait(HIGH, 1, 2),
        late(run(0, 1, ticket=4)),
        store(LOW, 5, 4),
        wait(both, 1, 3, PAIR),
        run(0, 3, ticket=6),
        free(LOW, 3),
        free(HIGH, 3),
    )


def updated(first: bool = True, second: bool = True) -> tuple[Instruction, ...]:
    """A value in two parts, each of which may be updated, and then goes home; and it is read."""
    rows = parts()
    if first:
        rows = but(rows, 4, writing(run(1, ticket=4), 0))
    if second:
        rows = (*rows[:6], writing(run(2, ticket=7), 0), part_home(8, 7), *rows[6:])
    return rows


def part_home(ticket: int, *after: int) -> Store:
    """The second part goes home."""
    return replace(store(HIGH, ticket, *after), begin=512)


IN_PLACE = (
    borrow(1),
    writing(run(1), 0),
    replace(borrow(2), begin=512),
    writing(run(2), 0),
    replace(borrow(3, PAIR), writes=False),
    run(0, 3),
)
"""A value of which each half is updated where it rests, before it is read."""


BROKEN: dict[str, tuple[Callable[[], Schedule], str]] = {
    "a ticket given out twice": (
        lambda: schedule(*but(SAFE, 2, run(0, 1, out=(2,), ticket=0))),
        "ticket 0 is given out twice",
    ),
    "a ticket from nowhere": (
        lambda: schedule(*but(SAFE, 4, fetch(LOW, 2, 1, 9))),
        "it waits for ticket 9, which nothing before it gives out",
    ),
    "a slot smaller than what comes": (
        lambda: schedule(*but(SAFE, 0, fetch(LOW, 0, nbytes=513))),
        "'w' brings 513 bytes into 512",
    ),
    "a slot that a read of whole granules would leave": (
        lambda: schedule(*but(SAFE, 0, fetch(Slot(0, 500), 0, nbytes=500))),
        "'w' brings 500 bytes into 500",
    ),
    "a slot between the multiples that slots lie at": (
        lambda: schedule(fetch(Slot(256, 512), 0), *SAFE[1:]),
        "the slot of 'w' begins at 256, between two multiples of 512",
    ),
    "a slot beyond the arena": (
        lambda: replace(schedule(*SAFE), arena_bytes=511),
        "the slot of 'w' ends beyond the arena",
    ),
    "a slot before the step scratch": (
        lambda: replace(schedule(*SAFE), scratch_at=512),
        "the slot of 'w' begins before the step scratch",
    ),
    "a slot that is taken": (
        lambda: schedule(SAFE[0], fetch(LOW, 7, name="v"), *SAFE[1:]),
        "'v' lies over 'w', which is taken",
    ),
    "a fetch that does not wait for compute before overwriting": (
        lambda: schedule(*but(SAFE, 4, fetch(LOW, 2))),
        "the fetch of 'w' does not wait for the compute that reads 'w' in the same bytes",
    ),
    "a fetch that does not wait for the fetch before it": (
        lambda: schedule(
            fetch(LOW, 0),
            wait(LOW, 0, 1),
            free(LOW, 1),
            fetch(LOW, 2),
            wait(LOW, 2, 3),
            free(LOW, 3),
        ),
        "the fetch of 'w' does not wait for the fetch of 'w' into the same bytes",
    ),
    "a slot refetched before its store is over": (
        lambda: schedule(*but(STEP, 5, fetch(LOW, 3, 1)), phase=Phase.STEP),
        "the fetch of 'w' does not wait for the store of 'w' from the same bytes",
    ),
    "a store that does not wait for the optimizer's compute": (
        lambda: schedule(*but(STEP, 3, store(LOW, 2)), phase=Phase.STEP),
        "the store of 'w' does not wait for the compute that writes it",
    ),
    "a store that does not wait for its fetch": (
        lambda: schedule(fetch(LOW, 0), wait(LOW, 0, 1), store(LOW, 2), free(LOW, 1)),
        "the store of 'w' does not wait for its fetch",
    ),
    "what was brought before it was changed": (
        lambda: schedule(
            STEP[0],
            fetch(HIGH, 6),
            *STEP[1:4],
            wait(HIGH, 6, 3),
            run(0, 3, ticket=7),
            free(HIGH, 3),
            STEP[4],
            phase=Phase.STEP,
        ),
        "'w' was brought before what earlier compute made of it",
    ),
    "a store that comes too late for who reads it": (
        lambda: schedule(
            STEP[0],
            fetch(HIGH, 6),
            *STEP[1:3],
            wait(HIGH, 6, 3),
            run(0, 3, ticket=7),
            STEP[3],
            free(HIGH, 3),
            STEP[4],
            phase=Phase.STEP,
        ),
        "'w' goes home after later compute read it from there",
    ),
    "compute on bytes that are on their way home": (
        lambda: schedule(*STEP[:4], run(0, 1, ticket=9), *STEP[4:], phase=Phase.STEP),
        "'w' is computed with while its store reads it",
    ),
    "a late update of bytes that are on their way home": (
        lambda: schedule(*STEP[:4], late(run(0, 1, ticket=9)), *STEP[4:]),
        "'w' is computed with while its store reads it",
    ),
    "bytes that move while compute has them where they rest": (
        lambda: schedule(*STEP, borrow(4), phase=Phase.STEP),
        "'w' is computed with where it rests, and moved as well",
    ),
    "more bytes than the budget": (
        lambda: schedule(*SAFE, budget=511),
        "512 bytes are taken at once, the budget is 511",
    ),
    "a wait for a slot nobody took": (
        lambda: schedule(*but(SAFE, 1, wait(HIGH, 0, 1))),
        "'w' has no slot Slot(address=512, nbytes=512) that is taken here",
    ),
    "a wait for parts in another order than that of their bytes": (
        lambda: schedule(*parts(second=part(HIGH, 1, begin=1024))),
        "'w' lies over parts that do not follow each other",
    ),
    "a wait for parts of two entries": (
        lambda: schedule(*parts(second=replace(part(HIGH, 1), entry=EntryIndex(1)))),
        "'w' lies over parts that do not follow each other",
    ),
    "a wait for parts of an entry and of its copy": (
        lambda: schedule(*but(parts(second=replace(part(HIGH, 1), cast=BF16)), 3)),
        "'w' lies over parts that do not follow each other",
    ),
    "a wait for parts of which one is not filled": (
        lambda: schedule(
            part(LOW, 0, nbytes=256),
            part(HIGH, 1, begin=256),
            wait(LOW, 0, 1, Layout((64,), (1,), 0, torch.float32)),
            *parts()[6:],
        ),
        "'w' lies over parts that do not follow each other",
    ),
    "a wait for parts that end before it does": (
        lambda: schedule(*parts(both=Slot(0, 1536))),
        "'w' lies over parts that do not follow each other",
    ),
    "a wait for the last part, while another is on its way": (
        lambda: schedule(*parts()[:2], *parts()[3:4], *parts()[6:]),
        "it waits for ticket 1, the bytes come with 0",
    ),
    "a wait for another part than the last": (
        lambda: schedule(*but(parts(), 6, wait(Slot(0, 1024), 0, 3, PAIR))),
        "it waits for ticket 0, the bytes come with 1",
    ),
    "a value read beyond its parts": (
        lambda: schedule(*but(parts(second=part(HIGH, 1, nbytes=256)), 3)),
        "'w' reads 512 bytes of 256 that were brought",
    ),
    "a part that is written while it is on its way home": (
        lambda: schedule(*but(parts(), 7, late(run(0, 3, ticket=6)))),
        "'w' is computed with while its store reads it",
    ),
    "a part that goes home before it is written": (
        lambda: schedule(*but(parts(), 5, store(LOW, 5))),
        "the store of 'w' does not wait for the compute that writes it",
    ),
    "an update that is not sent home": (
        lambda: schedule(*but(STEP, 2, writing(run(0, 1, ticket=1), 1))[:3], free(LOW, 1)),
        "'w' is given back, and what compute wrote there is not sent home",
    ),
    "an update of which a part is sent home": (
        lambda: schedule(
            *but(STEP, 2, writing(run(0, 1, ticket=1), 1))[:3],
            store(LOW, 2, 1, nbytes=508),
            free(LOW, 1),
        ),
        "'w' is given back, and what compute wrote there is not sent home",
    ),
    "an update that is sent to another entry": (
        lambda: schedule(
            *but(STEP, 2, writing(run(0, 1, ticket=1), 1))[:3],
            replace(store(LOW, 2, 1), entry=EntryIndex(1)),
            free(LOW, 1),
        ),
        "'w' is given back, and what compute wrote there is not sent home",
    ),
    "an update that is sent to other bytes of its entry": (
        lambda: schedule(*but(updated(), 7, replace(part_home(8, 7), begin=1024))),
        "'w' is given back, and what compute wrote there is not sent home",
    ),
    "a part that is updated and not sent home": (
        lambda: schedule(*updated()[:7], *updated()[8:]),
        "'w' is given back, and what compute wrote there is not sent home",
    ),
    "a part that is updated once more after it was sent home": (
        lambda: schedule(
            *STEP[:2],
            writing(run(0, 1, ticket=1), 1),
            store(LOW, 2, 1),
            fetch(HIGH, 3, 2),
            wait(HIGH, 3, 2),  # and so for the store
            writing(run(0, 1, ticket=4), 1),
            free(LOW, 1),
        ),
        "'w' is given back, and what compute wrote there is not sent home",
    ),
    "a value that is read before all of its parts are updated": (
        lambda: schedule(*updated()[:6], *updated()[8:10], *updated()[6:8], *updated()[10:]),
        "'w' is read, and only a part of it is updated",
    ),
    "a value of which a part is not updated": (
        lambda: schedule(*updated(second=False)),
        "'w' is read, and only a part of it is updated",
    ),
    "a value that is read before it is updated": (
        lambda: schedule(
            *parts()[:4], *parts()[6:8], writing(run(1, ticket=4), 0), parts()[5], *parts()[8:]
        ),
        "'w' is updated after compute has read it",
    ),
    "a value that is read where it rests before all of it is updated": (
        lambda: schedule(*IN_PLACE[:2], *IN_PLACE[4:], *IN_PLACE[2:4]),
        "'w' is read, and only a part of it is updated",
    ),
    "a value that is read where it rests before it is updated": (
        lambda: schedule(*IN_PLACE[4:], *IN_PLACE[:4]),
        "'w' is updated after compute has read it",
    ),
    "a wait for another fetch": (
        lambda: schedule(SAFE[0], fetch(HIGH, 8), wait(LOW, 8, 1), *SAFE[2:]),
        "it waits for ticket 8, the bytes come with 0",
    ),
    "a wait for another fetch, where that of the slot is over": (
        lambda: schedule(
            *SAFE[:2], fetch(HIGH, 8), wait(HIGH, 8, 5), wait(LOW, 8, 6), run(1, 5, 6), free(LOW, 1)
        ),
        "it waits for ticket 8, the bytes come with 0",
    ),
    "a layout that ends beyond what came": (
        lambda: schedule(*but(SAFE, 1, wait(LOW, 0, 1, Layout((128,), (1,), 1, torch.float32)))),
        "'w' reads 516 bytes of 512 that were brought",
    ),
    "a wait left out": (
        lambda: schedule(*but(SAFE, 1)),
        "register 1 is read before its wait, or after it was given back",
    ),
    "a release before the wait": (
        lambda: schedule(SAFE[0], free(LOW, 1), *SAFE[4:]),
        "'w' is given back while its fetch may still write",
    ),
    "a gradient that leaves early": (
        lambda: schedule(*but(SAFE, 7, Reduce(Register(4), EntryIndex(0), (), True, "w"))),
        "the gradient of 'w' leaves before it is computed",
    ),
    "a gradient that nothing made": (
        lambda: schedule(*but(SAFE, 7, replace(SAFE[7], value=Register(9)))),
        "register 9 leaves, and nothing made it",
    ),
    "a gradient that came with the call, and waits for nothing": (
        lambda: schedule(Reduce(Register(0), EntryIndex(0), (), True, "w")),
        "the gradient of 'w' leaves before it is computed",
    ),
    "a gradient that is a parameter where it rests": (
        lambda: schedule(
            borrow(1), run(1, ticket=0), Reduce(Register(1), EntryIndex(1), (Ticket(0),), True, "v")
        ),
        "the gradient of 'v' lies in bytes of an entry or of the arena, which may change while it "
        "leaves",
    ),
    "a result that is a parameter where it rests": (
        lambda: schedule(borrow(1), run(1), outputs=(Register(1),)),
        "register 1 is returned, and lies in an entry's own bytes",
    ),
    "a store before the wait": (
        lambda: schedule(fetch(LOW, 0), store(LOW, 2), *STEP[1:3], free(LOW, 1)),
        "'w' is read from its slot before its fetch is over",
    ),
    "a store of more than came": (
        lambda: schedule(*but(STEP, 3, store(LOW, 2, 1, nbytes=516)), phase=Phase.STEP),
        "'w' reads 516 bytes of 512 that were brought",
    ),
    "a slot that is never given back": (
        lambda: schedule(*SAFE[:-1]),
        "'w' is never given back",
    ),
    "a result that nothing made": (
        lambda: schedule(*SAFE, outputs=(Register(11),)),
        "register 11 is returned, and nothing made it",
    ),
    "a result that was given back": (
        lambda: schedule(*SAFE, outputs=(Register(3),)),
        "register 3 is returned, and nothing made it",
    ),
    "a peak that is not true": (
        lambda: replace(schedule(*SAFE), peak_bytes=511),
        "the peak is 512 bytes, the schedule says 511",
    ),
    "an arena that is not true": (
        lambda: replace(schedule(*SAFE), arena_bytes=1024),
        "the slots end at 512, the schedule says 1024",
    ),
    "an arena with holes that is larger than the budget": (
        lambda: schedule(fetch(HIGH, 0), wait(HIGH, 0, 1), run(1), free(HIGH, 1), budget=512),
        "the slots end at 1024, the budget is 512",
    ),
    **BROKEN_PLACES,
    **BROKEN_DEPARTURES,
    **{f"the host computes {case}": row for case, row in BROKEN_HOST.items()},
}


def test_a_gradient_may_be_made_in_its_berth():
    verify_schedule(schedule(*MADE))


def test_the_host_may_update_what_it_is_lent():
    verify_schedule(schedule(*HOST_ROW, phase=Phase.STEP))


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_schedule_earns_its_sentence(case):
    make, sentence = BROKEN[case]
    broken = make()
    with pytest.raises(ScheduleInvalid) as caught:
        verify_schedule(broken)
    assert caught.value.why == sentence


@pytest.mark.parametrize(
    "case",
    [
        "a store that does not wait for the optimizer's compute",
        "a slot refetched before its store is over",
        "a fetch that does not wait for compute before overwriting",
    ],
)
def test_the_oracle_knows_the_three_races_on_record(case):
    assert any("races" in fault for fault in faults(BROKEN[case][0]()))


@pytest.mark.parametrize("case", [case for case in BROKEN if case.startswith("a wait for parts")])
def test_the_oracle_knows_parts_that_make_no_whole(case):
    assert any("waits for other bytes" in fault for fault in faults(BROKEN[case][0]()))


READ_AFTER_ITS_UPDATE = (*STEP[:2], late(STEP[2]), STEP[3], run(0, 1, ticket=6), STEP[4])
"""A parameter that is on its way home while compute reads what was written."""


@pytest.mark.parametrize(
    "rows",
    [SAFE, STEP, LEAVING, READ_AFTER_ITS_UPDATE, parts(), updated(), IN_PLACE],
    ids=[
        "forward",
        "step",
        "leaving",
        "read after its update",
        "in parts",
        "each part updated",
        "in place",
    ],
)
def test_what_they_were_broken_from_is_safe(rows):
    whole = schedule(
        *rows,
        phase=Phase.STEP if rows is STEP else Phase.FORWARD,
        outputs=(Literal(None), Register(0)),
    )
    verify_schedule(whole)
    assert not list(faults(whole))


def test_every_sentence_has_a_case():
    """Read from the source: the words of each `fail(...)` that do not vary."""
    calls = [
        n
        for n in ast.walk(ast.parse(inspect.getsource(proofs)))
        if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "fail"
    ]
    said = [sentence for _, sentence in BROKEN.values()]
    said += [sentence for _, _, sentence in BROKEN_PAIRS.values()]
    said += [sentence for _, sentence in (BROKEN_TILES | BROKEN_STAYING | BROKEN_RANKS).values()]
    for call in calls:
        (text,) = call.args
        parts = text.values if isinstance(text, ast.JoinedStr) else [text]
        words = [re.escape(p.value) if isinstance(p, ast.Constant) else ".*" for p in parts]
        assert any(re.fullmatch("".join(words), sentence) for sentence in said), ast.unparse(text)
    assert len(calls) >= 30


def test_the_offending_instruction_is_marked():
    with pytest.raises(ScheduleInvalid) as caught:
        verify_schedule(BROKEN["a fetch that does not wait for compute before overwriting"][0]())
    (marked,) = [row for row in str(caught.value).splitlines() if row.startswith("  >")]
    assert marked.split() == [">", "4", "in", "fetch", "w", "512"]


def test_parts_of_an_entry_that_lie_apart_may_be_moved_and_borrowed():
    rows = (*STEP, replace(borrow(4), begin=512), run(4))
    verify_schedule(schedule(*rows, phase=Phase.STEP))
    with pytest.raises(ScheduleInvalid, match="moved as well"):
        verify_schedule(schedule(*STEP, replace(borrow(4), begin=511), run(4), phase=Phase.STEP))


def test_a_view_may_be_read_until_its_bytes_are_given_back():
    later = (
        fetch(LOW, 0),
        wait(LOW, 0, 1),
        run(1, out=(2,), ticket=1),
        run(2, ticket=2),
        free(LOW, 1),
        fetch(LOW, 3, 1),
        wait(LOW, 3, 3),
        run(3),
        free(LOW, 3),
    )
    with pytest.raises(ScheduleInvalid, match="does not wait for the compute"):
        verify_schedule(schedule(*later))
    verify_schedule(schedule(*but(later, 5, fetch(LOW, 3, 2))))


def test_two_indices_may_stand_for_one_entry():
    """Two rows of a step update one parameter: the second must be fetched after the first went."""
    second = replace(fetch(HIGH, 6), entry=EntryIndex(1))
    rows = (STEP[0], second, *STEP[1:5], wait(HIGH, 6, 3), run(0, 3, ticket=7), free(HIGH, 3))
    made = schedule(*rows, phase=Phase.STEP)
    verify_schedule(made)
    with pytest.raises(ScheduleInvalid, match="was brought before what earlier compute made"):
        verify_schedule(made, entries=("w", "w"))
    verify_schedule(
        schedule(*rows[:1], *rows[2:6], second, *rows[6:], phase=Phase.STEP), entries=("w", "w")
    )


def test_a_long_schedule_is_proven_in_seconds():
    """Time grows with length: 20,000 instructions took 0.12 s of one core, 5,000 took 0.03 s."""
    columns = [Column(EntryIndex(n), 0, torch.float32, n < 3, n < 3, f"e{n}") for n in range(4)]
    chunks = 20_000 // 16
    row = Row(chunks * CHUNK_ELEMENTS, tuple(columns), (), lambda first, last, values: None)
    made = lower_step("adam", [row], 0, 4, StepRoom(0, 3 * 4 * 4 * CHUNK_ELEMENTS))
    assert len(made.instructions) == chunks * 16
    begun = time.process_time()
    verify_schedule(made)
    assert time.process_time() - begun < 5
