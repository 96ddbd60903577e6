"""A program arranged for a placement: proven safe, smaller by what rests on the device."""

import pytest
from programs import least_window, programs
from sampled import sampled
from small_models import SMALL_MODELS, UNALIKE

from zcompile.ir import printer
from zcompile.ir.schedule import Borrow, EntryIndex, Fetch, Free, Reduce, RegionProgram, Run
from zcompile.ir.types import aligned
from zcompile.passes.arrange import arrange, rearrange
from zcompile.verify.schedule import verify_schedule

NONE: frozenset[EntryIndex] = frozenset()


def every_other(program: RegionProgram) -> frozenset[EntryIndex]:
    return frozenset(sorted({v.entry for v in program.values})[::2])


def tight(program: RegionProgram, resident: frozenset[EntryIndex]) -> int:
    """Arena bytes that it takes without any lead."""
    return arrange(program, None, 0, resident).arena_bytes


@pytest.mark.parametrize("name", sampled(SMALL_MODELS, *UNALIKE))
def test_every_arrangement_is_proven_safe(name):
    for program in programs(name):
        everything = frozenset(v.entry for v in program.values)
        for resident in (NONE, every_other(program), everything):
            for budget in (program.budget_bytes, tight(program, resident)):
                verify_schedule(arrange(program, budget, 100, resident))


@pytest.mark.parametrize("name", sampled(SMALL_MODELS, *UNALIKE))
def test_what_is_resident_is_borrowed_and_the_rest_is_fetched(name):
    for program in programs(name):
        resident = every_other(program)
        made = arrange(program, program.budget_bytes, 4, resident)
        assert {f.entry for f in made.fetches()} == {v.entry for v in program.values} - resident
        borrowed = [x for x in made.instructions if isinstance(x, Borrow)]
        assert {b.entry for b in borrowed} == resident
        assert not any(b.writes for b in borrowed)


@pytest.mark.parametrize("name", sampled(SMALL_MODELS, *UNALIKE))
def test_compute_and_gradients_are_those_of_the_program_in_its_order(name):
    for program in programs(name):
        made = arrange(program, program.budget_bytes, 4, every_other(program))
        assert [work(x) for x in made.instructions if isinstance(x, Run | Reduce)] == [
            work(x)
            for n, run in enumerate(program.regions)
            for x in (run, *program.departures[n + 1])
            if isinstance(x, Run | Reduce)
        ]


def work(x: Run | Reduce) -> object:
    return (x.region, x.inputs, x.outputs, x.drops) if isinstance(x, Run) else (x.value, x.entry)


def test_a_smaller_window_starts_later_and_takes_no_more():
    for program in programs("gpt"):
        least = tight(program, NONE)
        for budget in range(least, least * 3, aligned(least // 4)):
            assert arrange(program, budget, 100).arena_bytes <= budget


def test_every_value_is_read_between_its_first_and_its_last_region():
    for program in programs("gpt"):
        for value in program.values:
            readers = [n for n, run in enumerate(program.regions) if value.register in run.inputs]
            assert all(value.first <= n <= value.last for n in readers)


def test_the_same_passes_arrange_at_compile_time_and_anew():
    """A schedule arranged anew, for a placement and back again, is what it was."""
    for program in programs("gpt"):
        first = arrange(program, program.budget_bytes, 8)
        there = rearrange(first, least_window(program), 100, every_other(program))
        back = rearrange(there, program.budget_bytes, 8)
        assert back.instructions == first.instructions
        assert back.program == first.program
        assert there.instructions != first.instructions


def test_a_fetch_waits_for_the_last_region_that_read_its_bytes_and_for_no_other():
    waits = 0
    for program in programs("gpt"):
        made = arrange(program, least_window(program), 100)
        marks = {x.ticket: n for n, x in enumerate(made.instructions) if isinstance(x, Run)}
        read: list[tuple[int, Free]] = []
        last = 0
        for n, x in enumerate(made.instructions):
            if isinstance(x, Run):
                last = n
            elif isinstance(x, Free):
                read.append((last, x))
            elif isinstance(x, Fetch):
                over = [run for run, free in read if free.slot.overlaps(x.slot)]
                assert [marks[t] for t in x.after] == ([max(over)] if over else [])
                waits += len(x.after)
    assert waits


def test_a_run_has_a_ticket_only_if_something_waits_for_it():
    for program in programs("gpt"):
        made = arrange(program, program.budget_bytes, 8)
        waited = {t for x in made.instructions for t in getattr(x, "after", ())}
        given = {x.ticket for x in made.instructions if isinstance(x, Run)} - {None}
        assert given <= waited


def test_the_text_of_a_program_says_by_region_what_comes_is_read_and_leaves(golden):
    text = [
        printer.program_text(arrange(p, least_window(p), 8, every_other(p)).program)
        for p in programs("mlp")
    ]
    assert "\n".join(text) == golden
