"""The step schedule: rows cut into chunks that fit, begin at whole vectors, and miss nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zcompile.errors import BudgetExceeded, more_device_memory
from zcompile.ir.optimizer_step import (
    CHUNK_BYTES,
    CHUNK_ELEMENTS,
    Column,
    Row,
    StepRoom,
    lower_step,
)
from zcompile.ir.schedule import Borrow, EntryIndex, Fetch, Register, Run, Schedule, Store, Wait
from zcompile.ir.types import Phase
from zcompile.ir.units import GiB, MiB
from zcompile.verify.schedule import verify_schedule


def nothing(first: int, last: int, values: Any) -> None:
    """Computes nothing."""


def row(numel: int, *columns: tuple[torch.dtype, bool], first: int = 0, begin: int = 0) -> Row:
    """Columns as (dtype, whether it is written), of entries from `first` on."""
    made = (
        Column(EntryIndex(first + i), begin, dtype, writes, True, f"e{first + i}")
        for i, (dtype, writes) in enumerate(columns)
    )
    return Row(numel, tuple(made), (), nothing)


F32, BF16 = (torch.float32, True), (torch.bfloat16, False)


def step(rows: list[Row], budget: int) -> Schedule:
    made = lower_step("step", rows, 0, sum(len(r.columns) for r in rows), StepRoom(0, budget))
    verify_schedule(made)
    assert made.phase is Phase.STEP
    assert made.arena_bytes <= budget
    return made


def chunks(schedule: Schedule) -> list[tuple[int, int]]:
    """Element ranges of the computes, in order."""
    runs = [r for r in schedule.instructions if isinstance(r, Run)]
    return [run.region.call.args[1:3] for run in runs]


@st.composite
def some_rows(draw: st.DrawFn) -> list[Row]:
    rows: list[Row] = []
    for _ in range(draw(st.integers(1, 4))):
        columns = draw(
            st.lists(st.sampled_from([F32, BF16, (torch.float64, True)]), min_size=1, max_size=4)
        )
        first = sum(len(r.columns) for r in rows)
        rows.append(
            row(
                draw(st.integers(0, 12 * CHUNK_ELEMENTS)),
                *columns,
                first=first,
                begin=8 * draw(st.integers(0, 3)),
            )
        )
    return rows


@settings(deadline=None, derandomize=True)
@given(some_rows(), st.integers(32 * CHUNK_ELEMENTS, 2_000_000))
def test_chunks_cover_every_element_once_and_begin_at_whole_vectors(rows, budget):
    schedule = step(rows, budget)
    found = iter(chunks(schedule))
    for one in rows:
        at = 0
        while at < one.numel:
            first, last = next(found)
            assert first == at
            assert first % CHUNK_ELEMENTS == 0
            at = last
        assert at == one.numel
    assert next(found, None) is None


@settings(deadline=None, derandomize=True)
@given(some_rows(), st.integers(32 * CHUNK_ELEMENTS, 2_000_000))
def test_every_byte_is_fetched_once_and_stored_once_if_it_is_written(rows, budget):
    schedule = step(rows, budget)
    for one in rows:
        for column in one.columns:
            width = column.dtype.itemsize
            whole = [(column.begin, column.begin + one.numel * width)] if one.numel else []
            for kind, wanted in ((Fetch, whole), (Store, whole if column.writes else [])):
                moved = [
                    (x.begin, x.begin + x.nbytes)
                    for x in schedule.instructions
                    if isinstance(x, kind) and x.entry == column.entry
                ]
                assert joined(moved) == wanted


def joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that follow each other, as one; in the order given."""
    found: list[tuple[int, int]] = []
    for begin, end in ranges:
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


def test_one_element_is_one_chunk():
    assert chunks(step([row(1, F32)], 4096)) == [(0, 1)]


def test_an_empty_row_is_no_chunk():
    assert chunks(step([row(0, F32), row(5, F32, first=1)], 4096)) == [(0, 5)]


def test_a_huge_row_is_cut_by_what_a_link_needs_not_by_what_fits():
    schedule = step([row(64 * MiB, F32, F32, F32)], GiB)
    widest = max(x.nbytes for x in schedule.instructions if isinstance(x, Fetch))
    assert widest <= max(CHUNK_BYTES, GiB // 8)
    assert len(chunks(schedule)) >= 4


def test_a_row_far_larger_than_the_arena_streams_through_it():
    budget = 256 * 1024
    schedule = step([row(4 * MiB, F32, F32, F32, F32)], budget)
    assert schedule.peak_bytes <= budget
    assert len(chunks(schedule)) >= 4 * 4 * 4 * MiB // budget


def test_while_one_chunk_computes_the_next_is_under_way():
    rows = step([row(16 * CHUNK_ELEMENTS, F32, F32)], 64 * CHUNK_ELEMENTS).instructions
    started = 0
    for one in rows:
        if isinstance(one, Fetch):
            started += 1
        elif isinstance(one, Wait):
            started -= 1
        elif isinstance(one, Run) and one is not [r for r in rows if isinstance(r, Run)][-1]:
            assert started >= 2, "the two operands of the next chunk"


@pytest.mark.parametrize(
    "rows",
    [
        [row(10_000, F32, F32)],
        [row(10_000, BF16, BF16, BF16), row(10_000, F32, F32, first=3)],  # widest, not most columns
        [row(3, F32), row(900, (torch.float64, True), F32, first=1)],
    ],
)
def test_a_budget_too_small_says_which_bytes_do(rows):
    with pytest.raises(BudgetExceeded, match="one chunk of step needs") as caught:
        step(rows, 100)
    least = caught.value.needed_bytes
    assert more_device_memory(least) in str(caught.value)
    step(rows, least)
    with pytest.raises(BudgetExceeded):
        step(rows, least - 1)


def test_plain_operands_come_after_the_columns():
    one = Row(10, row(10, F32).columns, (Register(0),), nothing)
    schedule = lower_step("step", [one], 1, 1, StepRoom(0, 4096))
    (run,) = [r for r in schedule.instructions if isinstance(r, Run)]
    (wait,) = [r for r in schedule.instructions if isinstance(r, Wait)]
    assert run.inputs == (wait.register, Register(0))


class Joined:
    """A chunk function that computes any rows together."""

    def __call__(self, first: int, last: int, values: Any) -> None:
        pass

    def joins(self, other: object) -> bool:
        return True

    def joint(self, rows: Any) -> Any:
        return nothing


def test_a_region_says_which_of_its_inputs_it_writes():
    rows = []
    for n in range(2):
        columns = row(10, BF16, F32, F32, first=3 * n).columns
        resting = tuple(replace(column, resident=True) for column in columns)
        rows.append(Row(10, resting, (Register(0), Register(1)), Joined()))
    both = lower_step("step", rows, 2, 6, StepRoom(0, 4096))
    (run,) = [r for r in both.instructions if isinstance(r, Run)]
    assert run.region.writes == (1, 2, 6, 7)
    lent = {r.register for r in both.instructions if isinstance(r, Borrow) and r.writes}
    assert set(run.effects.writes) == lent
    (alone,) = [r for r in step([row(10, BF16, F32)], 4096).instructions if isinstance(r, Run)]
    assert alone.effects.writes == alone.inputs[1:]


def test_what_rests_within_reach_is_computed_with_in_place():
    moving, there = row(3 * CHUNK_ELEMENTS, F32).columns[0], row(1, BF16, first=1).columns[0]
    rows = [Row(3 * CHUNK_ELEMENTS, (moving, replace(there, resident=True)), (), nothing)]
    made = step(rows, 3 * CHUNK_ELEMENTS * 4)
    assert {f.entry for f in made.fetches()} == {0}
    borrowed = [i for i in made.instructions if isinstance(i, Borrow)]
    assert [(b.begin, b.layout.numel) for b in borrowed] == [
        (2 * CHUNK_ELEMENTS * n, CHUNK_ELEMENTS) for n in range(3)
    ]
    assert not any(b.writes for b in borrowed)


def test_chunks_from_afar_are_spread_among_the_others():
    near = row(8 * CHUNK_ELEMENTS, F32, F32)
    far = row(4 * CHUNK_ELEMENTS, F32, F32, first=2)
    far = replace(far, columns=(far.columns[0], replace(far.columns[1], far=True)))
    made = lower_step("step", [far, near], 0, 4, StepRoom(0, 3 * 2 * CHUNK_ELEMENTS * 4))
    verify_schedule(made)
    order = [
        "far" if s.name == "e2" else "near"
        for s in made.instructions
        if isinstance(s, Store) and s.name in ("e0", "e2")
    ]
    assert order == ["near", "far", "near"] * 4
    assert [c[0] for c, kind in zip(chunks(made), order, strict=True) if kind == "far"] == [
        n * CHUNK_ELEMENTS for n in range(4)
    ]


def test_a_row_of_which_nothing_moves_takes_no_lane_either():
    still = row(CHUNK_ELEMENTS, F32, first=2)
    still = replace(still, columns=(replace(still.columns[0], resident=True),))
    rows = [row(4 * CHUNK_ELEMENTS, F32), row(CHUNK_ELEMENTS, F32, first=1), still]
    step(rows, 8 * CHUNK_ELEMENTS * 4)  # verified: the slots end where the schedule says


def test_a_row_of_which_nothing_moves_is_one_chunk_and_takes_no_arena():
    columns = tuple(replace(c, resident=True) for c in row(1, F32, F32).columns)
    made = step([Row(100 * CHUNK_ELEMENTS, columns, (), nothing)], 0)
    assert chunks(made) == [(0, 100 * CHUNK_ELEMENTS)]
    assert made.peak_bytes == made.arena_bytes == 0
