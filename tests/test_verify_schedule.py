"""The proof of a schedule: the sentence for each fault, and no mutant that goes through unseen."""

import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from joint import SMALL_MODELS, captured, least_budget, schedules_of, small
from races import faults, mutants, recounted

import zcompile
from zcompile import lower_step as steps
from zcompile import streaming
from zcompile import verify_schedule as module
from zcompile.errors import BudgetExceeded, ScheduleInvalid
from zcompile.lower_step import CHUNK_ELEMENTS, Column, Row, lower_step
from zcompile.packing import Block, aligned, pack
from zcompile.passes.schedule_prefetch import Need, choose_starts
from zcompile.schedule import (
    SERIALS,
    EntryIndex,
    Fetch,
    Free,
    Instruction,
    Literal,
    Reduce,
    Region,
    Register,
    Run,
    Schedule,
    Slot,
    Store,
    Ticket,
    Wait,
)
from zcompile.specs import Layout, Phase
from zcompile.units import MiB
from zcompile.verify_schedule import verify_schedule

NOTHING = Region("key", "nothing", lambda *values: ())
LOW, HIGH = Slot(0, 512), Slot(512, 512)
FLOATS = Layout((128,), (1,), 0, torch.float32)


def fetch(slot: Slot, ticket: int, *after: int, name: str = "w", nbytes: int = 512) -> Fetch:
    return Fetch(EntryIndex(0), 0, nbytes, slot, Ticket(ticket), after, name)  # type: ignore[arg-type]


def wait(slot: Slot, ticket: int, register: int, layout: Layout = FLOATS) -> Wait:
    return Wait(Ticket(ticket), slot, layout, Register(register), "w")


def run(*inputs: int, out: tuple[int, ...] = (), ticket: int | None = None,
        drops: tuple[int, ...] = ()) -> Run:  # fmt: skip
    return Run(NOTHING, inputs, out, drops, ticket)  # type: ignore[arg-type]


def free(slot: Slot, register: int) -> Free:
    return Free(slot, Register(register), "w")


def store(slot: Slot, ticket: int, *after: int, nbytes: int = 512) -> Store:
    return Store(EntryIndex(0), 0, nbytes, slot, Ticket(ticket), after, "w")  # type: ignore[arg-type]


def schedule(*rows: Instruction, outputs: tuple[Any, ...] = (), phase: Phase = Phase.FORWARD,
             budget: int | None = None) -> Schedule:  # fmt: skip
    """One input, register 0; the account of bytes is honest."""
    made = Schedule(phase, "test", (), (Register(0),), 1, (), outputs, 20, (), next(SERIALS), 0, 0,
                    budget, {})  # fmt: skip
    return recounted(made, rows)


SAFE = (fetch(LOW, 0), wait(LOW, 0, 1), run(0, 1, out=(2,), ticket=1), free(LOW, 1),
        fetch(LOW, 2, 1), wait(LOW, 2, 3), run(2, 3, out=(4,), ticket=3, drops=(2,)),
        Reduce(Register(4), EntryIndex(0), (Ticket(3),), True, "w"), free(LOW, 3))  # fmt: skip
STEP = (fetch(LOW, 0), wait(LOW, 0, 1), run(0, 1, ticket=1), store(LOW, 2, 1), free(LOW, 1),
        fetch(LOW, 3, 1, 2), wait(LOW, 3, 2), run(0, 2, ticket=4), store(LOW, 5, 4),
        free(LOW, 2))  # fmt: skip


def but(rows: tuple[Instruction, ...], at: int, *instead: Instruction) -> tuple[Instruction, ...]:
    return (*rows[:at], *instead, *rows[at + 1 :])


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
    "a slot beyond the arena": (
        lambda: replace(schedule(*SAFE), arena_bytes=511),
        "the slot of 'w' ends beyond the arena",
    ),
    "a slot that is taken": (
        lambda: schedule(SAFE[0], fetch(LOW, 7, name="v"), *SAFE[1:]),
        "'v' lies over 'w', which is taken",
    ),
    "a fetch that does not wait for compute before overwriting": (
        lambda: schedule(*but(SAFE, 4, fetch(LOW, 2))),
        "the fetch of 'w' does not wait for the compute that reads 'w' in the same bytes",
    ),
    "a slot refetched before its store is over": (
        lambda: schedule(*but(STEP, 5, fetch(LOW, 3, 1)), phase=Phase.STEP),
        "the fetch of 'w' does not wait for the store of 'w' from the same bytes",
    ),
    "a store that does not wait for the optimizer's compute": (
        lambda: schedule(*but(STEP, 3, store(LOW, 2)), phase=Phase.STEP),
        "the store of 'w' does not wait for the compute that writes it",
    ),
    "compute on bytes that are on their way home": (
        lambda: schedule(*STEP[:4], run(0, 1, ticket=9), *STEP[4:], phase=Phase.STEP),
        "'w' is computed with while its store reads it",
    ),
    "more bytes than the budget": (
        lambda: schedule(*SAFE, budget=511),
        "512 bytes are taken at once, the budget is 511",
    ),
    "a wait for a slot nobody took": (
        lambda: schedule(*but(SAFE, 1, wait(HIGH, 0, 1))),
        "'w' has no slot Slot(address=512, nbytes=512) that is taken here",
    ),
    "a wait for another fetch": (
        lambda: schedule(SAFE[0], fetch(HIGH, 8), wait(LOW, 8, 1), *SAFE[2:]),
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
    "a store before the wait": (
        lambda: schedule(fetch(LOW, 0), store(LOW, 2), *STEP[1:3], free(LOW, 1)),
        "'w' is stored before its fetch is waited for",
    ),
    "a store of more than came": (
        lambda: schedule(*but(STEP, 3, store(LOW, 2, 1, nbytes=516)), phase=Phase.STEP),
        "'w' stores more bytes than were brought",
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
}  # fmt: skip


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


@pytest.mark.parametrize("rows", [SAFE, STEP], ids=["forward", "step"])
def test_what_they_were_broken_from_is_safe(rows):
    whole = schedule(*rows, phase=Phase.STEP if rows is STEP else Phase.FORWARD,
                     outputs=(Literal(None), Register(0)))  # fmt: skip
    verify_schedule(whole)
    assert not list(faults(whole))


def test_every_sentence_has_a_case():
    """Read from the source: the words of each `fail(...)` that do not vary."""
    calls = [n for n in ast.walk(ast.parse(inspect.getsource(module)))
             if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "fail"]  # fmt: skip
    said = [sentence for _, sentence in BROKEN.values()]
    for call in calls:
        (text,) = call.args
        parts = text.values if isinstance(text, ast.JoinedStr) else [text]
        words = [re.escape(p.value) if isinstance(p, ast.Constant) else ".*" for p in parts]
        assert any(re.fullmatch("".join(words), sentence) for sentence in said), ast.unparse(text)
    assert len(calls) >= 15


def test_the_offending_instruction_is_marked():
    with pytest.raises(ScheduleInvalid) as caught:
        verify_schedule(BROKEN["a fetch that does not wait for compute before overwriting"][0]())
    (marked,) = [row for row in str(caught.value).splitlines() if row.startswith("  >")]
    assert marked.split() == [">", "4", "h2d", "fetch", "w", "512"]


def tight(name: str) -> int:
    """A device budget that makes slots serve again and again, and still holds a step of AdamW."""
    joint = captured(name)
    largest = max(aligned(spec.nbytes) for spec in joint.plan.params.values())
    return max(least_budget(joint), 4 * largest)


def made_by(name: str, grad: bool = True, budget: int = MiB) -> list[Schedule]:
    """The schedules of one training step of a small model, AdamW and clipping included."""
    model, inputs = small(name)
    zcompile.offload(model, device="cpu", device_memory=budget, host_memory="8MiB")
    torch._dynamo.reset()
    made: list[Schedule] = []
    lowered = streaming.lower_step

    def keep(*args: Any) -> Schedule:
        made.append(lowered(*args))
        return made[-1]

    streaming.lower_step = keep
    try:
        with schedules_of() as compiled, torch.set_grad_enabled(grad):
            out = torch.compile(model, backend="zinf")(*inputs)
            if grad:
                out = out if isinstance(out, torch.Tensor) else out[0]
                out.square().mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                torch.optim.AdamW(model.parameters(), fused=True).step()
    finally:
        streaming.lower_step = lowered
    model.zero_grad()
    return [*compiled, *made]


REAL = ["mlp", "module called twice", "view in two places", "tied embeddings", "transformer block"]


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("room", ["tight", "roomy"])
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
            columns.append(Column(EntryIndex(entry), 0, draw(dtypes), draw(st.booleans()), True,
                                  f"e{entry}"))  # fmt: skip
            entry += 1
        rows.append(Row(draw(st.integers(1, 9 * CHUNK_ELEMENTS)), tuple(columns), (), element_wise))
    budget = draw(st.integers(1, 300_000))
    try:
        return lower_step("step", rows, 0, entry, budget)
    except BudgetExceeded as error:
        return lower_step("step", rows, 0, entry, error.needed_bytes)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(step_schedules())
def test_every_step_schedule_is_safe(made):
    verify_schedule(made)
    assert not list(faults(made))


@settings(deadline=None, derandomize=True, max_examples=8)
@given(step_schedules())
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
    needs = [Need(f"p{i}", first, first + draw(st.integers(0, 3)), draw(st.integers(4, 5000)) * 4)
             for i, first in enumerate(firsts)]  # fmt: skip
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


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_every_small_model_has_safe_schedules(name):
    for made in made_by(name, budget=tight(name)):
        verify_schedule(made)
        assert not list(faults(made))


def test_the_chunks_of_a_step_are_a_pipeline():
    """While one chunk computes another arrives: its fetch stands before that compute."""
    columns = tuple(Column(EntryIndex(i), 0, torch.float32, i < 1, True, f"e{i}") for i in range(2))
    rows = [Row(8 * CHUNK_ELEMENTS, columns, (), element_wise)]
    made = lower_step("step", rows, 0, 2, steps.DEPTH * 3 * 2 * 4 * CHUNK_ELEMENTS)
    kinds = [type(row).__name__ for row in made.instructions]
    first_run = kinds.index("Run")
    assert kinds[:first_run].count("Fetch") > len(columns)
