"""From the last graph to instructions: registers die early, sinks return nothing, sizes vary."""

import pytest
import torch
from joint import schedules_of
from offloaded import SMALL, twins
from sampled import sampled
from small_models import GPT, SMALL_MODELS, UNALIKE, mlp, small
from torch import nn

import zcompile
from zcompile.ir.schedule import (
    Fetch,
    Free,
    GradientOf,
    Literal,
    Reduce,
    Run,
    Schedule,
    Wait,
)
from zcompile.ir.types import Phase


def compiled(model: nn.Module, *inputs: object, **how: object) -> list[Schedule]:
    """The forward and backward schedules of a model."""
    torch._dynamo.reset()
    zcompile.offload(model, **SMALL)
    with schedules_of() as made:
        out = torch.compile(model, backend="zinf", **how)(*inputs)
        if torch.is_grad_enabled():
            (out if isinstance(out, torch.Tensor) else out[0]).sum().backward()
    model.zero_grad()
    return made


def alive_at_the_end(schedule: Schedule) -> set[int]:
    """Registers that still hold a value when the walk is over."""
    alive = set(range(schedule.inputs)) | {register for register, _ in schedule.constants}
    for row in schedule.instructions:
        match row:
            case Wait():
                alive.add(row.register)
            case Run():
                alive |= set(row.outputs)
                alive -= set(row.drops)
            case Free():
                alive.discard(row.register)
            case Reduce(drop=True):
                alive.discard(row.value)
    return alive


def read(schedule: Schedule) -> set[int]:
    rows = schedule.instructions
    return {r for row in rows if isinstance(row, Run) for r in row.inputs} | {
        row.value for row in rows if isinstance(row, Reduce)
    }


@pytest.mark.parametrize("name", sampled(SMALL_MODELS, *UNALIKE))
def test_a_value_dies_with_its_last_reader(name):
    model, inputs = small(name)
    for schedule in compiled(model, *inputs):
        kept = {r for r in schedule.outputs if not isinstance(r, Literal)}
        kept |= {register for register, _ in schedule.constants}
        assert alive_at_the_end(schedule) & read(schedule) <= kept


@pytest.mark.parametrize("name", sampled(SMALL_MODELS, *UNALIKE))
def test_backward_returns_nothing_for_a_gradient_that_went_home(name):
    model, inputs = small(name)
    forward, backward = compiled(model, *inputs)
    assert (forward.phase, backward.phase) == (Phase.FORWARD, Phase.BACKWARD)
    reductions = [row for row in backward.instructions if isinstance(row, Reduce)]
    assert all(isinstance(row, Literal) and row.value is None for row in backward.outputs)
    places = {backward.names[row.entry] for row in backward.outputs if isinstance(row, GradientOf)}
    assert places == {row.name for row in reductions}
    assert len(reductions) == len(forward.sinks) == len(list(model.parameters()))
    assert {forward.names[i] for i in forward.sinks} == {row.name for row in reductions}


def test_a_gradient_that_is_asked_for_is_returned():
    _, backward = compiled(mlp(), torch.ones(2, 8, requires_grad=True))
    assert sum(not isinstance(r, Literal) for r in backward.outputs) == 1


def test_inference_expects_no_gradients():
    with torch.no_grad():
        (schedule,) = compiled(mlp(), torch.ones(2, 8))
    assert schedule.sinks == ()


def test_handles_are_inputs_and_every_fetch_names_one():
    for schedule in compiled(mlp(), torch.ones(2, 8)):
        assert all(register < schedule.inputs for register in schedule.handles)
        fetches = [row for row in schedule.instructions if isinstance(row, Fetch)]
        assert all(row.entry < len(schedule.handles) for row in fetches)
        assert all(schedule.names[row.entry] == row.name for row in fetches)
        assert all(row.begin == 0 and row.lasting for row in fetches)


def test_a_constant_holds_the_same_value_in_every_call():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.weight * torch.tensor([1.0, 2.0, 3.0])

    pair = twins(Net())
    for _ in range(2):
        assert pair.train(torch.randn(2, 3))
    forward, *_ = compiled(Net(), torch.ones(2, 3))
    ((register, value),) = forward.constants
    assert register >= forward.inputs
    assert value.tolist() == [1.0, 2.0, 3.0]


def test_no_gradient_that_leaves_is_larger_than_may_be_under_way():
    """Also of parameters with gaps, of which all that they span leaves."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            wide = torch.randn(8, 32)
            self.first = nn.Parameter(wide[:, ::4])
            self.second = nn.Parameter(wide.clone()[:, 3::4])

        def forward(self, x):
            return x @ self.first @ self.second.t()

    _, backward = compiled(Net(), torch.randn(4, 8))
    changing = [row for row in backward.instructions if row.effects.changes_live]
    rows = zip(changing, backward.holds.levels, strict=True)
    leaving = [(row, level) for row, level in rows if isinstance(row, Reduce)]
    assert {row.nbytes for row, _ in leaving} == {4 * (8 * 32 - 3)}
    assert all(level.departing >= row.nbytes for row, level in leaving)


@pytest.mark.slow  # tests/frontend/test_sizes_of_calls.py trains such a graph
def test_sizes_may_be_inputs():
    torch.manual_seed(0)
    schedules = compiled(GPT(1), torch.randint(0, 32, (3, 7)), dynamic=True)
    first, backward = schedules[0], schedules[-1]
    assert first.inputs > len(first.handles) + 1, "sizes beside handles and tokens"
    assert backward.phase is Phase.BACKWARD


def test_the_arena_holds_every_slot_and_no_more():
    for schedule in compiled(mlp(), torch.ones(2, 8)):
        slots = [row.slot for row in schedule.instructions if isinstance(row, Fetch)]
        assert schedule.arena_bytes == max(slot.end for slot in slots)
        assert schedule.peak_bytes <= schedule.arena_bytes <= schedule.budget_bytes


def test_schedules_are_told_apart():
    schedules = [*compiled(mlp(), torch.ones(2, 8)), *compiled(mlp(), torch.ones(2, 8))]
    assert len({schedule.serial for schedule in schedules}) == 4
