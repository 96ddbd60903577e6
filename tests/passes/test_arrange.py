"""A schedule arranged for a placement: proven safe, smaller by what rests on the device."""

import pytest
import torch
from joint import schedules_of
from offloaded import SMALL
from sampled import sampled
from small_models import SMALL_MODELS, UNALIKE, small

import zcompile
from zcompile.ir.program import program_of
from zcompile.ir.schedule import Borrow, EntryIndex, Reduce, Run, Schedule
from zcompile.ir.types import aligned
from zcompile.passes.lower import arrange
from zcompile.verify.schedule import verify_schedule

NONE: frozenset[EntryIndex] = frozenset()


def schedules(name: str) -> list[Schedule]:
    model, inputs = small(name)
    torch._dynamo.reset()
    zcompile.offload(model, **SMALL)
    with schedules_of() as made:
        out = torch.compile(model, backend="zinf")(*inputs)
        (out if isinstance(out, torch.Tensor) else out[0]).sum().backward()
    return [s for s in made if any(s.fetches())]


def every_other(schedule: Schedule) -> frozenset[EntryIndex]:
    return frozenset(sorted({f.entry for f in schedule.fetches()})[::2])


@pytest.mark.parametrize("name", sampled(SMALL_MODELS, *UNALIKE))
def test_every_arrangement_is_proven_safe(name):
    for schedule in schedules(name):
        everything = frozenset(f.entry for f in schedule.fetches())
        for resident in (NONE, every_other(schedule), everything):
            for budget in (schedule.budget_bytes, least_bytes(schedule, resident)):
                verify_schedule(arrange(schedule, resident, budget, 100))


def least_bytes(schedule: Schedule, resident: frozenset[EntryIndex]) -> int:
    """What it takes without any lead."""
    return arrange(schedule, resident, None, 0).arena_bytes


@pytest.mark.parametrize("name", sampled(SMALL_MODELS, *UNALIKE))
def test_what_is_resident_is_borrowed_and_the_rest_is_fetched(name):
    for schedule in schedules(name):
        resident = every_other(schedule)
        made = arrange(schedule, resident, schedule.budget_bytes, 4)
        assert {f.entry for f in made.fetches()} == {f.entry for f in schedule.fetches()} - resident
        borrowed = [x for x in made.instructions if isinstance(x, Borrow)]
        assert {b.entry for b in borrowed} == resident
        assert not any(b.writes for b in borrowed)


@pytest.mark.parametrize("name", sampled(SMALL_MODELS, *UNALIKE))
def test_compute_and_gradients_are_the_same(name):
    for schedule in schedules(name):
        made = arrange(schedule, every_other(schedule), schedule.budget_bytes, 4)
        assert [work(x) for x in made.instructions if isinstance(x, Run | Reduce)] == [
            work(x) for x in schedule.instructions if isinstance(x, Run | Reduce)
        ]


def work(x: Run | Reduce) -> object:
    return (x.region, x.inputs, x.outputs, x.drops) if isinstance(x, Run) else (x.value, x.entry)


def test_a_smaller_window_starts_later_and_takes_no_more():
    for schedule in schedules("gpt"):
        least = least_bytes(schedule, NONE)
        for budget in range(least, least * 3, aligned(least // 4)):
            assert arrange(schedule, NONE, budget, 100).arena_bytes <= budget


def test_taken_apart_every_value_is_read_between_its_wait_and_its_end():
    for schedule in schedules("gpt"):
        stages = program_of(schedule)
        for value in stages.values:
            readers = [n for n, run in enumerate(stages.runs) if value.wait.register in run.inputs]
            assert all(value.first <= n <= value.last for n in readers)
