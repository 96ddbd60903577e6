"""No small change that makes a schedule unsafe goes through unseen; every valid one is accepted."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from joint import captured, least_budget, trained_schedules
from races import faults, mutants
from sampled import crossed, sampled
from small_models import SMALL_MODELS, UNALIKE, small
from written import fetch, free, run, schedule, wait

import zcompile
from zcompile.errors import BudgetExceeded, ScheduleInvalid
from zcompile.ir.optimizer_step import CHUNK_ELEMENTS, DEPTH, Column, Row, StepRoom, lower_step
from zcompile.ir.schedule import EntryIndex, Instruction, Schedule, Slot
from zcompile.ir.types import Layout, Phase, aligned
from zcompile.ir.units import Bytes, MiB
from zcompile.memory.allocator import Block, pack
from zcompile.memory.window import Need
from zcompile.passes.schedule_prefetch import choose_starts
from zcompile.verify.schedule import verify_schedule


def tight(name: str) -> int:
    """A device budget that makes slots serve again and again, and still holds a step of AdamW."""
    joint = captured(name)
    largest = max(aligned(spec.nbytes) for spec in joint.plan.params.values())
    return max(least_budget(joint), 4 * largest)


def made_by(name: str, grad: bool = True, budget: int = MiB) -> list[Schedule]:
    """The schedules of one training step of a small model, AdamW and clipping included."""
    model, inputs = small(name)
    zcompile.offload(model, device="cpu", device_memory=Bytes(budget), host_memory="8MiB")
    return trained_schedules(model, inputs, grad)


REAL = ["mlp", "module called twice", "view in two places", "tied embeddings", "transformer block"]


@pytest.mark.parametrize(("name", "room"), crossed(REAL, ["tight", "roomy"]))
def test_no_mutant_of_a_real_schedule_goes_through_unseen(name, room, record_property):
    budget = tight(name) if room == "tight" else MiB
    schedules = made_by(name, budget=budget) + made_by(name, grad=False, budget=budget)
    assert {s.phase for s in schedules} == {Phase.FORWARD, Phase.BACKWARD, Phase.STEP}
    caught = harmless = 0
    for real in schedules:
        verify_schedule(real)
        assert not list(faults(real))
        for what, mutant in mutants(real):
            try:
                verify_schedule(mutant)
            except ScheduleInvalid:
                caught += 1
                continue
            assert not list(faults(mutant)), f"{what} of {real.phase.value} was accepted"
            assert not what.startswith("no wait"), "a wait is never superfluous"
            harmless += 1
    record_property("mutants caught", caught)
    record_property("mutants harmless", harmless)
    assert caught > 2 * harmless


def element_wise(first: int, last: int, values: Any) -> None:
    """A step that only touches its operands."""
    for value in values:
        value.add_(1)


@st.composite
def step_schedules(draw: st.DrawFn) -> Schedule:
    dtypes = st.sampled_from((torch.float32, torch.bfloat16, torch.float64))
    rows, entry = [], 0
    for _ in range(draw(st.integers(1, 5))):
        columns = []
        for _ in range(draw(st.integers(1, 4))):
            columns.append(
                Column(EntryIndex(entry), 0, draw(dtypes), draw(st.booleans()), True, f"e{entry}")
            )
            entry += 1
        rows.append(Row(draw(st.integers(1, 9 * CHUNK_ELEMENTS)), tuple(columns), (), element_wise))
    budget, begin = draw(st.integers(1, 300_000)), draw(st.sampled_from((0, MiB)))
    try:
        return lower_step("step", rows, 0, entry, StepRoom(begin, budget))
    except BudgetExceeded as error:
        return lower_step("step", rows, 0, entry, StepRoom(begin, error.needed_bytes))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(step_schedules())
def test_every_step_schedule_is_safe(made):
    verify_schedule(made)
    assert not list(faults(made))


@settings(deadline=None, derandomize=True, max_examples=8)
@given(step_schedules())
@pytest.mark.slow
def test_no_mutant_of_a_step_goes_through_unseen(made):
    for what, mutant in mutants(replace(made, instructions=made.instructions)):
        try:
            verify_schedule(mutant)
        except ScheduleInvalid:
            continue
        assert not list(faults(mutant)), what


@st.composite
def chosen_schedules(draw: st.DrawFn) -> Schedule:
    """Random readers of random parameters, through `choose_starts` and `pack`."""
    count = draw(st.integers(1, 10))
    firsts = sorted(draw(st.lists(st.integers(0, 8), min_size=count, max_size=count)))
    needs = [
        Need(f"p{i}", first, first + draw(st.integers(0, 3)), draw(st.integers(4, 5000)) * 4)
        for i, first in enumerate(firsts)
    ]
    spare = draw(st.integers(0, 30_000))
    try:
        choose_starts(needs, 1, 8, "forward")
        least = 1
    except BudgetExceeded as error:
        least = error.needed_bytes
    starts = choose_starts(needs, least + spare, draw(st.integers(0, 8)), "forward")
    blocks = [Block(s, n.last, n.nbytes) for s, n in zip(starts, needs, strict=True)]
    return _in_order(needs, starts, pack(blocks), least + spare)


def _in_order(needs: list[Need], starts: Any, addresses: Any, budget: int) -> Schedule:
    slots = [Slot(a, aligned(n.nbytes)) for n, a in zip(needs, addresses, strict=True)]
    rows: list[Instruction] = []
    done: list[tuple[Slot, int]] = []
    for region in range(max(n.last for n in needs) + 1):
        for i, need in enumerate(needs):
            if starts[i] == region:
                after = {ticket for slot, ticket in done if slot.overlaps(slots[i])}
                rows.append(fetch(slots[i], i, *sorted(after)[-1:], nbytes=need.nbytes))
        for i, need in enumerate(needs):
            if need.first == region:
                layout = Layout((need.nbytes // 4,), (1,), 0, torch.float32)
                rows.append(wait(slots[i], i, 1 + i, layout))
        alive = [i for i, n in enumerate(needs) if n.first <= region <= n.last]
        rows.append(run(0, *(1 + i for i in alive), ticket=100 + region))
        for i in alive:
            if needs[i].last == region:
                rows.append(free(slots[i], 1 + i))
                done.append((slots[i], 100 + region))
    return schedule(*rows, budget=budget)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(chosen_schedules())
def test_every_schedule_of_chosen_starts_is_safe(made):
    verify_schedule(made)
    assert not list(faults(made))


@settings(deadline=None, derandomize=True, max_examples=10)
@given(chosen_schedules())
def test_no_mutant_of_chosen_starts_goes_through_unseen(made):
    for what, mutant in mutants(made):
        try:
            verify_schedule(mutant)
        except ScheduleInvalid:
            continue
        assert not list(faults(mutant)), what


@pytest.mark.parametrize("name", sampled(SMALL_MODELS, *UNALIKE))
def test_every_small_model_has_safe_schedules(name):
    for made in made_by(name, budget=tight(name)):
        verify_schedule(made)
        assert not list(faults(made))


def test_the_chunks_of_a_step_are_a_pipeline():
    """While one chunk computes another arrives: its fetch stands before that compute."""
    columns = tuple(Column(EntryIndex(i), 0, torch.float32, i < 1, True, f"e{i}") for i in range(2))
    rows = [Row(8 * CHUNK_ELEMENTS, columns, (), element_wise)]
    made = lower_step("step", rows, 0, 2, StepRoom(0, DEPTH * 3 * 2 * 4 * CHUNK_ELEMENTS))
    kinds = [type(row).__name__ for row in made.instructions]
    first_run = kinds.index("Run")
    assert kinds[:first_run].count("Fetch") > len(columns)
