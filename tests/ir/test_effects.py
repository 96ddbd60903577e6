"""Effects: a kind of instruction that nobody knows is handled by all, and real ones tell the truth.

`Fill` is added here and nowhere else. It can be carried out as well: `runtime/executor.py::ACTIONS`
takes what a call does for it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import pytest
import torch
from small_models import GPT, SMALL_MODELS
from small_steps import ONE, a_call, computing, fetching, freeing, machine, step_of
from small_steps import storing as going_home
from small_steps import waiting as arrived
from torch import nn
from written import FLOATS, HIGH, LOW, fetch, free, run, schedule, store, wait

import zcompile
from zcompile.errors import ScheduleInvalid
from zcompile.frontend.offload import session_behind
from zcompile.ir.effects import Effects, Instruction, Register, Slot, Ticket
from zcompile.ir.handover import handover
from zcompile.ir.printer import schedule_text
from zcompile.ir.schedule import (
    Borrow,
    Fetch,
    Free,
    Left,
    Offload,
    Reduce,
    Run,
    Schedule,
    Store,
    Wait,
)
from zcompile.ir.step import StepCall
from zcompile.ir.types import EntryRef, Layout, Phase, Region, Work
from zcompile.ir.units import Bytes
from zcompile.machine.cost import Costs
from zcompile.memory.step_footprint import device_peak
from zcompile.planner.bounds import demand_of
from zcompile.planner.simulator import simulate
from zcompile.runtime.executor import ACTIONS
from zcompile.runtime.profile import Clocks
from zcompile.verify.schedule import verify_schedule

MODELS = {
    "mlp": SMALL_MODELS["mlp"],
    "gpt": (lambda: GPT(1, 32, 64), lambda: (torch.randint(0, 64, (8, 32)),)),
}
FILLING = Region("fill of 512", "zeros", tuple, Work(nbytes=512, ops=1))


@dataclass(frozen=True)
class Fill:
    """Fill a slot with zeros on the compute stream; `register` becomes a tensor over it."""

    slot: Slot
    register: Register
    after: tuple[Ticket, ...] = ()
    layout: Layout = FLOATS

    @cached_property
    def effects(self) -> Effects:
        return Effects(
            "fill",
            "zeros",
            nbytes=self.layout.end_bytes,
            region=FILLING,
            defines=(self.register,),
            takes=self.slot,
            writes_slot=self.slot,
            views=self.slot,
            after=self.after,
        )


def fill(slot: Slot, register: int, *after: int) -> Fill:
    return Fill(slot, Register(register), tuple(map(Ticket, after)))


UPDATE = (fetch(LOW, 0), wait(LOW, 0, 1), run(0, 1, ticket=1), store(LOW, 2, 1), free(LOW, 1))
FILLED = (fill(LOW, 3, 2), run(0, 3, ticket=3), free(LOW, 3))
REUSED = (fetch(LOW, 4, 3), wait(LOW, 4, 5), free(LOW, 5))


def of(*rows: Instruction) -> Schedule:
    """Of an optimizer's step; its account of bytes is honest."""
    end = max((x.effects.takes.end for x in rows if x.effects.takes), default=0)
    peak = max(accumulate(x.effects.taken_bytes for x in rows), default=0)
    made = schedule(phase=Phase.STEP)
    return replace(made, instructions=rows, arena_bytes=end, peak_bytes=peak)


def test_the_proof_accepts_it_where_it_is_safe():
    verify_schedule(of(*UPDATE, *FILLED, *REUSED))


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            (*UPDATE, fill(LOW, 3), *FILLED[1:]),
            "the fill of 'zeros' does not wait for the store of 'w' from the same bytes",
        ),
        ((*UPDATE[:1], fill(LOW, 3)), "'zeros' lies over 'w', which is taken"),
        ((*UPDATE[:4], fill(HIGH, 3, 2), *UPDATE[4:]), "'zeros' is never given back"),
        ((*UPDATE, *FILLED[1:]), "register 3 is read before its wait, or after it was given back"),
        ((fill(Slot(0, 100), 3),), "'zeros' brings 512 bytes into 100"),
        (
            (*UPDATE, *FILLED, fetch(LOW, 4, 2)),
            "the fetch of 'w' does not wait for the compute that reads 'zeros' in the same bytes",
        ),
        (
            (*UPDATE, fill(LOW, 3, 7), *FILLED[1:]),
            "it waits for ticket 7, which nothing before it gives out",
        ),
    ],
)
def test_the_proof_refuses_it_where_it_races(rows, sentence):
    with pytest.raises(ScheduleInvalid) as caught:
        verify_schedule(of(*rows))
    assert caught.value.why == sentence


def test_its_slot_counts_for_as_long_as_it_is_taken():
    made = of(fill(LOW, 1), fill(HIGH, 2), run(1, 2), free(LOW, 1), free(HIGH, 2))
    verify_schedule(made)
    assert made.peak_bytes == device_peak(made) == LOW.nbytes + HIGH.nbytes


def test_a_simulated_step_computes_it_after_what_it_waits_for():
    rows = (fetching(0, 0), arrived(0), computing(1, 1), going_home(0, 2, 1), freeing())
    step = step_of(a_call(*rows, fill(LOW, 3, 2), computing(1), freeing(), phase=Phase.STEP))
    costs = Costs(machine(), regions={FILLING.key: 5.0})
    found = simulate(step, costs, repeats=1)
    (moment,) = (m for m in found.moments if isinstance(m.instruction, Fill))
    home = next(m.arrived_s for m in found.moments if m.number == 3)
    assert moment.is_work
    assert (moment.begin_s, moment.end_s) == (home, home + 5.0)
    assert found.peak_bytes == LOW.nbytes
    assert found.nbytes["d2h"] == ONE


def test_its_seconds_are_predicted_from_its_work_and_bound_the_step():
    step = step_of(a_call(fill(LOW, 3), freeing()))
    costs = Costs(machine())
    seconds = costs.region_seconds(FILLING)
    assert seconds > 0
    assert demand_of(step, costs.region_seconds).phases_s == {step.calls[0].phase: seconds}


def test_what_is_handed_over_waits_for_its_slot():
    now = of(fill(LOW, 1), run(1), free(LOW, 1))
    then = of(fetch(LOW, 0), wait(LOW, 0, 1), run(1), free(LOW, 1))
    found = handover(now, then)
    assert (list(found.starts), found.peak_bytes) == ([2], LOW.nbytes)
    assert handover(then, now).starts == {}


def test_it_is_printed():
    (row,) = (line for line in schedule_text(of(*UPDATE, *FILLED)).splitlines() if "zeros" in line)
    assert row.split() == ["5", "compute", "fill", "zeros", "512", "@0", "<t2"]


def test_it_is_timed_and_recorded():
    class OnHost:
        torch_device = torch.device("cpu")

    made = of(fill(LOW, 1), free(LOW, 1))
    clocks = Clocks(OnHost(), lambda: 0.0)
    clocks.learn(made, [0.0, 0.0], [2.0, 1.0], {}, frozenset())
    costs = clocks.costs(machine(), Costs(machine()).ways)
    assert costs.region_seconds(FILLING) == 2.0
    assert costs.issue_seconds(free(LOW, 1).effects) == 1.0
    assert list(StepCall(made, (EntryRef(1),)).uses()) == []


def test_it_is_executed_by_an_action_that_is_added_to_the_table(monkeypatch):
    def act(call: Any, x: Fill) -> None:
        call.store.arena.take_slot(x.slot.address, x.slot.nbytes, "zeros")
        call.taken.add(x.slot)
        memory = call.store.arena.slot(x.slot.address, x.slot.nbytes)
        call.values[x.register] = x.layout.view(memory).zero_()

    monkeypatch.setitem(ACTIONS, Fill, act)
    copied = Region("copy", "clone", lambda value: (value.clone(),))
    rows = (fill(LOW, 1), replace(run(1, out=(2,)), region=copied), free(LOW, 1))
    made = replace(of(*rows), phase=Phase.FORWARD, outputs=(Register(2),))
    verify_schedule(made)
    model = zcompile.offload(nn.Linear(8, 8), device="cpu", device_memory="1MiB")
    session = session_behind(model)
    session.arena.slot(LOW.address, LOW.nbytes).fill_(1)
    (result,) = session.executor.run(made, [None], ())
    assert torch.equal(result, torch.zeros(128))
    assert session.arena.used_bytes == 0, "its slot was given back"


# --- What real instructions say, beside what the executor does ---

Action = Callable[[Any, Instruction], None]


def checked(action: Action, live_bytes: Callable[[], int]) -> Action:
    """`action`, with what it changes compared to what the instruction says of itself."""

    def act(call: Any, instruction: Instruction) -> None:
        x, values = instruction.effects, list(call.values)
        tickets, taken = set(call.tickets), set(call.taken)
        live, versions = live_bytes(), [entry.version for entry in call.entries]
        action(call, instruction)
        assert set(call.tickets) - tickets == {x.ticket} - {None}
        assert {x.takes} - {None} <= set(call.taken)
        assert set(call.taken) - taken <= {x.takes}
        assert taken - set(call.taken) == {x.gives_back} - {None}
        both = enumerate(zip(values, call.values, strict=True))
        assert {r for r, (a, b) in both if a is not b} <= {*x.defines, *x.forgets}
        assert all(call.values[r] is None for r in {*x.forgets} - {*x.defines})
        wrote = {n for n, entry in enumerate(call.entries) if entry.version != versions[n]}
        assert wrote == ({x.home.entry} if x.home is not None and x.writes_home else set())
        assert x.changes_live or live_bytes() == live

    return act


@pytest.mark.parametrize(
    ("name", "memory", "kinds"),
    [
        ("mlp", "1MiB", {Fetch, Wait, Run, Free, Reduce, Store, Borrow}),
        pytest.param(
            "gpt",
            "420KiB",
            {Fetch, Wait, Run, Free, Reduce, Store, Borrow, Offload, Left},
            marks=pytest.mark.slow,  # what a schedule with activations away does: test_streams.py
        ),
    ],
)
def test_the_executor_does_what_effects_say(name, memory, kinds, monkeypatch):
    torch._dynamo.reset()
    torch.manual_seed(0)
    throttle = {"h2d": "500MB/s", "d2h": "500MB/s"}
    make, inputs = MODELS[name]
    model = zcompile.offload(
        make(), device="cpu", device_memory=Bytes(memory), host_memory="64MiB", throttle=throttle
    )
    live, seen = session_behind(model).executor.live_memory, set()

    def noted(kind: type, action: Action) -> Action:
        def act(call: Any, instruction: Instruction) -> None:
            seen.add(kind)
            action(call, instruction)

        return act

    for kind, action in list(ACTIONS.items()):
        told = checked(action, lambda: live.nbytes)
        monkeypatch.setitem(ACTIONS, kind, noted(kind, told))
    compiled = torch.compile(model, backend="zinf", dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(4):
        compiled(*inputs()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen == kinds
    zcompile.close(model)
