"""Whole steps under a plan: the same numbers, and nothing moved that need not be."""

import copy
from dataclasses import replace
from itertools import product

import pytest
import torch
from planned_runs import (
    LITTLE_HOST,
    STEPS,
    WEIGHT_BYTES,
    adamw,
    begun,
    expected,
    gpt,
    held_bytes,
    homes,
    ids,
    loss_of,
    offloaded,
    plan_at_given_costs,
    same,
    train,
)
from sampled import sampled, sampled_rows
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import zcompile
from zcompile.cli import main
from zcompile.errors import ParameterChanged
from zcompile.frontend import replan, session_plan
from zcompile.frontend.offload import session_behind
from zcompile.ir.units import Bytes, KiB
from zcompile.machine.cost import Costs, TransferModes
from zcompile.machine.model import Compute, Link, Machine
from zcompile.planner import exchanges, simulator, step_plan
from zcompile.planner.simulator import SimulatedSteps
from zcompile.runtime.device.arena import Arena

THROTTLE = {"h2d": "200MB/s", "d2h": "200MB/s"}
"""So that all that moves shows: else what rests on the host is updated in place."""
ARENAS = {
    "everything": 8 * WEIGHT_BYTES,
    "half": 2 * WEIGHT_BYTES,
    "a third of the weights": WEIGHT_BYTES // 3 + 64 * KiB,
}
"""What entries may take of the device; what graphs hold comes on top."""


# Throttled, all that moves shows; elsewhere one batch is what every other test trains.
RUNS = {
    "disk": ("disk", 2),
    "throttled": ("throttled", 2),
    "host": ("host", 2),
    "throttled, one batch": ("throttled", 1),
}


@pytest.mark.parametrize(
    ("run", "share"),
    sampled_rows(product(RUNS, ARENAS), ("throttled, one batch", "a third of the weights")),
)
def test_a_planned_run_trains_bit_equal(tmp_path, run, share):
    (where, batches), arena = RUNS[run], ARENAS[share]
    fields: dict[str, object] = {"device_memory": Bytes(arena + held_bytes())}
    if where == "disk":
        fields |= {"disk": tmp_path, "host_memory": LITTLE_HOST}
    if where == "throttled":
        fields |= {"throttle": THROTTLE}
    model, compiled = offloaded(**fields)
    train(model, compiled, adamw(model), batches=batches)
    assert session_behind(model).controller.plan is not None
    assert same(model, expected(batches=batches))


def trained(model: nn.Module, forward, x: torch.Tensor) -> list[torch.Tensor]:
    """The parameters of a model after some steps with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        forward(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_a_run_whose_entries_changed_places_trains_bit_equal(monkeypatch):
    """All exchanges are kept, whatever is gained, as long as compute waits at all."""
    plan_at_given_costs(monkeypatch)
    torch.manual_seed(0)
    plain, x = nn.Sequential(*(nn.Linear(160, 160) for _ in range(4))), torch.randn(64, 160)
    tried, make = [], exchanges.with_homes

    def noted(*given):
        tried.append(make(*given))
        return tried[-1]

    monkeypatch.setattr(exchanges, "WAITS", 1 << 40)
    monkeypatch.setattr(exchanges, "GAINS", 0.0)
    monkeypatch.setattr(exchanges, "with_homes", noted)
    model = zcompile.offload(
        copy.deepcopy(plain),
        device="cpu",
        device_memory="1MiB",
        host_memory="64MiB",
        throttle=THROTTLE,
    )
    found = trained(model, torch.compile(model, backend="zinf"), x)
    assert tried
    assert session_behind(model).controller.plan is not None
    assert all(map(torch.equal, found, trained(plain, plain, x)))


class Turned(nn.Module):
    """Many activations, and one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.tanh(x @ self.weight)
        return x


def test_activations_that_are_waited_for_are_no_entries_of_a_plan():
    """What a call makes is numbered by itself, and may be more than there are entries."""
    torch.manual_seed(0)
    plain, x = Turned(), torch.randn(512, 64)
    model = zcompile.offload(
        copy.deepcopy(plain),
        device="cpu",
        device_memory="896KiB",
        host_memory="64MiB",
        activations="offload",
        throttle=THROTTLE,
    )
    found = trained(model, torch.compile(model, backend="zinf"), x)
    plan = session_behind(model).controller.plan
    assert plan is not None
    assert any(len(call.made) > len(call.entries) for call in plan.step.calls)
    assert all(map(torch.equal, found, trained(plain, plain, x)))


@pytest.mark.slow
def test_only_a_first_plan_streams_through_all_that_residents_leave(monkeypatch):
    """Entries that keep their addresses may leave holes that a later one needs to have room."""
    asked = []

    def noted(step, plan, *_):
        asked.append(plan)
        return plan

    monkeypatch.setattr(session_plan, "widened_or_not", noted)
    fields = {"device_memory": Bytes(ARENAS["half"] + held_bytes()), "throttle": THROTTLE}
    model, compiled = offloaded(**fields)
    train(model, compiled, adamw(model))
    controller = session_behind(model).controller
    first = len(asked)
    assert first > 0
    assert session_behind(model).homes.device.planned_bytes > 0
    controller.planned(controller._base)
    assert len(asked) == first


@pytest.mark.slow  # what goes wrong is tested by itself: test_a_view_that_inference_met_first_...
def test_a_step_may_be_planned_by_an_evaluation():
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, compiled = offloaded(device_memory="16MiB")
    optimizer = make(model)
    train(model, compiled, optimizer, 0, 2)
    with torch.inference_mode():
        loss_of(compiled, ids(0))
    assert session_behind(model).controller.plan is not None
    train(model, compiled, optimizer, 2, STEPS)
    assert same(model, expected(make))


@pytest.mark.parametrize("how", sampled(["fused", "foreach"], "fused"))
def test_with_room_for_everything_nothing_moves_after_the_warm_up(how):
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, **{how: True})

    model, compiled = offloaded(device_memory="16MiB", throttle=THROTTLE)
    optimizer = make(model)
    train(model, compiled, optimizer, 0, 3)
    zcompile.stats(model, reset=True)
    train(model, compiled, optimizer, 3, STEPS)
    stats = zcompile.stats(model)
    assert homes(model) == {"device"}
    assert stats["bytes"] == dict.fromkeys(("disk_read", "disk_write", "h2d", "d2h"), 0)
    if how == "fused":  # the results of list ops take spare room, which is not planned
        assert stats["peak"]["device"] == stats["planned_peak"]["device"]
    assert stats["gathers"] == 0
    assert same(model, expected(make))


@pytest.mark.parametrize("arena", sampled(ARENAS, "half"))
def test_the_peak_is_the_predicted_one(arena):
    budget = ARENAS[arena] + held_bytes()
    model, compiled, optimizer = begun(
        3, device_memory=Bytes(budget), throttle={"h2d": "200MB/s", "d2h": "200MB/s"}
    )
    zcompile.stats(model, reset=True)
    train(model, compiled, optimizer, 3, STEPS)
    stats = zcompile.stats(model)
    peak, predicted = stats["peak"], stats["predicted"]["peak"]
    for what in ("device", "activations", "together"):
        assert peak[what] == predicted[what]
    assert peak["together"] <= budget
    assert 0 < peak["activations"] <= peak["together"] <= peak["device"] + peak["activations"]
    assert stats["planned_peak"]["together"] >= peak["together"]


@pytest.mark.slow
def test_slots_are_taken_and_given_back_in_the_predicted_order(monkeypatch):
    """Clipping changes gradients between backward and the step; some of them on the device."""
    seen: list[tuple[str, int]] = []

    def note(owner, name, what, address_of):
        plain = getattr(owner, name)

        def noted(self, *args):
            seen.append((what, address_of(*args)))
            return plain(self, *args)

        monkeypatch.setattr(owner, name, noted)

    model, compiled, optimizer = begun(4, device_memory=Bytes(2 * WEIGHT_BYTES), throttle=THROTTLE)
    note(Arena, "take_slot", "take", lambda address, nbytes, name: address)
    note(Arena, "give_slot", "give", lambda address, nbytes: address)
    note(SimulatedSteps, "_take", "take", lambda slot: slot.address)
    note(SimulatedSteps, "_give_back", "give", lambda slot: slot.address)
    train(model, compiled, optimizer, 4, 5)
    walked = seen.copy()
    seen.clear()
    replan = session_behind(model).controller
    step, homes = replan.plan.step, replan.plan.placement.homes
    simulator.simulate(step, replan.costs(), homes)
    assert walked
    assert seen[-len(walked) :] == walked


@pytest.mark.slow  # the peak at half is above
def test_a_plan_in_which_nothing_rests_on_the_device_is_walked_as_planned(monkeypatch):
    """All of the arena is left to stream through, and fetches start as early as that allows."""
    windows = step_plan._windows

    def widest(*args):
        return [max(windows(*args), key=lambda pair: pair[0])]

    monkeypatch.setattr(step_plan, "_windows", widest)
    model, compiled, optimizer = begun(
        3, device_memory=Bytes(WEIGHT_BYTES // 2 + held_bytes()), throttle=THROTTLE
    )
    assert homes(model) == {"host"}
    zcompile.stats(model, reset=True)
    train(model, compiled, optimizer, 3, STEPS)
    stats = zcompile.stats(model)
    assert stats["peak"]["device"] == stats["predicted"]["peak"]["device"]
    assert same(model, expected())


@pytest.mark.slow  # tests/frontend/test_backend_foresight.py trains so
def test_without_residency_every_use_fetches():
    model, compiled = offloaded(device_memory="16MiB", residency=False)
    train(model, compiled, adamw(model))
    assert homes(model) == {"host"}
    assert same(model, expected())


@pytest.mark.slow  # test_replan_breaks.py has it twice
def test_an_eager_gather_that_needs_the_room_gets_it_and_training_goes_on():
    model, compiled, optimizer = begun(3, device_memory="16MiB")
    held = model.embed.weight.entry.nbytes
    session = session_behind(model)
    memory = session.arena.take(session.arena.budget_bytes - held, "a large value")
    assert homes(model) == {"host"}
    del memory
    train(model, compiled, optimizer, 3, STEPS)
    assert same(model, expected())


@pytest.mark.slow  # tests/e2e/test_narrow_traffic.py reads such
def test_gradients_can_be_read_kept_and_added_to_under_a_plan():
    model, compiled, _ = begun(3, device_memory="16MiB")
    plain = gpt()
    plain_optimizer = adamw(plain)
    train(plain, plain, plain_optimizer, 0, 3)
    kept, plain_kept = [], []
    for trained, forward, list_of in ((model, compiled, kept), (plain, plain, plain_kept)):
        for number in (7, 8):
            forward(ids(number)).sum().backward()
            list_of += [p.grad for p in trained.parameters()]
            trained.zero_grad()
    assert all(
        torch.equal(g.on_host() if hasattr(g, "on_host") else g, p)
        for g, p in zip(kept, plain_kept, strict=True)
    )


@pytest.mark.slow  # tests/checkpoint/test_durable.py resumes a compiled run
def test_a_checkpoint_of_a_planned_run_resumes_bit_equal(tmp_path):
    model, compiled, optimizer = begun(3, device_memory="16MiB")
    zcompile.save(tmp_path / "at-3", model, optimizer)
    zcompile.close(model)
    model, compiled = offloaded(device_memory="1MiB")
    optimizer = adamw(model)
    zcompile.resume(tmp_path / "at-3", model, optimizer)
    train(model, compiled, optimizer, 3, STEPS)
    assert same(model, expected())


@pytest.mark.slow
def test_states_loaded_later_are_planned_anew():
    model, compiled, optimizer = begun(3, device_memory="16MiB")
    state = optimizer.state_dict()
    optimizer = adamw(model)
    optimizer.load_state_dict(state)
    train(model, compiled, optimizer, 3, STEPS)
    assert same(model, expected())
    states = [v.entry for s in optimizer.state.values() for v in s.values() if hasattr(v, "entry")]
    assert {entry.home for entry in states} == {"device"}
    plan = session_behind(model).controller.plan
    alive = {entry.ref for entry in session_behind(model).entries()}
    assert {ref.owner for ref in plan.placement.homes} <= alive, "the dead have no berths"


@pytest.mark.slow
def test_a_plan_of_another_model_in_the_process_changes_nothing_here():
    model, compiled = offloaded(device_memory="16MiB")
    other = zcompile.offload(gpt(), device="cpu", device_memory="1MiB", host_memory="64MiB")
    optimizers = adamw(model), adamw(other)
    train(model, compiled, optimizers[0])
    train(other, other, optimizers[1])
    assert same(model, expected())
    assert same(other, expected())


@pytest.mark.slow
def test_evaluation_between_steps_uses_what_rests_on_the_device():
    model, compiled, optimizer = begun(3, device_memory="16MiB")
    with torch.no_grad():
        compiled(ids(1))
        zcompile.stats(model, reset=True)
        compiled(ids(2))
    assert zcompile.stats(model)["bytes"]["h2d"] == 0
    train(model, compiled, optimizer, 3, STEPS)
    assert same(model, expected())


@pytest.mark.slow
def test_an_evaluation_that_is_compiled_under_a_plan_does_not_plan_beyond_the_budget():
    model, compiled, _ = begun(4, device_memory=Bytes(2 * WEIGHT_BYTES))
    with torch.no_grad():
        compiled(ids(3))
    assert zcompile.stats(model)["planned_peak"]["device"] <= 2 * WEIGHT_BYTES


@pytest.mark.slow
def test_the_timeline_of_a_step_in_which_nothing_moves_can_be_read(tmp_path, capsys):
    model, compiled = offloaded(device_memory="16MiB", dump=tmp_path)
    train(model, compiled, adamw(model), 0, 6)
    assert main(["timeline", str(tmp_path)]) == 0
    assert "stall" in capsys.readouterr().out


COSTS = Costs(
    Machine(
        "given",
        {},
        {name: Link(name, 1e7) for name in ("h2d", "d2h")},
        Compute({"float32": 1e10}, 4e9),
    ),
    TransferModes(straight_read=True),
)
"""Links that are slow beside compute, so that what moves decides which plan is better."""


def steps_planned(monkeypatch, caplog, first_window):
    """What a run says of its plans, at costs that are given: nothing of them is measured. The first
    leaves at least `first_window` of the arena."""
    plan, windows = session_plan.plan_step, []

    def noted(step, machine, room, arena, *rest, **more):
        least = min(first_window, room.nbytes["device"]) if not windows else arena.window_bytes
        made = plan(step, machine, room, replace(arena, window_bytes=least), *rest, **more)
        windows.append(made.arena.window_bytes)
        return made

    monkeypatch.setattr(session_plan, "plan_step", noted)
    monkeypatch.setattr(replan, "costs_of", lambda session: COSTS)
    monkeypatch.setattr(replan, "perf_counter", lambda: 0.0)  # planning takes no time
    with caplog.at_level("INFO", "zcompile.frontend.replan"):
        model, _, _ = begun(
            9,
            device_memory=Bytes(2 * WEIGHT_BYTES + held_bytes()),
            throttle={"h2d": "10MB/s", "d2h": "10MB/s"},
        )
    return model, windows, [r.message for r in caplog.records if "costs have changed" in r.message]


def test_a_run_is_planned_anew_where_that_pays_and_says_so(monkeypatch, caplog):
    model, windows, said = steps_planned(monkeypatch, caplog, first_window=1 << 40)
    assert len(said) == 1
    assert session_behind(model).controller.plan.arena.window_bytes == windows[1] < windows[0]
    assert same(model, expected(end=9))


@pytest.mark.slow
def test_a_plan_that_is_as_good_as_another_stays(monkeypatch, caplog):
    model, windows, said = steps_planned(monkeypatch, caplog, first_window=0)
    assert len(windows) > 1, "it was looked at again"
    assert not said
    assert session_behind(model).controller.plan.arena.window_bytes == windows[0]


@pytest.mark.slow  # tests/runtime/test_data_assignment.py, unplanned
def test_a_write_to_memory_that_a_resting_parameter_was_taken_from_is_told():
    """What compute reads where it rests is asked about as what is fetched is."""
    model, compiled, optimizer = begun(4)
    assert homes(model) == {"device"}
    vector = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(vector, model.parameters())
    assert homes(model) == {"device"}
    train(model, compiled, optimizer, 4, 5)
    vector_to_parameters(vector, model.parameters())
    vector.zero_()
    with pytest.raises(ParameterChanged, match="written since"):
        loss_of(compiled, ids(5))
